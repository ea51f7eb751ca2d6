"""Merges models into one: their mean, a point between two, sums of changes.

  antlm merge --models=RUN,RUN --weights=0.7,0.3 --workdir=MERGED
  antlm merge --models=RUN,RUN --method=slerp --workdir=MERGED
  antlm merge --models=RUN,RUN --method=task --base=MODEL --workdir=MERGED

Each model is a run, one of its steps, or what `antlm import` takes: a folder of
transformers, or a name on the Hub. MERGED is then a run like any other; its
config is the first model's, and its card says what it was merged of.

  linear  the mean, each by its weight's part of all weights
  slerp   of two, on the arc between them, tensor by tensor: norms stay
  task    the base, and each one's difference from it times its weight
"""

import dataclasses
from collections.abc import Sequence

from antlm_jax import cli, settings
from antlm_jax.hf import import_
from antlm_jax.inference import merging
from antlm_jax.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What the command takes."""

  models: tuple[str, ...] = setting(help="with commas")
  weights: tuple[float, ...] = setting((), "one for each; equal parts if none")
  method: str = setting("linear", "see above", choices=tuple(merging.METHODS))
  base: str = setting("", "the model that task starts from")
  workdir: str = setting(help="receives the checkpoint", read=cli.here)


def main(argv: Sequence[str]) -> None:
  """The command."""
  parser = cli.Parser(description=__doc__)
  settings.add_arguments(parser, Settings)
  wanted = settings.from_args(Settings, parser.parse_args(argv))
  import_.check_workdir(wanted.workdir)  # before minutes of reading
  parts = [import_.load(model) for model in wanted.models]
  base = import_.load(wanted.base) if wanted.base else None
  meta, params = merging.merge(parts, wanted.weights, wanted.method, base)
  merged = import_.Imported(meta, 0, (), params)
  path = import_.write(merged, wanted.workdir, parts[0].task)
  print(f"{meta.merged}: {path}")


if __name__ == "__main__":
  cli.run(main)
