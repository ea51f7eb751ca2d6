"""Training is disturbed at random moments, and ends as if it had not been.

Real processes are killed, told to end, find their newest checkpoint broken or
their disk full. Run again, each must end with the bits of a run that nothing
disturbed: the parameters, and the loss of every step.

Some of the cases are run with the other slow tests, all of them nightly.
"""

import collections
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


# The ways to disturb a run.


def kill(case: Case, *who: int) -> None:
  """kill -9 of these processes, or all."""
  working = case.reach(case.some_moment())
  working.send(signal.SIGKILL, *who)
  begun = time.monotonic()
  status, out = working.end(120)
  assert status == 137 and "Traceback" not in out, out
  print(f"over {time.monotonic() - begun:.1f} s after the kill")


def kill_first(case: Case) -> None:
  kill(case, 0)


def kill_second(case: Case) -> None:
  kill(case, 1)


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


def terminate_one(case: Case) -> None:
  terminate(case, 1)


def largest_file(folder: pathlib.Path) -> pathlib.Path:
  files = [path for path in folder.rglob("*") if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def truncate(step: pathlib.Path) -> None:
  path = largest_file(step / "params")
  os.truncate(path, path.stat().st_size // 2)


def flip(step: pathlib.Path) -> None:
  path = largest_file(step / "optimizer")
  content = bytearray(path.read_bytes())
  middle = len(content) // 2
  for i in range(middle, middle + 64):
    content[i] ^= 255
  path.write_bytes(content)


def delete(step: pathlib.Path) -> None:
  largest_file(step / "optimizer").unlink()


def empty_meta(step: pathlib.Path) -> None:
  os.truncate(largest_file(step / "meta"), 0)


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


def corrupt_truncated(case: Case) -> None:
  corrupt(case, truncate)


def corrupt_flipped(case: Case) -> None:
  corrupt(case, flip)


def corrupt_deleted(case: Case) -> None:
  corrupt(case, delete)


def corrupt_meta(case: Case) -> None:
  corrupt(case, empty_meta)


def corrupt_two(case: Case) -> None:
  corrupt(case, flip, truncate)


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
    # Beside it, asyncio prints of what orbax left when its write failed.
    assert len(inside.saved()) >= good, "none is lost"
    (disk / "filler").unlink()
    inside.finish()
    shutil.copytree(disk / "run", case.workdir)
  finally:
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


CASES = [
  *[(kill, ALONE)] * 3,
  *[(terminate, ALONE)] * 2,
  (corrupt_truncated, ALONE),
  (corrupt_flipped, ALONE),
  (corrupt_deleted, ALONE),
  (corrupt_meta, ALONE),
  (corrupt_two, ALONE),
  (fill_disk, ALONE),
  (kill, PAIR),
  (kill, PAIR),
  (kill_first, PAIR),
  (kill_second, PAIR),
  (kill_second, PAIR),
  (terminate, PAIR),
  (terminate_one, PAIR),
  (corrupt_flipped, PAIR),
  (fill_disk, PAIR),
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


@pytest.fixture(scope="module")
def tally():
  """Counts what was survived, and prints it in the end."""
  counts = collections.Counter()
  yield counts
  print(f"\nsurvived {counts.total()} disturbances:")
  for name, count in sorted(counts.items()):
    print(f"  {count} x {name}")


# A kill and a broken checkpoint alone; a kill in a pair is test_distributed's.
FEW = (0, 5)


@pytest.mark.parametrize(
  "number",
  [
    pytest.param(i, marks=[] if i in FEW else pytest.mark.nightly)
    for i in range(len(CASES))
  ],
)
def test_a_disturbed_run_ends_as_if_nothing_had_happened(
  number, prepared, whole, cache, tally, tmp_path
):
  disturb, options = CASES[number]
  rng = random.Random(f"{SEED} {number}")
  expected = whole(options)
  case = Case(tmp_path / "run", prepared, options | {"cache": cache}, rng)
  disturb(case)
  case.finish()
  losses = pods.losses(case.workdir)
  assert {step for step, _ in losses} >= set(range(1, STEPS + 1))
  assert losses == pods.losses(expected)
  assert runs.same_params(case.workdir, expected)
  count = options["count"]
  tally[f"{disturb.__name__}, {count} process{'es' * (count > 1)}"] += 1
