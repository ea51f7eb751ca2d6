"""The curriculum: its forms, its arithmetic and its errors."""

import itertools
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from antlm_jax.errors import UserError
from antlm_jax.objectives.curriculum import (
  Curriculum,
  Phase,
  objective_names,
  parse_curriculum,
)
from tests import runs

NAMES = ("C", "M", "N", "Xy_2")


C, M, X, HALF = {"C": 1.0}, {"M": 1.0}, {"Xy_2": 1.0}, {"C": 0.5, "M": 0.5}
FORMS = {  # the end and the shares of each phase
  "4C+16M+4C": [(40, C), (200, M), (240, C)],
  "10000C+32000M": [(10_000, C), (42_000, M)],
  "1000C": [(1000, C)],
  "999C": [(9990, C)],
  "300C+700M steps": [(300, C), (1000, M)],
  "1000C+2000M epochs": [(10_000, C), (30_000, M)],
  "0.5C+.25M": [(5, C), (8, M)],
  "25%C+75%M": [(100, C), (400, M)],
  "12.5%C+87.5%M": [(50, C), (400, M)],
  "C+M+C": [(133, C), (267, M), (400, C)],
  "C:M=1:15": [(400, {"C": 1 / 16, "M": 15 / 16})],
  "C:M": [(400, HALF)],
  "C:M:C=1:2:1": [(400, HALF)],
  "2C+20C:M=1:7": [(20, C), (220, {"C": 1 / 8, "M": 7 / 8})],
  "2*(1C+1M)": [(10, C), (20, M), (30, C), (40, M)],
  "2*(1C+2*(1M))": [(10, C), (20, M), (30, M), (40, C), (50, M), (60, M)],
  " 4 C + 2 * ( 1 Xy_2 ) epochs ": [(40, C), (50, X), (60, X)],
}


@pytest.mark.parametrize("text", FORMS)
def test_form(text):
  parsed = parse_curriculum(text, NAMES, 10, 400)
  assert [(p.stop, dict(p.shares)) for p in parsed.phases] == FORMS[text]
  assert objective_names(text, NAMES) == parsed.objectives


def test_a_repeated_phase_is_no_switch():
  assert parse_curriculum("1C+1C+1M", NAMES, 5).switches == (10,)
  parsed = parse_curriculum("12*(1C+1M)", NAMES, 7)  # as documented
  assert parsed.switches == tuple(range(7, 168, 7)) and parsed.steps == 168


@st.composite
def texts(draw):
  """Draws curricula in epochs, with fractions, repetitions and mixtures."""

  def phase():
    one = st.sampled_from(NAMES)
    names = draw(st.lists(one, min_size=1, max_size=3, unique=True))
    count = draw(st.sampled_from([1, 2, 3.7, 0.9, 12, 99.25]))
    text = f"{count}{':'.join(names)}"
    if len(names) > 1 and draw(st.booleans()):
      text += "=" + ":".join(str(draw(st.integers(1, 20))) for _ in names)
    return text

  parts = []
  for _ in range(draw(st.integers(1, 4))):
    if draw(st.booleans()):
      parts.append(phase())
    else:
      parts.append(f"{draw(st.integers(1, 3))}*({phase()}+{phase()})")
  return "+".join(parts)


@hypothesis.given(texts(), st.floats(1.2, 50))
def test_phases_cover_the_run_without_gaps(text, steps_per_epoch):
  parsed = parse_curriculum(text, NAMES, steps_per_epoch)
  assert parsed.phases[0].start == 0
  assert parsed.phases[-1].stop == parsed.steps
  for a, b in itertools.pairwise(parsed.phases):
    assert a.stop == b.start
  for phase in parsed.phases:
    assert phase.start < phase.stop
    assert sum(phase.shares.values()) == pytest.approx(1)
    assert parsed.at(phase.start) is phase
    assert parsed.at(phase.stop - 1) is phase
    assert set(phase.shares) <= set(parsed.objectives)
  assert parsed.at(parsed.steps + 5) is parsed.phases[-1]
  for step in parsed.switches:
    assert parsed.at(step - 1).shares != parsed.at(step).shares


@hypothesis.given(st.floats(1.01, 30), st.integers(2, 60))
def test_fractions_of_steps_never_accumulate(steps_per_epoch, repeats):
  parsed = parse_curriculum(f"{repeats}*(1C+1M)", NAMES, steps_per_epoch)
  for index, phase in enumerate(parsed.phases):
    assert abs(phase.stop - (index + 1) * steps_per_epoch) <= 0.5 + 1e-6


@hypothesis.given(
  st.lists(st.integers(1, 30), min_size=1, max_size=4),
  st.integers(1, 70),
  st.integers(0, 1000),
)
def test_rows_follow_the_shares_within_one(weights, batch_size, start):
  shares = {f"O{i}": w / sum(weights) for i, w in enumerate(weights)}
  phase = Phase(start, start + 40, shares)
  total = np.zeros(len(weights))
  for step in range(start, start + 40):
    rows = phase.divide_batch((step - start) * batch_size, batch_size)
    assert rows.shape == (batch_size,)
    counts = np.bincount(rows, minlength=len(weights))
    assert counts.sum() == batch_size and len(counts) == len(weights)
    expected = batch_size * np.array(list(shares.values()))
    assert (np.abs(counts - expected) <= 2).all()
    total += counts
    done = (step - start + 1) * expected
    assert (np.abs(total - done) <= 1 + 1e-6).all()


def test_a_mixture_of_one_in_sixteen_is_exact_in_each_batch_of_sixteen():
  phase = parse_curriculum("C:M=1:15", NAMES, 1, 100).at(0)
  for step in range(20):
    assert np.bincount(phase.divide_batch(16 * step, 16)).tolist() == [1, 15]


def test_rows_of_an_objective_are_spread_over_the_batch():
  rows = parse_curriculum("C:M", NAMES, 1, 100).at(0).divide_batch(0, 64)
  for part in rows.reshape(8, 8):  # eight microbatches or shards
    assert 3 <= part.sum() <= 5


POSITIONS = {
  "": 1,
  "4C+16Z  +4C": 6,
  "4C++4M": 4,
  "4C+": 4,
  "+4C": 1,
  "4C+0.0M": 4,
  "4C 4M": 4,
  "4c": 2,
  "C:M=1:2:3": 4,
  "2C+3C:M=1:0.0 steps": 11,
  "C:M=1:x": 7,
  "C:M=": 5,
  "2*4C": 3,
  "2*(4C": 6,
  "0*(4C)": 1,
  "1C+1M parsecs ": 7,
  "1C+0.01M": 4,
  "4C+2M:M=1:1": 5,
}


@pytest.mark.parametrize("text", POSITIONS)
def test_error_points_at_the_character(text):
  with pytest.raises(UserError) as caught:
    parse_curriculum(text, NAMES, 10, 100)
  message = str(caught.value)
  found = re.search(r", character (\d+)(?: \((.*?)\))?: ", message)
  assert found and int(found[1]) == POSITIONS[text], message
  at = POSITIONS[text] - 1
  assert found[2] == (repr(text[at]) if at < len(text) else None)
  assert "\n" not in message


@pytest.mark.parametrize(
  "text, run_steps, words",
  [
    ("50%C+40%M", 100, "90 %"),
    ("50%C+4M", 100, "epochs and shares"),
    ("C+4M", 100, "epochs and equal shares"),
    ("999C+1000M", 100, "epochs and steps"),
    ("25%C+75%M epochs", 100, "shares of the run have no unit"),
    ("C+M+C steps", 100, "leave out 'steps'"),
    ("25%C+75%M", None, "train.steps"),
    ("C+M", None, "train.steps"),
    ("4Q", 100, "known: C, M, N, Xy_2"),
    ("M:M=1:3", 100, "a mix of M alone: name another one"),
    ("C:C", 100, "a mix of C alone"),
    ("C:M=0:1", 100, "a proportion of 0: leave that name out"),
  ],
)
def test_error_says_what_is_wrong(text, run_steps, words):
  runs.refusal(re.escape(words), parse_curriculum, text, NAMES, 10, run_steps)


@hypothesis.given(
  st.text(max_size=30) | st.text("0129.%CMXy_:=+*() stepoch", max_size=16)
)
@hypothesis.settings(max_examples=400)
def test_any_text_parses_or_is_a_user_error(text):
  try:
    assert isinstance(parse_curriculum(text, NAMES, 10, 100), Curriculum)
  except UserError as error:
    assert str(error)


def test_absurd_sizes_are_user_errors():
  texts = "9" * 400 + "C", "9*(" * 30 + "C" + ")" * 30, "300000000C epochs"
  for text in (*texts, "99999999999999999999*(C)", "99999999999C"):
    with pytest.raises(UserError):
      parse_curriculum(text, NAMES, 10, 100)
