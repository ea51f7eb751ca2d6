"""Table of our encoders in transformers."""

import itertools

from antlm_jax.hf.architecture import Architecture, Target
from antlm_jax.hf.bert import BERT
from antlm_jax.hf.gemma import GEMMA
from antlm_jax.hf.llama import LLAMA
from antlm_jax.hf.ltg_bert import LTG_BERT
from antlm_jax.hf.modernbert import MODERNBERT
from antlm_jax.hf.ultrabert import ULTRABERT

ARCHITECTURES = {
  "llama": LLAMA,
  "gemma": GEMMA,
  "ltg_bert": LTG_BERT,
  "modernbert": MODERNBERT,
  "bert": BERT,
  "ultrabert": ULTRABERT,
}

# Known encoders that none of ours computes, and the reasons.
_LACKING = {
  "lfm2": "most of its layers are short convolutions, not attention",
  "neobert": (
    "it has llama's blocks, but a bias in the output layer; its code rotates"
    " neighbouring channels, but code of others with this model_type rotates"
    " halves, and config.json does not tell which"
  ),
}


def of_model_type(model_type: object) -> tuple[str, Architecture, Target]:
  """Returns the encoder, architecture and target of a model_type.

  Raises a ValueError for an unknown model_type.
  """
  encoders = {
    target.model_type: (name, architecture, target)
    for name, architecture in ARCHITECTURES.items()
    for target in itertools.chain(*architecture.targets.values())
  }
  name = model_type if isinstance(model_type, str) else ""
  if name in _LACKING:
    raise ValueError(f"antlm_jax has no encoder for {name}: {_LACKING[name]}")
  if name not in encoders:
    raise ValueError(
      f"model_type={model_type!r} is not one of {', '.join(encoders)}"
    )
  return encoders[model_type]
