# SPDX-License-Identifier: Apache-2.0
"""Configuration of an LTG-BERT encoder and of its heads."""

import functools
import math

from transformers import PretrainedConfig

POOLINGS = ("first", "last", "mean")
_DEFAULTS = {
  "vocab_size": 16_384,  # number of tokens V
  "hidden_size": 768,  # hidden width D
  "num_hidden_layers": 12,  # number of blocks L
  "num_attention_heads": 12,  # attention heads N, which divide D
  "intermediate_size": 2048,  # inner width of the gated MLP
  # Longest row of pretraining, in tokens. Positions are relative, so the model
  # also reads longer rows.
  "max_position_embeddings": 512,
  "position_buckets": 32,  # number of distance buckets in each direction
  "longest_distance": 512,  # the last bucket begins at this distance minus 1
  "layer_norm_eps": 1e-7,  # added to the variance in norms
  # Dropout rate of embeddings and of sublayer outputs.
  "hidden_dropout_prob": 0.1,
  "attention_probs_dropout_prob": 0.1,  # dropout rate of attention weights
  # Multiply attention's output by a gate, and normalize it before the output
  # projection, not after it (GPT-BERT).
  "attention_gate": False,
  # Feed each sublayer a learned weighted sum of earlier outputs (GPT-BERT).
  "depth_weights": False,
  # Whether the plain encoder and the classifiers have causal attention. The
  # language models ignore it.
  "is_decoder": False,
  # 0 to predict a masked token at the mask, 1 to predict it one position before
  # the mask (masked next-token prediction, arXiv 2410.24159).
  "mask_shift": 0,
  # Vector that classifies a text: the `first`, the `last`, or the `mean`.
  "classifier_pooling": "first",
  # Normalize that vector before and after the classifier's hidden layer.
  "classifier_norms": True,
  # Dropout before a classifier's last layer; None for `hidden_dropout_prob`.
  "classifier_dropout": None,
  # Standard deviation of initial weights, before truncation at two deviations;
  # None for sqrt(2 / 5D).
  "initializer_range": None,
  "pad_token_id": None,
  "bos_token_id": None,
  "eos_token_id": None,
  "mask_token_id": None,
  "tie_word_embeddings": True,  # always: the head uses the embeddings
}


class LtgBertConfig(PretrainedConfig):
  """Configuration of LTG-BERT (arXiv 2303.09859) and GPT-BERT (2410.24159).

  Args:
    **kwargs: Fields of `_DEFAULTS` and of every configuration of transformers.

  Raises:
    ValueError: The fields contradict each other.
  """

  model_type = "ltg_bert"

  def __init__(self, **kwargs):
    own = {name: kwargs.pop(name, _DEFAULTS[name]) for name in _DEFAULTS}
    # Call it first, because it sets some fields before transformers 5.
    super().__init__(**kwargs)
    if own["initializer_range"] is None:
      own["initializer_range"] = math.sqrt(2 / (5 * own["hidden_size"]))
    for name, value in own.items():
      setattr(self, name, value)
    shifted = self.mask_shift == 1 and self.mask_token_id is not None
    buckets = self.position_buckets
    for expected, right in {
      "hidden_size a multiple of num_attention_heads": (
        self.hidden_size % self.num_attention_heads == 0
      ),
      "position_buckets even and at least 4": buckets >= 4 and buckets % 2 == 0,
      "longest_distance over position_buckets": self.longest_distance > buckets,
      "mask_shift 0, or 1 and a mask_token_id": shifted or self.mask_shift == 0,
      f"classifier_pooling one of {', '.join(POOLINGS)}": (
        self.classifier_pooling in POOLINGS
      ),
      "tie_word_embeddings true": self.tie_word_embeddings,
    }.items():
      if not right:
        raise ValueError(f"LTG-BERT needs {expected}")

  @property
  def head_width(self):
    """Head width H."""
    return self.hidden_size // self.num_attention_heads

  @property
  def distance_edges(self):
    """First distance of each of the C buckets except the first."""
    return _log_edges(self.position_buckets, self.longest_distance)


@functools.lru_cache
def _log_edges(size, longest):
  """Returns the distances at which a new bucket begins, ascending.

  Each distance up to size / 2 is a bucket. Larger distances share logarithmic
  buckets, and all distances from `longest` - 1 on share the last bucket.
  Negative distances mirror positive distances. No bucket is empty.
  """
  middle, last = size // 2, longest - 1

  def bucket(distance):
    if distance <= middle:
      return distance
    share = math.log(distance / middle) / math.log(last / middle)
    return middle + math.ceil(share * (middle - 1))

  begins = [d for d in range(1, longest) if bucket(d) > bucket(d - 1)]
  return (*(1 - d for d in reversed(begins)), *begins)


# Makes save_pretrained copy this code.
LtgBertConfig.register_for_auto_class()
