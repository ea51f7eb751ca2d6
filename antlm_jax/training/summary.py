"""What a run says of itself: what it is, how it went, and on a page of it."""

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from antlm_jax import tables, units
from antlm_jax.runtime import compilation, sharding
from antlm_jax.training.experiment import Run
from antlm_jax.training.metrics import PAIRS, by_step

_BABYLM_EPOCHS = 10  # that a submission may have, since 2025
_WORSE = 0.05  # nats above its best that a loss may end: 5 % of perplexity
_ROWS = 12  # of the table: the beginning and the end tell it; the file has all


def of_run(run: Run) -> Iterator[str]:
  """Says what is trained, on what, and what computes its attention."""
  device = jax.devices()[0]
  yield (
    f"{run.config.model.name} of"
    f" {units.quantity(run.model.size)} parameters,"
    f" {run.config.curriculum} = {run.curriculum.steps} steps of"
    f" {run.config.train.batch_size} x {run.sources.rows.seq_len} tokens on"
    f" {jax.device_count()} {device.device_kind}"
  )
  if run.exceeds(_BABYLM_EPOCHS):
    yield (
      f"that is {run.epochs:.3g} epochs of its data, where BabyLM's rules allow"
      f" {_BABYLM_EPOCHS} (train.max_epochs={_BABYLM_EPOCHS} refuses more)"
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
  yield f"attention: {', '.join(parts)}"
  if kept := compilation.folder():
    yield f"compiled programs are kept in {kept}"
  yield from sharding.undivided(run.mesh, run.model.axes, run.model.shapes)


def of_evaluation(values: Mapping[str, float]) -> str:
  """Says how an evaluation of all objectives came out, in a line."""
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
  """What a held-out loss is of: an objective, or also a set of text."""
  return key.removeprefix("eval/").removesuffix("/loss")


def held_out(
  records: Sequence[dict], run: Run, end: int, best: int | None
) -> list[dict]:
  """Returns the evaluations at the start, each switch, the best and the end."""
  rows = {
    step: {"step": step} | found
    for step, row in by_step(records).items()
    if (found := {k: v for k, v in row.items() if k.startswith("eval/")})
  }
  wanted = {min(rows, default=0), *run.switches, best, end}
  return [row for step, row in rows.items() if step in wanted]


def watched(
  records: Sequence[dict], objectives: Sequence[str]
) -> dict[int, float]:
  """Returns the sum of held-out losses in nats, by step."""
  keys = [f"eval/{name}/loss" for name in objectives]
  return {
    step: sum(row[key] for key in keys)
    for step, row in by_step(records).items()
    if keys and all(key in row for key in keys)
  }


def table(
  rows: Sequence[dict], unigram_entropy: float, run: Run, end: int
) -> tuple[list[list[str]], list[str]]:
  """Returns `held_out`'s rows as a table's rows and its head."""
  keys = dict.fromkeys(key for row in rows for key in row)
  losses = [key for key in keys if key.endswith("/loss")]
  modes = sorted(key for key in keys if key.startswith(PAIRS))
  columns = losses + modes
  names = [_name(key) for key in losses]
  names += [f"pairs {key.removeprefix(PAIRS)}" for key in modes]
  lines = [
    [_moment(row["step"], run, end)]
    + [f"{row.get(key, math.nan):.3f}" for key in columns]
    for row in rows
  ]
  if len(lines) > _ROWS:
    lines[5:-6] = [["..."]]
  lines.append(["unigram entropy", f"{unigram_entropy:.3f}"])
  return lines, ["held out, loss in nats", *names]


def _moment(step: int, run: Run, end: int) -> str:
  """Says where in the curriculum a number of steps done is."""
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


@dataclasses.dataclass(frozen=True)
class Mode:
  """How an objective that was trained went on held-out text, in nats."""

  loss: float  # at the last evaluation
  best: float  # the lowest
  best_step: int


def modes(records: Sequence[dict], run: Run) -> dict[str, Mode]:
  """Returns the objectives trained and evaluated so far, by logged name."""
  out, rows = {}, by_step(records)
  end = max(rows, default=0)
  trained = [p.shares for p in run.curriculum.phases if p.start < end]
  for name in dict.fromkeys(name for shares in trained for name in shares):
    logged = run.objectives[name].name
    key = f"eval/{logged}/loss"
    losses = {step: row[key] for step, row in rows.items() if key in row}
    if losses:
      best = min(losses, key=losses.get)
      out[logged] = Mode(losses[max(losses)], losses[best], best)
  return out


def advice(found: Mapping[str, Mode], unigram: float, run: Run) -> list[str]:
  """Says which modes ended worse than they should, and what else to try.

  That is above their own best, or above the unigram entropy, in nats.
  """
  out, fell = [], []
  for name, mode in found.items():
    above = []
    if mode.loss > unigram:
      above.append(f"the {unigram:.3f} of its tokens' frequencies alone")
    if mode.loss > mode.best + _WORSE:
      above.append(f"its best, {mode.best:.3f} after step {mode.best_step}")
      fell.append(name)
    if above:
      loss = f"{name} ends at {mode.loss:.3f} nats"
      out.append(f"{loss}, above {' and '.join(above)}")
  return [*out, _instead(fell, run)] if out else []


def _instead(fell: Sequence[str], run: Run) -> str:
  names, phases = run.curriculum.objectives, run.curriculum.phases
  if any(len(phase.shares) < len(names) for phase in phases):
    mixed = f"{run.curriculum.steps}{':'.join(names)} steps"
    return (
      "phases can undo what others learnt; mixed in every batch, all modes"
      f" stay: --config.curriculum='{mixed}'"
    )
  if fell:
    return (
      "train for fewer epochs, or end where it is best by"
      f" --config.eval.watch={','.join(fell)} --config.eval.patience=5"
    )
  return "train for longer, or with another schedule.peak_lr"


def page(
  run: Run,
  workdir: pathlib.Path,
  command: str,
  found: Mapping[str, Any],
  rows: Sequence[Sequence[str]],
  head: Sequence[str],
) -> str:
  """Returns README.md of a run's folder.

  It has the command that trains it, if that was one, and of its summary so far
  (`found`, as in summary.json) the held-out losses as a table.
  """
  parts = [f"# {workdir.name}", next(of_run(run))]
  if command:
    parts += [_code(command), "All its settings are in `config.json`."]
  parts += [tables.markdown(_figures(run, found), ("", ""))]
  parts += ["## Held-out text", tables.markdown(rows, head)]
  parts += ["![Learning curves](curves.png)"]
  if found["advice"]:
    parts += ["\n".join(f"- {line}" for line in found["advice"])]
  load = "import antlm_jax", f'model = antlm_jax.load("{workdir}")'
  parts += ["## Use", _code(*_uses(run, workdir))]
  parts += [_code(*load, language="python")]
  return "\n\n".join(parts) + "\n"


def _figures(run: Run, found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  step, whole = found["steps"], run.curriculum.steps
  yield "steps", f"{step:,}" + (f" of {whole:,}" if step < whole else "")
  tokens = sum(run.order.taken(step).values()) * run.sources.rows.seq_len
  yield "tokens seen", units.quantity(tokens)
  yield "words seen", units.quantity(run.words(step))
  yield "epochs", f"{step / run.order.steps_per_epoch:.3g}"
  yield "parameters", units.quantity(found["parameters"])
  yield "time, since its last start", units.duration(found["seconds"]["total"])
  if best := found["best"]:
    watch = " + ".join(run.config.eval.watch)
    place = f"checkpoints/{best['step']}"
    yield "best checkpoint", f"`{place}`: {watch} {best['loss']:.3f}"


def _uses(run: Run, workdir: pathlib.Path) -> Iterator[str]:
  """Yields commands that fit what was trained."""
  trained = [run.objectives[name] for name in run.curriculum.objectives]
  of = f"--checkpoint={workdir}"
  if any(o.left_to_right for o in trained):
    yield f'antlm generate {of} --prompt="..."'
  if any(o.per_ratio for o in trained):
    yield f'antlm generate {of} --mode=diffusion --prompt="..."'
  if any(o.middle_rate for o in trained):
    yield f'antlm generate {of} --prompt="BEFORE <mask> AFTER <mask>"'
  if any(o.needs_mask_token and not o.left_to_right for o in trained):
    yield f'antlm fill_mask {of} --text="... <mask> ..."'
  yield f"antlm export {of} --output={workdir}-hf   # for transformers"


def _code(*lines: str, language: str = "") -> str:
  return "\n".join((f"```{language}", *lines, "```"))
