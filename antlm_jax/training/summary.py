"""What a run says of itself in words: what it is, and how it went."""

import math
from collections.abc import Iterator, Mapping, Sequence

import jax

from antlm_jax import units
from antlm_jax.runtime import compilation, sharding
from antlm_jax.training.metrics import PAIRS, by_step
from antlm_jax.training.run import Run

_BABYLM_EPOCHS = 10  # that a submission may have, since 2025
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
  if run.is_over(_BABYLM_EPOCHS):
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
  """Returns `held_out`'s rows as a table's rows and its head.

  It has a column for each objective, and each set of several, and one for each
  mode in which minimal pairs were scored.
  """
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
