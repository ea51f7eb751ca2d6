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
from antlm_jax.masks import CAUSAL, AttentionMask
from antlm_jax.runtime import sharding

MODES = ("causal", "mlm", "mntp", "fused")
REDUCTIONS = ("sum", "mean")
BATCH_TOKENS = 8192
_LENGTH_STEP = 8  # row lengths are multiples of it
_LOGIT_ROWS = 256  # targets whose logits are in memory at once


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


class Text(NamedTuple):
  """Tokens int32 `[n]` with what stands around them; which are scored."""

  tokens: np.ndarray
  start: int
  stop: int

  @property
  def targets(self) -> int:
    return self.stop - self.start


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
    return causal, Pass(True, framing.mask_shift(loaded.config))
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
    batch_tokens: Tokens encoded at once; a text's targets stay together, so a
      long text may take more.
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
  encoded = _encode(loaded, unique, text_format, max(p.shift for p in wanted))
  found = totals(loaded, encoded, wanted, temperatures, batch_tokens, track)
  if reduction == "mean":
    found /= np.array([text.targets for text in encoded])[:, None]
  index = {pair: i for i, pair in enumerate(unique)}
  scores = found[[index[pair] for pair in pairs]]
  return scores.reshape(len(pairs), *np.shape(temperature))


def _encode(
  loaded, pairs: Sequence[tuple[str, str]], text_format: Format, earliest: int
) -> list[Text]:
  """Encodes and checks (context, text)s; none is scored before `earliest`."""
  before, after = framing.frame(loaded)
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
    framing.check_length(loaded, len(tokens), joined)
    start, stop = len(head), len(head) + len(ids)
    if context:  # those of its tokens that end within it are not scored
      _, spans = loaded.tokenizer.encode_offsets(joined)
      start += sum(end <= len(context) for _, end in spans)
    start = max(start, earliest)  # nothing stands before to predict the first
    if stop <= start or not text.strip():
      raise UserError(f"the sentence {text!r} holds no token to score")
    out.append(Text(tokens, start, stop))
  return out


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
# Texts of like length make a group: a table of S texts, padded to T tokens, and
# a flat list of R targets, each a (text, position). A causal pass encodes the S
# rows of the table, whatever R is. A masked pass encodes R rows, one for every
# target, each a copy of its text with that one token masked. Logits `[V]` are
# computed at the targets alone, in both.


def totals(
  loaded: TextModel,
  texts: Sequence[Text],
  wanted: tuple[Pass, ...],
  temperatures: Sequence[float] = (1.0,),
  batch_tokens: int = BATCH_TOKENS,
  track: Callable[[Sequence], Iterable] = iter,
) -> np.ndarray:
  """Sums the log-probabilities of n encoded texts, float64 `[n, K]`.

  `wanted` is of `passes`, the rest as for `score`.
  """
  masked = any(p.masked for p in wanted)
  mask_id = framing.mask_id(loaded) if masked else 0
  program = programs.compiled(_logprobs, loaded.model.config, wanted)
  temperatures = np.asarray(temperatures, np.float32)
  out = np.zeros((len(texts), len(temperatures)))
  groups = list(_groups(loaded, texts, masked, batch_tokens))
  for members, shape in track(groups):
    # Float32 on the device, as it is trained; sums in float64 here, so that
    # they do not depend on how the texts were grouped.
    arrays = _assemble([texts[i] for i in members], *shape)
    logprobs = program(loaded.params, *arrays, temperatures, mask_id)
    owner = np.repeat(members, [texts[i].targets for i in members])
    # What fills the list of targets up stands behind the real ones.
    np.add.at(out, owner, np.asarray(logprobs, np.float64)[: len(owner)])
  return out


def _groups(
  loaded, texts: list[Text], masked: bool, batch_tokens: int
) -> Iterator[tuple[list[int], tuple[int, int, int]]]:
  """Yields the indices of texts that make a group, and its (S, R, T)."""
  buckets: dict[int, list[int]] = {}
  longest = loaded.model.config.max_seq_len
  for i, text in enumerate(texts):
    length = framing.round_up(len(text.tokens), _LENGTH_STEP, longest)
    buckets.setdefault(length, []).append(i)
  for length, members in sorted(buckets.items()):
    counts = [texts[i].targets for i in members]
    # One shape for the whole bucket, so that little is compiled.
    shape = _shape(length, counts, masked, batch_tokens)
    group, held = [], 0
    for member, count in zip(members, counts, strict=True):
      if len(group) == shape[0] or held + count > shape[1]:
        yield group, (*shape, length)
        group, held = [], 0
      group.append(member)
      held += count
    yield group, (*shape, length)


def _shape(
  length: int, counts: Sequence[int], masked: bool, batch_tokens: int
) -> tuple[int, int]:
  """Returns how many texts S and targets R a group of a bucket holds.

  The bucket's texts have `counts` targets each, and its rows `length` tokens;
  if `masked`, every target is a row of the group, or else every text.
  """
  typical = max(1, round(sum(counts) / len(counts)))
  rows = max(1, batch_tokens // length)
  texts = -(-rows // typical) if masked else rows
  # At least `length` targets: those of any one text, which stay together.
  targets = max(rows if masked else rows * typical, length)
  # A bucket with little in it takes less; powers of two, to compile few sizes.
  return (
    min(texts, _power_of_two(len(counts))),
    max(length, min(targets, _power_of_two(sum(counts)))),
  )


def _power_of_two(n: int) -> int:
  return 1 << (n - 1).bit_length()


def _assemble(
  group: Sequence[Text], texts: int, targets: int, length: int
) -> tuple[np.ndarray, ...]:
  """Lays a group out as `_logprobs` takes it.

  The list of targets is filled up with the first text's second token, which
  is there to be predicted in any pass; what comes of it is dropped.
  """
  tokens = np.zeros((texts, length), np.int32)
  lengths = np.zeros(texts, np.int32)
  for row, text in enumerate(group):
    lengths[row] = len(text.tokens)
    tokens[row, : lengths[row]] = text.tokens
  owner = np.zeros(targets, np.int32)
  position = np.ones(targets, np.int32)
  found = np.concatenate([np.arange(t.start, t.stop) for t in group])
  owner[: len(found)] = np.repeat(
    np.arange(len(group)), [t.targets for t in group]
  )
  position[: len(found)] = found
  return tokens, lengths, owner, position


# ------------------------------------------------------------ on the device


def _logprobs(
  model: models.Model,
  wanted: tuple[Pass, ...],  # the passes whose logits are added
  params: models.Params,
  tokens: jax.Array,  # the texts, int32 `[S, T]`, padded at the right
  lengths: jax.Array,  # tokens of each text, int32 `[S]`
  owner: jax.Array,  # which text each target is of, int32 `[R]`
  position: jax.Array,  # the target's place in it, int32 `[R]`
  temperatures: jax.Array,  # float32 `[K]`
  mask_id: jax.Array,
) -> jax.Array:
  """Computes the log-probabilities of a group's targets, float32 `[R, K]`."""
  at = jnp.arange(tokens.shape[1])

  # A row of [T, V] logits would be the largest array by far: only the hidden
  # states of the targets, [R, D], go on to the vocabulary, and in chunks.
  def hidden(where: Pass) -> jax.Array:  # what predicts each target, [R, D]
    rows, mask, row = tokens, CAUSAL, owner
    if where.masked:
      rows = jnp.where(at == position[:, None], mask_id, tokens[owner])
      end = jnp.broadcast_to(lengths[owner][:, None], rows.shape)
      mask, row = AttentionMask(k_end=end), jnp.arange(len(rows))
    out = model.encode(params, rows, jnp.broadcast_to(at, rows.shape), mask)
    return out[row, position - where.shift]

  def logprobs(one):  # of one target: hidden [passes, D], and the token
    states, target = one
    scaled = model.logits(params, states).sum(axis=0) / temperatures[:, None]
    return scaled[:, target] - jax.nn.logsumexp(scaled, axis=-1)

  states = jnp.stack([hidden(where) for where in wanted], axis=1)
  targets = tokens[owner, position]
  out = jax.lax.map(logprobs, (states, targets), batch_size=_LOGIT_ROWS)
  # Every process of a run that is scored while it trains reads all of them.
  return sharding.constrain(out, None, None)
