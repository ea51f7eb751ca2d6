"""Fills the masks of a text.

antlm fill --checkpoint=RUN --text="The <mask> sat."
antlm fill --checkpoint=RUN --text="Once upon" --tokens=20 --temperature=0.8

Prints a table of the candidates for each mask, at the step that filled it, with
the text that each gives. The filled text follows. A terminal shows the text
while it is filled.
"""

import re
import shutil
from collections.abc import Iterator, Sequence

from antlm_jax import cli, tables, terminal
from antlm_jax.data.tokenizer import MASK
from antlm_jax.inference.filling import Filled, fill
from antlm_jax.inference.model import open_model
from antlm_jax.runtime import progress


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  arguments = cli.parsed(fill, argv, __doc__)
  model = open_model(arguments.pop("model"), arguments.pop("step"))
  single = arguments["count"] == 1
  bar = progress.bar(bar_format="{desc}", leave=False) if single else None

  def show(filled: Sequence[Filled]) -> None:
    """Shows a text, as far as it is filled, on the terminal's last line."""
    line = " ".join(filled[0].text.replace(MASK, "_").split())
    width = shutil.get_terminal_size().columns - 1
    bar.set_description_str(terminal.visible(line)[:width])

  watch = show if bar is not None else None
  texts = fill(model, **arguments, watch=watch)
  if bar is not None:
    bar.close()
  names = sorted(model.mask_names, key=len, reverse=True)
  pieces = re.split("|".join(map(re.escape, names)), arguments["text"])
  answers = ["\n\n".join(_filled_lines(filled, pieces)) for filled in texts]
  print("\n---\n".join(answers))


def _filled_lines(filled: Filled, pieces: Sequence[str]) -> Iterator[str]:
  """Yields a table of the candidates for each mask of a text, and the text.

  `pieces` are the parts of the text between its masks.
  """
  for number, mask in enumerate(filled.masks[: len(pieces) - 1], start=1):
    before = MASK.join(pieces[:number])
    after = MASK.join(pieces[number:])
    rows = [
      (f"{probability:.4f}", token, f"{before}{token}{after}")
      for token, probability in mask.candidates
    ]
    if rows:
      name = MASK if len(pieces) == 2 else f"{MASK} {number}"
      yield tables.text_table(rows, ("probability", name, "text"), "><")
  yield filled.text
