"""Real data, of ../shared/data where a checkout has it."""

import pathlib
import tarfile

import pytest

from tests import runs

DATA = runs.ROOT.parent / "shared/data"


def unpacked(name: str, folder: pathlib.Path) -> pathlib.Path:
  """Unpacks an archive into a folder, or skips the test; returns the folder.

  Args:
    name: The archive's, without its endings.
    folder: Receives what is in it.
  """
  path = DATA / f"{name}.tar.xz"
  if not path.exists():
    pytest.skip(f"{path} is absent")
  with tarfile.open(path) as archive:
    # The first releases of Python 3.11 have no filters.
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    archive.extractall(folder)
  return folder
