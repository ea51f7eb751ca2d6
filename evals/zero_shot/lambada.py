"""LAMBADA: the last word of a text, which takes all of it to be guessed.

Each record is a text (arXiv 1606.06031); what stands after its last space is
predicted. As lm-eval's lambada_openai has it, a word is right if each of its
tokens is the likeliest one after the text and the tokens before it, and the
perplexity is that of words. A text that is too long loses its beginning.

With masks the word's tokens are predicted one after the other as well: the
one at hand and those after it are masked (arXiv 2305.10588). So their number is
known, and figures are not those of a causal mode.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from antlm_jax import tables
from antlm_jax.errors import UserError
from antlm_jax.evals.zero_shot import texts
from antlm_jax.evals.zero_shot.texts import TextTask
from antlm_jax.inference import framing, scoring
from antlm_jax.inference.scoring import Text


@dataclasses.dataclass(frozen=True)
class LastWords:
  """What is known of n words, each after a context."""

  pairs: Sequence[tuple[str, str]]
  logprobs: np.ndarray  # in nats, float64 `[n]`
  right: np.ndarray  # bool `[n]`

  def summary(self) -> dict:
    """Returns the numbers."""
    return {
      "texts": len(self.pairs),
      "accuracy": float(self.right.mean()),
      "word_perplexity": texts.perplexity(-self.logprobs.mean()),
    }

  def lines(self) -> Iterator[dict]:
    """Yields every word, with its log-probability in nats."""
    rows = zip(self.pairs, self.logprobs, self.right, strict=True)
    for (context, word), logprob, right in rows:
      yield {
        "context": context,
        "word": word,
        "logprob": float(logprob),
        "correct": bool(right),
      }


class Lambada(TextTask):
  """The task; see `command.Task`."""

  about = "LAMBADA: the last word of a text"
  notes = __doc__

  def read(self, asked) -> list[tuple[str, str]]:
    """Reads texts, as what stands before the last word and the word."""
    found = [text.rpartition(" ")[::2] for text in super().read(asked)]
    for number, (context, word) in enumerate(found, start=1):
      if not context.strip() or not word.strip():
        raise UserError(
          f"{asked.data}, text {number}: no two words in {word!r:.60}"
        )
    return found

  def score(self, loaded, items, asked, options, track) -> LastWords:
    """Predicts the words."""
    wanted = scoring.passes(loaded, asked.mode)
    masked = any(p.masked for p in wanted)
    longest, parts = loaded.model.config.max_seq_len, []
    encoded = scoring.encode(loaded, items, options["text_format"], wanted)
    for text, (_, word) in zip(encoded, items, strict=True):
      text = scoring.cropped(text, wanted, longest)
      if text.start < 1:
        raise UserError(f"the word {word!r:.60} leaves no room for a context")
      parts.append(list(_hidden(loaded, text)) if masked else [text])
    logprobs, likeliest = texts.score(loaded, parts, wanted, asked, track)
    counts = [text.targets for text in encoded]
    return LastWords(items, logprobs, likeliest == counts)

  def table(self, summary, asked) -> str:
    """Lays the numbers out."""
    row = (
      summary["texts"],
      f"{100 * summary['accuracy']:.2f}",
      texts.shown(summary["word_perplexity"]),
    )
    return tables.text([row], ("texts", "accuracy (%)", "perplexity"), ">")


def _hidden(loaded, text: Text) -> Iterator[Text]:
  """Yields a text for each token that is scored, those after it masked."""
  mask = framing.mask_id(loaded)
  for at in range(text.start, text.stop):
    tokens = text.tokens.copy()
    tokens[at + 1 : text.stop] = mask
    yield Text(tokens, at, at + 1)
