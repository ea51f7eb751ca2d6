"""Preparing and training from Python, with data that are in memory."""

import pathlib

import numpy as np
import pytest

import antlm_jax as ax
from antlm_jax.data import in_memory
from antlm_jax.data.prepared_folder import Prepared
from antlm_jax.errors import UserError
from tests import helpers

SMALL = {"eval.every": 0, "checkpoint.every": 0, "log.every": 10}
PACKED = {"vocab_size": 300, "seq_len": 16, "documents": "line"}


@pytest.fixture(scope="module")
def lines(english):
  (path,) = english.glob("text/*train*")
  return path.read_text().splitlines()[:600]


def train(folder, data, **more) -> ax.Trained:
  run = "quickstart:shrink"
  return ax.train(run, folder, data, quiet=True, curriculum="6C+6M steps", **more)


def test_texts_are_paths_or_documents(lines, tmp_path, capfd):
  """The same documents give the same rows, wherever they come from."""
  path = tmp_path / "lines.txt"
  path.write_text("\n".join(lines))
  made = [
    ax.prepare(text, output, quiet=True, **PACKED)
    for text, output in (
      (path, tmp_path / "data"),
      (str(path), None),
      ([path], None),
      (lines, None),
      (iter(lines), None),
    )
  ]
  hashes = [data.manifest.splits["train"].sha256 for data in made]
  assert len({*hashes}) == 1 and made[0].folder and not made[1].folder
  rows = range(len(made[0].train))
  for data in made[1:]:
    helpers.same(data.train.read(rows)[0], made[0].train.read(rows)[0])
  assert repr(made[0]).startswith(f"<prepared data: {len(rows):,} rows of 16")
  assert capfd.readouterr() == ("", "")  # quiet
  # The folder is opened, not made again, also from a list of documents.
  again = ax.prepare(lines, tmp_path / "data", quiet=True, **PACKED)
  assert again.manifest == made[0].manifest
  with pytest.raises(UserError, match=r"is a path, .* a list of pathlib\.Path"):
    ax.prepare([str(path)])
  with pytest.raises(UserError, match="no text to train on"):
    ax.prepare([], quiet=True)


def test_data_in_memory_train_as_a_folder_does(lines, tmp_path, capfd):
  """Parameters are equal bit for bit, and a run resumes on either."""
  folder = ax.prepare(lines, tmp_path / "data", quiet=True, **PACKED)
  held = ax.prepare(lines, quiet=True, **PACKED)
  found = [
    train(tmp_path / "a", tmp_path / "data"),
    train(tmp_path / "b", folder),
    train(tmp_path / "c", held),
    train(tmp_path / "d", {"one": held}, **{"data.mix": "100%one"}),
  ]
  assert capfd.readouterr() == ("", "")
  assert [run.steps for run in found] == [12] * 4
  assert repr(found[0]).startswith(f"<run {tmp_path / 'a'}, 12 steps, clm ")
  assert {*found[0].losses} == {"clm", "mlm"}
  first, *others = (run.load().params for run in found)
  for params in others[:2]:
    assert helpers.equal(params, first)
  # Nothing is left to train, and the run is recognised.
  assert train(tmp_path / "c", folder).losses == found[2].losses


def test_rows_of_token_ids_need_no_tokenizer(tmp_path):
  rows = np.random.default_rng(0).integers(0, 40, (200, 8))
  run = train(tmp_path / "run", rows, **{"train.batch_size": 8})
  model = run.load()
  assert model.tokenizer.decode([3, 39]) == "3 39"
  assert model.tokenizer.vocab_size == 41  # with the mask
  assert ax.score(model, "1 2 3").shape == (1,)
  # Other rows are other data: the run refuses to go on with them.
  with pytest.raises(UserError, match="data"):
    train(tmp_path / "run", rows[::-1], **{"train.batch_size": 8, "seed": 0})


@pytest.mark.parametrize(
  "rows, told",
  [
    (np.zeros(3, int), r"rows are int64 of the shape \(2,\)"),
    (np.zeros((9, 4)), "rows are float64"),
    (-np.ones((9, 4), int), "token ids -1 to -1"),
  ],
)
def test_bad_rows_are_one_line(rows, told):
  with pytest.raises(UserError, match=told):
    in_memory.from_rows(rows)


def test_a_mode_is_called_as_logs_call_it(loaded_tiny):
  texts = ["the dog", "dogs"]
  found = [ax.score(loaded_tiny, texts, mode) for mode in ("clm", "causal")]
  helpers.same(*found)


def test_a_config_is_a_name_a_file_or_a_value(tmp_path):
  by_name = ax.plan
  assert by_name
