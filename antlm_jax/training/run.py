"""Experiment: builds the parts of a run from its configuration."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import jax

from antlm_jax import mesh as mesh_lib
from antlm_jax import models
from antlm_jax.config import Config
from antlm_jax.data import order as order_lib
from antlm_jax.data import packing
from antlm_jax.data.order import Order
from antlm_jax.data.prepared_folder import PreparedData, Sources
from antlm_jax.data.source import BatchSource
from antlm_jax.data.tokenizer import MASK, Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum as curriculum_lib
from antlm_jax.objectives.batch import Batch, BatchLayout
from antlm_jax.objectives.corruption import Vocabulary
from antlm_jax.objectives.curriculum import Curriculum
from antlm_jax.runtime import progress
from antlm_jax.training import frequencies, held_out, milestones
from antlm_jax.training.checkpoint import Checkpoint, Meta
from antlm_jax.training.step import TrainStep
from antlm_jax.units import quantity


@dataclasses.dataclass(frozen=True)
class BatchKind:
  """A kind of batch: a run compiles one step for it."""

  name: str  # the objectives of the batch
  steps: int  # number of the run's steps that it trains; 0 for an evaluation
  batch: Batch  # this process's part of one whole batch
  # Number of whole batches with as many microbatches as these steps compute.
  # It is less than `steps` while batches grow (`train.batch_start`).
  batches: float = 0.0


@dataclasses.dataclass(frozen=True)
class Run:
  """The parts of a run."""

  config: Config  # resolved
  sources: Sources  # the prepared data
  tokenizer: Tokenizer  # the data's, with a mask if the run needs it
  curriculum: Curriculum
  order: Order
  mesh: jax.sharding.Mesh
  step: TrainStep
  batches: BatchSource  # those to train on
  # Held-out rows by objective and set: `held_out.held_out_sources`.
  evaluations: Mapping[str, Mapping[str, BatchSource]]
  start: Checkpoint | None  # the model of init.checkpoint
  # `build_run` adds these:
  attention: Mapping[str, str] = dataclasses.field(default_factory=dict)
  milestones: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def model(self) -> models.Model:
    """The encoder."""
    return self.step.model

  @property
  def switches(self) -> tuple[int, ...]:
    """The steps at which objectives or sources of data change."""
    mix = self.order.mix.switches if self.order.mix else ()
    return tuple(sorted({*self.curriculum.switches, *mix}))

  @property
  def meta(self) -> Meta:
    """The metadata of its checkpoints."""
    return Meta(
      self.config,
      self.tokenizer,
      self.sources.boundary,
      self.sources.sha256,
      held_out=self.sources.held_out_sha256,
      milestones=self.milestones,
    )

  def context_after(self, steps: int) -> dict[str, float | None]:
    """Returns the longest row and RoPE's last base after some steps.

    They are fields of the checkpoint's metadata.
    """
    last = self.order.stage_at(max(0, steps - 1))
    stages = [s for s in self.order.stages if s.begin <= last.begin]
    longest = max(stage.joined for stage in stages) * self.sources.rows.seq_len
    return {"row_tokens": longest, "rope_theta": last.base}

  @property
  def epochs(self) -> float:
    """How often the run reads its rows, on average."""
    return self.curriculum.steps / self.order.steps_per_epoch

  @property
  def most_epochs(self) -> float:
    """How often the run reads the source that it reads most often."""
    return max(self.order.epochs(self.curriculum.steps).values())

  def exceeds(self, epochs: float) -> str:
    """Names the data that the run reads more often than `epochs`, or "".

    The name is such as `the data`, or `the data 'english'` of several sources.
    """
    # Phases end at whole steps, so the last step may be partly over it.
    read = self.order.epochs(self.curriculum.steps - 1)
    name = max(read, key=read.get)
    if read[name] < epochs:
      return ""
    return f"the data {name!r}" if len(read) > 1 else "the data"

  def spans(self) -> Iterator[tuple[int, int, BatchSource]]:
    """Yields parts of the run with one curriculum phase and layout of rows.

    Each has its first step, the step after its last, and a source whose batches
    of these steps are whole: they do not grow.
    """
    order = dataclasses.replace(self.order, growth=1.0)
    full_batches = dataclasses.replace(self.batches, order=order)
    phases = {phase.start for phase in self.curriculum.phases}
    starts = sorted(phases | {*self.order.starts})
    for start, stop in itertools.pairwise([*starts, self.curriculum.steps]):
      yield start, stop, full_batches

  def tokens(self, step: int) -> int:
    """Returns how many tokens, repeated or not, `step` steps see."""
    return sum(self.order.rows_read(step).values()) * self.sources.rows.seq_len

  def words(self, step: int) -> float:
    """Returns how many words of text, repeated or not, `step` steps see."""
    # Rows count by their mean number: an epoch has the words of its text.
    rows_read = self.order.rows_read(step)
    words = self.sources.words.items()  # of a row, on average
    return sum(rows_read[name] * mean for name, mean in words)

  def unigram_entropy(self) -> float:
    """Returns the unigram entropy of its data's held-out tokens, in nats."""
    held_out_sets = (self.sources.held_out[name] for name in self.sources.train)
    return frequencies.entropy(held_out_sets, self.tokenizer.special)

  def batch_kinds(self, evaluations: bool = True) -> list[BatchKind]:
    """Returns the steps that the run compiles, each with one of its batches."""
    out = {}
    first = self.order.stages[0].layout.batch_size
    for start, stop, source in self.spans():
      name = str(self.curriculum.at(start))
      part = self.order.stage_at(start)
      if part.joined > 1:
        name += f" of {part.joined * self.sources.rows.seq_len}"
      if (size := part.layout.batch_size) != first:
        name += f", {size} rows"
      if part.base:
        name += f", RoPE's base {part.base:g}"
      # Phases with the same objectives share a program.
      kind = out.get(name) or BatchKind(name, 0, source[start])
      batches = float(stop - start)
      if part.layout.microbatches > 1:  # empty microbatches take no time
        batches = self.order.slots_between(start, stop) / size
      out[name] = dataclasses.replace(
        kind, steps=kind.steps + stop - start, batches=kind.batches + batches
      )
    for name, sets in self.evaluations.items() if evaluations else ():
      first, *_ = sets.values()  # the batches of other sets have its shapes
      out[f"eval {name}"] = BatchKind(f"eval {name}", 0, first[0])
    return list(out.values())

  def attention_of(self, batch: Batch) -> Sequence[str]:
    """Returns the names of `Model.attention_of` for a batch.

    Raises a UserError if the backend of model.attention cannot compute it.
    """
    try:
      with jax.set_mesh(self.mesh):
        shapes = mesh_lib.abstract(self.mesh, batch)
        return self.model.attention_of(shapes.inputs, shapes.mask)
    except ValueError as error:
      raise UserError(f"model.{error}") from error


def build_run(
  config: Config,
  start: Checkpoint | None = None,
  data: Mapping[str, PreparedData] | None = None,
) -> Run:
  """Builds a run and checks all that can be wrong before its first step.

  `start` is the model of `init.checkpoint`, if that is not a run's checkpoint.
  `data` by name replaces that of `data.path`.
  Raises a UserError if settings, data and devices do not fit together.
  """
  if config.init.checkpoint and start is None:
    start = Checkpoint(config.init.checkpoint)
  run = assemble_run(config, read_data(config, data), start=start)
  most = config.train.max_epochs
  if most and (repeated := run.exceeds(most)):
    raise UserError(
      f"the run takes {run.most_epochs:.4g} epochs of {repeated}, over"
      f" train.max_epochs={most:g}: shorten its curriculum, or write the counts"
      f" as shares (such as 20%C+80%M) of train.epochs={most:g}"
    )
  # One batch of each kind tells now, rather than at step 10,000, that an
  # implementation of attention cannot compute it.
  attention = {
    p.name: ", ".join(dict.fromkeys(run.attention_of(p.batch)))
    for p in run.batch_kinds()
  }
  steps = run.curriculum.steps
  late = [step for step in config.checkpoint.at if step > steps]
  if late:
    raise UserError(
      f"checkpoint.at={late[0]} is never reached: the run has {steps} steps"
    )
  words_of_steps = {}
  if words := config.checkpoint.words:
    words_of_steps = milestones.find_milestones(words, run.words, steps)
    if not words_of_steps:
      words_seen = quantity(run.words(steps))
      progress.say(
        f"warning: checkpoint.words={','.join(words)} keeps no step: the run"
        f" sees {words_seen} words"
      )
  return dataclasses.replace(
    run, attention=attention, milestones=words_of_steps
  )


def read_data(
  config: Config, data: Mapping[str, PreparedData] | None = None
) -> Sources:
  """Opens the data of `data.path`, unless given, and of `eval.data`."""
  if data:
    return Sources.of(data, config.eval.data)
  return Sources.open(config.data.path, config.eval.data)


def assemble_run(
  config: Config,
  sources: Sources,
  devices: Sequence[jax.Device] | None = None,
  start: Checkpoint | None = None,
) -> Run:
  """Assembles a run from its config, data and devices, which may be absent.

  It opens `start` only to see whether the vocabulary needs `<mask>`. A plan has
  no `start`: such a token changes no plan.
  Raises a UserError if settings, data and devices do not fit together.
  """
  objectives = config.known_objectives
  mesh = config.mesh.build(devices)
  curriculum, order = _curriculum_and_order(config, sources, mesh)
  tokenizer = sources.tokenizer
  trained = [objectives[name] for name in curriculum.objectives]
  if tokenizer.mask_id is None and (
    any(objective.needs_mask_token for objective in trained)
    or (start and start.meta.tokenizer.mask_id is not None)
  ):
    tokenizer = tokenizer.extended([MASK])
  model = models.build_model(config.model, tokenizer.vocab_size)
  longest = sources.rows.seq_len * order.joined
  if longest > model.config.max_seq_len:
    raise UserError(
      f"the rows of {config.data.path or 'the data'} have {longest} tokens,"
      f" over model.max_seq_len={model.config.max_seq_len}: prepare shorter"
      " rows, or raise it"
    )
  if order.stages[-1].base and not hasattr(config.model, "rope_theta"):
    raise UserError(
      f"train.batch_schedule changes RoPE's base, but {config.model.name} has"
      " no RoPE: leave out :base="
    )
  batches = _training_batches(
    config, sources, tokenizer, objectives, curriculum, order
  )
  restarts = curriculum.switches if config.schedule.restart_at_switch else ()
  step = TrainStep(
    model=model,
    optimizer=config.optimizer.build(model.axes, model.tensors),
    schedule=config.schedule.build(curriculum.steps, restarts),
    num_objectives=len(curriculum.objectives),
    seed=config.seed,
    loss_chunk=config.train.loss_chunk,
    average_decay=config.optimizer.averaging(curriculum.steps),
    loss_average=config.train.loss_average,
    z_loss=config.train.z_loss,
    growing=config.train.batch_start < 1,
  )
  return Run(
    config=config,
    sources=sources,
    tokenizer=tokenizer,
    curriculum=curriculum,
    order=order,
    mesh=mesh,
    step=step,
    batches=batches,
    evaluations=held_out.held_out_sources(config, batches, sources.held_out),
    start=start,
  )


def _curriculum_and_order(
  config: Config, sources: Sources, mesh
) -> tuple[Curriculum, Order]:
  """Returns the objectives of each step, and the rows."""
  layout = BatchLayout(
    config.train.batch_size,
    config.train.microbatches,
    mesh_lib.data_shards(mesh),
    mesh_lib.local_shards(mesh),
  )
  seq_len = sources.rows.seq_len
  order = Order(
    sources={name: len(rows) for name, rows in sources.train.items()},
    stages=order_lib.parse_batch_schedule(
      config.train.batch_schedule, layout, seq_len
    ),
    growth=config.train.batch_start,
    rounding=config.data.rounding,
    seed=config.seed,
    shuffle=config.data.shuffle,
    row_block=config.data.shuffle_block,
  )
  per_epoch = order.steps_per_epoch
  train = config.train
  length = curriculum_lib.run_length(train.steps, train.epochs, per_epoch)
  curriculum = config.curriculum_for(per_epoch)
  steps = curriculum.steps
  mix = None
  if length and steps != length:
    raise UserError(
      f"curriculum {config.curriculum!r} is {steps} steps long, but train.steps"
      f" or train.epochs make it {length}: leave those at 0, or write"
      " --config.curriculum="
      f"'{curriculum_lib.scaled(curriculum.phases, length)}'"
    )
  if text := config.data.mix:
    names = list(order.sources)
    if names == [""]:
      raise UserError(
        f"data.mix={text} has names of data, and data.path none: give"
        " --config.data.path=NAME=FOLDER,NAME=FOLDER"
      )
    mix = curriculum_lib.parse_curriculum(
      text, names, per_epoch, steps, kind="source"
    )
    if mix.steps != steps:
      raise UserError(
        f"data.mix {text!r} is {mix.steps} steps long, but the run is {steps}:"
        " write shares of it, such as 75%a+25%b"
      )
  return curriculum, dataclasses.replace(order, steps=steps, mix=mix)


def _training_batches(
  config: Config, sources: Sources, tokenizer, objectives, curriculum, order
) -> BatchSource:
  """Returns the training batches."""
  names = curriculum.objectives if config.data.random_offset else ()
  for name in names:
    if objectives[name].choice == "covering":
      raise UserError(
        f"objectives.{name}.choice=covering masks a row's tokens in turn, but"
        " data.random_offset=True gives the row other tokens at each visit: set"
        " data.random_offset=False, or choice=exact"
      )
  of_stream = config.data.random_offset or config.data.framed
  if sources.rows.segmented and of_stream:
    raise UserError(
      "data.random_offset and data.framed are for rows of --packing=stream:"
      f" those of {config.data.path} are divided into segments"
    )
  frame = None
  if config.data.framed:
    frame = packing.boundary_ids(tokenizer, sources.boundary)
    if frame[0] is None:
      raise UserError(
        "data.framed needs rows of --boundary=bos or bos_eos, not"
        f" {sources.boundary} as those of {config.data.path}"
      )
  vocabulary = Vocabulary(
    tokenizer.mask_id,
    tokenizer.pad_id,
    tokenizer.eos_id,
    tokenizer.special,
    lambda: tokenizer.word_tokens,
  )
  if any(objective.unit == "word" for objective in objectives.values()):
    size = vocabulary.mean_word_size(frequencies.sample(sources.rows))
    vocabulary = dataclasses.replace(vocabulary, word_size=size)
  size = config.data.shuffle_block
  return BatchSource(
    rows=sources.rows.by_blocks(size, order.blocks_at_once),
    order=order,
    curriculum=curriculum,
    objectives=objectives,
    vocabulary=vocabulary,
    seed=config.seed,
    frame=frame,
    short=config.data.short,
    loss_average=config.train.loss_average,
    random_offset=config.data.random_offset,
  )
