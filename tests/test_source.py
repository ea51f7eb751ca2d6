"""The source: order, layouts, capacity, masks and new objectives."""

import collections
import dataclasses
import itertools
import shutil

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

import antlm_jax as ax
from antlm_jax import config, hashing
from antlm_jax.data import in_memory
from antlm_jax.data import source as source_lib
from antlm_jax.data.order import Order, Stage
from antlm_jax.data.prepared_folder import PreparedData
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.batch import BatchLayout, capacity
from antlm_jax.objectives.corruption import Vocabulary
from antlm_jax.objectives.objective import OBJECTIVES, Objective
from antlm_jax.training import metrics
from antlm_jax.training import run as run_lib
from tests import helpers, runs
from tests.helpers import FakeRows, by_row, source

MIXED = "C:M=1:1+P:N=1:3"


@hypothesis.given(
  st.integers(1, 5000), st.integers(0, 2**40), st.integers(0, 9)
)
def test_permute_is_a_bijection(size, seed, epoch):
  out = hashing.permute(np.arange(size), size, seed, epoch)
  assert np.array_equal(np.sort(out), np.arange(size))
  some = np.arange(size)[:: max(1, size // 7)]
  assert np.array_equal(hashing.permute(some, size, seed, epoch), out[some])


def test_permutations_differ_by_key_and_mix():
  first, second = (hashing.permute(np.arange(1000), 1000, 0, e) for e in (0, 1))
  assert (first == second).sum() < 10
  assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.15
  assert abs(np.corrcoef(first, second)[0, 1]) < 0.15


def test_each_place_of_a_permutation_gets_every_row_alike():
  found = [hashing.permute(np.array([3]), 10, 0, e)[0] for e in range(4000)]
  counts = np.bincount(found, minlength=10)
  assert ((counts - 400) ** 2 / 400).sum() < 35  # chi-square, 9 degrees


@pytest.mark.parametrize("axis", ["seed", "step", "row", "position"])
def test_uniform_is_uniform_along_every_counter(axis):
  n = 20_000
  if axis == "seed":
    draws = np.array([hashing.uniform(seed, 5, 5, 5) for seed in range(n)])
  else:
    names = ("step", "row", "position")
    counters = (np.arange(n) if name == axis else 5 for name in names)
    draws = hashing.uniform(5, *counters)
  assert draws.dtype == np.float64  # n * draw must not round up to n
  assert draws.min() >= 0 and draws.max() < 1
  counts = np.histogram(draws, 50, (0, 1))[0]
  assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 100  # 49 degrees
  assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_bits_broadcast_as_single_draws():
  rows, at = np.arange(3)[:, None], np.arange(5)
  whole = hashing.bits(7, 1, rows, at)
  assert whole.shape == (3, 5) and len(np.unique(whole)) == 15
  for r, t in np.ndindex(whole.shape):
    assert whole[r, t] == hashing.bits(7, 1, r, t)
  swapped = hashing.bits(7, 1, at[:3, None], rows[:, 0])
  assert not np.array_equal(whole[:, :3], swapped.T)


def order(size, batch, **options) -> Order:
  return Order({"": size}, (Stage(0.0, BatchLayout(batch)),), **options)


def rows_of(order, steps):
  return np.concatenate([order.slots(step).rows[:, 0] for step in range(steps)])


sizes = st.integers(1, 60), st.integers(1, 25)


# test_order has batches that carry an epoch's last rows over.
@hypothesis.given(*sizes, st.sampled_from(["up", "down"]), st.booleans())
def test_an_epoch_visits_rows_as_its_rounding_says(size, batch, rounding, mix):
  epochs = order(size, batch, rounding=rounding, seed=3, shuffle=mix)
  steps = epochs.steps_per_epoch
  down = max(1, size // batch)
  assert steps == (-(-size // batch) if rounding == "up" else down)
  for epoch in rows_of(epochs, 3 * int(steps)).reshape(3, -1):
    counts = np.bincount(epoch, minlength=size)
    assert len(counts) == size
    if rounding == "up" or size < batch:
      assert counts.min() >= 1 and counts.sum() == steps * batch
      if size >= batch:
        assert counts.max() <= 2
        again = epoch[size:]
        assert np.array_equal(again, epoch[: len(again)])
    else:
      assert counts.max() <= 1 and (counts == 0).sum() == size % batch


def test_shuffling_differs_by_epoch_and_can_be_left_out():
  shuffled = rows_of(order(50, 10), 10).reshape(2, 50)
  assert not np.array_equal(shuffled[0], shuffled[1])
  plain = rows_of(order(50, 10, shuffle=False), 10).reshape(2, 50)
  assert np.array_equal(plain, [np.arange(50)] * 2)


@pytest.mark.parametrize("packed", [False, True])
def test_random_access_is_reading_in_order_with_threads(packed):
  of = source(f"C+M+{MIXED}", FakeRows(packed=packed), steps=12)
  in_order = list(source_lib.load_batches(of, threads=3))
  assert len(in_order) == len(of) == 12
  for step in (7, 0, 11, 7, 3):
    assert helpers.equal(of[step], in_order[step])
  rest = list(source_lib.load_batches(of, start=5))
  assert len(rest) == 7
  for a, b in zip(rest, in_order[5:], strict=True):
    assert helpers.equal(a, b)
  assert list(source_lib.load_batches(of, start=12)) == []


def test_what_is_hidden_differs_when_a_row_comes_again():
  of = source("M", FakeRows(8), steps=2, shuffle=False)
  assert not np.array_equal(of[0].inputs, of[1].inputs)
  assert helpers.equal(of[0], dataclasses.replace(of, seed=0)[0])
  assert not helpers.equal(of[0], dataclasses.replace(of, seed=1)[0])


LAYOUTS = {
  "microbatches": BatchLayout(16, microbatches=4),
  "shards": BatchLayout(16, shards=4),
  "both": BatchLayout(16, microbatches=2, shards=4),
  "rows": BatchLayout(16, microbatches=4, shards=4),
  **{
    f"process of shards {local}": BatchLayout(16, 2, 4, local)
    for local in ((0,), (3,), (1, 2), (0, 2, 3))
  },
}


def laid_out(of, layout):
  """Returns the source with another layout."""
  order = dataclasses.replace(of.order, stages=(Stage(0.0, layout),))
  return dataclasses.replace(of, order=order)


def masked(**changes):
  return {"M": dataclasses.replace(OBJECTIVES["M"], **changes)}


def unfolded(of, step):
  shifts = [of.objectives[name].shift for name in of.curriculum.objectives]
  return by_row(of[step], of.order.stage_at(0).layout, shifts)


@pytest.mark.sample(6)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_hold_the_same_rows_inputs_and_targets(name, packed):
  plain = source(MIXED, FakeRows(packed=packed), BatchLayout(16))
  layout = LAYOUTS[name]
  other, slots = laid_out(plain, layout), layout.slots.tolist()
  if len(slots) < 16:  # two neighbouring rows of each shard and microbatch
    first = [
      row for shard in layout.local for row in (2 * shard, 2 * shard + 1)
    ]
    assert slots == first + [8 + row for row in first]
  for step in range(8):
    inputs, targets = unfolded(plain, step)
    targets = {at: x for at, x in targets.items() if at[0] in slots}
    assert unfolded(other, step) == ({n: inputs[n] for n in slots}, targets)
    if len(slots) == 16:
      a, b = ((x.positions, x.mask) for x in (plain[step], other[step]))
      assert helpers.equal(*(jax.tree.map(np.ravel, x) for x in (a, b)))


def test_targets_are_the_tokens_of_their_rows():
  rows = FakeRows(packed=True)
  of = source(MIXED, rows, BatchLayout(16, 2, 2), masked(weight=2.5))
  for step in range(8):
    tokens = rows.tokens[of.order.slots(step).rows[:, 0]]
    names, phase = of.curriculum.objectives, of.curriculum.at(step)
    done = 16 * (step - phase.start)
    letters = np.array(list(phase.shares))[phase.divide_batch(done, 16)]
    found = unfolded(of, step)[1]
    assert found
    for (row, at), (target, weight, kind) in found.items():
      assert target == tokens[row, at] and names[kind] == letters[row]
      assert weight == (2.5 if names[kind] == "M" else 1.0)


def test_the_ratios_of_a_mixed_batch_spread_over_their_whole_range():
  """Catches ratios that follow the places by which a batch is divided."""
  of = source("C:D=1:1", FakeRows(40, 64, special=0), BatchLayout(64))
  diffusion = of.curriculum.objectives.index("D")
  for step in range(8):
    found = unfolded(of, step)[1]
    ratios = {
      row: 1 / weight
      for (row, _), (_, weight, kind) in found.items()
      if kind == diffusion
    }
    # 32 rows, of which those with few masks may predict nothing.
    assert np.diff([0, *sorted(ratios.values()), 1]).max() < 4 / 32


def test_growing_batches_hold_the_shares_of_a_mixture():
  """Catches a batch that is divided before its empty slots are left out."""
  rows = FakeRows(64, 8, special=0)
  of = source("C:M=1:15", rows, BatchLayout(16), masked(), steps=400)
  grown = dataclasses.replace(of.order, steps=400, growth=0.1)
  of = dataclasses.replace(of, order=grown)
  filled, counts = 0, collections.Counter()
  for step in range(400):
    here = of[step].objective_ids[of[step].weights > 0]
    causal = (here == 0).sum() / 7  # of 8 tokens, a row predicts 7
    filled += grown.batch_size(step)
    counts["C"] += causal
    assert abs(counts["C"] - filled / 16) <= 1


@pytest.mark.slow
def test_surplus_targets_drop_out_of_the_loss_and_change_nothing_else():
  rows = FakeRows(40, 512, special=0)
  rows.tokens |= 1  # odd: no token begins a word, so a row is one word
  words = masked(unit="word", mask_token=1.0, random_token=0.0)
  of = source("M", rows, BatchLayout(1), objectives=words, steps=40)
  size = capacity([(words["M"], 1.0)], 1, 512)
  assert size == 256
  # The first step with a masked row; the list has room for half of it.
  step = next(s for s in range(40) if of[s].weights.any())
  batch = of[step]
  whole = rows.tokens[of.order.slots(step).rows[:, 0]]
  assert (batch.inputs[0] == helpers.MASK).all()
  assert np.array_equal(batch.target_positions[0, 0], np.arange(size))
  assert np.array_equal(batch.targets[0], whole[:, :size])
  assert (batch.weights == 1).all() and batch.weights.shape == (1, 1, size)
  assert batch.lost.tolist() == [[512 - size]]
  # With the size of these words, the list has room for all.
  sized = dataclasses.replace(of.vocabulary, word_size=512.0)
  roomy = dataclasses.replace(of, vocabulary=sized)[step]
  assert (roomy.weights > 0).sum() == 512 and not roomy.lost.any()

  model = helpers.model(layers=1, max_seq_len=512)
  train_step = helpers.train_step(model, num_objectives=1, loss_chunk=100)
  params = helpers.random_params(model)
  nats = np.subtract(*helpers.target_scores(model, params, batch))
  sums = train_step.evaluate(params, batch)
  assert sums["count"] == sums["weight"] == size
  assert sums["loss"][0] / size == pytest.approx(nats.mean(), rel=1e-5)
  # A dropped target's token is nowhere in the batch.
  other = dataclasses.replace(of, rows=FakeRows(40, 512))
  other.rows.tokens = rows.tokens.copy()
  other.rows.tokens[:, size:] ^= 2
  assert helpers.equal(other[step], batch)


# Other capacities would change the order of additions, and so existing runs.
@pytest.mark.parametrize(
  "text, rows, length, size",
  [
    ("M", 8, 128, 256),
    ("M", 32, 128, 896),
    ("M", 32, 512, 2944),
    ("C:M=1:15", 16, 128, 768),
    ("C:M", 64, 128, 5504),
    *((letter, 8, 100, 800) for letter in "CEPD"),  # any token may be a target
  ],
)
def test_capacities_stay(text, rows, length, size):
  phase = curriculum.parse_curriculum(text, OBJECTIVES, 1, 100).at(0)
  shares = [(OBJECTIVES[name], share) for name, share in phase.shares.items()]
  assert capacity(shares, rows, length) == size


UNITS = {
  "token": {},
  "word": {"unit": "word"},
  "span": {"unit": "span"},
  "long spans": {"unit": "span", "span_length": 9, "span_lengths": "geometric"},
  "binomial": {"unit": "span", "choice": "binomial"},
  "exact": {"choice": "exact"},
  "falling": {"mask_ratio": 0.3, "mask_ratio_end": 0.15},
  "drawn": {"mask_ratio_high": 0.3},
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("text", ["M", "C:M"])
@pytest.mark.parametrize("name", UNITS)
def test_a_list_is_full_after_six_deviations_of_what_it_holds(name, text):
  rows, objectives = FakeRows(500, 64, special=0), masked(**UNITS[name])
  of = source(text, rows, BatchLayout(128), objectives=objectives, steps=6000)
  counts = np.array([(of[step].weights > 0).sum() for step in range(60)])
  size = of[0].targets.shape[-1]
  # The helpers' words have two tokens on average; some are long.
  assert size < 128 * 64
  assert (size - counts.mean()) / counts.std() > 5.5


def test_slots_after_the_held_out_rows_are_not_predicted():
  of = source("C", FakeRows(5), BatchLayout(4), rounding="up", shuffle=False)
  limited = dataclasses.replace(of, held_out=5)
  assert unfolded(limited, 0) == unfolded(of, 0)
  rows = {row for row, _ in unfolded(limited, 1)[1]}
  assert rows == {0}
  assert limited[1].inputs.shape == of[1].inputs.shape


def test_a_changing_ratio_reaches_its_end_with_the_run():
  falling = masked(mask_ratio=0.8, mask_ratio_end=0.2)
  rows = FakeRows(64, 64, special=0)
  of = source("M", rows, BatchLayout(64), objectives=falling, steps=5)
  shares = [(of[s].weights > 0).sum() / rows.tokens.size for s in range(5)]
  assert shares == pytest.approx([0.8, 0.65, 0.5, 0.35, 0.2], abs=0.03)


@pytest.mark.parametrize(
  "texts, of_whole, of_packed",
  [
    ("C C:E", "causal", "causal start"),
    ("M M:N", "", "start end"),
    ("C:M P P:C", "end", "start end"),
  ],
)
def test_mask_has_only_the_bounds_it_needs(texts, of_whole, of_packed):
  for text, packed in itertools.product(texts.split(), (False, True)):
    mask = source(text, FakeRows(packed=packed))[0].mask
    has = mask.causal, mask.k_start is not None, mask.k_end is not None
    names = np.array(["causal", "start", "end"])[np.array(has)]
    assert " ".join(names) == (of_packed if packed else of_whole)


@pytest.mark.parametrize("packed", [False, True])
def test_mask_shows_each_row_what_its_objective_says(packed):
  rows = FakeRows(packed=packed)
  for text in ("C", "M", "C:M"):
    of = source(text, rows, shuffle=False)
    visible = jax.tree.map(lambda x: x[0], of[0].mask).dense(16, 16)
    visible = True if visible is None else visible
    visible = np.broadcast_to(visible, (8, 16, 16))
    segment = rows.starts[:8].cumsum(1) if packed else np.zeros((8, 16))
    same = segment[:, :, None] == segment[:, None, :]
    phase = of.curriculum.at(0)
    objective_ids = np.array(list(phase.shares))[phase.divide_batch(0, 8)]
    for row, kind in enumerate(objective_ids):
      lower = np.tri(16, dtype=bool) if kind == "C" else True
      assert np.array_equal(visible[row], same[row] & lower)


def test_positions_restart_with_each_document():
  rows = FakeRows(packed=True)
  of = source("M", rows, shuffle=False)
  at = np.arange(16)
  first = np.maximum.accumulate(np.where(rows.starts[:8], at, 0), axis=1)
  assert np.array_equal(of[0].positions[0], at - first)


@pytest.fixture(scope="module")
def built(prepared):
  path = f"--config.data.path={prepared}"
  settings = config.load_config("configs/quickstart.py:shrink", [path])
  new = Objective("copy", attention="prefix", predict="suffix")
  settings = dataclasses.replace(
    config.load_config(settings, {"train.steps": 6}),
    curriculum="C+X:M=1:1",
    objectives={**settings.objectives, "X": new},
  )
  return run_lib.build_run(settings)


def test_prepared_rows_become_steps(built, prepared):
  of = built.batches
  rows = PreparedData.open(prepared).train
  tokens, starts = rows.read(of.order.slots(4).rows[:, 0])
  found = unfolded(of, 4)[1]
  assert found and len(of) == 6
  for (row, at), (target, _, kind) in found.items():
    assert target == tokens[row, at] != built.tokenizer.pad_id
    if built.curriculum.objectives[kind] == "X":
      assert not starts[row, at]
  assert all(map(helpers.equal, source_lib.load_batches(of), of))


def test_a_damaged_row_is_told_from_threads(built, prepared, tmp_path):
  folder = shutil.copytree(prepared, tmp_path / "copy")
  path = folder / "train-00000-of-00001.array_record"
  data = bytearray(path.read_bytes())
  data[len(data) // 200] ^= 1
  path.write_bytes(data)
  rows = PreparedData.open(folder).train
  order = dataclasses.replace(built.batches.order, shuffle=False)
  of = dataclasses.replace(built.batches, rows=rows, order=order)
  runs.refusal(
    r"array_record has a bad row \d+: ",
    lambda: list(source_lib.load_batches(of)),
  )


def test_held_out_rows_are_each_predicted_once(built):
  for name, sets in built.evaluations.items():
    (of,) = sets.values()
    (letter,) = of.objectives
    counts = collections.Counter()
    for step in range(len(of)):
      rows = of.order.slots(step).rows[:, 0]
      counts.update((int(rows[row]), at) for row, at in unfolded(of, step)[1])
    assert max(counts.values()) == 1
    assert len({row for row, _ in counts}) >= 0.9 * built.config.eval.rows
    assert of.curriculum.objectives == (letter,)
    assert name == of.objectives[letter].name


def test_the_size_of_words_is_their_second_moment_over_their_first():
  """Catches a margin of target lists that does not follow the run's words."""
  rows, of = helpers.tokens(50, 40, seed=3), helpers.vocabulary()
  sizes = []
  for row in rows:
    size = 0
    for token in [*row, helpers.EOS]:
      if (special := of.special[token]) or of.word_tokens().start[token]:
        sizes.append(size)
        size = 0
      size += not special
  sizes = np.array(sizes)
  expected = (sizes**2).sum() / sizes.sum()
  assert of.mean_word_size(rows) == pytest.approx(expected)
  words = masked(unit="word")["M"]
  wide = capacity([(words, 1.0)], 64, 64, word_size=10.0)
  n = 64 * 64 * words.mask_ratio
  assert wide >= n + 5.5 * np.sqrt(n * 10 * (1 - words.mask_ratio))
  # Up to a factor of 2.5, lists stay as they are for tokens.
  for factor in (1.7, 2.5):
    assert capacity([(words, 1.0)], 64, 64, factor) == capacity(
      [(masked()["M"], 1.0)], 64, 64
    )


@pytest.mark.slow
def test_lost_targets_are_counted_and_said(tmp_path, monkeypatch, capfd):
  """Catches targets that leave the loss in silence."""
  # No token begins a word: each row is one long word.
  tokenizer = Tokenizer.train(["a b"] * 9, 300)
  ids = np.flatnonzero(~tokenizer.word_tokens.start)[:9]
  rows = np.random.default_rng(0).choice(ids, (40, 512))
  data = in_memory.from_rows(rows, tokenizer=tokenizer)

  def train(name):
    changes = {"objectives.M.unit": "word", "objectives.M.mask_ratio": 0.5}
    changes |= {"train.batch_size": 1, "log.every": 4, "eval.rows": 0}
    changes |= {"model.max_seq_len": 512, "log.writers": ""}
    shape = {"model.layers": 1, "curriculum": "8M steps"}
    ax.train("quickstart:shrink", tmp_path / name, data, **changes, **shape)
    records = metrics.read_records(tmp_path / name)
    found = [r["train/lost_targets"] for r in records if "train/mlm/loss" in r]
    return sum(found), capfd.readouterr().out

  lost, said = train("sized")
  assert lost == 0 and "leaves out" not in said
  # A sample of rows that missed the long words
  monkeypatch.setattr(Vocabulary, "mean_word_size", lambda *_: 1.0)
  lost, said = train("missed")
  room = capacity([(masked(unit="word", mask_ratio=0.5)["M"], 1)], 1, 512)
  assert lost and lost % (512 - room) == 0  # of each row that was masked
  assert "warning: the loss leaves out 25.00% of the targets" in said
