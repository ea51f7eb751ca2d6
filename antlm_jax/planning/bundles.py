"""Reads instruction bundles of TPU programs; a core runs a bundle per cycle."""

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

# Parts at least this long, relative to the longest, compute a block.
_LONG = 0.5
_OPTIONS = "LIBTPU_INIT_ARGS"
# Select the listings of the last pass of the compiler.
_DUMP = (
  "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
  " --xla_jf_dump_llo_pass_label_regex=^final_bundles"
)


@dataclasses.dataclass(frozen=True)
class BundleCounts:
  """Numbers of bundles of an attention kernel or of an XLA fusion."""

  masked: int  # bundles for a block with hidden scores
  unmasked: int  # bundles for a block without hidden scores
  output: int  # bundles that begin and end an output block
  all: int  # bundles of the program
  looped: int  # bundles in the loop of a fusion; 0 without a loop

  @classmethod
  def parse(cls, text: str) -> "BundleCounts":
    """Parses a listing and splits it at branches.

    A kernel has code for a block with the mask and, maybe, shorter code without
    the mask.
    """
    lines = [x for x in text.splitlines() if re.match(r"\s*0x[0-9a-f]+", x)]
    branch = re.compile("sbr[.]rel|Start reg")
    cuts = [i for i, x in enumerate(lines) if branch.search(x)]
    bounds = itertools.pairwise([0, *cuts, len(lines)])
    parts = [end - start for start, end in bounds]
    blocks = [part for part in parts if part >= _LONG * max(parts)]
    looped = sum(re.match(r"\s*0x\w+ +\w*: >", x) is not None for x in lines)
    output = len(lines) - sum(blocks)
    return cls(max(blocks), min(blocks), output, len(lines), looped)

  def cycles(self, masked: float, unmasked: float, outputs: float) -> float:
    """Returns the cycles for masked, unmasked and output blocks."""
    return (
      masked * self.masked + unmasked * self.unmasked + outputs * self.output
    )

  def passes(self, times: int) -> int:
    """Returns the cycles of a fusion whose loop runs this number of times."""
    return self.all + (times - 1) * self.looped


@functools.cache
def listing_folder() -> str:
  """Makes a folder for this process's listings; the exit removes it."""
  path = tempfile.mkdtemp(prefix="antlm_bundles_")
  atexit.register(shutil.rmtree, path, ignore_errors=True)
  return path


@contextlib.contextmanager
def list_programs() -> Iterator[None]:
  """Makes libtpu list its programs, if it is loaded inside this context.

  libtpu reads its options once. The environment is restored afterwards.
  """
  before = os.environ.get(_OPTIONS)
  os.environ[_OPTIONS] = (
    f"{before or ''} {_DUMP.format(listing_folder())}".strip()
  )
  try:
    yield
  finally:
    del os.environ[_OPTIONS]
    if before is not None:
      os.environ[_OPTIONS] = before


def read_bundle_counts() -> dict[str, BundleCounts]:
  """Returns the listings by the instruction's name, and removes the files.

  The compiler lists equal instructions only once.
  """
  out = {}
  for path in sorted(pathlib.Path(listing_folder()).glob("*.txt")):
    match = re.fullmatch(r"\d+-(.+)-\d+-final_bundles.txt", path.name)
    if match and "schedule-analysis" not in path.name:
      out[match[1]] = BundleCounts.parse(path.read_text("utf-8"))
    path.unlink()
  return out
