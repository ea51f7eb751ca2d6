"""Tagging: files, words and their tokens, metrics and real data."""

import itertools
import json

import numpy as np
import pytest
import tokenizers

from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import labelled, summary, tagging
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
  first, second = tagging.columns(tmp_path / "a")
  assert first.texts == ("EU", "rejects", "German", "lamb")
  assert tagging.iob2(first.label) == ["B-ORG", "O", "B-MISC", "O"]
  assert second.texts == ("Peter", "Blackburn", "#")  # not a comment
  assert tagging.iob2(second.label) == ["B-PER", "I-PER", "B-PER"]
  assert second.id == f"{tmp_path / 'a'}, line 8"


def test_a_document_begins_a_sentence(tmp_path):
  """Catches sentences that are joined if no empty line is next to the mark."""
  (tmp_path / "a").write_text("a O\n-DOCSTART- O\nb O\n")
  assert [e.texts for e in tagging.columns(tmp_path / "a")] == [("a",), ("b",)]


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
    tagging.make_tagging_task(tmp_path, "conll", "bidirectional")


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
  task = tagging.make_tagging_task(
    {"train": rows, "test": rows}, "own", "bidirectional"
  )
  become = "" if scheme == "IOB2" else ", become B-X/I-X"
  assert f"own: tags are {scheme}{become}\n" in capsys.readouterr().out
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
  return tagging.make_tagging_task(str(data), "own", "bidirectional", options)


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


def test_one_file_of_wnut_is_each_set(tmp_path, run, capsys):
  """Catches words alone, and other annotations, that join the test set."""
  tagged = "Tom\tB-person\nsat\tO\n"
  texts = {
    "wnut17train.conll": tagged,
    "emerging.dev.conll": tagged,
    "emerging.test": "Ann\nsat\n",
    "emerging.test.annotated": "Ann\tB-person\nsat\tO\n",
    "emerging.test.conll": "Ann\tB-person,B-group\nsat\tO\n",
  }
  folder = tmp_path / "wnut17"
  folder.mkdir()
  for name in ("wnut17train.conll", "emerging.dev.conll", "emerging.test"):
    (folder / name).write_text(texts.pop(name))
  with pytest.raises(UserError, match="line 1: 1 columns, not a word"):
    own_task(folder)
  unused = ["emerging.test"]
  for name, text in texts.items():
    (folder / name).write_text(text)
    (example,) = own_task(folder).load("wnut17-test")
    assert (example.texts, example.label) == (("Ann", "sat"), [1, 0])
    unused += [name] * (name != "emerging.test.annotated")
    told = f"test is emerging.test.annotated; not used: {', '.join(unused)}\n"
    assert f"{folder}: {told}" in capsys.readouterr().out
  how = "--preset=tagging", "--epochs=1", "--max_length=16"
  runs.main(
    "antlm_jax.evals.finetune", f"--checkpoint={run}", f"--data={folder}", *how
  )
  out = capsys.readouterr().out
  assert "wnut17-test" in out and told in out and "left out" not in out
  (folder / "emerging.test.annotated").unlink()
  with pytest.raises(UserError, match=r"'B-person,B-group' is of no scheme"):
    own_task(folder)
  (folder / "my_test.conll").write_text(tagged)
  with pytest.raises(UserError, match=r"be test: .*test\.conll, .*my_test"):
    own_task(folder)


def test_two_files_of_a_known_set_are_refused(tmp_path):
  """Catches a second layout that is ignored."""
  (tmp_path / "ontonotes").mkdir()
  for name in itertools.product(("train", "dev", "test"), ("conll", "txt")):
    (tmp_path / "ontonotes" / ".".join(name)).write_text("Tom B-PERSON\n")
  with pytest.raises(UserError, match=r"train: .*train\.conll, .*train\.txt"):
    tagging.make_tagging_task(tmp_path, "ontonotes", "bidirectional")


COMMENTS = "# id 1\tdomain=train\n{}\n# id 2 domain=x\n# _ _ O\nx _ _ O\n"
CONLLU = """# newdoc
# text = Don't go
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\tVB\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_
2.1\tyou\t_\tPRON\t_\t_\t_\t_\t_\t_
3\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\tSpaceAfter=No

1\t#\t#\tSYM\tSYM\t_\t0\troot\t_\t_
"""


@pytest.mark.parametrize(
  ("text", "words", "tags", "told"),
  [
    (
      COMMENTS.format("#tag _ _ B-X\n"),
      [("#tag",), ("#", "x")],
      [("B-X",), ("O", "O")],
      "comments left out: 2 ('# id 1",
    ),
    (
      "# text = tom sat\n# newdoc\ntom\tB-X\n#\tO\n\n#sat\tO\n",
      [("tom", "#"), ("#sat",)],
      [("B-X", "O"), ("O",)],
      "comments left out: 2 ('# text = tom sat')",
    ),
    (
      "1\tTom\tB-X\n2\tx\tO\n\n1\tx\tO\n",
      [("Tom", "x"), ("x",)],
      [("B-X", "O"), ("O",)],
      "words are read from column 2, tags from column 3\n",
    ),
    (
      CONLLU,
      [("Do", "n't", "go"), ("#",)],
      [("AUX", "PART", "VERB"), ("SYM",)],
      "tags from column 4 (UPOS)\n",
    ),
    (CONLLU, ..., ..., 'ranges or empty nodes left out: 2 ("1-2'),
    ("1 O\n2 B-X\n", [("1", "2")], [("O", "B-X")], None),
    ("10\xa0000 O\n% B-X\n", [("10\xa0000", "%")], [("O", "B-X")], None),
    ("\u3000 O\nx O\n", [("x",)], [("O",)], "lines without a word left out: 1"),
    ("a O\rb B-X\r\rc O\r", [("a", "b"), ("c",)], [("O", "B-X"), ("O",)], None),
    ("a O\r\r\nb\u2028 B-X\r\r\n", [("a", "b")], [("O", "B-X")], None),
    (
      "Word\tPOS\nthe\tDET\n\nword\tNOUN\n",
      [("the",), ("word",)],
      [("DET",), ("NOUN",)],
      "names of columns left out: 1 ('Word\\tPOS')",
    ),
    (
      "Token tag\n\ntag B-X\n",
      [("tag",)],
      [("B-X",)],
      "names of columns left out: 1",
    ),
  ],
)
def test_what_is_no_word_is_left_out(tmp_path, capsys, text, words, tags, told):
  """Catches comments, numbers and ranges as words, and words as comments."""
  (tmp_path / "a").write_text(text)
  found = tagging.columns(tmp_path / "a")
  said = capsys.readouterr().out
  assert told in said if told else said == ""
  if words is not ...:
    assert [e.texts for e in found] == words
    assert [e.label for e in found] == tags


@pytest.mark.parametrize(
  ("tags", "scheme", "classes", "spans"),
  [
    ("B I O B", "IOB2", "O B I", [("", 0, 2), ("", 3, 4)]),
    ("B E S B M E", "BMES", "O B I", [("", 0, 2), ("", 2, 3), ("", 3, 6)]),
    ("I I O", "IO,", "O B I", [("", 0, 2)]),
    ("O I-A O I-A B-A O B-B", "IOB1 (2 entities begin as", ..., ...),
    (
      "PER PER LOC O LOC",
      "kinds without letters",
      "O B-LOC I-LOC B-PER I-PER",
      [("PER", 0, 2), ("LOC", 2, 3), ("LOC", 4, 5)],
    ),
    ("I-A B-B O", "IOB2 (2 entities begin as", ..., ...),
  ],
)
def test_letters_alone_and_kinds_alone_are_entities(
  capsys, tags, scheme, classes, spans
):
  """Catches entities that are scored as words, as parts of speech are."""
  row = (["w"] * len(tags.split()), tags.split())
  task = tagging.make_tagging_task(
    {"train": [row], "test": [row]}, "own", "bidirectional"
  )
  assert f"own: tags are {scheme}" in capsys.readouterr().out
  assert task.main_metric == "entity_f1"
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
  given = labelled.Classes(names)
  task = tagging.make_tagging_task(
    rows, "own", "causal", tagging.TagOptions(), given
  )
  assert task.head.labels == (*names, *added)
  (label, _) = (e.label for e in task.load("own-test"))
  found = tagging.entities([task.head.labels[x] for x in label])
  plain = [
    name if "-" in name or name == "O" else f"I-{name}" for name in names
  ]
  assert found == tagging.entities([plain[x] for x in numbers])
  assert task.head.of_entities
  # A model with these classes is evaluated on the same numbers.
  given = labelled.Classes(task.head.labels)
  again = tagging.make_tagging_task(
    rows, "own", "causal", tagging.TagOptions(), given
  )
  assert again.head == task.head


@pytest.mark.parametrize("tags", ["N V O", "S V O", "O P S", "NOUN VERB"])
def test_other_tags_are_scored_by_word(capsys, tags):
  """Catches a pronoun's O, or a subject's S, that is read as no entity."""
  row = (tags.lower().split(), tags.split())
  task = tagging.make_tagging_task(
    {"train": [row], "test": [row]}, "own", "bidirectional"
  )
  assert task.main_metric == "accuracy"
  assert "are not entity tags" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("tags", "message"),
  [
    ("B-A I-A LOC O", "the tag 'LOC' is of no scheme.* like 'B-A'"),
    ("B-A I-A L-A S-A O", "the tag 'S-A' is of no scheme.* like '[IL]-A'"),
    ("B-A B I O", "the tag 'B' is of no scheme.* like 'B-A'"),
    ("B-A I-A o", "the tag 'o' is of no scheme.* like 'B-A'"),
    ("A-B A-I O", "the tag 'A-B' is of no scheme"),
    ("B_A I_A O", "the tag 'B_A' is of no scheme"),
    ("B-A B-A,B-B O", "the tag 'B-A,B-B' is of no scheme"),
  ],
)
def test_mixed_schemes_are_refused(tags, message):
  """Catches classes such as LOC and B-LOC, next to each other."""
  row = (["w"] * len(tags.split()), tags.split())
  first = ["O" if "O" in tags.split() else row[1][0]]
  row = {"tokens": row[0], "tags": row[1]}
  first = {"tokens": ["w"], "tags": first}
  with pytest.raises(UserError, match=f"data, record [12]: {message}"):
    tagging.make_tagging_task([first, row], "own", "bidirectional")


def test_columns_whose_first_column_are_numbers(tmp_path):
  """Catches the numbers of sentences, or of characters, as words."""
  path = tmp_path / "a.tsv"
  for begin, count in (("1\t", 3), ("0\t3\t", 4)):
    lines = (f"{begin}{word}" for word in ("Ada\tB-PER", "sat\tO", "I\tO"))
    path.write_text("\n".join(lines) + f"\n\n{begin}Tom\tB-PER\n")
    with pytest.raises(
      UserError, match=f"first of {count} columns are numbers"
    ):
      own_task(path)
    task = own_task(path, tokens_column=str(count - 1))
    assert task.load("train")[0].texts[0] in ("Ada", "Tom")


@pytest.mark.parametrize("tags", ["B-PER O B-LOC O", "N V N ."])
def test_a_sentence_in_each_line_of_columns_is_refused(tmp_path, tags):
  """Catches sentences as words, and all their tags as one class."""
  path = tmp_path / "a.tsv"
  for words, of in (("Ada saw Oslo .", tags), ('["a"]', '["O"]')):
    path.write_text(f"tokens\ttags\n{words}\t{of}\n{words}\t{of}\n")
    with pytest.raises(
      UserError, match="line 2: it has a whole sentence: save"
    ):
      own_task(path)


def test_numbers_as_text_are_named(tmp_path):
  """Catches labels that name the numbers of jsonl alone."""
  given = labelled.Classes(("O", "B-PER"))
  text = "Ada 1\nsat 0\n\n" * 9
  (tmp_path / "a.conll").write_text(text)
  rows = '"Ada sat","1 0"\n"Ada sat",[1 0]\n"Ada sat","[\'1\', \'0\']"\n'
  (tmp_path / "a.csv").write_text("tokens,tags\n" + rows)
  for name in ("a.conll", "a.csv"):
    task = tagging.make_tagging_task(
      *(str(tmp_path / name), "own", "causal", tagging.TagOptions(), given)
    )
    assert task.head.labels == ("O", "B-PER")
    assert {tuple(e.label) for e in task.load("train")} == {(1, 0)}
  (tmp_path / "a.csv").write_text("tokens,tags\n" + rows[:34])
  with pytest.raises(UserError, match="has no name: name all tags"):
    own_task(tmp_path / "a.csv")


@pytest.mark.parametrize("names", ["FORM\tUPOSTAG", "token\tentity_type"])
def test_names_of_columns_are_no_word(tmp_path, names):
  """Catches a class that is the name of the column."""
  path = tmp_path / "a.tsv"
  path.write_text(f"{names}\nAda\tPROPN\nsat\tVERB\n\nI\tPROPN\nran\tVERB\n")
  assert own_task(path).head.labels == ("PROPN", "VERB")


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


def test_lists_in_text_and_arrays_are_sentences(tmp_path):
  """Catches pandas' lists in csv, whose signs become words and tags."""
  (tmp_path / "a.csv").write_text(
    "tokens,tags\n\"['Tom', 'sat']\",\"['B-X', 'O']\"\n"
    '"[""Ann"", ""\\u0021""]","[""B-X"", ""O""]"\n"[ x","O O"\n[x],O\n'
  )
  found = own_task(tmp_path / "a.csv")
  found = [*found.load("train"), *found.load("a-dev")]
  expected = {("Tom", "sat"), ("Ann", "!"), ("[", "x"), ("[x]",)}
  assert {e.texts for e in found} == expected
  rows = [(np.array(["Tom", "sat"]), np.array([1, 0]))]
  given = labelled.Classes(("O", "B-X"))
  rows = {"train": rows, "test": rows}
  task = tagging.make_tagging_task(
    rows, "own", "causal", tagging.TagOptions(), given
  )
  assert task.load("own-test")[0][:2] == (("Tom", "sat"), [1, 0])


def test_columns_by_number_and_other_tags(tmp_path):
  """Catches parts of speech that are scored as entities."""
  (tmp_path / "a.iob2").write_text(UNER)
  task = own_task(tmp_path / "a.iob2", tokens_column="2", tags_column="3")
  (example,) = task.load("train")
  assert example.texts == ("tampa", "bay", ".") and example.label == [1, 2, 0]
  (tmp_path / "w.tsv").write_text(
    "word\tpos\tner\tlemma\nTom\tN\tB-PER\ttom\nsat\tV\tO\tsit\n"
  )
  named = own_task(tmp_path / "w.tsv", tokens_column="word", tags_column="ner")
  (example,) = named.load("train")
  assert example.texts == ("Tom", "sat") and example.label == [1, 0]
  # The name that records have by default is asked for here.
  (tmp_path / "t.tsv").write_text("word\ttags\tlemma\nTom\tB-PER\ttom\n")
  (example,) = own_task(tmp_path / "t.tsv", tags_column="tags").load("train")
  assert example.texts == ("Tom",) and example.label == [1]
  for places, message in (
    ({"tokens_column": "0"}, "tokens_column=0: columns are counted from 1"),
    ({"tags_column": "tag"}, r"0 columns have the name 'tag'.*word, pos, ner"),
  ):
    with pytest.raises(UserError, match=message):
      own_task(tmp_path / "w.tsv", **places)
  rows = [("Tom sat", "NOUN VERB"), (["a"], ["DET"])]
  task = tagging.make_tagging_task(
    {"train": rows, "test": rows}, "own", "causal"
  )
  assert (task.main_metric, task.baseline) == ("accuracy", "one tag")
  gold = [e.label for e in task.load("own-test")]
  assert task.head.labels == ("DET", "NOUN", "VERB") and gold == [[1, 2], [0]]
  assert task.metrics["accuracy"]([[1, 1], [0]], gold) == 2 / 3
  rows = {"train": [(["Tom", "sat"], [1, 0])], "dev": [("Tom", "B-PER")]}
  given = labelled.Classes(("O", "B-PER"))
  task = tagging.make_tagging_task(
    rows, "own", "causal", tagging.TagOptions(), given
  )
  assert task.load("train")[0].label == [1, 0]
  # Without entities, the score is 0 for any number of O.
  given = labelled.Classes(("B-PER", "I-PER", "O"))
  rows["train"] = [(["Tom", "sat"], [0, 2])]
  task = tagging.make_tagging_task(
    rows, "own", "causal", tagging.TagOptions(), given
  )
  (answer,) = task.trivial(those := task.load("own-dev"))
  assert task.measure(answer, those)["entity_f1"] == 0
  with pytest.raises(
    UserError, match=r"record 1: the tag 2 has no name.* labels="
  ):
    tagging.make_tagging_task(rows, "own", "causal")


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
    ("a.conll", "a\tO\nb\tX\tO\n", "line 2: 3 columns, but the first line"),
    ("a.conll", "a\tO\nb\t\n", "line 2: 'b' has no tag"),
    ("a.conll", "1\ta\tO\t-\n2\tb\tO\t-\n", "columns numbers the words: cho"),
    ("a.csv", "tokens,tags\n['a' 'b'],['O' 'B-X']\n", "the words are not text"),
    ("a.csv", 'tokens,tags\n"[a, b]","O O"\n', "the words are not texts"),
    ("a.jsonl", '{"tokens": ["a"], "tags": [null]}', "tag None is no text and"),
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
  assert rows.lengths.max() <= longest and rows.cut == 0
  tokens = loaded.tokenizer.encode(" ".join(texts)).tolist()
  labelled = rows.tokens[(rows.about >= 0) & (rows.about < len(texts))]
  assert labelled.tolist() == tokens
  found = np.where(rows.labels < 0, 0, rows.labels)  # all right, or ADJ
  assert head.decode(found, rows) == [e.label for e in examples]
  if longest == 16:  # tokens that count have context on both sides
    at = np.flatnonzero(rows.about[1] >= 0)
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
  inside = rows.about[0] >= 0
  assert rows.tokens[0][inside].tolist() == theirs["input_ids"]
  assert rows.about[0][inside].tolist() == theirs.word_ids()
  assert rows.labels[0][inside].tolist() == theirs.word_ids()
  # A vote of the space alone: it is the first token of its word.
  votes = np.where(rows.tokens == 2, 2, 0)
  votes[rows.about == 2] = 1
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
    assert found == [1, known, 0] and head.told(found)["labels"] == told
    right = 3 if known == 0 else 2
    assert tagging.word_accuracy([found], [example.label]) == right / 3
    assert (head.told(found)["entities"] is None) == (known < 0)
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
  return tagging.make_tagging_task(tmp_path, "conll", "bidirectional")


def test_it_trains_and_is_saved(loaded, tmp_path, capsys):
  made = task(tmp_path)
  how = {"batch_size": 16, "epochs": 6, "max_length": 16}
  (outcome,) = tuned.trained(loaded, made, [TrialRun(1e-2, 0)], tmp_path, **how)
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
  runs.main("antlm_jax.evals.predict", *asked)
  assert capsys.readouterr().out.endswith(json.dumps(found.to_json()) + "\n")
  entity = {"kind": "PER", "start": 0, "stop": 1}
  assert found.to_json()["entities"][0] == entity


@pytest.mark.slow
def test_the_real_sentences(loaded, tmp_path, capsys):
  real.unpacked("ner", tmp_path)
  task = tagging.make_tagging_task(tmp_path, "conll", "bidirectional")
  sizes = [len(task.load(split)) for split in ("train", *task.evaluations)]
  assert sizes == [14041, 3250, 3453] and len(task.head.labels) == 9
  words = [f"--checkpoint={loaded.path}", f"--data={tmp_path}"]
  words += ["--task=conll", "--limit=600", "--epochs=1", "--max_length=64"]
  words += ["--lrs=1e-3", f"--output={tmp_path / 'out'}", "--preset=tagging"]
  runs.main("antlm_jax.evals.finetune", *words)
  assert "conll-test" in capsys.readouterr().out
  (folder,) = (tmp_path / "out/conll").iterdir()
  assert (folder / "summary.json").exists()
