"""Scores of minimal pairs, ours compared with lm-eval's and minicons'.

From text to sums of log-probabilities, in batches of 32 texts for the peers.
`anew` includes our compilation, which a command that scores once pays.
"""

import pathlib
from collections.abc import Iterator

import jax
import numpy as np
import tokenizers

from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.evals.benchmarks.beside import models
from antlm_jax.evals.benchmarks.turns import TimedCase
from antlm_jax.inference import pairs, programs
from antlm_jax.inference.scoring import score

_BATCH = 32
_MASKED = 20  # every 20th sentence is scored masked, which is slow


def scoring_cases(
  folder: pathlib.Path, size: str, path: str, limit: int
) -> Iterator[TimedCase]:
  """Yields the cases of a folder of pairs, at most `limit` of each file."""
  items = pairs.read_minimal_pairs(path, limit)
  texts = [choice.text for item in items for choice in item.choices]
  texts = list(dict.fromkeys(texts))  # ours scores equal texts once
  loaded = models.make_benchmark_model(
    size, Tokenizer.train(texts, models.vocab_size(size)), folder
  )
  causal, export = models.in_transformers(loaded, "causal", folder)
  masked, _ = models.in_transformers(loaded, "bidirectional", folder)
  for mode, peer, chosen, theirs in (
    ("causal", "lm-eval", texts, _lm_eval(causal, export)),
    ("causal", "minicons", texts, _minicons(causal, export, "causal")),
    ("mlm", "minicons", texts[::_MASKED], _minicons(masked, export, "mlm")),
  ):
    for name, before in (("", None), (" anew", _forget)):
      yield TimedCase(
        f"score {mode} {size}{name}",
        peer,
        lambda mode=mode, chosen=chosen: score(loaded, chosen, mode),
        lambda theirs=theirs, chosen=chosen: np.array(theirs(chosen)),
        work=len(chosen),
        unit="texts",
        same=models.alike,
        before=before,
      )


def _forget() -> None:
  programs.compiled.cache_clear()
  jax.clear_caches()


def _lm_eval(model, path: pathlib.Path):
  transformers, _ = models.torch_modules()
  from lm_eval.api.instance import Instance
  from lm_eval.models.huggingface import HFLM

  tokenizer = transformers.AutoTokenizer.from_pretrained(path)
  peer = HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=_BATCH)

  def call(texts):
    requests = [
      Instance("loglikelihood", {}, ("", text), n)
      for n, text in enumerate(texts)
    ]
    return [
      total for total, _ in peer.loglikelihood(requests, disable_tqdm=True)
    ]

  return call


def minicons_scorer(model, path: pathlib.Path, mode: str):
  """Returns minicons' scorer of an exported model; causally it adds <s>."""
  transformers, _ = models.torch_modules()
  from minicons import scorer

  class WithOldMethod(transformers.PreTrainedTokenizerFast):
    """With the method that minicons calls and transformers 5 has dropped."""

    def batch_encode_plus(self, *args, **options):
      return self(*args, **options)

  tokenizer = WithOldMethod.from_pretrained(path)
  # minicons writes their names into texts, which an export reads as text.
  ends = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
  tokenizer.add_special_tokens(ends)
  if mode == "mlm":
    return scorer.MaskedLMScorer(model.eval(), "cpu", tokenizer=tokenizer)
  bare = tokenizers.processors.TemplateProcessing("$A", special_tokens=[])
  tokenizer.backend_tokenizer.post_processor = bare
  return scorer.IncrementalLMScorer(model.eval(), "cpu", tokenizer=tokenizer)


def _minicons(model, path: pathlib.Path, mode: str):
  peer = minicons_scorer(model, path, mode)
  options = {"bos_token": True} if mode == "causal" else {}

  def call(texts):
    scores = []
    for start in range(0, len(texts), _BATCH):
      scores += peer.sequence_score(
        texts[start : start + _BATCH],
        reduction=lambda x: x.sum().item(),
        **options,
      )
    return scores

  return call
