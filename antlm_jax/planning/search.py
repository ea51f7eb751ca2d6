"""Settings with which a run fits, and the meshes that are fastest."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

import jax

from antlm_jax import config as config_lib
from antlm_jax.data.prepared_folder import Sources
from antlm_jax.errors import UserError
from antlm_jax.planning.estimate import Estimate, StandIn, estimate_all
from antlm_jax.runtime import progress, sharding
from antlm_jax.training import experiment
from antlm_jax.training.experiment import Run

_EPOCH = 1000  # steps in an epoch of data that is not there
_MOST_TOKENS = 2**27  # of a batch: one of each kind is made here
_MOST_FSDP = 64  # wider, it does not divide the published encoders
_MOST_TRIED = 8  # settings, until one fits


@dataclasses.dataclass(frozen=True)
class Pod:
  """What a plan is for."""

  spec: str  # the config file and its argument
  overrides: tuple[str, ...]  # `--config.key=value`
  devices: Sequence[jax.Device]
  # Where there is no data: the number of tokens, those in a row, None for as
  # many as the model takes, and the documents in a row.
  vocab_size: int
  seq_len: int | None = None
  pieces: int = 1

  def run(self, settings: Sequence[str] = ()) -> Run:
    """Builds the run with further `key=value`; the devices need not be there.

    The data of `data.path` is read, if that is set.

    Raises:
      UserError: for settings that do not fit the devices or each other.
    """
    more = [f"--config.{setting}" for setting in settings]
    config = config_lib.load(self.spec, [*self.overrides, *more])
    length = self.seq_len or config.model.max_seq_len
    rows = config.train.batch_size
    if rows * length > _MOST_TOKENS:
      raise UserError(
        f"train.batch_size={rows} rows of {length} tokens are too many to plan:"
        f" at most {_MOST_TOKENS:,} tokens"
      )
    if config.data.path:
      sources = experiment.read_data(config)
    else:
      data = StandIn(self.vocab_size, length, self.pieces, _EPOCH * rows)
      sources = Sources({"": data}, {"": data}, data, "bos", {}, "")
    return experiment.assemble(config, sources, self.devices)


# ------------------------------------------------------- where it does not fit


def advise(
  pod: Pod, run: Run, found: Sequence[Estimate]
) -> tuple[tuple[str, ...], list[Estimate]]:
  """Tries settings until those programs that did not fit do.

  Returns:
    The settings `key=value` tried last, and what they make of the programs;
    the last of them does not fit if none was enough.
  """
  failed = {e.name for e in found if not e.memory.fits}
  over = max(e.memory.needed - e.memory.limit for e in found)
  tried, seen = (), []
  candidates = list(settings_that_save(run, over))[:_MOST_TRIED]
  for tried in progress.track(candidates, "setting", "tried", 0):
    other, seen = pod.run(tried), []
    for e in estimate_all(
      other, [p for p in other.programs() if p.name in failed]
    ):
      seen.append(e)
      if not e.memory.fits:
        break
    else:
      break
  return tried, seen


def settings_that_save(run: Run, over: int) -> Iterator[tuple[str, ...]]:
  """Yields settings that take ever less memory, the cheapest first.

  The run does not fit by so many bytes.
  """
  kept, mesh, remat = (), run.mesh.shape, run.config.model.remat
  # In float32: the parameters, their two moments, and perhaps their average.
  state = 4 * run.model.size * (3 + bool(run.step.ema))
  state //= mesh["fsdp"] * mesh["tensor"]
  wider = [n for n in fsdp_sizes(run, mesh["tensor"]) if n > mesh["fsdp"]]
  # The narrowest that spares enough: wider ones only send more.
  enough = [n for n in wider if state * (1 - mesh["fsdp"] / n) > over]
  for size in (enough or wider[-1:])[:1]:
    kept = ("mesh.data=-1", f"mesh.fsdp={size}")
    yield kept
  # Then recomputing, which costs time, and last smaller parts of a batch.
  for policy in {"none": ("dots", "block"), "dots": ("block",)}.get(remat, ()):
    yield (*kept, f"model.remat={policy}")
  if remat != "block":
    kept = (*kept, "model.remat=block")
  for count in microbatches(run):
    if count > run.config.train.microbatches:
      yield (*kept, f"train.microbatches={count}")


def fsdp_sizes(run: Run, tensor: int) -> list[int]:
  """Returns sizes of fsdp that the devices allow and that divide the width."""
  out, size = [], 1
  while size <= _MOST_FSDP:
    sizes = {"data": -1, "fsdp": size, "tensor": tensor}
    if run.model.config.width % size == 0:
      with contextlib.suppress(UserError):  # the devices do not allow it
        sharding.make_mesh(sizes, list(run.mesh.devices.flat))
        out.append(size)
    size *= 2
  return out


def microbatches(run: Run) -> list[int]:
  """Returns numbers of microbatches that divide every batch of a run."""
  layouts = [part.layout for part in run.order.parts]
  common = math.gcd(*(of.shard_rows * of.microbatches for of in layouts))
  return [n for n in range(1, common + 1) if common % n == 0]


# -------------------------------------------------------------- what is fastest


def sweep(pod: Pod, run: Run, budget: float) -> list[dict]:
  """Estimates the train steps on every mesh, the fastest first.

  After the budget, in seconds, nothing further is compiled.
  """
  end, out = time.monotonic() + budget, []
  meshes = list(_meshes(run))  # to be counted
  for mesh in progress.track(meshes, "mesh", "sweep", 0):
    for count in _microbatches_on(pod, mesh):
      if time.monotonic() > end:
        break
      row = _of_sweep(pod.run((*mesh, f"train.microbatches={count}")))
      out.append(row)
      if row["fits"]:  # more microbatches would but be slower
        break
  return sorted(out, key=lambda row: row.get("seconds", math.inf))


def _meshes(run: Run) -> Iterator[tuple[str, ...]]:
  c = run.model.config
  for tensor in (1, 2, 4):
    if all(n % tensor == 0 for n in (c.heads, c.kv_heads, c.mlp_width)):
      for fsdp in fsdp_sizes(run, tensor):
        yield "mesh.data=-1", f"mesh.fsdp={fsdp}", f"mesh.tensor={tensor}"


def _microbatches_on(pod: Pod, mesh: tuple[str, ...]) -> list[int]:
  with contextlib.suppress(UserError):  # the batch is no multiple of the shards
    return microbatches(pod.run((*mesh, "train.microbatches=1")))
  return []


def _of_sweep(run: Run) -> dict:
  """A line of the sweep: all train steps of a run."""
  found = list(estimate_all(run, run.programs(evaluations=False)))
  fits = all(e.memory.fits for e in found)
  row = {
    "mesh": dict(run.mesh.shape),
    "microbatches": run.config.train.microbatches,
    "needed": max(e.memory.needed for e in found),
    "limit": found[0].memory.limit,
    "fits": fits,
  }
  if fits:
    steps = sum(e.steps for e in found)
    seconds = sum(e.steps * e.step_seconds for e in found) / steps
    work = sum(e.steps * e.work.total for e in found) / steps
    row["seconds"] = seconds
    row["bound"] = max(found, key=lambda e: e.steps).bound
    row["mfu"] = work / (seconds * found[0].devices * found[0].peak)
  return row
