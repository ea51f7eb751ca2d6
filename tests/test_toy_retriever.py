"""A task of another kind, finding documents, with a head that is there.

Its predictions, its measure and its texts are its own.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import antlm_jax
from antlm_jax.evals.finetuning import loop, saved, summary
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.loop import Run
from antlm_jax.evals.finetuning.retrieval import Towers
from antlm_jax.evals.finetuning.task import Task
from antlm_jax.evals.finetuning.trial import Settings
from tests import random_models

TOP = 3


@dataclasses.dataclass(frozen=True)
class Ranker(Towers):
  """Predicts the first three documents of all."""

  kind: ClassVar[str] = "toy_ranker"

  def decode(self, reduced, rows):
    return [found["all"][:TOP] for found in super().decode(reduced, rows)]


TOPICS = (
  *(("Tom", "sat", "often"), ("dogs", "rest", "hills"), ("house", "near", "a")),
  *(("cat", "Ann", "the"), ("they", "river", "old"), ("small", "door", "tree")),
)


def load(split):
  """Two words of a topic, and a text of all three."""
  draw = np.random.default_rng(split == "train")

  def say(words, n):
    return " ".join(draw.choice(words, n))

  if split == "train":
    pairs = [(say(t, 2), say(t, 6)) for t in TOPICS for _ in range(16)]
    return [Example(pair) for pair in pairs]
  queries = [
    Example((say(words, 2),), [f"d{topic}"], f"q{topic}.{i}")
    for topic, words in enumerate(TOPICS)
    for i in range(4)
  ]
  documents = [
    Example((say(words, 6),), None, f"d{topic}")
    for topic, words in enumerate(TOPICS)
  ]
  return queries + documents


def mrr(predictions, labels):
  """Mean reciprocal rank of the first document that was asked for."""
  ranks = [
    [name in right for name in found]
    for found, right in zip(predictions, labels, strict=True)
  ]
  return float(
    np.mean([1 / (1 + r.index(True)) if any(r) else 0 for r in ranks])
  )


TASK = Task(
  name="toy",
  load=load,
  evaluations=("toy",),
  head=Ranker(0.05),
  metrics={"mrr": mrr},
  main_metric="mrr",
  baseline="the first documents",
  trivial=lambda examples: [[["d0", "d1", "d2"]] * len(examples)],
  right=lambda found, right: found[0] in right,
)

run = random_models.run(layers=1)


@pytest.mark.slow
def test_it_trains_and_is_saved(loaded, tmp_path, monkeypatch):
  settings = Settings(batch_size=20, epochs=8, max_length=16)
  data = loop.read(loaded, TASK, settings.max_length)
  assert data.train.tokens.shape[:2] == (96, 2)
  runs = [Run(3e-3, 0), Run(1e-9, 0)]
  best = saved.Best(runs)
  outcomes = loop.fit(loaded, TASK, data, settings, runs, keep=best)
  examples = {name: rows.examples for name, rows in data.evaluations.items()}
  assert len(examples["toy"]) == 24
  about = summary.summarise(TASK, examples, outcomes)
  baseline = about["evaluations"]["toy"]["baseline"]["mrr"]
  learnt, untrained = (o.best["toy"]["mrr"] for o in outcomes)
  assert learnt > 0.9 and learnt > max(baseline, untrained)
  summary.write(tmp_path, TASK, about, outcomes, examples)
  saved.save(tmp_path, loaded, TASK, "bidirectional", best.params)
  model = antlm_jax.load(tmp_path / "model")
  assert model.task.params == {}
  monkeypatch.setitem(saved.HEADS, Ranker.kind, Ranker)
  assert saved.head(model) == TASK.head
  assert saved.predict(model, load("toy"), 16) == outcomes[0].predictions["toy"]


def test_empty_places_are_no_negatives():
  draw = np.random.default_rng(0)
  outputs = jnp.asarray(draw.normal(size=(4, 2, 8)), jnp.float32)
  labels, weights = jnp.zeros(4), jnp.array([1.0, 1.0, 1.0, 0.0])
  alone = TASK.head.loss(outputs[:3], labels[:3], weights[:3])
  together = TASK.head.loss(outputs, labels, weights)
  assert together == pytest.approx(float(alone), rel=1e-6)
