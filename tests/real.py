"""Real data from ../shared/data, if the checkout has it."""

import pathlib
import tarfile

import pytest

from tests import runs

DATA = runs.ROOT.parent / "shared/data"


def unpacked(name: str, folder: pathlib.Path) -> pathlib.Path:
  """Unpacks NAME.tar.xz into a folder, which it returns, or skips the test."""
  path = DATA / f"{name}.tar.xz"
  if not path.exists():
    pytest.skip(f"{path} is absent")
  with tarfile.open(path) as archive:
    # Early releases of Python 3.11 have no filters.
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    archive.extractall(folder)
  return folder
