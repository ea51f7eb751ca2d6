"""Merges models into one: their mean, a point between two, or their changes.

  antlm merge --models=RUN,RUN --weights=0.7,0.3 --workdir=MERGED
  antlm merge --models=RUN,RUN --method=slerp --workdir=MERGED
  antlm merge --models=RUN,RUN --method=task --base=MODEL --workdir=MERGED

A model is a run, one of its checkpoints, a folder of transformers, or a name on
the Hub. MERGED is then a run like any other. It has the config of the first
model, and its card lists the merged models.

  linear  weighted mean of the models
  slerp   point on the arc between two models, tensor by tensor, which keeps
          the norms
  task    the base plus the weighted changes of each model since it
"""

import dataclasses
from collections.abc import Sequence

from antlm_jax import cli, settings
from antlm_jax.hf import import_
from antlm_jax.inference import merging
from antlm_jax.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Options of the command."""

  models: tuple[str, ...] = setting(help="Models, separated by commas")
  weights: tuple[float, ...] = setting(
    (), "Weight of each model; equal by default"
  )
  method: str = setting(
    "linear", "Method of merging, see above", choices=tuple(merging.METHODS)
  )
  base: str = setting("", "Model that `task` starts from")
  workdir: str = setting(
    help="Path to the folder for the merged model", read=cli.here
  )


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__)
  settings.add_arguments(parser, Settings)
  wanted = settings.from_args(Settings, parser.parse_args(argv))
  import_.check_workdir(wanted.workdir)  # before reading, which takes minutes
  parts = [import_.load(model) for model in wanted.models]
  base = import_.load(wanted.base) if wanted.base else None
  meta, params = merging.merge(parts, wanted.weights, wanted.method, base)
  merged = import_.Imported(meta, 0, (), params)
  path = import_.write(merged, wanted.workdir, parts[0].task)
  print(f"{meta.merged}: {path}")


if __name__ == "__main__":
  cli.run(main)
