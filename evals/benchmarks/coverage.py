"""How often the reports' intervals hold the true difference, by simulation.

    python -m antlm_jax.evals.benchmarks.coverage

Simulates differences of two rows over seeds and items. Prints and stores how
often the 95 % interval of evals/statistics.py holds the
truth, and its mean width in points. The last columns are of two bootstraps, for
few items. The
hierarchical one draws pretrainings, their fine-tunings and items of the
differences. The other draws the runs of each row apart, and widens their share
of the variance, as the reports did until November 2026.

Scores are points of accuracy. Two models disagree on 15 % of the items, as in
SST-2 and BLiMP: a deviation of 39 points an item. Half of its variance belongs
to the item, an eighth to pretraining and item, the rest to each answer. The
table has the seeds' deviations. Half of each row's variance is shared with the
other row, which has the same data order and head.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import special

from antlm_jax import cli
from antlm_jax.evals import statistics
from antlm_jax.evals.benchmarks import common
from antlm_jax.settings import setting

_ITEM = 38.7  # points
_DRAWS = 200


@dataclasses.dataclass(frozen=True)
class SimulatedStudy:
  """A study: numbers of seeds and items, and deviations in points."""

  pretrainings: int
  tunings: int  # fine-tunings of each
  items: int
  pretraining: float  # deviation of a difference over pretrainings
  tuning: float  # and over fine-tunings

  def sides(self, draw: np.random.Generator) -> np.ndarray:
    """Draws scores of both rows whose true difference is 0: `[2, P, F, n]`."""
    p, f, n = self.pretrainings, self.tunings, self.items

    def noise(deviation: float, *shape: int) -> np.ndarray:
      # A difference of two sides has twice the variance of each.
      own = draw.normal(0, deviation / 2**0.5, (2, *shape))
      return own + draw.normal(0, deviation / 2**0.5, (1, *shape))

    # With one pretraining a side, the interval is for these models.
    several = float(p > 1)
    out = noise(several * self.pretraining, p, 1, 1)
    out = out + noise(self.tuning, p, f, 1)
    out = out + noise(_ITEM * 0.5**0.5, 1, 1, n)
    out = out + noise(several * _ITEM * 0.125**0.5, p, 1, n)
    return out + noise(_ITEM * 0.375**0.5, p, f, n)


CASES = tuple(
  SimulatedStudy(p, f, n, *spreads)
  for n, p, f, spreads in itertools.product(
    (200, 2000), (1, 2, 3, 5), (2, 5), ((0.5, 0.5), (2.0, 1.5))
  )
)


def interval(sides: np.ndarray) -> tuple[float, float]:
  """Returns the ends of the reports' interval of a difference."""
  apart = sides[0] - sides[1]
  values = {
    (str(p), str(f)): apart[p, f]
    for p, f in itertools.product(*map(range, apart.shape[:2]))
  }
  found = statistics.estimate_over_seeds(values).interval()
  return found.low, found.high


def hierarchical(
  sides: np.ndarray, draw: np.random.Generator
) -> tuple[float, float]:
  """Returns the ends by a bootstrap over pretrainings, fine-tunings, items."""
  _, p, f, n = sides.shape
  apart = (sides[0] - sides[1]).reshape(p * f, n)
  scores = _shares(draw, n) @ apart.T  # `[D, P * F]`
  chosen = _shares(draw, p)[:, :, None] * np.stack(
    [_shares(draw, f) for _ in range(p)], axis=1
  )
  return _interval_ends((scores * chosen.reshape(_DRAWS, p * f)).sum(axis=1))


def bootstrap_ends(
  sides: np.ndarray, draw: np.random.Generator
) -> tuple[float, float]:
  """Returns the ends by a bootstrap of each row's runs, as if exchangeable."""
  runs = sides.shape[1] * sides.shape[2]
  items = _shares(draw, sides.shape[3])
  quantile = statistics.student(2 * runs - 2, 0.95) / special.ndtri(0.975)
  wider = (runs / (runs - 1)) ** 0.5 * quantile
  means = [
    (
      (items @ side.reshape(runs, -1).T)
      * (1 / runs + wider * (_shares(draw, runs) - 1 / runs))
    ).sum(axis=1)
    for side in sides
  ]
  return _interval_ends(means[0] - means[1])


def _shares(draw: np.random.Generator, size: int) -> np.ndarray:
  """Draws shares of units that are resampled, `[D, size]`."""
  drawn = draw.integers(size, size=(_DRAWS, size))
  drawn += np.arange(_DRAWS)[:, None] * size
  counts = np.bincount(drawn.ravel(), minlength=_DRAWS * size)
  return counts.reshape(_DRAWS, size) / size


def _interval_ends(means: np.ndarray) -> tuple[float, float]:
  low, high = np.quantile(means, (0.025, 0.975))
  return float(low), float(high)


def simulate(
  case: SimulatedStudy, trials: int, bootstraps: bool = True
) -> Iterator[tuple[float, float]]:
  """Yields each method's coverage and mean width."""
  draw = np.random.default_rng(0)
  found = []
  for _ in range(trials):
    sides = case.sides(draw)
    methods = [interval(sides)]
    if bootstraps:
      methods += [hierarchical(sides, draw), bootstrap_ends(sides, draw)]
    found.append(methods)
  for low, high in np.moveaxis(found, 0, 2):
    yield float(np.mean((low <= 0) & (high >= 0))), float(np.mean(high - low))


# The columns that name a case, and the fields of `SimulatedStudy`.
HEAD = {
  "pretrainings": "pretrainings",
  "fine-tunings": "tunings",
  "items": "items",
  "sd over pretrainings": "pretraining",
  "sd over fine-tunings": "tuning",
}
METHODS = "the reports'", "hierarchical", "rows apart"


def coverage_text(held: float, width: float) -> str:
  """Writes a method's coverage, and its mean width in points."""
  return f"{100 * held:.1f} % ({width:.1f})"


@dataclasses.dataclass(frozen=True)
class Simulated:
  """The command's arguments."""

  output: str = common.output()
  trials: int = setting(
    1000, "Number of simulated studies of each case", least=1
  )


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = common.benchmark_arguments(__doc__, Simulated, argv)
  columns = {head: (len(head), str, name) for head, name in HEAD.items()}
  columns |= {
    method: (16, lambda found: coverage_text(*found), method)
    for method in METHODS
  }
  rows = (
    dataclasses.asdict(case)
    | dict(
      zip(
        METHODS,
        simulate(case, args.trials, bootstraps=case.items < 1000),
        strict=False,
      )
    )
    for case in CASES
  )
  common.report_rows(
    *(rows, args.output, "coverage", columns, ">"), trials=args.trials
  )


if __name__ == "__main__":
  cli.run_command(main)
