"""Batches of held-out rows, on which a run measures its objectives."""

import dataclasses
from collections.abc import Mapping

from antlm_jax.config import Config
from antlm_jax.data.order import Order, Stage
from antlm_jax.data.rows import Rows
from antlm_jax.data.source import BatchSource
from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum


def held_out_sources(
  config: Config, training: BatchSource, sets: Mapping[str, Rows]
) -> dict[str, dict[str, BatchSource]]:
  """Returns held-out batches by an objective's logged name and by set.

  They share the objectives and the layout of the `training` batches. Raises a
  UserError if `eval.objectives` names an unknown objective, or `eval.watch` a
  loss that is not measured.
  """
  objectives = training.objectives
  out = {}
  if unknown := sorted({*config.eval.objectives} - {*objectives}):
    names = f"unknown {', '.join(unknown)}; known: {', '.join(objectives)}"
    raise UserError(f"eval.objectives: {names}")
  for name in config.eval.objectives if config.eval.rows else ():
    objective = objectives[name]
    if objective.needs_mask_token and training.vocabulary.mask_id is None:
      continue
    # Every run measures the same: masked as at the end of the run, if the share
    # changes.
    fixed = dataclasses.replace(
      objective, mask_ratio=objective.ratio_at(1.0), mask_ratio_end=None
    )
    out[objective.name] = {
      set_name: _held_out_source(training, name, fixed, rows, config.eval.rows)
      for set_name, rows in sets.items()
    }
  watch = config.eval.watch
  names = loss_names(out)
  if unknown := [name for name in watch if name not in names]:
    raise UserError(
      f"eval.watch: {unknown[0]} is not measured; known:"
      f" {', '.join(names) or 'none'}"
    )
  if config.eval.patience and not watch:
    raise UserError(
      "eval.patience needs eval.watch: name the held-out losses that must"
      f" improve, one or more of {', '.join(names)}"
    )
  return out


def loss_names(sources: Mapping[str, Mapping[str, BatchSource]]) -> list[str]:
  """Returns the names of the losses that these sources measure.

  If an objective has several sets, each also has a loss, such as `clm/NAME`.
  """
  out = []
  for name, sets in sources.items():
    out.append(name)
    if len(sets) > 1:
      out += [f"{name}/{set_name}" for set_name in sets if set_name]
  return out


def _held_out_source(
  training: BatchSource, name, objective, held_out: Rows, most
) -> BatchSource:
  """Returns at most `most` held-out rows as batches of one objective."""
  first = training.order.stages[0].layout
  rows = min(most, len(held_out))
  # At most as many as a step computes at once, so that they fit in memory, and
  # a multiple of the data shards. Even and odd batches are two halves, and have
  # even and odd rows, for any size.
  size = min(-(-rows // 2), first.batch_size // first.microbatches)
  size = -(-size // first.shards) * first.shards
  batches = 2 * -(-rows // (2 * size))
  layout = dataclasses.replace(first, batch_size=size, microbatches=1)
  return BatchSource(
    rows=held_out,
    # Shuffled, so that the first rows are a sample of all.
    order=Order(
      {"": len(held_out)}, (Stage(0.0, layout),), rounding="up", alternate=True
    ),
    curriculum=curriculum.parse_curriculum(name, [name], 1, batches),
    objectives={name: objective},
    vocabulary=training.vocabulary,
    seed=training.seed,
    frame=training.frame,
    held_out=rows,
  )
