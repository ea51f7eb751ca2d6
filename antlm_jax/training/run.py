"""A run: everything that training needs, built and checked from its config."""

import bisect
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from antlm_jax import config as config_lib
from antlm_jax import models, units
from antlm_jax.data import order as order_lib
from antlm_jax.data import packing
from antlm_jax.data.order import Order, Part
from antlm_jax.data.prepared_folder import Sources
from antlm_jax.data.source import Source
from antlm_jax.data.tokenizer import MASK, Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum as curriculum_lib
from antlm_jax.objectives.batch import Batch, Layout
from antlm_jax.objectives.corruption import Vocabulary
from antlm_jax.objectives.curriculum import Curriculum
from antlm_jax.objectives.objective import Objective
from antlm_jax.runtime import sharding
from antlm_jax.training import checkpoint, optim
from antlm_jax.training.checkpoint import Meta, Start
from antlm_jax.training.step import TrainStep

# BabyLM's checkpoints, in words of text seen: every million up to 10M, every
# ten up to 100M, every hundred up to a billion (its guidelines of 2025).
BABYLM = "babylm"
_OF_BABYLM = [
  count * unit * 1e6 for unit in (1, 10, 100) for count in range(1, 10)
] + [1e9]
# The end of a run stands for so much more than it sees: of 10M words some are
# held out, and ten epochs of the rest are to give chck_100M.
_ABOUT = 1.05
_COUNTED = 1 << 16  # rows whose tokens say how frequent each is
# What finds a model by its name, such as `checkpoint.start`.
Opened = Callable[[str], Start]


@dataclasses.dataclass(frozen=True)
class Program:
  """A step that a run compiles, for one kind of batch."""

  name: str  # the objectives of the batch
  steps: int  # how many of the run's steps are of it; 0 for an evaluation
  batch: Batch  # this process's part of it


@dataclasses.dataclass(frozen=True)
class Run:
  """The parts of a run."""

  config: ConfigDict  # resolved
  sources: Sources  # the prepared data
  objectives: dict[str, Objective]  # by name in the curriculum
  curriculum: Curriculum
  order: Order
  mesh: jax.sharding.Mesh
  step: TrainStep
  opened: Opened = checkpoint.start  # of what init.checkpoint names

  @functools.cached_property
  def start(self) -> Start:
    """What it begins from, where init.checkpoint says so."""
    return self.opened(self.config.init.checkpoint)

  @property
  def model(self) -> models.Model:
    """The encoder."""
    return self.step.model

  @property
  def tokenizer(self) -> Tokenizer:
    """That of its data."""
    return self.sources.tokenizer

  @property
  def switches(self) -> tuple[int, ...]:
    """The steps at which objectives or sources of data change."""
    mix = self.order.mix
    more = mix.switches if mix else ()
    return tuple(sorted({*self.curriculum.switches, *more}))

  @property
  def meta(self) -> Meta:
    """What its checkpoints say beside their arrays."""
    data = self.sources
    return Meta(
      self.config,
      data.tokenizer,
      data.boundary,
      data.sha256,
      milestones=self.milestones,
      row_tokens=data.rows.seq_len * self.order.joined,
    )

  @property
  def epochs(self) -> float:
    """How often the run takes each of its rows."""
    return self.curriculum.steps / self.order.steps_per_epoch

  def is_over(self, epochs: float) -> bool:
    """Whether the run has more epochs than these."""
    # Phases end at whole steps, so the last step may be partly over it.
    return self.curriculum.steps - 1 >= epochs * self.order.steps_per_epoch

  def words(self, step: int) -> float:
    """Returns how many words of text, repeated or not, `step` steps see."""
    # Rows count by their mean number: an epoch has the words of its text.
    taken = self.order.taken(step)
    return sum(taken[name] * of for name, of in self.sources.words.items())

  @functools.cached_property
  def milestones(self) -> dict[str, int]:
    """The steps of `checkpoint.words`, by BabyLM's name, such as chck_1M.

    Raises:
      UserError: for what is no number of words, or more than the run sees.
    """
    out, steps = {}, self.curriculum.steps
    most = self.words(steps) * _ABOUT
    for text in self.config.checkpoint.words:
      for words in _words(text):
        if words <= most:
          step = bisect.bisect_left(range(steps), words, key=self.words)
          out[f"chck_{words / 1e6:g}M"] = max(step, 1)
        elif text != BABYLM:
          raise UserError(
            f"checkpoint.words={text} is never reached: the run sees"
            f" {units.quantity(self.words(steps))} words"
          )
    return out

  def source(self) -> Source:
    """Returns the training steps as batches."""
    return self._source(
      self.sources.rows,
      self.order,
      self.curriculum,
      short=self.config.data.short,
      loss_average=self.config.train.loss_average,
      random_offset=self.config.data.random_offset,
    )

  def eval_sources(self) -> dict[str, dict[str, Source]]:
    """Returns the held-out batches, by objective's logged name and by set."""
    out = {}
    for name in self._evaluated() if self.config.eval.rows else ():
      # Masked as at the end of the run, where the share changes over it, and
      # frequent tokens as often as rare ones: losses of runs are comparable.
      objective = self.objectives[name]
      objective = dataclasses.replace(
        objective,
        mask_ratio=objective.ratio_at(1.0),
        mask_ratio_end=None,
        frequency_power=0.0,
      )
      out[objective.name] = {
        of: self._held_out(rows, name, objective)
        for of, rows in self.sources.held_out.items()
      }
    return out

  def _held_out(self, held_out, name: str, objective: Objective) -> Source:
    """Returns some of the held-out rows, for an objective alone."""
    first = self.order.parts[0].layout
    rows = min(self.config.eval.rows, len(held_out))
    # As large as what a step computes at once, which fits in memory, and in
    # parts for all data shards.
    size = min(rows, first.batch_size // first.microbatches)
    size = -(-size // first.shards) * first.shards
    layout = dataclasses.replace(first, batch_size=size, microbatches=1)
    # Shuffled, so that a part of them is a sample of the whole.
    order = Order({"": len(held_out)}, (Part(0.0, layout),), rounding="up")
    alone = curriculum_lib.parse(name, [name], 1, -(-rows // size))
    source = self._source(held_out, order, alone)
    return dataclasses.replace(source, limit=rows, objectives={name: objective})

  @functools.cached_property
  def attention(self) -> dict[str, str]:
    """What computes attention, by the objectives of a batch.

    Raises:
      UserError: if what model.attention asks for cannot.
    """
    # A batch of every kind is made: that tells before the first step what an
    # implementation does not do, rather than at step 10,000.
    return {p.name: self.attention_of(p.batch) for p in self.programs()}

  def programs(self, evaluations: bool = True) -> list[Program]:
    """Returns the steps that it compiles, each with a batch of its kind."""
    source, out = self.source(), {}
    # The kind of batch changes where the curriculum or the rows' layout does.
    starts = {phase.start for phase in self.curriculum.phases}
    starts = sorted(starts | {*self.order.starts})
    ends = [*starts[1:], self.curriculum.steps]
    for start, end in zip(starts, ends, strict=True):
      name = str(self.curriculum.at(start))
      joined = self.order.at(start).joined
      if joined > 1:
        name += f" of {joined * self.sources.rows.seq_len}"
      # Objectives that come again are one program, which trains more steps.
      known = out.get(name) or Program(name, 0, source[start])
      out[name] = dataclasses.replace(known, steps=known.steps + end - start)
    if evaluations:
      for name, sets in self.eval_sources().items():
        first = next(iter(sets.values()))  # others' batches are like it
        out[f"eval {name}"] = Program(f"eval {name}", 0, first[0])
    return list(out.values())

  def attention_of(self, batch: Batch) -> str:
    """Names what computes a batch's attention.

    Raises:
      UserError: if what model.attention asks for cannot.
    """
    try:
      with jax.set_mesh(self.mesh):
        shapes = sharding.abstract(self.mesh, batch)
        return self.model.attention_of(shapes.inputs, shapes.mask)
    except ValueError as error:
      raise UserError(f"model.{error}") from error

  def unigram_entropy(self) -> float:
    """Entropy of the held-out tokens, in nats: what frequencies alone give.

    Special tokens are left out.
    """
    own = [self.sources.held_out[name] for name in self.sources.train]
    counts = sum(self._counts(rows) for rows in own)
    # They stand where packing puts them, and nothing predicts them.
    counts[self.tokenizer.special] = 0
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())

  def _counts(self, rows) -> np.ndarray:
    """Counts the tokens of rows, of many by a sample, float64 `[V]`."""
    # Evenly spread: what is in them never changes.
    some = np.linspace(0, len(rows) - 1, min(len(rows), _COUNTED)).astype(int)
    counts = np.zeros(self.tokenizer.vocab_size)
    for start in range(0, len(some), 4096):
      tokens, _ = rows.read(some[start : start + 4096])
      counts += np.bincount(tokens.reshape(-1), minlength=len(counts))
    return counts

  @functools.cached_property
  def _vocabulary(self) -> Vocabulary:
    """What the objectives need to know of the tokenizer, and of its use."""
    trained = [self.objectives[name] for name in self.curriculum.objectives]
    rank = None
    if any(objective.frequency_power for objective in trained):
      often = np.argsort(-self._counts(self.sources.rows), kind="stable")
      rank = np.argsort(often) / len(often)
    of = self.tokenizer
    ids = of.mask_id, of.pad_id, of.eos_id
    return Vocabulary(*ids, of.special, of.word_start, rank)

  def _evaluated(self) -> list[str]:
    names = self.config.eval.objectives
    if unknown := sorted({*names} - {*self.objectives}):
      raise UserError(
        f"eval.objectives: unknown {', '.join(unknown)}; known:"
        f" {', '.join(self.objectives)}"
      )
    masked = self.tokenizer.mask_id is not None
    return [
      n for n in names if masked or not self.objectives[n].needs_mask_token
    ]

  def _source(self, rows, order, curriculum, **options) -> Source:
    return Source(
      rows=rows,
      order=order,
      curriculum=curriculum,
      objectives=self.objectives,
      vocabulary=self._vocabulary,
      seed=self.config.seed,
      frame=self._frame() if self.config.data.framed else None,
      **options,
    )

  def _frame(self) -> tuple[int, int | None]:
    """Returns the ids that stand before and after documents."""
    boundary = self.sources.boundary
    before, after = packing.boundary_ids(self.tokenizer, boundary)
    if before is None:
      raise UserError(
        f"data.framed needs rows of --boundary=bos or bos_eos, not {boundary}"
        f" as those of {self.config.data.path}"
      )
    return before, after


def _words(text: str) -> Sequence[float]:
  if text == BABYLM:
    return _OF_BABYLM
  with contextlib.suppress(ValueError):
    if 0 < (words := units.number(text)) < math.inf:
      return [words]
  raise UserError(
    f"checkpoint.words={text!a} is no number of words, such as 1M, nor {BABYLM}"
  )


def build(config: ConfigDict, opened: Opened = checkpoint.start) -> Run:
  """Builds a run, whose init.checkpoint is opened so.

  Raises:
    UserError: for settings, data and devices that do not fit together.
  """
  config_lib.check(config)  # it may be made in Python, not loaded from a file
  run = assemble(config, read_data(config), opened=opened)
  # These raise now what is wrong with them.
  _ = run.attention, run.milestones
  most = config.train.max_epochs
  if most and run.is_over(most):
    raise UserError(
      f"the curriculum takes {run.epochs:.4g} epochs of the data, over"
      f" train.max_epochs={most:g}: shorten it, or write its counts as shares"
      f" (such as 20%C+80%M) of train.epochs={most:g}"
    )
  _check_watch(run)
  return run


def _check_watch(run: Run) -> None:
  watch, known = run.config.eval.watch, []
  for name, sets in run.eval_sources().items():
    known += [name, *(f"{name}/{of}" for of in sets if len(sets) > 1 and of)]
  if unknown := [name for name in watch if name not in known]:
    raise UserError(
      f"eval.watch: {unknown[0]} is not measured; there are {', '.join(known)}"
    )
  if run.config.eval.patience and not watch:
    raise UserError(
      "eval.patience needs eval.watch, the held-out losses that are to get"
      f" better: one or more of {', '.join(known)}"
    )


def read_data(config: ConfigDict) -> Sources:
  """Opens the data of `data.path`, and of `eval.data`."""
  if not config.data.path:
    raise UserError(
      "data.path is not set: give --config.data.path=DIR, a folder made by"
      " `antlm prepare`"
    )
  return Sources.open(config.data.path, config.eval.data)


def assemble(
  config: ConfigDict,
  sources: Sources,
  devices: Sequence[jax.Device] | None = None,
  opened: Opened = checkpoint.start,
) -> Run:
  """Puts a run together of its config, its data, and devices, even absent ones.

  Raises:
    UserError: for settings, data and devices that do not fit together.
  """
  opened = functools.cache(opened)  # here for its mask, then by `Run.start`
  objectives = config_lib.objectives(config)
  tokenizer = _with_mask(config, objectives, sources.tokenizer, opened)
  sources = dataclasses.replace(sources, tokenizer=tokenizer)
  model = models.build(config.model, tokenizer.vocab_size)
  rows = sources.rows
  mesh = sharding.make_mesh(config.mesh, devices)
  layout = Layout(
    config.train.batch_size,
    config.train.microbatches,
    sharding.data_shards(mesh),
    sharding.local_shards(mesh),
  )
  parts = order_lib.parse(config.train.batch_schedule, layout, rows.seq_len)
  longest = rows.seq_len * max(part.joined for part in parts)
  if longest > model.config.max_seq_len:
    raise UserError(
      f"the rows of {config.data.path or 'the data'} have {longest} tokens,"
      f" over model.max_seq_len={model.config.max_seq_len}: prepare shorter"
      " rows, or raise it"
    )
  if rows.segmented and (config.data.random_offset or config.data.framed):
    raise UserError(
      "data.random_offset and data.framed are for rows of --packing=stream:"
      f" those of {config.data.path} are divided into segments"
    )
  order = Order(
    sources={name: len(of) for name, of in sources.train.items()},
    parts=parts,
    growth=config.train.batch_start,
    rounding=config.data.rounding,
    seed=config.seed,
    shuffle=config.data.shuffle,
  )
  curriculum = _curriculum(config, objectives, order.steps_per_epoch)
  return Run(
    config=config,
    sources=sources,
    objectives=objectives,
    curriculum=curriculum,
    order=dataclasses.replace(
      order,
      steps=curriculum.steps,
      mix=_mix(config, order, curriculum.steps),
    ),
    mesh=mesh,
    step=_step(config, model, curriculum),
    opened=opened,
  )


def _curriculum(config, objectives, steps_per_epoch: float) -> Curriculum:
  length = config.train.steps or round(config.train.epochs * steps_per_epoch)
  parsed = curriculum_lib.parse(
    config.curriculum, list(objectives), steps_per_epoch, length or None
  )
  if length and parsed.steps != length:
    raise UserError(
      f"curriculum {config.curriculum!r} is {parsed.steps} steps long, but"
      f" train.steps or train.epochs make it {length}: leave those at 0"
    )
  return parsed


def _with_mask(
  config, objectives, tokenizer: Tokenizer, opened: Opened
) -> Tokenizer:
  """Gives a tokenizer a mask if the curriculum, or the start, needs one."""
  if tokenizer.mask_id is not None:
    return tokenizer
  names = curriculum_lib.names(config.curriculum, objectives)
  needed = any(objectives[name].needs_mask_token for name in names)
  if config.init.checkpoint and not needed:
    begun = opened(config.init.checkpoint)
    needed = begun.meta.tokenizer.mask_id is not None
  return tokenizer.extended([MASK]) if needed else tokenizer


def _mix(config, order: Order, steps: int) -> Curriculum | None:
  text, sources = config.data.mix, list(order.sources)
  if not text:
    return None
  if sources == [""]:
    raise UserError(
      f"data.mix={text} has names of data, and data.path none: give"
      " --config.data.path=NAME=FOLDER,NAME=FOLDER"
    )
  mix = curriculum_lib.parse(
    text, sources, order.steps_per_epoch, steps, kind="source"
  )
  if mix.steps != steps:
    raise UserError(
      f"data.mix {text!r} is {mix.steps} steps long, but the run is {steps}:"
      " write shares of it, such as 75%a+25%b"
    )
  return mix


def _step(config, model, curriculum: Curriculum) -> TrainStep:
  restarts = curriculum.switches if config.schedule.restart_at_switch else ()
  return TrainStep(
    model=model,
    optimizer=optim.make(config.optimizer, model.axes, model.tensors),
    schedule=optim.schedule(config.schedule, curriculum.steps, restarts),
    num_objectives=len(curriculum.objectives),
    seed=config.seed,
    loss_chunk=config.train.loss_chunk,
    ema=config.optimizer.ema,
    loss_average=config.train.loss_average,
    z_loss=config.train.z_loss,
    growing=config.train.batch_start < 1,
  )
