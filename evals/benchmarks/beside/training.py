"""Train steps in float32 with AdamW, compared with torch and transformers."""

import dataclasses
import pathlib
from collections.abc import Iterator

import jax
import numpy as np

from antlm_jax import mesh as mesh_lib
from antlm_jax.evals.benchmarks import train_step as steps
from antlm_jax.evals.benchmarks.beside import models
from antlm_jax.evals.benchmarks.turns import TimedCase
from antlm_jax.objectives.batch import Batch, BatchLayout
from antlm_jax.training.step import jitted, state_shardings

# Rows of a step, and steps of a call.
_SIZES = {"tiny": (4, 2), "7M": (16, 4), "97M": (8, 1)}
_LENGTH = 128
_ATTENTION = {"clm": "causal", "mlm": "bidirectional"}


def training_cases(folder: pathlib.Path, size: str) -> Iterator[TimedCase]:
  """Yields the cases of a size: causal and masked."""
  rows, count = _SIZES[size]
  loaded = models.make_benchmark_model(
    size, models.word_tokenizer(size), folder
  )
  for kind, attention in _ATTENTION.items():
    vocabulary = loaded.tokenizer.vocab_size
    batch = steps.make_example(kind, BatchLayout(rows), _LENGTH, vocabulary)
    model, _ = models.in_transformers(loaded, attention, folder)
    yield TimedCase(
      f"train {kind} {size}, {rows} x {_LENGTH}",
      "transformers",
      _our_training(loaded, batch, count),
      _their_training(model, batch, count),
      work=count * rows * _LENGTH,
      unit="tokens",
      same=lambda a, b: models.alike(a[0], b[0]),
    )


def _our_training(loaded, batch: Batch, count: int):
  """Returns a function that trains some more steps and returns losses."""
  train_step = steps.make_step(loaded.model.config)
  mesh = mesh_lib.Mesh().build()
  with jax.set_mesh(mesh):
    init, step, _ = jitted(train_step, state_shardings(train_step, mesh))
    state = init()
    placed = mesh_lib.place_batch(mesh, batch)
  # The step gives its state's memory to the next one: a copy stays.
  params = jax.tree.map(jax.numpy.array, loaded.params)
  state = dataclasses.replace(state, params=params)

  def call():
    nonlocal state
    losses = []
    with jax.set_mesh(mesh):
      for _ in range(count):
        state, metrics = step(state, placed)
        losses.append(metrics["total_loss"])
    return [float(x) for x in losses]

  return call


def _their_training(model, batch: Batch, count: int):
  _, torch = models.torch_modules()
  inputs = batch.inputs.reshape(-1, batch.inputs.shape[-1])
  # -100 predicts nothing. A causal model shifts the labels by itself.
  labels = np.full(inputs.shape, -100)
  counted = batch.weights > 0
  labels.flat[batch.target_positions[counted]] = batch.targets[counted]
  if model.config.architectures[0].endswith("CausalLM"):
    labels = np.roll(labels, 1, axis=1)
  ids, labels = (torch.tensor(x, dtype=torch.long) for x in (inputs, labels))
  model.train()
  options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
  options |= {"weight_decay": 0.1, "fused": True}  # the fastest that it has
  adamw = torch.optim.AdamW(model.parameters(), **options)

  def call():
    losses = []
    for _ in range(count):
      adamw.zero_grad()
      loss = model(input_ids=ids, labels=labels).loss
      loss.backward()
      torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
      adamw.step()
      losses.append(loss.item())
    return losses

  return call
