"""Models: encoders as pure functions of their parameters."""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from antlm_jax import settings
from antlm_jax.attention import Cache, Cached
from antlm_jax.errors import UserError
from antlm_jax.masks import AttentionMask
from antlm_jax.models import encoder
from antlm_jax.models.encoder import ENCODERS, Encoder, EncoderConfig

Params = dict[str, jax.Array]  # {"blocks/mlp/up/kernel": array}, layers stacked
_HEAD = "head/"  # prefix of the output layer's own parameters


class Tensor(NamedTuple):
  """Tensor of published code that contains a parameter."""

  name: str  # parameters with the same name are one tensor
  parts: tuple[int, ...] = ()  # sizes, if the vector holds several tensors


@dataclasses.dataclass(frozen=True)
class Model:
  """An encoder as pure functions of its parameters."""

  config: EncoderConfig
  graph: Any  # the encoder's structure, without parameters
  # By path of the parameter:
  shapes: dict[str, jax.ShapeDtypeStruct]
  axes: dict[str, tuple[str | None, ...]]  # logical; None for the layer axis
  tensors: dict[str, Tensor]  # in published code

  def with_base(self, theta: float | None) -> "Model":
    """Returns the model with this RoPE base, or unchanged for None."""
    if theta is None:
      return self
    return from_config(dataclasses.replace(self.config, rope_theta=theta))

  def init(self, seed: int) -> Params:
    """Draws parameters that do not depend on the mesh. Call it under jit."""
    variables = _variables(_encoder_module(self.config, seed))
    return {path: v.get_value() for path, v in variables.items()}

  def encode(
    self,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    mask: AttentionMask | Cached,
    dropout_key: jax.Array | None = None,
  ) -> jax.Array:
    """Maps tokens int32 `[B, T]` to hidden states `[B, T, D]`."""
    return self.bind(params)(tokens, positions, mask, dropout_key)

  def unstack(self, params: Params) -> dict[str, jax.Array | list[jax.Array]]:
    """Splits stacked parameters into lists with an array for each layer.

    Without `scan_layers`, this saves a program that runs often from copying
    every layer out of its stack each time.
    """
    stacked = {path for path, axes in self.axes.items() if axes[0] is None}
    return {
      path: encoder.split_layers(p) if path in stacked else p
      for path, p in params.items()
    }

  def cache(self, rows: int, slots: int) -> Cache:
    """Returns an empty cache for `extend`, for B rows of up to S tokens."""
    c = self.config
    kinds = [(c.kv_heads, c.head_dim)] * 2
    kinds += [(c.heads, c.buckets)] * bool(c.buckets)
    shapes = [(rows, heads, slots, width) for heads, width in kinds]
    return tuple(
      tuple(jnp.zeros(shape, c.dtype) for shape in shapes)
      for _ in range(c.layers)
    )

  def extend(
    self, params: Params, tokens: jax.Array, start: jax.Array, cache: Cache
  ) -> tuple[jax.Array, Cache]:
    """Encodes new tokens causally, after the earlier tokens in a cache.

    The model needs `scan_layers="no"`, because each block has a cache, and
    `remat="none"`, because there is no backward pass.

    Args:
      params: Parameters.
      tokens: New tokens of each row, int32 `[B, T]`.
      start: Number of earlier tokens of each row, int32 `[B]`. The cache must
        have at least T slots more.
      cache: Result of `cache` or of an earlier call.

    Returns:
      Hidden states `[B, T, D]`, and the cache with the new tokens in the slots
      from `start` on.
    """
    refs = jax.tree.map(jax.new_ref, cache)
    windows = self.config.windows_in(cache[0][0].shape[2])
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    cached = Cached(start, refs, windows)
    hidden = self.encode(params, tokens, positions, cached)
    return hidden, jax.tree.map(jax.freeze, refs)

  def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
    """Maps hidden states `[..., D]` to scores, float32 `[..., V]`."""
    return self.output_head(params).logits(hidden)

  def output_head(self, params: Params) -> encoder.Head:
    """Returns the output layer, with its parameters gathered once.

    Raises a UserError if the parameters lack those of the output layer.
    """
    if lacks_head(self.shapes, params):
      raise UserError(
        "the model has no output layer, because it was imported without one:"
        " train it first (--config=continued:model=...), or use embed or"
        " finetune, which need none"
      )
    return self.bind(params).output_head()

  def attention_of(self, inputs, mask: AttentionMask) -> Sequence[str]:
    """Returns the name of the attention that training uses for each window.

    The windows are those of `PerLayer.kinds` in `encoder.layer_masks`.

    Args:
      inputs: Tokens of M microbatches, `[M, B, T]`, or their shape.
      mask: Mask with bounds of the same shape, if any.

    Raises:
      ValueError: The configured implementation cannot compute this mask.
    """

    def prepare(mask):
      first = jax.tree.map(lambda bound: bound[0], mask)
      rows, length = inputs.shape[1:]
      return encoder.prepare_masks(
        self.config, first, rows, length, training=True
      ).kinds

    return [kind.implementation for kind in jax.eval_shape(prepare, mask)]

  def bind(self, params: Params) -> Encoder:
    """Returns the encoder module with `params` in it."""
    if lacks_head(self.shapes, params):  # encoding does not read these zeros
      _, head = divided(self.shapes)
      zeros = {path: jnp.zeros(x.shape, x.dtype) for path, x in head.items()}
      params = {**params, **zeros}
    flat = {tuple(path.split("/")): nnx.Param(p) for path, p in params.items()}
    with nnx.set_graph_mode(False):
      return nnx.merge(self.graph, nnx.from_flat_state(flat))

  @property
  def size(self) -> int:
    """Number of parameters."""
    return sum(shape.size for shape in self.shapes.values())


def divided(tree: Mapping[str, Any]) -> tuple[dict, dict]:
  """Divides a mapping of parameters: the encoder's, and the output layer's."""
  head = {path: x for path, x in tree.items() if path.startswith(_HEAD)}
  return {path: x for path, x in tree.items() if path not in head}, head


def lacks_head(shapes: Mapping[str, Any], paths: Container[str]) -> bool:
  """Whether none of the output layer's own parameters is there.

  It is False if the output layer has none, since it is the embeddings.
  """
  _, head = divided(shapes)
  return bool(head) and not any(path in paths for path in head)


def build_model(
  config: EncoderConfig | Mapping[str, Any], vocab_size: int
) -> Model:
  """Builds a model from an encoder's settings.

  A mapping of settings must include the encoder's `name`. Raises a UserError
  for an unknown name or incompatible settings.
  """
  if not isinstance(config, EncoderConfig):
    config = settings.build(ENCODERS, config)
  return from_config(dataclasses.replace(config, vocab_size=vocab_size))


def from_config(config: EncoderConfig) -> Model:
  """Builds a model from an encoder's configuration."""
  with nnx.set_graph_mode(False):
    module = nnx.eval_shape(lambda: _encoder_module(config, 0))
    graph, _ = nnx.split(module)
  shapes = {}
  axes = {}
  tensors = {}
  for path, variable in _variables(module).items():
    shape = variable.get_value()
    metadata = variable.get_metadata()
    names = metadata.get("axes")
    # `stack` adds the layer axis in front of a block's axes.
    stacked = -1 if names is None else shape.ndim - len(names)
    if stacked not in (0, 1) or not shape.ndim:
      raise UserError(
        f"{type(module).__name__}.{path} of shape {shape.shape} has the axes"
        f" {names}: declare it with nnx.Param(values, axes=(...)), one name for"
        " each axis, or use antlm_jax.models.layers instead of Flax's layers"
      )
    shapes[path] = shape
    axes[path] = (None,) * stacked + tuple(names)
    name = path
    if "tensor" in metadata:  # relative to the module with the layers
      name = f"{path.rsplit('/', 2)[0]}/{metadata['tensor']}"
    tensors[path] = Tensor(name, metadata.get("parts", ()))
  return Model(config, graph, shapes, axes, tensors)


def _encoder_module(config: EncoderConfig, seed: int) -> Encoder:
  return config.module(nnx.Rngs(params=jax.random.key(seed)))


def _variables(module: Encoder) -> dict[str, nnx.Variable]:
  """Returns a module's parameters by path."""
  with nnx.set_graph_mode(False):
    flat = nnx.to_flat_state(nnx.state(module))
  for path, _ in flat:
    if numbers := [name for name in path if isinstance(name, int)]:
      name = "/".join(map(str, path[: path.index(numbers[0])]))
      raise UserError(
        f"{type(module).__name__}.{name} is a list of modules: stack equal"
        " blocks with antlm_jax.models.encoder.stack, and give others a name"
        " each"
      )
  return {"/".join(path): variable for path, variable in flat}
