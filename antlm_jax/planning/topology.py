"""Compiles for TPUs and GPUs on a machine without them."""

import math
import os
import warnings
from collections.abc import Mapping, Sequence

import jax
from jax.experimental import topologies

from antlm_jax import mesh as mesh_lib
from antlm_jax.errors import UserError
from antlm_jax.objectives.batch import Batch
from antlm_jax.planning import bundles, compilers, gpus, places
from antlm_jax.planning.places import TPUS
from antlm_jax.training.step import TrainStep, jitted, state_shardings

# Without these, libtpu searches for a TPU and reports that there is none.
_ENVIRONMENT = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-1",
  "TPU_MIN_LOG_LEVEL": "3",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_STDERR_LOG_LEVEL": "3",
  "TPU_WORKER_HOSTNAMES": "localhost",
}


def topology_devices(topology: str, slices: int = 1) -> Sequence[jax.Device]:
  """Returns devices that programs can be compiled for but not run on.

  A topology is a TPU generation and its shape, such as v5p:4x4x8, in one or
  several slices; or GPUs, as in `places.parse_topology`. Raises a UserError
  for an unknown topology or if the compiler is not installed.
  """
  place = places.parse_topology(topology, slices)
  if not place.shape:  # a number of chips
    raise places.unknown_topology(topology)
  if not place.is_tpu:
    return gpus.gpu_devices(place)
  path = compilers.libtpu()
  if path is None:
    raise compilers.missing_compiler("TPUs", "plan-tpu", "libtpu")
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  os.environ.setdefault("TPU_LIBRARY_PATH", str(path))
  options = {"num_slices": slices} if slices > 1 else {}
  if place.kind == "v4":
    options["chip_config_name"] = "megacore"  # a v4 chip is one device
  try:
    with bundles.list_programs():
      return topologies.get_topology_desc(
        platform="tpu", topology_name=topology, **options
      ).devices
  except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
    reason = str(error).splitlines()[0]
    raise UserError(
      f"{topology!r} is not a TPU topology such as {TPUS[place.kind]}: {reason}"
    ) from error


def lower(
  step: TrainStep, mesh: jax.sharding.Mesh, batch: Batch, training: bool = True
) -> jax.stages.Lowered:
  """Lowers a run's train step, or its evaluation of a batch, for a mesh.

  The devices of the mesh may be absent. The batch may have only shapes.
  """
  programs = jitted(step, state_shardings(step, mesh))
  function = programs.update if training else programs.evaluate
  with jax.set_mesh(mesh), gpus.without_kernels():
    return function.lower(*program_arguments(step, mesh, batch, training))


def program_arguments(
  step: TrainStep, mesh: jax.sharding.Mesh, batch: Batch, training: bool
) -> tuple:
  """Returns the shapes and shardings of the program's arguments."""

  def like(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  shapes = jax.eval_shape(step.init)
  state = jax.tree.map(like, shapes, state_shardings(step, mesh))
  batch = jax.tree.map(lambda x: like(x, mesh_lib.row_sharding(mesh)), batch)
  return (state if training else state.eval_params), batch


def compile_lowered(
  lowered: jax.stages.Lowered, options: Mapping | None = None
) -> jax.stages.Compiled:
  """Compiles a program, also for absent devices.

  JAX's cache can neither write nor read such a program, and JAX looks only once
  whether the cache is enabled. So no entry is written, and a warning about an
  entry that cannot be read is ignored.
  """
  name = "jax_persistent_cache_min_compile_time_secs"
  before = getattr(jax.config, name)
  jax.config.update(name, math.inf)
  try:
    with warnings.catch_warnings():
      warnings.filterwarnings("ignore", "Error reading persistent compilation")
      return lowered.compile(compiler_options=options)
  finally:
    jax.config.update(name, before)
