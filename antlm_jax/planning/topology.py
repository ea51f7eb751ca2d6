"""Compiling for TPUs on a machine that has none."""

import importlib.util
import os
import pathlib
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from antlm_jax.errors import UserError
from antlm_jax.objectives.batch import Batch
from antlm_jax.runtime import sharding
from antlm_jax.training.step import TrainStep, jitted, state_shardings

# One small slice of each generation.
GENERATIONS = {
  "v4": "v4:2x2x1",
  "v5e": "v5e:2x2",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x2",
  "tpu7x": "tpu7x:2x2x1",
}
# Libtpu is not to look for a TPU, nor to complain of its absence.
_ENVIRONMENT = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-1",
  "TPU_MIN_LOG_LEVEL": "3",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_STDERR_LOG_LEVEL": "3",
  "TPU_WORKER_HOSTNAMES": "localhost",
}
# Where launch/setup.sh puts libtpu: beside the packages, since in their midst
# every command of a machine without a TPU would look for one.
_BESIDE = pathlib.Path(__file__).parents[1] / ".venv/libtpu/libtpu/libtpu.so"


def libtpu() -> pathlib.Path | None:
  """Returns TPU's compiler and runtime, or None where it is not installed."""
  found = importlib.util.find_spec("libtpu")
  if found is not None and found.origin:
    return pathlib.Path(found.origin).with_name("libtpu.so")
  return _BESIDE if _BESIDE.exists() else None


def devices(topology: str, slices: int = 1) -> Sequence[jax.Device]:
  """Returns devices to compile for, which cannot run anything.

  Args:
    topology: The generation and its shape, such as v5e:2x4 or v5p:4x4x8.
    slices: How many of these, joined by the data centre's network.

  Raises:
    UserError: if libtpu is not installed, or knows no such topology.
  """
  path = libtpu()
  if path is None:
    raise UserError(
      "compiling for a TPU needs libtpu: run launch/setup.sh libtpu"
    )
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  os.environ.setdefault("TPU_LIBRARY_PATH", str(path))
  options = {"num_slices": slices} if slices > 1 else {}
  if topology.startswith("v4:"):
    options["chip_config_name"] = "megacore"  # a device a chip, as on them
  try:
    return topologies.get_topology_desc(
      platform="tpu", topology_name=topology, **options
    ).devices
  except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
    reason = str(error).splitlines()[0]
    raise UserError(f"{topology!r} is not a TPU topology: {reason}") from error


def train_step(step: TrainStep, mesh: jax.sharding.Mesh, example: Batch):
  """Lowers a run's train step for the devices of a mesh.

  Args:
    step: The step functions.
    mesh: Its devices need not be there.
    example: A batch, or the shapes and dtypes of one.

  Returns:
    A `jax.stages.Lowered`, to compile.
  """
  shardings, state = abstract_state(step, mesh)
  _, update = jitted(step, shardings)
  with jax.set_mesh(mesh):
    return update.lower(state, _placed(example, sharding.rows(mesh)))


def eval_step(step: TrainStep, mesh: jax.sharding.Mesh, example: Batch):
  """Likewise a run's evaluation of a batch."""
  _, state = abstract_state(step, mesh)
  evaluate = jax.jit(step.evaluate, out_shardings=sharding.whole(mesh))
  with jax.set_mesh(mesh):
    return evaluate.lower(
      state.best_params, _placed(example, sharding.rows(mesh))
    )


def abstract_state(step: TrainStep, mesh: jax.sharding.Mesh):
  """Returns the shardings of a run's state, and its shapes that have them."""
  shardings = state_shardings(step, mesh)
  shapes = jax.eval_shape(step.init)
  return shardings, jax.tree.map(_like, shapes, shardings)


def _placed(tree, where):
  return jax.tree.map(lambda x: _like(x, where), tree)


def _like(x, where):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
