"""Preparing and training from Python, with data in memory."""

import numpy as np
import pytest

import antlm_jax as ax
from antlm_jax import config
from antlm_jax.data import in_memory
from antlm_jax.errors import UserError
from tests import helpers

PACKED = {"vocab_size": 300, "seq_len": 16, "documents": "line"}


@pytest.fixture(scope="module")
def lines(english):
  (path,) = english.glob("text/*train*")
  return path.read_text().splitlines()[:600]


def train(folder, data, **more):
  more = {"curriculum": "6C+6M steps"} | more
  return ax.train("quickstart:shrink", folder, data, quiet=True, **more)


def test_texts_are_paths_or_documents(lines, tmp_path, capfd):
  """The same documents give the same rows from every source."""
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
    found, wanted = (of.train.read(rows)[0] for of in (data, made[0]))
    np.testing.assert_array_equal(found, wanted)
  assert repr(made[0]).startswith(f"<prepared data: {len(rows):,} rows of 16")
  assert capfd.readouterr() == ("", "")  # quiet
  # With a list of documents, too, an existing folder is reused.
  for output in (tmp_path / "new", tmp_path / "new"):
    ax.prepare(lines, output, **PACKED)
  assert "is already prepared with these settings" in capfd.readouterr().out
  with pytest.raises(UserError, match=r"is a path, .* a list of pathlib\.Path"):
    ax.prepare([str(path)])
  with pytest.raises(UserError, match="no text to train on"):
    ax.prepare([], quiet=True)


def test_bad_documents_are_told_by_their_index():
  """Catches a temporary file's name in errors, and columns' names as texts."""
  for texts, message in (
    (["a", "x\ud83d"], "text 1 .* has half of a surrogate pair"),
    (["a", 1.5], "text 1 is 1.5, not a str"),
    ({"text": ["a"]}, "a dict is no list of texts"),
  ):
    with pytest.raises(UserError, match=f"^{message}"):
      ax.prepare(texts, seq_len=8, quiet=True)


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
  # The run is complete, and is recognized with its data in a folder.
  assert train(tmp_path / "c", folder).losses == found[2].losses


def test_rows_of_token_ids_need_no_tokenizer(tmp_path):
  rows = np.random.default_rng(0).integers(0, 40, (200, 8))
  run = train(tmp_path / "run", rows, **{"train.batch_size": 8})
  model = run.load()
  assert model.tokenizer.decode([3, 39]) == "3 39"
  assert model.tokenizer.vocab_size == 41  # with the mask
  # "clm" names the causal mode, too, and a model may be a path.
  scores = ax.score(model, "1 2 3", mode="clm")
  for path in (run.workdir, str(run.workdir), run):
    np.testing.assert_array_equal(scores, ax.score(path, ["1 2 3"]))
  # A run refuses to resume on other rows.
  with pytest.raises(UserError, match="on other rows"):
    train(tmp_path / "run", rows[::-1], **{"train.batch_size": 8, "seed": 0})


@pytest.mark.parametrize(
  "rows, told",
  [
    (np.zeros(3, int), r"rows are int64 of the shape \(3,\)"),
    (np.zeros((9, 4)), "rows are float64"),
    ([[1, 2], [1]], "rows are not all as long"),
    (["a text"], r"are texts: give antlm_jax\.prepare"),
    (-np.ones((9, 4), int), "token ids -1 to -1"),
  ],
)
def test_bad_rows_are_one_line(rows, told):
  with pytest.raises(UserError, match=told):
    in_memory.from_rows(rows)


def test_a_config_is_a_name_or_a_value():
  """Settings change a config given by name, as a value or as a dict."""
  changes = {"optimizer.name": "muon", "train.steps": 5, "eval.watch": ("clm",)}
  by_name = config.given("quickstart", changes)
  assert isinstance(by_name.optimizer, ax.Muon)
  assert by_name.train.steps == 5 and by_name.eval.watch == ("clm",)
  assert config.given(config.load("quickstart"), changes) == by_name
  as_dict = config.module("quickstart").get_config("")
  assert config.given(as_dict, changes) == by_name
  with pytest.raises(UserError, match=r"did you mean 'train\.steps'"):
    config.given(ax.Config(), {"train.stps": 5})


@pytest.mark.parametrize(
  "call, told",
  [
    (lambda: ax.train("quickstart", "w", hooks=["norm"]), "'norm' is no Hook"),
    (lambda: ax.train("quickstart", "w", hooks=[ax.Hook]), "is no Hook: give"),
    (lambda: ax.train("quickstart", "w", ["a text"]), "data are texts: give"),
    (lambda: ax.Config(optimizer="muon"), "optimizer='muon' is no section"),
    (lambda: ax.Config(model=ax.Train()), r"model=Train\(.* is no section"),
    (lambda: ax.prepare([b"text"]), "b'text' is no text: give str"),
    (lambda: ax.prepare([3], quiet=True), "3 is no text: give str"),
  ],
)
def test_mistakes_are_told_in_one_line(call, told, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match=told) as error:
    call()
  assert "\n" not in str(error.value) and not list(tmp_path.iterdir())
