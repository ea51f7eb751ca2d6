"""Helps launch/antlm_on_gpu.sh: forecasts a scale, and packs its results.

python -m antlm_jax.evals.studies.one_gpu seeds --scale=8m \\
      --times=FOLDER --seconds=900
python -m antlm_jax.evals.studies.one_gpu pack --runs=RUNS --output=FOLDER
"""

import csv
import json
import math
import pathlib
import shutil
import sys
from collections.abc import Sequence

import numpy as np

from antlm_jax import cli, settings
from antlm_jax.errors import UserError
from antlm_jax.evals.studies import study
from antlm_jax.evals.zero_shot.babylm import TASKS
from antlm_jax.evals.zero_shot.command import ITEMS
from antlm_jax.runtime import files
from antlm_jax.training.metrics import METRICS

# Measured on two cores of a CPU, except for the first.
_START = 60  # seconds to start and compile a row's runs, an assumption
_ROW = 3e-5  # seconds to make a row of a batch
_SCORE = 1e-4  # seconds to prepare a pair's sentences, and write their scores
_EPOCHS = 24
_FEWEST = 3  # seeds of a scale that has as many


@settings.checked
def seeds(
  *, scale: str, times: str, seconds: float, rows: tuple[str, ...] = ()
) -> tuple[int, float]:
  """Returns the number of seeds that fit into a time, and all seeds' seconds.

  The number is 0 if fewer than three seeds fit, or fewer than all of one or
  two. The time is that of steps, of making their batches if that takes longer,
  of preparing pairs and of starting each row.

  Args:
    scale: Scale of configs/antlm_table.py.
    times: Path to the folder of train_step's results.
    seconds: Number of seconds for all runs.
    rows: Rows to train; all by default.

  Raises:
    UserError: There are no times of this size.
  """
  found = study.read_study("antlm_table", scale, rows)
  rates = [
    row["tokens_per_second"]
    for path in pathlib.Path(times).glob("*.json")
    for row in json.loads(path.read_text()).get("rows", ())
    if row.get("tokens_per_second")
  ]
  if not rates:
    raise UserError(f"--times={times} has no time of a step")
  text, count = found.scale.text, len(found.rows)
  most = min(map(found.seeds, found.rows))
  rate = min(*rates, text.seq_len / _ROW)
  pairs = sum(x.pairs for x in TASKS["blimp"].reported)
  each = _EPOCHS * text.rows * text.seq_len / rate + 2 * _SCORE * pairs
  each, start = each * count, _START * count
  fit = min(most, math.floor((seconds - start) / each))
  return fit if fit >= min(most, _FEWEST) else 0, start + most * each


@settings.checked
def pack(*, runs: files.Path, output: files.Path) -> None:
  """Writes all losses (losses.csv) and log-odds of pairs (ROW-SET-MODE.npz).

  `odds` is float16 `[seeds, pairs]`: the log-probability of each right sentence
  minus that of the wrong sentence, in nats. Its axes are `seeds`, and `uid` and
  `id` together.

  Args:
    runs: Path to the folder of a study's runs.
    output: Path to the folder for the packed results.
  """
  runs, output = pathlib.Path(runs), pathlib.Path(output)
  output.mkdir(parents=True, exist_ok=True)
  losses, scored = [], {}
  for metrics in sorted(runs.glob(f"*/*/{METRICS}")):
    row, seed = metrics.parts[-3:-1]
    for line in files.read_jsonl(metrics, "the losses"):
      found = {k: v for k, v in line[1].items() if "loss" in k}
      losses.append(
        {"row": row, "seed": seed, "step": line[1]["step"], **found}
      )
  for items in sorted(runs.glob(f"*/*/evals/blimp*/*/{ITEMS}")):
    row, seed, _, name, mode = items.parts[-6:-1]
    lines = [line for _, line in files.read_jsonl(items, "the items")]
    name = f"{row}-{name}-{mode.partition('-')[2]}"
    scored.setdefault(name, {})[seed] = lines
  columns = dict.fromkeys(column for line in losses for column in line)
  with (output / "losses.csv").open("w", newline="") as file:
    table = csv.DictWriter(file, columns)
    table.writeheader()
    table.writerows(losses)
  for name, by_seed in scored.items():
    odds = [
      [x["scores"][0] - x["scores"][1] for x in s] for s in by_seed.values()
    ]
    first = next(iter(by_seed.values()))
    np.savez_compressed(
      output / f"{name}.npz",
      odds=np.array(odds, np.float16),
      seeds=[*by_seed],
      **{key: [x[key] for x in first] for key in ("uid", "id")},
    )
  if (runs / "report").is_dir():
    shutil.copytree(runs / "report", output / "report", dirs_exist_ok=True)
  print(
    f"packed: {len(losses)} losses, {len(scored)} files of pairs in {output}"
  )


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  first, *words = argv or [""]
  if first == "pack":
    cli.call_with_arguments(pack, words, __doc__)
    return
  if first != "seeds":
    raise UserError("write seeds or pack first")
  asked = cli.parsed(seeds, words, __doc__)
  fit, needs = seeds(**asked)
  about = f"{asked['scale']}: all seeds take {needs:,.0f} s by forecast"
  print(f"{about}; in {asked['seconds']:,.0f} s fit {fit}", file=sys.stderr)
  print(fit)


if __name__ == "__main__":
  cli.run_command(main)
