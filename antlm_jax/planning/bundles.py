"""Reads a TPU program's instruction bundles; a core runs one bundle a cycle."""

import atexit
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator

# Parts this long, relative to the longest, are a block's arithmetic.
_LONG = 0.5
_OPTIONS = "LIBTPU_INIT_ARGS"
# Other listings would be of earlier passes.
_DUMP = (
  "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
  " --xla_jf_dump_llo_pass_label_regex=^final_bundles"
)


@dataclasses.dataclass(frozen=True)
class Listing:
  """Numbers of bundles of an attention kernel, or of a fusion of XLA's."""

  masked: int  # for a block of scores of which some are hidden
  whole: int  # for a block of which none is hidden
  rest: int  # others: the beginning and the end of an output block
  all: int  # of the program
  looped: int  # in a loop: a fusion has one, or none

  @classmethod
  def parse(cls, text: str) -> "Listing":
    """Reads a listing, divided at its branches.

    A kernel has its block's arithmetic once, or twice: with the mask, and a
    shorter one without.
    """
    lines = [x for x in text.splitlines() if re.match(r"\s*0x[0-9a-f]+", x)]
    branch = re.compile("sbr[.]rel|Start reg")
    cuts = [i for i, x in enumerate(lines) if branch.search(x)]
    bounds = itertools.pairwise([0, *cuts, len(lines)])
    parts = [end - start for start, end in bounds]
    blocks = [part for part in parts if part >= _LONG * max(parts)]
    looped = sum(re.match(r"\s*0x\w+ +\w*: >", x) is not None for x in lines)
    rest = len(lines) - sum(blocks)
    return cls(max(blocks), min(blocks), rest, len(lines), looped)

  def cycles(self, masked: float, whole: float, outputs: float) -> float:
    """Returns the cycles for numbers of masked, whole and output blocks."""
    return masked * self.masked + whole * self.whole + outputs * self.rest

  def passes(self, times: int) -> int:
    """Returns the cycles of a fusion whose loop runs a number of times."""
    return self.all + (times - 1) * self.looped


@functools.cache
def folder() -> str:
  """Makes the folder of this process's listings, which goes when it ends."""
  path = tempfile.mkdtemp(prefix="antlm_bundles_")
  atexit.register(shutil.rmtree, path, ignore_errors=True)
  return path


@contextlib.contextmanager
def listed() -> Iterator[None]:
  """Lets libtpu list what it compiles, if it is loaded inside.

  It reads its options once. The environment stays as it is for others.
  """
  before = os.environ.get(_OPTIONS)
  os.environ[_OPTIONS] = f"{before or ''} {_DUMP.format(folder())}".strip()
  try:
    yield
  finally:
    del os.environ[_OPTIONS]
    if before is not None:
      os.environ[_OPTIONS] = before


def read() -> dict[str, Listing]:
  """Removes the listings; returns them by the instruction's name.

  Of equal instructions the compiler lists one.
  """
  out = {}
  for path in sorted(pathlib.Path(folder()).glob("*.txt")):
    found = re.fullmatch(r"\d+-(.+)-\d+-final_bundles.txt", path.name)
    if found and "schedule-analysis" not in path.name:
      out[found[1]] = Listing.parse(path.read_text())
    path.unlink()
  return out
