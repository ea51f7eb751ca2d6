"""Helps launch/antlm_on_gpu.sh: forecasts a scale, and packs its results.

python -m antlm_jax.evals.one_gpu seconds --scale=8m --times=FOLDER
python -m antlm_jax.evals.one_gpu pack --runs=RUNS --output=FOLDER
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Sequence

import numpy as np
import pandas as pd

from antlm_jax import cli
from antlm_jax import settings as settings_lib
from antlm_jax.errors import UserError
from antlm_jax.evals import study
from antlm_jax.evals.zero_shot.command import ITEMS
from antlm_jax.runtime import files
from antlm_jax.settings import setting
from antlm_jax.training.metrics import METRICS

_START = 60  # seconds to start and compile a row's runs, about
_EPOCHS = 24


@dataclasses.dataclass(frozen=True)
class Forecast:
  """The arguments of `seconds`."""

  scale: str = setting(help="Scale of configs/antlm_table.py")
  times: str = setting(help="Path to the folder of train_step's results")


@dataclasses.dataclass(frozen=True)
class Packing:
  """The arguments of `pack`."""

  runs: str = setting(help="Path to the folder of a study's runs")
  output: str = setting(help="Path to the folder for the packed results")


def seconds(asked: Forecast) -> int:
  """Returns the time that all runs of a scale take, about.

  It supposes the throughput of a single run, which runs together exceed.

  Raises:
    UserError: There are no times of this size.
  """
  found = study.read(
    study.StudyArguments(config="antlm_table", scale=asked.scale)
  )
  rows = [
    row
    for path in pathlib.Path(asked.times).glob("*.json")
    for row in json.loads(path.read_text()).get("rows", ())
    if row["size"] in (asked.scale, "tiny") and row.get("tokens_per_second")
  ]
  if not rows:
    raise UserError(
      f"--times={asked.times} has no time of a step of {asked.scale}"
    )
  text = found.scale.text
  runs = sum(map(found.seeds, found.rows))
  tokens = _EPOCHS * text.rows * text.seq_len * runs
  slowest = min(row["tokens_per_second"] for row in rows)
  return round(tokens / slowest + _START * len(found.rows))


def pack(asked: Packing) -> None:
  """Writes all losses (losses.csv) and BLiMP's log-odds (ROW-MODE.npz).

  `odds` is float16 `[seeds, pairs]`: the log-probability of each right sentence
  minus that of the wrong sentence, in nats. Its axes are `seeds`, and `uid` and
  `id` together.
  """
  runs, output = pathlib.Path(asked.runs), pathlib.Path(asked.output)
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
    row, seed, mode = items.parts[-6], items.parts[-5], items.parent.name
    lines = [line for _, line in files.read_jsonl(items, "the items")]
    scored.setdefault((row, mode.partition("-")[2]), {})[seed] = lines
  pd.DataFrame(losses).to_csv(output / "losses.csv", index=False)
  for (row, mode), by_seed in scored.items():
    odds = [
      [x["scores"][0] - x["scores"][1] for x in s] for s in by_seed.values()
    ]
    first = next(iter(by_seed.values()))
    np.savez_compressed(
      output / f"{row}-{mode}.npz",
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
  commands = {"seconds": Forecast, "pack": Packing}
  if argv[:1] not in [[name] for name in commands]:
    raise UserError("write seconds or pack first")
  kind = commands[argv[0]]
  parser = cli.Parser(description=__doc__)
  settings_lib.add_arguments(parser, kind)
  asked = settings_lib.from_args(kind, parser.parse_args(argv[1:]))
  if kind is Forecast:
    print(seconds(asked))
  else:
    pack(asked)


if __name__ == "__main__":
  cli.run(main)
