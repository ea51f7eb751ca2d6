"""Tables and picture of the ways to turn a decoder into an encoder.

    python -m antlm_jax.evals.benchmarks.pages.from_decoder --picture=FILE

from_decoder.json has the lines of the experiment's from_decoder.jsonl, with
fewer digits, and scores of other models as marks. The measures and claims are
those of evals/benchmarks/from_decoder.py.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from antlm_jax import cli, tables
from antlm_jax.evals import statistics
from antlm_jax.evals.benchmarks import common
from antlm_jax.evals.benchmarks.from_decoder import METRICS, RATES, SETS
from antlm_jax.evals.benchmarks.pages.studies import RESULTS, interval_text
from antlm_jax.evals.statistics import MeanEstimate
from antlm_jax.page import plots
from antlm_jax.runtime import files
from antlm_jax.settings import setting

NAMES = {"nfcorpus": "NFCorpus", "scifact": "SciFact"}
TUNED = {f"{task}_tuned": metric for task, metric in METRICS.items()}
RATE_KEYS = [f"{rate:g}" for rate in RATES["tuned"]]  # as keys
ROWS = {  # as the page lists them
  "causal": "`causal`: the decoder as it is",
  "bidirectional": "`bidirectional`: without the mask",
  "clm": "`clm`",
  "clm_mlm": "`clm_mlm`",
  "mntp": "`mntp`",
  "mlm": "`mlm`",
  "scratch": "`scratch`: MLM from random parameters",
}
ASSUMED = 0.5  # deviation of a difference over seeds, in points
LEVEL = 0.05
MOST = 1000  # seeds
MARKERS = "os^"  # of the picture's seeds
_POINT = {"color": "0.1", "mfc": "white", "ms": 6, "ls": ""}


class EncoderClaim(NamedTuple):
  """A difference of two rows, and the points that were expected."""

  row: str
  control: str
  expected: Mapping[str, tuple[int, int]]  # by outcome


CLAIMS = (
  EncoderClaim("mlm", "bidirectional", {"R": (2, 8), "T": (2, 8)}),
  EncoderClaim("mlm", "scratch", {"R": (5, 15), "T": (5, 20)}),
  EncoderClaim("mlm", "clm", {"R": (1, 6), "T": (1, 6)}),
  EncoderClaim("clm_mlm", "mlm", {"R": (-1, 1), "T": (-1, 1)}),
  EncoderClaim("mntp", "mlm", {"R": (-1, 2), "T": (-1, 2)}),
)

_STRICTEST = 1 - LEVEL / (2 * len(CLAIMS))  # of Holm, with two outcomes

# ----------------------------------------------------------------- the measures


@functools.cache
def _stored_scores() -> dict:
  return files.read_json(RESULTS / "from_decoder.json", "the scores")


@functools.cache
def _stored_results() -> dict[tuple[str, str], dict[int, dict]]:
  """Returns the results by row and measure, then by seed."""
  out = {}
  for one in _stored_scores()["rows"]:
    of = out.setdefault((one["row"], one["measure"]), {})
    of[one["seed"]] = one
  return out


def _row_seeds(row: str, measure: str) -> dict[int, dict]:
  return dict(sorted(_stored_results().get((row, measure), {}).items()))


def _ndcg_by_seed(row: str, measure: str, name: str) -> dict[int, float]:
  """Returns NDCG@10 on a set in points, by seed."""
  return {s: 100 * one[name] for s, one in _row_seeds(row, measure).items()}


def _label_score(row: str, measure: str, rate: str) -> dict[int, float]:
  """Returns the main score of a task at a rate in percent, by seed."""
  metric = TUNED[measure]
  found = _row_seeds(row, measure).items()
  return {seed: 100 * one[rate][metric] for seed, one in found}


def _mean_by_seed(parts: Sequence[Mapping[int, float]]) -> dict[int, float]:
  """Returns the mean of several scores, of the seeds that have all."""
  common_seeds = sorted(set.intersection(*map(set, parts)))
  return {s: float(np.mean([of[s] for of in parts])) for s in common_seeds}


def outcome_by_seed(row: str, name: str) -> dict[int, float]:
  """Returns the outcome R or T of a row in points, by seed."""
  if name == "R":
    return _mean_by_seed([_ndcg_by_seed(row, "pairs", of) for of in SETS])
  return _mean_by_seed(
    [_label_score(row, task, rate) for task in TUNED for rate in RATE_KEYS]
  )


def _outcome_items(
  row: str, name: str
) -> tuple[dict[int, np.ndarray], np.ndarray]:
  """Returns the points of each query or example by seed, and their strata."""
  if name == "R":
    by_part = [
      {s: one[f"{of}_queries"] for s, one in _row_seeds(row, "pairs").items()}
      for of in SETS
    ]
  else:
    by_part = [
      {
        seed: np.mean([[*map(int, one[r]["right"])] for r in RATE_KEYS], axis=0)
        for seed, one in _row_seeds(row, task).items()
      }
      for task in TUNED
    ]
  seeds = sorted(set.intersection(*map(set, by_part)))
  sizes = [len(next(iter(of.values()))) for of in by_part]
  values = {
    seed: 100 * np.concatenate([of[seed] for of in by_part]) for seed in seeds
  }
  return values, np.repeat(np.arange(len(sizes)), sizes)


# ------------------------------------------------------------------- the claims


def _paired(
  claim: EncoderClaim, of: Callable[[str], Mapping[int, np.ndarray | float]]
) -> np.ndarray:
  """Returns the differences of the seeds that both rows have, `[S, n]`."""
  one, other = of(claim.row), of(claim.control)
  both = sorted(set(one) & set(other))
  return np.stack([np.atleast_1d(one[s] - other[s]) for s in both])


def claim_difference(claim: EncoderClaim, name: str) -> MeanEstimate:
  """Estimates a claim's difference over seeds, and over queries if it is R.

  F1 is not a mean over examples, so the noise of T is that of its seeds alone.
  """
  if name == "R":
    values = _paired(claim, lambda row: _outcome_items(row, "R")[0])
    return statistics.estimate_mean(values, _outcome_items(claim.row, "R")[1])
  return statistics.estimate_mean(
    _paired(claim, lambda row: outcome_by_seed(row, "T"))
  )


def these_models(claim: EncoderClaim, name: str) -> MeanEstimate:
  """Estimates the difference of these models over queries or examples."""
  values = _paired(claim, lambda row: _outcome_items(row, name)[0])
  mean = values.mean(axis=0, keepdims=True)
  return statistics.estimate_mean(mean, _outcome_items(claim.row, name)[1])


def chance(found: MeanEstimate) -> float:
  """Returns p: the level at which the interval begins to contain zero."""
  low, high = -12.0, 0.0  # powers of 10
  for _ in range(50):
    middle = (low + high) / 2
    if found.half_width(1 - 10**middle) > abs(found.value):
      low = middle
    else:
      high = middle
  return 10**high


def holm(chances: Sequence[float]) -> list[float]:
  """Returns Holm's adjusted p of each claim."""
  out, highest = [0.0] * len(chances), 0.0
  for rank, i in enumerate(np.argsort(chances, kind="stable")):
    highest = max(highest, min(1.0, (len(chances) - rank) * chances[i]))
    out[i] = highest
  return out


def deviation(claims: Sequence[EncoderClaim], name: str) -> float:
  """Returns the deviation of the differences over seeds, pooled over claims."""
  found = [
    _paired(claim, lambda row: outcome_by_seed(row, name))[:, 0]
    for claim in claims
  ]
  squares = sum(((x - x.mean()) ** 2).sum() for x in found)
  return float((squares / sum(len(x) - 1 for x in found)) ** 0.5)


def seeds_needed(
  claim: EncoderClaim, name: str, effect: float, std: float
) -> str:
  """Returns how many seeds decide an effect at the strictest of ten levels."""
  found = claim_difference(claim, name)
  by_seeds = std**2 / found.seeds
  noise = found._replace(by_seeds=by_seeds, both=min(found.both, by_seeds))
  for count in range(2, MOST + 1):
    if noise.with_seeds(count).half_width(_STRICTEST) < abs(effect):
      return str(count)
  return "none"


# ------------------------------------------------------------------- the tables


def _seed_cells(by_seed: Mapping[int, float], digits: int = 1) -> str:
  """Writes the value of each seed."""
  return ", ".join(f"{x:.{digits}f}" for x in by_seed.values()) or "not run"


def _mean_cell(by_seed: Mapping[int, float]) -> str:
  return f"{np.mean([*by_seed.values()]):.1f}"


def _loss_cell(row: str) -> str:
  """Writes the held-out losses at the start and at the end, by objective."""
  runs, out = _row_seeds(row, "loss").values(), []
  for kind in ("clm", "mlm", "mntp"):
    key = f"eval/{kind}/loss"
    ends = [
      [one["held_out"][at][key] for one in runs if key in one["held_out"][at]]
      for at in (0, -1)
    ]
    if all(ends):
      start, end = (np.mean(of) for of in ends)
      out.append(f"{kind.upper()} {start:.2f} → {end:.2f}")
  return "; ".join(out)


def _outcomes_table() -> str:
  lines = []
  for row, title in ROWS.items():
    learnt = {
      s: one["train_loss"] for s, one in _row_seeds(row, "pairs").items()
    }
    cells = [title, _loss_cell(row), _seed_cells(learnt, 2)]
    for name in ("R", "T"):
      found = outcome_by_seed(row, name)
      cells += [_mean_cell(found), _seed_cells(found)]
    lines.append(cells)
  head = (
    "row",
    "held-out loss, nats",
    "training loss of `pairs`, by seed",
    "R",
    "by seed",
    "T",
    "by seed",
  )
  return tables.markdown(lines, head)


def _all_measures_table() -> str:
  zero, pairs = (
    [
      functools.partial(_ndcg_by_seed, measure=measure, name=name)
      for name in SETS
    ]
    for measure in ("zero_shot", "pairs")
  )
  scores = [
    functools.partial(_label_score, measure=task, rate=rate)
    for task in TUNED
    for rate in RATE_KEYS
  ]
  columns = [*zero, *pairs, *scores]
  lines = [
    (f"`{row}`", *(_seed_cells(column(row)) for column in columns))
    for row in ROWS
  ]
  head = [""]
  head += [f"{of}, untrained" for of in NAMES.values()]
  head += [f"{of}, `pairs`" for of in NAMES.values()]
  head += [
    f"{task}, {rate}"
    for task in ("SST-2", "CoNLL")
    for rate in ("3e-5", "1e-4")
  ]
  return tables.markdown(lines, head)


def _marks_table() -> str:
  lines = [
    (
      mark["model"],
      mark["text"],
      *(f"{100 * mark[name]:.1f}" for name in SETS),
      f"{_mark_mean(mark):.1f}",
    )
    for mark in _stored_scores()["marks"]
  ]
  return tables.markdown(lines, ("", "texts", *NAMES.values(), "mean"))


def _mark_mean(mark: Mapping) -> float:
  return 100 * float(np.mean([mark[name] for name in SETS]))


def _claim_tests() -> list[tuple[EncoderClaim, str]]:
  return [(claim, name) for claim in CLAIMS for name in ("R", "T")]


def _claims_table() -> str:
  adjusted = holm([chance(claim_difference(*test)) for test in _claim_tests()])
  lines = []
  for (claim, name), p in zip(_claim_tests(), adjusted, strict=True):
    found = claim_difference(claim, name)
    low, high = claim.expected[name]
    word = "above" if found.value > 0 else "below"
    lines.append(
      (
        f"`{claim.row}` against `{claim.control}`, {name}",
        f"{low:+} to {high:+}",
        interval_text(found.interval(), 1),
        found.seeds,
        f"{p:.2f}",
        word if p < LEVEL else "not decided",
        interval_text(these_models(claim, name).interval(), 1),
      )
    )
  head = (
    "claim",
    "expected",
    "found (95 %)",
    "seeds",
    "p after Holm",
    "verdict",
    "these models alone (95 %)",
  )
  return tables.markdown(lines, head)


def _noise_table() -> str:
  pooled = {name: deviation(CLAIMS, name) for name in ("R", "T")}
  lines = []
  for claim, name in _claim_tests():
    value = claim_difference(claim, name).value
    effects = max(claim.expected[name]), value
    lines.append(
      (
        f"`{claim.row}` against `{claim.control}`, {name}",
        f"{deviation([claim], name):.1f}",
        f"{pooled[name]:.1f}",
        *(
          f"{seeds_needed(claim, name, x, pooled[name])} for {x:+.{digits}f}"
          for x, digits in zip(effects, (0, 1), strict=True)
        ),
      )
    )
  head = (
    "claim",
    "deviation, its own",
    "of all five",
    "seeds for the largest expected",
    "seeds for the difference found",
  )
  return tables.markdown(lines, head)


TABLES = {
  "from-decoder-outcomes": _outcomes_table,
  "from-decoder-claims": _claims_table,
  "from-decoder-noise": _noise_table,
  "from-decoder-measures": _all_measures_table,
  "from-decoder-marks": _marks_table,
}


def from_decoder_figures() -> Iterator[float]:
  """Yields further figures that the page quotes."""
  yield _stored_scores()["seconds"] / 60
  yield ASSUMED
  yield deviation(CLAIMS, "R")
  yield 128 * 32 * 256 / 1e6  # million tokens
  yield math.log(32)  # nats of InfoNCE before training, with batches of 32
  yield 100 * _STRICTEST
  one, other = (
    [
      run["held_out"][-1][f"eval/{row}/loss"]
      for run in _row_seeds(row, "loss").values()
    ]
    for row in ("mntp", "mlm")
  )
  values = np.subtract(one, other)[:, None]
  yield from statistics.estimate_mean(values).interval()


# ------------------------------------------------------------------ the picture


def draw_outcomes(path: pathlib.Path) -> None:
  """Draws both outcomes of each row to a PNG, a point for each seed."""
  figure = plots.canvas(9, 3.6, "SmolLM2-135M made into an encoder, by row")
  panels = figure.subplots(1, 2, sharey=True)
  _draw_outcome(panels[0], "R", "R: NDCG@10 after training on pairs")
  _draw_outcome(panels[1], "T", "T: SST-2 and CoNLL, fine-tuned")
  for mark in _stored_scores()["marks"]:
    if "96" in mark["text"]:
      x = _mark_mean(mark)
      panels[0].axvline(x, color="0.3", lw=1, ls=":")
      style = {"rotation": 90, "ha": "right", "fontsize": 8, "color": "0.3"}
      panels[0].text(x - 0.2, len(ROWS) - 0.6, mark["model"], **style)
  panels[0].set_xlim(0, None)
  panels[1].set_xlim(0, 100)
  panels[0].invert_yaxis()
  for seed, marker in enumerate(MARKERS):
    panels[1].plot([], [], marker, **_POINT, label=f"seed {seed}")
  panels[1].plot([], [], color="0.6", lw=3, label="mean")
  panels[1].legend(frameon=False, fontsize=8.5, loc="center left")
  plots.save_figure(figure, path)


def _draw_outcome(panel, name: str, title: str) -> None:
  for y, row in enumerate(ROWS):
    found = outcome_by_seed(row, name)
    mean = np.mean([*found.values()])
    panel.plot([mean, mean], [y - 0.3, y + 0.3], color="0.6", lw=3)
    for seed, x in found.items():
      panel.plot(x, y, MARKERS[seed], **_POINT)
  panel.set_yticks(range(len(ROWS)), ROWS)
  panel.set_xlabel(f"{title}, points", fontsize=9.5)
  panel.grid(axis="x", color="0.9", lw=0.6)
  panel.set_axisbelow(True)
  panel.spines[["top", "right", "left"]].set_visible(False)
  panel.tick_params(axis="y", length=0)


@dataclasses.dataclass(frozen=True)
class PictureArguments:
  """The command's arguments."""

  picture: str = setting("", "Path to the picture, a PNG", read=cli.here)


def main(argv: Sequence[str]) -> None:
  """Draws the picture of the page."""
  args = common.benchmark_arguments(__doc__, PictureArguments, argv)
  draw_outcomes(pathlib.Path(args.picture))
  print(f"wrote {args.picture}")


if __name__ == "__main__":
  cli.run_command(main)
