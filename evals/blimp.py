"""Zero-shot accuracy on minimal pairs in BLiMP's form (arXiv 1912.00582).

  python -m evals.blimp --checkpoint=RUN --data=FOLDER --mode=causal

Every *.jsonl of the folder holds one pair a line: `sentence_good` and
`sentence_bad`, and, if known, `UID`, `linguistics_term` and `pair_id`. A pair
is right when the good sentence's score is the higher one; a tie is wrong. As
in BabyLM, the result is the unweighted mean of the accuracies by UID, which is
the file's name where a line names none.

Writes items.jsonl, with both scores of every pair, and summary.json.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import math
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import tqdm

from antlm_jax import checkpoint, cli, files
from antlm_jax.cli import UserError
from evals import scoring


@dataclasses.dataclass(frozen=True)
class Pair:
  """A minimal pair.

  Attributes:
    good: The acceptable sentence.
    bad: The unacceptable one.
    uid: The paradigm.
    term: The phenomenon that the paradigm belongs to, or "".
    pair_id: Its name in the paradigm.
  """

  good: str
  bad: str
  uid: str
  term: str
  pair_id: str


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
  pairs = []
  for path in sorted(folder.glob("*.jsonl")):
    pairs += itertools.islice(_pairs(path), limit or None)
  if not pairs:
    raise UserError(f"--data={folder} holds no pairs in *.jsonl files")
  return pairs


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
  return Pair(
    good=fields["sentence_good"],
    bad=fields["sentence_bad"],
    uid=str(fields.get("UID", path.stem)),
    term=str(fields.get("linguistics_term", "")),
    pair_id=str(fields.get("pair_id", number - 1)),
  )


@dataclasses.dataclass(frozen=True)
class Results:
  """Pairs and their scores.

  Attributes:
    pairs: n pairs.
    good: Scores of the good sentences, float64 `[n, K]`, by temperature.
    bad: Scores of the bad ones, float64 `[n, K]`.
    temperatures: K temperatures.
  """

  pairs: Sequence[Pair]
  good: np.ndarray
  bad: np.ndarray
  temperatures: Sequence[float]

  @property
  def correct(self) -> np.ndarray:
    """Which pairs are right, bool `[n, K]`."""
    return self.good > self.bad

  def mean_by(self, names: Sequence[str]) -> dict[str, tuple[int, np.ndarray]]:
    """Returns by name the number of its pairs and their accuracy `[K]`."""
    rows = collections.defaultdict(list)
    for row, name in enumerate(names):
      rows[name].append(row)
    correct = self.correct
    return {n: (len(r), correct[r].mean(axis=0)) for n, r in rows.items()}

  @property
  def by_uid(self) -> dict[str, tuple[int, np.ndarray]]:
    """Number of pairs and accuracy `[K]` of each UID."""
    return self.mean_by([pair.uid for pair in self.pairs])

  @property
  def macro(self) -> np.ndarray:
    """Unweighted mean of the accuracies by UID, `[K]`: BabyLM's number."""
    return np.mean([share for _, share in self.by_uid.values()], axis=0)

  def summary(self) -> dict:
    """Returns the numbers; those by UID at the first temperature."""
    macro, correct = self.macro, self.correct.mean(axis=0)
    return {
      "pairs": len(self.pairs),
      "ties": int((self.good == self.bad)[:, 0].sum()),
      "macro_accuracy": float(macro[0]),
      "pair_accuracy": float(correct[0]),
      "by_uid": {
        uid: {"pairs": count, "accuracy": float(share[0])}
        for uid, (count, share) in self.by_uid.items()
      },
      "by_temperature": [
        {
          "temperature": t,
          "macro_accuracy": float(m),
          "pair_accuracy": float(c),
        }
        for t, m, c in zip(self.temperatures, macro, correct, strict=True)
      ],
    }

  def items(self) -> Iterator[dict]:
    """Yields every pair with its scores at the first temperature."""
    for i, pair in enumerate(self.pairs):
      yield {
        "UID": pair.uid,
        "pair_id": pair.pair_id,
        "sentence_good": pair.good,
        "sentence_bad": pair.bad,
        "score_good": float(self.good[i, 0]),
        "score_bad": float(self.bad[i, 0]),
        "correct": bool(self.correct[i, 0]),
      }

  def table(self) -> str:
    """Lays the accuracies out in percent, by phenomenon where there are any."""
    terms = {pair.uid: pair.term for pair in self.pairs}
    by_uid = self.by_uid
    lines = [_row("", "pairs", "accuracy (%)")]
    for term in sorted(set(terms.values())):
      uids = sorted(uid for uid in by_uid if terms[uid] == term)
      if term:
        count = sum(by_uid[uid][0] for uid in uids)
        lines.append(
          _row(term, count, np.mean([by_uid[u][1][0] for u in uids]))
        )
      for uid in uids:
        count, share = by_uid[uid]
        lines.append(_row(f"  {uid}" if term else uid, count, share[0]))
    count = len(self.pairs)
    lines.append(_row("mean over UIDs", count, self.macro[0]))
    lines.append(_row("mean over pairs", count, self.correct[:, 0].mean()))
    if len(self.temperatures) > 1:
      lines.append(_row("", "", "mean over UIDs"))
      for temperature, share in zip(self.temperatures, self.macro, strict=True):
        lines.append(_row(f"temperature {temperature:g}", "", share))
    return "\n".join(lines)


def _row(name: str, count, share) -> str:
  if not isinstance(share, str):
    share = f"{100 * share:.2f}"
  return f"{name:<56} {count:>6} {share:>15}"


def evaluate(
  loaded: checkpoint.Loaded,
  pairs: Sequence[Pair],
  mode: str,
  temperatures: Sequence[float] = (1.0,),
  **options,
) -> Results:
  """Scores pairs; `options` are those of `scoring.score`."""
  sentences = [s for pair in pairs for s in (pair.good, pair.bad)]
  scores = scoring.score(
    loaded, sentences, mode, temperature=temperatures, **options
  )
  return Results(pairs, scores[::2], scores[1::2], temperatures)


def _track(batches: Sequence) -> Iterator:
  """Shows progress: a bar on a terminal, at most ten lines in a log."""
  if sys.stderr.isatty():
    yield from tqdm.tqdm(batches, unit="batch", dynamic_ncols=True)
    return
  every = math.ceil(len(batches) / 10)
  for done, batch in enumerate(batches, start=1):
    yield batch
    if done % every == 0:
      print(f"batch {done}/{len(batches)}", file=sys.stderr, flush=True)


def _default_output(loaded: checkpoint.Loaded, data: str, mode: str):
  """Returns RUN/evals/DATA/STEP-MODE."""
  folder = loaded.path.parent
  run = folder.parent if folder.name == checkpoint.FOLDER else folder
  name = pathlib.Path(data).absolute().name
  return run / "evals" / name / f"{loaded.step}-{mode}"


def _check_writable(folder: pathlib.Path) -> None:
  """Fails before the work is done rather than after."""
  parents = (folder, *folder.absolute().parents)
  nearest = next(parent for parent in parents if parent.exists())
  if not nearest.is_dir() or not os.access(nearest, os.W_OK):
    raise UserError(f"cannot write to --output={folder}")


def write(folder: pathlib.Path, results: Results, about: dict) -> None:
  """Writes items.jsonl, then summary.json, each whole or not at all."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    items = "".join(json.dumps(item) + "\n" for item in results.items())
    files.write_text(folder / "items.jsonl", items)
    summary = json.dumps(about | results.summary(), indent=2)
    files.write_text(folder / "summary.json", summary + "\n")
  except OSError as error:
    raise UserError(f"cannot write to {folder}: {error.strerror}") from error


def _temperatures(text: str) -> tuple[float, ...]:
  values = tuple(float(part) for part in text.split(","))
  if not all(0 < value < math.inf for value in values):
    raise argparse.ArgumentTypeError(f"{text!r} is not all positive")
  return values


def _count(text: str) -> int:
  value = int(text)
  if value < 0:
    raise argparse.ArgumentTypeError(f"{text!r} is negative")
  return value


def _parser() -> cli.Parser:
  parser = cli.Parser(prog="python -m evals.blimp", description=__doc__)
  add = parser.add_argument
  add("--checkpoint", required=True, help="a run, or one of its steps")
  add("--step", type=int, help="which step of the run; the newest by default")
  add("--data", required=True, help="folder of *.jsonl files")
  add("--mode", choices=scoring.MODES, required=True, help="how to score")
  add(
    "--reduction",
    choices=scoring.REDUCTIONS,
    default="sum",
    help="over the tokens of a sentence (default: sum)",
  )
  add(
    "--temperature",
    type=_temperatures,
    default=(1.0,),
    metavar="T[,T2,...]",
    help="divides the logits; items are of the first (default: 1)",
  )
  add("--limit", type=_count, default=0, help="pairs per file; 0 for all")
  add("--output", help="folder; RUN/evals/DATA/STEP-MODE by default")
  add(
    "--batch_tokens",
    type=_count,
    default=scoring.BATCH_TOKENS,
    help=f"tokens encoded at once (default: {scoring.BATCH_TOKENS})",
  )
  return parser


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = _parser().parse_args(argv)
  pairs = read(args.data, args.limit)
  loaded = checkpoint.load(args.checkpoint, args.step)
  output = _default_output(loaded, args.data, args.mode)
  if args.output:
    output = pathlib.Path(args.output)
  _check_writable(output)
  results = evaluate(
    loaded,
    pairs,
    args.mode,
    args.temperature,
    reduction=args.reduction,
    batch_tokens=args.batch_tokens,
    track=_track,
  )
  about = {
    "checkpoint": str(loaded.path),
    "step": loaded.step,
    "data": str(pathlib.Path(args.data).absolute()),
    "mode": args.mode,
    "reduction": args.reduction,
    "temperature": args.temperature[0],
  }
  write(output, results, about)
  print(results.table())
  print(f"written to {output}")


if __name__ == "__main__":
  cli.run(main)
