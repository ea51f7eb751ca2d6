"""Minimal pairs: what the commands that score them share.

A pair is right when the good choice's score is the higher one; a tie is wrong
(BabyLM's pipelines give it to the choice that is listed first, the good one).
As there, the result is the unweighted mean of the accuracies by UID.

`--pipeline` says how a choice is scored:

  ours  special tokens as in training; sums; every mode.
  2024  babylm/evaluation-pipeline-2024. causal: sums, as lm-eval's `hf`: the
        choice after " ", behind the BOS (or EOS) token if there is no context
        and behind the context alone if there is one. mlm: means over tokens,
        as its `hf-mlm` through minicons' conditional_score: framed as in
        training, the EOS token for an empty context, two spaces before the
        choice, of which the first is often a scored token of its own.
  2025  babylm/evaluation-pipeline-2025, backends causal, mlm and mntp: sums
        over the tokens that end after the context, framed as the tokenizer
        frames a text. That is `ours` for a tokenizer that frames as training
        did, so the two give the same scores.

The pipelines take the frame from a tokenizer's files; here it is what stood
around the documents of the training data: BOS and EOS, EOS twice, or nothing.
A model that is published with another frame scores otherwise there. A token
across the end of a context is the choice's, as in 2025; 2024 counts the tokens
of the context encoded alone, which is the same for tokenizers that cut at
spaces, as byte-level BPE does. Two things of 2024 are errors here: a tokenizer
without an EOS token, for which it scores behind the word "None", and a text
longer than the model's rows, which it cuts.

Writes summary.json and items.jsonl (both scores of every pair); for 2024 and
2025 predictions.json in their forms; for 2025 best_temperature_report.txt.
Where the output folder holds the results of the same request, nothing is done.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from antlm_jax import cli
from antlm_jax.runtime import progress
from antlm_jax.training import checkpoint
from evals import results as outputs
from evals.zero_shot import scoring


@dataclasses.dataclass(frozen=True)
class Pair:
  """A minimal pair.

  Attributes:
    context: What both choices follow, or "".
    good: The acceptable choice.
    bad: The unacceptable one.
    pair_id: Its name among those of its UID.
    groups: What accuracies are taken by, name to value, as the data names
      them: always `UID`, the paradigm or domain.
  """

  context: str
  good: str
  bad: str
  pair_id: str
  groups: Mapping[str, str]

  @property
  def uid(self) -> str:
    """The paradigm or domain."""
    return self.groups["UID"]

  @property
  def term(self) -> str:
    """The phenomenon that the paradigm belongs to, or ""."""
    return self.groups.get("linguistics_term", "")


@dataclasses.dataclass(frozen=True)
class Results:
  """Pairs and their scores.

  Attributes:
    pairs: n pairs.
    good: Scores of the good choices, float64 `[n, K]`, by temperature.
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

  def mean_by(self, group: str) -> dict[str, tuple[int, np.ndarray]]:
    """Returns by a group's values the number of pairs and accuracy `[K]`."""
    rows = collections.defaultdict(list)
    for row, pair in enumerate(self.pairs):
      if group in pair.groups:
        rows[pair.groups[group]].append(row)
    correct = self.correct
    return {n: (len(r), correct[r].mean(axis=0)) for n, r in rows.items()}

  @property
  def by_uid(self) -> dict[str, tuple[int, np.ndarray]]:
    """Number of pairs and accuracy `[K]` of each UID."""
    return self.mean_by("UID")

  @property
  def macro(self) -> np.ndarray:
    """Unweighted mean of the accuracies by UID, `[K]`: BabyLM's number."""
    return np.mean([share for _, share in self.by_uid.values()], axis=0)

  @property
  def best(self) -> int:
    """Which temperature has the highest `macro`; of equal ones the first."""
    return int(self.macro.argmax())

  def summary(self) -> dict:
    """Returns the numbers; those by UID at the first temperature."""
    macro, correct = self.macro, self.correct.mean(axis=0)
    terms = {pair.uid: pair.term for pair in self.pairs}
    return {
      "pairs": len(self.pairs),
      "ties": int((self.good == self.bad)[:, 0].sum()),
      "macro_accuracy": float(macro[0]),
      "pair_accuracy": float(correct[0]),
      "best_temperature": self.temperatures[self.best],
      "by_uid": {
        uid: {"term": terms[uid], "pairs": count, "accuracy": float(share[0])}
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
      context = {"context": pair.context} if pair.context else {}
      yield {
        "uid": pair.uid,
        "id": pair.pair_id,
        "correct": bool(self.correct[i, 0]),
        "score_good": float(self.good[i, 0]),
        "score_bad": float(self.bad[i, 0]),
        **context,
        "good": pair.good,
        "bad": pair.bad,
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
  scores = scoring.score(
    loaded,
    [choice for pair in pairs for choice in (pair.good, pair.bad)],
    mode,
    contexts=[pair.context for pair in pairs for _ in range(2)],
    temperature=temperatures,
    **options,
  )
  return Results(pairs, scores[::2], scores[1::2], temperatures)


# ------------------------------------------------- the pipelines' own files


def _predictions(results: Results, which: int, leads: Sequence[str]) -> dict:
  """Returns what was chosen, by UID, as both pipelines lay it out.

  Args:
    results: n pairs and their scores.
    which: Index of the temperature.
    leads: n texts that stand before the choices in the pipeline's strings.
  """
  out = collections.defaultdict(lambda: {"predictions": []})
  for pair, correct, lead in zip(
    results.pairs, results.correct[:, which], leads, strict=True
  ):
    chosen = out[pair.uid]["predictions"]
    text = lead + (pair.good if correct else pair.bad)
    chosen.append({"id": f"{pair.uid}_{len(chosen)}", "pred": text})
  return out


def _files_2024(task: str, results: Results) -> dict[str, str]:
  """The task's part of what collect_results.py writes."""
  chosen = _predictions(results, 0, [" "] * len(results.pairs))
  return {"predictions.json": json.dumps({task: chosen})}


def _files_2025(task: str, results: Results) -> dict[str, str]:
  """What sentence_zero_shot writes, at the best temperature."""
  del task  # names the folder there
  leads = [" " if pair.context else "" for pair in results.pairs]
  chosen = _predictions(results, results.best, leads)
  return {
    "predictions.json": json.dumps(chosen),
    "best_temperature_report.txt": _report(results, results.best),
  }


def _report(results: Results, which: int) -> str:
  lines = [f"TEMPERATURE: {results.temperatures[which]:.2f}", ""]
  for group in dict.fromkeys(g for pair in results.pairs for g in pair.groups):
    lines.append(f"### {group.upper()} ACCURACY")
    for name, (_, share) in results.mean_by(group).items():
      lines.append(f"{name}: {100 * share[which]:.2f}")
    lines.append("")
  average = f"{100 * results.macro[which]:.2f}"
  return "\n".join([*lines, "### AVERAGE ACCURACY", average, "", ""])


_FILES = {
  "ours": lambda task, results: {},
  "2024": _files_2024,
  "2025": _files_2025,
}


# ---------------------------------------------------------------- the command


def parser(module: str, description: str, data: str) -> cli.Parser:
  """Returns the arguments that the commands share.

  Args:
    module: The command's name.
    description: Its docstring; this module's is put after it.
    data: What `--data` is.
  """
  out = cli.Parser(
    prog=f"python -m {module}", description=f"{description}\n{__doc__}"
  )
  add = out.add_argument
  checkpoint.add_arguments(out)
  add("--data", required=True, help=data)
  add("--mode", choices=scoring.MODES, required=True, help="how to score")
  add("--pipeline", choices=scoring.PIPELINES, default="ours", help="see above")
  add(
    "--reduction",
    choices=scoring.REDUCTIONS,
    help="over the tokens of a choice; the pipeline's by default",
  )
  add(
    "--temperature",
    type=_temperatures,
    default="1",
    metavar="T[,T2,...]",
    help="divides the logits; items are of the first",
  )
  add("--limit", type=_count, default=0, help="pairs per UID; 0 for all")
  add(
    "--output",
    type=cli.here,
    help="folder; RUN/evals/DATA/STEP-MODE by default",
  )
  add("--overwrite", action="store_true", help="score what is scored already")
  add(
    "--batch_tokens",
    type=_count,
    default=scoring.BATCH_TOKENS,
    help="tokens encoded at once",
  )
  return out


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


def run(
  args: argparse.Namespace,
  task: Callable[[Sequence[Pair]], str],
  read: Callable[[], list[Pair]],
) -> None:
  """Scores pairs and writes the results, unless they are there.

  Args:
    args: Of `parser`, perhaps with arguments that choose among the pairs.
    task: Names the pipelines' task that pairs are of.
    read: Reads the pairs.

  Raises:
    UserError: for anything wrong with the checkpoint, data or output.
  """
  layout = scoring.PIPELINES[args.pipeline].layout(args.mode)
  pairs = read()
  loaded = checkpoint.load(args.checkpoint, args.step)
  request = _request(args, loaded, args.reduction or layout.reduction)
  output = pathlib.Path(args.output or _default_output(loaded, args))
  there = None if args.overwrite else outputs.finished(output, request)
  if there:
    share = f"{100 * there['macro_accuracy']:.2f} %"
    print(f"already scored: {output} ({share}; --overwrite scores again)")
    return
  outputs.check_writable(output)
  print(f"{len(pairs):,} pairs of {args.data}, {args.mode}", flush=True)
  results, cost = _timed(loaded, pairs, args)
  own = _FILES[args.pipeline](task(pairs), results)
  write(output, results, request, cost, own)
  print(results.table())
  print(f"written to {output}")


def _timed(loaded, pairs, args) -> tuple[Results, dict[str, float]]:
  """Scores pairs and says what it cost, compilation included."""
  began = time.monotonic()
  results = evaluate(
    loaded,
    pairs,
    args.mode,
    args.temperature,
    pipeline=scoring.PIPELINES[args.pipeline],
    reduction=args.reduction,
    batch_tokens=args.batch_tokens,
    track=functools.partial(progress.track, unit="batch"),
  )
  seconds = time.monotonic() - began
  return results, {"seconds": seconds, "peak_memory_mib": _peak_memory()}


def _request(args: argparse.Namespace, loaded, reduction: str) -> dict:
  """Returns all that the results depend on."""
  apart = "checkpoint", "step", "data", "output", "overwrite", "batch_tokens"
  files = sorted(p for p in pathlib.Path(args.data).glob("*") if p.is_file())
  return {k: v for k, v in vars(args).items() if k not in apart} | {
    **outputs.model_digest(loaded),
    "data": outputs.data_digest(files),
    "reduction": reduction,
  }


def _default_output(loaded, args: argparse.Namespace) -> pathlib.Path:
  """Returns RUN/evals/DATA/STEP-MODE, or STEP-MODE-PIPELINE."""
  name = "-".join((str(loaded.step), args.mode, args.pipeline))
  data = pathlib.Path(args.data).absolute().name
  return outputs.folder(loaded, data, name.removesuffix("-ours"))


def _peak_memory() -> float:
  """Returns the accelerator's peak memory, or on CPU the process's, in MiB."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"] / 2**20
  unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def write(
  folder: pathlib.Path,
  results: Results,
  request: Mapping,
  cost: Mapping,
  own: Mapping[str, str],
) -> None:
  """Writes a pipeline's own files, items.jsonl and, last, summary.json."""
  items = "".join(json.dumps(item) + "\n" for item in results.items())
  summary = {"request": dict(request), **cost, **results.summary()}
  outputs.write(folder, {**own, "items.jsonl": items}, summary)
