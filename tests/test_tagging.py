"""Tagging: files, words and their tokens, metrics and real data."""

import json

import numpy as np
import pytest

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import labelled, summary, tagging
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


def test_conlls_form_is_read(tmp_path):
  (tmp_path / "a").write_text(CONLL)
  first, second = tagging.columns(tmp_path / "a")
  assert first.texts == ("EU", "rejects", "German", "lamb")
  assert tagging.iob2(first.label) == ["B-ORG", "O", "B-MISC", "O"]
  assert second.texts == ("Peter", "Blackburn", "#")  # not a comment
  assert tagging.iob2(second.label) == ["B-PER", "I-PER", "B-PER"]
  assert second.id == f"{tmp_path / 'a'}, line 8"


def test_planning_reads_no_known_set(tmp_path):
  """Catches classes that depend on the sentences of a file."""
  (tmp_path / "conll2003").mkdir()
  for part in ("train", "testa", "testb"):
    (tmp_path / f"conll2003/eng.{part}").write_text("Tom X I-PERSON\n")
  (job,) = tuned.planned(f"--data={tmp_path}", "--preset=tagging")
  assert len(job.task.head.labels) == 9
  with pytest.raises(UserError, match="line 1: unknown tag 'B-PERSON'"):
    job.task.load("train")


def test_a_split_that_is_absent_is_told(tmp_path):
  with pytest.raises(
    UserError, match=r"conll is not .*eng\.train with .*testa"
  ):
    tagging.make(tmp_path, "conll", "bidirectional")


def test_the_measures_are_seqevals_and_scikit_learns():
  seqeval = pytest.importorskip("seqeval.metrics", reason="the hf extra")
  metrics = pytest.importorskip("sklearn.metrics", reason="the hf extra")
  draw = np.random.default_rng(0)
  classes = "O", *(f"{b}-{k}" for k in ("LOC", "ORG", "PER") for b in "BI")
  labels, predictions = [], []
  for size in draw.integers(1, 12, 1000):
    # Mostly O, as in text, and any order of labels.
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


SCHEMES = {"IOB1": "BIII", "IOB2": "BIIB", "BIOES": "BIES", "BILOU": "BILU"}


def sentence(draw, scheme):
  """Returns a sentence with adjacent and separate entities of two kinds."""
  begin, inside, end, single = SCHEMES[scheme]
  tags = ["O"]
  for _ in range(draw.integers(1, 6)):
    kind, length = draw.choice(["a", "b-c"]), draw.integers(1, 4)
    parts = [begin, *inside * (length - 2), end] if length > 1 else [single]
    if scheme == "IOB1" and not tags[-1].endswith(f"-{kind}"):
      parts[0] = "I"  # B only after an entity of the same kind
    tags += [f"{part}-{kind}" for part in parts]
    tags += ["O"] * draw.integers(0, 2)
  return {"tokens": [f"w{i}" for i in range(len(tags))], "tags": tags}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_own_tags_of_any_scheme_are_scored_as_by_seqeval(scheme, capsys):
  """Catches entities that conversion to IOB2 splits or joins."""
  seqeval = pytest.importorskip("seqeval.metrics", reason="the hf extra")
  draw = np.random.default_rng(0)
  rows = [sentence(draw, scheme) for _ in range(300)]
  task = tagging.make({"train": rows, "test": rows}, "own", "bidirectional")
  told = "own: BIOES tags become IOB2" in capsys.readouterr().out
  assert told == (scheme in ("BIOES", "BILOU"))
  gold = [e.label for e in task.load("own-test")]
  classes = task.head.labels
  assert classes == ("O", "B-a", "I-a", "B-b-c", "I-b-c")
  found = gold[:150] + [draw.permutation(one).tolist() for one in gold[150:]]
  named = [[classes[c] for c in one] for one in found]
  # seqeval knows BIOES, whose letters differ from BILOU's.
  theirs = [
    [tag.replace("L-", "E-").replace("U-", "S-") for tag in row["tags"]]
    for row in rows
  ]
  score = task.metrics["entity_f1"](found, gold)
  assert 0.4 < score < 0.95
  assert score == pytest.approx(seqeval.f1_score(theirs, named), abs=1e-12)


WNUT = """\ufeffTom\tB-person
sat\tO
\t
in\tO
\ufeff\tO
New\tB-location
York\tI-location
\ufeff
#hills\tO
"""


def own_task(data, **columns):
  options = tagging.Options(**columns)
  return tagging.make(str(data), "own", "bidirectional", options)


def test_wnut_and_wikiann_are_read_as_published(tmp_path, capsys):
  """Catches byte order marks as words, and prefixes that are left or hidden."""
  wnut, wikiann = tmp_path / "wnut", tmp_path / "wikiann"
  wnut.mkdir()
  names = "wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated"
  for name in names:
    (wnut / name).write_text(WNUT)
  task = own_task(wnut)
  assert task.trained and task.evaluations == ("wnut-dev", "wnut-test")
  texts = [e.texts for e in task.load("wnut-test")]
  assert texts == [("Tom", "sat"), ("in", "New", "York"), ("#hills",)]
  wikiann.mkdir()
  for name in ("train", "dev", "test", "extra"):
    (wikiann / name).write_text("en:Tom\tB-PER\nen::\tO\n\nen:sat\tO\n")
  task = own_task(wikiann)
  assert [e.texts for e in task.load("train")] == [("Tom", ":"), ("sat",)]
  said = capsys.readouterr().out
  assert f"{wikiann / 'test'}: removed 'en:' before each word" in said
  (wikiann / "test").write_text("en:Tom\tB-PER\nde:sat\tO\n")
  assert own_task(wikiann).load("wikiann-test")[0].texts[0] == "en:Tom"


def test_columns_by_number_and_other_tags(tmp_path):
  """Catches parts of speech that are scored as entities."""
  (tmp_path / "a.iob2").write_text(UNER)
  task = own_task(tmp_path / "a.iob2", tokens_column="2", tags_column="3")
  (example,) = task.load("train")
  assert example.texts == ("tampa", "bay", ".") and example.label == [1, 2, 0]
  rows = [("Tom sat", "NOUN VERB"), (["a"], ["DET"])]
  task = tagging.make({"train": rows, "test": rows}, "own", "causal")
  assert (task.main_metric, task.baseline) == ("accuracy", "one tag")
  gold = [e.label for e in task.load("own-test")]
  assert task.head.labels == ("DET", "NOUN", "VERB") and gold == [[1, 2], [0]]
  assert task.metrics["accuracy"]([[1, 1], [0]], gold) == 2 / 3
  rows = {"train": [(["Tom", "sat"], [1, 0])], "dev": [("Tom", "B-PER")]}
  given = labelled.Classes(("O", "B-PER"))
  task = tagging.make(rows, "own", "causal", tagging.Options(), given)
  assert task.load("train")[0].label == [1, 0]
  with pytest.raises(
    UserError, match=r"record 1: the tag 1 has no name.*--labels="
  ):
    tagging.make(rows, "own", "causal")


@pytest.mark.parametrize(
  ("name", "text", "words"),
  [
    ("a.jsonl", '{"tokens": ["a"], "tag": ["O"]}', "one with --tags_column"),
    ("a.jsonl", '{"tokens": ["a", "b"], "tags": ["O"]}', "2 words, but 1 tags"),
    ("a.jsonl", '{"tokens": [1], "tags": ["O"]}', "the words are not texts"),
    ("a.jsonl", "", "a.jsonl holds no sentences"),
    ("a.conll", "", "a.conll holds no sentences"),
    ("a.conll", "a\tO\n", "holds only the tag 'O'"),
    ("a.conll", "a\tO\nb\n", "line 2: 1 columns, not a word and its tag"),
    ("b/notes", "a\tO\n", "b has notes: looked for files named train"),
  ],
)
def test_bad_own_sentences(tmp_path, name, text, words):
  path = tmp_path / name
  path.parent.mkdir(exist_ok=True)
  path.write_text(text)
  with pytest.raises(UserError, match=words):
    own_task(path.parent if "/" in name else path)


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
  # A word has its tokens' majority label, or O if it is cut off.
  tags = np.zeros((2, rows.tokens.shape[1]), int)
  tags[0, : len(words)] = [{0: 1, 1: 2, 2: 1}.get(w, 2) for w in words]
  assert head.decode(tags, rows) == [[1, 2, 1], [0]]
  short = head.encode(loaded, [Example(texts, [1, 0, 2])], 4)
  assert head.decode(np.full((1, 4), 2), short)[0][-1] == 0


def task(tmp_path) -> tagging.Task:
  """Returns a task: a sentence begins with a person and ends with a place."""
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


def test_it_trains_and_is_saved(loaded, tmp_path, capsys):
  made = task(tmp_path)
  how = {"batch_size": 16, "epochs": 6, "max_length": 16}
  (outcome,) = tuned.trained(loaded, made, [Run(1e-2, 0)], tmp_path, **how)
  examples = {n: made.load(n) for n in made.evaluations}
  about = summary.summarise(made, examples, [outcome])
  assert about["evaluations"]["conll-test"]["baseline"]["entity_f1"] == 0
  assert outcome.best["conll-test"]["entity_f1"] > 0.9
  # A sentence's words get labels by name.
  model = load(tmp_path / "model")
  (found,) = predict(model, ["Tom sat near hills"])
  assert found.labels == ("B-PER", "O", "O", "B-LOC")
  assert found.entities == (("PER", 0, 1), ("LOC", 3, 4))
  words = ["Tom", "sat", "near", "hills"]
  assert found == predict(model, [words])[0]
  runs.write_lines(tmp_path / "words.jsonl", [{"text": words}])
  asked = f"--checkpoint={model.path}", f"--data={tmp_path / 'words.jsonl'}"
  runs.main("evals.predict", *asked)
  assert capsys.readouterr().out.endswith(json.dumps(found.to_json()) + "\n")
  entity = {"kind": "PER", "start": 0, "stop": 1}
  assert found.to_json()["entities"][0] == entity


@pytest.mark.slow
def test_the_real_sentences(loaded, tmp_path, capsys):
  real.unpacked("ner", tmp_path)
  task = tagging.make(tmp_path, "conll", "bidirectional")
  sizes = [len(task.load(split)) for split in ("train", *task.evaluations)]
  assert sizes == [14041, 3250, 3453] and len(task.head.labels) == 9
  words = [f"--checkpoint={loaded.path}", f"--data={tmp_path}"]
  words += ["--task=conll", "--limit=600", "--epochs=1", "--max_length=64"]
  words += ["--lrs=1e-3", f"--output={tmp_path / 'out'}", "--preset=tagging"]
  runs.main("evals.finetune", *words)
  assert "conll-test" in capsys.readouterr().out
  (folder,) = (tmp_path / "out/conll").iterdir()
  assert (folder / "summary.json").exists()
