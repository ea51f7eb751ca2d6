"""Train and evaluation steps: pure functions, without I/O.

They do not depend on a batch's objectives: a `Batch` has an attention mask and
a list of targets.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from antlm_jax import mesh as mesh_lib
from antlm_jax.head import losses
from antlm_jax.models import Model, Params
from antlm_jax.models.layers import DropoutPlaces
from antlm_jax.objectives.batch import Batch

Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """State that a run carries from step to step."""

  step: jax.Array  # number of steps done, int32 []
  params: Params  # by path
  opt_state: Any
  ema: Params | None = None  # the parameters' average

  @property
  def eval_params(self) -> Params:
    """The parameters to evaluate: their average if the run keeps it."""
    return self.params if self.ema is None else self.ema


@dataclasses.dataclass(frozen=True)
class TrainStep:
  """Parts of a step; static, so that jit may close over it."""

  model: Model
  optimizer: optax.GradientTransformation  # before the learning rate
  schedule: Callable[[jax.Array], jax.Array]  # step to learning rate
  num_objectives: int  # K, of the curriculum
  seed: int | jax.Array = 0  # of the parameters and of dropout
  loss_chunk: int = 0  # `losses.cross_entropy`'s chunk
  # Decay of the parameters' average by the step; None for no average.
  average_decay: Callable[[jax.Array], jax.Array] | None = None
  # Or "objectives": their means, by the weights of `BatchSource`'s targets.
  loss_average: str = "targets"
  z_loss: float = 0.0  # weight of the squared log-partition
  growing: bool = False  # batches' last microbatches may have no targets
  head: str = "auto"  # `losses.cross_entropy`'s implementation

  def init(self) -> TrainState:
    """Makes the first state. Under jit with shardings, it is born sharded."""
    params = self.model.init(self.seed)
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      opt_state=self.optimizer.init(params),
      ema=jax.tree.map(jnp.copy, params) if self.average_decay else None,
    )

  def reset_optimizer(self, state: TrainState) -> TrainState:
    """Forgets the optimizer's moments."""
    opt_state = self.optimizer.init(state.params)
    return dataclasses.replace(state, opt_state=opt_state)

  def update(
    self, state: TrainState, batch: Batch
  ) -> tuple[TrainState, Metrics]:
    """Returns the state after an update from M microbatches, and metrics.

    Losses and weights are summed over microbatches and devices and divided
    once, so that every target counts the same wherever it falls. The metrics
    are `losses.cross_entropy`'s sums `[K]`, the loss, the gradient's norm, the
    new parameters' norm and the learning rate, each `[]`.
    """
    # Depends on the step alone, so that a resumed run has the same dropout.
    key = jax.random.fold_in(jax.random.key(self.seed), state.step)
    if self.loss_average == "objectives":
      batch = self._averaged_by_objective(batch)
    grads, sums = self._accumulate(state.params, batch, key)
    # A batch may have no targets; its gradients are zeros then, and weight
    # decay and momentum alone move the parameters.
    with jax.named_scope("optimizer"):
      weight = jnp.maximum(sums["weight"].sum(), 1e-9)
      grads = jax.tree.map(lambda g: g / weight, grads)
      update = self.optimizer.update
      updates, opt_state = update(grads, state.opt_state, state.params)
      rate = self.schedule(state.step)
      params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
      metrics = {
        **sums,
        # The mean over targets, by their weights, with the z-loss.
        "total_loss": sums["loss"].sum() / weight,
        # Before clipping, which is a part of the optimizer.
        "grad_norm": optax.tree.norm(grads),
        "param_norm": optax.tree.norm(params),
        "learning_rate": rate,
      }
      if batch.lost is not None:
        metrics["lost_targets"] = batch.lost.sum()
      average = state.ema
      if average is not None:
        decay = self.average_decay(state.step)
        average = jax.tree.map(
          lambda a, p: decay * a + (1 - decay) * p, average, params
        )
    return TrainState(state.step + 1, params, opt_state, average), metrics

  def _averaged_by_objective(self, batch: Batch) -> Batch:
    """Divides each weight by its objective's number of targets in the batch.

    `BatchSource` has multiplied it by the objective's share of the batch. So
    the loss is the sum over objectives of share x mean loss.
    """
    # The same as in GPT-BERT's code, where each GPU has one objective, and the
    # GPUs' mean losses are averaged.
    ids = jax.nn.one_hot(batch.objective_ids, self.num_objectives)
    count = jnp.einsum("msc,msck->k", jnp.sign(batch.weights), ids)
    share = ids @ (1 / jnp.maximum(count, 1))
    return dataclasses.replace(batch, weights=batch.weights * share)

  def evaluate(
    self, params: Params, batch: Batch, by_row: bool = False
  ) -> Metrics:
    """Returns `losses.cross_entropy`'s sums of a batch of M = 1.

    With `by_row`, they include those by row. The z-loss belongs to training
    alone: `loss` is in nats.
    """
    step = dataclasses.replace(self, z_loss=0.0)
    first = jax.tree.map(lambda x: x[0], batch)
    _, sums = step.loss(params, first, None, by_row=by_row)
    return sums

  def loss(
    self,
    params: Params,
    micro: Batch,
    key,
    head_params: Params | None = None,
    by_row: bool = False,
  ) -> tuple[jax.Array, Metrics]:
    """Returns `losses.cross_entropy` of one microbatch.

    The output layer reads `head_params`, by default (or if empty) `params`.
    `micro` is a batch without its leading axis: inputs `[B, T]`, targets
    `[S, C]`. `key` is for dropout, or None.
    """
    # One key for the encoder, one for the head.
    keys = None, None
    if key is not None:
      keys = jax.random.split(key)
    hidden = self.model.with_base(micro.rope_theta).encode(
      params, micro.inputs, micro.positions, micro.mask, keys[0]
    )
    shards = micro.target_positions.shape[0]
    hidden = hidden.reshape(shards, -1, hidden.shape[-1])
    hidden = mesh_lib.constrain(hidden, "batch", None, None)
    # From here on only states that predict a target: with 15 % masked, a
    # seventh of the logits. Each data shard has its own targets, so that
    # nothing crosses devices.
    places = micro.target_positions
    at_targets = jnp.take_along_axis(hidden, places[..., None], axis=1)
    # Indices in the microbatch do not depend on the shards.
    places = jnp.arange(shards)[:, None] * hidden.shape[1] + places
    rows, length = micro.inputs.shape
    head = self.model.output_head(head_params or params)
    dropout_places = None
    if key is not None:
      seed = jax.random.bits(keys[1], (), jnp.uint32)
      dropout_places = DropoutPlaces(seed, places)
    return losses.cross_entropy(
      head,
      at_targets,
      dropout_places,
      micro.targets,
      micro.weights,
      micro.objective_ids,
      self.num_objectives,
      chunk=self.loss_chunk,
      z_loss=self.z_loss,
      implementation=self.head,
      row_ids=places // length if by_row else None,
      num_rows=rows,
    )

  def _accumulate(self, params: Params, batch: Batch, key):
    """Gradients of the summed loss, and the sums, over all microbatches."""
    microbatches, shards = batch.targets.shape[:2]
    keys = jax.random.split(key, microbatches)
    if microbatches == 1:  # a loop of one would keep two copies of gradients
      return self._gradients_of_one(params, batch, keys)
    if shards == 1:
      (grads, _), sums = self._sum_gradients(params, {}, batch, keys)
      return grads, sums
    return self._gradients_apart(params, batch, keys)

  def _gradients_of_one(self, params: Params, batch: Batch, keys):
    """Does `_accumulate` for one microbatch."""
    microbatch = jax.tree.map(lambda x: x[0], (batch, keys))
    return jax.grad(self.loss, has_aux=True)(params, *microbatch)

  def _gradients_apart(self, params: Params, batch: Batch, keys):
    """Does `_accumulate` for several microbatches over several data shards."""
    # A loop over microbatches should not sum gradients over devices in each
    # turn. XLA moves such a sum behind the loop if its result is only added to
    # an array. So each layer of a stack has its own gradient here, and tied
    # embeddings have two. One shard has no such sum, and arrays apart take more
    # memory.
    copies, pull_back = jax.vjp(self._parameters_apart, params)
    grads, sums = self._sum_gradients(*copies, batch, keys)
    (grads,) = pull_back(grads)
    return grads, sums

  def _parameters_apart(self, params: Params) -> tuple[Params, Params]:
    """Returns the parameters for the encoder, and for the output layer."""
    if not self.model.config.loops:
      params = self.model.unstack(params)
    return params, params

  def _sum_gradients(
    self, encoder_params: Params, head_params: Params, batch: Batch, keys
  ):
    """Returns the gradients of both, and the loss sums, over microbatches.

    Without `head_params`, the output layer takes `encoder_params`.
    """
    count = len(keys)
    first = jax.tree.map(lambda x: x[0], (batch, keys))
    grad = jax.grad(self.loss, argnums=(0, 3), has_aux=True)
    shapes = jax.eval_shape(grad, encoder_params, *first, head_params)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def add(i, total):
      microbatch = jax.tree.map(lambda x: x[i], (batch, keys))
      grads_and_sums = grad(encoder_params, *microbatch, head_params)
      return jax.tree.map(jnp.add, total, grads_and_sums)

    if self.growing:  # counted on the device: one program for every size
      filled = batch.weights.any(axis=(1, 2))
      numbers = jnp.arange(1, count + 1)
      count = jnp.max(jnp.where(filled, numbers, 0))
    return jax.lax.fori_loop(0, count, add, zero)


def state_shardings(train_step: TrainStep, mesh) -> TrainState:
  """Returns the sharding of every array of the state.

  A parameter's sharding follows from its logical axes. Arrays of the optimizer
  with a parameter's path and shape, such as Adam's moments, have that
  parameter's sharding. Other arrays, such as counts, are whole on every device.
  """
  model = train_step.model

  def of(path, leaf):
    name = getattr(path[-1], "key", None) if path else None
    like = model.shapes.get(name)
    if like is not None and like.shape == leaf.shape:
      spec = mesh_lib.spec(mesh, model.axes[name], leaf.shape)
      return jax.sharding.NamedSharding(mesh, spec)
    return mesh_lib.replicated_sharding(mesh)

  shapes = jax.eval_shape(train_step.init)
  return jax.tree_util.tree_map_with_path(of, shapes)


class Programs(NamedTuple):
  """A run's compiled programs."""

  init: Callable[[], TrainState]  # the state is born sharded
  update: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
  evaluate: Callable[[Params, Batch], Metrics]


def jitted(train_step: TrainStep, shardings: TrainState) -> Programs:
  """Returns `init`, `update` and `evaluate` as a run compiles them.

  The state stays sharded; `update` reuses its memory.
  """
  replicated = shardings.step
  return Programs(
    jax.jit(train_step.init, out_shardings=shardings),
    jax.jit(
      train_step.update, out_shardings=(shardings, replicated), donate_argnums=0
    ),
    jax.jit(
      functools.partial(train_step.evaluate, by_row=True),
      out_shardings=replicated,
    ),
  )
