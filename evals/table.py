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

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from antlm_jax import cli
from antlm_jax import config as config_lib
from antlm_jax.errors import UserError
from antlm_jax.runtime import files
from antlm_jax.units import duration

ROOT = pathlib.Path(__file__).absolute().parents[1]
CONFIG = ROOT / "configs" / "antlm_table.py"
DONE = "done.json"  # in RUNS: the commands that are done, with their seconds
AGAIN = 75  # exit status: not done, run again (EX_TEMPFAIL)
_PAIRS = {
  "blimp_filtered": "evals.blimp",
  "blimp_supplement_filtered": "evals.blimp",
  "ewok": "evals.ewok",
}


@dataclasses.dataclass(frozen=True)
class Scale:
  """What a scale of the table takes.

  Attributes:
    config: The config's argument beside row and seed.
    prepare: Options of `antlm_jax.prepare`, by family.
    pairs: Options of the minimal pairs.
    tune: Options of fine-tuning.
    tuned_seeds: How many seeds of a row are fine-tuned.
  """

  config: str
  prepare: dict[str, tuple[str, ...]]
  pairs: tuple[str, ...]
  tune: tuple[str, ...]
  tuned_seeds: int = 1

  def seeds(self, row) -> int:
    """How many runs a row of the config has."""
    return row.seeds["paper" if "paper" in self.config else "tiny"]


SCALES = {
  # Every piece in seconds, to try the table out.
  "shrink": Scale(
    config="scale=tiny,shrink",
    prepare={
      "BabyLlama": ("--share=0.002", "--vocab_size=512"),
      "LTG-BERT": ("--share=0.002", "--vocab_size=512"),
    },
    pairs=("--limit=2",),
    tune=("--task=cola,rte", "--epochs=1", "--limit=64"),
  ),
  "tiny": Scale(
    config="scale=tiny",
    prepare={
      "BabyLlama": ("--share=0.0075", "--vocab_size=4096"),
      "LTG-BERT": ("--share=0.0075", "--vocab_size=4096"),
    },
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
    config="scale=paper",
    prepare={
      "BabyLlama": ("--vocab_size=16000",),
      "LTG-BERT": ("--kind=wordpiece", "--vocab_size=16384"),
    },
    pairs=("--pipeline=2024",),
    tune=("--task=all", "--lrs=5e-5,1e-4", "--seeds=12,13,14"),
  ),
}


@dataclasses.dataclass(frozen=True)
class Piece:
  """One command of the table.

  Attributes:
    about: What to say of it.
    module: The command.
    arguments: Its arguments.
    result: A folder that it leaves.
  """

  about: str
  module: str
  arguments: tuple[str, ...]
  result: pathlib.Path


def pieces(args: argparse.Namespace, rows: dict) -> Iterator[Piece]:
  """Yields the commands that make the table, in order.

  Args:
    args: The arguments of this command.
    rows: The rows to make, from the config's `ROWS`.
  """
  scale, runs = SCALES[args.scale], pathlib.Path(args.runs)
  data = {f: runs / "data" / f.lower() for f in scale.prepare}
  for family in dict.fromkeys(row.family for row in rows.values()):
    if args.text:
      options = f"--text={args.text}", f"--output={data[family]}"
      yield Piece(
        f"text for {family}",
        "antlm_jax.prepare",
        (*options, "--seq_len=128", *scale.prepare[family]),
        data[family],
      )
    elif not data[family].is_dir():
      raise UserError(f"{data[family]} is not there yet: give --text")
  for seed in range(max(scale.seeds(row) for row in rows.values())):
    for name, row in rows.items():
      if seed < scale.seeds(row):
        workdir = runs / name / str(seed)
        yield Piece(
          f"{name}, seed {seed}: training",
          "antlm_jax.train",
          (
            f"--config={CONFIG}:row={name},seed={seed},{scale.config}",
            f"--workdir={workdir}",
            f"--config.data.path={data[row.family]}",
            *args.settings,
          ),
          workdir,
        )
        yield from _evaluations(args, name, row, seed, workdir)


def _evaluations(args, name, row, seed, workdir) -> Iterator[Piece]:
  scale = SCALES[args.scale]
  common = (f"--checkpoint={workdir}",)
  for data, module in _PAIRS.items():
    for mode in ("causal", row.masked):
      yield Piece(
        f"{name}, seed {seed}: {data}, {mode}",
        module,
        (*common, f"--data={args.data}/{data}", f"--mode={mode}", *scale.pairs),
        workdir,
      )
  if seed < scale.tuned_seeds:
    yield Piece(
      f"{name}, seed {seed}: fine-tuning",
      "evals.finetune",
      (
        *common,
        f"--data={args.data}",
        f"--attention={row.tuned}",
        *scale.tune,
      ),
      workdir,
    )


def run(
  todo: Sequence[Piece], runs: pathlib.Path, seconds: float | None
) -> None:
  """Runs pieces one after another; those that are done are not run again.

  Args:
    todo: The pieces.
    runs: The table's folder.
    seconds: When to stop; the piece at hand is asked to save first.

  Raises:
    UserError: if one fails; what it printed says why.
    SystemExit: with `AGAIN`, if time is up before all is done.
  """
  begun = time.monotonic()
  ledger = runs / DONE
  done = json.loads(ledger.read_text()) if ledger.exists() else {}
  for number, piece in enumerate(todo, start=1):
    command = " ".join([piece.module, *piece.arguments])
    if command in done and piece.result.exists():
      continue
    print(f"\n[{number}/{len(todo)}] {piece.about}", flush=True)
    at = time.monotonic()
    _call(piece, runs, seconds and begun + seconds - at)
    done[command] = time.monotonic() - at
    runs.mkdir(parents=True, exist_ok=True)
    files.write_text(ledger, json.dumps(done, indent=2))
  spent = duration(time.monotonic() - begun)
  print(f"\nall done: {spent}, of {duration(sum(done.values()))} in all")


def _call(piece: Piece, runs: pathlib.Path, seconds: float | None) -> None:
  command = [sys.executable, "-m", piece.module, *piece.arguments]
  # Rows of an encoder share their programs: each is compiled once. On a CPU,
  # large pages that stay with the process make a step a quarter faster.
  environment = {
    "GLIBC_TUNABLES": (
      "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296"
      ":glibc.malloc.trim_threshold=8589934592"
    ),
    "JAX_COMPILATION_CACHE_DIR": str(runs / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  process = subprocess.Popen(command, cwd=ROOT, env=environment | os.environ)
  status = _wait(process, seconds)
  if status is None:
    print("\nstopped, time is up: the same command goes on", flush=True)
    sys.exit(AGAIN)
  if status == 130:
    raise KeyboardInterrupt
  if status:
    raise UserError(
      f"{piece.about} failed (status {status}): see above; it was"
      f" {' '.join(command)}"
    )


def _wait(process: subprocess.Popen, seconds: float | None) -> int | None:
  """Waits for a process; None if it had to be stopped."""
  try:
    return process.wait(seconds)
  except subprocess.TimeoutExpired:
    process.send_signal(signal.SIGTERM)
    process.wait()
    return None
  except KeyboardInterrupt:
    process.wait()  # it got the signal too, and saves
    raise


def _parser() -> cli.Parser:
  out = cli.Parser(prog="./launch/antlm_table.sh", description=__doc__)
  add = out.add_argument
  add("--scale", choices=SCALES, default="tiny", help="tiny fits a CPU")
  add("--text", help="BabyLM's *.train and *.dev")
  add("--data", required=True, help="the evaluations' folders, see above")
  add(
    "--runs",
    type=cli.here,
    help="receives everything; runs/antlm_SCALE by default",
  )
  add("--rows", default="", help="rows to make, with commas; all by default")
  add("--minutes", type=float, help="stop after so long")
  return out


def _chosen(text: str) -> dict:
  """Returns the rows of that name, in the table's order."""
  rows = config_lib.module(str(CONFIG)).ROWS
  wanted = text.split(",") if text else list(rows)
  for name in wanted:
    if name not in rows:
      raise UserError(f"--rows: {name!r} is not one of {', '.join(rows)}")
  return {name: row for name, row in rows.items() if name in wanted}


def _check(args: argparse.Namespace) -> None:
  for name in _PAIRS:
    if not (pathlib.Path(args.data) / name).is_dir():
      raise UserError(
        f"--data={args.data} holds no folder {name}: unpack BabyLM's"
        " evaluation data there"
      )
  if args.minutes is not None and args.minutes <= 0:
    raise UserError(f"--minutes={args.minutes:g} is not positive")


def main(argv: Sequence[str]) -> None:
  """Runs the command; --config.KEY=VALUE goes to every training."""
  args, args.settings = _parser().parse_known_args(argv)
  for word in args.settings:
    if not word.startswith("--config."):
      raise UserError(f"unknown argument {word!r} (see --help)")
  args.runs = args.runs or f"runs/antlm_{args.scale}"
  _check(args)
  for name in ("text", "data", "runs"):  # the pieces run elsewhere
    if getattr(args, name):
      setattr(args, name, pathlib.Path(getattr(args, name)).absolute())
  todo = list(pieces(args, _chosen(args.rows)))
  run(todo, args.runs, args.minutes and 60 * args.minutes)
  options = f"--runs={args.runs}", f"--output={args.runs}/report"
  _call(
    Piece("the report", "evals.report", options, args.runs), args.runs, None
  )


if __name__ == "__main__":
  cli.run(main)
