"""What the encoders share: common settings, and how stacked blocks run."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from antlm_jax import attention
from antlm_jax.errors import UserError
from antlm_jax.masks import AttentionMask
from antlm_jax.models import layers
from antlm_jax.runtime import sharding

REMAT_POLICIES = {
  "none": None,
  "block": jax.checkpoint_policies.nothing_saveable,
  "dots": jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(attention.SAVED),
  ),
}


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
  """The settings that every encoder has.

  Attributes:
    vocab_size: Number of tokens V.
    layers: Number of blocks L.
    width: Hidden width D.
    heads: Query heads N.
    mlp_width: Inner width F of the gated MLP.
    max_seq_len: Longest row the model is made for, in tokens.
    norm_eps: Added to the mean square in norms.
    dropout: Share of embeddings and of sublayer outputs dropped in training.
    attention_dropout: Share of attention weights dropped in training.
    attention: What computes attention: auto, or a name of
      `antlm_jax.attention.IMPLEMENTATIONS`.
    dtype: What is computed in; parameters, softmax and loss stay float32.
    scan_layers: Run the blocks as a loop (compiles fast): yes, no (unrolled),
      or auto: no on CPU, where a loop costs speed, yes elsewhere.
    remat: none, dots or block: what the backward pass recomputes.
  """

  vocab_size: int
  layers: int = 12
  width: int = 768
  heads: int = 12
  mlp_width: int = 2048
  max_seq_len: int = 2048
  norm_eps: float = 1e-5
  dropout: float = 0.0
  attention_dropout: float = 0.0
  attention: str = "auto"
  dtype: str = "float32"
  scan_layers: str = "auto"
  remat: str = "none"

  buckets = 0  # of the scores' position terms; none

  def __post_init__(self):
    for name in ("layers", "width", "heads", "kv_heads", "mlp_width"):
      if getattr(self, name) < 1:
        raise UserError(f"model.{name}={getattr(self, name)} is not positive")
    for name in ("dropout", "attention_dropout"):
      if not 0 <= getattr(self, name) < 1:
        raise UserError(f"model.{name}={getattr(self, name)} is not in [0, 1)")
    for name, choices in (
      ("remat", REMAT_POLICIES),
      ("scan_layers", ("auto", "yes", "no")),
      ("attention", ("auto", *attention.IMPLEMENTATIONS)),
      ("dtype", ("float32", "bfloat16")),
    ):
      if getattr(self, name) not in choices:
        raise UserError(
          f"model.{name}={getattr(self, name)!r} is not one of"
          f" {', '.join(choices)}"
        )


def prepare_mask(
  config: EncoderConfig,
  mask: AttentionMask,
  rows: int,
  length: int,
  *,
  training: bool,
) -> attention.Prepared:
  """Makes a mask ready, once, for the attention of all layers.

  Args:
    config: The encoder's.
    mask: The mask.
    rows: Rows of the batch B.
    length: Tokens of a row T.
    training: Whether attention weights may be dropped.
  """

  def like(heads):
    shape = (rows, length, heads, config.head_width)
    return jax.ShapeDtypeStruct(shape, config.dtype)

  return attention.prepare(
    mask,
    like(config.heads),
    like(config.kv_heads),
    config.attention,
    dropout=training and config.attention_dropout > 0,
    buckets=config.buckets,
  )


# Hidden states `[..., D]`, and in training where they stand, to `[..., V]`.
LogitsOf = Callable[[jax.Array, layers.At | None], jax.Array]


def table(embedding: nnx.Param) -> jax.Array:
  """Returns the embeddings, float32 `[V, D]`, as rows meet them.

  To be cast after a lookup or in a product, not before: gradients of the same
  token, and of many chunks, are then added up in float32.
  """
  return sharding.gathered(embedding[...], "vocab", "embed")


def begin(
  config: EncoderConfig,
  x: jax.Array,
  mask: AttentionMask,
  dropout_key: jax.Array | None,
):
  """Makes the first block's input, and what all blocks share.

  Args:
    config: The encoder's.
    x: Embeddings `[B, T, D]`.
    mask: Which keys each position sees.
    dropout_key: Given in training, or None.

  Returns:
    x after dropout, the mask made ready, and a dropout key for each block
    `[L]`, or None where nothing is dropped.
  """
  keys = None
  if dropout_key is not None and (config.dropout or config.attention_dropout):
    first, rest = jax.random.split(dropout_key)
    x = layers.dropout(x, config.dropout, first)
    keys = jax.random.split(rest, config.layers)
  ready = prepare_mask(config, mask, *x.shape[:2], training=keys is not None)
  return sharding.constrain(x, "batch", "seq", "embed_act"), ready, keys


def stack(make_block, rngs: nnx.Rngs, count: int) -> nnx.Module:
  """Makes blocks as one, each parameter with a leading layer axis.

  Args:
    make_block: Makes one, of `(rngs, index)`.
    rngs: Where their parameters are drawn from.
    count: Number of blocks.
  """
  keys = jax.random.split(rngs.params(), count)
  make = lambda key, i: make_block(nnx.Rngs(params=key), i)  # noqa: E731
  return jax.vmap(make)(keys, jnp.arange(count))


def run_blocks(config: EncoderConfig, blocks, step, x: jax.Array, keys):
  """Runs `x = step(block, x, key)` over stacked blocks.

  Args:
    config: The encoder's: scan_layers and remat say how they run.
    blocks: A module from `stack`.
    step: The function of one block.
    x: The first block's input.
    keys: Dropout keys `[L]`, or None.
  """
  step = rematerialized(config, step)
  if config.scan_layers == "yes" or (
    config.scan_layers == "auto" and sharding.device().platform != "cpu"
  ):
    body = lambda x, layer: (step(layer[0], x, layer[1]), None)  # noqa: E731
    return jax.lax.scan(body, x, (blocks, keys))[0]
  for layer, key in unstack((blocks, keys)):
    x = step(layer, x, key)
  return x


def rematerialized(config: EncoderConfig, step):
  """Makes the backward pass recompute of a step what `remat` says."""
  if config.remat == "none":
    return step
  return jax.checkpoint(step, policy=REMAT_POLICIES[config.remat])


def unstack(tree):
  """Splits every leaf along its leading axis; yields one tree per index.

  Differentiates into one concatenation, where indexing would add up a whole
  stack of zeros per layer.
  """
  leaves, treedef = jax.tree.flatten(tree)
  split = [jax.lax.split(leaf, [1] * leaf.shape[0]) for leaf in leaves]
  for parts in zip(*split, strict=True):
    yield treedef.unflatten([part[0] for part in parts])
