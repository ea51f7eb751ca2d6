"""Several sources of data: their folders, runs and held-out sets.

test_order has the order of their rows.
"""

import re

import numpy as np
import pytest

from antlm_jax.commands.prepare import prepare
from antlm_jax.data.order import Order, Stage
from antlm_jax.data.prepared_folder import Sources, folders_by_name
from antlm_jax.data.source import BatchSource
from antlm_jax.errors import Stopped
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.batch import BatchLayout
from antlm_jax.objectives.objective import OBJECTIVES
from antlm_jax.page.hook import Page
from antlm_jax.training import hooks, loop, metrics
from antlm_jax.training import run as run_lib
from tests import helpers, runs


def test_moved_text_ends_with_its_source():
  rows = helpers.FakeRows(6, 16, special=0.0)
  of = BatchSource(
    rows,
    Order({"a": 3, "b": 3}, (Stage(0.0, BatchLayout(8)),), 12),
    curriculum.parse_curriculum("C", ["C"], 1, 12),
    OBJECTIVES,
    helpers.vocabulary(),
    seed=0,
    random_offset=True,
  )
  parts = rows.tokens[:3], rows.tokens[3:]
  streams = [" ".join(map(str, part.reshape(-1))) for part in parts]
  moved = 0
  for step in range(12):
    for row in of[step].inputs[0]:
      text = " ".join(map(str, row))
      assert sum(text in stream for stream in streams) == 1
      moved += row.tolist() not in rows.tokens.tolist()
  assert moved > 30


def test_folders_have_names():
  assert folders_by_name("runs/a,b", "data.path") == {"": "runs/a,b"}
  assert folders_by_name("a=x,y,b=z=1", "data.path") == {"a": "x,y", "b": "z=1"}
  runs.refusal("have the same name", folders_by_name, "a=x,a=y", "data.path")


def test_a_path_that_exists_is_a_path(tmp_path, monkeypatch):
  """Catches seed=1/data that trains on 1/data."""
  monkeypatch.chdir(tmp_path)
  for folder in ("seed=1/data", "1/data", "x,lr=1,b=2/data", "x"):
    (tmp_path / folder).mkdir(parents=True)
  assert folders_by_name("seed=1/data", "data.path") == {"": "seed=1/data"}
  assert folders_by_name("x,lr=1,b=2/data", "data.path") == {
    "": "x,lr=1,b=2/data"
  }
  text = "a=seed=1/data,b=x,lr=1,b=2/data,c=x,lr=1"
  expected = {"a": "seed=1/data", "b": "x,lr=1,b=2/data", "c": "x", "lr": "1"}
  assert folders_by_name(text, "data.path") == expected
  assert folders_by_name("seed=2/data", "data.path") == {"seed": "2/data"}
  runs.refusal(
    "seed=1/data is not a prepared folder", Sources.open, "seed=1/data"
  )


@pytest.fixture(scope="module")
def other(english, prepared, shared):
  """Other text, prepared like `prepared` and with other settings."""

  def make(folder):
    text = (english / "text" / "toy.train").read_text().splitlines()[:700]
    lines = "\n".join(" ".join(line.split()[::-1]) for line in text)
    folder.mkdir()
    (folder / "text.txt").write_text(lines)
    common = {"text": folder / "text.txt", "documents": "line"}
    alike = {"seq_len": 32, "packing": "documents"} | common
    same = alike | {"tokenizer": str(prepared / "tokenizer.json")}
    for name, options in {
      "alike": same,
      "tokens": alike | {"vocab_size": 300},
      "length": same | {"seq_len": 16},
      "stream": same | {"packing": "stream"},
    }.items():
      prepare(output=folder / name, **options)

  return shared("other", make)


class Ends(hooks.Hook):
  """Records the batches, and stops the run after a step."""

  def __init__(self, after=-1):
    self.after, self.seen = after, {}

  def after_step(self, trainer, done_step):
    self.seen[done_step.step] = done_step.batch.inputs
    if done_step.step == self.after:
      trainer._stop.status = 75


MIXED = ("curriculum=12C:M steps", "model.layers=1", "eval.every=0")
MIX = "data.mix=50%a+50%a:b=1:3"


def train(workdir, paths, *overrides, hook=None):
  loaded = runs.settings(paths, *MIXED, *overrides)
  loop.train_run(loaded, workdir, [hook, Page()] if hook else [Page()])


@pytest.fixture(scope="module")
def paths(prepared, other):
  return f"a={prepared},b={other / 'alike'}"


@pytest.fixture(scope="module")
def whole(paths, prepared, tmp_path_factory):
  workdir, hook = tmp_path_factory.mktemp("mixed") / "run", Ends()
  train(workdir, paths, MIX, f"eval.data=again={prepared}", hook=hook)
  return workdir, hook.seen


@pytest.mark.slow
def test_a_run_that_ends_in_a_mix_goes_on_bit_for_bit(whole, paths, tmp_path):
  first, then = Ends(after=8), Ends()
  with pytest.raises(Stopped):
    train(tmp_path / "run", paths, MIX, hook=first)
  train(tmp_path / "run", paths, MIX, hook=then)
  seen = first.seen | then.seen
  assert min(then.seen) > 8 and seen.keys() == whole[1].keys()
  assert all(np.array_equal(seen[s], whole[1][s]) for s in seen)
  assert runs.same_params(tmp_path / "run", whole[0])
  for changed, words in {
    (paths, "data.mix=a:b"): "data.mix was '50%a+50%a:b=1:3', is 'a:b'",
    (paths.replace("b=", "a=").replace("a=", "b=", 1), MIX): "on other rows",
  }.items():
    runs.refusal(re.escape(words), train, tmp_path / "run", *changed)


def test_the_epochs_that_a_rule_allows_are_those_of_each_text(paths):
  """Catches a text that a mix reads more often than train.max_epochs."""
  settings = "curriculum=40C steps", "train.batch_size=16", "data.mix=b"
  run = run_lib.build_run(runs.settings(paths, *MIXED, *settings))
  epochs = run.order.epochs(40)
  assert epochs["a"] == 0 and epochs["b"] == 640 / run.order.sources["b"]
  assert run.exceeds(epochs["b"] - 0.2) == "the data 'b'"
  assert run.exceeds(epochs["b"]) == "" and run.epochs < epochs["b"] - 0.2
  most = f"train.max_epochs={epochs['b'] - 0.2}"
  runs.refusal(
    "epochs of the data 'b', over",
    lambda: run_lib.build_run(runs.settings(paths, *MIXED, *settings, most)),
  )


def test_each_held_out_set_has_its_curve(whole):
  workdir, _ = whole
  records = [r for r in metrics.read_records(workdir) if "eval/clm/loss" in r]
  assert [r["step"] for r in records] == [0, 6, 12]  # the data change at 6
  for record in records:
    a, b, again = (record[f"eval/clm/{n}/loss"] for n in ("a", "b", "again"))
    assert a == again != b
    assert min(a, b) < record["eval/clm/loss"] < max(a, b)
    assert "eval/mlm/b/accuracy" in record
  rows = runs.summary(workdir)["held_out"]
  assert [row["step"] for row in rows] == [0, 6, 12]
  assert rows[-1]["eval/mlm/b/loss"] > 0


def test_a_name_for_one_folder_changes_nothing(prepared):
  built = [
    run_lib.build_run(runs.settings(path, "curriculum=4C:M steps"))
    for path in (prepared, f"books={prepared}")
  ]
  for step in range(4):
    assert helpers.equal(*(run.batches[step] for run in built))
  assert built[0].meta.data == built[1].meta.data


@pytest.mark.parametrize(
  "path, settings, words",
  [
    ("a={a},b={other}/tokens", (), "tokenizer.json, which is"),
    ("a={a},b={other}/length", (), "seq_len, which is 32 for a and 16 for b"),
    ("a={a},b={other}/stream", (), "(packing), which is True for a and False"),
    ("a={a},b={a}", ("data.mix=a:c",), "character 3 ('c'): unknown source 'c'"),
    ("a={a},b={a}", ("data.mix=a:a=1:1",), "1 ('a'): a mix of a alone"),
    ("{a}", ("curriculum=12M30:M30 steps",), "3 ('M'): a mix of M30 alone"),
    ("a={a},b={a}", ("data.mix=a:b=0:1",), "5 ('0'): a proportion of"),
    ("a={a},b={a}", ("data.mix=3a+8b steps",), "is 11 steps long, but the run"),
    ("a={a},b={a}", ("data.rounding=up",), "several sources of data"),
    ("{a}", ("data.mix=a",), "data.path none"),
    ("{a}", ("eval.data={a}",), "a name that no other has"),
    ("a={a}", ("eval.data=a={a}",), "a name that no other has"),
    ("a={a},b=/nowhere", (), "/nowhere is not a prepared folder"),
  ],
)
def test_what_does_not_fit_is_told(path, settings, words, prepared, other):
  fill = {"a": prepared, "other": other}
  given = (s.format(**fill) for s in (path, "curriculum=12C steps", *settings))
  assert words in runs.told(lambda: run_lib.build_run(runs.settings(*given)))


def test_several_folders_read_as_their_rows_one_after_the_other(paths):
  of = Sources.open(paths)
  a, b = of.train.values()
  indices = np.array([len(a), 0, len(a) - 1, len(of.rows) - 1, 3])
  tokens, starts = of.rows.read(indices)
  places = [(b, 0), (a, 0), (a, len(a) - 1), (b, len(b) - 1), (a, 3)]
  for i, (part, at) in enumerate(places):
    assert np.array_equal(tokens[i], part.read([at])[0][0])
    assert np.array_equal(starts[i], part.read([at])[1][0])
  with pytest.raises(IndexError):
    of.rows.read([len(of.rows)])
