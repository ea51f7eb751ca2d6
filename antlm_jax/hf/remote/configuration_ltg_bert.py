# SPDX-License-Identifier: Apache-2.0
"""The shape of an LTG-BERT encoder, and how its outputs are read."""

import functools
import math

from transformers import PretrainedConfig

POOLINGS = ("first", "last", "mean")


class LtgBertConfig(PretrainedConfig):
  """Configuration of LTG-BERT (arXiv 2303.09859) and GPT-BERT (2410.24159).

  Args:
    vocab_size: Number of tokens V.
    hidden_size: Hidden width D.
    num_hidden_layers: Number of blocks L.
    num_attention_heads: Attention heads N; D is a multiple of it.
    intermediate_size: Inner width of the gated MLP.
    max_position_embeddings: Longest row of pretraining, in tokens. Positions
      are relative, so that longer ones can be read.
    position_buckets: Buckets of distances in each direction, the 0 in each.
    longest_distance: Distances from this minus 1 on share the last bucket.
    layer_norm_eps: Added to the variance in norms.
    hidden_dropout_prob: Share of embeddings and of sublayer outputs dropped
      in training.
    attention_probs_dropout_prob: Share of attention weights dropped.
    attention_gate: Multiply attention's output by a gate, and norm it before
      the output projection rather than after it (GPT-BERT).
    depth_weights: Give each sublayer a learnt weighted sum of all outputs
      before it (GPT-BERT).
    is_decoder: Whether the plain encoder and the classifiers read causally.
      The models with a language modeling head each know their own way.
    mask_shift: 0 if a masked token is predicted in place, 1 if one position
      before it, as in masked next-token prediction (arXiv 2410.24159).
    classifier_pooling: What classifies a text: the vector of its `first`
      token, of its `last`, or their `mean`.
    classifier_norms: Whether the classifier of texts norms its vector before
      and after its hidden layer.
    classifier_dropout: Dropout before a classifier's last layer; None for
      `hidden_dropout_prob`.
    initializer_range: Standard deviation of the initial weights, before they
      are cut at two deviations; None for sqrt(2 / 5D).
    pad_token_id: The id of padding, as below, or None.
    bos_token_id: That of the first token of a text.
    eos_token_id: That of the last.
    mask_token_id: That of the mask.
    tie_word_embeddings: Always so: the head has no embeddings of its own.
    **kwargs: What every configuration of transformers has.

  Raises:
    ValueError: if these do not fit together.
  """

  model_type = "ltg_bert"

  def __init__(
    self,
    vocab_size=16_384,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    intermediate_size=2048,
    max_position_embeddings=512,
    position_buckets=32,
    longest_distance=512,
    layer_norm_eps=1e-7,
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
    attention_gate=False,
    depth_weights=False,
    is_decoder=False,
    mask_shift=0,
    classifier_pooling="first",
    classifier_norms=True,
    classifier_dropout=None,
    initializer_range=None,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    mask_token_id=None,
    tie_word_embeddings=True,
    **kwargs,
  ):
    # First, since before transformers 5 this sets some of what follows.
    super().__init__(**kwargs)
    self.vocab_size = vocab_size
    self.hidden_size = hidden_size
    self.num_hidden_layers = num_hidden_layers
    self.num_attention_heads = num_attention_heads
    self.intermediate_size = intermediate_size
    self.max_position_embeddings = max_position_embeddings
    self.position_buckets = position_buckets
    self.longest_distance = longest_distance
    self.layer_norm_eps = layer_norm_eps
    self.hidden_dropout_prob = hidden_dropout_prob
    self.attention_probs_dropout_prob = attention_probs_dropout_prob
    self.attention_gate = attention_gate
    self.depth_weights = depth_weights
    self.is_decoder = is_decoder
    self.mask_shift = mask_shift
    self.classifier_pooling = classifier_pooling
    self.classifier_norms = classifier_norms
    self.classifier_dropout = classifier_dropout
    if initializer_range is None:
      initializer_range = math.sqrt(2 / (5 * hidden_size))
    self.initializer_range = initializer_range
    self.pad_token_id = pad_token_id
    self.bos_token_id = bos_token_id
    self.eos_token_id = eos_token_id
    self.mask_token_id = mask_token_id
    self.tie_word_embeddings = tie_word_embeddings
    self._check()

  def _check(self):
    for right, expected in (
      (
        self.hidden_size % self.num_attention_heads == 0,
        "hidden_size a multiple of num_attention_heads",
      ),
      (
        self.position_buckets >= 4 and self.position_buckets % 2 == 0,
        "position_buckets even and at least 4",
      ),
      (
        self.longest_distance > self.position_buckets,
        "longest_distance over position_buckets",
      ),
      (
        self.mask_shift == 0
        or (self.mask_shift == 1 and self.mask_token_id is not None),
        "mask_shift 0, or 1 and a mask_token_id",
      ),
      (
        self.classifier_pooling in POOLINGS,
        f"classifier_pooling one of {', '.join(POOLINGS)}",
      ),
      (self.tie_word_embeddings, "tie_word_embeddings true"),
    ):
      if not right:
        raise ValueError(f"LTG-BERT needs {expected}")

  @property
  def head_width(self):
    """Width H of a head."""
    return self.hidden_size // self.num_attention_heads

  @property
  def distance_edges(self):
    """Where the C buckets of distances begin, but for the first: C - 1."""
    return _log_edges(self.position_buckets, self.longest_distance)


@functools.lru_cache
def _log_edges(size, longest):
  """Returns the distances at which a new bucket begins, ascending.

  Up to size / 2 every distance has a bucket of its own, further ones share
  them by their logarithm, and all from `longest` - 1 on share the last. The
  buckets of negative distances mirror those of the positive ones, and none is
  empty.
  """
  middle, last = size // 2, longest - 1

  def bucket(distance):
    if distance <= middle:
      return distance
    share = math.log(distance / middle) / math.log(last / middle)
    return middle + math.ceil(share * (middle - 1))

  begins = [d for d in range(1, longest) if bucket(d) > bucket(d - 1)]
  return (*(1 - d for d in reversed(begins)), *begins)


# So that save_pretrained writes this code beside the configuration.
LtgBertConfig.register_for_auto_class()
