"""Interface of encoders, and their shared parts.

A new encoder is one file: a subclass of `EncoderConfig`, registered by name in
`ENCODERS`, and one of `Encoder`. Losses, sharding, checkpoints and scoring
depend on parameters' paths, logical axes and the settings here.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from antlm_jax import attention, settings
from antlm_jax.errors import UserError
from antlm_jax.masks import AttentionMask
from antlm_jax.models import layers
from antlm_jax.runtime import sharding
from antlm_jax.settings import setting


def _save_products(primitive, *shapes, **parameters) -> bool:
  """Remat policy: keeps the results of matrix products and of attention."""
  policies = jax.checkpoint_policies
  kernels = policies.save_only_these_names(attention.SAVED)
  return (
    policies.dots_with_no_batch_dims_saveable(primitive, *shapes, **parameters)
    or kernels(primitive, *shapes, **parameters)
    or primitive.name.startswith("dot_product_attention_fwd")  # cuDNN's
  )


REMAT_POLICIES = {
  "none": None,
  "block": jax.checkpoint_policies.nothing_saveable,
  "dots": _save_products,
}
_WIDEST = 2**20  # more is a typing error
ENCODERS = settings.Registry("model", "name")


@dataclasses.dataclass(frozen=True)
class EncoderConfig(settings.Section):
  """Settings that every encoder has; a subclass adds more.

  A subclass may make `kv_heads`, `head_width`, `buckets` and `windows` settings
  or derive them: FLOP counts, plans and attention use them.
  """

  group = "model"

  vocab_size: int = 0  # number of tokens V; the tokenizer's, not a setting
  layers: int = setting(12, "number of blocks L", least=1, most=1000)
  width: int = setting(768, "hidden width D", least=1, most=_WIDEST)
  heads: int = setting(12, "query heads N", least=1, most=_WIDEST)
  mlp_width: int = setting(2048, "MLP's inner width F", least=1, most=_WIDEST)
  max_seq_len: int = setting(2048, "longest row, in tokens", least=1)
  norm_eps: float = setting(1e-5, "added to variances", least=0, most=1)
  # Dropout of embeddings and sublayers' outputs, in training.
  dropout: float = setting(0.0, "share of states dropped", least=0, under=1)
  attention_dropout: float = setting(
    0.0, "share of attention weights dropped", least=0, under=1
  )
  attention: str = setting(
    "auto",
    "implementation of attention",
    choices=("auto", *attention.IMPLEMENTATIONS),
  )
  # Parameters, softmax and loss stay float32.
  dtype: str = setting(
    "float32", "dtype of computations", choices=("float32", "bfloat16")
  )
  # A loop compiles faster and runs slower: each layer's saved activations are
  # copied into arrays of all layers, and out of them again. So auto loops only
  # where hardly any are saved (remat="block"), and never on CPU.
  scan_layers: str = setting(
    "auto", "run the blocks as a loop", choices=("auto", "yes", "no")
  )
  remat: str = setting(
    "none", "recomputation in the backward pass", choices=tuple(REMAT_POLICIES)
  )

  buckets = 0  # of position terms in the scores; 0 for none
  head_width = 0  # width of a head; 0: width / heads
  windows = ()  # repeated over the layers: keys nearer are seen; 0 for all

  def __post_init__(self):
    super().__post_init__()
    if self.windows:  # equal patterns make equal configurations
      windows = pattern(self.layer_windows)
      object.__setattr__(self, "windows", windows if any(windows) else ())
    if not self.head_width and self.width % self.heads:
      more = "; set model.head_width" if "head_width" in vars(self) else ""
      raise UserError(
        f"model.width={self.width} is not a multiple of"
        f" model.heads={self.heads}{more}"
      )

  @property
  def kv_heads(self) -> int:
    """Number of key/value heads K, by default that of query heads."""
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
    """Makes the encoder; `rngs` draw its initial parameters."""
    raise NotImplementedError

  def windows_in(self, length: int) -> tuple[int, ...]:
    """Returns each layer's window in rows of T tokens; T without a window."""
    return tuple(min(w or length, length) for w in self.layer_windows)

  @property
  def layer_windows(self) -> tuple[int, ...]:
    """Each layer's window; 0 without."""
    pattern = self.windows or (0,)
    return tuple(pattern[i % len(pattern)] for i in range(self.layers))


@dataclasses.dataclass(frozen=True)
class Head:
  """The output layer: scores are `transform(hidden, at) @ kernel + bias`.

  The loss uses its parts, so that all scores need never be in memory.
  """

  kernel: jax.Array  # float32 `[D, V]`, gathered over the mesh
  bias: jax.Array | None = None  # float32 `[V]`
  # Maps hidden states `[..., D]`, and in training their places, to `[..., D]`.
  transform: Callable[[jax.Array, layers.At | None], jax.Array] = (
    lambda hidden, at: hidden
  )

  def logits(self, hidden: jax.Array, at: layers.At | None = None) -> jax.Array:
    """Maps hidden states to scores float32 `[..., V]`; see `Model.logits`."""
    states = self.transform(hidden, at)
    kernel = self.kernel.astype(states.dtype)
    logits = jnp.matmul(states, kernel, preferred_element_type=jnp.float32)
    return logits if self.bias is None else logits + self.bias


class Encoder(nnx.Module):
  """Base class of encoders.

  Declare each parameter by `nnx.Param(values, axes=...)`, as in
  `antlm_jax.models.layers`, and stack equal blocks by `stack`. The mesh may
  split axes named in `sharding.RULES`; every device has all of the others.
  Parameters with an axis "norm" or "bias" are not decayed
  (`antlm_jax.training.optim`). `rngs` is the source of their initial values,
  under `jax.eval_shape` too.
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

    The mask alone decides which keys a position sees, so that the same weights
    run causal or bidirectional. Pass it to attention unchanged: nothing else
    may mix positions. A cache may replace it, since later tokens need only the
    keys and values that attention keeps.

    Args:
      tokens: int32 `[B, T]`.
      positions: Index of each token in its document, int32 `[B, T]`.
      mask: Keys that each position sees; or a cache of earlier tokens.
      dropout_key: Key for dropout in training; None for no dropout.

    Returns hidden states `[B, T, D]` of the compute dtype.
    """
    raise NotImplementedError

  def output_head(self) -> Head:
    """Returns the layer that scores every token."""
    raise NotImplementedError


def table(embedding: nnx.Param) -> jax.Array:
  """Returns the embeddings, float32 `[V, D]`, gathered over the mesh.

  Cast them after a lookup or in a product, not before, so that the gradients of
  a token and of chunks add up in float32.
  """
  return sharding.gathered(embedding[...], "vocab", "embed")


@jax.named_scope("embedding")
def embed(embedding: nnx.Param, tokens: jax.Array, dtype) -> jax.Array:
  """Looks up the embeddings of tokens `[B, T]`; `[B, T, D]` of a dtype."""
  return table(embedding)[tokens].astype(dtype)


def begin(
  config: EncoderConfig,
  x: jax.Array,
  mask: AttentionMask | attention.Cached,
  dropout_key: jax.Array | None,
):
  """Makes the first block's input from embeddings `[B, T, D]`.

  Returns x after dropout, the mask prepared for each layer, and a dropout key
  for each block `[L]`, or None without dropout.
  """
  keys = None
  if dropout_key is not None and (config.dropout or config.attention_dropout):
    first, rest = jax.random.split(dropout_key)
    x = layers.dropout(x, config.dropout, first)
    keys = jax.random.split(rest, config.layers)
  if not isinstance(mask, attention.Cached):
    mask = prepare_masks(config, mask, *x.shape[:2], training=keys is not None)
  return sharding.constrain(x, "batch", None, None), mask, keys


@dataclasses.dataclass(frozen=True)
class PerLayer:
  """A value for each layer, of a few distinct ones."""

  kinds: Sequence[Any]  # distinct values: trees of equal structure and shapes
  which: Sequence[int]  # index of each layer's value

  def of_layer(self, layer: int | jax.Array) -> Any:
    """Returns a layer's value. In a loop over layers the index is an array."""
    if len(self.kinds) == 1:
      return self.kinds[0]
    if isinstance(layer, int):
      return self.kinds[self.which[layer]]
    which = jnp.asarray(self.which)[layer]
    return jax.tree.map(lambda *x: jnp.stack(x)[which], *self.kinds)

  def map(self, f: Callable[[Any], Any]) -> "PerLayer":
    """Returns f of each kind."""
    return PerLayer([f(kind) for kind in self.kinds], self.which)

  def total(self, f: Callable[[Any], Any]) -> Any:
    """Returns the sum over the layers of f, a number or an array."""
    of_kinds = [np.asarray(f(kind)) for kind in self.kinds]
    return sum(of_kinds[kind] for kind in self.which)


def pattern(values: Sequence[Hashable]) -> tuple:
  """Returns the shortest pattern that, repeated, gives the layers' values."""
  for n in range(1, len(values) + 1):
    if all(value == values[i % n] for i, value in enumerate(values)):
      return tuple(values[:n])


def per_layer(values: Sequence[Hashable]) -> PerLayer:
  """Returns the layers' values, each distinct one once."""
  kinds = list(dict.fromkeys(values))
  return PerLayer(kinds, [kinds.index(v) for v in values])


def masks(
  config: EncoderConfig, mask: AttentionMask, shape: Sequence[int], xp=jnp
) -> PerLayer:
  """Returns each layer's mask, limited to the layer's window.

  `shape` is that of the mask's bounds, `[..., T]`, also if it has none. `xp` is
  numpy to stay on the host.
  """
  windows = per_layer(config.windows_in(shape[-1]))
  if windows.kinds == [shape[-1]]:
    return windows.map(lambda _: mask)
  return windows.map(lambda window: mask.within(window, shape, xp))


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
  rows_axes, _, heads_axes, _ = sharding.split(
    k.shape, "batch", None, "kv_heads", None
  )
  split = attention.Split(rows_axes, heads_axes)
  call = q, k, config.attention, dropout, config.buckets, split
  layer_masks = masks(config, mask, (rows, length))
  return layer_masks.map(lambda mask: attention.prepare(mask, *call))


def stack(make_block, rngs: nnx.Rngs, count: int) -> nnx.Module:
  """Stacks blocks made by `make_block(rngs, index)` along a layer axis."""
  make = jax.vmap(lambda key, index: make_block(nnx.Rngs(params=key), index))
  return make(jax.random.split(rngs.params(), count), jnp.arange(count))


def run_blocks(
  config: EncoderConfig, blocks, x: jax.Array, mask, keys, *shared
):
  """Runs `x = block(x, *shared, mask, key)` over the blocks of `stack`.

  The mask and the keys are those of `begin`. Shared values may be `PerLayer`.
  """

  def step(x, layer, block, key):
    def run(block, x, key):
      # Chosen inside, so that remat does not keep them for every layer.
      given = (
        s.of_layer(layer) if isinstance(s, PerLayer | attention.Cached) else s
        for s in (*shared, mask)
      )
      x = block(x, *given, key)
      return sharding.constrain(x, "batch", None, None)

    return rematerialized(config, run)(block, x, key)

  if config.loops:
    parts = jnp.arange(config.layers), blocks, keys
    return jax.lax.scan(lambda x, part: (step(x, *part), None), x, parts)[0]
  for layer, (block, key) in enumerate(unstack((blocks, keys))):
    x = step(x, layer, block, key)
  return x


def rematerialized(config: EncoderConfig, step):
  """Makes the backward pass recompute a step, as `remat` says."""
  if config.remat == "none":
    return step
  return jax.checkpoint(step, policy=REMAT_POLICIES[config.remat])


def rope(config, positions: jax.Array) -> PerLayer:
  """Returns each layer's RoPE; layers with a window may have their own base."""
  of_all = config.rope_theta, config.rope_scaling
  near = of_all
  if config.window_rope_theta:
    near = config.window_rope_theta, ()
  each = per_layer([near if w else of_all for w in config.layer_windows])
  return each.map(
    lambda how: attention.Rope.of(positions, config.head_dim, *how)
  )


def unstack(tree):
  """Splits every leaf along its leading axis; yields one tree per index.

  A list in place of a leaf is already split.
  """
  leaves, treedef = jax.tree.flatten(tree, lambda x: isinstance(x, list))
  split = [x if isinstance(x, list) else split_layers(x) for x in leaves]
  for parts in zip(*split, strict=True):
    yield treedef.unflatten(parts)


def split_layers(x: jax.Array) -> list[jax.Array]:
  """Splits an array along its leading axis.

  Its gradient is one concatenation. The gradient of indexing would add up a
  whole stack of zeros per layer.
  """
  return [part[0] for part in jax.lax.split(x, [1] * x.shape[0])]
