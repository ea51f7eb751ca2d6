"""Scores minimal pairs while a model trains (`eval.pairs`)."""

import os
from collections.abc import Mapping

from antlm_jax.inference import framing, pairs
from antlm_jax.training import hooks
from antlm_jax.training.metrics import PAIRS

PER_FILE = 100  # pairs per file, since all 67,000 of BLiMP would delay a run


class Pairs(hooks.Evaluator):
  """Records accuracies on minimal pairs in the modes that a run trains.

  It scores the first `PER_FILE` pairs of each *.jsonl file of `folder` when the
  run measures held-out losses. All processes score the same pairs together,
  because each has a part of the parameters. Raises a UserError if there are no
  pairs, or a line is not a pair.
  """

  prefixes = (PAIRS,)

  def __init__(self, folder: str | os.PathLike):
    self._pairs = pairs.read_minimal_pairs(folder, limit=PER_FILE)

  def measure(self, trainer) -> dict[str, float]:
    """Scores the pairs with the parameters that a checkpoint would have."""
    run = trainer.run
    live = framing.TextModel(
      model=run.model.with_base(run.context_after(trainer.step)["rope_theta"]),
      params=trainer.state.eval_params,
      meta=run.meta,
    )
    return {
      f"{PAIRS}{mode}": pairs.pair_accuracy(live, self._pairs, mode)
      for mode in framing.trained_modes(run.config)
    }

  def say(self, trainer, values: Mapping[str, float]) -> str:
    shown = " · ".join(
      f"{name.removeprefix(PAIRS)} {value:.1%}"
      for name, value in values.items()
    )
    return f"{len(self._pairs)} pairs after step {trainer.step}: {shown}"
