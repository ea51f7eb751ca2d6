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
import os
from collections.abc import Sequence

from antlm_jax import cli, settings
from antlm_jax.hf import import_
from antlm_jax.inference import merging
from antlm_jax.inference.model import Loaded, load
from antlm_jax.runtime import files
from antlm_jax.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merging:
  """Arguments of the command."""

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


def merge(
  models: Sequence[files.Path | Loaded],
  workdir: files.Path,
  *,
  weights: Sequence[float] = (),
  method: str = Merging.method,
  base: files.Path | Loaded = "",
) -> Loaded:
  """Merges models of one shape and one tokenizer, and writes the result.

  Args:
    models: Models, runs, checkpoints, folders of transformers or names on the
      Hub. The first one's config is kept.
    workdir: Path to the folder for the merged model, which is a run.
    weights: Weight of each model; equal by default.
    method: `linear`, `slerp` or `task`; see `antlm merge --help`.
    base: The model that `task` starts from.

  Raises:
    UserError: The models do not fit each other or the method, or the folder
      exists.
  """
  import_.check_workdir(workdir)  # before reading, which takes minutes
  parts = [_opened(model) for model in models]
  start = _opened(base) if base else None
  meta, params = merging.merge(parts, weights, method, start)
  merged = import_.Imported(meta, 0, (), lambda: params)
  return load(import_.write(merged, workdir, parts[0].task))


def _opened(model: files.Path | Loaded) -> Loaded:
  return model if isinstance(model, Loaded) else import_.load(os.fspath(model))


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__)
  settings.add_arguments(parser, Merging)
  merged = merge(**vars(settings.from_args(Merging, parser.parse_args(argv))))
  print(f"{merged.merged}: {files.shown(merged.path)}")
