"""Tagging: files, words and their tokens, metrics and real data."""

import itertools
import json
import re

import numpy as np
import pytest
import tokenizers

from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.evals import finetune
from antlm_jax.evals.finetuning import conll, tag_schemes, tagging
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.loop import TrialRun
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
  columns = tagging.KNOWN["conll"].columns
  first, second = conll.read_known(tmp_path / "a", columns)
  assert first.texts == ("EU", "rejects", "German", "lamb")
  assert tag_schemes.iob2(first.label) == ["B-ORG", "O", "B-MISC", "O"]
  assert second.texts == ("Peter", "Blackburn", "#")  # not a comment
  assert tag_schemes.iob2(second.label) == ["B-PER", "I-PER", "B-PER"]
  assert second.id == f"{tmp_path / 'a'}, line 8"


def test_lines_of_words_and_tags_are_no_sentences():
  """Catches a file of columns that a tagger reads as words."""
  head = tagging.Tagger(labels=("O", "B-PER"))
  lines = [head.example(one) for one in ("Tom B-PER", "sat O")]
  with pytest.raises(UserError, match="each text ends with a tag, such as B-P"):
    head.encode(None, lines, 8)


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
    tagging.known_task(tmp_path, "conll")


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
  found = tagging.entity_f1(classes)(predictions, labels)
  assert 0.2 < found < 0.9
  assert found == pytest.approx(seqeval.f1_score(*named), abs=1e-12)
  assert tagging.entity_f1(classes)([[0, 0]], [[0, 0]]) == 0
  each = [
    metrics.f1_score(*one, average="macro")
    for one in zip(labels, predictions, strict=True)
  ]
  found = tagging.sentence_f1(predictions, labels)
  assert found == pytest.approx(np.mean(each), abs=1e-12)


SCHEMES = {
  "IOB1": "BIII",
  "IOB2": "BIIB",
  "BIOES": "BIES",
  "BILOU": "BILU",
  "BMES": "BMES",
  "BMEWO": "BMEW",
}


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
  """Catches entities that conversion to IOB2 splits, joins or calls plain."""
  seqeval = pytest.importorskip("seqeval.metrics", reason="the hf extra")
  draw = np.random.default_rng(0)
  rows = [sentence(draw, scheme) for _ in range(300)]
  task = tagging.own_task({"train": rows, "test": rows})
  name = "IOB" if scheme.startswith("IOB") else scheme
  assert f"own: tags are {name}, read as B-X/I-X\n" in capsys.readouterr().out
  gold = [e.label for e in task.load("own-test")]
  classes = task.head.labels
  assert classes == ("O", "B-a", "I-a", "B-b-c", "I-b-c")
  found = gold[:150] + [draw.permutation(one).tolist() for one in gold[150:]]
  named = [[classes[c] for c in one] for one in found]
  # seqeval knows the letters of BIOES.
  letters = str.maketrans("LUMW", "ESIS")
  theirs = [[tag.translate(letters) for tag in row["tags"]] for row in rows]
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
  options = tagging.TagOptions(**columns)
  return tagging.own_task(str(data), options)


@pytest.mark.slow
def test_wnut_and_panx_are_read_as_published(tmp_path, run, capsys):
  """Catches byte-order marks as words, other annotations, and prefixes."""
  wnut, panx = tmp_path / "wnut17", tmp_path / "panx"
  wnut.mkdir()
  for name in tagging.KNOWN["wnut17"].splits:
    (wnut / name).write_text(WNUT)
  # Next to the test set, words alone and each annotator's tags are published.
  (wnut / "emerging.test").write_text("Ann\nsat\n")
  (wnut / "emerging.test.conll").write_text("Ann\tB-person,B-group\n")
  task = tagging.known_task(tmp_path, "wnut17")
  assert task.trained and task.evaluations == ("wnut17-dev", "wnut17-test")
  texts = [e.texts for e in task.load("wnut17-test")]
  assert texts == [("Tom", "sat"), ("in", "New", "York"), ("#hills",)]
  assert "lines without a word left out: 1 (" in capsys.readouterr().out
  how = "--preset=tagging", "--epochs=1", "--max_length=16"
  runs.main(
    "antlm_jax.evals.finetune", f"--checkpoint={run}", f"--data={wnut}", *how
  )
  assert "wnut17-test" in capsys.readouterr().out
  panx.mkdir()
  for name in ("train", "dev", "test", "extra"):
    (panx / name).write_text("en:Tom\tB-PER\nen::\tO\n\nen:sat\tO\n")
  task = tagging.known_task(tmp_path, "panx")
  assert [e.texts for e in task.load("train")] == [("Tom", ":"), ("sat",)]
  with pytest.raises(UserError, match="line 1 has en: before each word"):
    own_task(panx)


def test_two_files_of_a_known_set_are_refused(tmp_path):
  """Catches a second layout that is ignored."""
  (tmp_path / "ontonotes").mkdir()
  for name in itertools.product(("train", "dev", "test"), ("conll", "txt")):
    (tmp_path / "ontonotes" / ".".join(name)).write_text("Tom B-PERSON\n")
  with pytest.raises(UserError, match=r"train: .*train\.conll, .*train\.txt"):
    tagging.known_task(tmp_path, "ontonotes")


@pytest.mark.parametrize(
  ("text", "words", "tags"),
  [
    ("#tag B-X\nx O\n# O\n", [("#tag", "x", "#")], [("B-X", "O", "O")]),
    ("1 O\nx B-X\n", [("1", "x")], [("O", "B-X")]),
    ("10\xa0000 O\n% B-X\n", [("10\xa0000", "%")], [("O", "B-X")]),
    ("\u3000 O\nx O\n", [("x",)], [("O",)]),
    ("a O\rb B-X\r\rc O\r", [("a", "b"), ("c",)], [("O", "B-X"), ("O",)]),
    ("a O\r\r\nb\u2028 B-X\r\r\n", [("a", "b")], [("O", "B-X")]),
    # Without an empty line next to the mark of a document.
    ("a O\n-DOCSTART- O\nb O\n", [("a",), ("b",)], [("O",), ("O",)]),
  ],
)
def test_two_columns_are_words_and_tags(tmp_path, text, words, tags):
  """Catches lines that end elsewhere, and words that are taken for comments."""
  (tmp_path / "a").write_text(text)
  found = conll.read_own(tmp_path / "a", conll.Columns())
  assert [e.texts for e in found] == words
  assert [e.label for e in found] == tags


CONLLU = """# text = Don't go
1-2\tDon't\t_\t_\t_
1\tDo\tdo\tAUX\tVB
2\tn't\tnot\tPART\tRB

1\tgo\tgo\tVERB\tVB
"""


@pytest.mark.parametrize(
  ("text", "columns", "told"),
  [
    (
      "# id 1\tdomain=x\nAda _ _ B-X\nx _ _ O\n",
      "",
      "line 1 has 3 columns, not 2",
    ),
    ("# id\tdomain\nAda\tPER\nx\tO\n", "", "line 1 has a comment"),
    ("# newdoc\nAda NN\nsat VB\n", "", "line 1 has a comment"),
    ("Ada NN B-X\nsat VB O\n", "", "line 1 has 3 columns, not 2"),
    ("Ada\tB-X\nsat\tO\nWord\tPOS\tx\n", "", "line 3 has 3 columns"),
    ("Word\tPOS\nAda\tNN\n", "", "line 1 has the names of columns"),
    ("Token ner_tag\n\nAda B-X\n", "", "line 1 has the names of columns"),
    ("B-X\tAda\nO\tsat\n", "", "column 1 has tags in place of"),
    ("1 NN\n2 VB\n", "", "line 1 has a number in place of each word"),
    ("1\tAda\tB-X\n2\tx\tO\n", "", "line 1 has 3 columns, not 2"),
    ("1\tAda\tB-X\n2\tx\tO\n", "1 3", "line 1 has a number in place"),
    (CONLLU, "2 4", "line 2 has a range"),
    ("# new\nAda NN B-X\n# XY O\n", "1 3", "line 1 has 2 columns, not 3"),
    (CONLLU.partition("\n")[2], "2 4", "line 1 has a range"),
    ("Ada\tB-X\t1\nsat\tO\n", "1 2", "line 2 has 2 columns, not 3"),
    ("Ada sat .\tB-X O O\n", "", "line 1 has several words in a column"),
    ("Ada sat .\tgood\nsat\tbad\n", "", "line 1 has several words"),
    ("Ada\tB-X\nsat\n", "", "line 2 has 1 column, not 2"),
  ],
)
def test_other_columns_are_refused(tmp_path, text, columns, told):
  """Catches comments, names and numbers as words, with tags by a guess."""
  (tmp_path / "a").write_text(text)
  names = ("tokens_column", "tags_column")
  places = dict(zip(names, columns.split(), strict=False))
  with pytest.raises(UserError, match=told) as error:
    own_task(tmp_path / "a", **places)
  assert "\n" not in str(error.value)


GERMEVAL = """#\tde.wikipedia.org\t[2009-10-17]
1\tAda\tB-PER\tO
2\t#\tO\tO

#\ta.de\t[2009-10-18]
1\tsat\tO\tO
"""
MULTICONER = """# id 1\tdomain=x
Ada _ _ B-PER
# _ _ O

# id 2\tdomain=x
sat _ _ O
"""
TABS = "# text = Ada #\nAda\tNE\tB-PER\n#\tXY\tO\n\n# x\nsat\tVV\tO\n"


@pytest.mark.parametrize(
  ("text", "word", "tag"),
  [(GERMEVAL, "2", "3"), (MULTICONER, "1", "4"), (TABS, "1", "3")],
)
def test_comments_of_files_of_columns_are_left_out(tmp_path, text, word, tag):
  """Catches comments refused, or read as words, and a word # left out."""
  (tmp_path / "a").write_text(text)
  columns = {"tokens_column": word, "tags_column": tag}
  options = tagging.TagOptions(**columns)
  rows = conll.read_own(tmp_path / "a", options.file_columns("a"))
  assert [row.texts for row in rows] == [("Ada", "#"), ("sat",)]
  assert [row.label for row in rows] == [("B-PER", "O"), ("O",)]


def test_conllu_is_read(tmp_path):
  """Catches ranges and empty nodes as words, and words with spaces refused."""
  text = CONLLU.replace("\n2\t", "\n1.1\tI\ti\tPRON\tP\n2\t")
  text += "2\t10 000\t_\tNUM\tCD\n"
  path = tmp_path / "en-ud-train.conllu"
  path.write_text(text)
  with pytest.raises(UserError, match=r"end its name in \.conllu, and choose"):
    own_task(path.rename(tmp_path / "a"))
  (tmp_path / "a").rename(path)
  path.with_name("en-ud-dev.conllu").write_text(text)
  for column, tags in (("", "AUX PART VERB NUM"), ("5", "VB RB VB CD")):
    task = own_task(tmp_path, tags_column=column)
    examples = task.load("train")
    assert [e.texts for e in examples] == [("Do", "n't"), ("go", "10 000")]
    labels = [task.head.labels[i] for e in examples for i in e.label]
    assert labels == tags.split()
  path.write_text("Ada\ta\ta\tNOUN\n")
  with pytest.raises(UserError, match="line 1 has no number in column 1"):
    own_task(tmp_path)


WORDS = "such as [A-Z]+ are not entity tags"


@pytest.mark.parametrize(
  ("tags", "scheme", "classes", "spans"),
  [
    ("B I O B", "are IOB", "O B I", [("", 0, 2), ("", 3, 4)]),
    ("B E S B M E", "are BMES", "O B I", [("", 0, 2), ("", 2, 3), ("", 3, 6)]),
    ("I I O", "are IOB, read as B/I", "O B I", [("", 0, 2)]),
    ("O I-A O I-A B-A O B-B", "are IOB,", ..., ...),
    (
      "PER PER LOC O LOC",
      "are kinds without letters",
      "O B-LOC I-LOC B-PER I-PER",
      [("PER", 0, 2), ("LOC", 2, 3), ("LOC", 4, 5)],
    ),
    *(
      (tags, WORDS, ..., ...)
      for tags in ("N V O", "S V O", "O P S", "NOUN VERB")
    ),
  ],
)
def test_a_scheme_is_scored_by_its_entities_and_other_tags_by_word(
  capsys, tags, scheme, classes, spans
):
  """Catches entities scored as words, and a pronoun's O as no entity."""
  row = (["w"] * len(tags.split()), tags.split())
  task = tagging.own_task({"train": [row], "test": [row]})
  assert re.search(f"own: tags {scheme}", capsys.readouterr().out)
  metric = "accuracy" if scheme == WORDS else "entity_f1"
  assert task.main_metric == metric
  if classes is not ...:
    names = task.head.labels
    assert names == tuple(classes.split())
    (gold,) = task.load("own-test")
    assert tagging.entities([names[x] for x in gold.label]) == spans
    assert task.metrics["entity_f1"]([gold.label], [gold.label]) == 1


@pytest.mark.parametrize(
  ("names", "added"),
  [
    ("O LOC PER", ("B-LOC", "I-LOC", "B-PER", "I-PER")),
    ("O B-PER M-PER E-PER S-PER", ("I-PER",)),
    ("O B-PER I-PER E-PER S-PER", ()),
    ("O I-PER B-PER", ()),
  ],
)
def test_numbers_are_the_given_names(names, added):
  """Catches numbers of kinds, or of BMES, that have no class in IOB2."""
  names = tuple(names.split())
  numbers = [*range(1, len(names)), 0, 1]
  rows = {"test": [(["w"] * len(numbers), numbers)] * 2}
  task = tagging.own_task(rows, classes=names)
  assert task.head.labels == (*names, *added)
  (label, _) = (e.label for e in task.load("own-test"))
  found = tagging.entities([task.head.labels[x] for x in label])
  plain = [
    name if "-" in name or name == "O" else f"I-{name}" for name in names
  ]
  assert found == tagging.entities([plain[x] for x in numbers])
  assert task.head.has_entities
  # A model with these classes is evaluated on the same numbers.
  again = tagging.own_task(rows, classes=task.head.labels)
  assert again.head == task.head


@pytest.mark.parametrize(
  ("tags", "message"),
  [
    ("B-A I-A LOC O", "the tag 'LOC' is of no scheme.* like 'B-A'"),
    ("B-A I-A L-A S-A O", "the tag 'L-A' is of no scheme.* like 'B-A'"),
    ("B-A B I O", "the tag 'B-A' is of no scheme.* like 'B'"),
    ("B-A I-A o", "the tag 'o' is of no scheme.* like 'B-A'"),
    ("A-B A-I O", "the tag 'A-B' is of no scheme"),
    ("B_A I_A O", "the tag 'B_A' is of no scheme"),
    ("B-A B-A,B-B O", "the tag 'B-A,B-B' is of no scheme"),
    ("PER domain=x 0.5 O", "the tag '0.5' is of no scheme.* like 'PER'"),
    ("NOUN _ VERB", "the tag '_' is of no scheme"),
    ("NOUN b-per VERB", "the tag 'b-per' is of no scheme"),
    ("NOUN 1e-3 VERB", "the tag '1e-3' is of no scheme"),
    ("NOUN .5 50% VERB", "the tag '.5' is of no scheme"),
  ],
)
def test_mixed_schemes_are_refused(tags, message):
  """Catches classes such as LOC and B-LOC, next to each other."""
  row = (["w"] * len(tags.split()), tags.split())
  first = ["O" if "O" in tags.split() else row[1][0]]
  row = {"tokens": row[0], "tags": row[1]}
  first = {"tokens": ["w"], "tags": first}
  with pytest.raises(UserError, match=f"data, record [12]: {message}"):
    tagging.own_task([first, row])


@pytest.mark.parametrize("names", ["B I", "B-X I-X"])
def test_entities_without_a_word_outside_have_the_class_o(names):
  """Catches given classes without O, of which no position is O's."""
  names = tuple(names.split())
  rows = {"train": [(["a", "b"], names)], "test": [(["a", "b"], [0, 1])]}
  task = tagging.own_task(rows, classes=names)
  assert task.head.labels == (*names, "O")
  (example,) = task.load("own-test")
  (outside,) = task.trivial([example])
  assert example.label == [0, 1] and outside == [[2, 2]]


def test_signs_of_german_parts_of_speech_are_tags(tmp_path):
  """Catches STTS's tag of a comma, read as the list of a text."""
  (tmp_path / "a.conll").write_text("Ja PTKANT\n, $,\nnein ADV\n. $.\n\n" * 9)
  task = own_task(tmp_path / "a.conll")
  assert task.head.labels == ("$,", "$.", "ADV", "PTKANT")
  rows = {"train": [(["a", "b"], ["X,", "Y"])] * 2}
  with pytest.raises(UserError, match="'X,' is a list that is written as"):
    tagging.own_task(rows)
  assert tagging.own_task(rows, classes=("X,", "Y")).head.labels == ("X,", "Y")


def test_numbers_as_text_are_named(tmp_path):
  """Catches labels that name the numbers of jsonl alone."""
  given = ("O", "B-PER")
  text = "Ada 1\nsat 0\n\n" * 9
  (tmp_path / "a.conll").write_text(text)
  rows = '"Ada sat","1 0"\n' * 3
  (tmp_path / "a.csv").write_text("tokens,tags\n" + rows)
  for name in ("a.conll", "a.csv"):
    task = tagging.own_task(str(tmp_path / name), classes=given)
    assert task.head.labels == ("O", "B-PER")
    assert {tuple(e.label) for e in task.load("train")} == {(1, 0)}
  (tmp_path / "a.csv").write_text("tokens,tags\n" + rows)
  with pytest.raises(UserError, match="has no name: name all tags"):
    own_task(tmp_path / "a.csv")


def test_a_folder_of_hugging_faces_form(tmp_path):
  """Catches data/train-00000-of-00001.parquet that is not looked for."""
  (tmp_path / "set/data").mkdir(parents=True)
  for split, word in (("train", "Ada"), ("validation", "Tom"), ("test", "I")):
    rows = [{"tokens": [word, "sat"], "tags": ["B-PER", "O"]}] * 2
    name = f"set/data/{split}-00000-of-00001.jsonl"
    runs.write_lines(tmp_path / name, rows)
  task = own_task(tmp_path / "set")
  assert task.load("train")[0].texts == ("Ada", "sat")
  assert task.load("set-dev")[0].texts == ("Tom", "sat")


def test_words_that_are_read_as_sentences_are_refused(tmp_path, capsys):
  """Catches tables with a word in each row, and sentences that none divides."""
  path = tmp_path / "kaggle.csv"
  rows = ["1,Tom,B-per", ",sat,O", ",.,O", "2,Ann,B-per", ",ran,O"]
  path.write_text("Sentence #,Word,Tag\n" + "\n".join(rows))
  names = {"tokens_column": "Word", "tags_column": "Tag"}
  with pytest.raises(UserError, match=r"line 2: each sentence of .* one word"):
    own_task(path, **names)
  path = tmp_path / "a.conll"
  path.write_text("Tom B-per\n\nsat O\n\nAnn B-per\n\nran O\n\n")
  with pytest.raises(UserError, match=r"line 1: each sentence of .* one word"):
    own_task(path)
  path.write_text("Tom B-per\nsat O\n" * 60)
  own_task(path)
  assert "train is one sentence of 120 words" in capsys.readouterr().out


@pytest.mark.parametrize(
  "lists",
  [
    "\"['Tom', 'sat']\",\"['B-X', 'O']\"",
    '"[""Ann"", ""sat""]",B-X O',
    "['Tom' 'sat'],B-X O",
    '"[Tom, sat]",B-X O',
    "Tom sat,[1 0]",
    'Tom sat,"B-X, O"',
  ],
)
def test_lists_in_text_are_refused(tmp_path, lists):
  """Catches pandas' lists in csv, whose signs become words and tags."""
  path = tmp_path / "a.csv"
  path.write_text(f"tokens,tags\n[ x,O O\n{lists}\n")
  with pytest.raises(UserError, match="is a list that is written as text"):
    own_task(path)
  with pytest.raises(UserError, match="is not a sentence: give its text, or"):
    tagging.Tagger(("O", "B-X")).example('["Tom", "sat"]')
  text = tagging.Tagger(("O", "B-X")).example("[Laughter, applause]")
  assert text.texts == ("[Laughter,", "applause]")


def test_arrays_are_sentences(tmp_path):
  """Catches brackets of a sentence that are taken for a list, and arrays."""
  (tmp_path / "a.csv").write_text("tokens,tags\n[ x,O B-X\n[ x ],O O O\n")
  sentences = own_task(tmp_path / "a.csv")
  examples = [*sentences.load("train"), *sentences.load("a-dev")]
  assert {e.texts for e in examples} == {("[", "x"), ("[", "x", "]")}
  rows = [(np.array(["Tom", "sat"]), np.array([1, 0]))]
  given = ("O", "B-X")
  rows = {"train": rows, "test": rows}
  task = tagging.own_task(rows, classes=given)
  assert task.load("own-test")[0][:2] == (("Tom", "sat"), [1, 0])


def test_columns_by_number_and_other_tags(tmp_path):
  """Catches parts of speech that are scored as entities."""
  (tmp_path / "a.iob2").write_text(UNER)
  uner = tagging.KNOWN["uner"].columns
  (known,) = conll.read_known(tmp_path / "a.iob2", uner)
  assert known[:2] == (("tampa", "bay", "."), ("B-LOC", "I-LOC", "O"))
  task = own_task(tmp_path / "a.iob2", tokens_column="2", tags_column="3")
  (example,) = task.load("train")
  assert example.texts == ("tampa", "bay", ".") and example.label == [1, 2, 0]
  for places, message in (
    ({"tokens_column": "0"}, "tokens_column=0: columns of files .* from 1"),
    ({"tags_column": "tag"}, "tags_column=tag: columns of files .* from 1"),
    ({"tags_column": "1"}, "words and tags are both in column 1"),
  ):
    with pytest.raises(UserError, match=message):
      own_task(tmp_path / "a.iob2", **places)
  rows = [("Tom sat", "NOUN VERB"), (["a"], ["DET"])]
  task = tagging.own_task({"train": rows, "test": rows})
  assert (task.main_metric, task.baseline) == ("accuracy", "one tag")
  gold = [e.label for e in task.load("own-test")]
  assert task.head.labels == ("DET", "NOUN", "VERB") and gold == [[1, 2], [0]]
  assert task.metrics["accuracy"]([[1, 1], [0]], gold) == 2 / 3
  rows = {"train": [(["Tom", "sat"], [1, 0])], "dev": [("Tom", "B-PER")]}
  given = ("O", "B-PER")
  task = tagging.own_task(rows, classes=given)
  assert task.load("train")[0].label == [1, 0]
  # Without entities, the score is 0 for any number of O.
  given = ("B-PER", "I-PER", "O")
  rows["train"] = [(["Tom", "sat"], [0, 2])]
  task = tagging.own_task(rows, classes=given)
  (answer,) = task.trivial(those := task.load("own-dev"))
  assert task.measure(answer, those)["entity_f1"] == 0
  with pytest.raises(
    UserError, match=r"record 1: the tag 0 has no name.* labels="
  ):
    tagging.own_task(rows)


@pytest.mark.parametrize(
  ("name", "text", "words"),
  [
    ("a.jsonl", '{"tokens": ["a"], "tag": ["O"]}', "one with --tags_column"),
    ("a.jsonl", '{"tokens": ["a", "b"], "tags": ["O"]}', "2 words, but 1 tags"),
    ("a.jsonl", '{"tokens": [1], "tags": ["O"]}', "word 1 is blank, or"),
    (
      "a.jsonl",
      '{"tokens": ["a"], "tags": ["N/A"]}',
      "word 1 has no tag .'N/A'",
    ),
    ("a.jsonl", '{"tokens": ["a"], "tags": [-100]}', "word 1 has no tag .-100"),
    ("a.jsonl", "", "a.jsonl holds no sentences"),
    ("a.conll", "", "a.conll holds no sentences"),
    ("a.conll", "a\tO\n", "holds only the tag O"),
    ("a.conll", "a\tO\nb\t\n", "line 2: 'b' has no tag"),
    (
      "a.jsonl",
      '{"tokens": ["a", "b"], "tags": ["B-X", null]}',
      "word 2 has no tag .None",
    ),
    ("a.jsonl", '{"tokens": ["a", "b"], "tags": ["B-X", 1]}', "names and numb"),
    ("a.jsonl", '{"tokens": ["a"], "tags": [0.5]}', "tag 0.5 is no text and"),
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


@pytest.fixture
def tagger(loaded):
  tags = "O", "B-PER", "I-PER"
  return random_models.with_head(loaded, tagging.Tagger(tags), "bidirectional")


def test_tokens_have_the_labels_of_their_words(loaded):
  head = tagging.Tagger(("O", "B-X", "I-X"))
  texts = ("Bartholomew", "sat", "Tom")
  rows = head.encode(loaded, [Example(texts, [1, 0, 2]), Example(("a",))], 16)
  words, tokenizer = rows.origins[0].tolist(), loaded.tokenizer
  expected = tokenizer.encode(" ".join(texts)).tolist()
  frame = [tokenizer.bos_id, *expected, tokenizer.eos_id]
  assert rows.tokens[0, : len(frame)].tolist() == frame
  assert sorted(set(words)) == [-1, 0, 1, 2] and words.count(0) > 1
  at = [[1, 0, 2, -1][w] for w in words]
  assert rows.labels[0, : len(at)].tolist() == at
  # A word has its tokens' majority label.
  tags = np.zeros((2, rows.tokens.shape[1]), int)
  tags[0, : len(words)] = [{0: 1, 1: 2, 2: 1}.get(w, 2) for w in words]
  assert head.decode(tags, rows) == [[1, 2, 1], [0]]


@pytest.mark.parametrize("longest", [4, 9, 16, 400])
def test_each_token_of_a_long_sentence_counts_once(loaded, longest):
  """Catches words after the longest row that get the first class."""
  head = tagging.Tagger(("ADJ", "NOUN", "X"))
  texts = ("Bartholomew", "sat", "Tom", "near") * 6
  examples = [Example(texts, [1, 2, 1, 2] * 6), Example(("a", "hills"), [0, 1])]
  rows = head.encode(loaded, examples, longest)
  assert rows.lengths.max() <= longest and rows.cut[0] == 0
  tokens = loaded.tokenizer.encode(" ".join(texts)).tolist()
  labelled = rows.tokens[(rows.origins >= 0) & (rows.origins < len(texts))]
  assert labelled.tolist() == tokens
  found = np.where(rows.labels < 0, 0, rows.labels)  # all right, or ADJ
  assert head.decode(found, rows) == [e.label for e in examples]
  if longest == 16:  # tokens that count have context on both sides
    at = np.flatnonzero(rows.origins[1] >= 0)
    assert at[0] >= 3 and at[-1] <= 12


def with_tokenizer(loaded, **parts):
  """Returns a model with a tokenizer of letters, of which no two are joined."""
  letters = {x: i for i, x in enumerate(["<s>", "</s>", "▁", *"abc"])}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
  for name, part in parts.items():
    setattr(backend, name, part)
  return random_models.with_meta(loaded, tokenizer=Tokenizer(backend))


def test_a_space_alone_belongs_to_the_word_after_it(loaded):
  """Catches a space's token that has the label of the word before it."""
  transformers = pytest.importorskip("transformers", reason="the hf extra")
  split = tokenizers.pre_tokenizers.Metaspace()
  model = with_tokenizer(loaded, pre_tokenizer=split)
  words = ["ab", "c", "bca"]
  theirs = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer.from_str(model.tokenizer.to_json())
  )(words, is_split_into_words=True, add_special_tokens=False)
  head = tagging.Tagger(("O", "B-X", "I-X"))
  rows = head.encode(model, [Example(tuple(words), [0, 1, 2])], 16)
  inside = rows.origins[0] >= 0
  assert rows.tokens[0][inside].tolist() == theirs["input_ids"]
  assert rows.origins[0][inside].tolist() == theirs.word_ids()
  assert rows.labels[0][inside].tolist() == theirs.word_ids()
  # A vote of the space alone: it is the first token of its word.
  votes = np.where(rows.tokens == 2, 2, 0)
  votes[rows.origins == 2] = 1
  assert head.decode(votes, rows) == [[0, 2, 1]]


@pytest.mark.parametrize("texts", [None, ["a", None], ["a", " "], 3])
def test_what_is_no_sentence_is_refused(texts):
  """Catches tracebacks, and a class of a word that no text has."""
  head = tagging.Tagger(("ADJ", "NOUN"))
  with pytest.raises(UserError, match="is not a sentence: give its text"):
    head.example(texts)
  for empty in ("", []):
    assert head.example(empty).texts == ()


def test_a_word_without_a_token_has_no_class(loaded, capsys):
  """Catches the first class as the prediction of a word without tokens."""
  model = with_tokenizer(
    loaded,
    normalizer=tokenizers.normalizers.Replace("b", ""),
    pre_tokenizer=tokenizers.pre_tokenizers.Whitespace(),
  )
  example = Example(("a", "bb", "c"), [1, 0, 0])
  for labels, known, told in (
    (("ADJ", "NOUN"), -1, ("NOUN", None, "ADJ")),
    (("O", "B-X"), 0, ("B-X", "O", "O")),
  ):
    head = tagging.Tagger(labels)
    rows = head.encode(model, [example], 16)
    (found,) = head.decode(np.maximum(rows.labels, 0), rows)
    assert found == [1, known, 0]
    assert head.prediction_fields(found)["labels"] == told
    right = 3 if known == 0 else 2
    assert tagging.word_accuracy([found], [example.label]) == right / 3
    assert (head.prediction_fields(found)["entities"] is None) == (known < 0)
  said = capsys.readouterr().out.splitlines()
  start = "warning: words without a token, which get "
  assert said == [f"{start}{x}: 1 ('bb')" for x in ("no tag", "O")]


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
  return tagging.known_task(tmp_path, "conll")


@pytest.mark.parametrize(
  ("name", "text", "column", "expected"),
  [
    ("a.txt", CONLL, "1", "EU rejects German lamb|Peter Blackburn #"),
    ("a", CONLL, "", UserError),
    ("a.conll", "Tom B-PER\nsat O\n\n# O\n", "", "Tom sat|#"),
    ("a.txt", "Tom X-Y\nsat X-Z\n", "", "Tom X-Y|sat X-Z"),
    ("a.txt", "Tom sat .\n\nThe dogs sat .\n", "", "Tom sat .|The dogs sat ."),
    ("a.txt", "Tom\nsat\n\nThe\n", "", UserError),
    ("a.txt", "Tom\nsat\n\nThe\n", "1", "Tom sat|The"),
    ("a.tsv", "Tom\t\nsat\t\n", "1", "Tom sat"),
    ("a.tsv", "text\tid\nTom\t1\n", "", "Tom"),
    ("a.iob2", UNER, "", UserError),
    ("a.iob2", UNER, "2", "tampa bay ."),
    ("a.iob2", UNER, "1", UserError),
    ("a.iob2", UNER, "text", UserError),
    ("a.conllu", CONLLU, "", "Do n't|go"),
    ("a.conllu", CONLLU, "3", "do not|go"),
  ],
)
def test_predict_reads_the_files_of_training(
  tmp_path, tagger, name, text, column, expected
):
  """Catches lines of words and tags that are tagged as sentences."""
  path = tmp_path / name
  path.write_text(text)
  columns = {"text_column": column} if column else {}
  if expected is UserError:
    with pytest.raises(UserError) as error:
      predict(tagger, path, **columns)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    return
  predictions = predict(tagger, str(path), **columns)
  assert "|".join(" ".join(x.texts) for x in predictions) == expected


def test_a_model_writes_its_predictions_as_a_file_of_columns(tagger, tmp_path):
  """Catches predictions of words that no program for CoNLL can read."""
  model = random_models.saved(tagger, tmp_path / "model")
  rows = [(["Tom", "10 000"], ["B-PER", "O"]), (["sat"], ["O"])]
  found = predict(model, [words for words, _ in rows])
  tuned_model = finetune.finetune(
    model, rows, preset="tagging", epochs=0, output=tmp_path, quiet=True
  )
  path = tuned_model["own"].folder / "own-test.conll"
  columns = conll.Columns(tag=1, width=3)
  assert [s.label for s in conll.read_known(path, columns)] == [
    tuple(tags) for _, tags in rows
  ]
  columns = columns._replace(tag=2)
  for sentence, (words, _), one in zip(
    conll.read_known(path, columns), rows, found, strict=True
  ):
    assert sentence.texts == tuple(words)
    assert sentence.label == one.labels


@pytest.mark.slow
def test_it_trains_and_is_saved(loaded, tmp_path, capsys):
  made = task(tmp_path)
  how = {"batch_size": 16, "epochs": 6, "max_length": 16}
  (outcome,) = tuned.trained(loaded, made, [TrialRun(1e-2, 0)], tmp_path, **how)
  examples = {n: made.load(n) for n in made.evaluations}
  about = tuned.summarised(made, examples, [outcome])
  assert about.evaluations["conll-test"]["baseline"]["entity_f1"] == 0
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
  runs.main("antlm_jax.evals.predict", *asked)
  assert capsys.readouterr().out.endswith(json.dumps(found.to_json()) + "\n")
  entity = {"kind": "PER", "start": 0, "stop": 1}
  assert found.to_json()["entities"][0] == entity


@pytest.mark.slow
def test_the_real_sentences(tmp_path):
  real.unpacked("ner", tmp_path)
  task = tagging.known_task(tmp_path, "conll")
  sizes = [len(task.load(split)) for split in ("train", *task.evaluations)]
  assert sizes == [14041, 3250, 3453] and len(task.head.labels) == 9
