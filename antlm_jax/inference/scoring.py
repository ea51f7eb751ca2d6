"""Scores texts, with or without a context.

A *mode* chooses the outputs that predict a token:

  causal  a pass from left to right (log-likelihood)
  mlm     a bidirectional pass with only that token masked, read at the mask
          (pseudo-log-likelihood, arXiv 1910.14659)
  mntp    the same pass, read at the position before the mask
  fused   the sum of the logits of a causal and a masked pass (GPT-BERT, arXiv
          2410.24159), the latter read at the position of training
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from antlm_jax import mesh as mesh_lib
from antlm_jax import models, settings
from antlm_jax.data import packing
from antlm_jax.errors import UserError
from antlm_jax.inference import framing, inputs, programs
from antlm_jax.inference.framing import TextModel
from antlm_jax.inference.model import ModelOrPath, open_model
from antlm_jax.masks import AttentionMask
from antlm_jax.objectives.corruption import Segments
from antlm_jax.runtime import records
from antlm_jax.settings import PythonOnly, argument

MODES = ("causal", "mlm", "mntp", "fused")
_ALIASES = {"clm": "causal"}  # name of the mode in logs
REDUCTIONS = ("sum", "mean")
BATCH_TOKENS = 8192
_ROW = 64  # row lengths are multiples of this, since TPU kernels pad rows


@dataclasses.dataclass(frozen=True)
class TextFormat:
  """Layout of a text for scoring."""

  framed: bool = True  # whether to add the special tokens of training
  # White space between a context and the scored text, if they have none there.
  # Without a separator, they are joined as they are.
  separator: str = " "
  # Special token in place of an empty context, before the separator. `bos`
  # falls back to `eos`. The other choices are `eos`, and "" for no token.
  no_context: str = ""

  def parts(self, context: str, text: str) -> tuple[str, str]:
    """Returns a context and a text as the model reads them, to be joined.

    White space at the ends of both together is no text, except the indentation
    of the first of several lines. White space between them begins the text.
    """
    text = text.rstrip()
    word = text.lstrip()
    document = records.stripped(context + text)
    between = self.separator
    if not context.strip():
      return "", between + word if self.no_context else document
    context = document[: len(document) - len(text)]
    if not between:
      return context, text
    before = context.rstrip()
    if between.isspace():
      leading = text[: len(text) - len(word)]
      between = leading or context[len(before) :] or between
    return before, between + word


class Pass(NamedTuple):
  """A pass over a text, and the position that predicts a token."""

  masked: bool  # whether it is bidirectional with the token masked, or causal
  shift: int  # number of positions from the prediction to the token

  def reads(self, text: "EncodedText") -> int:
    """Returns the number of tokens that it encodes of a text."""
    # The last token is never an input to a left-to-right prediction.
    return len(text.tokens) if self.masked else text.stop - 1


class EncodedText(NamedTuple):
  """An encoded text; the tokens from `start` to `stop` are scored."""

  tokens: np.ndarray  # tokens with context and special tokens, int32 `[n]`
  start: int
  stop: int

  @property
  def targets(self) -> int:
    """Number of scored tokens."""
    return self.stop - self.start


class Totals(NamedTuple):
  """Sums of n texts at K temperatures."""

  logprobs: np.ndarray  # sums over scored tokens in nats, float64 `[n, K]`
  likeliest: np.ndarray  # number of tokens predicted as likeliest, int `[n]`
  # For each position in a text, the nats at the first temperature and the
  # number of scored tokens, float64 `[T, 2]`.
  by_position: np.ndarray


def mode_named(name: str) -> str:
  """Returns a name's mode in `MODES`; `clm` is `causal`."""
  return _ALIASES.get(name, name)


Mode = Annotated[str, argument(choices=MODES, read=mode_named)]


def passes_of_mode(loaded: TextModel, mode: str) -> tuple[Pass, ...]:
  """Returns the passes of a mode, whose logits are added; masked is last."""
  causal = Pass(masked=False, shift=1)
  if mode == "causal":
    return (causal,)
  if mode == "fused":
    return causal, Pass(True, loaded.mask_shift)
  return (Pass(True, {"mlm": 0, "mntp": 1}[mode]),)


@settings.checked
def score(
  model: ModelOrPath[TextModel],
  texts: Annotated[str | Iterable[str], argument(may_be_empty=True)],
  mode: Mode = "causal",
  contexts: PythonOnly[Iterable[str] | None] = None,
  text_format: PythonOnly[TextFormat] = TextFormat(),
  reduction: Annotated[str, argument(choices=REDUCTIONS)] = "sum",
  temperature: PythonOnly[float | Sequence[float]] = 1.0,
  batch_tokens: Annotated[int, argument(least=1)] = BATCH_TOKENS,
  step: int | None = None,
  track: PythonOnly[Callable[[Sequence[object]], Iterable[object]]] = iter,
) -> npt.NDArray[np.float64]:
  """Scores texts; a higher score is a likelier text.

  By default, the special tokens of training surround each text. Special tokens
  and contexts are not scored. The first token is not scored if its prediction
  needs a position before it and there is no special token. A token across the
  end of the context belongs to the text. White space around a text is no text,
  except the indentation of the first of several lines. White space between a
  context and its text is kept; without any, a space is added.

  Args:
    model: Model, or path to its run or checkpoint.
    texts: Text, or n texts; equal texts are computed only once.
    mode: `causal` (or `clm`), `mlm`, `mntp` or `fused`.
    contexts: n texts before the scored texts; a context may be empty.
    text_format: Layout of contexts, texts and special tokens.
    reduction: `sum` or `mean` over the scored tokens.
    temperature: Divisor of the logits. Several temperatures cost little more
      than a single temperature.
    batch_tokens: Number of tokens to encode at once, in rows as long as the
      longest text.
    step: Step of the run; by default the newest.
    track: Function that wraps the list of batches, such as tqdm.

  Returns:
    Scores in nats, float64 `[n]`, or `[n, K]` for K temperatures.

  Raises:
    UserError: An argument is wrong, a text is too long, empty or not a str, or
      the model has no `<mask>` token.
  """
  loaded = open_model(model, step)
  texts = inputs.as_texts(texts, strip=False)
  passes = passes_of_mode(loaded, mode)
  temperatures = np.atleast_1d(temperature)
  is_number = temperatures.dtype.kind in "if"
  if not (is_number and np.all((temperatures > 0) & (temperatures < np.inf))):
    raise UserError(f"temperature={temperature!r} is not over 0, and finite")
  if contexts is None:
    contexts = [""] * len(texts)
  contexts = inputs.as_texts(contexts, "context", strip=False)
  if len(contexts) != len(texts):
    raise UserError(
      f"there are {len(contexts)} contexts for {len(texts)} texts: give one for"
      " each text"
    )
  pairs = [*map(text_format.parts, contexts, texts)]
  # Benchmarks repeat sentences, so compute each sentence once.
  unique = list(dict.fromkeys(pairs))
  encoded = encode_pairs(loaded, unique, text_format, passes)
  for text, (context, choice) in zip(encoded, unique, strict=True):
    framing.check_length(loaded, len(text.tokens), context + choice)
  sums = totals(loaded, encoded, passes, temperatures, batch_tokens, track)
  unique_scores = sums.logprobs
  if reduction == "mean":
    unique_scores /= np.array([text.targets for text in encoded])[:, None]
  index = {pair: i for i, pair in enumerate(unique)}
  scores = unique_scores[[index[pair] for pair in pairs]]
  return scores.reshape(len(pairs), *np.shape(temperature))


def encode_pairs(
  loaded: TextModel,
  pairs: Sequence[tuple[str, str]],
  text_format: TextFormat,
  passes: tuple[Pass, ...],
) -> list[EncodedText]:
  """Encodes pairs of `TextFormat.parts`, without a limit of length.

  Raises a UserError if a text has no token to score.
  """
  earliest = max(p.shift for p in passes)
  before, after = loaded.frame
  if not text_format.framed:
    before = after = before[:0]
  # Special tokens before a text without a context.
  alone = np.append(before, _stand_in(loaded, text_format)).astype(np.int32)
  # Encode a context and its text together, as in a document, because each alone
  # could have other tokens.
  joined_texts = [context + text for context, text in pairs]
  token_ids = loaded.tokenizer.encode_batch(joined_texts)
  encoded = []
  for (context, text), joined, ids in zip(
    pairs, joined_texts, token_ids, strict=True
  ):
    head = before if context else alone
    tokens = np.concatenate([head, ids, after])
    start = len(head)
    stop = start + len(ids)
    if context:  # skip tokens that end within the context
      _, spans = loaded.tokenizer.encode_offsets(joined)
      start += sum(end <= len(context) for _, end in spans)
    start = max(start, earliest)  # skip tokens that no position predicts
    if stop <= start or not text.strip():
      raise UserError(f"the sentence {text!r} holds no token to score")
    encoded.append(EncodedText(tokens, start, stop))
  return encoded


def _stand_in(loaded: TextModel, text_format: TextFormat) -> list[int]:
  """Returns the token in place of an empty context as a list, maybe empty."""
  if not text_format.no_context:
    return []
  candidates = [loaded.tokenizer.bos_id, loaded.tokenizer.eos_id]
  if text_format.no_context == "eos":
    candidates = candidates[1:]
  candidates = [i for i in candidates if i is not None]
  if not candidates:
    raise UserError(
      "the tokenizer lacks the token that this pipeline needs for an empty"
      " context: leave pipeline out"
    )
  return candidates[:1]


# A target is a scored token. A causal pass encodes a text once for all targets.
# A masked pass encodes it once for each target, with that token masked. Each
# encoding is a segment. Segments are packed like training rows, with little
# padding. Logits `[V]` are computed only at targets.


class Targets(NamedTuple):
  """A table of R targets, and their segments in P passes."""

  text: np.ndarray  # index of the text, int `[R]`
  position: np.ndarray  # index of the token in the text, int `[R]`
  token: np.ndarray  # id of the token, int32 `[R]`
  begins: np.ndarray  # start of the segment in flat rows, int `[P, R]`


class Shapes(NamedTuple):
  """The shapes that all batches share, so that they share a program."""

  rows: tuple[int, ...]  # number of rows of each pass
  length: int  # number of tokens of a row
  targets: int  # number of targets


class ScoringRows(NamedTuple):
  """Segments of a pass in rows, and the places that predict targets."""

  tokens: np.ndarray  # int32 `[B, T]`
  starts: np.ndarray  # first place of each token's segment, int32 `[B, T]`
  ends: np.ndarray  # last place of that segment plus 1, int32 `[B, T]`
  predicted: np.ndarray  # predicting places in flat rows, int32 `[R]`


def totals(
  loaded: TextModel,
  texts: Sequence[EncodedText],
  passes: tuple[Pass, ...],
  temperatures: Sequence[float] = (1.0,),
  batch_tokens: int = BATCH_TOKENS,
  track: Callable[[Sequence[Targets]], Iterable[Targets]] = iter,
) -> Totals:
  """Sums the log-probabilities of n encoded texts; see `score`.

  `passes_of_mode` returns the `passes`, which may encode at most `max_seq_len`
  tokens of a text.
  """
  sums = Totals(
    logprobs=np.zeros((len(texts), len(temperatures))),
    likeliest=np.zeros(len(texts), np.int64),
    by_position=np.zeros((max((t.stop for t in texts), default=0), 2)),
  )
  if not texts:
    return sums
  masked = any(p.masked for p in passes)
  mask_id = framing.mask_id(loaded) if masked else 0
  temperatures = np.asarray(temperatures, np.float32)
  program = programs.compiled(_logprobs, loaded.model.config, passes)
  longest = max(p.reads(text) for text in texts for p in passes)
  length = programs.round_up(longest, loaded.model.config.max_seq_len, _ROW)
  most = max(1, batch_tokens // length)
  batches = _target_batches(texts, passes, length, most)
  shapes = _shapes(batches, length, most)
  for batch in track(batches):
    rows = [
      _segment_rows(texts, batch, number, passes[number], shapes, mask_id)
      for number in range(len(passes))
    ]
    tokens = _pad_with_zeros(batch.token, shapes.targets)
    results = program(loaded.params, rows, tokens, temperatures)
    # The last targets may be padding.
    logprobs, likeliest = (np.asarray(x)[: len(batch.text)] for x in results)
    # The device computes in float32, as in training. Sums are float64, so that
    # they do not depend on the batches.
    np.add.at(sums.logprobs, batch.text, logprobs.astype(np.float64))
    np.add.at(sums.likeliest, batch.text, likeliest)
    nats, counts = sums.by_position.T
    np.subtract.at(nats, batch.position, logprobs[:, 0])
    np.add.at(counts, batch.position, 1)
  return sums


def _shapes(batches: Sequence[Targets], length: int, most: int) -> Shapes:
  """Returns shapes for all batches of at most `most` rows per pass."""
  needed = [b.begins.max(axis=1) // length + 1 for b in batches]  # `[P]` each
  needed = np.max(needed, axis=0)
  # A power of two, so that most requests share a program too.
  powers = 2 ** np.ceil(np.log2(needed)).astype(int)
  rows = np.maximum(needed, np.minimum(powers, most))
  targets = max(len(batch.text) for batch in batches)
  targets = programs.round_up(targets, step=programs.LOGIT_ROWS)
  return Shapes(tuple(rows.tolist()), length, targets)


def _target_batches(
  texts: Sequence[EncodedText], passes: tuple[Pass, ...], length: int, most: int
) -> list[Targets]:
  """Divides all targets into batches of at most `most` rows per pass."""
  text = np.repeat(np.arange(len(texts)), [t.targets for t in texts])
  position = np.concatenate([np.arange(t.start, t.stop) for t in texts])
  token = np.concatenate([t.tokens[t.start : t.stop] for t in texts])
  # The last pass has most rows, because a masked pass is last.
  batch = _begins(texts, passes[-1], text, length) // (most * length)
  order = np.argsort(batch, kind="stable")
  batches = []
  for index in np.split(order, np.cumsum(np.bincount(batch))[:-1]):
    # This packs the last pass into the same rows again.
    begins = [_begins(texts, p, text[index], length) for p in passes]
    batches.append(
      Targets(text[index], position[index], token[index], np.stack(begins))
    )
  return batches


def _begins(
  texts: Sequence[EncodedText], text_pass: Pass, owners: np.ndarray, length: int
) -> np.ndarray:
  """Packs the segments of targets into rows; returns their starts, int `[R]`.

  `owners` are the indices of the targets' texts, int `[R]`.
  """
  if text_pass.masked:  # each target has a segment
    segments = owners
    segment = np.arange(len(owners))
  else:  # all targets of a text share a segment
    segments, segment = np.unique(owners, return_inverse=True)
  lengths = [text_pass.reads(texts[i]) for i in segments]
  return packing.best_fit(lengths, length)[segment]


def _segment_rows(
  texts: Sequence[EncodedText],
  batch: Targets,
  number: int,
  text_pass: Pass,
  shapes: Shapes,
  mask_id: int,
) -> ScoringRows:
  """Writes the segments of pass `number` into rows `[B, T]`."""
  begins = batch.begins[number]
  starts, first = np.unique(begins, return_index=True)
  segment_texts = [texts[i] for i in batch.text[first]]
  pieces = [text.tokens[: text_pass.reads(text)] for text in segment_texts]
  tokens, segments = packing.fill_rows(
    pieces, starts, shapes.rows[number], shapes.length, pad_id=0
  )
  if text_pass.masked:
    tokens.flat[begins + batch.position] = mask_id
  bounds = Segments.of(segments)
  predicted = _pad_with_zeros(
    begins + batch.position - text_pass.shift, shapes.targets
  )
  return ScoringRows(tokens, bounds.start, bounds.end, predicted)


def _pad_with_zeros(values: Sequence[int], size: int) -> np.ndarray:
  """Pads with zeros, whose results are ignored."""
  return np.pad(np.asarray(values, np.int32), (0, size - len(values)))


def _logprobs(
  model: models.Model,
  passes: tuple[Pass, ...],
  params: models.Params,
  inputs: Sequence[ScoringRows],  # rows of each pass
  targets: jax.Array,  # tokens to predict, int32 `[R]`
  temperatures: jax.Array,  # float32 `[K]`
) -> tuple[jax.Array, jax.Array]:
  """Returns log-probabilities `[R, K]`, and whether targets are likeliest."""

  # Logits of whole rows, [T, V], would be the largest array by far. So compute
  # only logits of targets, from hidden states [R, D], in chunks.
  def hidden(text_pass: Pass, rows: ScoringRows) -> jax.Array:
    positions = jnp.arange(rows.tokens.shape[1]) - rows.starts
    mask = AttentionMask(not text_pass.masked, rows.starts, rows.ends)
    out = model.encode(params, rows.tokens, positions, mask)
    return out.reshape(-1, out.shape[-1])[rows.predicted]

  # A target has its states in each pass, `[P, D]`, and its token.
  def logprobs(target: tuple[jax.Array, jax.Array]):
    states, token = target
    logits = model.logits(params, states).sum(axis=0)
    scaled = logits / temperatures[:, None]
    token_logprobs = scaled[:, token] - jax.nn.logsumexp(scaled, axis=-1)
    return token_logprobs, jnp.argmax(logits) == token

  states = jnp.stack(
    [hidden(*rows) for rows in zip(passes, inputs, strict=True)], axis=1
  )
  out = jax.lax.map(logprobs, (states, targets), batch_size=programs.LOGIT_ROWS)
  # If a run scores while it trains, each process reads all results.
  return jax.tree.map(lambda x: mesh_lib.constrain(x, *[None] * x.ndim), out)
