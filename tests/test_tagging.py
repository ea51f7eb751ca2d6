"""Tagging: files, words and their tokens, metrics, and real data."""

import numpy as np
import pytest

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import summary, tagging
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.loop import Run
from antlm_jax.evals.predict import predict
from antlm_jax.inference.model import load
from tests import random_models, real, runs, tuned

CONLL = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O
German JJ I-NP I-MISC
lamb NN I-NP O

Peter NNP I-NP I-PER
Blackburn NNP I-NP I-PER
# # I-NP B-PER
"""
UNER = """# newdoc id = a
# text = tampa bay .
1\ttampa\tB-LOC\t-\tx
2\tbay\tI-LOC\t-\tx
3\t.\tO\t-\t-
"""


def names(example, form) -> list[str]:
  return [form.classes[c] for c in example.label]


def test_conlls_form_is_read_as_iob2(tmp_path):
  (tmp_path / "a").write_text(CONLL)
  form = tagging.FORMATS["conll"]
  first, second = tagging.load(tmp_path / "a", form, "train")
  assert first.texts == ("EU", "rejects", "German", "lamb")
  assert names(first, form) == ["B-ORG", "O", "B-MISC", "O"]
  assert second.texts == ("Peter", "Blackburn", "#")  # no comment
  assert names(second, form) == ["B-PER", "I-PER", "B-PER"]
  assert (first.id, second.id) == ("train_0", "train_1")
  counts = {n: len(f.classes) for n, f in tagging.FORMATS.items()}
  assert counts == {"conll": 9, "uner": 7, "ontonotes": 37}


def test_uners_form_is_read(tmp_path):
  (tmp_path / "a").write_text(UNER)
  form = tagging.FORMATS["uner"]
  (example,) = tagging.load(tmp_path / "a", form, "uner-dev")
  assert example.texts == ("tampa", "bay", ".")
  assert names(example, form) == ["B-LOC", "I-LOC", "O"]


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("EU I-ORG\nrejects\n", "line 2: 1 columns, not a word and its label"),
    ("EU I-GOD\n", "line 1: the label 'I-GOD' is not O"),
    ("EU ORG\n", "line 1: the label 'ORG' is not O"),
  ],
)
def test_bad_files_are_told_by_line(tmp_path, text, words):
  (tmp_path / "a").write_text(text)
  with pytest.raises(UserError, match=words):
    tagging.load(tmp_path / "a", tagging.FORMATS["conll"], "train")


def test_a_split_that_is_absent_is_told(tmp_path):
  with pytest.raises(UserError, match=r"train is absent: .*eng\.train"):
    tagging.make(tmp_path, "conll", "bidirectional")


def test_the_measures_are_seqevals_and_scikit_learns():
  seqeval = pytest.importorskip("seqeval.metrics", reason="the hf extra")
  metrics = pytest.importorskip("sklearn.metrics", reason="the hf extra")
  draw, classes = np.random.default_rng(0), tagging.FORMATS["conll"].classes
  labels, predictions = [], []
  for size in draw.integers(1, 12, 1000):
    # Mostly O, as in text; any label may follow any.
    some = draw.integers(0, len(classes), (2, size))
    label, other = np.where(draw.random((2, size)) < 0.5, 0, some)
    found = np.where(draw.random(size) < 0.7, label, other)
    labels.append(label.tolist())
    predictions.append(found.tolist())
  named = [[[classes[c] for c in s] for s in x] for x in (labels, predictions)]
  found = tagging.entity_f1(classes, predictions, labels)
  assert 0.2 < found < 0.9
  assert found == pytest.approx(seqeval.f1_score(*named), abs=1e-12)
  assert tagging.entity_f1(classes, [[0, 0]], [[0, 0]]) == 0
  each = [
    metrics.f1_score(*one, average="macro")
    for one in zip(labels, predictions, strict=True)
  ]
  found = tagging.sentence_f1(predictions, labels)
  assert found == pytest.approx(np.mean(each), abs=1e-12)


run = random_models.run(layers=1)


def test_tokens_have_the_labels_of_their_words(loaded):
  head = tagging.Tagger(("O", "B-X", "I-X"))
  texts = ("Bartholomew", "sat", "Tom")
  rows = head.encode(loaded, [Example(texts, [1, 0, 2]), Example(("a",))], 16)
  words, tokenizer = rows.about[0].tolist(), loaded.tokenizer
  expected = tokenizer.encode(" ".join(texts)).tolist()
  frame = [tokenizer.bos_id, *expected, tokenizer.eos_id]
  assert rows.tokens[0, : len(frame)].tolist() == frame
  assert sorted(set(words)) == [-1, 0, 1, 2] and words.count(0) > 1
  at = [[1, 0, 2, -1][w] for w in words]
  assert rows.labels[0, : len(at)].tolist() == at
  # A word is what most of its tokens are; one that is cut off is O.
  tags = np.zeros((2, rows.tokens.shape[1]), int)
  tags[0, : len(words)] = [{0: 1, 1: 2, 2: 1}.get(w, 2) for w in words]
  assert head.decode(tags, rows) == [[1, 2, 1], [0]]
  short = head.encode(loaded, [Example(texts, [1, 0, 2])], 4)
  assert head.decode(np.full((1, 4), 2), short)[0][-1] == 0


def task(tmp_path) -> tagging.Task:
  """Names are of persons, the last word of a sentence is a place."""
  draw = np.random.default_rng(0)
  folder = tmp_path / "conll2003"
  folder.mkdir()
  for name, count in (("train", 160), ("testa", 40), ("testb", 40)):
    lines = []
    for _ in range(count):
      middle = draw.choice(["sat", "often", "near", "dogs"], 2)
      who = draw.choice(["Tom", "Ann", "Bartholomew"])
      lines += [f"{who} X I-PER", *(f"{w} X O" for w in middle)]
      lines += [f"{draw.choice(['hills', 'town'])} X I-LOC", ""]
    (folder / f"eng.{name}").write_text("\n".join(lines))
  return tagging.make(tmp_path, "conll", "bidirectional")


def test_it_trains_and_is_saved(loaded, tmp_path):
  made = task(tmp_path)
  how = {"batch_size": 16, "epochs": 6, "max_length": 16}
  (outcome,) = tuned.trained(loaded, made, [Run(1e-2, 0)], tmp_path, **how)
  examples = {n: made.load(n) for n in made.evaluations}
  about = summary.summarise(made, examples, [outcome])
  assert about["evaluations"]["conll-test"]["baseline"]["entity_f1"] == 0
  assert outcome.best["conll-test"]["entity_f1"] > 0.9
  # Words as a sentence, and their labels by name.
  model = load(tmp_path / "model")
  (found,) = predict(model, ["Tom sat near hills"])
  assert found.labels == ("B-PER", "O", "O", "B-LOC")
  assert found.entities == (("PER", 0, 1), ("LOC", 3, 4))
  assert found == predict(model, [("Tom", "sat", "near", "hills")])[0]
  entity = {"kind": "PER", "start": 0, "stop": 1}
  assert found.to_json()["entities"][0] == entity


@pytest.mark.slow
def test_the_real_sentences(loaded, tmp_path, capsys):
  real.unpacked("ner", tmp_path)
  form = tagging.FORMATS["conll"]
  paths = [tmp_path / names[0] for names in form.files]
  sizes = [len(tagging.load(path, form, "train")) for path in paths]
  assert sizes == [14041, 3250, 3453]
  words = [f"--checkpoint={loaded.path}", f"--data={tmp_path}"]
  words += ["--task=conll", "--limit=600", "--epochs=1", "--max_length=64"]
  words += ["--lrs=1e-3", f"--output={tmp_path / 'out'}", "--preset=tagging"]
  runs.main("evals.finetune", *words)
  assert "conll-test" in capsys.readouterr().out
  (folder,) = (tmp_path / "out/conll").iterdir()
  assert (folder / "summary.json").exists()
