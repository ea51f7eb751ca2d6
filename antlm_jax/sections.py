"""Sections of the configuration that belong to the run itself.

Encoders, objectives, optimizers, schedules and the mesh have theirs in their
own files.
"""

import dataclasses
import os

from antlm_jax.data import order
from antlm_jax.objectives import batch
from antlm_jax.objectives.curriculum import amount_setting
from antlm_jax.settings import Section, setting


@dataclasses.dataclass(frozen=True)
class Data(Section):
  """Rows and their order."""

  group = "data"

  path: str = setting(
    "", "Path to a prepared folder, or NAME=FOLDER,NAME=FOLDER"
  )
  mix: str = setting("", "Curriculum of data by name, e.g. 90%a+10%a:b=1:3")
  rounding: str = setting(
    "carry",
    "Batch at an epoch's end: continue with the next epoch (carry), repeat rows"
    " (up) or drop rows (down)",
    choices=order.ROUNDING,
  )
  shuffle: bool = setting(True, "Shuffle the rows in every epoch")
  shuffle_block: int = setting(
    1,
    "Number of neighbouring rows to shuffle as a block, which a bucket gives in"
    " one request; 64 suits pods",
    least=1,
  )
  short: float = setting(
    0.0, "Share of the rows to cut at random lengths", least=0, most=1
  )
  random_offset: bool = setting(False, "Cut a stream anew in each epoch")
  framed: bool = setting(False, "Put boundary tokens around a stream's rows")
  threads: int = setting(
    2, "Number of threads that build batches", least=1, most=1024
  )


@dataclasses.dataclass(frozen=True)
class Train(Section):
  """Batches and the run's length."""

  group = "train"

  batch_size: int = setting(
    128,
    "Number of rows in a step, over all devices",
    least=1,
    most=batch.MOST_ROWS,
  )
  # ("64x128@0.5", "32x512@0.9"): 64 rows of 128 tokens from half of the run on,
  # then 32 rows of 512. "32x512@0.9:base=40000" also changes RoPE's base.
  batch_schedule: tuple[str, ...] = setting(
    (),
    "Later batches, ROWSxTOKENS@SHARE[:base=BASE]: shape, part of the run after"
    " which it begins, and RoPE base",
  )
  batch_start: float = setting(
    1.0, "Filled share of the first batch; grows linearly to 1", over=0, most=1
  )
  microbatches: int = setting(
    1, "Number of parts of a batch, computed in turn to save memory", least=1
  )
  # A curriculum without a length of its own needs one of the two.
  epochs: float = setting(0.0, "Number of epochs of the run", least=0, most=1e6)
  steps: int = setting(0, "Number of steps of the run", least=0)
  max_epochs: float = setting(
    0.0,
    "Largest number of epochs of a text, e.g. 10 for BabyLM; 0 for any",
    least=0,
  )
  loss_average: str = setting(
    "targets",
    "Average the loss over all targets, or first within each objective",
    choices=("targets", "objectives"),
  )
  z_loss: float = setting(
    0.0, "Weight of the z-loss, the squared log-partition", least=0
  )
  loss_chunk: int = setting(
    0,
    "Number of targets whose logits are in memory at once; 0 chooses by the"
    " device (a fused kernel on TPU, 256 on CPU, up to 2 GiB on GPU)",
    least=0,
  )


@dataclasses.dataclass(frozen=True)
class Eval(Section):
  """Measures during training."""

  group = "eval"

  every: float | int = amount_setting(0.05, "Time between two evaluations")
  rows: int = setting(
    512, "Largest number of held-out rows of each set", least=0
  )
  data: str = setting("", "Further held-out sets, NAME=FOLDER,...")
  objectives: tuple[str, ...] = setting(
    ("C", "M"), "Objectives whose held-out loss is measured"
  )
  pairs: str = setting("", "Path to a folder of minimal pairs to score")
  watch: tuple[str, ...] = setting(
    (),
    "Held-out losses, e.g. clm,mlm, whose lowest sum chooses the step to keep"
    " (on half of the held-out rows)",
  )
  patience: int = setting(
    0,
    "Number of evaluations without a lower sum of eval.watch that end the run;"
    " 0 for never",
    least=0,
  )


@dataclasses.dataclass(frozen=True)
class Saving(Section):
  """Steps that are saved and kept."""

  group = "checkpoint"

  every: float | int = amount_setting(0.1, "Time between two saves")
  keep_last: int = setting(2, "Number of newest checkpoints kept", least=1)
  keep_every: int = setting(
    0, "Save and keep multiples of this step; 0 for none", least=0
  )
  at: tuple[int, ...] = setting((), "Further steps to save and keep", least=1)
  words: tuple[str, ...] = setting(
    (), "Save and keep after this many words, e.g. 1M,10M, or babylm"
  )


@dataclasses.dataclass(frozen=True)
class Log(Section):
  """Logging."""

  group = "log"

  every: int = setting(20, "Number of steps between two log lines", least=1)
  # A run checks the names of both: its model loads without their plugins.
  writers: tuple[str, ...] = setting(
    ("tensorboard", "csv"),
    "Formats of copies of metrics.jsonl: tensorboard, csv, wandb or a plugin's",
  )
  hooks: tuple[str, ...] = setting((), "Names of registered hooks to add")
  trace: str = setting("", "Profile steps FIRST:LAST into WORKDIR/trace")


@dataclasses.dataclass(frozen=True)
class Init(Section):
  """Start of a run."""

  group = "init"

  checkpoint: str = setting("", "Run, checkpoint or model to start from")
  optimizer: str = setting(
    "keep", "Optimizer state of init.checkpoint", choices=("keep", "reset")
  )
  step: str = setting(
    "keep", "Step number of init.checkpoint", choices=("keep", "reset")
  )
  weights: str = setting(
    "evaluated",
    "Weights of init.checkpoint: those it evaluated, which may be an average,"
    " or those of its last step",
    choices=("evaluated", "last"),
  )

  def __post_init__(self):
    super().__post_init__()
    # A resumed run may start in another folder.
    if os.path.exists(self.checkpoint):
      path = os.path.abspath(self.checkpoint)
      object.__setattr__(self, "checkpoint", path)
