"""What a study's trainings take, before any of them runs."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from antlm_jax import tables
from antlm_jax.evals import branches
from antlm_jax.evals.design import Study
from antlm_jax.planning.search import Pod
from antlm_jax.runtime import chips
from antlm_jax.training import flops
from antlm_jax.units import quantity

# Of a chip's peak; what a real step reaches is some half of the bound that
# `antlm plan` gives. An assumption, not a measurement.
_UTILIZATION = 0.4
_CHIP = "TPU v5"  # v5p


class Cost(NamedTuple):
  """What a row's runs take; steps, tokens and operations are of one seed."""

  steps: int  # from its beginning on
  own: int  # those that it trains itself
  tokens: int  # that these see
  flops: float  # that these take
  seeds: int


def of(study: Study) -> dict[str, Cost | None]:
  """Returns what each row takes; None of epochs, whose steps the data says."""
  known: dict[Any, float] = {}  # equal batches are counted once
  return {name: _of_row(study, name, known) for name in study.rows}


def _of_row(study: Study, name: str, known: dict) -> Cost | None:
  branch, text = study.branches[name], study.scale.text
  config = study.configs[name]
  curriculum = branches.steps_of(config)
  if curriculum is None:
    return None
  begin, work = branch.step if branch else 0, 0.0
  # A step's operations depend on these alone.
  kinds = [
    (str(config.model), str(config.train), tuple(branches.mix(config, phase)))
    for phase in curriculum.phases
  ]
  if not known.keys() >= set(kinds):
    known |= zip(kinds, _counted(study, name), strict=True)
  for phase, kind in zip(curriculum.phases, kinds, strict=True):
    work += max(0, phase.stop - max(phase.start, begin)) * known[kind]
  own = curriculum.steps - begin
  tokens = own * config.train.batch_size * text.seq_len
  return Cost(curriculum.steps, own, tokens, work, study.seeds(name))


def _counted(study: Study, name: str) -> list[float]:
  """Returns the operations of a step of each phase of a row."""
  text = dataclasses.asdict(study.scale.text)
  spec = f"{study.path}:{study.argument(name, 0)}"
  pod = Pod(spec, study.overrides, jax.devices()[:1], **text)
  # They are as many on any mesh.
  run = pod.run(("mesh.data=-1", "mesh.fsdp=1", "mesh.tensor=1"))
  source = run.source
  return [
    flops.train_step(run.model, source[phase.start])
    for phase in run.curriculum.phases
  ]


def table(study: Study) -> str:
  """Lays out what a study's trainings take, and what shared steps save."""
  costs = of(study)
  rows = [_line(study, name, cost) for name, cost in costs.items()]
  head = (
    *("row", "curriculum", "begins", "steps", "to train", "tokens", "FLOPs"),
    *("seeds", "chip-hours"),
  )
  known = [cost for cost in costs.values() if cost]
  runs = sum(map(study.seeds, study.rows))
  lines = [
    tables.text(rows, head, "<<<>"),
    "",
    f"{len(rows)} rows, {runs} runs",
  ]
  return "\n".join([*lines, *_sums(known)])


def _sums(costs: Sequence[Cost]) -> Iterator[str]:
  if not costs:
    yield "their curricula are in epochs: how many steps, the data says"
    return
  steps = sum(cost.seeds * cost.steps for cost in costs)
  own = sum(cost.seeds * cost.own for cost in costs)
  work = sum(cost.seeds * cost.flops for cost in costs)
  yield (
    f"{steps:,} steps, of which {steps - own:,} are shared, and trained once:"
    f" {own:,} are left to train"
  )
  yield (
    f"{quantity(work, 'FLOPs')}: {_hours(work):,.1f} hours of a v5p chip at"
    f" {_UTILIZATION:.0%} of its peak (assumed; its bound: antlm plan)"
  )


def _line(study: Study, name: str, cost: Cost | None) -> tuple:
  row, branch = study.rows[name], study.branches[name]
  begins = f"{branch.trunk} at {branch.step:,}" if branch else "from scratch"
  if row.after and not branch:
    begins = f"{row.after}, at its end"
  about = name, study.configs[name].curriculum, begins
  if cost is None:
    return *about, None, None, None, None, study.seeds(name), None
  return (
    *about,
    *(f"{cost.steps:,}", f"{cost.own:,}", quantity(cost.tokens)),
    *(quantity(cost.flops), cost.seeds),
    f"{_hours(cost.seeds * cost.flops):,.1f}",
  )


def _hours(work: float) -> float:
  return work / (chips.CHIPS[_CHIP].flops * _UTILIZATION) / 3600
