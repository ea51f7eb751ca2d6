"""The order of rows in runs that change the batch size."""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from antlm_jax.data.order import Order, Stage, parse_batch_schedule
from antlm_jax.errors import UserError
from antlm_jax.objectives.batch import BatchLayout
from tests import helpers
from tests.helpers import FakeRows, source


def part(begin, batch_size, joined=1) -> Stage:
  return Stage(begin, BatchLayout(batch_size), joined)


def test_a_schedule_is_read():
  parts = parse_batch_schedule(
    ("64x128@.5", "32x512@0.9"), BatchLayout(96), 128
  )
  assert parts == (part(0.0, 96), part(0.5, 64), part(0.9, 32, 4))
  schedule = "64x128@.2", "64x128@.5:base=160000", "32x512@0.9"
  parts = parse_batch_schedule(schedule, BatchLayout(96), 128)
  assert [p.base for p in parts] == [None, None, 160000.0, 160000.0]


@pytest.mark.parametrize(
  "schedule, words",
  [
    ("64x128", "'64x128' is not ROWSxTOKENS@BEGIN"),
    ("64x128@1.5", "is not ROWSxTOKENS@BEGIN"),
    ("64x128@0.5:160000", "is not ROWSxTOKENS@BEGIN.*:base=160000 may follow"),
    ("0x128@0.5", "is not ROWSxTOKENS@BEGIN"),
    ("64x100@0.5", "100 is no multiple of the prepared rows' 128"),
    ("64x128@0.5 32x128@0.5", "does not begin after the part before it"),
    ("3x128@0.5", "batch_size=3 is not a positive mult"),
  ],
)
def test_a_schedule_that_cannot_be_read_is_told(schedule, words):
  with pytest.raises(UserError, match=words):
    parse_batch_schedule(schedule.split(), BatchLayout(96, shards=2), 128)


def test_what_does_not_go_with_a_schedule_is_told():
  parts = (part(0.0, 8), part(0.5, 4, 4))
  with pytest.raises(UserError, match=r"need data\.rounding=carry, not up"):
    Order({"": 100}, parts, rounding="up")
  with pytest.raises(UserError, match="joins 4 rows, but there are 3"):
    Order({"": 3}, parts, steps=10)


sizes = st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 4]))


@hypothesis.given(
  st.integers(30, 200),
  st.lists(sizes, min_size=1, max_size=4),
  st.integers(20, 60),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_every_part_goes_on_where_the_one_before_stopped(size, parts, steps):
  parts = [part(i / len(parts), *rows) for i, rows in enumerate(parts)]
  order = Order({"": size}, parts, steps, shuffle=False)
  taken = 0
  for step in range(steps):
    found = order.slots(step).rows
    joined = found.shape[1]
    # Joined rows are neighbours, and the first is a multiple of their number.
    assert (found - found[:, :1] == np.arange(joined)).all()
    assert (found[:, 0] % joined == 0).all() and found.max() < size
    if taken < size // 8 * 8 and joined == 1:
      assert found[0, 0] == taken % size
    taken += found.size
    if joined > 1 and taken > size - joined:
      break  # the epoch leaves out an incomplete joined row


def test_an_epoch_counts_as_steps_of_the_mean_batch():
  parts = (part(0.0, 8), part(0.5, 4), part(0.75, 4, 4))
  # 8 x 1/2 + 4 x 1/4 + 16 x 1/4 prepared rows per step
  assert Order({"": 900}, parts).steps_per_epoch == pytest.approx(100)


def joined_source(short=0.0, packed=False, text="C+M"):
  rows = FakeRows(64, 16, packed, special=0.0)
  order = Order({"": 64}, (part(0.0, 8), part(0.5, 2, 4)), steps=8)
  of = source(text, rows, steps=8)
  return dataclasses.replace(of, order=order, short=short)


@pytest.mark.parametrize("packed", [False, True])
def test_joined_rows_are_one_text(packed):
  of = joined_source(packed=packed)
  for step, shape in ((0, (1, 8, 16)), (7, (1, 2, 64))):
    batch = of[step]
    assert batch.inputs.shape == shape
    tokens = of.rows.tokens[of.order.slots(step).rows].reshape(shape[1:])
    hidden = (batch.inputs[0] == helpers.MASK).mean()
    same = batch.inputs[0] == tokens
    assert same.mean() > 0.7 and (step == 0 or hidden > 0)
  if not packed:  # one document from end to end
    assert np.array_equal(batch.positions[0, 0], np.arange(64))


@pytest.mark.parametrize("text", ["C", "M"])
def test_short_rows_end_early(text):
  of = joined_source(short=0.5, text=text)
  lengths = []
  for step in range(8):
    batch = of[step]
    length = batch.inputs.shape[-1]
    # Tokens see only their own part of the row.
    start, end = batch.mask.bounds(length, length, np)
    cut = batch.mask.k_start[0].max(axis=1)
    limit = np.where(cut, cut, length)
    lengths += list(limit / length)
    places = batch.target_positions[0, 0][batch.weights[0, 0] > 0]
    row, at = np.divmod(places, length)
    assert (at + (text == "C") < limit[row]).all() and len(at)
    inside = np.arange(length) < limit[:, None]
    assert (start[0][inside] == 0).all()
    assert (end[0] <= limit[:, None])[inside].all()
  whole = np.mean(np.array(lengths) == 1)
  assert 0.2 < whole < 0.8
  assert np.ptp([n for n in lengths if n < 1]) > 0.5
