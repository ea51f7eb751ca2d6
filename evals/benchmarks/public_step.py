"""How far a forecast is from the measured time of a whole train step.

    python -m antlm_jax.evals.benchmarks.public_step

R. Vorushin measured a train step on one TPU v6e and one v5e. The source is "LLM
pretraining on TPU v6e with a $50 budget" (vorushin.github.io, 2026-02-22). The
code is in github.com/vorushin/tpuchat, 08_tpu_ablations.py and LOG.md. This is
the same step, written anew. It has 8 layers of width 1,024, with 4 query heads
and 1 key head of 256, and normalized queries and keys. SwiGLU has a width of
3,072, and the vocabulary 32,768 tokens, untied. A step has 64 rows of 2,048
tokens in 16 microbatches. Parameters, gradients and AdamW's moments are
bfloat16. Layers are unrolled, and norms have no weights. Splash attention has
blocks of 1,024. The loss has 8 chunks, whose scores are computed twice. The
step is compiled here for both chips, and the forecast of `planning.forecast` is
compared with the measured time (docs/appendix/forecast.md).
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from antlm_jax import cli
from antlm_jax.evals.benchmarks import common
from antlm_jax.planning import bundles, forecast, hlo, where
from antlm_jax.planning.topology import topology_devices
from antlm_jax.runtime import chips

LAYERS, WIDTH, HEADS, HEAD, MLP, VOCAB = 8, 1024, 4, 256, 3072, 32768
LENGTH, ROWS, MICROBATCHES, CHUNKS, BLOCK = 2048, 64, 16, 8, 1024
# Tokens a second, by the smallest topology that compiles for the chip.
MEASURED = {"v6e:2x2": 433_606, "v5e:2x2": 148_829}
_SHAPES = {
  "q": (WIDTH, HEADS, HEAD),
  "k": (WIDTH, 1, HEAD),
  "v": (WIDTH, 1, HEAD),
  "out": (HEADS, HEAD, WIDTH),
  "gate": (WIDTH, MLP),
  "up": (WIDTH, MLP),
  "down": (MLP, WIDTH),
}


def rms_norm(x):
  """RMS norm without weights."""
  return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def rotate(x):
  """Rotary positions of `[B, heads, T, head]`."""
  rates = 1e4 ** -(jnp.arange(0, HEAD, 2, dtype=jnp.float32) / HEAD)
  angles = jnp.outer(jnp.arange(LENGTH, dtype=jnp.float32), rates)
  cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
  a, b = jnp.split(x, 2, -1)
  return jnp.concatenate([a * cos + b * sin, b * cos - a * sin], -1)


def splash_attend(q, k, v):
  """Causal splash attention of `[B, heads, T, head]`."""
  mask = splash.CausalMask((LENGTH, LENGTH))
  names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
  kernel = splash.make_splash_mha(
    splash.MultiHeadMask([mask] * HEADS),
    block_sizes=splash.BlockSizes(**{f"block_{n}": BLOCK for n in names}),
    head_shards=1,
    q_seq_shards=1,
  )
  return jax.vmap(kernel)(q, k, v)


def layer(x, w):
  """A layer on `[B, T, D]`."""
  h = rms_norm(x)
  q, k, v = (jnp.einsum("btd,dhk->bhtk", h, w[name]) for name in "qkv")
  mixed = splash_attend(rms_norm(rotate(q)), rms_norm(rotate(k)), v)
  x = x + jnp.einsum("bhtk,hkd->btd", mixed, w["out"])
  h = rms_norm(x)
  return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def chunk_loss(h, head, targets):
  """Sum of the losses of a chunk of targets; scores are capped at 15."""
  scores = 15 * jnp.tanh(h @ head / 15)
  losses = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
  return losses.sum()


@jax.custom_vjp
def head_loss(h, head, targets):
  """Mean loss of `[B, T, D]`, a chunk at a time; the backward pass repeats."""
  parts = h.reshape(CHUNKS, -1, WIDTH), targets.reshape(CHUNKS, -1)
  losses = lax.map(lambda part: chunk_loss(part[0], head, part[1]), parts)
  return losses.sum() / targets.size


def _head_gradients(kept, grad):
  h, head, targets = kept

  def add(total, part):
    _, pull = jax.vjp(lambda x, w: chunk_loss(x, w, part[1]), part[0], head)
    dh, dw = pull((grad / targets.size).astype(jnp.bfloat16))
    return total + dw, dh

  parts = h.reshape(CHUNKS, -1, WIDTH), targets.reshape(CHUNKS, -1)
  dw, dh = lax.scan(add, jnp.zeros_like(head), parts)
  return dh.reshape(h.shape), dw, None


head_loss.defvjp(lambda *args: (head_loss(*args), args), _head_gradients)


def microbatch_loss(params, inputs, targets):
  """Mean loss of a microbatch."""
  x = rms_norm(params["embedding"][inputs])
  for w in params["layers"]:
    x = layer(x, w)
  return head_loss(rms_norm(x), params["head"], targets)


def optimizer() -> optax.GradientTransformation:
  """AdamW with a linear warm-up and decay."""
  pieces = [(0.0, 1e-4, 6), (1e-4, 1e-4, 144), (1e-4, 0.0, 150)]
  parts = [optax.linear_schedule(*piece) for piece in pieces]
  rate = optax.join_schedules(parts, [6, 150])
  return optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)


def public_train_step(params, state, inputs, targets):
  """One step; inputs and targets are `[microbatches, B, T]`."""

  def add(total, data):
    value, grads = jax.value_and_grad(microbatch_loss)(params, *data)
    return jax.tree.map(lax.add, total, grads), value

  start = jax.tree.map(jnp.zeros_like, params)
  grads, losses = lax.scan(add, start, (inputs, targets))
  grads = jax.tree.map(lambda g: g / MICROBATCHES, grads)
  updates, state = optimizer().update(grads, state, params)
  return losses.mean(), optax.apply_updates(params, updates), state


def step_arguments():
  """Returns the shapes of the step's arguments."""
  like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
  params = {
    "embedding": like((VOCAB, WIDTH)),
    "head": like((WIDTH, VOCAB)),
    "layers": [{k: like(s) for k, s in _SHAPES.items()}] * LAYERS,
  }
  tokens = (MICROBATCHES, ROWS // MICROBATCHES, LENGTH)
  tokens = jax.ShapeDtypeStruct(tokens, jnp.int32)
  return params, jax.eval_shape(optimizer().init, params), tokens, tokens


def forecast_step(topology: str) -> dict[str, object]:
  """Compiles the step; returns its measured time and its forecasts.

  The forecast by estimates takes the cycles that XLA states in the program; the
  forecast by bundles takes those of the program's instruction listings.
  """
  device = topology_devices(topology)[0]
  chip, measured = chips.chip_of(device), forecast.measured_chip(device)
  text = common.compile_for(
    device, public_train_step, *step_arguments()
  ).as_text()
  listings = bundles.read_bundle_counts()
  visits = [n * LAYERS * ROWS * HEADS for n in (2, 1, 2)]  # masked, whole, ends
  splash_times = {  # the forward kernel has two names
    re.sub(r"\.\d+$", "", name): forecast.kernel(listing, *visits, measured)
    for name, listing in listings.items()
    if name.startswith("splash_")
  }
  row = {
    "chip": topology,
    "measured_ms": 1e3 * ROWS * LENGTH / MEASURED[topology],
  }
  for name, known in {"estimates": {}, "bundles": listings}.items():
    work = hlo.count(text, known).work
    parts = forecast.instruction_times(work, chip, measured)
    row["products_ms"] = 1e3 * where.total_time(parts).products
    seconds = where.total_time(parts).seconds + sum(splash_times.values())
    row[f"{name}_ms"] = 1e3 * seconds
    row[f"{name}_error"] = seconds / (row["measured_ms"] / 1e3) - 1
  row["splash_ms"] = 1e3 * sum(splash_times.values())
  return {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}


@dataclasses.dataclass(frozen=True)
class Steps:
  """The command's arguments."""

  output: str = common.output()


def main(argv) -> None:
  """Prints a line per chip, and writes them to a file."""
  args = common.benchmark_arguments(__doc__, Steps, argv)
  columns = {"chip": 8, "measured_ms": 11, "estimates_ms": 12}
  columns |= {"estimates_error": 15, "bundles_ms": 10, "bundles_error": 13}
  rows = map(forecast_step, MEASURED)
  common.report_rows(rows, args.output, "public step", columns, "<>")


if __name__ == "__main__":
  cli.run_command(main)
