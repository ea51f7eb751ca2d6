"""Disturbs training at random moments: it ends as if nothing had happened.

The tests kill real processes, send them signals, damage their newest
checkpoints or fill their disk. Run again, each must end with the bits of an
undisturbed run: the parameters, and the loss of every step.

Two cases run with the other slow tests, and all of them nightly.
"""

import contextlib
import dataclasses
import os
import pathlib
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from antlm_jax.training import metrics
from tests import pods, runs

pytestmark = pytest.mark.slow

SEED = 0
STEPS = 80
SETTINGS = (
  "curriculum=40C+40M steps",
  "checkpoint.every=4",
  "checkpoint.keep_last=3",
)
ALONE = {"count": 1, "devices": 2}
PAIR = {"count": 2, "devices": 2}
OWN = {
  1: ("mesh.data=2", "eval.rows=48", "eval.every=5"),
  2: ("mesh.fsdp=2", "mesh.tensor=2"),
}


@dataclasses.dataclass
class Case:
  """A run that is to be disturbed.

  Attributes:
    workdir: Its folder.
    data: The prepared data.
    options: Its processes.
    rng: Chooses the moment.
  """

  workdir: pathlib.Path
  data: pathlib.Path
  options: dict
  rng: random.Random

  @property
  def words(self) -> tuple:
    own = OWN[self.options["count"]]
    return self.workdir, self.data, *SETTINGS, *own

  def reach(self, moment: Callable[[], bool]) -> pods.Training:
    """Begins to train, up to a moment that comes before the end."""
    for _ in range(3):
      working = pods.training(*self.words, **self.options)
      while working.running() and not moment():
        time.sleep(0.002)
      if working.running():
        return working
      status, out = working.end()
      assert status == 0, out
      shutil.rmtree(self.workdir)  # it was over before we had a look
    raise AssertionError("it always ended too early")

  def finish(self) -> str:
    """Trains to the end; returns what was printed."""
    return pods.train(*self.words, **self.options)

  def some_step(self) -> Callable[[], bool]:
    """Returns the moment when a random number of steps has been done."""
    step = self.rng.randint(2, STEPS - 20)
    return lambda: self.steps() >= step

  def some_moment(self) -> Callable[[], bool]:
    """Returns any moment: while it starts, in a step or in a save."""
    start = time.monotonic() + self.rng.uniform(1, 6)
    return self.rng.choice(
      [self.some_step(), self.saving, lambda: time.monotonic() > start]
    )

  def steps(self) -> int:
    records = metrics.read_records(self.workdir)
    return records[-1]["step"] if records else 0

  def saved(self) -> list[pathlib.Path]:
    """The checkpoints that are whole, ascending."""
    return sorted(
      (p for p in self._checkpoints() if p.name.isdigit()),
      key=lambda p: int(p.name),
    )

  def saving(self) -> bool:
    return any("tmp" in path.name for path in self._checkpoints())

  def _checkpoints(self) -> list[pathlib.Path]:
    with contextlib.suppress(FileNotFoundError):
      return list((self.workdir / "checkpoints").iterdir())
    return []


def kill(case: Case, *who: int) -> None:
  """kill -9 of these processes, or all."""
  working = case.reach(case.some_moment())
  working.send(signal.SIGKILL, *who)
  begun = time.monotonic()
  status, out = working.end(120)
  assert status == 137 and "Traceback" not in out, out
  print(f"over {time.monotonic() - begun:.1f} s after the kill")


def terminate(case: Case, *who: int) -> None:
  """SIGTERM to these processes, or all; twice, as some launchers do."""
  working = case.reach(case.some_step())
  for _ in range(2):
    working.send(signal.SIGTERM, *who)
  status, out = working.end(120)
  assert status == 75 and "Traceback" not in out, out
  last = case.saved()[-1].name
  assert f"stopped after step {last}, saved" in out
  assert f"going on from step {last}" in case.finish()


def truncate(step: pathlib.Path) -> None:
  path = runs.largest_file(step / "params")
  os.truncate(path, path.stat().st_size // 2)


def flip(step: pathlib.Path) -> None:
  path = runs.largest_file(step / "optimizer")
  content = bytearray(path.read_bytes())
  middle = len(content) // 2
  for i in range(middle, middle + 64):
    content[i] ^= 255
  path.write_bytes(content)


def delete(step: pathlib.Path) -> None:
  runs.largest_file(step / "optimizer").unlink()


def empty_meta(step: pathlib.Path) -> None:
  os.truncate(runs.largest_file(step / "meta"), 0)


def corrupt(case: Case, *damages: Callable[[pathlib.Path], None]) -> None:
  """Kills it, and damages its newest checkpoints."""
  working = case.reach(lambda: len(case.saved()) == 3)
  working.send(signal.SIGKILL)
  working.end(120)
  broken = case.saved()[-1 : -1 - len(damages) : -1]
  for damage, step in zip(damages, broken, strict=True):
    damage(step)
  out = case.finish()
  for step in broken:
    assert f"passed over, and kept as {step.name}.unreadable" in out, out
    assert step.with_name(f"{step.name}.unreadable").is_dir()
  assert f"going on from step {int(broken[-1].name) - 4}" in out, out


def fill_disk(case: Case) -> None:
  """Fills the disk, which is a small one, and makes room afterwards."""
  disk = case.workdir.parent / "disk"
  disk.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)]
  if subprocess.run(mount, capture_output=True).returncode:
    pytest.skip("mounting a small tmpfs is not allowed here")
  try:
    inside = dataclasses.replace(case, workdir=disk / "run")
    working = inside.reach(inside.some_step())
    with contextlib.suppress(OSError), open(disk / "filler", "wb", 0) as filler:
      while True:
        filler.write(bytes(4096))
    good = len(inside.saved())
    status, out = working.end(120)
    assert status == 2 and "No space left" in out, out
    # asyncio also prints lines about orbax's failed writes.
    assert len(inside.saved()) >= good, "none is lost"
    (disk / "filler").unlink()
    inside.finish()
    shutil.copytree(disk / "run", case.workdir)
  finally:
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


CASES = [
  *[(kill, (), ALONE)] * 3,
  *[(terminate, (), ALONE)] * 2,
  (corrupt, (truncate,), ALONE),
  (corrupt, (flip,), ALONE),
  (corrupt, (delete,), ALONE),
  (corrupt, (empty_meta,), ALONE),
  (corrupt, (flip, truncate), ALONE),
  (fill_disk, (), ALONE),
  *[(kill, (), PAIR)] * 2,
  (kill, (0,), PAIR),
  *[(kill, (1,), PAIR)] * 2,
  (terminate, (), PAIR),
  (terminate, (1,), PAIR),
  (corrupt, (flip,), PAIR),
  (fill_disk, (), PAIR),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  """Compiled programs: all runs of a mesh have the same."""
  return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(prepared, cache, tmp_path_factory):
  """Trains undisturbed, once for each number of processes."""
  done = {}

  def folder(options):
    count = options["count"]
    if count not in done:
      done[count] = tmp_path_factory.mktemp("whole") / "run"
      options = options | {"cache": cache}
      case = Case(done[count], prepared, options, random.Random(SEED))
      case.finish()
    return done[count]

  return folder


# One kill and one damage; test_distributed kills one of a pair.
FEW = (0, 5)


@pytest.mark.parametrize(
  "number",
  [
    pytest.param(i, marks=[] if i in FEW else pytest.mark.nightly)
    for i in range(len(CASES))
  ],
)
def test_a_disturbed_run_ends_as_if_nothing_had_happened(
  number, prepared, whole, cache, tmp_path
):
  disturb, args, options = CASES[number]
  rng = random.Random(f"{SEED} {number}")
  expected = whole(options)
  case = Case(tmp_path / "run", prepared, options | {"cache": cache}, rng)
  disturb(case, *args)
  case.finish()
  losses = pods.losses(case.workdir)
  assert {step for step, _ in losses} >= set(range(1, STEPS + 1))
  assert losses == pods.losses(expected)
  assert runs.same_params(case.workdir, expected)
