"""How well a tokenizer fits a text: unknown characters, tokens a character."""

import dataclasses
from collections.abc import Iterable, Iterator

from antlm_jax.data.tokenizer import Tokenizer

_MOST_UNKNOWN = 0.01  # share of the characters
_MOST_TOKENS = 1.2  # per character; bytes are two to four in other scripts
_READ = 100_000_000  # characters to sample from, at the begin of the text
_SAMPLE = 500_000  # characters of the sample
_PIECE = 5_000  # characters of a document in the sample
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
        " are unknown (in a sample)"
      )
    if unknown > _MOST_UNKNOWN:
      advice = "a larger vocab_size reads more" if trained else _ADVICE
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
  tokenizer: Tokenizer, texts: Iterable[str], count: int, size: float
) -> Coverage:
  """Measures a sample of `count` texts, whose mean size is `size` bytes."""
  taken = min(count, _READ / max(1, size)) * min(max(1, size), _PIECE)
  step = max(1, round(taken / _SAMPLE))
  counts = [0] * 4
  left = _READ
  for number, text in enumerate(texts):
    left -= len(text)
    if left < 0 and number:
      break
    if number % step:
      continue
    text = text[:_PIECE]
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
  return Coverage(*counts)
