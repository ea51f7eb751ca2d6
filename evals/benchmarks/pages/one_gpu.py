"""Tables of the costs and the memory of training on one GPU."""

import re
import shlex

from antlm_jax import config as config_lib
from antlm_jax import tables, units
from antlm_jax.evals.benchmarks import costs, encoder_costs
from antlm_jax.evals.benchmarks.pages.studies import RESULTS
from antlm_jax.runtime import files

# Share of a card's printed GB that JAX takes: three quarters of the memory
# that CUDA shows, which is 0.9 to 0.99 GiB for each GB.
_USABLE = 0.75 * 0.9 * 2**30
_SHOWN = "17M", "97M", "150M", "610M"
_CARDS = "1 x RTX 4090", "1 x H100"
_TOKENS = 1e10


def _fitting() -> str:
  """Which config fits which memory, as `antlm plan` says."""
  path = RESULTS / "one-gpu.json"
  found = {row["name"]: row for row in files.read_json(path, "plans")["rows"]}
  lines = []
  for line in costs.read_speeds("one_gpu"):
    row = found[line.name]
    config, _, memory = line.name.rpartition(", ")
    gpu = line.hardware.rpartition(" of an ")[2].partition("-")[0]
    fits = row["needed_bytes"] <= _USABLE * int(memory.removesuffix(" GB"))
    words = shlex.split(line.words)
    changes = config_lib.parse_overrides(
      word for word in words if word.startswith("--config.")
    )
    name = words[0].removeprefix("--config=")
    own = config_lib.given_config(name, changes)
    lines.append(
      (
        memory,
        re.sub(r"^\S+", r"`\g<0>`", config),
        line.batch,
        own.train.microbatches,
        own.model.remat,
        units.gib(row["needed_bytes"]),
        "yes" if fits else "no",
        f"{units.quantity(row['tokens_per_second'])}, {gpu}" if fits else None,
      )
    )
  head = "GPU memory", "config", "rows x tokens", "`microbatches`", "`remat`"
  return tables.markdown(lines, (*head, "needs", "fits", "tokens/s, forecast"))


def _hours() -> str:
  """Hours of some encoders on one GPU, by the forecast."""
  found = encoder_costs.encoder_costs(_TOKENS, rates={})
  hours = {
    (model, card): f"{time} h"
    for model, card, _, time, *_ in encoder_costs.cost_rows(list(found))
  }
  lines = [
    (model, *(hours.get((model, card)) for card in _CARDS)) for model in _SHOWN
  ]
  return tables.markdown(lines, ("encoder", *_CARDS))


FITTING = {"one-gpu": _fitting}
HOURS = {"start-hours": _hours}
