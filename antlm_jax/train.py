"""Trains a model.

    antlm train --config=quickstart --workdir=DIR \\
      --config.data.path=PREPARED [--config.key=value ...]
"""

import shlex
import sys
from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax.runtime import signals


def main(argv: Sequence[str]) -> None:
  """The command."""
  with signals.listening():
    # Here, since they take seconds, in which a signal is to be heeded as well.
    from antlm_jax import config as config_lib
    from antlm_jax.hf import import_
    from antlm_jax.inference.while_training import Pairs
    from antlm_jax.runtime import processes
    from antlm_jax.training import loop

    args, overrides = _parse(argv, config_lib.described())
    with processes.together():
      config = config_lib.load(args.config, overrides)
      hooks = [Pairs(config.eval.pairs)] if config.eval.pairs else []
      command = f"{sys.argv[0]} {shlex.join(argv)}"
      begin = config.init.checkpoint
      start = import_.start(begin) if begin else None
      loop.train(config, args.workdir, hooks, command, start)


def done(argv: Sequence[str]) -> bool:
  """Returns whether the run has ended, and had these settings.

  It reads neither the model nor the data.

  Raises:
    UserError: The arguments or the run's files cannot be read.
  """
  from antlm_jax import config as config_lib
  from antlm_jax.runtime import files
  from antlm_jax.training import saving

  args, overrides = _parse(argv, "")
  workdir = files.path(args.workdir)
  if not (workdir / "summary.json").exists():
    return False
  before = files.read_text(workdir / saving.CONFIG, "the run's config")
  config = config_lib.load(args.config, overrides)
  return not config_lib.differences(config_lib.from_json(before), config)


def _parse(argv: Sequence[str], settings: str):
  """Returns the arguments, and those that override the config."""
  parser = cli.Parser(
    description="Trains a model. The same command resumes a run.",
    epilog=f"settings, each --config.KEY=VALUE:\n{settings}",
  )
  parser.add_argument(
    "--config",
    required=True,
    help="Name or path of a config, FILE.py or FILE.py:ARG",
  )
  parser.add_argument(
    "--workdir",
    required=True,
    help="Path to the run's folder; may be gs://BUCKET/RUN",
  )
  return parser.parse_with_overrides(argv)


if __name__ == "__main__":
  cli.run(main)
