"""A tagging task: find names and verbs in made-up sentences."""

import collections
import dataclasses
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax.evals.finetuning import batching
from antlm_jax.evals.finetuning.batching import Example, ExampleRows
from antlm_jax.evals.finetuning.presets import PRESETS
from antlm_jax.evals.finetuning.task import Param, Preset, Task, TaskHead
from antlm_jax.settings import Section, setting

NOWHERE = -1  # the label of a token outside every word


@dataclasses.dataclass(frozen=True)
class Tagger(TaskHead):
  """A linear layer on every token; a word has its tokens' majority label."""

  labels: tuple[str, ...]
  kind: ClassVar[str] = "toy_tagger"
  export_as: ClassVar[str] = "tagger"

  def parameters(self, width):
    return {
      "classes/kernel": Param((width, len(self.labels)), ("embed", None), 0.02),
      "classes/bias": Param((len(self.labels),), ("norm",)),
    }

  def __call__(self, params, hidden, lengths, dropout_key=None):
    return hidden @ params["classes/kernel"] + params["classes/bias"]

  def loss(self, outputs, labels, weights):
    weights = weights[:, None] * (labels != NOWHERE)
    targets = jax.nn.one_hot(labels, len(self.labels))  # zeros of NOWHERE
    nats = -jax.nn.log_softmax(outputs) * targets
    return (nats.sum(axis=-1) * weights).sum() / weights.sum()

  def encode(self, loaded, examples, max_length):
    before, after = loaded.frame
    limit = batching.longest(loaded, max_length) - len(after)
    tokens, labels, words = [], [], []
    for example in examples:
      starts = itertools.accumulate(len(w) + 1 for w in example.texts[:-1])
      starts = [0, *starts]
      ids, spans = loaded.tokenizer.encode_offsets(" ".join(example.texts))
      word = np.searchsorted(starts, [s for s, _ in spans], "right") - 1
      ids = np.concatenate([before, ids])[:limit]
      word = np.concatenate([[NOWHERE] * len(before), word])[:limit]
      tags = example.label or [0] * len(example.texts)
      tokens.append([*ids, *after])
      words.append([*word.astype(int), *([NOWHERE] * len(after))])
      labels.append([NOWHERE if w < 0 else tags[w] for w in words[-1]])
    tokens, lengths = batching.pad_rows(tokens)
    labels, _ = batching.pad_rows(labels, fill=NOWHERE)
    return ExampleRows(tokens, lengths, labels, True, examples, origins=words)

  def reduce(self, outputs):
    return jnp.argmax(outputs, axis=-1)

  def decode(self, reduced, rows):
    votes = [[collections.Counter() for _ in e.texts] for e in rows.examples]
    for row, words, counts in zip(reduced, rows.origins, votes, strict=True):
      for tag, word in zip(row.tolist(), words, strict=False):
        if word != NOWHERE:
          counts[word][tag] += 1
    return [[max(v, key=v.get) if v else 0 for v in of] for of in votes]


VERBS, NAMES = ("sat", "rest", "wandered"), ("Tom", "Ann", "Bartholomew")
OTHERS = ("near", "the", "hills", "often", "dogs")


def load(split, count=96):
  """Returns sentences and the labels of their words."""
  draw = np.random.default_rng(split == "train")
  examples = []
  for i in range(count if split == "train" else 32):
    words = draw.choice(VERBS + NAMES + OTHERS, draw.integers(2, 5)).tolist()
    tags = [1 * (w in NAMES) + 2 * (w in VERBS) for w in words]
    examples.append(Example(tuple(words), tags, f"{split}_{i}"))
  return examples


def accuracy(predictions, labels):
  found, right = (np.concatenate(x) for x in (predictions, labels))
  return float(np.mean(found == right))


@dataclasses.dataclass(frozen=True)
class Options(Section):
  toy_examples: int = setting(96, "Number of training examples", least=1)


def make(data, name, attention, options):
  return Task(
    name=name,
    load=lambda split: load(split, options.toy_examples),
    evaluations=("toy",),
    head=Tagger(("O", "NAME", "VERB")),
    metrics={"accuracy": accuracy},
    main_metric="accuracy",
    baseline="all O",
    trivial=lambda examples: [[[0] * len(e.texts) for e in examples]],
    facts={"toy_examples": options.toy_examples},
  )


PRESETS["toy"] = Preset(
  "toy",
  "names and verbs of made-up sentences",
  {"toy": ("toy",)},
  make,
  heads=(Tagger,),
  settings=(Options,),
  defaults={"toy": {"batch_size": 16, "lrs": (1e-2, 1e-9), "max_length": 16}},
)
