"""Figures of a run, its table of losses, and the text of its page."""

import itertools
import pathlib
import shlex
import shutil
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from antlm_jax import plugins, tables, units
from antlm_jax.training import metrics, notes
from antlm_jax.training.metrics import ByStep
from antlm_jax.training.run import Run

_MOST_LINES = 5  # of the table; summary.json has all

_PAGE = string.Template("""\
# $name

$about

$command$figures

## Held-out text

$held_out

![Learning curves](curves.png)

$advice## Use

```
$uses
```

```python
import antlm_jax
model = antlm_jax.load($path)
```
""")


def held_out_evaluations(
  rows: ByStep, run: Run, end: int, best: int | None
) -> list[dict]:
  """Returns the evaluations at the start, each switch, the best and the end."""
  measured = {
    step: {"step": step} | values
    for step, row in rows.items()
    if (values := {k: v for k, v in row.items() if k.startswith("eval/")})
  }
  steps = {min(measured, default=0), *run.switches, best, end}
  return [row for step, row in measured.items() if step in steps]


def best_step(
  rows: ByStep, watch: Sequence[str], step: int | None
) -> dict[str, float] | None:
  """Returns the best step, and its loss on the rows that did not choose it."""
  losses = metrics.choosing(rows, watch)
  if step not in losses:
    return None
  return {
    "step": step,
    "loss": metrics.watched(rows, watch, f"/{metrics.REPORT}").get(
      step, losses[step]
    ),
  }


def held_out_table(
  evaluations: Sequence[dict], unigram_entropy: float, run: Run, end: int
) -> tuple[list[list[str]], list[str]]:
  """Returns the rows and the head of a table of `held_out_evaluations`."""
  keys = dict.fromkeys(key for row in evaluations for key in row)
  losses = [key for key in keys if key.endswith("/loss")]
  modes = sorted(key for key in keys if key.startswith(metrics.PAIRS))
  lines = []
  for row in evaluations:
    figures = [
      f"{row[key]:.3f}" if key in row else "" for key in losses + modes
    ]
    lines.append([_moment(row["step"], run, end), *figures])
  if len(lines) > _MOST_LINES:
    lines[2:-2] = [["..."]]
  lines.append(["unigram entropy", f"{unigram_entropy:.3f}"])
  names = [metrics.objective_of_loss(key) for key in losses]
  names += [f"pairs {key.removeprefix(metrics.PAIRS)}" for key in modes]
  return lines, ["held out, loss in nats", *names]


def _moment(step: int, run: Run, end: int) -> str:
  """Names a number of steps by its place in the curriculum."""
  if step == end:
    return f"after step {step} (end)"
  changes = [
    f"{schedule.at(step - 1)}→{schedule.at(step)}"
    for schedule in (run.curriculum, run.order.mix)
    if schedule and step in schedule.switches
  ]
  if changes:
    return f"after step {step} ({', '.join(changes)})"
  return f"at step {step}"


def modes(rows: ByStep, run: Run) -> dict[str, dict[str, float]]:
  """Returns the last and the best loss in nats of objectives trained so far."""
  out = {}
  end = max(rows, default=0)
  trained = [p.shares for p in run.curriculum.phases if p.start < end]
  for name in dict.fromkeys(itertools.chain(*trained)):
    logged = run.config.known_objectives[name].name
    if losses := metrics.watched(rows, [logged]):
      best = min(losses, key=losses.get)
      last = losses[max(losses)]
      out[logged] = {"loss": last, "best": losses[best], "best_step": best}
  return out


def page(
  run: Run,
  workdir: pathlib.Path,
  command: str,
  summary: Mapping[str, Any],
  table,
) -> str:
  """Returns README.md of a run's folder.

  `summary` is that of the run so far, as in summary.json. `table` has the rows
  and the head of the table of held-out losses. `command` may be empty.
  """
  if command:
    command = (
      f"```\n{command}\n```\n\nAll its settings are in `config.json`.\n\n"
    )
  lines = [f"- {tables.plain_markdown(line)}" for line in summary["advice"]]
  return _PAGE.substitute(
    name=tables.plain_markdown(workdir.name),
    about=next(notes.notes_of_run(run)),
    command=command,
    figures=tables.markdown(_run_figures(run, summary), ("", "")),
    held_out=tables.markdown(*table),
    advice="\n".join([*lines, "\n"]) if lines else "",
    uses="\n".join(_uses(run, workdir)),
    path=repr(str(workdir)),
  )


def _run_figures(
  run: Run, summary: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
  """Yields names and values of a run's figures."""
  step = summary["steps"]
  total = run.curriculum.steps
  yield "steps", f"{step:,}" + (f" of {total:,}" if step < total else "")
  yield "tokens seen", units.quantity(run.tokens(step))
  yield "words seen", units.quantity(run.words(step))
  yield "epochs", f"{step / run.order.steps_per_epoch:.3g}"
  yield "parameters", units.quantity(summary["parameters"])
  seconds = summary["seconds"]["total"]
  yield "time, since its last start", units.duration(seconds)
  if best := summary["best"]:
    watch = " + ".join(run.config.eval.watch)
    place = f"checkpoints/{best['step']}"
    yield "best checkpoint", f"`{place}`: {watch} {best['loss']:.3f}"


def _uses(run: Run, workdir: pathlib.Path) -> Iterator[str]:
  """Yields commands for the modes that the run trains."""
  trained = run.config.trained
  antlm = antlm_program()
  model = shlex.join([*plugins.plugin_arguments(), f"--checkpoint={workdir}"])
  if any(o.left_to_right for o in trained):
    yield f'{antlm} generate {model} --prompt="The"'
  if any(o.per_ratio for o in trained):
    yield f'{antlm} fill {model} --text="The" --tokens=20 --temperature=0.8'
  if any(o.needs_mask_token and not o.left_to_right for o in trained):
    yield f'{antlm} fill {model} --text="The <mask> is here."'
  output = shlex.quote(f"{workdir}-hf")
  yield f"{antlm} export {model} --output={output}   # for transformers"


def antlm_program() -> str:
  """Returns the words that run `antlm` here: its path, if not on the PATH."""
  script = pathlib.Path(sys.executable).parent / "antlm"
  if shutil.which("antlm") == str(script):
    return "antlm"
  if not script.exists():
    return f"{shlex.quote(sys.executable)} -m antlm_jax"
  folder = pathlib.Path.cwd()
  if script.is_relative_to(folder):
    script = script.relative_to(folder)
  return shlex.quote(str(script))
