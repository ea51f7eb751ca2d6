"""A task of another kind, a class for every word, in this file alone."""

import collections
import dataclasses
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import antlm_jax
from antlm_jax.evals.finetuning import batching, loop, saved, summary
from antlm_jax.evals.finetuning.batching import Example, Rows
from antlm_jax.evals.finetuning.loop import Run
from antlm_jax.evals.finetuning.task import Head, Param, Task
from antlm_jax.evals.finetuning.trial import Settings
from tests import random_models

NOWHERE = -1  # the label of a token that is of no word


@dataclasses.dataclass(frozen=True)
class Tagger(Head):
  """A linear layer on every token; a word is what most of its tokens are."""

  tags: tuple[str, ...]
  kind: ClassVar[str] = "toy_tagger"

  def parameters(self, width):
    return {
      "tags/kernel": Param((width, len(self.tags)), ("embed", None), 0.02),
      "tags/bias": Param((len(self.tags),), ("norm",)),
    }

  def __call__(self, params, hidden, lengths, dropout_key=None):
    return hidden @ params["tags/kernel"] + params["tags/bias"]

  def loss(self, outputs, labels, weights):
    weights = weights[:, None] * (labels != NOWHERE)
    targets = jax.nn.one_hot(labels, len(self.tags))  # zeros of NOWHERE
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
    tokens, lengths = batching.padded(tokens)
    labels, _ = batching.padded(labels, fill=NOWHERE)
    return Rows(tokens, lengths, labels, True, examples, about=words)

  def reduce(self, outputs):
    return jnp.argmax(outputs, axis=-1)

  def decode(self, reduced, rows):
    votes = [[collections.Counter() for _ in e.texts] for e in rows.examples]
    for row, words, counts in zip(reduced, rows.about, votes, strict=True):
      for tag, word in zip(row.tolist(), words, strict=False):
        if word != NOWHERE:
          counts[word][tag] += 1
    return [[max(v, key=v.get) if v else 0 for v in of] for of in votes]


VERBS, NAMES = ("sat", "rest", "wandered"), ("Tom", "Ann", "Bartholomew")
OTHERS = ("near", "the", "hills", "often", "dogs")


def load(split):
  """Sentences in which names and verbs are to be found; as long as they are."""
  draw = np.random.default_rng(split == "train")
  examples = []
  for i in range(96 if split == "train" else 32):
    words = draw.choice(VERBS + NAMES + OTHERS, draw.integers(2, 5)).tolist()
    tags = [1 * (w in NAMES) + 2 * (w in VERBS) for w in words]
    examples.append(Example(tuple(words), tags, f"{split}_{i}"))
  return examples


def accuracy(predictions, labels):
  found, right = (np.concatenate(x) for x in (predictions, labels))
  return float(np.mean(found == right))


TASK = Task(
  name="toy",
  load=load,
  evaluations=("toy",),
  head=Tagger(("O", "NAME", "VERB")),
  metrics={"accuracy": accuracy},
  main_metric="accuracy",
  baseline="all O",
  trivial=lambda examples: [[[0] * len(e.texts) for e in examples]],
)

run = random_models.run(layers=1)


def test_it_trains_and_is_saved(loaded, tmp_path, monkeypatch):
  settings = Settings(batch_size=16, epochs=10, max_length=16)
  data = loop.read(loaded, TASK, settings.max_length)
  runs = [Run(1e-2, 0), Run(1e-9, 0)]
  best = saved.Best(runs)
  outcomes = loop.fit(loaded, TASK, data, settings, runs, keep=best)
  examples = {"toy": load("toy")}
  about = summary.summarise(TASK, examples, outcomes)
  baseline = about["evaluations"]["toy"]["baseline"]["accuracy"]
  assert 0.3 < baseline < 0.6 and about["best_lr"] == 1e-2
  assert outcomes[0].best["toy"]["accuracy"] > 0.9 > baseline
  assert not about["runs"][0]["collapsed"]
  summary.write(tmp_path, TASK, about, outcomes, examples)
  assert len((tmp_path / "items.jsonl").read_text().splitlines()) == 32
  saved.save(tmp_path, loaded, TASK, "bidirectional", best.params)
  model = antlm_jax.load(tmp_path / "model")
  monkeypatch.setitem(saved.HEADS, Tagger.kind, Tagger)
  assert saved.head(model) == TASK.head
  assert saved.predict(model, load("toy"), 16) == outcomes[0].predictions["toy"]
  words = [example.texts for example in load("toy")]  # without labels
  assert saved.predict(model, words, 16) == outcomes[0].predictions["toy"]


def test_rows_carry_a_label_for_every_token_of_a_word(loaded):
  texts = ("Bartholomew", "sat", "Tom")
  rows = TASK.head.encode(loaded, [Example(texts, [1, 2, 1])], 16)
  (words,), t = rows.about, loaded.tokenizer
  inside = t.encode(" ".join(texts))
  assert rows.tokens[0].tolist() == [t.bos_id, *inside, t.eos_id]
  assert words[0] == words[-1] == NOWHERE and words.count(0) > 1
  assert set(words[1:-1]) == {0, 1, 2} and words[1:-1] == sorted(words[1:-1])
  assert rows.labels[0].tolist() == [[1, 2, 1, NOWHERE][w] for w in words]
  (slots,) = batching.batches(rows, 1)
  batch = batching.gather(rows, [slots._replace(length=4)])
  assert batch.labels.shape == batch.tokens.shape == (1, 1, 4)
