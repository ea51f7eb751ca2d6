"""Interface of encoders, and their shared parts.

A new encoder is one file. It has a subclass of `EncoderConfig`, registered by
name in `ENCODERS`, and a subclass of `Encoder`. Losses, sharding, checkpoints
and scoring use the parameters' paths, the logical axes and these settings.
"""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from antlm_jax import attention, settings
from antlm_jax import mesh as mesh_lib
from antlm_jax.errors import UserError
from antlm_jax.masks import AttentionMask
from antlm_jax.models import layers
from antlm_jax.settings import setting


def _save_products(primitive, *shapes, **parameters) -> bool:
  """Remat policy that saves results of matrix products and of attention."""
  policies = jax.checkpoint_policies
  kernels = policies.save_only_these_names(attention.SAVED)
  return (
    policies.dots_with_no_batch_dims_saveable(primitive, *shapes, **parameters)
    or kernels(primitive, *shapes, **parameters)
    or primitive.name.startswith("dot_product_attention_fwd")  # cuDNN
    or primitive.name == "remat_opt"  # tokamax
  )


REMAT_POLICIES = {
  "none": None,
  "block": jax.checkpoint_policies.nothing_saveable,
  "dots": _save_products,
}
_WIDEST = 2**20  # a larger width is a typing error
ENCODERS = settings.Registry("model", "name")


@dataclasses.dataclass(frozen=True)
class EncoderConfig(settings.Section):
  """Settings that all encoders share.

  FLOP counts, plans and attention read `kv_heads`, `head_dim`, `buckets` and
  `windows`. A subclass may declare these as settings or compute them.
  """

  group = "model"

  vocab_size: int = 0  # number of tokens V, which the tokenizer sets
  layers: int = setting(12, "Number of blocks L", least=1, most=1000)
  width: int = setting(768, "Hidden width D", least=1, most=_WIDEST)
  heads: int = setting(12, "Number of query heads N", least=1, most=_WIDEST)
  mlp_width: int = setting(2048, "Inner MLP width F", least=1, most=_WIDEST)
  max_seq_len: int = setting(2048, "Longest row, in tokens", least=1)
  norm_eps: float = setting(
    1e-5, "Term added to variances in norms", least=0, most=1
  )
  dropout: float = setting(
    0.0, "Dropout rate of embeddings and sublayer outputs", least=0, under=1
  )
  attention_dropout: float = setting(
    0.0, "Dropout rate of attention weights", least=0, under=1
  )
  attention: str = setting(
    "auto",
    "Implementation of attention",
    # A view, since a plugin may add a backend.
    choices=collections.ChainMap(attention.BACKENDS, {"auto": None}),
  )
  # Off until a GPU has run them: launch/gpu_check.sh compares their results.
  fused_layers: bool = setting(
    False, "Let GPUs compute norms and gated MLPs by kernels, in bfloat16"
  )
  # Parameters, softmax and loss stay float32.
  dtype: str = setting(
    "float32", "Dtype of computations", choices=("float32", "bfloat16")
  )
  # A loop compiles faster but runs slower, because it copies each layer's saved
  # activations into stacked arrays and back. So "auto" loops only if hardly any
  # activation is saved (remat="block"), and never on CPU.
  scan_layers: str = setting(
    "auto", "Run the blocks as a loop", choices=("auto", "yes", "no")
  )
  remat: str = setting(
    "none",
    "Activations that the backward pass recomputes",
    choices=tuple(REMAT_POLICIES),
  )

  buckets = 0  # number of buckets of position terms; 0 without such terms
  head_width = 0  # head width H; 0 for width / heads
  windows = ()  # window of each layer, repeated; 0 for no window

  def __post_init__(self):
    super().__post_init__()
    if self.windows:  # the shortest pattern, so that equal windows are equal
      windows = pattern(self.layer_windows)
      object.__setattr__(self, "windows", windows if any(windows) else ())
    if not self.head_width and self.width % self.heads:
      hint = "; set model.head_width" if "head_width" in vars(self) else ""
      raise UserError(
        f"model.width={self.width} is not a multiple of"
        f" model.heads={self.heads}{hint}"
      )

  @property
  def kv_heads(self) -> int:
    """Number of key/value heads K; by default equal to `heads`."""
    return self.heads

  @property
  def head_dim(self) -> int:
    """Width H of a head."""
    return self.head_width or self.width // self.heads

  @property
  def loops(self) -> bool:
    """Whether the blocks run as a loop on this process's devices."""
    if self.scan_layers == "auto":
      return self.remat == "block" and attention.device().platform != "cpu"
    return self.scan_layers == "yes"

  def module(self, rngs: nnx.Rngs) -> "Encoder":
    """Builds the encoder and draws its initial parameters from `rngs`."""
    raise UserError(f"{type(self).__name__} has no module(rngs): define it")

  def windows_in(self, length: int) -> tuple[int, ...]:
    """Returns each layer's window in rows of T tokens: T if it has none."""
    return tuple(min(w or length, length) for w in self.layer_windows)

  @property
  def layer_windows(self) -> tuple[int, ...]:
    """Window of each layer; 0 for no window."""
    pattern = self.windows or (0,)
    return tuple(pattern[i % len(pattern)] for i in range(self.layers))


@dataclasses.dataclass(frozen=True)
class Head:
  """Output layer that computes `transform(hidden, places) @ kernel + bias`.

  The loss uses its parts directly, so it never holds all scores in memory.
  """

  kernel: jax.Array  # float32 `[D, V]`, gathered over the mesh
  bias: jax.Array | None = None  # float32 `[V]`
  # Maps hidden states `[..., D]` to `[..., D]`. In training it also gets their
  # places, for dropout.
  transform: Callable[[jax.Array, layers.DropoutPlaces | None], jax.Array] = (
    lambda hidden, places: hidden
  )

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Returns scores, float32 `[..., V]`; see `Model.logits`."""
    states = self.transform(hidden, None)
    kernel = self.kernel.astype(states.dtype)
    logits = jnp.matmul(states, kernel, preferred_element_type=jnp.float32)
    return logits if self.bias is None else logits + self.bias


class Encoder(nnx.Module):
  """Base class of encoders.

  Declare each parameter with `nnx.Param(values, axes=...)`, as
  `antlm_jax.models.layers` does, and stack equal blocks with `stack`. The mesh
  may split the axes that `mesh_lib.RULES` names. The optimizer does not decay
  parameters with an axis "norm" or "bias" (`antlm_jax.optim`). Draw
  initial values from `rngs`, because shapes come from `jax.eval_shape`.
  """

  def __init__(self, rngs: nnx.Rngs, config: EncoderConfig):
    raise NotImplementedError

  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    mask: AttentionMask | attention.Cached,
    dropout_key: jax.Array | None = None,
  ) -> jax.Array:
    """Encodes tokens.

    The mask alone decides which keys a position sees, so the same weights run
    causal or bidirectional. Pass it to attention unchanged. Only attention may
    mix positions, so a cache of earlier keys and values can replace the mask.

    Args:
      tokens: Token ids, int32 `[B, T]`.
      positions: Index of each token in its document, int32 `[B, T]`.
      mask: Keys that each position sees, or a cache of earlier tokens.
      dropout_key: Key for dropout in training; None for no dropout.

    Returns:
      Hidden states `[B, T, D]` in the compute dtype.
    """
    raise UserError(f"{type(self).__name__} has no __call__: define it")

  def output_head(self) -> Head:
    """Returns the output layer."""
    raise UserError(f"{type(self).__name__} has no output_head(): define it")


def embedding_table(embedding: nnx.Param) -> jax.Array:
  """Returns the embeddings, float32 `[V, D]`, gathered over the mesh.

  Cast the result of a lookup or product, not the table. Then the gradients of
  repeated tokens and of chunks add up in float32.
  """
  return mesh_lib.gathered(embedding[...], "vocab", "embed")


@jax.named_scope("embedding")
def embed_tokens(embedding: nnx.Param, tokens: jax.Array, dtype) -> jax.Array:
  """Returns the embeddings `[B, T, D]` of tokens `[B, T]` in a dtype."""
  return embedding_table(embedding)[tokens].astype(dtype)


def block_inputs(
  config: EncoderConfig,
  x: jax.Array,
  mask: AttentionMask | attention.Cached,
  dropout_key: jax.Array | None,
):
  """Prepares the inputs of the blocks from embeddings x, `[B, T, D]`.

  Returns:
    x after dropout, the masks prepared for the layers (`PerLayer`, or the
    cache), and a dropout key for each block, `[L]`, or None without dropout.
  """
  keys = None
  if dropout_key is not None and (config.dropout or config.attention_dropout):
    embedding_key, blocks_key = jax.random.split(dropout_key)
    x = layers.dropout(x, config.dropout, embedding_key)
    keys = jax.random.split(blocks_key, config.layers)
  masks = mask
  if not isinstance(mask, attention.Cached):
    masks = prepare_masks(config, mask, *x.shape[:2], training=keys is not None)
  return mesh_lib.constrain(x, "batch", None, None), masks, keys


@dataclasses.dataclass(frozen=True)
class PerLayer:
  """A value for each layer, stored once for all layers that share it."""

  kinds: Sequence[Any]  # distinct values: trees of equal structure and shapes
  indices: Sequence[int]  # index of each layer's value

  def of_layer(self, layer: int | jax.Array) -> Any:
    """Returns a layer's value; in a loop, `layer` is an array."""
    if len(self.kinds) == 1:
      return self.kinds[0]
    if isinstance(layer, int):
      return self.kinds[self.indices[layer]]
    index = jnp.asarray(self.indices)[layer]
    return jax.tree.map(lambda *x: jnp.stack(x)[index], *self.kinds)

  def map(self, f: Callable[[Any], Any]) -> "PerLayer":
    """Applies f to each distinct value."""
    return PerLayer([f(kind) for kind in self.kinds], self.indices)

  def total(self, f: Callable[[Any], Any]) -> Any:
    """Sums f, a number or an array, over the layers."""
    of_kinds = [np.asarray(f(kind)) for kind in self.kinds]
    return sum(of_kinds[kind] for kind in self.indices)


def pattern(values: Sequence[Hashable]) -> tuple:
  """Returns the shortest pattern that gives the values when repeated."""
  for n in range(1, len(values) + 1):
    if all(value == values[i % n] for i, value in enumerate(values)):
      return tuple(values[:n])


def per_layer(values: Sequence[Hashable]) -> PerLayer:
  """Groups the layers' values by equality."""
  kinds = list(dict.fromkeys(values))
  return PerLayer(kinds, [kinds.index(v) for v in values])


def layer_masks(
  config: EncoderConfig, mask: AttentionMask, shape: Sequence[int], xp=jnp
) -> PerLayer:
  """Returns each layer's mask: `mask`, limited to the layer's window.

  Args:
    config: Settings of the encoder, which has the windows.
    mask: Mask of a layer without a window.
    shape: Shape `[..., T]` of the bounds of a limited mask.
    xp: Module that computes the bounds: `jax.numpy`, or numpy on the host.
  """
  length = shape[-1]
  windows = per_layer(config.windows_in(length))
  # A loop over the blocks needs masks of one structure, so all have bounds.
  need_bounds = config.loops and len(windows.kinds) > 1

  def limited(window: int) -> AttentionMask:
    has_no_window = window == length
    if has_no_window and not need_bounds:
      return mask  # perhaps without bounds, which is faster
    return mask.within(window, shape, xp)

  return windows.map(limited)


def prepare_masks(
  config: EncoderConfig,
  mask: AttentionMask,
  rows: int,
  length: int,
  *,
  training: bool,
) -> PerLayer:
  """Prepares the mask of B rows of T tokens, once for each window."""
  q, k = (
    jax.ShapeDtypeStruct((rows, length, n, config.head_dim), config.dtype)
    for n in (config.heads, config.kv_heads)
  )
  dropout = training and config.attention_dropout > 0
  rows_axes, _, heads_axes, _ = mesh_lib.mesh_spec(
    k.shape, "batch", None, "kv_heads", None
  )
  split = attention.Split(rows_axes, heads_axes)
  call = q, k, config.attention, dropout, config.buckets, split
  masks = layer_masks(config, mask, (rows, length))
  return masks.map(lambda mask: attention.prepare_mask(mask, *call))


def stack(make_block, rngs: nnx.Rngs, count: int) -> nnx.Module:
  """Stacks the blocks that `make_block(rngs, index)` builds on a layer axis."""
  make = jax.vmap(lambda key, index: make_block(nnx.Rngs(params=key), index))
  return make(jax.random.split(rngs.params(), count), jnp.arange(count))


def run_blocks(
  config: EncoderConfig, blocks, x: jax.Array, masks, keys, *shared
):
  """Runs `x = block(x, *shared, mask, key)` for each of the stacked blocks.

  `block_inputs` returns masks and keys. Shared values may be `PerLayer`.
  """

  def step(x, layer, block, key):
    def run(block, x, key):
      # Select them inside, so that remat does not save them for each layer.
      of_layer = (
        s.of_layer(layer) if isinstance(s, PerLayer | attention.Cached) else s
        for s in (*shared, masks)
      )
      x = block(x, *of_layer, key)
      return mesh_lib.constrain(x, "batch", None, None)

    return rematerialized(config, run)(block, x, key)

  if config.loops:
    parts = jnp.arange(config.layers), blocks, keys
    return jax.lax.scan(lambda x, part: (step(x, *part), None), x, parts)[0]
  for layer, (block, key) in enumerate(unstack((blocks, keys))):
    x = step(x, layer, block, key)
  return x


def rematerialized(config: EncoderConfig, step):
  """Makes the backward pass recompute a step if `remat` says so."""
  if config.remat == "none":
    return step
  return jax.checkpoint(step, policy=REMAT_POLICIES[config.remat])


def rope(config, positions: jax.Array) -> PerLayer:
  """Returns each layer's RoPE; layers with windows may use another base."""
  # The base and scaling of layers without and with a window.
  plain = config.rope_theta, config.rope_scaling
  windowed = plain
  if config.window_rope_theta:
    windowed = config.window_rope_theta, ()
  bases = per_layer([windowed if w else plain for w in config.layer_windows])
  return bases.map(
    lambda base: attention.Rope.of(positions, config.head_dim, *base)
  )


def unstack(tree):
  """Yields one tree per index of the leaves' leading axis.

  A list in place of a leaf counts as already split.
  """
  leaves, treedef = jax.tree.flatten(tree, lambda x: isinstance(x, list))
  split = [x if isinstance(x, list) else split_layers(x) for x in leaves]
  for parts in zip(*split, strict=True):
    yield treedef.unflatten(parts)


def split_layers(x: jax.Array) -> list[jax.Array]:
  """Splits an array along its leading axis.

  The gradient of this split is one concatenation. The gradient of indexing
  would add a whole stack, zero but for one layer, for each layer.
  """
  return [part[0] for part in jax.lax.split(x, [1] * x.shape[0])]
