"""Summary of a run: its settings, its results, and a page of both."""

import contextlib
import itertools
import math
import pathlib
import shlex
import shutil
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from antlm_jax import tables, units
from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.objective import FillInTheMiddle
from antlm_jax.runtime import sharding
from antlm_jax.training.experiment import Run
from antlm_jax.training.metrics import CHOOSE, PAIRS, REPORT

Rows = Mapping[int, Mapping[str, float]]  # values by step, as `metrics.by_step`
_BABYLM_EPOCHS = 10  # the most that a submission may have, since 2025
_WORSE = 0.05  # nats that a loss may end above its best: 5 % of perplexity
_MOST_LINES = 5  # of the table; summary.json has all
_MANY_EPOCHS = 50  # a longer run may be a slip
_EPOCHS = 10  # that are often enough
_LONG = 10 * 3600.0  # seconds after which a run may be a slip
_FEW_STEPS = 100  # a shorter run is a trial

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


def of_run(run: Run) -> Iterator[str]:
  """Yields lines about a run: model, data, attention, sharding."""
  device, text = jax.devices()[0], run.config.curriculum
  yield (
    f"{run.config.model.name} with {units.quantity(run.model.size)} parameters,"
    f" {text if len(text) <= 40 else text[:37] + '...'} ="
    f" {run.curriculum.steps} steps of {run.config.train.batch_size} x"
    f" {run.sources.rows.seq_len} tokens on {jax.device_count()}"
    f" {device.device_kind}"
  )
  if "babylm" in run.config.checkpoint.words and run.exceeds(_BABYLM_EPOCHS):
    yield (
      f"warning: the run has {run.epochs:.3g} epochs of its data, but BabyLM's"
      f" rules allow {_BABYLM_EPOCHS}: set train.max_epochs={_BABYLM_EPOCHS} to"
      " refuse more"
    )
  if run.exceeds(_MANY_EPOCHS):
    yield (
      f"tip: {run.curriculum.steps:,} steps are {run.epochs:,.4g} epochs of the"
      f" data: did you mean {_fewer(run)}?"
    )
  if len(run.order.sources) > 1:
    taken = run.order.taken(run.curriculum.steps)
    each = (
      f"{name} ({units.quantity(size)} rows, {taken[name] / size:.3g} epochs)"
      for name, size in run.order.sources.items()
    )
    yield f"data: {', '.join(each)}"
  by_name: dict[str, list[str]] = {}
  for batch, name in run.attention.items():
    by_name.setdefault(name, []).append(batch)
  parts = list(by_name)
  if len(by_name) > 1:
    parts = [f"{name} ({', '.join(b)})" for name, b in by_name.items()]
  layers = "as a loop" if run.config.model.loops else "unrolled"
  yield f"model.attention={', '.join(parts)}; the layers run {layers}"
  yield from sharding.undivided(run.mesh, run.model.axes, run.model.shapes)


def _fewer(run: Run) -> str:
  """Returns a length that the user of a very long run may have meant."""
  config = run.config
  if not (config.train.epochs or config.train.steps):
    with contextlib.suppress(UserError):  # it has a unit
      text, known = f"{config.curriculum} steps", config.known_objectives
      steps = curriculum.parse(text, known, 1).steps
      if steps != run.curriculum.steps:  # counts of epochs
        return f"{steps:,} steps, --config.curriculum='{text}'"
  if config.train.epochs.is_integer() and config.train.epochs:
    steps = int(config.train.epochs)
    return f"{steps:,} steps, --config.train.steps={steps}"
  few = max(1, round(_EPOCHS * run.order.steps_per_epoch))
  return f"{few:,} steps, {_EPOCHS} epochs"


def of_time(run: Run, step: int, left: float) -> Iterator[str]:
  """Yields a tip if a run has many hours left, in seconds, after a step."""
  if left > _LONG:
    hourly = max(1, round((run.curriculum.steps - step) / left * 3600))
    yield (
      f"tip: {run.curriculum.steps:,} steps, {run.epochs:,.3g} epochs, take"
      f" {units.duration(left)} on this machine: did you mean {hourly:,} steps,"
      " which take an hour?"
    )


def of_evaluation(values: Mapping[str, float]) -> str:
  """Returns a line with the results of an evaluation of all objectives."""
  parts = []
  for key in values:
    if key.endswith("/loss"):
      name = _name(key)
      parts.append(f"{name} {values[key]:.3f}")
      if "/" not in name:
        perplexity = values[f"eval/{name}/perplexity"]
        accuracy = values[f"eval/{name}/accuracy"]
        parts[-1] += f" (perplexity {perplexity:.4g}, accuracy {accuracy:.1%})"
  return " · ".join(parts)


def _name(key: str) -> str:
  """Returns a held-out loss's objective, with its set if there are several."""
  return key.removeprefix("eval/").removesuffix("/loss")


def held_out(rows: Rows, run: Run, end: int, best: int | None) -> list[dict]:
  """Returns the evaluations at the start, each switch, the best and the end."""
  measured = {
    step: {"step": step} | found
    for step, row in rows.items()
    if (found := {k: v for k, v in row.items() if k.startswith("eval/")})
  }
  wanted = {min(measured, default=0), *run.switches, best, end}
  return [row for step, row in measured.items() if step in wanted]


def choosing(rows: Rows, watch: Sequence[str]) -> dict[int, float]:
  """Returns the sum of losses that chooses the best step, by step.

  It is on half of the held-out rows, or on all if they are a single batch.
  """
  return watched(rows, watch, f"/{CHOOSE}") or watched(rows, watch)


def best(rows: Rows, watch: Sequence[str]) -> dict[str, float] | None:
  """Returns the best step, and its loss on the rows that did not choose it."""
  losses = choosing(rows, watch)
  if not losses:
    return None
  step = min(losses, key=losses.get)
  return {
    "step": step,
    "loss": watched(rows, watch, f"/{REPORT}").get(step, losses[step]),
  }


def watched(
  rows: Rows, objectives: Sequence[str], half: str = ""
) -> dict[int, float]:
  """Returns the sum of held-out losses in nats, by step."""
  keys = [f"eval/{name}/loss{half}" for name in objectives]
  return {
    step: sum(row[key] for key in keys)
    for step, row in rows.items()
    if keys and all(key in row for key in keys)
  }


def table(
  found: Sequence[dict], unigram_entropy: float, run: Run, end: int
) -> tuple[list[list[str]], list[str]]:
  """Returns the rows and the head of a table of `held_out`'s evaluations."""
  keys = dict.fromkeys(key for row in found for key in row)
  losses = [key for key in keys if key.endswith("/loss")]
  modes = sorted(key for key in keys if key.startswith(PAIRS))
  lines = []
  for row in found:
    figures = [f"{row.get(key, math.nan):.3f}" for key in losses + modes]
    lines.append([_moment(row["step"], run, end), *figures])
  if len(lines) > _MOST_LINES:
    lines[2:-2] = [["..."]]
  lines.append(["unigram entropy", f"{unigram_entropy:.3f}"])
  names = [_name(key) for key in losses]
  names += [f"pairs {key.removeprefix(PAIRS)}" for key in modes]
  return lines, ["held out, loss in nats", *names]


def _moment(step: int, run: Run, end: int) -> str:
  """Names a number of steps by its place in the curriculum."""
  if step == end:
    return f"after step {step} (end)"
  changes = [
    f"{of.at(step - 1)}→{of.at(step)}"
    for of in (run.curriculum, run.order.mix)
    if of and step in of.switches
  ]
  if changes:
    return f"after step {step} ({', '.join(changes)})"
  return f"at step {step}"


def modes(rows: Rows, run: Run) -> dict[str, dict[str, float]]:
  """Returns the last and the best loss in nats of objectives trained so far."""
  out, end = {}, max(rows, default=0)
  trained = [p.shares for p in run.curriculum.phases if p.start < end]
  for name in dict.fromkeys(itertools.chain(*trained)):
    logged = run.config.known_objectives[name].name
    if losses := watched(rows, [logged]):
      best = min(losses, key=losses.get)
      last = losses[max(losses)]
      out[logged] = {"loss": last, "best": losses[best], "best_step": best}
  return out


def advice(
  found: Mapping[str, Mapping[str, float]], unigram: float, run: Run
) -> list[str]:
  """Returns warnings of losses that ended too high, and a tip.

  Too high is above the unigram entropy, or 0.05 nats above the own best.
  """
  out, fell = [], []
  for name, mode in found.items():
    worse = []
    if mode["loss"] > unigram:
      worse.append(f"always predicting token frequencies ({unigram:.3f})")
    if mode["loss"] > mode["best"] + _WORSE:
      step = mode["best_step"]
      worse.append(f"its best ({mode['best']:.3f} after step {step})")
      fell.append(name)
    if worse:
      loss = f"warning: {name} loss {mode['loss']:.3f} is worse than"
      out.append(f"{loss} {' and '.join(worse)}")
  if not out:
    return []
  if run.curriculum.steps < _FEW_STEPS:
    few = f"{run.curriculum.steps} steps are too few to learn much"
    return [f"tip: {few}: train for longer"]
  names = run.curriculum.objectives
  if any(len(p.shares) < len(names) for p in run.curriculum.phases):
    mixed = f"{run.curriculum.steps}{':'.join(names)} steps"
    tip = (
      "later phases can undo the learning of earlier phases; train all"
      f" objectives in every batch with --config.curriculum='{mixed}'"
    )
  elif fell and run.config.eval.watch:
    return out  # the run has kept its best step
  elif fell:
    tip = (
      "train for fewer epochs, or end at the best step with"
      f" --config.eval.watch={','.join(fell)} --config.eval.patience=5"
    )
  else:
    tip = "train for longer, or change schedule.peak_lr"
  return [*out, f"tip: {tip}"]


def page(
  run: Run, workdir: pathlib.Path, command: str, found: Mapping[str, Any], table
) -> str:
  """Returns README.md of a run's folder.

  `found` is the summary so far, as in summary.json, and `table` has the rows
  and the head of the table of held-out losses. `command` may be empty.
  """
  if command:
    command = (
      f"```\n{command}\n```\n\nAll its settings are in `config.json`.\n\n"
    )
  lines = [f"- {line}" for line in found["advice"]]
  return _PAGE.substitute(
    name=workdir.name,
    about=next(of_run(run)),
    command=command,
    figures=tables.markdown(_figures(run, found), ("", "")),
    held_out=tables.markdown(*table),
    advice="\n".join([*lines, "\n"]) if lines else "",
    uses="\n".join(_uses(run, workdir)),
    path=repr(str(workdir)),
  )


def _figures(run: Run, found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields names and values of a run's figures."""
  step, whole = found["steps"], run.curriculum.steps
  yield "steps", f"{step:,}" + (f" of {whole:,}" if step < whole else "")
  yield "tokens seen", units.quantity(run.tokens(step))
  yield "words seen", units.quantity(run.words(step))
  yield "epochs", f"{step / run.order.steps_per_epoch:.3g}"
  yield "parameters", units.quantity(found["parameters"])
  yield "time, since its last start", units.duration(found["seconds"]["total"])
  if best := found["best"]:
    watch = " + ".join(run.config.eval.watch)
    place = f"checkpoints/{best['step']}"
    yield "best checkpoint", f"`{place}`: {watch} {best['loss']:.3f}"


def _uses(run: Run, workdir: pathlib.Path) -> Iterator[str]:
  """Yields commands for the modes that the run trains."""
  trained = run.config.trained
  antlm, of = program(), f"--checkpoint={shlex.quote(str(workdir))}"
  if any(o.left_to_right for o in trained):
    yield f'{antlm} generate {of} --prompt="The"'
  if any(o.per_ratio for o in trained):
    yield f'{antlm} fill {of} --text="The" --tokens=20 --temperature=0.8'
  if any(isinstance(o, FillInTheMiddle) for o in trained):
    yield f'{antlm} generate {of} --prompt="BEFORE <mask> AFTER <mask>"'
  if any(o.needs_mask_token and not o.left_to_right for o in trained):
    yield f'{antlm} fill {of} --text="The <mask> is here."'
  output = shlex.quote(f"{workdir}-hf")
  yield f"{antlm} export {of} --output={output}   # for transformers"


def program() -> str:
  """Returns the words that run `antlm` here: its path, if not on the PATH."""
  script = pathlib.Path(sys.executable).parent / "antlm"
  if shutil.which("antlm") == str(script):
    return "antlm"
  if not script.exists():
    return f"{shlex.quote(sys.executable)} -m antlm_jax"
  here = pathlib.Path.cwd()
  near = script.relative_to(here) if script.is_relative_to(here) else script
  return shlex.quote(str(near))
