"""Tokenizers of many forms: ids, spans, special tokens, digits, training."""

import functools
import itertools
import unicodedata

import hypothesis
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from antlm_jax.data.tokenizer import Tokenizer

_TEXTS = (
  "Tom lives in Amsterdam near the old harbour .",
  "café Zoë naïve Łódź the cat sat in Paris 1990 — 2000 (approx.)",
  "Mary’s “book” cost €5 … 한국 서울 我们 喜欢 ไทย ก็ ﬁn",
) * 20
_SPLITS = {
  "byte level": lambda: _byte_level(True),
  "byte level, no space": lambda: _byte_level(False),
  "digits first": lambda: _both(_digits(), _byte_level(True)),
  "digits last": lambda: _both(_byte_level(True), _digits()),
  "marks first": lambda: _both(pre_tokenizers.Punctuation(), _byte_level(True)),
  "words, bytes": lambda: _both(pre_tokenizers.Whitespace(), _byte_level(True)),
  **{
    f"metaspace {scheme}": functools.partial(
      pre_tokenizers.Metaspace, prepend_scheme=scheme
    )
    for scheme in ("always", "first", "never")
  },
  "words, metaspace": lambda: _both(
    pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()
  ),
  "BERT": pre_tokenizers.BertPreTokenizer,
}
_NORMALIZERS = {
  "none": lambda: None,
  "NFC": normalizers.NFC,
  "NFD": normalizers.NFD,
  "NFKC": normalizers.NFKC,
  "lower case": normalizers.Lowercase,
  "no accents": lambda: normalizers.Sequence(
    [normalizers.NFD(), normalizers.StripAccents()]
  ),
  "BERT": lambda: normalizers.BertNormalizer(lowercase=True),
}
# Letters, digits, spaces, marks, joined forms and signs of several scripts.
_CHARACTERS = (
  "aTé e19 \t\n.,(’—▁ﬁ½٣२İ我。한국ᄒ\u1161\u0301\u0308\u0323ก็ไ🙂\u200d्न\xa0"
)


def _byte_level(space: bool):
  return pre_tokenizers.ByteLevel(add_prefix_space=space)


def _digits():
  return pre_tokenizers.Digits(individual_digits=True)


def _both(*parts):
  return pre_tokenizers.Sequence(list(parts))


@functools.cache
def trained(split: str, normalizer: str, model: str) -> Tokenizer:
  options = {
    "special_tokens": ["<pad>", "<s>", "</s>", "<mask>", "<unk>"],
    "vocab_size": 400,
    "show_progress": False,
  }
  if model == "unigram":
    made = models.Unigram()
    trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
  elif model == "wordpiece":
    made = models.WordPiece(unk_token="<unk>")
    trainer = trainers.WordPieceTrainer(**options)
  else:
    made = models.BPE(unk_token="<unk>")
    trainer = trainers.BpeTrainer(
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options
    )
  backend = tokenizers.Tokenizer(made)
  backend.pre_tokenizer = _SPLITS[split]()
  if (found := _NORMALIZERS[normalizer]()) is not None:
    backend.normalizer = found
  backend.train_from_iterator(_TEXTS, trainer)
  if "ByteLevel" in backend.to_str():
    backend.decoder = decoders.ByteLevel()
  return Tokenizer(backend)


def letters(text: str) -> str:
  """Returns a text without marks, which normalizers put in another order."""
  text = unicodedata.normalize("NFD", text)
  return "".join(c for c in text if unicodedata.category(c)[0] != "M")


def check(t: Tokenizer, text: str, normalizer: str) -> None:
  """Checks the ids and spans of a text."""
  ids, spans = t.encode_offsets(text)
  np.testing.assert_array_equal(ids, t.encode(text))
  for ends in zip(*spans, strict=True):
    assert all(0 <= a <= b <= len(text) for a, b in itertools.pairwise(ends))
  covered, byte_level = np.zeros(len(text), bool), "ByteLevel" in t.to_json()
  made = _NORMALIZERS[normalizer]()
  normal = made.normalize_str if made else str
  for index, (start, end) in zip(ids, spans, strict=True):
    assert 0 <= start <= end <= len(text)
    covered[start:end] = True
    piece, token = text[start:end], t.decode([index], skip_special=False)
    assert piece == piece.lstrip() or not piece.strip()
    if byte_level and "\ufffd" not in token:
      assert letters(token.strip()) in letters(normal(piece))
      assert piece or not token.strip()
  for at in np.flatnonzero(~covered):
    # Only what the normalizer drops is in no token, and no mark of a letter.
    mark = unicodedata.category(text[at])[0] == "M"
    assert text[at].isspace() or not normal(text[at]).strip()
    letter = at and covered[at - 1] and not text[at - 1].isspace()
    assert not (mark and letter)


_FORMS = [
  *itertools.product(_SPLITS, _NORMALIZERS, ["bpe"]),
  ("metaspace always", "NFKC", "unigram"),
  ("words, metaspace", "NFC", "unigram"),
  ("BERT", "BERT", "wordpiece"),
]


@pytest.mark.parametrize("split, normalizer, model", _FORMS)
@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(text=st.text(_CHARACTERS, max_size=12))
def test_spans_are_those_of_the_encoding(split, normalizer, model, text):
  """Catches ids that differ with offsets, and characters without a token."""
  t = trained(split, normalizer, model)
  check(t, text, normalizer)
  check(t, unicodedata.normalize("NFD", text), normalizer)
