"""The LTG-BERT encoder: relative positions, NormFormer, GEGLU.

LTG-BERT (arXiv 2303.09859) has no absolute positions. Each attention score adds
a term of the query and a term of the key, chosen by the bucket of their
distance (DeBERTa, arXiv 2006.03654). Each sublayer has a norm before and after
it (NormFormer, arXiv 2110.09456).

GPT-BERT (arXiv 2410.24159) has two settings more. It gates attention's output,
and each sublayer reads a weighted sum of all earlier outputs.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from antlm_jax import attention
from antlm_jax import mesh as mesh_lib
from antlm_jax.errors import UserError
from antlm_jax.models import encoder, layers
from antlm_jax.models.encoder import ENCODERS, EncoderConfig
from antlm_jax.settings import setting


@ENCODERS.register("ltg_bert")
@dataclasses.dataclass(frozen=True)
class LtgBertConfig(EncoderConfig):
  """Settings of LTG-BERT, in addition to those of every encoder.

  `attention_gate` also moves the norm of attention's output before the output
  projection. `depth_weights` are those of DenseFormer (arXiv 2402.02622).
  GPT-BERT sets both.
  """

  max_seq_len: int = setting(512, "Longest row, in tokens", least=1)
  norm_eps: float = setting(
    1e-7, "Term added to variances in norms", least=0, most=1
  )
  dropout: float = setting(
    0.1, "Dropout rate of embeddings and sublayer outputs", least=0, under=1
  )
  attention_dropout: float = setting(
    0.1, "Dropout rate of attention weights", least=0, under=1
  )
  position_buckets: int = setting(
    32, "Number of distance buckets per direction, both with 0", least=4
  )
  longest_distance: int = setting(
    512, "Distance from which on all share the last bucket", most=2**20
  )
  attention_gate: bool = setting(False, "Multiply attention's output by a gate")
  depth_weights: bool = setting(
    False, "Feed each sublayer a learned weighted sum of all earlier outputs"
  )

  def __post_init__(self):
    super().__post_init__()
    if self.position_buckets % 2:
      raise UserError(
        f"model.position_buckets={self.position_buckets} is odd: use an even"
        " number"
      )
    if self.longest_distance <= self.position_buckets:
      raise UserError(
        f"model.longest_distance={self.longest_distance} is not over"
        f" model.position_buckets={self.position_buckets}"
      )
    if self.depth_weights and self.scan_layers == "yes":
      raise UserError(
        "model.scan_layers=yes cannot loop over layers with"
        " model.depth_weights: leave it auto"
      )

  @property
  def loops(self) -> bool:
    """Whether the blocks run as a loop."""
    return super().loops and not self.depth_weights

  def module(self, rngs: nnx.Rngs) -> encoder.Encoder:
    """Builds the encoder."""
    return LtgBert(rngs, self)

  @property
  def init_std(self) -> float:
    """Standard deviation of initial weights, before truncation."""
    return math.sqrt(2 / (5 * self.width))

  @property
  def buckets(self) -> int:
    """Number of non-empty distance buckets C."""
    return len(self.edges) + 1

  @functools.cached_property
  def edges(self) -> tuple[int, ...]:
    """First distance of each bucket except the first."""
    return attention.log_edges(self.position_buckets, self.longest_distance)


# Shapes of LTG-BERT, and of GPT-BERT for the two tracks of BabyLM 2024.
_GPT_BERT = {"norm_eps": 1e-5, "attention_gate": True, "depth_weights": True}
SHAPES = {
  "xs": {"width": 192, "heads": 3, "mlp_width": 512},
  "small": {"width": 384, "heads": 6, "mlp_width": 1024},
  "base": {"width": 768, "heads": 12, "mlp_width": 2048},
  "gpt_bert_small": {"width": 384, "heads": 6, "mlp_width": 1280} | _GPT_BERT,
  "gpt_bert_base": {"width": 768, "heads": 12, "mlp_width": 2560} | _GPT_BERT,
}


def _linear(rngs, c: LtgBertConfig, shape, axes, bias=True, scale=1.0):
  kernel = layers.truncated_normal(rngs, shape, axes, c.init_std * scale)
  return layers.Linear(kernel, bias)


class LtgBertAttention(nnx.Module):
  """Attention with relative position terms, and a norm before and after it."""

  def __init__(self, rngs: nnx.Rngs, config: LtgBertConfig):
    c = self.config = config
    shape = (c.width, c.width)
    axes = ("embed", "heads")
    self.norm = layers.LayerNorm(c.width, c.norm_eps)
    self.q, self.k, self.v = (_linear(rngs, c, shape, axes) for _ in range(3))
    if c.attention_gate:
      self.gate = _linear(rngs, c, shape, axes)
      layers.published_as("v_gate", self.v, self.gate)
    layers.published_as("q_k", self.q, self.k)
    self.out = _linear(rngs, c, shape, axes[::-1])
    self.out_norm = layers.LayerNorm(
      c.width, c.norm_eps, affine=not c.attention_gate
    )

  @jax.named_scope("projections")
  def __call__(self, x, relative, mask: attention.MaskPlan, key) -> jax.Array:
    """Attends with x `[B, T, D]` and bucket embeddings `[C, D]`."""
    c = self.config
    keys = layers.split_key(key, 3)
    heads = functools.partial(layers.split_heads, width=c.head_dim)
    relative = layers.dropout(relative, c.dropout, keys[0])
    x = self.norm(x)
    q, k, v = (heads(f(x)) for f in (self.q, self.k, self.v))
    # Queries are multiplied by the positions' keys, and keys by the positions'
    # queries. Tokens and positions share the projections.
    terms = attention.Relative(
      query=jnp.einsum("btnh,cnh->btnc", q, heads(self.k(relative))),
      key=jnp.einsum("bsnh,cnh->bsnc", k, heads(self.q(relative))),
      edges=c.edges,
    )
    scale = (3 * c.head_dim) ** -0.5  # a score is the sum of three terms
    dropped = layers.attention_dropout(c.attention_dropout, keys[1], len(x))
    y = attention.attend(
      q, k, v, mask, scale=scale, dropout=dropped, relative=terms
    ).reshape(x.shape)
    if c.attention_gate:
      gate = layers.exact_gelu(self.gate(x))
      y = self.out(self.out_norm(y * gate))
    else:
      y = self.out_norm(self.out(y))
    return layers.dropout(y, c.dropout, keys[2])


class GEGLU(nnx.Module):
  """Gated MLP with a norm before each product."""

  def __init__(self, rngs: nnx.Rngs, config: LtgBertConfig, index):
    c = self.config = config
    shape = (c.width, c.mlp_width)
    axes = ("embed", "mlp")
    # Deeper blocks have smaller initial weights.
    linear = functools.partial(
      _linear, rngs, c, bias=False, scale=jnp.sqrt(0.5 / (1 + index))
    )
    self.norm = layers.LayerNorm(c.width, c.norm_eps)
    self.up = linear(shape, axes)
    self.gate = linear(shape, axes)
    layers.published_as("up_gate", self.up, self.gate)
    self.inner_norm = layers.LayerNorm(c.mlp_width, c.norm_eps)
    self.down = linear(shape[::-1], axes[::-1])

  @jax.named_scope("mlp")
  def __call__(self, x: jax.Array, key) -> jax.Array:
    x = self.norm(x)
    y = self.up(x) * jax.nn.gelu(self.gate(x), approximate=True)
    y = self.down(self.inner_norm(y))
    return layers.dropout(y, self.config.dropout, key)


class LtgBertBlock(nnx.Module):
  """Attention and the MLP, each added to its input."""

  def __init__(self, rngs: nnx.Rngs, config: LtgBertConfig, index):
    self.attention = LtgBertAttention(rngs, config)
    self.mlp = GEGLU(rngs, config, index)

  def sublayers(self, relative, mask: attention.MaskPlan, key):
    """Returns functions from states `[B, T, D]` to each sublayer's output."""
    keys = layers.split_key(key, 2)
    return (
      lambda x: self.attention(x, relative, mask, keys[0]),
      lambda x: self.mlp(x, keys[1]),
    )

  def __call__(self, x, relative, mask: attention.MaskPlan, key) -> jax.Array:
    for sublayer in self.sublayers(relative, mask, key):
      x = x + sublayer(x)
    return x


class LtgBertTokenHead(nnx.Module):
  """Transforms hidden states before their product with the embeddings."""

  def __init__(self, rngs: nnx.Rngs, config: LtgBertConfig):
    c = self.config = config
    self.norm = layers.LayerNorm(c.width, c.norm_eps)
    self.linear = _linear(rngs, c, (c.width, c.width), ("embed", None))
    self.out_norm = layers.LayerNorm(c.width, c.norm_eps)
    self.bias = layers.vector(jnp.zeros(c.vocab_size), "bias")

  def __call__(
    self, x: jax.Array, places: layers.DropoutPlaces | None
  ) -> jax.Array:
    x = layers.exact_gelu(self.linear(self.norm(x)))
    return layers.dropout_at(self.out_norm(x), self.config.dropout, places)


class LtgBert(encoder.Encoder):
  """The LTG-BERT encoder; the last norm is in the head, not in the encoder."""

  def __init__(self, rngs: nnx.Rngs, config: LtgBertConfig):
    c = self.config = config
    draw = functools.partial(layers.truncated_normal, rngs, std=c.init_std)
    self.embedding = draw((c.vocab_size, c.width), ("vocab", "embed"))
    self.embedding_norm = layers.LayerNorm(c.width, c.norm_eps)
    self.relative = draw((c.buckets, c.width), ("relative", "embed"))
    self.relative_norm = layers.LayerNorm(c.width, c.norm_eps, affine=True)
    self.blocks = encoder.stack(
      lambda r, i: LtgBertBlock(r, c, i), rngs, c.layers
    )
    if c.depth_weights:
      # Initially, each sublayer reads only the preceding output.
      sizes = tuple(range(2, 2 * c.layers + 2))
      weights = jnp.concatenate([jnp.eye(n)[-1] for n in sizes])
      self.depth_weights = layers.vector(weights, "depth", parts=sizes)
    self.head = LtgBertTokenHead(rngs, c)

  def __call__(self, tokens, positions, mask, dropout_key=None) -> jax.Array:
    # `positions` are unused, because attention needs only distances.
    c = self.config
    x = encoder.embed_tokens(self.embedding, tokens, c.dtype)
    x = self.embedding_norm(x)
    x, masks, keys = encoder.block_inputs(c, x, mask, dropout_key)
    relative = self.relative_norm(self.relative[...]).astype(c.dtype)
    if c.depth_weights:
      return self._run_by_depth(x, masks, keys, relative)
    return encoder.run_blocks(c, self.blocks, x, masks, keys, relative)

  def _run_by_depth(self, x, masks, keys, relative) -> jax.Array:
    """Runs the blocks with `depth_weights`; arguments as of `run_blocks`.

    The embeddings and the state after each sublayer are kept. The next
    sublayer, or at the end the head, reads their weighted sum. So no loop can
    run the blocks.
    """
    outputs = [x]
    begin = 0
    remat = functools.partial(encoder.rematerialized, self.config)
    for layer, (block, key) in enumerate(encoder.unstack((self.blocks, keys))):
      for sublayer in block.sublayers(relative, masks.of_layer(layer), key):
        step = remat(lambda x, f=sublayer: x + f(x))
        outputs.append(mesh_lib.constrain(step(x), "batch", None, None))
        # The next sum has a weight for each output so far.
        weights = self.depth_weights[begin : begin + len(outputs)]
        weights = weights.astype(x.dtype)
        begin += len(outputs)
        x = sum(w * y for w, y in zip(weights, outputs, strict=True))
    return x

  def output_head(self) -> encoder.Head:
    kernel = encoder.embedding_table(self.embedding).T
    return encoder.Head(kernel, self.head.bias[...], self.head)
