"""LAMBADA: the last word of a text, given the text before it.

  antlm eval score --task=lambada --checkpoint=RUN --data=lambada.jsonl \\
    --mode=causal

Each record or line is a text (arXiv 1606.06031).
The model predicts the part after its last space, or of records with a `prompt`
and an `answer` the answer. It is at `{answer}` in the prompt, as in GPT-BERT's
file of BabyLM, or at its end. As in lm-eval's lambada_openai, a word is right
if each of its tokens is the likeliest after all tokens before it. The
perplexity is per word. A text longer than the context loses its beginning.

The masked modes also predict the tokens of the word one after the other: the
predicted token and those after it are masked (arXiv 2305.10588). They see the
text after the word. So the model sees their number, and figures do not compare
with those of --mode=causal.
"""

import dataclasses
import itertools
import re
from typing import NamedTuple

import numpy as np

from antlm_jax.data import readers
from antlm_jax.errors import UserError
from antlm_jax.evals.zero_shot import texts
from antlm_jax.evals.zero_shot.task import TASKS, ZeroShotOutcome
from antlm_jax.inference import framing, scoring
from antlm_jax.inference.scoring import EncodedText
from antlm_jax.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class LambadaSettings(texts.TextSettings):
  """The settings of the task."""

  documents: str = setting(
    "line",
    "Division of plain text into texts, as for prepare",
    choices=tuple(readers.RULES),
  )


_PARTS = {"prompt": "", "answer": ""}  # columns of a record in two parts
_ANSWER = "{answer}"  # place of the answer in a prompt


class Cloze(NamedTuple):
  """A word in its text."""

  context: str  # before the word
  word: str
  ending: str = ""  # directly after the word


def read_clozes(settings) -> list[Cloze]:
  """Reads contexts and their words."""
  records = readers.read_source_records(settings.data, _PARTS)
  try:
    head = [*itertools.islice(records, 1)]
  except UserError:  # they are whole texts
    head = []
    records = ()
  records = itertools.chain(head, records)
  clozes = [
    _cloze_of_record(f"{settings.data}, {place}", *parts)
    for place, parts in itertools.islice(records, settings.limit or None)
  ]
  if not clozes:
    clozes = [
      Cloze(*text.rpartition(" ")[::2]) for text in texts.read_texts(settings)
    ]
  for number, (context, word, _) in enumerate(clozes, start=1):
    if not context.strip() or not word.strip():
      raise UserError(
        f"{settings.data}, text {number}: no two words in {word!r:.60}"
      )
  return clozes


def _cloze_of_record(place: str, prompt: object, answer: object) -> Cloze:
  """Returns a record's answer in its prompt, or after it.

  Raises a UserError if one of both is no text, or another placeholder is in the
  prompt, or two are.
  """
  for part in (prompt, answer):
    if not isinstance(part, str):
      raise UserError(f"{place}: {part!r:.60} is not text")
  context, _, ending = prompt.partition(_ANSWER)
  if other := re.search(r"\{\w*\}", context + ending):
    raise UserError(
      f"{place}: the prompt has the placeholder {other[0]}: write {_ANSWER}"
      " once, where the answer is, and text elsewhere"
    )
  return Cloze(context.strip(), answer.strip(), ending.rstrip())


def _encode_clozes(loaded, items: list[Cloze], passes) -> list[EncodedText]:
  """Returns the tokens of texts, of which those of the word are scored."""
  text_format = scoring.TextFormat()
  pairs = [text_format.parts(item.context, item.word) for item in items]
  encoded = scoring.encode_pairs(loaded, pairs, text_format, passes)
  out = []
  for text, item in zip(encoded, items, strict=True):
    before, after = np.split(text.tokens, [text.stop])
    # The ending behind a letter, so that no space is added before it.
    letter = loaded.tokenizer.encode("a")
    ending = loaded.tokenizer.encode(f"a{item.ending}")
    if not np.array_equal(ending[: len(letter)], letter):
      ending = loaded.tokenizer.encode(item.ending)
      letter = letter[:0]
    tokens = np.concatenate([before, ending[len(letter) :], after])
    out.append(EncodedText(tokens.astype(np.int32), text.start, text.stop))
  return out


def score_clozes(loaded, items: list[Cloze], settings) -> ZeroShotOutcome:
  """Scores the words after their contexts."""
  passes = scoring.passes_of_mode(loaded, settings.mode)
  masked = any(p.masked for p in passes)
  longest = loaded.longest_row
  parts = []
  items = [Cloze(*item) for item in items]
  encoded = _encode_clozes(loaded, items, passes)
  for text, (_, word, _) in zip(encoded, items, strict=True):
    over = max(0, *(p.reads(text) - longest for p in passes))
    text = EncodedText(text.tokens[over:], text.start - over, text.stop - over)
    if text.start < 1:
      raise UserError(f"the word {word!r:.60} leaves no room for a context")
    parts.append([] if masked else [text])
    # One text for each token, with the tokens after it masked.
    for position in range(text.start, text.stop) if masked else ():
      tokens = text.tokens.copy()
      tokens[position + 1 : text.stop] = framing.mask_id(loaded)
      parts[-1].append(EncodedText(tokens, position, position + 1))
  logprobs, likeliest, _ = texts.score_text_parts(
    loaded, parts, passes, settings
  )
  right = likeliest == [text.targets for text in encoded]
  summary = {
    "texts": len(items),
    "accuracy": float(right.mean()),
    "word_perplexity": texts.perplexity_of_nats(-logprobs.mean()),
  }
  rows = zip(items, logprobs.tolist(), right.tolist(), strict=True)
  lines = [
    {"context": item.context, "word": item.word}
    | ({"ending": item.ending} if item.ending else {})
    | {"logprob": nats, "correct": hit}
    for item, nats, hit in rows
  ]
  return ZeroShotOutcome(summary, lines)


TASKS["lambada"] = texts.Task(
  about=__doc__,
  read=read_clozes,
  score=score_clozes,
  figure="accuracy",
  table={
    "texts": "{texts:,}",
    "accuracy": "{accuracy:.2%}",
    "word perplexity": "{word_perplexity:,.6g}",
  },
  settings=LambadaSettings,
)
