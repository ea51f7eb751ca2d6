"""Compares an exported tokenizer with ours, before the export is written."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from antlm_jax.config import Config
from antlm_jax.data import prepared_folder
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.hf import tokenizer as hf_tokenizer
from antlm_jax.inference import framing
from antlm_jax.inference.framing import TextModel
from antlm_jax.training.checkpoint import Meta

_ROWS = 400  # held-out rows, and as many texts of random tokens
_LONGEST = 1000  # characters of a text
_ODD = (
  "",
  " ",
  "  ",
  "\n",
  "\n\n",
  "a",
  " a",
  "a ",
  "  two  spaces  ",
  "\ttabs\tin\t\tthe text\t",
  "lines\nof\n\na text\r\nwith\r \n \n\n ends\n",
  "\u00a0no\u00a0break\u3000ideographic\u2009thin\u200bzero\u2028line",
  "cafe\u0301 na\u00efve A\u030angstro\u0308m \u0301alone x\u0323\u0307",
  "\ufeffbyte order mark",
  "control \x00 \x07 \x1b[0m and \ufffd",
  "👍🏽 👩‍👩‍👧‍👦 🇩🇪 flags🙂emoji",
  "中文没有空格。日本語の文章、ひらがなカタカナ",
  "한국어 문장 각",
  "ภาษาไทยไม่มีช่องว่าง",
  "السلام عليكم، كيف الحال؟",
  "हिन्दी में क्‍षत्रिय लिखना",
  "Привет, мир! Ёлка №5",
  "ﬁ ½ ² Ⅳ ㎏ ﷺ ß ẞ İ \u0131",
  "1,234.5 2013 0x1F 1990s 3rd",
  "don't I'll 'quoted' \"said\" (so) [x] {y} <z>",
  "https://a.example/b?c=d&e=f#g a_b@c.de",
  "<s> <s>a</s> <pad> </s><unk> [CLS] [SEP] <|endoftext|>",
  "▁ ▁a a▁b ▁▁ ĠA Ċ ##ing",
  "x" * 300,
)
_AT_MASKS = (
  "{}",
  " {}",
  "{} ",
  "{}{}",
  "{} {}",
  "{} begins",
  "{}. Begins",
  "in the {} middle",
  "in the {}.",
  "in the{}middle",
  "two  {}  spaces",
  "after\n{} a line",
  "after\n\n{} lines",
  "after \n {}\n\n a line",
  "\n{}",
  "\t{}\t{}\t",
  '19{}84 {}\'s ({}) "{}" -{}-',
  "中{}文 {}é e{}\u0301",
  "<s>{}</s>",
  "ends {}",
)


def same_tokens(
  loaded: TextModel,
  tokenizer_files: Mapping[str, Any],
  before: Sequence[int],
  after: Sequence[int],
) -> None:
  """Raises a UserError if the exported tokenizer reads a text unlike ours.

  Args:
    loaded: The model.
    tokenizer_files: Files of the exported tokenizer, as `tokenizer.files`.
    before: Special tokens before a text.
    after: Special tokens after a text.
  """
  spec = json.dumps(tokenizer_files["tokenizer.json"])
  exported = tokenizers.Tokenizer.from_str(spec)
  head, tail = (len(ids) for ids in loaded.frame)
  for text in _sample_texts(loaded):
    try:
      ids = framing.encode_framed(loaded, text).tolist()
    except UserError:
      # Nor does the model read a text for which the vocabulary has no token.
      continue
    expected = [*before, *ids[head : len(ids) - tail], *after]
    exported_ids = exported.encode(text).ids
    if exported_ids != expected:
      raise UserError(
        f"the exported tokenizer would read {text!r:.60} as {exported_ids},"
        f" but the model reads it as {expected}, so export refuses it: report"
        " this tokenizer, or choose another"
      )


def check_exportable(tokenizer: Tokenizer, boundary: str) -> None:
  """Raises a UserError if export would refuse all models of a tokenizer."""
  meta = Meta(Config(), tokenizer, boundary, data="")
  reader = TextModel(model=None, params=None, meta=meta)
  before, after = (ids.tolist() for ids in reader.frame)
  exported = hf_tokenizer.files(tokenizer, before, after, longest=1)
  same_tokens(reader, exported, before, after)


def _sample_texts(loaded: TextModel) -> Iterator[str]:
  """Yields texts without and with masks."""
  random = np.random.default_rng(0)
  token_ids = random.integers(loaded.tokenizer.vocab_size, size=(_ROWS, 16))
  random_texts = (loaded.tokenizer.decode(ids)[:_LONGEST] for ids in token_ids)
  names = sorted(loaded.mask_names)
  for text in (*_ODD, *_held_out_rows(loaded), *random_texts):
    yield text
    if names and text:
      words = [word.span() for word in re.finditer(r"\S+", text)] or [(0, 0)]
      cut = int(random.integers(len(text)))
      for start, end in (words[random.integers(len(words))], (cut, cut)):
        yield text[:start] + str(random.choice(names)) + text[end:]
  yield from (form.replace("{}", name) for form in _AT_MASKS for name in names)


def _held_out_rows(loaded: TextModel) -> Iterator[str]:
  """Yields held-out rows of the training data, if this machine has it."""
  path = loaded.config.data.path
  if "://" in path:  # export does not use the network
    return
  with contextlib.suppress(UserError):
    for data in prepared_folder.open_prepared(path, "data.path").values():
      count = min(len(data.dev), _ROWS)
      rows, _ = data.dev.read(np.linspace(0, len(data.dev) - 1, count).round())
      for row in rows:
        yield data.tokenizer.decode(row)[:_LONGEST]
