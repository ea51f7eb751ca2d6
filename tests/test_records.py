"""Files of records: every command that reads them finds the same mistakes."""

import bz2
import gzip
import json
import operator
import re

import pytest

from antlm_jax.commands import prepare
from antlm_jax.data import text_files
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import (
  answering,
  classification,
  conll,
  labelled,
  retrieval,
  sets,
)
from antlm_jax.evals.zero_shot import ewok, lambada, texts
from antlm_jax.inference import pairs
from tests import runs, tuned


def prepared(path) -> list:
  """Reads the texts as `antlm prepare` does."""
  return [(one.text,) for one in text_files.find_corpus([path]).read("train")]


def tagged(path) -> list:
  """Reads words and tags as fine-tuning does."""
  return conll.read_own(str(path), conll.Columns())


def classified(path) -> list:
  """Reads texts and labels as fine-tuning does."""
  options = classification.ClassifierOptions(), labelled.Columns()
  task = labelled.classify({"train": path}, "own", "causal", *options)
  found = task.load("train") + task.load(task.evaluations[0])
  names = task.head.labels
  return [(*example.texts, names[example.label]) for example in found]


def paired(path) -> list:
  """Reads texts as the training of embedders does."""
  columns = "--query_column=text", "--positive_column=label"
  (job,) = tuned.planned(f"--data={path}", "--preset=pairs", *columns)
  return [example.texts for example in job.task.load("train")]


READERS = {
  "prepare": prepared,
  "classification": classified,
  "pairs": paired,
  "embed": lambda path: [*sets.source_texts(path, ["text"])],
  "predict": lambda path: [*sets.source_texts(path, ["text", "label"])],
  "perplexity": lambda path: texts.read_texts(
    texts.TextSettings(data=path, mode="")
  ),
  "known": lambda path: [*sets.record_fields(path)],
}
BAD = {
  "comma.csv": ("text,label\na,pos\na, b, c,pos\nx,neg\n", "line 3 has more"),
  "space.csv": (
    'label,text\nx,"pos ""a"" "\nx," ""b"""\npos, "a"\nneg, "b, c"\n',
    "line 4: delete the space before '\"a\"'",
  ),
  "short.csv": ("text,label\na,pos\nx\ny,neg\n", "line 3 has fewer"),
  "torn.tsv": ("text\tlabel\na\tpos\nx\ny\tneg\n", "line 3 has fewer"),
  "twice.csv": ("text,text,label\na,b,pos\n", "two columns have the name"),
  "joined.csv": (
    'text,label\n"a,pos\nb,neg\nc",neg\n',
    "line 2: a quotation mark joins it to line 4",
  ),
  "twice.jsonl": (
    '{"text": "a", "text": "b", "label": "x"}\n',
    "line 1: two columns have the name",
  ),
  "half.jsonl": ('{"text": "\\ud83d", "label": "x"}\n', "line 1: it has half"),
}


ROWS = [{"text": f"a{i}", "label": str(i % 2)} for i in range(4)]
TABLE = "text,label\n" + "".join(f"{r['text']},{r['label']}\n" for r in ROWS)
# A text of each kind, its reader, and the number of its records.
TEXTS = {
  "a.txt": ("tom sat .\n", prepared, 1),
  "a.csv": (TABLE, classified, 4),
  "a.tsv": (TABLE.replace(",", "\t"), classified, 4),
  "a.jsonl": ("".join(json.dumps(row) + "\n" for row in ROWS), classified, 4),
  "a.conll": ("Tom B-X\nsat O\n\nAnn B-X\n", tagged, 2),
  "a.json": (json.dumps({"data": []}), answering.read_squad, 0),
}
BINARY = b"\n\x0e\n\x03<s>\x15" + bytes(4) + b"\x18\x03" * 99


@pytest.mark.parametrize(
  ("encode", "message"),
  [
    *(
      (operator.methodcaller("encode", name), "UTF-16.*iconv -f UTF-16")
      for name in ("utf-16", "utf-16-le", "utf-16-be")
    ),
    (lambda text: gzip.compress(text.encode(), mtime=0), "by gzip: decompress"),
    (lambda text: bz2.compress(text.encode()), "compressed by bzip2"),
    (lambda _: b"PK\x03\x04" + bytes(99), "a zip archive or an Excel file"),
    (lambda _: BINARY, "a binary file"),
  ],
)
def test_every_reader_refuses_files_that_are_no_text(tmp_path, encode, message):
  """Catches UTF-16 of ASCII, which is UTF-8 with a zero byte per letter.

  Also catches advice to convert a file that has no text.
  """
  for name, (text, read, count) in TEXTS.items():
    path = tmp_path / name
    path.write_text(text, "utf-8")
    assert len(read(str(path))) == count
    path.write_bytes(encode(text))
    line = runs.told(read, str(path))
    assert re.search(f"{name}.*{message}", line), line
    assert ("UTF-16" in line) == ("UTF-16" in message)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize("letter", ["\u201c", "\u0434"])
def test_utf16_of_other_scripts_is_refused(tmp_path, letter, encoding):
  """Catches text whose bytes are all those of UTF-8, but for its spaces."""
  path, name = tmp_path / "a.txt", encoding.replace("-le", "LE").upper()
  name = name.replace("-BE", "BE")
  for mark in ("", "\ufeff"):
    path.write_bytes((mark + f"{letter * 9} " * 9 + "\n").encode(encoding))
    wanted = name[:6] if mark else name
    runs.refusal(f"a.txt: {wanted}, .*-f {wanted} ", prepared, str(path))
  for count in (1, 99):
    path.write_bytes(b"a text " * count + b"\0")
    runs.refusal("it has zero bytes, as UTF-16", prepared, str(path))


@pytest.mark.parametrize("before", ["", "text,id\n"])
def test_iso_2022_jp_is_refused(tmp_path, before):
  """Catches Japanese that is trained on as noise of ASCII."""
  path = tmp_path / "a.txt"
  path.write_bytes(f"{before}\u65e5\u672c\u8a9e".encode("iso2022_jp"))
  runs.refusal("a.txt: ISO-2022-JP, .*-f ISO-2022-JP ", prepared, str(path))
  # Terminals have other escape sequences.
  path.write_bytes(b"\x1b[1mbold\x1b(B\x1b[m")
  assert len(prepared(str(path))) == 1


@pytest.mark.parametrize(
  ("first", "told"),
  [
    ("text;label", "semicolons, not commas, seem to divide its columns"),
    ("text\tlabel", "tabs, not commas, seem to divide its columns"),
    ("sep=,\ntext,label", "line 1 is for Excel alone: delete it"),
  ],
)
def test_csv_without_commas_is_told(tmp_path, first, told):
  """Catches errors that ask for quotation marks around commas."""
  path, sign = tmp_path / "a.csv", first[4]
  path.write_text(f"{first}\nHello, there{sign}1\na{sign}0\n")
  runs.refusal(told, lambda: classified(str(path)))


@pytest.mark.parametrize(
  "reader", [name for name in READERS if name != "known"]
)
@pytest.mark.parametrize("name", ["a.xml", "a.conll", "a.zip"])
def test_every_reader_refuses_other_kinds_of_file(tmp_path, name, reader):
  """Catches columns of words and tags that are read as lines."""
  (tmp_path / name).write_text('{"text": "a", "label": "pos"}\n')
  runs.refusal(
    f"{name} (is of no known|holds no rec)",
    READERS[reader],
    str(tmp_path / name),
  )


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.parametrize("indent", [None, 1, "lines"])
def test_json_is_lines_or_an_array(tmp_path, name, indent):
  """Catches JSON that is left out, or of which one record is read."""
  rows = [{"text": f"a{i}", "label": f"l{i % 2}"} for i in range(4)]
  text = json.dumps(rows, indent=None if indent == "lines" else indent)
  if indent == "lines":
    text = "\n" + "".join(json.dumps(row) + "\n" for row in rows)
  path = tmp_path / name
  packed = gzip.compress if name.endswith("gz") else bytes
  path.write_bytes(packed(text.encode()))
  texts = [(row["text"],) for row in rows]
  assert prepared(str(path)) == texts
  assert sorted(classified(str(path))) == [(*row.values(),) for row in rows]
  path.write_bytes(packed(json.dumps([text for (text,) in texts]).encode()))
  assert prepared(str(path)) == texts
  for bad, words in (
    ("{", "it is not JSON"),
    ("[3]", "record 1 is no object"),
    ('{"a": 1}', "line 1 has no column"),
    (f"{json.dumps(rows[0])}\n{{,\n", "line 2 is not JSON"),
    ("[" * 10**5, "it is nested too deeply"),
  ):
    path.write_bytes(packed(bad.encode()))
    runs.refusal(f"{name}: {words}", prepared, str(path))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", BAD)
def test_every_reader_names_the_line(tmp_path, name, reader):
  """Catches a command that moves columns, or leaves out or joins records."""
  content, words = BAD[name]
  path = tmp_path / name
  path.write_text(content)
  with pytest.raises(UserError) as told:
    READERS[reader](str(path) if reader != "known" else path)
  assert str(told.value).startswith(f"cannot read {path}: {words}")


def test_every_reader_takes_marks_of_tsv_as_text(tmp_path):
  """Catches two quotation marks that swallow all records between them."""
  rows = [(f"the dog {i}", ("pos", "neg")[i % 2]) for i in range(60)]
  rows[7], rows[50] = ('"He said so', "neg"), ('it is over"', "pos")
  path = tmp_path / "a.tsv"
  lines = ["text\tlabel", *("\t".join(row) for row in rows)]
  path.write_text("\n".join(lines) + "\n")
  alone = [row[:1] for row in rows]
  for reader in ("prepare", "embed"):
    assert READERS[reader](str(path)) == alone
  assert READERS["predict"](str(path)) == rows
  assert READERS["perplexity"](str(path)) == [text for (text,) in alone]
  assert sorted(classified(str(path))) == sorted(rows)
  found = [tuple(fields.values()) for _, fields in sets.record_fields(path)]
  assert found == rows


def test_blank_lines_and_records_are_counted(tmp_path, capsys):
  """Catches predictions that are fewer than the lines, without a word."""
  path = tmp_path / "a.txt"
  path.write_text("a b\n\nc\n \nd")
  assert [*sets.source_texts(str(path), ["text"])] == [("a b",), ("c",), ("d",)]
  told = f"warning: {path}: 2 blank lines are left out\n"
  assert capsys.readouterr().out == told
  table = tmp_path / "a.csv"
  table.write_text("id,text\n1,a\n2,\n3, \n")
  assert [*sets.source_texts(str(table), ["text"])] == [("a",), ("",), (" ",)]
  assert "a.csv: 2 of 3 records are blank" in capsys.readouterr().out
  path.with_suffix(".jsonl").write_text('{"text": "a"}\n{"text": null}\n')
  asked = texts.TextSettings(data=str(path.with_suffix(".jsonl")), mode="")
  assert texts.read_texts(asked) == ["a"]
  assert "1 of 2 records have no text" in capsys.readouterr().out


def test_a_bad_line_after_the_first_is_not_hidden(tmp_path):
  """Catches prompts and answers that are read as whole texts instead."""
  path = tmp_path / "a.csv"
  path.write_text("prompt,answer\na b,c\na, b,c\n")
  asked = texts.TextSettings(data=str(path), mode="")
  runs.refusal(r"a.csv: line 3 has more columns", lambada.read_clozes, asked)


def marked(path, records) -> None:
  """Writes lines of JSON, each after a byte-order mark."""
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = ("\ufeff" + json.dumps(record) + "\n" for record in records)
  path.write_text("".join(lines), "utf-8")


def test_every_reader_accepts_byte_order_marks(tmp_path):
  """Catches an evaluation that refuses a file which another one reads."""
  good = {"sentence_good": "a b", "sentence_bad": "b a"}
  marked(tmp_path / "pairs/x.jsonl", [good, good])
  assert len(pairs.read_minimal_pairs(tmp_path / "pairs")) == 2
  row = {"Domain": "x"} | dict.fromkeys(ewok._TEXTS, "a")
  marked(tmp_path / "ewok/x.jsonl", [row])
  assert len(ewok.read_ewok_pairs(tmp_path / "ewok")) == 1
  for name in ("queries", "corpus"):
    marked(tmp_path / f"beir/{name}.jsonl", [{"_id": "1", "text": "\u00e9"}])
  (tmp_path / "beir/qrels").mkdir()
  head = "query-id\tcorpus-id\tscore\n"
  (tmp_path / "beir/qrels/test.tsv").write_text(
    f"\ufeff{head}1\t1\t1\n", "utf-8"
  )
  options = retrieval.RetrievalOptions()
  task = retrieval.make_retrieval_task(
    tmp_path / "beir", sets.OWN, "causal", options
  )
  assert [e.texts for e in task.load("beir-test")] == [("\u00e9",)] * 2
  asked = {"question": "q", "id": "1"}
  asked["answers"] = [{"text": "b", "answer_start": 2}]
  squad = {"data": [{"paragraphs": [{"context": "a b", "qas": [asked]}]}]}
  marked(tmp_path / "squad", [squad])
  (example,) = answering.read_squad(tmp_path / "squad")
  assert example.texts == ("q", "a b")
  marked(tmp_path / "a.jsonl", [{"prompt": "a b", "answer": "c"}])
  found = texts.TextSettings(data=str(tmp_path / "a.jsonl"), mode="")
  assert lambada.read_clozes(found) == [("a b", "c", "")]
  (tmp_path / "tags.tsv").write_text("\ufeffTom\tB\n", "utf-8")
  (sentence,) = tagged(tmp_path / "tags.tsv")
  assert sentence.texts == ("Tom",)


def test_prepare_refuses_and_leaves_nothing(tmp_path):
  """Catches a folder that is left after a record was refused."""
  path = tmp_path / "a.csv"
  path.write_text(BAD["comma.csv"][0])
  runs.refusal(
    "line 3 has more columns",
    prepare.main,
    [f"--text={path}", f"--output={tmp_path}/out"],
  )
  assert not (tmp_path / "out").exists()
