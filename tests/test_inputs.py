"""Texts in Python that are no texts, as from pandas."""

import dataclasses
import functools
import math

import numpy as np
import pytest

import antlm_jax as ax
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import answering, ranking, tagging
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.classification import LinearHead
from antlm_jax.inference.scoring import TextFormat
from tests import random_models

run = random_models.run()
NAN = math.nan


class Table:
  """Has columns, as pandas' DataFrame, and iterates over their names."""

  columns = ("text",)

  def __iter__(self):
    return iter(self.columns)


@pytest.mark.parametrize(
  "name", ["score", "embed", "perplexity", "generate", "fill"]
)
def test_values_that_are_no_texts_are_told_by_their_index(name, loaded):
  """Catches None and NaN in a list, and names of columns taken for texts."""
  if name == "fill":
    loaded = random_models.with_curriculum(loaded, "1D")
  what = "prompt" if name == "generate" else "text"
  for given, message in (
    (["the dogs <mask>", None], f"{what} 1 is None, not a str"),
    ([NAN], f"{what} 0 is nan, not a str"),
    (np.array(["a", 1.5], object), f"{what} 1 is 1.5, not a str"),
    ([("a", "b")], rf"{what} 0 is \('a', 'b'\), not a str"),
    (Table(), f"a Table is no list of {what}s"),
    ({"text": ["a"]}, f"a dict is no list of {what}s"),
    (None, f"None is no {what}"),
    (["a", "x\ud83d"], rf"{what} 1 \(counted from 0\): it has half of a"),
  ):
    with pytest.raises(UserError, match=message):
      getattr(ax, name)(loaded, given)


def test_contexts_are_checked_and_numpy_texts_are_texts(loaded):
  """Catches a missing context that is scored, and a NumPy str refused."""
  texts = np.array(["the dogs rest .", "a cat"])
  found = ax.score(loaded, texts)
  np.testing.assert_array_equal(found, ax.score(loaded, texts.tolist()))
  for contexts, message in (
    (["a", None], "context 1 is None"),
    (["a"], "1 contexts for 2 texts"),
  ):
    with pytest.raises(UserError, match=message):
      ax.score(loaded, texts, contexts=contexts)


def test_blank_texts_are_said(loaded, capsys):
  """Catches vectors of no words that look like those of texts."""
  ax.embed(loaded, ["the dogs", "", " \n"])
  assert "2 of 3 texts are blank" in capsys.readouterr().out


def test_a_text_without_any_token_has_no_vector(loaded):
  """Catches the vector of token 0 in place of a text's."""
  meta = dataclasses.replace(loaded.meta, boundary="none")
  bare = dataclasses.replace(loaded, meta=meta)
  with pytest.raises(UserError, match=r"^text 1 .* has no token"):
    ax.embed(bare, ["the dogs", " \n"], quiet=True)


def test_perplexity_needs_a_word(loaded):
  """Catches a division by no words; blank documents next to others count."""
  with pytest.raises(UserError, match="no word to predict"):
    ax.perplexity(loaded, ["  "], quiet=True)
  found = ax.perplexity(loaded, ["  ", "the dogs"], quiet=True)
  assert found.words == 2 and np.isfinite(found.word_perplexity)
  some = ax.perplexity(loaded, iter(["the dogs", None]), limit=1, quiet=True)
  assert some.documents == 1  # reads no further than the limit


def test_white_space_around_a_text_is_no_text(loaded, tmp_path):
  """Catches a line's own newline that is scored, embedded or continued."""
  text = "the dogs rest ."
  forms = [f"{text}\n", f"\t{text} ", f"\ufeff{text}\r\n", f"{text}\xa0"]
  scores = ax.score(loaded, [text, *forms])
  np.testing.assert_array_equal(scores, scores[0])
  vectors = ax.embed(loaded, [text, *forms], quiet=True)
  np.testing.assert_array_equal(vectors, vectors[:1].repeat(5, axis=0))
  path = tmp_path / "lines.txt"
  path.write_text(f"  {text} \n")
  of_file = ax.perplexity(loaded, path, quiet=True).token_perplexity
  for form in forms:
    measured = ax.perplexity(loaded, [form], quiet=True)
    assert measured.token_perplexity == of_file
  prompts = ax.generate(loaded, [text, forms[0]], tokens=2)
  assert prompts[0] == prompts[1]


def test_indentation_is_text_as_in_preparation(loaded, tmp_path):
  """Catches poems and code that are measured without their first spaces."""
  path = tmp_path / "poem.txt"
  path.write_text("\n   the dogs\n   rest\n")
  measured = ax.perplexity(loaded, path, quiet=True)
  assert measured.items[0]["begins"] == "   the dogs\n   rest"
  text = ax.generate(loaded, "\n   the dogs\n   rest", tokens=1)[0]
  assert text.startswith("   the dogs\n   rest")
  forms = ["\n   the dogs\n   rest\n", "   the dogs\n   rest"]
  scores = ax.score(loaded, [*forms, "the dogs\n   rest"])
  (nats,) = (item["nats"] for item in measured.items)
  np.testing.assert_allclose(scores[:2], -nats, rtol=1e-5)
  assert scores[2] != scores[0]
  # A context and its text are one document.
  of_context = ax.score(
    loaded, ["\n   rest"] * 2, contexts=["\n   the dogs", "the dogs"]
  )
  assert of_context[0] != of_context[1]


@pytest.mark.parametrize(
  ("context", "text"),
  [("a dog ", "rests ."), ("a dog", " rests ."), (" a dog ", " rests .\n")],
)
def test_a_separator_is_added_only_where_none_is(loaded, context, text):
  """Catches two spaces between a context and its text."""
  score = functools.partial(ax.score, loaded)
  expected = score(["rests ."], contexts=["a dog"])
  assert score([text], contexts=[context]) == expected
  # Another separator is kept; without any, both are joined as they are.
  lines = score(["rests ."], contexts=["a dog\n"])
  assert lines == score(["\nrests ."], contexts=["a dog"]) != expected
  joined = score(
    ["rests ."], contexts=["a dog "], text_format=TextFormat(separator="")
  )
  assert joined == expected
  assert score([text], contexts=[" "]) == score(["rests ."])


@pytest.mark.parametrize(
  ("head", "texts", "spaced"),
  [
    (
      LinearHead(("a", "b"), "last"),
      ("a dog", "rests ."),
      (" a dog\n", "rests . "),
    ),
    (ranking.Towers(0.05, ("", "query: ")), ("a dog",), ("\ta dog \r\n",)),
    (tagging.Tagger(("O", "B")), ("a", "dog"), ("a ", " dog\n")),
    (
      answering.Spans(),
      ("Who ?", "a dog rests ."),
      ("Who ? ", "\n a dog rests . "),
    ),
  ],
)
def test_fine_tuned_models_read_texts_without_space(
  loaded, head, texts, spaced
):
  """Catches a file's newline that changes a prediction."""
  rows, others = (
    head.encode(loaded, [Example(value)], 32) for value in (texts, spaced)
  )
  np.testing.assert_array_equal(rows.tokens, others.tokens)
  if isinstance(head, answering.Spans):  # offsets are those of the user's text
    (window,) = others.origins
    start, stop = window.spans[1]
    assert spaced[1][start:stop] == "dog"
