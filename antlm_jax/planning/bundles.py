"""Reads a TPU kernel's instruction bundles; a core runs one bundle a cycle."""

import dataclasses
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Parts this long, relative to the longest, are a block's arithmetic.
_LONG = 0.5
# libtpu reads its options once, so each listing needs a new process.
_DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"


@dataclasses.dataclass(frozen=True)
class Listing:
  """Numbers of a kernel's bundles."""

  masked: int  # for a block of scores of which some are hidden
  whole: int  # for a block of which none is hidden
  rest: int  # others: the beginning and the end of an output block

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
    blocks = [part for part in parts if part > _LONG * max(parts)]
    return cls(max(blocks), min(blocks), len(lines) - sum(blocks))

  def cycles(self, masked: float, whole: float, outputs: float) -> float:
    """Returns the cycles for numbers of masked, whole and output blocks."""
    return masked * self.masked + whole * self.whole + outputs * self.rest


def environment(folder: str) -> dict[str, str]:
  """Returns variables that make libtpu write its listings to a folder."""
  return {"LIBTPU_INIT_ARGS": _DUMP.format(folder)}


def read(folder: str, names: str) -> dict[str, Listing]:
  """Removes a folder's listings; returns those whose names match a pattern."""
  out = {}
  for path in sorted(pathlib.Path(folder).glob("*.txt")):
    listing = path.name.endswith("final_bundles.txt")
    found = listing and re.search(names, path.name)
    if found and "schedule-analysis" not in path.name:
      out[found[0]] = Listing.parse(path.read_text())
    path.unlink()
  return out


def listings(code: str, names: str, *arguments) -> dict[str, Listing]:
  """Runs Python code that compiles for a TPU in a process; see `read`.

  The code finds the arguments in `sys.argv`, as JSON. Raises a RuntimeError if
  the code fails, with the end of its error.
  """
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-c", code, *map(json.dumps, arguments)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", **environment(folder)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
      raise RuntimeError(done.stderr[-2000:])
    return read(folder, names)
