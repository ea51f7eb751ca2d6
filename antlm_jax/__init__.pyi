"""The names that `antlm_jax` offers, for type checkers and `__getattr__`."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

from antlm_jax.attention import attend as attend
from antlm_jax.commands.export import export as export
from antlm_jax.commands.import_ import import_model as import_model
from antlm_jax.commands.plan import plan as plan
from antlm_jax.commands.prepare import prepare as prepare
from antlm_jax.commands.train import Data as _Data
from antlm_jax.commands.train import Trained as Trained
from antlm_jax.config import Config as Config
from antlm_jax.data.prepared_folder import PreparedData as PreparedData
from antlm_jax.errors import Stopped as Stopped
from antlm_jax.errors import UserError as UserError
from antlm_jax.evals.embed import embed as embed
from antlm_jax.evals.finetuning.sets import Records as _Records
from antlm_jax.evals.finetuning.summary import FineTuning as FineTuning
from antlm_jax.evals.predict import predict as predict
from antlm_jax.evals.studies.compare import compare as compare
from antlm_jax.evals.studies.sweep import sweep as sweep
from antlm_jax.evals.zero_shot.perplexity import perplexity as perplexity
from antlm_jax.evals.zero_shot.task import ZeroShotResult as _ZeroShotResult
from antlm_jax.hf.export import Exported as Exported
from antlm_jax.inference.filling import fill as fill
from antlm_jax.inference.generation import generate as generate
from antlm_jax.inference.model import Loaded as Loaded
from antlm_jax.inference.model import load as load
from antlm_jax.inference.scoring import score as score
from antlm_jax.masks import AttentionMask as AttentionMask
from antlm_jax.mesh import Mesh as Mesh
from antlm_jax.models import EncoderConfig as _EncoderConfig
from antlm_jax.models.bert import BertConfig as BertConfig
from antlm_jax.models.gemma import GemmaConfig as GemmaConfig
from antlm_jax.models.llama import LlamaConfig as LlamaConfig
from antlm_jax.models.ltg_bert import LtgBertConfig as LtgBertConfig
from antlm_jax.models.modernbert import ModernBertConfig as ModernBertConfig
from antlm_jax.models.ultrabert import UltraBertConfig as UltraBertConfig
from antlm_jax.objectives.objective import Objective as Objective
from antlm_jax.optim import WSD as WSD
from antlm_jax.optim import AdamW as AdamW
from antlm_jax.optim import Cosine as Cosine
from antlm_jax.optim import Lamb as Lamb
from antlm_jax.optim import Muon as Muon
from antlm_jax.optim import Optimizer as _Optimizer
from antlm_jax.optim import Schedule as _Schedule
from antlm_jax.page.history import History as History
from antlm_jax.sections import Data as Data
from antlm_jax.sections import Eval as Eval
from antlm_jax.sections import Init as Init
from antlm_jax.sections import Log as Log
from antlm_jax.sections import Saving as Saving
from antlm_jax.sections import Train as Train
from antlm_jax.training.hooks import Evaluator as Evaluator
from antlm_jax.training.hooks import Hook as Hook

if not TYPE_CHECKING:
  from antlm_jax.commands.train import train as train
  from antlm_jax.evals.finetune import finetune as finetune
  from antlm_jax.evals.score import evaluate as evaluate

__version__: str

_Path = str | os.PathLike[str]

# Functions that take settings by name. The first signature of each knows the
# settings of this library. The second is for a mapping of whole keys, such as
# `**{"eval.every": 100}`, and for the parts of plugins: its `whole_keys` stands
# for the mapping.

class _RunSettings(TypedDict, total=False):
  adam_rate: float
  at: int | Sequence[int]
  attention_dropout: float
  attention_gate: bool
  average: str
  b1: float
  b2: float
  batch_schedule: str | Sequence[str]
  batch_size: int
  batch_start: float
  checkpoint: Saving
  clip: float
  cooldown_steps: float
  curriculum: str
  decay: str
  decay_scope: str
  decay_steps: float
  depth_weights: bool
  dropout: float
  dtype: str
  ema: float
  epochs: float
  eps: float
  eval: Eval
  first_position: int
  framed: bool
  fsdp: int
  fused_layers: bool
  head_mlp_width: int
  head_width: int
  heads: int
  init: Init
  init_std: float
  keep_every: int
  keep_last: int
  kv_heads: int
  layers: int
  log: Log
  longest_distance: int
  loss_average: str
  loss_chunk: int
  max_epochs: float
  max_seq_len: int
  mesh: Mesh
  microbatches: int
  min_lr_ratio: float
  mix: str
  mlp_width: int
  model: str | _EncoderConfig
  momentum: float
  norm_eps: float
  optimizer: str | _Optimizer
  pairs: str
  path: str
  patience: int
  peak_lr: float
  position_buckets: int
  qk_norm: bool
  qkv_bias: bool
  query_scalar: int
  random_offset: bool
  remat: str
  reset_at_switch: bool
  restart_at_switch: bool
  rope_scaling: float | Sequence[float]
  rope_theta: float
  rounding: str
  rows: int
  scan_layers: str
  schedule: str | _Schedule
  seed: int
  short: float
  shuffle: bool
  shuffle_block: int
  step: str
  steps: int
  tensor: int
  threads: int
  tied: bool
  token_types: int
  trace: str
  train: Train
  warmup_steps: float
  watch: str | Sequence[str]
  weight_decay: float
  weights: str
  width: int
  window_rope_theta: float
  windows: int | Sequence[int]
  words: str | Sequence[str]
  writers: str | Sequence[str]
  z_loss: float

@overload
def train(
  config: _Path | Config,
  workdir: _Path | None = None,
  data: _Data | Mapping[str, _Data] | None = None,
  *,
  hooks: Sequence[Hook] = (),
  quiet: bool = False,
  command: str = "",
  **settings: Unpack[_RunSettings],
) -> Trained: ...
@overload
def train(
  config: _Path | Config,
  workdir: _Path | None = None,
  data: _Data | Mapping[str, _Data] | None = None,
  /,
  *,
  whole_keys: object,
  **settings: object,
) -> Trained: ...

class _TuningSettings(TypedDict, total=False):
  answers: str
  attention: str
  b1: float
  b2: float
  batch_size: int
  clip: float
  decay: str
  decay_scope: str
  document_prompt: str
  drop_last: bool
  dropout: float
  encoder_dropout: float | None
  epochs: int
  eps: float
  floor: float
  freeze: bool
  head: str | None
  label_column: str | Sequence[str]
  labels: str | Sequence[str]
  limit: int
  longest: int
  lrs: float | Sequence[float]
  max_length: int
  negative_column: str | Sequence[str]
  null_score: float
  patience: int
  pool: str | None
  positive_column: str
  query_column: str
  query_prompt: str
  rows_at_once: int
  runs_at_once: int
  seeds: int | Sequence[int]
  steps: int
  stride: int
  tags_column: str
  temperature: float
  text_column: str | Sequence[str]
  threshold: float
  tokens_column: str
  warmup: float
  weight_decay: float
  weights: str

@overload
def finetune(
  model: Loaded | _Path,
  data: _Path | _Records,
  *,
  preset: Literal[
    "2024",
    "2026",
    "superglue",
    "classification",
    "regression",
    "tagging",
    "answering",
    "retrieval",
    "pairs",
    "simcse",
    "study",
  ] = "classification",
  task: str = "all",
  output: _Path | None = None,
  save: bool = False,
  overwrite: bool = False,
  step: int | None = None,
  quiet: bool = False,
  **settings: Unpack[_TuningSettings],
) -> FineTuning: ...
@overload
def finetune(
  model: Loaded | _Path,
  data: _Path | _Records,
  /,
  *,
  whole_keys: object,
  **settings: object,
) -> FineTuning: ...

class _TaskSettings(TypedDict, total=False):
  batch_tokens: int
  column: str
  documents: str
  limit: int
  pipeline: str
  reduction: str | None
  split: str
  stride: int
  temperature: float
  unfiltered: bool
  window: int

@overload
def evaluate(
  model: Loaded | _Path,
  task: Literal[
    "perplexity",
    "aoa",
    "blimp",
    "comps",
    "entity_tracking",
    "global_piqa",
    "ewok",
    "lambada",
    "reading",
  ],
  data: _Path,
  *,
  mode: str | None = None,
  output: _Path | None = None,
  overwrite: bool = False,
  step: int | None = None,
  quiet: bool = False,
  **settings: Unpack[_TaskSettings],
) -> _ZeroShotResult: ...
@overload
def evaluate(
  model: Loaded | _Path,
  task: str,
  data: _Path,
  /,
  *,
  whole_keys: object,
  **settings: object,
) -> _ZeroShotResult: ...
