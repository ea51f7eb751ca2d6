"""Writing files so that none is ever half-written."""

import os
import pathlib


def write_text(path: str | os.PathLike, text: str) -> None:
  """Writes a file at once, or not at all: aside first, then in its place."""
  path = pathlib.Path(path)
  aside = path.with_name(path.name + ".tmp")
  aside.write_text(text, encoding="utf-8")
  aside.replace(path)
