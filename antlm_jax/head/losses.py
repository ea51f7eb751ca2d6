"""Cross-entropy at the targets, and its gradient.

    loss, sums = cross_entropy(
        model.output_head(params), hidden, places, ...
    )

The device decides which implementation computes the head, unless the caller
names one of `IMPLEMENTATIONS`, or a size of chunks:

- pallas: the fused kernel (`head.fused`), which has no scores in
  memory. The choice on TPU.
- chunked: plain XLA (`head.chunks`), with the scores of some targets
  in memory. The choice on CPU and GPU, and where the kernel cannot compute the
  head: float16, or states so wide that too few fit into vector memory.

An implementation is a module of two functions, so that a kernel for another
device is one more module:

    forward(settings, states, kernel, bias, targets, weights, gradient)
      Scores states `[S, C, D]`. Returns for each target, `[S, C]`, the
      log-partition, its score, and whether it is the first of the highest
      scores; and if `gradient` is wanted, what `backward` needs.
    backward(settings, saved, grad)
      Returns the gradients of states, kernel and bias, times the loss's own.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from antlm_jax.head import chunks as head_chunks
from antlm_jax.head import fused as head_fused
from antlm_jax.mesh import device
from antlm_jax.models.encoder import Head
from antlm_jax.models.layers import DropoutPlaces

IMPLEMENTATIONS = {"pallas": head_fused, "chunked": head_chunks}


class Settings(NamedTuple):
  """Static settings of the head's loss."""

  implementation: str  # a name of `IMPLEMENTATIONS`
  chunk: int  # of `cross_entropy`
  z_loss: float


@jax.named_scope("head")
def cross_entropy(
  head: Head,
  hidden: jax.Array,
  places: DropoutPlaces | None,
  targets: jax.Array,
  weights: jax.Array,
  objective_ids: jax.Array,
  num_objectives: int,
  chunk: int = 0,
  z_loss: float = 0.0,
  implementation: str = "auto",
  row_ids: jax.Array | None = None,
  num_rows: int = 0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Sums the cross-entropy of targets by objective.

  Args:
    head: Output layer.
    hidden: State that predicts each target, `[S, C, D]` (S data shards).
    places: Places of these states in the microbatch, for the head's dropout;
      None without dropout.
    targets: int32 `[S, C]`.
    weights: float32 `[S, C]`; 0 for padding.
    objective_ids: Each target's objective, int32 `[S, C]`.
    num_objectives: Number of objectives K.
    chunk: Largest number of a shard's targets whose scores are in memory; 0
      for none on TPU, and elsewhere for `head_chunks.chunk_size`.
    z_loss: Weight of the squared log-partition in the loss, which keeps it
      near 0 (PaLM, arXiv 2204.02311, section 5).
    implementation: A name of `IMPLEMENTATIONS`, or auto.
    row_ids: Each target's row, int32 `[S, C]`; None for no sums by row.
    num_rows: Number of rows B.

  Returns:
    The summed loss in nats, float32 `[]`, which alone has a gradient, and sums
    by objective, float32 `[K]` each: `loss` (weighted, in nats) and `weight`.
    `count`, `nats` and `correct` are unweighted, over the targets of positive
    weight. Of several highest scores, only the first can be correct. With
    `row_ids`, `row_loss` and `row_weight` are the first two by row, `[B]`.

  Raises:
    ValueError: if the implementation is unknown or cannot compute this.
  """
  states = head.transform(hidden, places)
  name = choose_head(states, head.kernel, chunk, implementation)
  settings = Settings(name, chunk, z_loss)
  loss, arrays = _score_targets(
    settings, states, head.kernel, head.bias, targets, weights
  )
  # A product with a one-hot table, since a scatter would be slow on a TPU.
  by_kind = jax.nn.one_hot(objective_ids, num_objectives, dtype=jnp.float32)
  arrays = jax.lax.stop_gradient(arrays)
  sums = {
    name: jnp.einsum("sc,sck->k", array, by_kind)
    for name, array in arrays.items()
  }
  if row_ids is not None:
    for name in ("loss", "weight"):
      flat = arrays[name].reshape(-1), row_ids.reshape(-1)
      sums[f"row_{name}"] = jax.ops.segment_sum(*flat, num_rows)
  return loss, sums


def choose_head(
  states, kernel, chunk: int = 0, implementation: str = "auto"
) -> str:
  """Returns the name of the implementation that `cross_entropy` chooses.

  Raises:
    ValueError: if there is no such implementation, or it cannot compute this.
  """
  if implementation == "auto":
    fused = device().platform == "tpu" and not chunk
    if fused and not head_fused.obstacle(states, kernel):
      return "pallas"
    return "chunked"
  if implementation not in IMPLEMENTATIONS:
    names = ", ".join(IMPLEMENTATIONS)
    raise ValueError(f"head={implementation!r} is not one of auto, {names}")
  needed = implementation == "pallas" and head_fused.obstacle(states, kernel)
  if needed:
    raise ValueError(f"head={implementation!r} needs {needed}")
  return implementation


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score_targets(settings: Settings, states, kernel, bias, targets, weights):
  """Returns the summed loss, and arrays `[S, C]` without a gradient."""
  run = IMPLEMENTATIONS[settings.implementation].forward
  statistics, _ = run(settings, states, kernel, bias, targets, weights, False)
  return _loss_sums(settings, weights, *statistics)


def _loss_forward(settings: Settings, *arrays):
  run = IMPLEMENTATIONS[settings.implementation].forward
  statistics, saved = run(settings, *arrays, True)
  return _loss_sums(settings, arrays[-1], *statistics), saved


def _loss_sums(settings: Settings, weights, log_partition, at_target, correct):
  nats = log_partition - at_target
  loss = (nats + settings.z_loss * log_partition**2) * weights
  real = (weights > 0).astype(jnp.float32)
  return loss.sum(), {
    "loss": loss,
    "weight": weights,
    "count": real,
    "nats": nats * real,
    "correct": correct * real,
  }


def _loss_backward(settings: Settings, saved, grads):
  run = IMPLEMENTATIONS[settings.implementation].backward
  return *run(settings, saved, grads[0]), None, None


_score_targets.defvjp(_loss_forward, _loss_backward)
