"""Minimal pairs scored while a model trains: a hook for `loop.train`."""

import os
from collections.abc import Mapping

from ml_collections import ConfigDict

from antlm_jax.inference import framing, pairs
from antlm_jax.training import hooks
from antlm_jax.training.metrics import PAIRS

PER_FILE = 100  # pairs of a file, so that BLiMP's 67,000 do not hold up a run


class Pairs(hooks.Evaluator):
  """Records the accuracy on minimal pairs in the modes that a run trains.

  As often as held-out losses, on the first `PER_FILE` pairs of each file. All
  processes score the same pairs together, as the parameters are split.

  Args:
    folder: Holds *.jsonl files of pairs.

  Raises:
    UserError: if it does not, or a line is not a pair.
  """

  prefixes = (PAIRS,)

  def __init__(self, folder: str | os.PathLike):
    self._pairs = pairs.minimal_pairs(folder, limit=PER_FILE)

  def measure(self, trainer) -> dict[str, float]:
    """Scores the pairs with the parameters that would be saved now."""
    run = trainer.run
    live = framing.TextModel(
      model=run.model,
      params=trainer.state.best_params,
      tokenizer=run.tokenizer,
      boundary=run.meta.boundary,
      config=run.config,
    )
    return {
      f"{PAIRS}{mode}": pairs.accuracy(live, self._pairs, mode)
      for mode in _modes(run.config)
    }

  def say(self, trainer, values: Mapping[str, float]) -> str:
    """Puts the accuracies into a line."""
    found = {name.removeprefix(PAIRS): value for name, value in values.items()}
    shown = " · ".join(f"{mode} {value:.1%}" for mode, value in found.items())
    return f"{len(self._pairs)} pairs after step {trainer.step}: {shown}"


def _modes(config: ConfigDict) -> list[str]:
  """Returns how texts are scored as a run's objectives predict tokens."""
  masked = {0: "mlm", 1: "mntp"}
  modes = {
    "causal" if one.left_to_right else masked[one.shift]
    for one in framing.trained(config)
  }
  return sorted(modes)
