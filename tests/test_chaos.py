"""Disturbs training at random moments: it ends as if nothing had happened.

The tests kill a process of two or both, send them signals, damage their newest
checkpoints or fill their disk. Run again, they must end with the bits of an
undisturbed run: the parameters, and the loss of every step. test_train does the
same with one process.

One case runs with the other slow tests, and all of them nightly.
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
  "mesh.fsdp=2",
  "mesh.tensor=2",
)


@dataclasses.dataclass
class Case:
  """A run that is to be disturbed.

  Attributes:
    workdir: Its folder.
    data: The prepared data.
    cache: Where compiled programs are kept.
    rng: Chooses the moment.
  """

  workdir: pathlib.Path
  data: pathlib.Path
  cache: pathlib.Path
  rng: random.Random

  def train(self, run):
    """Calls `pods.training` or `pods.train` for two processes."""
    how = {"count": 2, "devices": 2, "cache": self.cache}
    return run(self.workdir, self.data, *SETTINGS, **how)

  def reach(self, moment: Callable[[], bool]) -> pods.Training:
    """Begins to train, up to a moment that comes before the end."""
    for _ in range(3):
      working = self.train(pods.training)
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
    return self.train(pods.train)

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
  *[(kill, ())] * 2,
  (kill, (0,)),
  (kill, (1,)),
  (terminate, ()),
  (terminate, (1,)),
  (corrupt, (flip,)),
  (corrupt, (flip, truncate)),
  (fill_disk, ()),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  """Compiled programs: all runs of a mesh have the same."""
  return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(prepared, cache, tmp_path_factory):
  """Trains undisturbed."""
  folder = tmp_path_factory.mktemp("whole") / "run"
  Case(folder, prepared, cache, random.Random(SEED)).finish()
  return folder


@pytest.mark.parametrize(
  "number",
  [
    pytest.param(i, marks=pytest.mark.nightly if i else [])
    for i in range(len(CASES))
  ],
)
def test_a_disturbed_run_ends_as_if_nothing_had_happened(
  number, prepared, whole, cache, tmp_path
):
  disturb, args = CASES[number]
  rng = random.Random(f"{SEED} {number}")
  case = Case(tmp_path / "run", prepared, cache, rng)
  disturb(case, *args)
  case.finish()
  losses = pods.losses(case.workdir)
  assert {step for step, _ in losses} >= set(range(1, STEPS + 1))
  assert losses == pods.losses(whole)
  assert runs.same_params(case.workdir, whole)
