"""A task of another kind, a class for every word, in this file only.

Its row in the table of presets is all that the library is told of it.
"""

import collections
import dataclasses
import itertools
import json
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import antlm_jax
from antlm_jax.errors import UserError
from antlm_jax.evals import finetune
from antlm_jax.evals.finetuning import batching, presets, saved
from antlm_jax.evals.finetuning.batching import Example, Rows
from antlm_jax.evals.finetuning.task import Head, Param, Suite, Task
from antlm_jax.hf import export
from antlm_jax.settings import setting
from tests import random_models

NOWHERE = -1  # the label of a token that is of no word


@dataclasses.dataclass(frozen=True)
class Tagger(Head):
  """A linear layer on every token; a word is what most of its tokens are."""

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


def load(split, count=96):
  """Sentences in which names and verbs are to be found; as long as they are."""
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
class Options:
  toy_examples: int = setting(96, "number of training examples", least=1)


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
    about={"toy_examples": options.toy_examples},
  )


SUITE = Suite(
  "toy",
  "names and verbs of made-up sentences",
  {"toy": ("toy",)},
  make,
  heads=(Tagger,),
  settings=(Options,),
  defaults={"toy": {"batch_size": 16, "lrs": (1e-2, 1e-9), "max_length": 16}},
)
run = random_models.run(layers=1)


def test_the_command_trains_it_and_its_model_predicts(
  run, tmp_path, monkeypatch, capsys
):
  monkeypatch.setitem(presets.PRESETS, "toy", SUITE)
  args = [f"--checkpoint={run}", "--data=none", "--preset=toy", "--save"]
  args += [f"--output={tmp_path}", "--toy_examples=90", "--seeds=0"]
  finetune.main(args)
  said = capsys.readouterr().out
  assert "tip:" not in said and "toy" in said
  folder = tmp_path / "toy" / f"{random_models.STEP}-bidirectional"
  about = json.loads((folder / "summary.json").read_text())
  assert about["train_examples"] == 90 and about["best_lr"] == 1e-2
  baseline = about["evaluations"]["toy"]["baseline"]["accuracy"]
  first = about["runs"][0]
  assert first["scores"]["toy"]["accuracy"] > 0.9 > 0.6 > baseline > 0.3
  assert not first["collapsed"]
  items = map(json.loads, (folder / "items.jsonl").read_text().splitlines())
  expected = [item["predictions"][0] for item in items]
  model = antlm_jax.load(folder / "model")
  assert saved.predict(model, load("toy"), 16) == expected
  words = [example.texts for example in load("toy")]  # without labels
  assert saved.predict(model, words, 16) == expected
  (hf,) = export.export(model, tmp_path / "hf")
  config = json.loads((hf / "config.json").read_text())
  assert config["architectures"] == ["EuroBertForTokenClassification"]
  assert config["id2label"] == {"0": "O", "1": "NAME", "2": "VERB"}
  with pytest.raises(UserError, match=r"another request \(data differ"):
    finetune.main([*args, "--toy_examples=91"])
  with pytest.raises(UserError, match="toy_examples=0 is not at least 1"):
    finetune.main([*args, "--toy_examples=0"])
  assert "--toy_examples" in finetune._parser().format_help()


def test_rows_carry_a_label_for_every_token_of_a_word(loaded):
  texts = ("Bartholomew", "sat", "Tom")
  rows = Tagger(("O", "NAME", "VERB")).encode(
    loaded, [Example(texts, [1, 2, 1])], 16
  )
  (words,), t = rows.about, loaded.tokenizer
  inside = t.encode(" ".join(texts))
  assert rows.tokens[0].tolist() == [t.bos_id, *inside, t.eos_id]
  assert words[0] == words[-1] == NOWHERE and words.count(0) > 1
  assert set(words[1:-1]) == {0, 1, 2} and words[1:-1] == sorted(words[1:-1])
  assert rows.labels[0].tolist() == [[1, 2, 1, NOWHERE][w] for w in words]
  (slots,) = batching.batches(rows, 1)
  batch = batching.gather(rows, [slots._replace(length=4)])
  assert batch.labels.shape == batch.tokens.shape == (1, 1, 4)
