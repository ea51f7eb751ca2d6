"""Perplexity of any text, left to right or one mask at a time.

  antlm eval perplexity --checkpoint=RUN --data=TEXT --mode=causal

  nats per token     mean of -log p over the text's tokens
  token perplexity   e to the nats per token; it depends on the tokenizer
  word perplexity    e to the nats per word, between white space; lm-eval's
                     word_perplexity
  bits per byte      bits per byte of UTF-8; it does not depend on the tokenizer
  accuracy           share of tokens that are the model's first choice

--mode=causal gives lm-eval's loglikelihood_rolling. The other modes predict
each token from both sides, with only that token masked (pseudo-perplexity,
arXiv 1910.14659). It is lower than causal perplexity, and not the held-out loss
of masked training, which masks many tokens at once. These modes read the text
once for each token: use --limit.

The special tokens of training surround a document and are not scored. A
document longer than the context is scored in overlapping windows, --stride
tokens apart. Each token counts once, in the window that gives it the most
context: before it, or with masks on both sides. positions.csv has the mean nats
at each position in the window, and positions.svg shows them. They fall with the
position if the model uses long contexts. Compare models at the same positions.
The text is scored unchanged. lm-eval's wikitext first removes that set's spaces
around punctuation, but counts words and bytes with them.
"""

import dataclasses
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from antlm_jax import settings as settings_lib
from antlm_jax.data import words
from antlm_jax.errors import UserError
from antlm_jax.evals.zero_shot import texts as texts_lib
from antlm_jax.evals.zero_shot.task import (
  TASKS,
  ZeroShotOutcome,
  build_settings,
  mode_of,
)
from antlm_jax.inference import scoring
from antlm_jax.inference.framing import TextModel
from antlm_jax.inference.model import ModelOrPath, open_model
from antlm_jax.inference.scoring import EncodedText, Mode
from antlm_jax.page import plots
from antlm_jax.runtime import files, progress
from antlm_jax.settings import PythonOnly, Setting, setting

_BINS = 64  # points of the curve by position
_ENCODED = 256  # documents at once: encoding takes 30 times their memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerplexitySettings(texts_lib.TextSettings):
  """The settings of the task."""

  window: int = setting(
    0,
    "Number of tokens in a window; 0 for the longest row of training",
    least=0,
  )
  stride: int = setting(
    0,
    "Number of tokens from one window to the next; 0 for a whole window, with"
    " masks for half of it",
    least=0,
  )


@dataclasses.dataclass(frozen=True, repr=False)
class Perplexity:
  """Perplexity of documents, as `antlm eval perplexity --help` defines it."""

  documents: int
  tokens: int  # that are predicted
  words: int
  bytes: int
  nats_per_token: float
  token_perplexity: float
  word_perplexity: float
  bits_per_byte: float
  accuracy: float
  # For each document its id, first characters, tokens, words, bytes and nats.
  items: Sequence[Mapping[str, str | float]]
  # For each position in a window its number of scored tokens, and their mean.
  by_position: Sequence[Mapping[str, float]]

  @property
  def summary(self) -> dict[str, float]:
    """All figures by name."""
    lists = "items", "by_position"
    return {name: x for name, x in vars(self).items() if name not in lists}

  def __repr__(self) -> str:
    return (
      f"<perplexity {self.token_perplexity:,.6g} by token,"
      f" {self.word_perplexity:,.6g} by word; {self.bits_per_byte:.4f} bits per"
      f" byte; {self.documents:,} documents>"
    )


@settings_lib.checked
def perplexity(
  model: ModelOrPath[TextModel],
  texts: files.Path | Iterable[str],
  *,
  mode: Mode | None = None,
  step: int | None = None,
  quiet: PythonOnly[bool] = False,
  **settings: Setting,
) -> Perplexity:
  """Measures the perplexity of texts.

  Args:
    model: Model, or the path to its run or checkpoint.
    texts: Documents, or the path to a file of them, a folder or prepared data.
    mode: Outputs that predict a token: `causal` (or `clm`), `mlm`, `mntp` or
      `fused`; by default the mode of training, `causal` if there are several.
    step: Step of the run; by default the newest.
    quiet: Print nothing.
    **settings: Settings that `antlm eval perplexity --help` lists, such as the
      largest number of documents (`limit=100`) and the `stride` of windows.

  Raises:
    UserError: An argument is wrong, there is no text, or no token to predict.
  """
  mode = mode_of(model, mode, step)
  task_settings = build_settings("perplexity", "", mode, settings)
  with progress.quietly(quiet):
    documents = texts_lib.read_texts(task_settings, texts)
    loaded = open_model(model, step)
    return measure_perplexity(loaded, documents, task_settings)


def measure_perplexity(
  loaded: TextModel, documents: Sequence[str], settings: PerplexitySettings
) -> Perplexity:
  """Measures the perplexity of n documents."""
  passes = scoring.passes_of_mode(loaded, settings.mode)
  before, after = loaded.frame
  # No position before predicts the first token of a text without a frame.
  start = max(len(before), *(p.shift for p in passes))
  longest = settings.window or loaded.longest_row
  if longest > (most := loaded.model.config.max_seq_len):
    raise UserError(f"window={longest} is over the model's max_seq_len={most}")
  parts = []
  token_count = unknown_count = 0
  for i in range(0, len(documents), _ENCODED):
    for ids in loaded.tokenizer.encode_batch(documents[i : i + _ENCODED]):
      token_count += len(ids)
      unknown_count += np.count_nonzero(ids == loaded.tokenizer.unk_id)
      tokens = np.concatenate([before, ids, after])
      text = EncodedText(tokens, start, len(before) + len(ids))
      parts.append(list(windows(text, passes, longest, settings.stride)))
  if not any(parts) or not any(map(str.split, documents)):
    raise UserError("the texts hold no word to predict")
  if unknown_count:
    progress.say(
      f"warning: {unknown_count:,} of {token_count:,} tokens are unknown to the"
      " tokenizer: do not compare these figures with another tokenizer's"
    )
  totals = texts_lib.score_text_parts(loaded, parts, passes, settings)
  figures = perplexity_figures(
    documents,
    tokens=[sum(window.targets for window in pieces) for pieces in parts],
    nats=-totals.logprobs,
    likeliest=totals.likeliest,
    by_position=totals.by_position,
  )
  if note := words.note_of_words(figures.bytes, figures.words):
    progress.say(note)
  return figures


def perplexity_figures(
  documents: Sequence[str],
  tokens: Sequence[int],
  nats: np.ndarray,
  likeliest: np.ndarray,
  by_position: Iterable[Sequence[float]] = (),
) -> Perplexity:
  """Returns the figures of n documents.

  `tokens`, `nats` and `likeliest` have an entry for each document, `[n]`: its
  scored tokens, their nats, and the tokens that the model finds likeliest.
  `by_position` is as in `scoring.Totals`.
  """
  items = [
    {
      "id": number,
      "begins": document[:60],
      "tokens": count,
      "words": len(document.split()),
      "bytes": len(document.encode()),
      "nats": float(total),
    }
    for number, (document, count, total) in enumerate(
      zip(documents, tokens, nats, strict=True)
    )
  ]
  names = "tokens", "words", "bytes"
  sums = {name: sum(item[name] for item in items) for name in names}
  total = float(nats.sum())
  count = sums["tokens"]
  return Perplexity(
    documents=len(documents),
    **sums,
    nats_per_token=total / count,
    token_perplexity=texts_lib.perplexity_of_nats(total / count),
    word_perplexity=texts_lib.perplexity_of_nats(total / sums["words"]),
    bits_per_byte=total / math.log(2) / sums["bytes"],
    accuracy=float(likeliest.sum() / count),
    items=items,
    by_position=[
      {"position": position, "tokens": int(n), "nats_per_token": float(x / n)}
      for position, (x, n) in enumerate(by_position)
      if n
    ],
  )


def score_documents(
  loaded, items: Sequence[str], settings: PerplexitySettings
) -> ZeroShotOutcome:
  """Scores documents."""
  result = measure_perplexity(loaded, items, settings)
  names = "position", "tokens", "nats_per_token"
  rows = [[row[name] for name in names] for row in result.by_position]
  lines = (",".join(map(str, row)) for row in (names, *rows))
  files = {"positions.csv": "\n".join(lines) + "\n"}
  files["positions.svg"] = _drawn(np.array(rows))
  return ZeroShotOutcome(result.summary, result.items, files)


def _drawn(rows: np.ndarray) -> str:
  """Draws the rows of positions.csv as SVG, in at most `_BINS` means."""
  position, tokens, nats = rows.T
  group = position * _BINS // (position.max() + 1)
  _, group = np.unique(group, return_inverse=True)
  x = np.bincount(group, position) / np.bincount(group)
  y = np.bincount(group, tokens * nats) / np.bincount(group, tokens)
  figure = plots.canvas(7, 4, "Loss by position in the window")
  axes = figure.subplots()
  axes.plot(x, y, color=plots.COLOURS[0], lw=2)
  axes.set(xlabel="position (tokens)", ylabel="loss (nats per token)")
  plots.step_axis(axes)
  figure.savefig(svg := io.StringIO(), format="svg")
  return svg.getvalue()


def windows(
  text: EncodedText,
  passes: Sequence[scoring.Pass],
  longest: int,
  stride: int = 0,
) -> Iterator[EncodedText]:
  """Yields windows of a text of which each pass reads at most `longest` tokens.

  Each token is scored in one part. Left to right, it is among the last `stride`
  tokens of that part, or in the first part, as in lm-eval. With masks, it is in
  the middle of that part, or at an end of the text. The last part is as long as
  the others. Raises a UserError if the stride is too long for a window.
  """
  masked = any(p.masked for p in passes)
  # With masks, the first token to score may be read from the token before it.
  most = longest - max(p.shift for p in passes) if masked else longest
  stride = stride or (max(1, longest // 2) if masked else longest)
  if stride > most:
    raise UserError(
      f"stride={stride} is over {most}, the most in windows of {longest} tokens"
    )
  # Left to right, the last token is predicted but not read.
  tokens = text.tokens if masked else text.tokens[: text.stop]
  size = longest if masked else longest + 1
  behind = (longest - stride) // 2 if masked else 0
  start = text.start
  end = min(size, len(tokens))
  while start < text.stop:
    begin = max(0, end - size)
    is_last = end == len(tokens)
    stop = text.stop if is_last else min(text.stop, end - behind)
    yield EncodedText(tokens[begin:end], start - begin, stop - begin)
    start = stop
    end = min(end + stride, len(tokens))


TASKS["perplexity"] = texts_lib.Task(
  about=__doc__,
  read=texts_lib.read_texts,
  score=score_documents,
  figure="nats_per_token",
  table={
    **{n: f"{{{n}:,}}" for n in ("documents", "tokens", "words", "bytes")},
    "nats per token": "{nats_per_token:.4f}",
    "token perplexity": "{token_perplexity:,.6g}",
    "word perplexity": "{word_perplexity:,.6g}",
    "bits per byte": "{bits_per_byte:.4f}",
    "accuracy": "{accuracy:.2%}",
  },
  settings=PerplexitySettings,
)
