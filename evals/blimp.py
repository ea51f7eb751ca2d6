"""Zero-shot accuracy on minimal pairs in BLiMP's form (arXiv 1912.00582).

  python -m evals.blimp --checkpoint=RUN --data=FOLDER --mode=causal

Every *.jsonl of the folder holds one pair a line: `sentence_good` and
`sentence_bad`, and, if known, `UID`, `linguistics_term`, `field` and
`pair_id`. BabyLM's filtered BLiMP and its supplement are such folders. The
UID is the file's name where a line names none, as in the supplement.
"""

import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence

from antlm_jax import cli
from antlm_jax.errors import UserError
from evals.zero_shot import pairs
from evals.zero_shot.pairs import Pair


def read(folder, limit: int = 0) -> list[Pair]:
  """Reads the pairs of a folder.

  Args:
    folder: Holds *.jsonl files.
    limit: At most so many pairs of each file; 0 for all.

  Raises:
    UserError: if there are none, or a line is not a pair.
  """
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    raise UserError(f"--data={folder}: no such folder")
  found = []
  for path in sorted(folder.glob("*.jsonl")):
    found += itertools.islice(_pairs(path), limit or None)
  if not found:
    raise UserError(f"--data={folder} holds no pairs in *.jsonl files")
  return found


def _pairs(path: pathlib.Path) -> Iterator[Pair]:
  try:
    lines = path.read_text(encoding="utf-8").splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f"cannot read {path}: {error}") from error
  for number, line in enumerate(lines, start=1):
    if line.strip():
      yield _pair(line, path, number)


def _pair(line: str, path: pathlib.Path, number: int) -> Pair:
  where = f"{path}, line {number}"
  try:
    fields = json.loads(line)
  except json.JSONDecodeError as error:
    raise UserError(f"{where}: not JSON: {error}") from error
  for name in ("sentence_good", "sentence_bad"):
    if not isinstance(fields, dict) or not isinstance(fields.get(name), str):
      raise UserError(f"{where}: no text {name!r}")
  fields.setdefault("UID", path.stem)
  names = ("field", "UID", "linguistics_term")
  return Pair(
    context="",
    good=fields["sentence_good"],
    bad=fields["sentence_bad"],
    pair_id=str(fields.get("pair_id", number - 1)),
    groups={name: str(fields[name]) for name in names if name in fields},
  )


def _task(found: Sequence[Pair]) -> str:
  """Names the pipelines' task: only BLiMP's own lines have a field."""
  known = any("field" in pair.groups for pair in found)
  return "blimp" if known else "blimp_supplement"


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  data = "folder of *.jsonl files"
  args = pairs.parser("evals.blimp", __doc__, data).parse_args(argv)
  pairs.run(args, _task, lambda: read(args.data, args.limit))


if __name__ == "__main__":
  cli.run(main)
