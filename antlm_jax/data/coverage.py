"""How well a tokenizer fits a text: unknown characters, tokens a character."""

import dataclasses
from collections.abc import Iterable, Iterator

from antlm_jax.data.tokenizer import Tokenizer

_MOST_UNKNOWN = 0.01  # share of the characters
_MOST_TOKENS = 1.2  # per character; bytes are two to four in other scripts
# About the most documents to sample from. Reading them takes longer than
# encoding the sample.
MOST_READ = 20_000
_SAMPLE = 500_000  # characters of the sample
_PIECE = 2_000  # characters of each piece in the sample
_ADVICE = "choose one of the text's language, or train one (no --tokenizer)"


@dataclasses.dataclass(frozen=True)
class Coverage:
  """Counts of a tokenizer's tokens in a sample of texts, without spaces."""

  characters: int = 0
  tokens: int = 0
  unknown_characters: int = 0  # in unknown tokens, or in none
  unknown_tokens: int = 0

  def lines(self, name: str, trained: bool = False) -> Iterator[str]:
    """Yields lines to print about a text, and warnings, if there are any.

    `trained` says whether the tokenizer was trained on this text.
    """
    if not self.characters or not self.tokens:
      return
    unknown = self.unknown_characters / self.characters
    if unknown:
      yield (
        f"{name}: the tokenizer has no token for {unknown:.2%} of the"
        f" characters; {self.unknown_tokens / self.tokens:.2%} of the tokens"
        f" are unknown (in a sample of {self.characters:,} characters)"
      )
    if unknown > _MOST_UNKNOWN:
      advice = "a larger vocab_size reads more of train" if trained else _ADVICE
      yield (
        f"warning: the tokenizer cannot read {unknown:.1%} of {name}: {advice}"
      )
    rate = self.tokens / self.characters
    if rate > _MOST_TOKENS and trained:
      yield (
        f"tip: {name} needs {rate:.1f} tokens per character: a larger"
        " vocab_size gives fewer"
      )
    elif rate > _MOST_TOKENS:
      yield (
        f"warning: {name} needs {rate:.1f} tokens per character, so the"
        f" tokenizer is probably of another language: {_ADVICE}"
      )


def measure_coverage(
  tokenizer: Tokenizer, texts: Iterable[str], size: float
) -> Coverage:
  """Measures a sample of texts of about `size` characters together.

  The sample is every n-th piece of the texts, as if they were joined. So it has
  pieces from all places of the texts, in proportion to their lengths.
  """
  gap = max(_PIECE, round(_PIECE * size / _SAMPLE))
  begin = 0  # of the next piece, counted from the begin of the text
  counts = [0] * 4
  for text in texts:
    while begin < len(text):
      piece = text[max(0, begin) : begin + _PIECE]
      # Half a word would be unknown to a tokenizer of words.
      if begin > 0:
        piece = piece[piece.find(" ") + 1 :]
      if begin + _PIECE < len(text):
        piece = piece[: piece.rfind(" ") + 1] or piece
      _count(tokenizer, piece, counts)
      if begin + _PIECE > len(text):
        break  # the next text has the other part of the piece
      begin += gap
    begin -= len(text)
  return Coverage(*counts)


def _count(tokenizer: Tokenizer, text: str, counts: list[int]) -> None:
  """Adds a text to the counts of a `Coverage`."""
  ids, spans = tokenizer.encode_offsets(text)
  readable = set()
  for index, span in zip(ids.tolist(), spans, strict=True):
    if index != tokenizer.unk_id:
      readable.update(range(*span))
  read = [i for i, char in enumerate(text) if not char.isspace()]
  counts[0] += len(read)
  counts[1] += sum(a == b or not text[a:b].isspace() for a, b in spans)
  counts[2] += sum(i not in readable for i in read)
  counts[3] += ids.tolist().count(tokenizer.unk_id)
