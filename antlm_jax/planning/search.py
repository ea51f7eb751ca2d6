"""Searches for settings that fit into memory, and for the fastest meshes."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence

import jax

from antlm_jax import config as config_lib
from antlm_jax import mesh as mesh_lib
from antlm_jax.config import Config
from antlm_jax.data.prepared_folder import Sources
from antlm_jax.errors import UserError
from antlm_jax.planning.estimate import Estimate, StandIn, estimate_all
from antlm_jax.runtime import progress
from antlm_jax.settings import Setting
from antlm_jax.training import flops
from antlm_jax.training import run as run_lib
from antlm_jax.training.run import Run

_EPOCH = 1000  # default number of steps in an epoch of stand-in data
_MOST_TOKENS = 2**27  # tokens in a batch, which must fit into host memory
_MOST_FSDP = 64  # larger sizes do not divide published widths
_MOST_TRIED = 8  # number of settings to try


@dataclasses.dataclass(frozen=True)
class Pod:
  """A config, its devices, and stand-in data if the config has no data."""

  config: str | Config  # config, or name of a config file and its argument
  settings: Mapping[str, Setting]  # changes of the config
  devices: Sequence[jax.Device]
  vocab_size: int
  seq_len: int | None = None  # tokens per row; None for the model's maximum
  pieces: int = 1  # number of documents per row
  rows: int = 0  # number of rows per epoch; 0 for many steps

  def build_run(self, settings: Sequence[str] = ()) -> Run:
    """Builds the run with further settings `key=value`.

    The devices may be absent. It reads the data of `data.path`, if set. Raises
    a UserError if the settings do not fit the devices or each other.
    """
    changes = {**self.settings, **config_lib.parse_overrides(settings)}
    config = config_lib.load_config(self.config, changes)
    schedule = ", ".join(config.train.batch_schedule)
    if schedule and not (self.seq_len or config.data.path):
      raise UserError(
        f"train.batch_schedule={schedule} joins rows of the prepared data: add"
        " the number of tokens in such a row, e.g. --seq_len=128"
      )
    length = self.seq_len or config.model.max_seq_len
    batch = config.train.batch_size
    if batch * length > _MOST_TOKENS:
      raise UserError(
        f"train.batch_size={batch} rows of {length} tokens are too many: plan"
        f" supports at most {_MOST_TOKENS:,} tokens"
      )
    if config.data.path:
      sources = run_lib.read_data(config)
    else:
      rows = self.rows or _EPOCH * batch
      data = StandIn(self.vocab_size, length, self.pieces, rows)
      alone = {"": data}
      sources = Sources(
        alone, alone, data, "bos", words={}, sha256="", held_out_sha256=""
      )
    return run_lib.assemble_run(config, sources, self.devices)


def train_flops(run: Run, begin: int, flops_by_kind: dict) -> float:
  """Returns the FLOPs of a run's steps from step `begin` on.

  `flops_by_kind` caches the FLOPs of each kind of step for other runs.
  """
  total = 0.0
  c = run.config
  for start, stop, source in run.spans():
    phase = run.curriculum.at(start)
    stage = run.order.stage_at(start)
    mixed = [
      (c.known_objectives[n], share) for n, share in phase.shares.items()
    ]
    kind = str((c.model, c.train, c.data, mixed, stage.layout, stage.joined))
    if kind not in flops_by_kind:
      # A batch that grows needs its filled share of a whole batch's FLOPs.
      flops_by_kind[kind] = flops.train_step(run.model, source[start])
    filled = run.order.slots_between(max(start, begin), max(stop, begin))
    total += filled / stage.layout.batch_size * flops_by_kind[kind]
  return total


def advise_settings(
  pod: Pod, run: Run, estimates: Sequence[Estimate]
) -> tuple[tuple[str, ...], list[Estimate]]:
  """Tries settings until all programs fit.

  Returns:
    The settings `key=value` tried last, and their estimates. If no setting is
    enough, the last estimate does not fit.
  """
  failed = {e.name for e in estimates if not e.memory.fits}
  over = max(e.memory.needed - e.memory.limit for e in estimates)
  tried = ()
  retried = []
  candidates = list(settings_that_save(run, over))[:_MOST_TRIED]
  for tried in progress.track(candidates, "setting", "tried", 0):
    candidate = pod.build_run(tried)
    retried = []
    failed_kinds = [p for p in candidate.batch_kinds() if p.name in failed]
    for e in estimate_all(candidate, failed_kinds):
      retried.append(e)
      if not e.memory.fits:
        break
    else:
      break
  return tried, retried


def settings_that_save(run: Run, over: int) -> Iterator[tuple[str, ...]]:
  """Yields settings `key=value` that save memory, the cheapest in speed first.

  Each needs less memory than the one before it: first a larger fsdp, then more
  recomputation, then more microbatches.

  Args:
    run: The run, which does not fit.
    over: Number of bytes that it lacks on a device.
  """
  base_settings = ()
  fsdp = run.mesh.shape["fsdp"]
  tensor = run.mesh.shape["tensor"]
  remat = run.config.model.remat
  arrays = jax.tree.leaves(jax.eval_shape(run.step.init))
  state_bytes = sum(x.size * x.dtype.itemsize for x in arrays)
  state_bytes //= fsdp * tensor
  larger_sizes = [n for n in fsdp_sizes(run, tensor) if n > fsdp]
  # The smallest size that saves enough, because larger sizes send more.
  sufficient_sizes = (
    n for n in larger_sizes if state_bytes * (1 - fsdp / n) > over
  )
  if larger_sizes:
    size = next(sufficient_sizes, larger_sizes[-1])
    base_settings = ("mesh.data=-1", f"mesh.fsdp={size}")
    yield base_settings
  policies = {"none": ("dots", "block"), "dots": ("block",)}
  for policy in policies.get(remat, ()):
    yield (*base_settings, f"model.remat={policy}")
  if remat != "block":
    base_settings = (*base_settings, "model.remat=block")
  for count in microbatches(run):
    if count > run.config.train.microbatches:
      yield (*base_settings, f"train.microbatches={count}")


def fsdp_sizes(run: Run, tensor: int) -> list[int]:
  """Returns the fsdp sizes that fit the devices and divide the width."""
  out = []
  size = 1
  while size <= _MOST_FSDP:
    if run.model.config.width % size == 0:
      with contextlib.suppress(UserError):  # raised if it does not fit
        mesh_lib.Mesh(-1, size, tensor).build([*run.mesh.devices.flat])
        out.append(size)
    size *= 2
  return out


def microbatches(run: Run) -> list[int]:
  """Returns the numbers of microbatches that divide all batches of a run."""
  layouts = [stage.layout for stage in run.order.stages]
  common = math.gcd(
    *(layout.shard_rows * layout.microbatches for layout in layouts)
  )
  return [n for n in range(1, common + 1) if common % n == 0]


def sweep_meshes(pod: Pod, run: Run, budget: float) -> list[dict]:
  """Estimates the train steps on all meshes, and returns the fastest first.

  It starts no compilation after `budget` seconds.
  """
  end = time.monotonic() + budget
  out = []
  c = run.model.config
  meshes = [
    ("mesh.data=-1", f"mesh.fsdp={fsdp}", f"mesh.tensor={tensor}")
    for tensor in (1, 2, 4)
    if all(n % tensor == 0 for n in (c.heads, c.kv_heads, c.mlp_width))
    for fsdp in fsdp_sizes(run, tensor)
  ]
  for mesh in progress.track(meshes, "mesh", "sweep", 0):
    counts = []
    with contextlib.suppress(UserError):  # if shards do not divide the batch
      counts = microbatches(pod.build_run((*mesh, "train.microbatches=1")))
    for count in counts:
      if time.monotonic() > end:
        break
      row = _sweep_row(pod.build_run((*mesh, f"train.microbatches={count}")))
      out.append(row)
      if row["fits"]:  # more microbatches would be slower
        break
  return sorted(out, key=lambda row: row.get("seconds", math.inf))


def _sweep_row(run: Run) -> dict:
  """Returns the row of a run in the sweep, over all train steps."""
  estimates = list(estimate_all(run, run.batch_kinds(evaluations=False)))
  fits = all(e.memory.fits for e in estimates)
  row = {
    "mesh": dict(run.mesh.shape),
    "microbatches": run.config.train.microbatches,
    "needed": max(e.memory.needed for e in estimates),
    "limit": estimates[0].memory.limit,
    "fits": fits,
  }
  if fits:
    steps = sum(e.steps for e in estimates)
    seconds = sum(e.steps * e.step_seconds for e in estimates) / steps
    work = sum(e.steps * e.work.total for e in estimates) / steps
    row["seconds"] = seconds
    row["bound"] = max(estimates, key=lambda e: e.steps).bound
    row["mfu"] = work / (seconds * estimates[0].devices * estimates[0].peak)
  return row
