"""Several sources of data: order of training rows, and held-out sets."""

import collections
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from antlm_jax.commands.prepare import prepare
from antlm_jax.data.order import Order, Stage
from antlm_jax.data.prepared_folder import Sources, folders_by_name
from antlm_jax.data.source import Source
from antlm_jax.errors import Stopped, UserError
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.batch import BatchLayout
from antlm_jax.objectives.objective import OBJECTIVES
from antlm_jax.page.hook import Page
from antlm_jax.training import hooks, loop, metrics
from antlm_jax.training import run as run_lib
from tests import helpers, runs

SIZES = {"a": 70, "b": 33, "c": 11}


def order(text, steps, *parts, sizes=SIZES, **options) -> Order:
  parts = parts or (Stage(0.0, BatchLayout(8)),)
  mix = text and curriculum.parse_curriculum(
    text, list(sizes), 1, steps, kind="source"
  )
  return Order(sizes, parts, steps, mix or None, **options)


def taken(of: Order, start=0, stop=None) -> np.ndarray:
  """Returns the rows of the steps in the order of slots."""
  steps = range(start, of.steps if stop is None else stop)
  return np.concatenate([of.slots(step).rows.reshape(-1) for step in steps])


def by_source(rows, sizes=SIZES) -> dict[str, np.ndarray]:
  ends = np.cumsum(list(sizes.values()))
  source = np.searchsorted(ends, rows, side="right")
  return {
    name: rows[source == i] - (ends[i] - sizes[name])
    for i, name in enumerate(sizes)
  }


def test_a_phase_gives_each_source_its_share_and_no_row_twice():
  of = order("30a+41a:b=3:1+29c:b:a=1:2:3 steps", 100)
  expected = {  # rows in 30, 41 and 25 batches of 8
    (0, 30): {"a": 240, "b": 0, "c": 0},
    (30, 71): {"a": 246, "b": 82, "c": 0},
    (71, 96): {"a": 100, "b": 200 / 3, "c": 100 / 3},
  }
  for (start, stop), counts in expected.items():
    found = by_source(taken(of, start, stop))
    for name, count in counts.items():
      # The last interval ends in the middle of 64 slots.
      assert abs(len(found[name]) - count) <= (1 if stop < 96 else 6)
  assert abs(len(by_source(taken(of, 71, 79))["b"]) - 64 / 3) <= 1
  whole = by_source(taken(of))
  for name, size in SIZES.items():
    assert abs(of.taken(100)[name] - len(whole[name])) <= 6
    for start in range(0, len(whole[name]), size):  # epochs of the source
      epoch = whole[name][start : start + size]
      assert len(set(epoch.tolist())) == len(epoch)


@st.composite
def mixes(draw):
  phases = []
  for _ in range(draw(st.integers(1, 3))):
    names = draw(st.permutations(list(SIZES)))[: draw(st.integers(1, 3))]
    weights = [str(draw(st.integers(1, 9))) for _ in names]
    phases.append(f"{':'.join(names)}={':'.join(weights)}")
  return "+".join(phases)


@hypothesis.given(mixes(), st.integers(0, 5))
@hypothesis.settings(max_examples=12, deadline=None)
def test_any_mix_is_the_same_in_batches_of_any_size_and_layout(text, seed):
  whole = taken(order(text, 60, Stage(0.0, BatchLayout(24)), seed=seed))
  smaller = order(text, 180, Stage(0.0, BatchLayout(8, 2, 2)), seed=seed)
  places = smaller.at(0).layout.slots
  found = [smaller.slots(s).rows[np.argsort(places), 0] for s in range(180)]
  assert np.array_equal(np.concatenate(found), whole)
  for local in ((0,), (1,)):  # the shards of two processes
    layout = BatchLayout(8, 2, 2, local)
    mine = order(text, 180, Stage(0.0, layout), seed=seed)
    for step in (0, 59, 60, 121, 179):
      at = np.isin(places, layout.slots)
      own, all_slots = mine.slots(step), smaller.slots(step)
      assert np.array_equal(own.rows, all_slots.rows[at])
      assert np.array_equal(own.visits, all_slots.visits[at])
  for name, rows in by_source(whole).items():
    size, epochs = SIZES[name], len(rows) // SIZES[name]
    for epoch in rows[: epochs * size].reshape(-1, size):
      assert np.array_equal(np.sort(epoch), np.arange(size))


def test_batches_of_other_sizes_and_joined_rows_go_on_in_each_source():
  parts = (Stage(0.0, BatchLayout(8)), Stage(0.5, BatchLayout(2), 4))
  given = {"growth": 0.5, "shuffle": False, "sizes": {n: 4000 for n in SIZES}}
  of = order("a:b:c=2:1:1+b", 40, *parts, **given)
  found, filled = [], []
  for step in range(40):
    rows = of.slots(step).rows[: of.batch_size(step)]
    assert (rows // 4000 == rows[:, :1] // 4000).all()
    filled += [rows.size]
    found.append(rows.reshape(-1))
  rows = np.concatenate(found)
  # No row repeats, except in a joined row that overlaps earlier rows.
  assert len(rows) - len(set(rows.tolist())) <= 3 * 3
  assert sum(filled) == sum(of.taken(40).values())
  first = np.bincount(np.concatenate(found[:20]) // 4000, minlength=3)
  assert np.abs(first - first.sum() * np.array([0.5, 0.25, 0.25])).max() <= 1
  # The second half takes no rows of c.
  assert of.taken(40)["c"] == of.taken(20)["c"] == first[2]


@pytest.mark.parametrize("batch", [1, 3, 8, 64])
def test_sources_and_objectives_of_a_batch_are_independent(batch):
  steps = 3200 // batch
  both = curriculum.parse_curriculum("C:M", ["C", "M"], 1, steps).at(0)
  of = order("a:b", steps, Stage(0.0, BatchLayout(batch)))
  counts = collections.Counter()
  for step in range(steps):
    kinds, sources = (
      both.divide_batch(step * batch, batch),
      of.slots(step).rows[:, 0] >= 70,
    )
    counts.update(zip(kinds.tolist(), sources.tolist(), strict=True))
  assert len(counts) == 4 and counts.total() == steps * batch
  for count in counts.values():  # the standard deviation is 14
    assert abs(count - steps * batch / 4) < 50


def test_without_a_mix_sources_end_their_epochs_together():
  of = order("", 456)  # 57 hands of 64 slots
  assert of.steps_per_epoch == 114 / 8
  found = by_source(taken(of))
  assert [len(rows) // SIZES[name] for name, rows in found.items()] == [32] * 3


def test_moved_text_ends_with_its_source():
  rows = helpers.FakeRows(6, 16, special=0.0)
  of = Source(
    rows,
    order("", 12, sizes={"a": 3, "b": 3}),
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
  with pytest.raises(UserError, match="have the same name"):
    folders_by_name("a=x,a=y", "data.path")


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
  with pytest.raises(UserError, match="seed=1/data is not a prepared folder"):
    Sources.open("seed=1/data")


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

  def after_step(self, trainer, taken):
    self.seen[taken.step] = taken.batch.inputs
    if taken.step == self.after:
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
    with pytest.raises(UserError, match=re.escape(words)):
      train(tmp_path / "run", *changed)


def test_the_epochs_that_a_rule_allows_are_those_of_each_text(paths):
  """Catches a text that a mix reads more often than train.max_epochs."""
  settings = "curriculum=40C steps", "train.batch_size=16", "data.mix=b"
  run = run_lib.build_run(runs.settings(paths, *MIXED, *settings))
  epochs = run.order.epochs(40)
  assert epochs["a"] == 0 and epochs["b"] == 640 / run.order.sources["b"]
  assert run.exceeds(epochs["b"] - 0.2) == "the data 'b'"
  assert run.exceeds(epochs["b"]) == "" and run.epochs < epochs["b"] - 0.2
  most = f"train.max_epochs={epochs['b'] - 0.2}"
  with pytest.raises(UserError, match="epochs of the data 'b', over"):
    run_lib.build_run(runs.settings(paths, *MIXED, *settings, most))


def test_frequencies_are_those_of_all_rows_to_train_on(paths):
  given = "curriculum=4C:M steps", "objectives.M.frequency_power=1"
  run = run_lib.build_run(runs.settings(paths, *given, "model.layers=1"))
  rows = run.sources.rows
  tokens, _ = rows.read(np.arange(len(rows)))
  rank = run.source.vocabulary.rank
  counts = np.bincount(tokens.reshape(-1), minlength=len(rank))
  assert (np.diff(counts[np.argsort(rank)]) <= 0).all()
  assert rank.min() == 0 and rank.max() == 1 - 1 / len(rank)
  held_out = run.evaluations["mlm"]["a"].objectives["M"]
  assert held_out.frequency_power == 0


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
    assert helpers.equal(*(run.source[step] for run in built))
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
