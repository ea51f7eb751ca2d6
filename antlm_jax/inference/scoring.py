"""Scores of texts, or of what follows a context.

A *mode* says which outputs predict a token: `causal`, those of one pass left
to right; `mlm`, those of a bidirectional pass in which that token alone is
masked (pseudo-log-likelihood, arXiv 1910.14659); `mntp`, the same read one
position before; `fused`, the sum of the logits of a causal and a masked pass
(GPT-BERT, arXiv 2410.24159), the masked one read as the model was trained.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import models
from antlm_jax.errors import UserError
from antlm_jax.inference import framing, programs
from antlm_jax.inference.framing import TextModel
from antlm_jax.masks import AttentionMask
from antlm_jax.runtime import sharding

MODES = ("causal", "mlm", "mntp", "fused")
REDUCTIONS = ("sum", "mean")
BATCH_TOKENS = 8192


@dataclasses.dataclass(frozen=True)
class Format:
  """What stands around a scored text."""

  framed: bool = True  # by the special tokens of training, around it all
  separator: str = " "  # stands between a context and the text
  # The special token that takes the place of a context that is empty, the
  # separator after it: `bos` (or else `eos`) or `eos`; with "" such a text
  # stands alone.
  no_context: str = ""


class Pass(NamedTuple):
  """A pass over a text, and where in it a token is predicted."""

  masked: bool  # whether it is bidirectional, with the token masked, or causal
  shift: int  # how many positions before the token its prediction stands

  def reads(self, text: "Text") -> int:
    """Returns how many tokens of a text it encodes."""
    # What is predicted last, nothing that is predicted left to right sees.
    return len(text.tokens) if self.masked else text.stop - 1


class Text(NamedTuple):
  """Tokens int32 `[n]` with what stands around them; which are scored."""

  tokens: np.ndarray
  start: int
  stop: int

  @property
  def targets(self) -> int:
    return self.stop - self.start


class Totals(NamedTuple):
  """What is known of n texts' scored tokens."""

  logprobs: np.ndarray  # sums of log-probabilities in nats, float64 `[n, K]`
  likeliest: np.ndarray  # how many tokens are the likeliest ones, int `[n]`


def passes(loaded: TextModel, mode: str) -> tuple[Pass, ...]:
  """Returns the passes whose logits a mode adds.

  Raises:
    UserError: for an unknown mode.
  """
  if mode not in MODES:
    raise UserError(f"mode {mode!r} is not one of {', '.join(MODES)}")
  causal = Pass(masked=False, shift=1)
  if mode == "causal":
    return (causal,)
  if mode == "fused":
    return causal, Pass(True, loaded.mask_shift)
  return (Pass(True, {"mlm": 0, "mntp": 1}[mode]),)


def score(
  loaded: TextModel,
  texts: Sequence[str],
  mode: str,
  contexts: Sequence[str] | None = None,
  text_format: Format = Format(),
  reduction: str = "sum",
  temperature: float | Sequence[float] = 1.0,
  batch_tokens: int = BATCH_TOKENS,
  track: Callable[[Sequence], Iterable] = iter,
) -> np.ndarray:
  """Scores texts; the higher, the likelier.

  By default a text stands in the special tokens that stood around documents
  in training. They are not scored, nor is its context, nor a token that
  nothing can predict: the first one, where it is predicted one position before
  and no special token stands there. A token across the end of the context
  counts as the text's.

  Args:
    loaded: The model.
    texts: n texts; equal ones are scored once.
    mode: `causal`, `mlm`, `mntp` or `fused`; see above.
    contexts: n texts that they follow, some or all of them empty.
    text_format: What stands around them.
    reduction: `sum` or `mean` over the scored tokens.
    temperature: Divides the logits. Several cost little more than one.
    batch_tokens: Tokens encoded at once, in rows as long as the longest text.
    track: Wraps the list of batches, as tqdm does, to show progress.

  Returns:
    float64 `[n]`, or `[n, K]` for K temperatures; in nats.

  Raises:
    UserError: for an unknown mode or reduction, a temperature that is not
      positive, a text that is too long or empty, or masks without a `<mask>`
      token.
  """
  wanted = passes(loaded, mode)
  if reduction not in REDUCTIONS:
    raise UserError(
      f"reduction {reduction!r} is not one of {', '.join(REDUCTIONS)}"
    )
  temperatures = np.atleast_1d(np.asarray(temperature, np.float32))
  if not np.all((temperatures > 0) & np.isfinite(temperatures)):
    raise UserError(f"temperature {temperature} is not positive")
  contexts = [""] * len(texts) if contexts is None else contexts
  pairs = list(zip(contexts, texts, strict=True))
  # Benchmarks repeat sentences: each is scored once, and looked up below.
  unique = list(dict.fromkeys(pairs))
  encoded = encode(loaded, unique, text_format, wanted)
  for text, (context, choice) in zip(encoded, unique, strict=True):
    framing.check_length(loaded, len(text.tokens), context + choice)
  found = totals(
    loaded, encoded, wanted, temperatures, batch_tokens, track
  ).logprobs
  if reduction == "mean":
    found /= np.array([text.targets for text in encoded])[:, None]
  index = {pair: i for i, pair in enumerate(unique)}
  scores = found[[index[pair] for pair in pairs]]
  return scores.reshape(len(pairs), *np.shape(temperature))


def encode(
  loaded: TextModel,
  pairs: Sequence[tuple[str, str]],
  text_format: Format,
  wanted: tuple[Pass, ...],
) -> list[Text]:
  """Encodes (context, text)s, as `score` does; they may be too long.

  Raises:
    UserError: if a text holds no token to score.
  """
  earliest = max(p.shift for p in wanted)
  before, after = loaded.frame
  if not text_format.framed:
    before = after = before[:0]
  # What stands before a text without a context: with one, the frame alone.
  alone = np.append(before, _stand_in(loaded, text_format)).astype(np.int32)
  # A context and its text are encoded together, as they would stand in a
  # document: tokens may differ from those of each by itself.
  lead = text_format.separator
  whole = [
    context + lead * bool(context or text_format.no_context) + text
    for context, text in pairs
  ]
  out = []
  ids_of = loaded.tokenizer.encode_batch(whole)
  for (context, text), joined, ids in zip(pairs, whole, ids_of, strict=True):
    head = before if context else alone
    tokens = np.concatenate([head, ids, after])
    start, stop = len(head), len(head) + len(ids)
    if context:  # those of its tokens that end within it are not scored
      _, spans = loaded.tokenizer.encode_offsets(joined)
      start += sum(end <= len(context) for _, end in spans)
    start = max(start, earliest)  # nothing stands before to predict the first
    if stop <= start or not text.strip():
      raise UserError(f"the sentence {text!r} holds no token to score")
    out.append(Text(tokens, start, stop))
  return out


def cropped(text: Text, wanted: tuple[Pass, ...], longest: int) -> Text:
  """Leaves out the beginning of a text of which a pass reads too much."""
  over = max(0, *(p.reads(text) - longest for p in wanted))
  return Text(text.tokens[over:], text.start - over, text.stop - over)


def _stand_in(loaded: TextModel, text_format: Format) -> list[int]:
  """Returns the token in the place of a context that is empty, if any."""
  if not text_format.no_context:
    return []
  bos, eos = loaded.tokenizer.bos_id, loaded.tokenizer.eos_id
  ids = [eos] if text_format.no_context == "eos" else [bos, eos]
  found = [i for i in ids if i is not None]
  if not found:
    raise UserError(
      "the tokenizer has no token to stand for an empty context, as this"
      " pipeline needs: leave --pipeline out"
    )
  return found[:1]


# ------------------------------------------------------------------- batching
#
# A target is a (text, position). A group is as many of them as there is room
# for: their texts stand side by side in rows, each a segment that sees nothing
# but itself, so that hardly anything is padding, and one program does all the
# groups. A causal pass reads a text once, whatever number of its targets; a
# masked pass once for each target, with that one token masked. Logits `[V]` are
# computed at the targets alone, in both.


class Rows(NamedTuple):
  """Segments side by side, and where in them R targets are predicted."""

  tokens: np.ndarray  # int32 `[B, T]`
  positions: np.ndarray  # of a token in its segment, int32 `[B, T]`
  starts: np.ndarray  # of its segment in the row, int32 `[B, T]`
  ends: np.ndarray  # likewise; 0 where there is no segment
  predicted: np.ndarray  # places among B * T, int32 `[R]`


def totals(
  loaded: TextModel,
  texts: Sequence[Text],
  wanted: tuple[Pass, ...],
  temperatures: Sequence[float] = (1.0,),
  batch_tokens: int = BATCH_TOKENS,
  track: Callable[[Sequence], Iterable] = iter,
) -> Totals:
  """Sums over n encoded texts, of which no pass reads more than a row.

  `wanted` is of `passes`, the rest as for `score`.
  """
  masked = any(p.masked for p in wanted)
  mask_id = framing.mask_id(loaded) if masked else 0
  program = programs.compiled(_logprobs, loaded.model.config, wanted)
  temperatures = np.asarray(temperatures, np.float32)
  out = np.zeros((len(texts), len(temperatures)))
  likeliest = np.zeros(len(texts), np.int64)
  longest = max((p.reads(text) for text in texts for p in wanted), default=1)
  length = programs.round_up(longest, loaded.model.config.max_seq_len)
  most = max(1, batch_tokens // length)  # rows of a pass
  groups = list(_groups(texts, wanted, length, most))
  shape = _shape(groups, most)
  for group in track(groups):
    arrays = group.arrays(texts, *shape, mask_id)
    logprobs, top = program(loaded.params, *arrays, temperatures)
    # Float32 on the device, as it is trained; sums in float64 here, so that
    # they do not depend on how the texts were grouped.
    owners = group.targets[:, 0]
    np.add.at(out, owners, np.asarray(logprobs, np.float64)[: len(owners)])
    np.add.at(likeliest, owners, np.asarray(top)[: len(owners)])
  return Totals(out, likeliest)


@dataclasses.dataclass(frozen=True)
class _Group:
  """Targets, and where their segments begin among the B * T of each pass."""

  wanted: tuple[Pass, ...]
  length: int  # T
  targets: np.ndarray  # (text, position), `[R, 2]`
  begins: np.ndarray  # of its segment, by pass, `[R, passes]`

  def rows(self) -> np.ndarray:
    """Returns how many rows each pass takes."""
    return self.begins.max(axis=0) // self.length + 1

  def arrays(
    self, texts: Sequence[Text], rows: Sequence[int], size: int, mask_id: int
  ) -> tuple[list[Rows], np.ndarray]:
    """Returns what `_logprobs` takes: rows by pass, and R = `size` tokens.

    What fills the list of targets up is predicted at place 0, and dropped.
    """
    owners, positions = self.targets.T
    passes = []
    for where, begins, count in zip(
      self.wanted, self.begins.T, rows, strict=True
    ):
      # A causal segment is of several targets.
      starts, first = np.unique(begins, return_index=True)
      read = [texts[i] for i in owners[first]]
      segments = [text.tokens[: where.reads(text)] for text in read]
      out = self._side_by_side(segments, starts, count)
      if where.masked:
        out[0].reshape(-1)[begins + positions] = mask_id
      predicted = begins + positions - where.shift
      passes.append(Rows(*out, _filled_up(predicted, size)))
    tokens = [texts[i].tokens[at] for i, at in self.targets]
    return passes, _filled_up(tokens, size)

  def _side_by_side(self, segments, begins, rows: int) -> list[np.ndarray]:
    """Returns the first four of `Rows`."""
    sizes = np.array([len(segment) for segment in segments])
    within = np.concatenate([np.arange(size) for size in sizes])
    starts = np.repeat(begins % self.length, sizes)
    ends = starts + np.repeat(sizes, sizes)
    cells = np.repeat(begins, sizes) + within
    out = []
    for values in (np.concatenate(segments), within, starts, ends):
      array = np.zeros(rows * self.length, np.int32)
      array[cells] = values
      out.append(array.reshape(rows, self.length))
    return out


def _groups(
  texts: Sequence[Text],
  wanted: tuple[Pass, ...],
  length: int,
  most: int,
) -> Iterator[_Group]:
  """Yields all targets in groups of `most` rows, the longest texts' first."""
  parts, begins, ends = [], [], [0] * len(wanted)
  masked = any(where.masked for where in wanted)

  def group():
    owners, starts, stops = np.array(parts).T
    positions = np.concatenate([np.arange(*part[1:]) for part in parts])
    targets = np.repeat(owners, stops - starts), positions
    places = np.repeat(begins, stops - starts, axis=0)
    return _Group(wanted, length, np.stack(targets, axis=1), places)

  for i in sorted(range(len(texts)), key=lambda i: -len(texts[i].tokens)):
    sizes = [where.reads(texts[i]) for where in wanted]
    # A masked pass reads a text for one target, a causal one for all of them.
    step = 1 if masked else max(1, texts[i].targets)
    for at in range(texts[i].start, texts[i].stop, step):
      known = parts and parts[-1][0] == i
      found = [
        begins[-1][p]
        if known and not where.masked
        else _next(end, size, length)
        for p, (where, end, size) in enumerate(
          zip(wanted, ends, sizes, strict=True)
        )
      ]
      reach = [begin + size for begin, size in zip(found, sizes, strict=True)]
      if max(reach) > most * length:
        yield group()
        parts, begins, found = [], [], [0] * len(wanted)
        reach = sizes
      parts.append((i, at, at + step))
      begins.append(found)
      ends = reach
  if parts:
    yield group()


def _next(end: int, size: int, length: int) -> int:
  """Returns where a segment may begin that does not go over a row's end."""
  over = end % length + size > length
  return end + -end % length if over else end


def _shape(groups: Sequence[_Group], most: int) -> tuple[list[int], int]:
  """Returns the rows B of each pass and the targets R that suit all groups."""
  rows = np.max([group.rows() for group in groups], axis=0, initial=1)
  targets = max((len(group.targets) for group in groups), default=1)
  # Powers of two, so that little is compiled.
  rows = [min(most, 1 << (int(n) - 1).bit_length()) for n in rows]
  return rows, -(-targets // programs.LOGIT_ROWS) * programs.LOGIT_ROWS


def _filled_up(values, size: int) -> np.ndarray:
  return np.pad(np.asarray(values, np.int32), (0, size - len(values)))


# ------------------------------------------------------------ on the device


def _logprobs(
  model: models.Model,
  wanted: tuple[Pass, ...],  # the passes whose logits are added
  params: models.Params,
  passes: Sequence[Rows],  # what each reads
  targets: jax.Array,  # the tokens that are predicted, int32 `[R]`
  temperatures: jax.Array,  # float32 `[K]`
) -> tuple[jax.Array, jax.Array]:
  """Computes the log-probabilities of a group's targets, float32 `[R, K]`.

  And whether they are the likeliest tokens, bool `[R]`.
  """

  # A row of [T, V] logits would be the largest array by far: only the hidden
  # states of the targets, [R, D], go on to the vocabulary, and in chunks.
  def hidden(where: Pass, rows: Rows) -> jax.Array:
    mask = AttentionMask(not where.masked, rows.starts, rows.ends)
    out = model.encode(params, rows.tokens, rows.positions, mask)
    return out.reshape(-1, out.shape[-1])[rows.predicted]

  def logprobs(one):  # of one target: hidden [passes, D], and the token
    states, target = one
    logits = model.logits(params, states).sum(axis=0)
    scaled = logits / temperatures[:, None]
    found = scaled[:, target] - jax.nn.logsumexp(scaled, axis=-1)
    return found, jnp.argmax(logits) == target

  states = [hidden(*one) for one in zip(wanted, passes, strict=True)]
  states = jnp.stack(states, axis=1)
  out = jax.lax.map(logprobs, (states, targets), batch_size=programs.LOGIT_ROWS)
  # Every process of a run that is scored while it trains reads all of them.
  return jax.tree.map(lambda x: sharding.constrain(x, *[None] * x.ndim), out)
