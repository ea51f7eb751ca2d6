"""Trains, evaluates and reports AntLM's table (arXiv 2412.03275).

    ./launch/antlm_table.sh --text=BABYLM_FOLDER --data=EVALUATION_FOLDER

goes through the rows of configs/antlm_table.py: each is trained, scored on
minimal pairs both ways, and fine-tuned. Every piece that is done is left as it
is, so the same command goes on after any interruption; --minutes stops by
itself, with exit status 75, where the next piece goes on.

--data holds BabyLM's folders: blimp_filtered, blimp_supplement_filtered, ewok,
glue_filtered, and, if there are any, sst2 and mnli_en_babylm_eval. --text holds
the *.train and *.dev files; it may be left out where RUNS/data is there.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from antlm_jax import cli
from antlm_jax import config as config_lib
from antlm_jax import settings as settings_lib
from antlm_jax.errors import UserError
from antlm_jax.settings import setting
from evals.pieces import ROOT, Piece, call, run

CONFIG = ROOT / "configs" / "antlm_table.py"
_TUNED_SEEDS = 1  # how many seeds of a row are fine-tuned
_PAIRS = {
  "blimp_filtered": "evals.blimp",
  "blimp_supplement_filtered": "evals.blimp",
  "ewok": "evals.ewok",
}


@dataclasses.dataclass(frozen=True)
class Scale:
  """What a scale of the table takes, as options of the commands."""

  size: str  # the config's `scale`
  prepare: Mapping[str, tuple[str, ...]]  # by family
  pairs: tuple[str, ...]
  tune: tuple[str, ...]
  shrink: bool = False  # whether the config is shrunk


def _both(*options: str) -> dict[str, tuple[str, ...]]:
  return {"BabyLlama": options, "LTG-BERT": options}


SCALES = {
  # Every piece in seconds, to try the table out.
  "shrink": Scale(
    size="tiny",
    prepare=_both("--share=0.002", "--vocab_size=512"),
    pairs=("--limit=2",),
    tune=("--task=cola,rte", "--epochs=1", "--limit=64"),
    shrink=True,
  ),
  "tiny": Scale(
    size="tiny",
    prepare=_both("--share=0.0075", "--vocab_size=4096"),
    pairs=("--limit=30",),
    tune=(
      "--task=cola,mrpc,rte,sst2,mnli",
      "--lrs=5e-4",
      "--epochs=2",
      "--limit=2000",
      "--max_length=64",
    ),
  ),
  "paper": Scale(
    size="paper",
    prepare={
      "BabyLlama": ("--vocab_size=16000",),
      "LTG-BERT": ("--kind=wordpiece", "--vocab_size=16384"),
    },
    pairs=("--pipeline=2024",),
    tune=("--task=all", "--lrs=5e-5,1e-4", "--seeds=12,13,14"),
  ),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The command's arguments."""

  data: str = setting(help="the evaluations' folders, see above")
  text: str | None = setting(None, "BabyLM's *.train and *.dev")
  scale: str = setting("tiny", "tiny fits a CPU", choices=tuple(SCALES))
  runs: str | None = setting(
    None,
    "receives everything; runs/antlm_SCALE by default",
    read=cli.here,
  )
  rows: tuple[str, ...] = setting((), "rows to make; all by default")
  minutes: float | None = setting(None, "stop after so long", over=0)


def pieces(
  settings: Settings, runs: pathlib.Path, overrides: Sequence[str]
) -> Iterator[Piece]:
  """Yields the commands that make the table, in order.

  `overrides` are further arguments of every training.
  """
  scale, rows = SCALES[settings.scale], _chosen(settings.rows)
  data = {f: runs / "data" / f.lower() for f in scale.prepare}
  for family in dict.fromkeys(row.family for row in rows.values()):
    if settings.text:
      text = pathlib.Path(settings.text).absolute()  # pieces run elsewhere
      options = f"--text={text}", f"--output={data[family]}", "--seq_len=128"
      yield Piece(
        f"text for {family}",
        "antlm_jax.prepare",
        (*options, *scale.prepare[family]),
        data[family],
      )
    elif not data[family].is_dir():
      raise UserError(f"{data[family]} is not there yet: give --text")
  for seed in range(max(row.seeds[scale.size] for row in rows.values())):
    for name, row in rows.items():
      if seed < row.seeds[scale.size]:
        arguments = f"row={name},seed={seed},scale={scale.size}"
        arguments += ",shrink" if scale.shrink else ""
        workdir = runs / name / str(seed)
        yield Piece(
          f"{name}, seed {seed}: training",
          "antlm_jax.train",
          (
            f"--config={CONFIG}:{arguments}",
            f"--workdir={workdir}",
            f"--config.data.path={data[row.family]}",
            *overrides,
          ),
          workdir,
        )
        yield from _evaluations(settings, row, seed, workdir)


def _evaluations(settings, row, seed: int, run: pathlib.Path):
  scale, data = SCALES[settings.scale], pathlib.Path(settings.data).absolute()
  about, checkpoint = f"{run.parent.name}, seed {seed}", f"--checkpoint={run}"
  for name, module in _PAIRS.items():
    for mode in ("causal", row.masked):
      options = checkpoint, f"--data={data}/{name}", f"--mode={mode}"
      what = f"{about}: {name}, {mode}"
      yield Piece(what, module, (*options, *scale.pairs), run)
  if seed < _TUNED_SEEDS:
    options = checkpoint, f"--data={data}", f"--attention={row.attention}"
    what = f"{about}: fine-tuning"
    yield Piece(what, "evals.finetune", (*options, *scale.tune), run)


def _chosen(wanted: Sequence[str]) -> dict:
  """Returns the rows of that name, in the table's order."""
  rows = config_lib.module(str(CONFIG)).ROWS
  for name in wanted:
    if name not in rows:
      raise UserError(f"--rows: {name!r} is not one of {', '.join(rows)}")
  return {n: row for n, row in rows.items() if n in wanted or not wanted}


def main(argv: Sequence[str]) -> None:
  """Runs the command; --config.KEY=VALUE goes to every training."""
  parser = cli.Parser(prog="./launch/antlm_table.sh", description=__doc__)
  settings_lib.add_arguments(parser, Settings)
  args, overrides = parser.parse_with_overrides(argv)
  settings = settings_lib.from_args(Settings, args)
  for name in _PAIRS:
    if not (pathlib.Path(settings.data) / name).is_dir():
      raise UserError(
        f"--data={settings.data} holds no folder {name}: unpack BabyLM's"
        " evaluation data there"
      )
  runs = pathlib.Path(settings.runs or f"runs/antlm_{settings.scale}")
  runs = runs.absolute()
  todo = list(pieces(settings, runs, overrides))
  run(todo, runs, settings.minutes and 60 * settings.minutes)
  options = f"--runs={runs}", f"--output={runs}/report"
  call(Piece("the report", "evals.report", options, runs))


if __name__ == "__main__":
  cli.run(main)
