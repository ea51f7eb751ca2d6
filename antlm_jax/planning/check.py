"""Checks of a launch that need neither its devices nor a compiler.

The launchers call `antlm plan --check` before they ask for a machine.
"""

from collections.abc import Mapping

from antlm_jax import config as config_lib
from antlm_jax import models
from antlm_jax.config import ConfigOrName
from antlm_jax.data import order
from antlm_jax.errors import UserError
from antlm_jax.objectives.batch import BatchLayout
from antlm_jax.planning import places
from antlm_jax.settings import Section, Setting
from antlm_jax.training import writers

_EPOCH = 1000  # steps of an epoch, for lengths that are checked without data
_VOCAB_SIZE = 128_256  # for models whose shapes are checked without their data
# Bytes of a parameter, its gradient, and one moment of the optimizer: the least
# that a step holds, next to activations.
_LEAST_BYTES = 12


def check_launch(
  config: ConfigOrName,
  changes: Mapping[str, Setting | Section],
  topology: str,
  slices: int = 1,
) -> dict[str, object]:
  """Checks a run's settings against its devices; returns both, in words.

  Args:
    config: Name of a config, path to a config file, or a config.
    changes: Settings by their names.
    topology: Devices of one slice, such as v5e:16x16 or v5e:256. GPUs of an
      unknown kind are gpu:8 or gpu:4x8.
    slices: Number of slices.

  Raises:
    UserError: The config cannot be made, is for another topology, or has a
      batch that the devices do not divide, parameters that exceed a device's
      memory, a curriculum or a schedule that does not fit the run, or an
      unknown writer.
  """
  run_config = config_lib.load_config(config, changes)
  place = places.parse_topology(topology, slices, any_gpus=True)
  if isinstance(config, str):
    # The argument is parsed as in `config.parse_arg`.
    argument = config.partition(":")[2]
    for part in argument.split(","):
      name, _, named = part.partition("=")
      if name == "topology" and named:
        _compare(named, topology, place)
  devices = place.devices * slices
  have = f"the launch has {{}} ({topology})"
  data, fsdp, tensor = run_config.mesh.sizes(devices, slices, have)
  layout = BatchLayout(
    run_config.train.batch_size, run_config.train.microbatches, data * fsdp
  )
  order.parse_batch_schedule(run_config.train.batch_schedule, layout, seq_len=1)
  _check_length(run_config)
  for name in run_config.log.writers:
    _ = writers.WRITERS[name]
  objectives = ", ".join(objective.name for objective in run_config.trained)
  size = models.build_model(run_config.model, _VOCAB_SIZE).size
  least = _LEAST_BYTES * size / (fsdp * tensor)
  is_known = not topology.startswith("gpu:")
  if is_known and least > place.chip.memory:
    raise UserError(
      f"parameters, gradients and one moment need {least / 2**30:.1f} GiB on"
      f" each device of {topology}, which has"
      f" {place.chip.memory / 2**30:.1f} GiB: raise mesh.fsdp"
      f" (now {fsdp}), or take devices with more memory"
    )
  return {
    "config": config if isinstance(config, str) else run_config.model.name,
    "topology": topology,
    "devices": devices,
    "rows": run_config.train.batch_size,
    "objectives": objectives,
    "parameters": size,
  }


def _check_length(config: config_lib.Config) -> None:
  """Checks the curriculum and the schedule, as far as they need no data."""
  run = config.curriculum_for(_EPOCH)
  if config.train.steps:
    restart = config.schedule.restart_at_switch
    config.schedule.build(run.steps, run.switches if restart else ())


def _compare(named: str, topology: str, place: places.Topology) -> None:
  """Raises a UserError if a config's topology is not that of the launch."""
  other = places.parse_topology(named)
  gpus = topology.startswith("gpu:")
  # A bare number of chips is for any TPUs.
  same = other.kind == place.kind or (":" not in named and place.is_tpu)
  same = same or (gpus and not other.is_tpu)
  if not same or other.chips != place.chips:
    kind = "h100" if gpus and other.is_tpu else other.kind
    right = f"{kind}:{place.shape}" if gpus else topology
    raise UserError(
      f"the config is for topology={named}, but the launch has {topology}:"
      f" write topology={right}, or ask for other devices"
    )
