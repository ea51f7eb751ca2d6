# SPDX-License-Identifier: Apache-2.0
"""Masked language models that transformers lacks.

A EuroBERT may normalize queries and keys, as Qwen3 does (`qk_norm` in
config.json). EuroBERT and Gemma 3 may predict a masked token one position
before it (`mask_shift`). Such a EuroBERT has another model type, because
transformers' EuroBERT would compute something else.
"""

import functools

from transformers import (
  EuroBertConfig,
  EuroBertForMaskedLM,
  EuroBertForSequenceClassification,
  EuroBertForTokenClassification,
  EuroBertModel,
  Gemma3ForCausalLM,
)
from transformers.utils import can_return_tuple

from .masked_prediction import at_masks, find_masks, next_labels


class _Masked:
  """Predicts masked tokens."""

  @can_return_tuple
  def forward(
    self, input_ids=None, attention_mask=None, labels=None, **options
  ):
    """Predicts the token at each mask; see `masked_prediction`.

    Args:
      input_ids: Token ids `[B, T]`.
      attention_mask: As in the base model.
      labels: Token at each position, `[B, T]`; -100 does not count.
      **options: As in the base model.

    Returns:
      Logits `[B, T, V]`, and the mean loss if there are labels.
    """
    shifted = getattr(self.config, "mask_shift", 0)
    if shifted and labels is not None:
      labels = next_labels(labels)
    output = super().forward(
      input_ids, attention_mask, labels=labels, **options, return_dict=True
    )
    if shifted:
      masks = find_masks(self, input_ids, options.get("inputs_embeds"))
      output.logits = at_masks(output.logits, masks)
    return output


class Gemma3ForMaskedLM(_Masked, Gemma3ForCausalLM):
  """Predicts masked tokens; its config sets bidirectional attention."""


class EuroBertPlusConfig(EuroBertConfig):
  """Configuration of a EuroBERT with `qk_norm` and `mask_shift`."""

  model_type = "eurobert_plus"


def _normed(norm, linear, inputs, heads):
  """Normalizes each head of a projection's output `[B, T, N H]`."""
  by_head = heads.unflatten(-1, (-1, norm.weight.shape[0]))
  return norm(by_head).flatten(-2)


class _Norms:
  """Adds norms of queries and keys to each layer if `qk_norm` is true."""

  config_class = EuroBertPlusConfig

  def __init__(self, config):
    super().__init__(config)
    if not getattr(config, "qk_norm", False):
      return
    for layer in self.base_model.layers:
      attention, kind = layer.self_attn, type(layer.input_layernorm)
      for name in "qk":
        norm = kind(attention.head_dim, config.rms_norm_eps)
        setattr(attention, f"{name}_norm", norm)
        linear = getattr(attention, f"{name}_proj")
        linear.register_forward_hook(functools.partial(_normed, norm))


class EuroBertPlusModel(_Norms, EuroBertModel):
  """The encoder."""


class EuroBertPlusForMaskedLM(_Masked, _Norms, EuroBertForMaskedLM):
  """Predicts masked tokens."""


class EuroBertPlusForSequenceClassification(
  _Norms, EuroBertForSequenceClassification
):
  """Classifies texts."""


class EuroBertPlusForTokenClassification(
  _Norms, EuroBertForTokenClassification
):
  """Classifies each token."""


# Makes save_pretrained copy this code.
EuroBertPlusConfig.register_for_auto_class()
EuroBertPlusModel.register_for_auto_class("AutoModel")
Gemma3ForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
for _task in (
  EuroBertPlusForMaskedLM,
  EuroBertPlusForSequenceClassification,
  EuroBertPlusForTokenClassification,
):
  _task.register_for_auto_class(
    _task.__name__.replace("EuroBertPlus", "AutoModel")
  )
