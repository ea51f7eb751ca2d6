"""Train steps with AdamW, compared with torch and transformers.

Both are in float32 on a CPU. On a GPU, ours are in bfloat16, and theirs in
bfloat16 by autocast, compiled by torch.compile. Of packed rows, theirs are
padded: each document is a row, as long as the longest.
"""

import dataclasses
import pathlib

import jax
import numpy as np

from antlm_jax import mesh as mesh_lib
from antlm_jax.evals.benchmarks import common, turns
from antlm_jax.evals.benchmarks import train_step as steps
from antlm_jax.evals.benchmarks.beside import models
from antlm_jax.objectives.batch import Batch, BatchLayout
from antlm_jax.training.step import jitted, state_shardings


@dataclasses.dataclass(frozen=True)
class Training(turns.Work):
  """Train steps on the same batch."""

  kind = "train"
  unit = "tokens"

  batch: str  # key of `train_step.BATCHES`
  size: str
  rows: int
  length: int
  steps: int  # of a call
  dtype: str = "float32"

  def __str__(self) -> str:
    return f"train {self.batch} {self.size}, {self.rows} x {self.length}"

  @property
  def attention(self) -> str:
    """The attention of the exported model."""
    return "bidirectional" if self.batch == "mlm" else "causal"

  @property
  def tokens(self) -> int:
    """Number of tokens of a call, without padding."""
    return self.steps * self.rows * self.length

  def example(self) -> Batch:
    """Makes the batch."""
    layout = BatchLayout(self.rows)
    vocabulary = models.SIZES[self.size].vocab_size
    return steps.make_example(self.batch, layout, self.length, vocabulary)

  def tiny(self) -> "Training":
    return Training(self.batch, models.tiny(self.size), 4, 64, 2)

  def same(self, ours, theirs) -> bool:
    """Whether the first losses agree."""
    tolerance = {"float32": 1e-3, "bfloat16": 2e-2}[self.dtype]
    return abs(ours[0] / theirs[0] - 1) < tolerance


def ours(work: Training, folder: pathlib.Path) -> tuple[turns.Call, float]:
  """Prepares our steps; a call returns their losses."""
  loaded = models.make_benchmark_model(
    work.size,
    models.word_tokenizer(work.size),
    work.attention,
    folder,
    max_seq_len=work.length,
    dtype=work.dtype,
    init_std=0.02,
  )
  train_step = steps.make_step(loaded.model.config)
  mesh = common.mesh_of(jax.devices()[0])  # torch has one device, too
  with jax.set_mesh(mesh):
    init, step, _ = jitted(train_step, state_shardings(train_step, mesh))
    state = init()
    placed = mesh_lib.place_batch(mesh, work.example())
  # The step donates its state's memory.
  state = dataclasses.replace(state, params=loaded.params)

  def call():
    nonlocal state
    losses = []
    with jax.set_mesh(mesh):
      for _ in range(work.steps):
        state, metrics = step(state, placed)
        losses.append(metrics["total_loss"])
    return [float(x) for x in losses]

  return call, work.tokens


def theirs(work: Training, folder: pathlib.Path) -> tuple[turns.Call, float]:
  """Prepares the steps of transformers; a call returns their losses."""
  _, torch = models.torch_modules()
  model = models.in_transformers(work.attention, folder).train()
  if hasattr(model, "sparse_prediction"):  # the faster head of ModernBERT
    model.sparse_prediction = True
  device = models.torch_device()
  arrays = {
    name: torch.tensor(array, device=device)
    for name, array in padded(work.example(), work.attention).items()
  }
  options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
  options |= {"weight_decay": 0.1, "fused": True}  # the fastest that it has
  adamw = torch.optim.AdamW(model.parameters(), **options)
  run = torch.compile(model) if device == "cuda" else model
  casts = work.dtype == "bfloat16"

  def call():
    losses = []
    for _ in range(work.steps):
      adamw.zero_grad()
      with torch.autocast(device, dtype=torch.bfloat16, enabled=casts):
        loss = run(**arrays).loss
      loss.backward()
      torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
      adamw.step()
      losses.append(loss.detach())
    return [float(x) for x in losses]

  return call, work.tokens


def padded(batch: Batch, attention: str) -> dict[str, np.ndarray]:
  """Returns a batch's arguments of transformers' models, a row a document."""
  length = batch.inputs.shape[-1]
  inputs = batch.inputs.reshape(-1, length).astype(np.int64)
  # -100 predicts nothing. A causal model shifts the labels by itself.
  labels = np.full(inputs.shape, -100)
  counted = batch.weights > 0
  labels.flat[batch.target_positions[counted]] = batch.targets[counted]
  if attention == "causal":
    labels = np.roll(labels, 1, axis=1)
  arrays = {"input_ids": inputs, "labels": labels}
  if batch.mask.k_start is None:
    return arrays
  starts = batch.mask.k_start.reshape(inputs.shape) == np.arange(length)
  places = np.flatnonzero(starts)
  sizes = np.diff(places, append=inputs.size)
  columns = np.arange(sizes.max())
  visible = columns < sizes[:, None]
  for name, empty in {"input_ids": 0, "labels": -100}.items():
    documents = np.full(visible.shape, empty)
    documents[visible] = arrays[name].ravel()
    arrays[name] = documents
  return arrays | {"attention_mask": visible.astype(np.int64)}
