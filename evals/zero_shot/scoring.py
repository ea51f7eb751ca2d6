"""Scores of sentences, or of what follows a context.

A *reading* says which output predicts a token: of a causal pass, or of a
bidirectional pass in which that token alone is masked; in place or one
position before. A mode is one reading, or two whose logits are added. A
*pipeline* says what stands around the scored tokens, and whether their
log-probabilities are summed or averaged.

Sentences are batched by length. A batch is a table of S sentences and a flat
list of R targets, each a (sentence, position); a causal reading encodes the
sentences, a masked one makes a row of every target. Logits are computed at
the targets alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import models
from antlm_jax.errors import UserError
from antlm_jax.inference import framing
from antlm_jax.masks import CAUSAL, AttentionMask
from antlm_jax.training.checkpoint import Loaded

MODES = ("causal", "mlm", "mntp", "fused")
REDUCTIONS = ("sum", "mean")
BATCH_TOKENS = 8192
_LENGTH_STEP = 8  # row lengths are multiples of it
_LOGIT_ROWS = 256  # targets whose logits are in memory at once

Array = np.ndarray | jax.Array


class Reading(NamedTuple):
  """Where the prediction of a token is read.

  Attributes:
    masked: In a bidirectional pass over the sentence with the token masked,
      or in a causal pass.
    shift: How many positions before the token.
  """

  masked: bool
  shift: int


@dataclasses.dataclass(frozen=True)
class Layout:
  """What stands around a scored text, and what its score is.

  Attributes:
    reduction: `sum` or `mean` over the scored tokens.
    framed: Whether the special tokens of training stand around it all.
    separator: Stands between a context and the text.
    no_context: The special token that takes the place of a context that is
      empty, the separator after it: `bos` (or else `eos`) or `eos`; with ""
      such a text stands alone.
  """

  reduction: str = "sum"
  framed: bool = True
  separator: str = " "
  no_context: str = ""


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """How an evaluation pipeline scores a text.

  Attributes:
    name: What commands call it.
    modes: The modes that it has.
    causal: The layout for the causal mode.
    masked: The layout for every other mode.
  """

  name: str
  modes: tuple[str, ...]
  causal: Layout
  masked: Layout

  def layout(self, mode: str) -> Layout:
    """Returns the layout for a mode.

    Raises:
      UserError: if the pipeline has no such mode.
    """
    if mode not in self.modes:
      where = f" of the {self.name} pipeline" if self.name != OURS.name else ""
      raise UserError(
        f"mode {mode!r} is not one of {', '.join(self.modes)}{where}"
      )
    return self.causal if mode == "causal" else self.masked


OURS = Pipeline("ours", MODES, causal=Layout(), masked=Layout())
PIPELINES = {
  pipeline.name: pipeline
  for pipeline in (
    OURS,
    # lm-eval's hf: no special token but one in place of an empty context.
    # minicons' conditional_score: a prefix that is never empty, and a space
    # of its own beside that of the choice.
    Pipeline(
      "2024",
      ("causal", "mlm"),
      causal=Layout(framed=False, no_context="bos"),
      masked=Layout("mean", separator="  ", no_context="eos"),
    ),
    Pipeline("2025", ("causal", "mlm", "mntp"), Layout(), Layout()),
  )
}


class Sentence(NamedTuple):
  """A text as it stands before the model.

  Attributes:
    tokens: int32 `[n]`, with what stands around it.
    start: First position that is scored.
    stop: One past the last.
  """

  tokens: np.ndarray
  start: int
  stop: int

  @property
  def targets(self) -> int:
    """Number of tokens that are scored."""
    return self.stop - self.start


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """Sentences of like length and the tokens to score, both padded.

  Attributes:
    tokens: int32 `[S, T]`, padded at the right.
    lengths: Tokens of each sentence, int32 `[S]`.
    sentence: Which sentence each target is of, int32 `[R]`.
    position: The target's place in it, int32 `[R]`.
  """

  tokens: Array
  lengths: Array
  sentence: Array
  position: Array


def readings(loaded: Loaded, mode: str) -> tuple[Reading, ...]:
  """Returns what a mode reads.

  `fused` adds the logits of a causal and a masked reading (GPT-BERT, arXiv
  2410.24159), the masked one as the model's curriculum trained it.
  """
  causal = Reading(masked=False, shift=1)
  return {
    "causal": (causal,),
    "mlm": (Reading(masked=True, shift=0),),
    "mntp": (Reading(masked=True, shift=1),),
    "fused": (causal, Reading(True, framing.mask_shift(loaded.config))),
  }[mode]


def score(
  loaded: Loaded,
  sentences: Sequence[str],
  mode: str,
  contexts: Sequence[str] | None = None,
  pipeline: Pipeline = OURS,
  reduction: str | None = None,
  temperature: float | Sequence[float] = 1.0,
  batch_tokens: int = BATCH_TOKENS,
  track: Callable[[Sequence], Iterable] = iter,
) -> np.ndarray:
  """Scores sentences; the higher, the likelier.

  By default a sentence stands in the special tokens that stood around
  documents in training. They are not scored, nor is its context, nor a token
  that nothing can predict: the first one, where it is read one position
  before and no prefix stands there. A token across the end of the context
  counts as the sentence's.

  Args:
    loaded: The model.
    sentences: n texts; equal ones are scored once.
    mode: `causal`, log-probabilities left to right; `mlm`, with one token
      masked at a time (pseudo-log-likelihood, arXiv 1910.14659); `mntp`, that
      read one position before; `fused`, see `readings`.
    contexts: n texts that the sentences follow, some or all of them empty.
    pipeline: What stands around them, and the reduction.
    reduction: `sum` or `mean` over the scored tokens, in the place of the
      pipeline's.
    temperature: Divides the logits. Several cost little more than one.
    batch_tokens: Tokens encoded at once; a sentence's targets stay together,
      so a long sentence may take more.
    track: Wraps the list of batches, as tqdm does, to show progress.

  Returns:
    float64 `[n]`, or `[n, K]` for K temperatures; in nats.

  Raises:
    UserError: for an unknown mode or reduction, a temperature that is not
      positive, a sentence that is too long or empty, or masks without a
      `<mask>` token.
  """
  layout = pipeline.layout(mode)
  reduction = reduction or layout.reduction
  if reduction not in REDUCTIONS:
    raise UserError(
      f"reduction {reduction!r} is not one of {', '.join(REDUCTIONS)}"
    )
  temperatures = np.atleast_1d(np.asarray(temperature, np.float32))
  if not np.all((temperatures > 0) & np.isfinite(temperatures)):
    raise UserError(f"temperature {temperature} is not positive")
  contexts = [""] * len(sentences) if contexts is None else contexts
  texts = list(zip(contexts, sentences, strict=True))
  unique = list(dict.fromkeys(texts))
  wanted = readings(loaded, mode)
  framed = _framed(loaded, unique, layout, wanted)
  totals = _totals(loaded, framed, wanted, temperatures, batch_tokens, track)
  if reduction == "mean":
    totals /= np.array([s.targets for s in framed])[:, None]
  index = {text: i for i, text in enumerate(unique)}
  scores = totals[[index[text] for text in texts]]
  return scores.reshape(len(texts), *np.shape(temperature))


def _framed(
  loaded: Loaded, texts: Sequence[tuple[str, str]], layout: Layout, wanted
) -> list[Sentence]:
  """Encodes and checks (context, sentence)s."""
  before, after = framing.frame(loaded)
  if not layout.framed:
    before = after = before[:0]
  alone = np.append(before, _stand_in(loaded, layout)).astype(np.int32)
  whole = [
    context + layout.separator * bool(context or layout.no_context) + sentence
    for context, sentence in texts
  ]
  encoded = loaded.tokenizer.encode_batch(whole)
  earliest = max(r.shift for r in wanted)
  out = []
  for (context, sentence), text, ids in zip(texts, whole, encoded, strict=True):
    head = before if context else alone
    tokens = np.concatenate([head, ids, after])
    framing.check_length(loaded, len(tokens), text)
    start = len(head) + _tokens_inside(loaded, text, len(context))
    start, stop = max(start, earliest), len(head) + len(ids)
    if stop <= start or not sentence.strip():
      raise UserError(f"the sentence {sentence!r} holds no token to score")
    out.append(Sentence(tokens, start, stop))
  return out


def _stand_in(loaded: Loaded, layout: Layout) -> list[int]:
  """Returns the token in the place of a context that is empty, if any."""
  if not layout.no_context:
    return []
  t = loaded.tokenizer
  ids = [t.eos_id] if layout.no_context == "eos" else [t.bos_id, t.eos_id]
  found = [i for i in ids if i is not None]
  if not found:
    raise UserError(
      f"the tokenizer of {loaded.path} has no token to stand for an empty"
      " context, as this pipeline needs: leave --pipeline out"
    )
  return found[:1]


def _tokens_inside(loaded: Loaded, text: str, stop: int) -> int:
  """Counts the tokens that end within the first `stop` characters."""
  if not stop:
    return 0
  _, spans = loaded.tokenizer.encode_offsets(text)
  return sum(end <= stop for _, end in spans)


def _totals(
  loaded, framed, wanted, temperatures, batch_tokens, track
) -> np.ndarray:
  """Sums log-probabilities of every sentence, float64 `[n, K]`."""
  masked = any(r.masked for r in wanted)
  mask_id = framing.mask_id(loaded) if masked else 0
  program = _program(loaded.model.config, wanted)
  totals = np.zeros((len(framed), len(temperatures)))
  groups = list(_groups(loaded, framed, masked, batch_tokens))
  for which, shape in track(groups):
    batch, owner = _assemble(framed, which, *shape)
    logprobs = program(loaded.params, batch, temperatures, mask_id)
    np.add.at(totals, owner, np.asarray(logprobs, np.float64)[: len(owner)])
  return totals


def _groups(
  loaded, framed: Sequence[Sentence], masked: bool, batch_tokens: int
) -> Iterator[tuple[list[int], tuple[int, int, int]]]:
  """Yields sentences that make a batch, and its (S, R, T)."""
  buckets: dict[int, list[int]] = {}
  longest = loaded.model.config.max_seq_len
  for i, sentence in enumerate(framed):
    length = framing.round_up(len(sentence.tokens), _LENGTH_STEP, longest)
    buckets.setdefault(length, []).append(i)
  for length, members in sorted(buckets.items()):
    counts = [framed[i].targets for i in members]
    shape = _shape(length, counts, masked, batch_tokens)
    for group in _packed(members, counts, *shape):
      yield group, (*shape, length)


def _shape(
  length: int, counts: Sequence[int], masked: bool, batch_tokens: int
) -> tuple[int, int]:
  """Returns how many sentences S and targets R a batch of a bucket holds.

  Both are the same for the whole bucket, so that little is compiled.
  """
  typical = max(1, round(sum(counts) / len(counts)))
  rows = max(1, batch_tokens // length)
  sentences = -(-rows // typical) if masked else rows
  targets = max(rows if masked else rows * typical, length)
  return (
    min(sentences, _power_of_two(len(counts))),
    max(length, min(targets, _power_of_two(sum(counts)))),
  )


def _power_of_two(n: int) -> int:
  return 1 << (n - 1).bit_length()


def _packed(
  members: Sequence[int], counts: Sequence[int], sentences: int, targets: int
) -> Iterator[list[int]]:
  """Cuts members into groups of at most so many sentences and targets."""
  group, held = [], 0
  for member, count in zip(members, counts, strict=True):
    if len(group) == sentences or held + count > targets:
      yield group
      group, held = [], 0
    group.append(member)
    held += count
  yield group


def _assemble(
  framed: Sequence[Sentence],
  which: Sequence[int],
  sentences: int,
  targets: int,
  length: int,
) -> tuple[Batch, np.ndarray]:
  """Makes a batch, and says which of `framed` each real target is of.

  The targets that fill it up are of its first sentence, and are dropped.
  """
  tokens = np.zeros((sentences, length), np.int32)
  lengths = np.zeros(sentences, np.int32)
  for row, i in enumerate(which):
    lengths[row] = len(framed[i].tokens)
    tokens[row, : lengths[row]] = framed[i].tokens
  counts = [framed[i].targets for i in which]
  real = sum(counts)
  sentence = np.zeros(targets, np.int32)
  position = np.ones(targets, np.int32)
  sentence[:real] = np.repeat(np.arange(len(which)), counts)
  position[:real] = np.concatenate(
    [np.arange(framed[i].start, framed[i].stop) for i in which]
  )
  batch = Batch(tokens, lengths, sentence, position)
  return batch, np.repeat(which, counts)


@functools.lru_cache(maxsize=16)
def _program(config, wanted: tuple[Reading, ...]):
  """Compiles log-probabilities of a batch's targets, float32 `[R, K]`."""
  model = models.from_config(config)

  def program(params, batch: Batch, temperatures, mask_id):
    hidden = jnp.stack(
      [_read(model, params, batch, r, mask_id) for r in wanted], axis=1
    )
    target = batch.tokens[batch.sentence, batch.position]

    def logprobs(row):  # one target: hidden [readings, D]
      hidden, target = row
      logits = model.logits(params, hidden).sum(axis=0)
      scaled = logits / temperatures[:, None]
      return scaled[:, target] - jax.nn.logsumexp(scaled, axis=-1)

    return jax.lax.map(logprobs, (hidden, target), batch_size=_LOGIT_ROWS)

  return jax.jit(program)


def _read(
  model: models.Model, params, batch: Batch, where: Reading, mask_id
) -> jax.Array:
  """Returns the hidden state that predicts each target, `[R, D]`."""
  tokens, mask, row = batch.tokens, CAUSAL, batch.sentence
  at = jnp.arange(tokens.shape[1])
  if where.masked:
    hidden_token = at == batch.position[:, None]
    tokens = jnp.where(hidden_token, mask_id, tokens[batch.sentence])
    end = batch.lengths[batch.sentence][:, None]
    mask = AttentionMask(k_end=jnp.broadcast_to(end, tokens.shape))
    row = jnp.arange(len(tokens))
  positions = jnp.broadcast_to(at, tokens.shape)
  hidden = model.encode(params, tokens, positions, mask)
  return hidden[row, batch.position - where.shift]
