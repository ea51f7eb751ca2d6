"""Makes a study: trains its rows, evaluates them, and writes its report.

    ./launch/study.sh --text=TEXT_FOLDER --data=EVALUATION_FOLDER

A study is a config file (`evals.design`): configs/clm_or_mlm.py compares CLM
with MLM (arXiv 2507.00994), configs/antlm_table.py makes AntLM's table (arXiv
2412.03275). Trainings that begin in the same way share that part, which is
trained once (`evals.branches`). Jobs that are done are skipped, so the same
command resumes after any interruption. --minutes stops the study by itself,
with exit status 75, between jobs. --dry_run lists the jobs and their cost.

--text holds *.train and *.dev files, such as BabyLM's. It may be left out if
RUNS/data exists. --data holds the evaluation sets.
"""

import dataclasses
import pathlib
import shlex
from collections.abc import Iterator, Sequence

from antlm_jax import cli
from antlm_jax import config as config_lib
from antlm_jax import settings as settings_lib
from antlm_jax.errors import UserError
from antlm_jax.evals import costs, design
from antlm_jax.evals.design import Study
from antlm_jax.evals.jobs import Job, call, run
from antlm_jax.runtime import files
from antlm_jax.settings import setting
from antlm_jax.training import checkpoint, saving


@dataclasses.dataclass(frozen=True)
class Settings:
  """The command's arguments."""

  data: str | None = setting(None, "the evaluations' folders, see above")
  config: str = setting("clm_or_mlm", "Study configuration, by name or path")
  text: str | None = setting(None, "a folder of *.train and *.dev files")
  scale: str = setting("tiny", "how large; tiny fits a CPU")
  runs: str | None = setting(
    None, "receives everything; runs/STUDY_SCALE by default", read=cli.here
  )
  rows: tuple[str, ...] = setting((), "rows to make; all by default")
  minutes: float | None = setting(None, "stop after so long", over=0)
  dry_run: bool = setting(False, "say what there is to do, and what it takes")
  commands: bool = setting(False, "print all commands, to be run elsewhere")


def read(settings: Settings, overrides: Sequence[str] = ()) -> Study:
  """Reads a study's config; the overrides are of every training.

  Raises:
    UserError: for a scale or a row that it does not have.
  """
  path = pathlib.Path(config_lib.find(settings.config)).absolute()
  scale, there = design.read(path, settings.scale)
  for name in settings.rows:
    if name not in there:
      raise UserError(f"--rows: {name!r} is not one of {', '.join(there)}")
  wanted = set()
  for name in settings.rows or there:
    while name and name not in wanted:  # also what that one begins at
      wanted.add(name)
      name = there[name].after
  rows = {name: row for name, row in there.items() if name in wanted}
  return Study(path, settings.scale, scale, there, rows, tuple(overrides))


# ------------------------------------------------------------------- the jobs


def jobs(
  study: Study, runs: pathlib.Path, text: str | None, data: str
) -> Iterator[Job]:
  """Yields the commands that make a study, in order.

  Args:
    study: The study.
    runs: Its folder, which receives everything.
    text: The folder to prepare the data from; None if they are there.
    data: The evaluations' folder.

  Raises:
    UserError: if there are no data, and no text.
  """
  for family in dict.fromkeys(row.family for row in study.rows.values()):
    yield from _prepared(study, runs, text, family)
  for seed in range(max(map(study.seeds, study.rows))):
    # All rows of a seed before the next: what there is can be compared.
    names = [name for name in study.rows if seed < study.seeds(name)]
    for name in names:
      yield _training(study, runs, name, seed)
    for name in names:
      yield from _evaluations(study, runs, name, seed, data)


def _data(study: Study, runs: pathlib.Path, family: str) -> pathlib.Path:
  # Families that are prepared alike share the data: by the first one's name.
  options = study.scale.prepare
  same = [name for name in options if options[name] == options[family]]
  return runs / "data" / same[0].lower()


def _prepared(study: Study, runs, text, family: str) -> Iterator[Job]:
  output = _data(study, runs, family)
  if text:
    text = pathlib.Path(text).absolute()  # jobs run elsewhere
    options = f"--text={text}", f"--output={output}"
    yield Job(
      f"text for {family}",
      "antlm_jax.prepare",
      (*options, *study.scale.prepare[family]),
      output,
    )
  elif not output.is_dir():
    raise UserError(f"{output} is not there yet: give --text")


def _training(study: Study, runs, name: str, seed: int) -> Job:
  workdir, kept = runs / name / str(seed), study.kept(name)
  data = _data(study, runs, study.rows[name].family)
  at = f"--config.checkpoint.at={','.join(map(str, kept))}"
  return Job(
    f"{name}, seed {seed}: training",
    "antlm_jax.train",
    (
      f"--config={study.path}:{study.argument(name, seed)}",
      f"--workdir={workdir}",
      f"--config.data.path={data}",
      *study.overrides,
      *((at,) if kept else ()),
      *_beginning(study, runs, name, seed),
    ),
    workdir,
  )


def _beginning(study: Study, runs, name: str, seed: int) -> Sequence[str]:
  """Returns the settings that say where a run begins."""
  row, branch = study.rows[name], study.plan[name]
  begin = "--config.init.checkpoint="
  if branch:
    trunk = runs / branch.trunk / str(seed) / checkpoint.FOLDER
    trunk /= str(branch.step)
    begun = runs / name / str(seed) / saving.CONFIG
    branches_off = branch.trunk in study.rows
    # A run goes on as it was begun, whichever rows were asked for then.
    if begun.exists():
      init = files.read_json(begun, "the run's config")["init"]
      branches_off = init["checkpoint"] == str(trunk)
    if branches_off:
      # It goes on in all, whatever the row's own beginning is.
      keep = (f"--config.init.{what}=keep" for what in ("step", "optimizer"))
      return f"{begin}{trunk}", *keep
  return (f"{begin}{runs / row.after / str(seed)}",) if row.after else ()


def _evaluations(
  study: Study, runs, name: str, seed: int, data: str
) -> Iterator[Job]:
  row, run = study.rows[name], runs / name / str(seed)
  for evaluation in study.scale.evaluations:
    if evaluation.seeds and seed >= evaluation.seeds:
      continue
    at = {"": run}
    if evaluation.looks:
      steps = run / checkpoint.FOLDER
      at = {f" at step {step}": steps / str(step) for step in study.looks(name)}
    for where, path in at.items():
      by_mode = any("{mode}" in option for option in evaluation.options)
      for mode in row.modes if by_mode else ("",):
        known = {"data": data, "attention": row.attention, "mode": mode}
        options = [option.format(**known) for option in evaluation.options]
        yield Job(
          f"{name}, seed {seed}{where}: {evaluation.about}",
          evaluation.module,
          (f"--checkpoint={path}", *options),
          run,
        )


# ------------------------------------------------------------------ the command


def main(argv: Sequence[str]) -> None:
  """Runs the command; --config.KEY=VALUE goes to every training."""
  parser = cli.Parser(description=__doc__)
  settings_lib.add_arguments(parser, Settings)
  args, overrides = parser.parse_with_overrides(argv)
  settings = settings_lib.from_args(Settings, args)
  study = read(settings, overrides)
  if settings.dry_run:
    print(costs.table(study))
    return
  data = _found(study, settings.data)
  default = f"runs/{study.path.stem}_{study.name}"
  runs = pathlib.Path(settings.runs or default).absolute()
  todo = list(jobs(study, runs, settings.text, data))
  if settings.commands:
    for job in todo:
      print(shlex.join(["python", "-m", job.module, *job.arguments]))
    return
  run(todo, runs, settings.minutes and 60 * settings.minutes)
  options = f"--runs={runs}", f"--config={study.path}"
  options += (f"--scale={study.name}", f"--output={runs}/report")
  call(Job("the report", "antlm_jax.evals.report", options, runs))


def _found(study: Study, data: str | None) -> str:
  """Returns the evaluations' folder, which holds what they need."""
  if not study.scale.evaluations:
    return ""
  if not data:
    raise UserError("--data is missing: the folder that evaluations read")
  for name in study.scale.needs:
    if not (pathlib.Path(data) / name).exists():
      raise UserError(
        f"--data={data} holds no {name}: unpack the evaluations' data there"
      )
  return str(pathlib.Path(data).absolute())


if __name__ == "__main__":
  cli.run(main)
