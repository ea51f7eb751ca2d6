"""Lists the configs, with encoder, parameters and length of each.

Load one by its name, `antlm train --config=NAME`, and read its file for its
sources and arguments. Parameters include an untied output layer, which the
names of the encoders' sizes leave out.
"""

import ast
import types
from collections.abc import Iterator, Sequence
from typing import Annotated

from antlm_jax import cli, models, settings, tables
from antlm_jax import config as config_lib
from antlm_jax.config import Config
from antlm_jax.errors import UserError
from antlm_jax.settings import argument
from antlm_jax.units import quantity

_VOCAB_SIZE = 16_000  # of configs without a VOCAB_SIZE of their own


@settings.checked
def configs(
  vocab_size: Annotated[int | None, argument(least=260, most=2**24)] = None,
) -> str:
  """Returns a table of all configs.

  Args:
    vocab_size: Vocabulary size of the counted models; by default the config's
      own, or 16,000.
  """
  head = ("config", "encoder", "parameters", "vocabulary", "length", "purpose")
  return tables.text_table(list(_config_rows(vocab_size)), head)


def _config_rows(vocab_size: int | None) -> Iterator[tuple[str, ...]]:
  for path in sorted(config_lib.CONFIGS.glob("*.py")):
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    purpose = " ".join(docstring.partition("\n\n")[0].split())
    module = config_lib.config_module(path.stem)
    vocabulary = vocab_size or getattr(module, "VOCAB_SIZE", _VOCAB_SIZE)
    for name in _config_names(path.stem, module):
      try:
        config = config_lib.load_config(name)
      except UserError:  # it needs an argument, such as a model
        yield name, "", "", "", "", purpose
        continue
      model = models.build_model(config.model, vocabulary)
      size = quantity(model.size)
      length = _length(config)
      tokens = quantity(vocabulary)
      yield name, config.model.name, size, tokens, length, purpose


def _config_names(stem: str, module: types.ModuleType) -> list[str]:
  """Returns a config's name, or one for each size that it takes."""
  names = [f"{stem}:size={size}" for size in getattr(module, "SIZES", ())]
  try:
    config_lib.load_config(names[0] if names else stem)
  except UserError:  # SIZES are no sizes of an encoder, as in a study
    return [stem]
  return names or [stem]


def _length(config: Config) -> str:
  """Returns the length of a config's curriculum, in epochs or steps."""
  steps = config.curriculum_for(1000).steps
  # Only a length in epochs grows with the steps of an epoch.
  if config.curriculum_for(2000).steps == steps:
    return f"{steps:,} steps"
  return f"{steps / 1000:g} epochs"


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  print(cli.call_with_arguments(configs, argv, __doc__))
