"""Fixtures that several test files share."""

import pytest

from antlm_jax import prepare, toy_english


@pytest.fixture(scope="session")
def english(tmp_path_factory):
  """A folder of generated English: text/ and pairs/."""
  folder = tmp_path_factory.mktemp("english")
  toy_english.write(folder, sentences=3000, pairs=20)
  return folder


@pytest.fixture(scope="session")
def prepared(english, tmp_path_factory):
  """The generated English, packed by documents to rows of 32."""
  folder = tmp_path_factory.mktemp("data") / "prepared"
  prepare.prepare(
    prepare.Settings(
      text=(str(english / "text"),),
      output=str(folder),
      vocab_size=400,
      seq_len=32,
      packing="documents",
      documents="line",
    )
  )
  return folder
