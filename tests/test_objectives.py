"""Objectives: corruption, visibility and targets."""

import dataclasses
import itertools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from antlm_jax import config_help, settings
from antlm_jax.objectives.batch import BatchLayout, assemble_batch
from antlm_jax.objectives.corruption import Draw, Segments
from antlm_jax.objectives.objective import (
  CHOICES,
  OBJECTIVES,
  UNITS,
  Objective,
  with_ratios,
)
from tests import helpers, reference, runs
from tests.helpers import MASK, PAD, SPECIAL, VOCAB

replace = dataclasses.replace
VARIANTS = {
  f"{name} {unit}": replace(o, unit=unit)
  for name, o in OBJECTIVES.items()
  for unit in (UNITS if o.max_mask_ratio else ["token"])
}
VARIANTS |= {
  f"N {unit} {choice}": replace(OBJECTIVES["N"], unit=unit, choice=choice)
  for unit, choice in itertools.product(UNITS, CHOICES[1:])
}
CHANGES = {
  "M long spans": {"span_length": 9, "span_lengths": "geometric"},
  "P spans": {"mask_ratio": 0.3},
  "M blocks span": {"attention": "block", "block_length": 3},
}
VARIANTS |= {
  name: replace(OBJECTIVES[name[0]], unit="span", **changes)
  for name, changes in CHANGES.items()
}
D_BLOCKS = replace(OBJECTIVES["D"], attention="block", block_length=5)
VARIANTS["D blocks"] = D_BLOCKS
MASKED = {
  name: o
  for name, o in VARIANTS.items()
  if o.max_mask_ratio and o.mask_ratio_high is None
}
MLM = OBJECTIVES["M"]
VOCABULARY = helpers.vocabulary()


@dataclasses.dataclass
class Case:
  """Rows with an objective and a draw."""

  objective: Objective
  tokens: np.ndarray
  segments: object
  draw: Draw

  def corrupt(self, progress=0.0, **changes):
    return replace(self.objective, **changes).corrupt(
      self.tokens, self.segments, self.draw, VOCABULARY, progress
    )


def make(objective, n, length, seed=0, step=3, special=0.1, packed=True):
  tokens = helpers.tokens(n, length, seed, special)
  segments = Segments.whole(n, length)
  if packed:
    segments = helpers.segments(n, length, seed)
  return Case(objective, tokens, segments, Draw(seed, step, np.c_[:n]))


@st.composite
def cases(draw, variants=tuple(VARIANTS)):
  objective = VARIANTS[draw(st.sampled_from(variants))]
  numbers = st.integers(0, 10**6)
  sizes = draw(st.integers(1, 5)), draw(st.integers(1, 40))
  return make(objective, *sizes, draw(numbers), draw(numbers))


def pieces(kept, cuts=False):
  """Yields the runs of True in rows, cut before `cuts`, as (row, slice)."""
  edges = cuts | np.diff(kept, axis=1, prepend=kept[:, :1])
  for row, edge in enumerate(edges):
    begins = np.union1d([0, len(edge)], np.flatnonzero(edge))
    for begin, end in itertools.pairwise(begins):
      if kept[row, begin]:
        yield row, slice(begin, end)


@hypothesis.given(cases())
def test_only_the_targets_declared_are_changed(case):
  before = case.tokens.copy()
  found = case.corrupt()
  assert np.array_equal(case.tokens, before)  # the input is not modified
  special = VOCABULARY.special[case.tokens]
  if case.objective.mask_ends:
    special &= case.tokens != helpers.EOS
  assert (found.inputs == case.tokens)[special].all()
  changed = found.inputs[found.inputs != case.tokens]
  assert ((changed >= SPECIAL) | (changed == MASK)).all()
  if case.objective.predict == "masked":
    assert not found.predicted[special].any()
  assert not found.predicted[case.tokens == PAD].any()
  assert np.array_equal(found.targets, before)
  changed = found.inputs != found.targets
  if not case.objective.max_mask_ratio:
    assert not changed.any()
  at = np.arange(case.tokens.shape[1])
  first = at - case.segments.start < case.objective.shift
  # Another segment never predicts a segment's first token.
  assert not found.predicted[first].any()
  if case.objective.predict == "masked":
    assert not (changed & ~found.predicted & ~first).any()
  if case.objective.name == "clm":
    assert np.array_equal(found.predicted, ~first & (case.tokens != PAD))


def blocks_of(case):
  """Returns block numbers, counted over a row's documents, `[n, T]`."""
  out = np.zeros(case.tokens.shape, int)
  for row, starts in enumerate(case.segments.start):
    number, length = -1, 0
    for at, start in enumerate(starts):
      if at == start or length == case.objective.block_length:
        number, length = number + 1, 0
      out[row, at], length = number, length + 1
  return out


@hypothesis.given(cases())
def test_visibility_is_the_objectives(case):
  found = case.corrupt()
  start, end = case.segments.start, case.segments.end
  at = np.broadcast_to(np.arange(start.shape[1]), start.shape)
  assert np.array_equal(found.k_start, start)
  if case.objective.attention == "causal":
    assert np.array_equal(found.k_end, at + 1)
  elif case.objective.attention == "bidirectional":
    assert np.array_equal(found.k_end, end)
  elif case.objective.attention == "block":
    for ids, k_end in zip(blocks_of(case), found.k_end, strict=True):
      # Block numbers ascend, so this finds the start of the next block.
      assert np.array_equal(k_end, np.searchsorted(ids, ids, side="right"))
  else:
    for row, first in zip(*np.nonzero(at == start), strict=True):
      inside = slice(first, end[row, first])
      ends, here = found.k_end[row, inside], at[row, inside]
      # A prefix of zero or one tokens is causal.
      assert np.array_equal(ends, np.maximum(here + 1, ends[0]))
      assert ends[0] <= end[row, first]
      suffix = here >= max(ends[0], first + 1)
      pad = case.tokens[row, inside] == PAD
      assert np.array_equal(found.predicted[row, inside], suffix & ~pad)


def test_prefixes_are_of_any_length_but_the_whole():
  case = make(OBJECTIVES["P"], 4000, 8, packed=False)
  ends = case.corrupt().k_end[:, 0]  # 1 for a prefix of 0 or 1
  shares = np.bincount(ends, minlength=9) / 4000
  assert shares[8] == 0
  assert shares[1] == pytest.approx(2 / 8, abs=0.03)
  assert shares[2:8] == pytest.approx(1 / 8, abs=0.03)


@hypothesis.given(cases(), st.data())
def test_a_row_is_the_same_alone_and_in_any_batch(case, data):
  whole = case.corrupt()
  order = data.draw(st.permutations(range(len(case.tokens))))
  some = np.array(order[: data.draw(st.integers(1, len(order)))])
  segments = Segments(case.segments.start[some], case.segments.end[some])
  draw = case.draw.of(some)
  part = Case(case.objective, case.tokens[some], segments, draw).corrupt()
  for a, b in zip(whole, part, strict=True):
    assert np.array_equal(a[some], b)


@pytest.mark.parametrize("name", MASKED)
def test_seed_step_and_row_each_change_what_is_hidden(name):
  case = make(VARIANTS[name], 1, 200, special=0)
  base = case.corrupt().inputs
  assert np.array_equal(base, case.corrupt().inputs)
  for seed, step, row in (1, 3, 0), (0, 4, 0), (0, 3, 1):
    draw = Draw(seed, step, np.array([[row]]))
    other = replace(case, draw=draw).corrupt().inputs
    assert not np.array_equal(base, other)


# Shares


@pytest.mark.parametrize("ratio", [0.05, 0.15, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("unit", [*UNITS, "long spans"])
def test_the_masked_share_moves_linearly_to_the_ratio(unit, ratio):
  objective = VARIANTS[f"M {unit}"]
  objective = replace(objective, mask_ratio=0.0, mask_ratio_end=ratio)
  case = make(objective, 1500, 96, special=0.15)
  for progress in (0.0, 0.5, 1.0):
    found = case.corrupt(progress).predicted[case.tokens >= SPECIAL].mean()
    assert found == pytest.approx(progress * ratio, abs=0.006 * (progress > 0))


@pytest.mark.parametrize("unit", UNITS)
def test_a_rows_count_is_a_coins_for_each_token(unit):
  objective = replace(MLM, unit=unit, choice="binomial")
  case = make(objective, 6000, 128, special=0.0)
  counts = case.corrupt().predicted.sum(axis=1)
  assert counts.mean() == pytest.approx(0.15 * 128, rel=0.02)
  if unit != "word":  # partial words at the ends add to the variance
    assert counts.var() == pytest.approx(128 * 0.15 * 0.85, rel=0.12)


@pytest.mark.parametrize("choice", ["exact", "covering"])
@pytest.mark.parametrize("unit", UNITS)
def test_the_ratio_is_met_in_each_row(unit, choice):
  objective = replace(MLM, unit=unit, choice=choice)
  case = make(objective, 4000, 128, special=0.1)
  ordinary = (case.tokens >= SPECIAL).sum(axis=1)
  shares = case.corrupt().predicted.sum(axis=1) / ordinary
  longest = {"token": 1, "word": 20, "span": 3}[unit]
  assert shares.mean() == pytest.approx(0.15, abs=0.002)
  # Partial units at the ends are allowed. Independent coins deviate by 0.03.
  assert np.abs(shares - 0.15).max() <= 1.01 * longest / ordinary.min()
  if unit != "word":
    assert shares.std() < 0.011


@pytest.mark.parametrize("unit", ["token", "span"])
def test_a_texts_tokens_take_turns(unit):
  objective = replace(MLM, unit=unit, choice="covering")
  rows = np.arange(300)[:, None]
  counts = np.zeros((300, 128), int)
  tokens = helpers.tokens(300, 128, 0, 0.0)
  for visit in range(24):
    draw = Draw(0, 7 * visit, rows, np.concatenate([rows, 0 * rows + visit], 1))
    case = Case(objective, tokens, helpers.segments(300, 128, 0), draw)
    counts += case.corrupt().predicted
    if visit == 7:  # GPT-BERT's code reaches .988, independent coins .73
      assert (counts > 0).mean() > 0.985
      assert counts.max() <= 2
  # Independent coins have a variance of 24 x .15 x .85 = 3.1.
  assert counts.mean() == pytest.approx(24 * 0.15, rel=0.01)
  assert counts.var() < 0.8


@pytest.mark.parametrize("unit", UNITS)
def test_every_place_in_a_row_is_as_likely(unit):
  case = make(replace(MLM, unit=unit, mask_ratio=0.3), 20_000, 12, special=0)
  shares = case.corrupt().predicted.mean(axis=0)
  assert shares == pytest.approx(0.3, abs=0.016)


@pytest.mark.parametrize("unit", UNITS)
def test_fates_are_eighty_ten_ten(unit):
  case = make(replace(MLM, unit=unit), 2500, 96)
  found = case.corrupt()
  before, after = case.tokens[found.predicted], found.inputs[found.predicted]
  masked, same = after == MASK, after == before
  random = ~masked & ~same
  # A random token may equal the original by chance.
  by_chance = 1 / (VOCAB - SPECIAL)
  assert masked.mean() == pytest.approx(0.8, abs=0.012)
  assert random.mean() == pytest.approx(0.1 * (1 - by_chance), abs=0.01)
  assert same.mean() == pytest.approx(0.1 * (1 + by_chance), abs=0.01)
  counts = np.bincount(after[random], minlength=VOCAB)
  assert not counts[:SPECIAL].any()
  expected = random.sum() / (VOCAB - SPECIAL)
  chi = ((counts[SPECIAL:] - expected) ** 2 / expected).sum()
  assert chi < 2 * (VOCAB - SPECIAL)


# Units


def test_words_are_hidden_whole_with_one_fate():
  case = make(replace(MLM, unit="word", mask_ratio=0.4), 300, 60)
  halves = case.corrupt(mask_token=0.5, random_token=0.0)
  mixed = case.corrupt(mask_token=0.5, random_token=0.5)
  lengths, different = set(), 0
  for word in pieces(case.tokens >= SPECIAL, case.tokens % 2 == 0):
    chosen = halves.predicted[word]
    random = mixed.inputs[word]
    for fate in (chosen, halves.inputs[word] == MASK, random == MASK):
      assert fate.all() or not fate.any()
    if chosen.all():
      lengths.add(len(chosen))
      different += MASK not in random and len(set(random.tolist())) > 1
  assert {1, 2, 3, 4} <= lengths
  assert different > 100  # each token of a word has its own replacement


@pytest.mark.parametrize(
  "name, ratio", [("M span", 1), ("M long spans", 2 / 3)]
)
def test_isolated_spans_have_lengths_by_their_law(name, ratio):
  objective = VARIANTS[name]  # uniform, geometric
  longest = objective.span_length
  case = make(replace(objective, mask_ratio=0.01), 4000, 200, special=0)
  spans = [at for _, at in pieces(case.corrupt().predicted)]
  inside = [at for at in spans if at.start > 0 and at.stop < 200]
  lengths = np.array([at.stop - at.start for at in inside])
  shares = np.bincount(lengths, minlength=longest + 2) / len(lengths)
  expected = ratio ** np.arange(longest)
  expected = expected / expected.sum()
  assert shares[1 : longest + 1] == pytest.approx(expected, abs=0.02)
  assert shares[longest + 1 :].sum() < 0.02  # adjacent spans


def test_an_isolated_span_has_one_fate():
  objective = replace(MLM, unit="span", mask_ratio=0.01, span_length=4)
  case = make(objective, 2500, 200, special=0)
  found = case.corrupt(mask_token=0.5, random_token=0.0)
  whole = mixed = 0
  for span in pieces(found.predicted):
    masked = (found.inputs[span] == MASK).tolist()
    if 2 <= len(masked) <= 4:
      mixed += len(set(masked)) == 2
      whole += len(set(masked)) == 1
  assert whole > 500 and mixed < 0.03 * whole  # mixed: adjacent spans


# Assembled batches


def assembled(case, found):
  layout = BatchLayout(len(case.tokens))
  objective_ids = np.zeros(len(case.tokens), np.int64)
  return assemble_batch(
    found, objective_ids, [case.objective], layout, {0: 1.0}, segmented=True
  )


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_bounds_that_the_attention_lacks_are_refused(attention):
  """Catches an own `corrupt` whose attention a batch would leave out."""
  tokens = np.full((2, 6), 9, np.int32)
  objective = Objective("mine", attention=attention, mask_ratio=0.5)
  segments = Segments.whole(2, 6)
  args = tokens, segments, Draw(0, 0, np.c_[:2]), helpers.vocabulary()
  corrupted = objective.corrupt(*args)
  wider = corrupted._replace(k_end=np.full((2, 6), 5, np.int32))
  layout = BatchLayout(2)

  def assemble(rows):
    index = np.zeros(2, np.int64)
    shares = {0: 1.0}
    return assemble_batch(rows, index, [objective], layout, shares, False)

  assemble(corrupted)
  runs.refusal("objective mine: .* set attention=prefix", assemble, wider)


@hypothesis.given(cases(), st.booleans())
def test_no_target_can_be_copied_from_what_its_position_sees(case, keep):
  if not keep:
    case = replace(
      case, objective=replace(case.objective, mask_token=1.0, random_token=0.0)
    )
  objective, length = case.objective, case.tokens.shape[1]
  found = case.corrupt()
  batch = assembled(case, found)
  mask = jax.tree.map(lambda bound: bound[0], batch.mask)
  visible = reference.visible(mask, len(case.tokens), length, length)
  real = batch.weights[0, 0] > 0
  assert real.sum() == found.predicted.sum()
  rows, predictor = np.divmod(batch.target_positions[0, 0][real], length)
  at = predictor + objective.shift
  assert np.array_equal(batch.targets[0, 0][real], found.targets[rows, at])
  assert found.predicted[rows, at].all()
  assert len(set(zip(rows, at, strict=True))) == len(rows)
  start = case.segments.start
  assert np.array_equal(start[rows, predictor], start[rows, at])
  seen = visible[rows, predictor, at]
  inputs = batch.inputs[0][rows, at]
  if objective.predict == "masked":
    kept = inputs == batch.targets[0, 0][real]
    if not keep:
      assert (inputs[seen] == MASK).all()
    assert kept.sum() <= max(6, 0.6 * len(kept))
  else:  # next-token prediction: the next token is out of sight
    assert not seen.any()
  assert (visible[rows, predictor, predictor]).all()


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["reference", "chunked", "pallas"])
@pytest.mark.parametrize("encoder", [helpers.model, helpers.ltg_bert])
def test_later_blocks_and_other_documents_do_not_leak(
  encoder, attention, dtype
):
  """Bit for bit, from rows to logits."""
  model = encoder(attention=attention, dtype=dtype)
  params = helpers.random_params(model)
  case = make(D_BLOCKS, 2, 24, special=0.0)
  batch = assembled(case, case.corrupt())
  mask = jax.tree.map(lambda bound: bound[0], batch.mask)

  @jax.jit
  def run(tokens):
    states = model.encode(params, tokens, batch.positions[0], mask)
    return model.logits(params, states)

  document, block = case.segments.start[0], blocks_of(case)[0]
  assert (document > 0).any() and block.max() > 3
  seen = document[:, None] == document
  helpers.check_leaks(run, seen & (block[:, None] >= block))


def test_a_targets_own_value_reaches_nothing():
  case = make(D_BLOCKS, 40, 30, special=0.0)
  found = case.corrupt()
  hidden = found.inputs == MASK
  assert 0.3 < hidden.mean() < 0.7 and not (found.predicted & ~hidden).any()
  other = SPECIAL + (case.tokens + 7) % (VOCAB - SPECIAL)
  tokens = np.where(hidden, other, case.tokens)
  again = replace(case, tokens=tokens).corrupt()
  assert all(map(np.array_equal, found[1:], again[1:]))


@pytest.mark.parametrize("choice", CHOICES)
def test_diffusion_hides_a_documents_end_but_not_what_stands_before_one(choice):
  """Otherwise the bound and CLM's loss would be over different tokens."""
  case = make(replace(OBJECTIVES["D"], choice=choice), 4000, 32, special=0.3)
  ends = case.tokens == helpers.EOS
  first = np.arange(32) == case.segments.start
  ordinary = ~VOCABULARY.special[case.tokens] & ~first
  predicted = case.corrupt().predicted
  assert not predicted[ends & first].any() and (ends & first).any()
  assert (case.corrupt().inputs == case.tokens)[ends & first].all()
  assert predicted[ends & ~first].mean() == pytest.approx(
    predicted[ordinary].mean(), abs=0.02
  )


BLOCKS = {"attention": "block", "block_length": 3}


@pytest.mark.parametrize("changes", [{}, {"choice": "binomial"}, BLOCKS])
def test_diffusion_is_the_bound_that_all_masks_give(changes):
  """Compares with the sum over all sets of masks, for random predictions."""
  n, length = 400_000, 4
  diffusion = replace(OBJECTIVES["D"], shift=0, **changes)
  case = make(diffusion, n, length, special=0.0, packed=False)
  found = case.corrupt()
  random = np.random.default_rng(0)
  # The loss of a random predictor for each set of masks and each token.
  nats = random.exponential(size=(2**length, length))
  sets = found.predicted @ (1 << np.arange(length))
  lost = (found.scale * found.predicted * nats[sets]).sum(axis=1).mean()
  point, weight = np.polynomial.legendre.leggauss(20)
  # The masked share of the row, or of each of its two blocks.
  first = changes.get("block_length", length)
  both = np.meshgrid(*[0.001 + 0.999 * (point + 1) / 2] * 2, indexing="ij")
  share = np.repeat(np.stack(both, -1), [first, length - first], axis=-1)
  weight = np.outer(weight, weight) / 4
  exact = expected = 0.0
  for chosen in range(2**length):
    inside = np.array([chosen >> i & 1 for i in range(length)], bool)
    likely = np.where(inside, share, 1 - share).prod(-1) * weight
    likely = (likely[..., None] * inside / share).sum((0, 1))  # [T]
    exact += likely @ nats[chosen]
    expected += likely.sum()
  assert expected == pytest.approx(length)
  assert lost == pytest.approx(exact, rel=0.01)  # four standard deviations


def test_the_shares_of_a_steps_rows_spread_evenly():
  case = make(OBJECTIVES["D"], 64, 8, special=0.0)
  scale = case.corrupt().scale
  shares = np.sort(1 / scale[:, 0])
  assert (scale == scale[:, :1]).all()
  # Independent draws would be so even in one of 10^11 steps.
  assert np.diff([0, *shares, 1]).max() < 3 / 64
  other = replace(case.draw, step=case.draw.step + 1)
  again = 1 / replace(case, draw=other).corrupt().scale[:, 0]
  assert not np.isclose(np.sort(again), shares).any()


def test_each_block_draws_a_share():
  case = make(D_BLOCKS, 3000, 20, special=0.0, packed=False)
  scale = case.corrupt().scale.reshape(3000, 4, 5)
  assert (scale == scale[..., :1]).all()
  shares = np.float64(1 / scale[..., 0])
  assert np.abs(np.corrcoef(shares.T) - np.eye(4)).max() < 0.073
  ends = np.quantile(shares, [0.1, 0.5, 0.9], axis=0)
  # Four standard deviations.
  assert np.abs(ends - [[0.1], [0.5], [0.9]]).max() < 0.04


# Settings

NO_MASKS = {"mask_ratio": 0.0}


@pytest.mark.parametrize(
  "field, value, also",
  [
    ("attention", "both", {}),
    ("predict", "some", {}),
    ("unit", "phrase", {}),
    ("shift", 2, {}),
    ("shift", -1, {}),
    ("mask_ratio", 1.5, {}),
    ("mask_ratio_high", 0.5, {"mask_ratio_end": 0.2}),
    ("per_ratio", True, {}),
    ("per_ratio", True, {"predict": "masked", "mask_ratio": 0.0}),
    ("random_token", 0.3, {"mask_token": 0.8}),
    ("mask_ratio", 0.0, {"predict": "masked"}),
    ("mask_ratio_end", 0.0, {"predict": "masked"}),
    ("shift", 0, {"predict": "all"} | NO_MASKS),
    ("predict", "suffix", {"attention": "causal"}),
    ("attention", "bidirectional", NO_MASKS),
    ("attention", "block", NO_MASKS),
    ("unit", "word", {"attention": "block", "mask_ratio_high": 0.5}),
    ("choice", "exact", {"attention": "block", "mask_ratio_high": 0.5}),
    ("shift", 0, {"attention": "prefix", "predict": "suffix"} | NO_MASKS),
    ("name", "", {}),
    ("name", " ", {}),
    ("name", "a/b", {}),
  ],
)
def test_bad_value_names_objective_and_field(field, value, also):
  values = {"name": "mine", "mask_ratio": 0.1, field: value} | also
  line = runs.told(lambda: Objective(**values))
  place = f"objective {values['name']!r}: {field}="
  assert line.startswith(f"{place}{value!r} is not")


def test_only_a_percentage_after_a_letter_is_a_mask_ratio():
  found = replace(OBJECTIVES["E"], name="meap100", mask_ratio=1.0)
  assert with_ratios(OBJECTIVES, "9E100+M") == OBJECTIVES | {"E100": found}
  others = "M C30 D30 P5 M101 Q30 30 M3_0 xM3"
  assert with_ratios(OBJECTIVES, others) == OBJECTIVES
  runs.refusal(
    r"mlm0.: mask_ratio=0\.0 is not over 0", with_ratios, OBJECTIVES, "M0"
  )


def test_the_table_says_what_each_objective_needs():
  needs = {n: o.needs_mask_token for n, o in OBJECTIVES.items()}
  assert {name for name, need in needs.items() if need} == {*"MNED"}
  assert len({o.name for o in OBJECTIVES.values()}) == len(OBJECTIVES)


def test_help_describes_every_setting_of_an_objective():
  known = settings.fields_of(Objective)
  assert [*known] == [field.name for field in dataclasses.fields(Objective)]
  for name in [*known][1:]:  # the first is its name
    assert known[name].help
    assert f"  objectives.NAME.{name}=" in config_help.described()
