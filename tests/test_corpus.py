"""A user's own text: its files, its documents, and the held-out set."""

import bz2
import csv
import gzip
import io
import itertools
import json
import math
import os
import pathlib
import re
import shutil

import hypothesis
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st

from antlm_jax.commands import prepare as prepare_command
from antlm_jax.commands.prepare import prepare
from antlm_jax.data import hold_out, readers
from antlm_jax.data.document_store import fingerprints, spool
from antlm_jax.data.prepared_folder import PreparedData
from antlm_jax.data.text_files import find_corpus
from antlm_jax.data.tokenizer import Tokenizer
from tests import hub_emulator, runs

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(folder: pathlib.Path, **files: bytes | str) -> pathlib.Path:
  for name, content in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
  return folder


def rule_of(name: str) -> readers.Rule:
  """Returns a rule by its name, or that of a separator."""
  return readers.RULES.get(name) or readers.rule_of_separator(name)


def documents(tmp_path, content: bytes, rule: str = "auto") -> list[str]:
  path = write(tmp_path, **{"a.txt": content}) / "a.txt"
  return joined(readers.read_documents(str(path), rule_of(rule), ""))


ENGLISH = ("the", "cat", "sees", "a", "dog")


def make_text(count: int, words=ENGLISH, end=".") -> str:
  """Returns paragraphs of one line, of unequal lengths."""
  draw = np.random.default_rng(0)
  lines = (draw.choice(list(words), n) for n in draw.integers(5, 40, count))
  return "".join(f"{' '.join(line)} {end}\n\n" for line in lines)


def prepared(tmp_path, paths, name="out", **changes) -> PreparedData:
  asked = {"vocab_size": 300, "seq_len": 16} | changes
  text = paths[0] if len(paths) == 1 else [*map(pathlib.Path, paths)]
  return prepare(text, tmp_path / name, **asked)


def joined(pieces) -> list[str]:
  """Returns the documents of pieces, with a mark at each cut."""
  found = []
  for piece in pieces:
    if piece.begins:
      found.append(piece.text)
    else:
      found[-1] += "|" + piece.text
  return found


def test_where_documents_end(tmp_path):
  ends = "\ufeffa\r\nb\r\n \r\n\r\nc\rd\r\r \r\re \u2028 f\r".encode()
  assert documents(tmp_path, ends) == ["a\nb", "c\nd", "e \u2028 f"]
  lines = b"a b\n\nc\n  \nd e"
  assert documents(tmp_path, lines, "line") == ["a b", "c", "d e"]
  assert documents(tmp_path, lines, "file") == [lines.decode()]
  # A file that Windows wrote twice, also if a line end is in two blocks.
  twice = b"a\r\r\nb\r\r\n\r\r\nc"
  assert documents(tmp_path, twice) == ["a\nb", "c"]
  for before in range((1 << 20) - 4, 1 << 20):
    path = write(tmp_path, **{"a.txt": b"\n" * before + twice}) / "a.txt"
    pieces = readers.read_documents(str(path), readers.RULES["file"], "")
    assert [*readers.whole_documents(pieces)] == ["a\nb\n\nc"]
  # Blank pieces do not hide the start of a document.
  blanks = b"a\n" + b" " * (3 << 20) + b"b\nc\n"
  assert documents(tmp_path, blanks, "line") == ["a", "b", "c"]


def test_an_article_is_a_document(tmp_path):
  sections = " = = S = = \n \n x = 1 \n \n = = = T = = = \n \n y \n"
  wikitext = f" \n = A = \n \n a \n \n{sections} \n = B = \n \n{sections}"
  found = documents(tmp_path, wikitext.encode())
  assert [d.split()[:3] for d in found] == [["=", "A", "="], ["=", "B", "="]]
  assert all(d.endswith("y") and d.count("= = S = =") == 1 for d in found)
  babylm = b"i\n\nj\n= = = T = = =\nc\n\nd\n= = = U = = =\ne"
  expected = ["i", "j", "= = = T = = =\nc\n\nd", "= = = U = = =\ne"]
  assert documents(tmp_path, babylm) == expected
  # A file may begin within an article, with sections only.
  part = documents(tmp_path, (sections + wikitext).encode())
  assert len(part) == 3 and part[1:] == found


PARTS = "\n\n".join(f"part {i} .\nmore" for i in range(9))
WIKI = '<doc id="{0}" url="u" title="T">\nT\n\n= {0} =\n\ntext\n</doc>\n'


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize(
  ("text", "rule", "count"),
  [
    # One line between signs is no heading, unless the file begins with it.
    (f"{PARTS}\n\n= 42 =\n\n{PARTS}", "auto", 19),
    (f"{PARTS}\n= 42 =\n{PARTS}", "auto", 17),
    (f"{PARTS}\n\n== x ==\n\n== y ==\n\n{PARTS}", "auto", 20),
    (f"\ufeff\n= 42 =\n{PARTS}", "auto", 1),
    (f"{PARTS}\n\n= A =\n{PARTS}\n\n= B =\n{PARTS}", "auto", 11),
    ("\n\n".join(["a " * 9000] * 20 + ["= 1 =", "= 2 ="]), "auto", 22),
    # A line of a higher level between BabyLM's headings.
    ("= = = A = = =\na\n\n= 42 =\nb\n= = = B = = =\nc\n\nd\n", "auto", 3),
    ("".join(map(WIKI.format, range(3))), "auto", 3),
    ("\ufeff\n" + "\n\n\ufeff".join(map(WIKI.format, range(3))), "auto", 3),
    # Text of other files after and between the elements.
    (f"{WIKI.format(0)}\n{PARTS}\n\n= A =\n\n{PARTS}\n{WIKI}a\n", "auto", 22),
    ("a\n\nb<|end|>c<|end|>\n<|end|>\nd", "<|end|>", 3),
    (f"{PARTS}\n***\n{PARTS}\n*** \n{PARTS}", "\n***\n", 2),
    (f"{PARTS}\n\n\n{PARTS}", "\r\n\r\n\r\n", 2),
    (f"{'a ' * (1 << 18)}</s>{'b ' * (1 << 18)}", "</s>", 2),
    # A line that is a little longer than a piece.
    (f"{'a ' * 150_000}\nb", "auto", 2),
  ],
)  # fmt: skip
def test_what_ends_documents_is_counted(tmp_path, text, rule, count, ends):
  """Catches a line that joins or divides all documents after it."""
  found = documents(tmp_path, text.replace("\n", ends).encode(), rule)
  assert len(found) == count
  assert "<doc" not in "".join(found) and "</" not in "".join(found)
  tally = readers.Tally()
  path = str(tmp_path / "a.txt")
  assert [*readers.read_documents(path, rule_of(rule), "", tally=tally)]
  assert readers.document_ends(tally).startswith(f"documents: {count} ")


def test_written_marks_are_said_and_may_end_documents(tmp_path, capsys):
  """Catches end tokens that are trained on as text without a word."""
  stories = [f"a dog {i} .\n\nthe cat" for i in range(40)]
  text = "\n<|endoftext|>\n".join(stories)
  folder = write(tmp_path / "in", **{"a.train": text, "a.dev": text + "</s>"})
  how = {"vocab_size": 300, "seq_len": 4}
  prepare(folder, **how)
  told = capsys.readouterr().out
  assert "documents: 82 end at blank lines" in told
  assert "text: '<|endoftext|>' (78), '</s>' (1); if one" in told
  # In files and in records.
  for given in (folder, [text[:200], text[200:]]):
    made = prepare(given, **how, separator="<|endoftext|>").manifest
    counts = [split.documents for split in made.splits.values()]
    assert counts == [40, 40] if given == folder else sum(counts) == 41
    assert "end at '<|endoftext|>'" in capsys.readouterr().out
  runs.refusal("'<eos>' is nowhere", prepare, folder, separator="<eos>", **how)
  runs.refusal(
    "not both", prepare, folder, separator="<eos>", documents="line", **how
  )


@pytest.mark.parametrize("talk", [0, 2000])
def test_text_that_joins_the_last_article_is_told(
  tmp_path, monkeypatch, capsys, talk
):
  """Catches one document of most of the text, after files were joined."""
  monkeypatch.setattr(readers, "_LARGE", 9999)
  wiki = "".join(f"= = = T{i} = = =\n\n{PARTS}\n\n" for i in range(200))
  text = wiki + "*CHI: more talk here .\n\n" * talk
  prepare(write(tmp_path, **{"a.txt": text}), vocab_size=300, seq_len=16)
  told = "warning: one document has 62.9% of the text to train on"
  assert (told in capsys.readouterr().out) == (talk > 0)


def test_extracted_wikis_are_found_in_folders(tmp_path):
  """Catches WikiExtractor's files, which have no ending, left out."""
  text = "".join(map(WIKI.format, range(3)))
  files = {"AA/wiki_00": text, "AA/wiki_01.bz2": bz2.compress(text.encode())}
  corpus = find_corpus([str(write(tmp_path, **files))])
  assert len([*corpus.read("train")]) == 6 and not corpus.unused


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("\n \n    if x:\n      y\n ", "    if x:\n      y"),
    ("\tif x:\r\n\t\ty", "\tif x:\n\t\ty"),
    ("  one line ", "one line"),
  ],
)
def test_a_document_keeps_its_indentation(tmp_path, text, expected):
  """Catches code whose first line is indented otherwise than the others."""
  write(tmp_path, **{"a.jsonl": jsonl([text])})
  record = readers.read_documents(
    str(tmp_path / "a.jsonl"), readers.RULES["auto"], "text"
  )
  whole = spool(record, tmp_path)
  assert [document.text for document in whole.read()] == [expected]
  assert documents(tmp_path, text.encode(), "file") == [expected]


def test_auto_ends_a_long_document_at_a_line_end(tmp_path):
  found = documents(tmp_path, b"word word\n" * 20_000)
  assert [len(d) for d in found[:-1]] == [65_539, 65_539, 65_539]
  assert "\n".join(found) == "\n".join(["word word"] * 20_000)


@pytest.mark.parametrize("rule", readers.RULES)
@pytest.mark.parametrize("word", ["wörd ", "猫在看狗", "é"])
def test_a_huge_line_is_one_document_in_pieces(tmp_path, rule, word):
  line = word * (3_000_000 // len(word))  # longer than one read
  (found,) = documents(tmp_path, b"\n\n" + line.encode() + b"\n", rule)
  pieces = found.split("|")
  assert len(pieces) >= 3 and max(map(len, pieces)) <= 1 << 18
  between = " " if word.endswith(" ") else ""
  assert between.join(pieces) == line.strip()
  source = readers.read_documents(
    str(tmp_path / "a.txt"), readers.RULES[rule], ""
  )
  assert [*readers.whole_documents(source)] == [line.strip()]


def names(sources) -> set[str]:
  return {os.path.basename(source) for source in sources}


LAYOUTS = [  # files, train, dev
  ("x.train sub/y.train.txt x.dev y.dev.txt list.txt x.test", "x y", "x y"),
  ("wiki.train.tokens wiki.valid.tokens wiki.test.tokens", "wiki", "wiki"),
  ("train-0-of-2.parquet train-1-of-2.parquet README.md"
   " validation-0-of-1.parquet test-0-of-1.parquet",
   "train-0-of-2 train-1-of-2", "validation-0-of-1"),
  ("train/a.jsonl.gz dev/b.jsonl.zst test/c.jsonl", "a", "b"),
  ("en_train.csv en_val.csv en_test.csv", "en_train", "en_val"),
  ("train_10M/a.txt a.dev", "a", "a"),
  ("a.txt b.md c.rst d.text e.pdf latest.txt developing.txt .hid.txt .h/a.txt",
   "a b c d latest developing", ""),
  ("a.txt test.txt", "a", ""),
  ("train_set.csv test_set.csv notes.txt", "train_set", ""),
  ("myTrain.txt myVal.txt", "myTrain", "myVal"),
  ("training.txt validation.txt testing.txt", "training", "validation"),
  ("train-clean-100/a.txt dev-clean/b.txt test-clean/c.txt", "a", "b"),
  ("training_dogs.txt testing_cats.txt", "training_dogs testing_cats", ""),
  ("train.tsv dev_matched.tsv web.dev.tsv notes.tsv", "train",
   "dev_matched web"),
  ("a.md web-dev.md web.dev.md taste-test.md steam-train-2.md dev-notes.md",
   "a web-dev web taste-test steam-train-2 dev-notes", ""),
  ("train-00000-of-00002-0f3c.csv en/x.train.csv val.csv.gz dev-2024-a.csv",
   "train-00000-of-00002-0f3c x", "val dev-2024-a"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "train", "dev"), LAYOUTS)
def test_names_make_the_splits(tmp_path, files, train, dev):
  files = files.split()
  folder = str(write(tmp_path, **dict.fromkeys(files, "a")))
  for paths in ([folder], [folder, f"{folder}/{files[0]}"], [f"{folder}/**"]):
    corpus = find_corpus(paths)
    stems = [{n.partition(".")[0] for n in names(s)}
             for s in (corpus.train, corpus.dev)]  # fmt: skip
    assert stems == [set(train.split()), set(dev.split())]
    # Each file is listed once, used or not.
    told = [*corpus.train, *corpus.dev]
    told += itertools.chain.from_iterable(corpus.unused.values())
    visible = [f for f in files if not f.startswith(".")]
    assert len(told) == len(set(told)) == len(visible)


@pytest.mark.parametrize(
  ("names", "splits"),
  [
    ("train_sft test_sft train_gen test_gen", "train test train test"),
    ("train validation_en testing", "train dev test"),
    ("train.clean.100 validation.clean unsupervised", "train dev -"),
    ("train_sft validation_en", "train dev"),
    ("en_train en_val latest", "train dev -"),
    ("news web", "- -"),
  ],
)
def test_parts_of_a_dataset_are_splits(tmp_path, monkeypatch, names, splits):
  """Catches `test_sft` that is trained on, and other names that are not."""
  names, splits = names.split(), splits.split()
  monkeypatch.setattr(readers, "_load_hub_splits", lambda *_: names)
  corpus = find_corpus(["hf://some/set"])

  def of(split):
    return {f"hf://some/set::{n}" for n, s in zip(names, splits, strict=True)
            if s == split}  # fmt: skip

  assert {*corpus.train} == (of("train") or of("-"))
  assert {*corpus.dev} == of("dev") and {*corpus.test} == of("test")


def test_paths_that_belong_together_are_splits(tmp_path, capsys):
  """Catches a glob of the shell whose held-out file is trained on."""
  files = "en_train.txt", "en_dev.txt", "web-test.txt"
  folder = write(tmp_path, **dict.fromkeys(files, "a"))
  corpus = find_corpus([str(folder / name) for name in files])
  assert names(corpus.train) == {"en_train.txt", "web-test.txt"}
  assert names(corpus.dev) == {"en_dev.txt"}
  # A title is text, but the user reads how it was taken.
  (folder / "en_train.txt").unlink()
  told = str(find_corpus([str(folder)])).splitlines()
  assert told[1].startswith(
    "named like a held-out set, but trained on: 2 files"
  )
  (folder / "README.md").write_text("---\nlicense: mit\n---\n")
  assert str(find_corpus([str(folder)])).endswith(
    "\nwarning: named like a description, but trained on: README.md"
  )


@pytest.mark.parametrize(
  "paths",
  ["train/a.txt train/x/b.txt dev/c.txt test/d.txt", "train dev test",
   "train/*.txt train/x dev/* test"],
)  # fmt: skip
def test_folders_above_the_paths_are_splits(tmp_path, paths):
  """Catches files and folders that the shell finds, all trained on."""
  files = "train/a.txt", "train/x/b.txt", "dev/c.txt", "test/d.txt", "e/e.txt"
  folder = write(tmp_path / "dev", **dict.fromkeys(files, "a"))
  given = [f"{folder}/{path}" for path in paths.split()]
  corpus = find_corpus(given)
  assert names(corpus.train) == {"a.txt", "b.txt"}
  assert names(corpus.dev) == {"c.txt"} and names(corpus.test) == {"d.txt"}
  # Without train, a folder may have any name.
  corpus = find_corpus([f"{folder}/dev/c.txt", f"{folder}/e"])
  assert names(corpus.train) == {"c.txt", "e.txt"} and not corpus.dev


def test_prepared_folders_in_a_folder_are_no_text(tmp_path):
  """Catches rows that are text, and text that is unused next to them."""
  folder = write(tmp_path, **{"a.txt": make_text(200)})
  for output in ("one", "two", "two"):
    options = {"vocab_size": 300, "seq_len": 16, "quiet": True}
    data = prepare(folder, folder / output, **options)
    assert [s["path"] for s in data.manifest.sources] == [f"{folder}/a.txt"]
  begun = {"b/preparing/plan.json": "{}", "b/tokenizer.json": "{}"}
  assert names(find_corpus([str(write(folder, **begun))]).train) == {"a.txt"}


def test_a_path_that_names_two_splits_is_said(tmp_path):
  """Catches a file whose name beats its folder's without a word."""
  files = "train/a.txt", "train/val_1.txt", "dev/train.txt", "dev/b.txt"
  corpus = find_corpus([str(write(tmp_path, **dict.fromkeys(files, "a")))])
  assert names(corpus.train) == {"a.txt", "train.txt"}
  assert names(corpus.dev) == {"val_1.txt", "b.txt"}
  assert {*str(corpus).splitlines()[2:]} == {
    "warning: read as dev, but named train as well: val_1.txt",
    "warning: read as train, but named dev as well: train.txt",
  }
  chosen = find_corpus([f"{tmp_path}/train"], [f"{tmp_path}/dev/train.txt"])
  assert "as well" not in str(chosen)


def test_dev_paths_and_files_given_by_themselves(tmp_path):
  files = ("a.txt", "b.txt", "c.dev", "d.test", "sub/valid.txt", "sub/e.txt")
  folder = str(write(tmp_path, **dict.fromkeys(files, "a")))

  def found(paths, dev=()):
    with_folder = [[f"{folder}/{p}" for p in some] for some in (paths, dev)]
    corpus = find_corpus(*with_folder)
    return names(corpus.train), names(corpus.dev)

  assert found([""], ["b.txt"]) == ({"a.txt", "e.txt"}, {"b.txt"})
  assert found(["*.txt"], ["d.test"]) == ({"a.txt", "b.txt"}, {"d.test"})
  assert found(["?.txt"], ["sub"]) == ({"a.txt", "b.txt"}, {"valid.txt"})
  assert found(["a.txt", "c.dev", "d.test"]) == ({"a.txt"}, {"c.dev"})
  assert found(["c.dev"]) == ({"c.dev"}, set())  # named by the user
  assert found(["d.test"]) == ({"d.test"}, set())
  runs.refusal(r"to train on.*dev: valid\.txt", found, ["sub/v*"])


def test_links_are_followed_once(tmp_path):
  folder = write(tmp_path / "all", **{"a.txt": "a", "sub/b.txt": "b"})
  (tmp_path / "linked").symlink_to(folder)
  (folder / "again.txt").symlink_to(folder / "a.txt")
  (folder / "sub/loop").symlink_to(folder)
  corpus = find_corpus([str(tmp_path / "linked"), str(folder)])
  assert names(corpus.train) == {"a.txt", "b.txt"}


TWO_LINES = "naïve café\nof two lines"
RECORDS = ["the first .", TWO_LINES, "", "猫 .", '"so, it"', "end"]


def jsonl(records, column="text") -> str:
  lines = [{"id": i, column: record} for i, record in enumerate(records)]
  return "".join(json.dumps(line) + "\n" for line in lines)


def as_kinds(folder: pathlib.Path, records, column="text") -> list[str]:
  """Writes documents as files of every kind; returns the paths."""
  lines, txt = jsonl(records, column).encode(), "\n\n".join(records).encode()
  zst = pa.BufferOutputStream()
  with pa.CompressedOutputStream(zst, "zstd") as file:
    file.write(lines)
  files = {
    "a.txt": txt,
    "b.TXT.gz": gzip.compress(txt[:5]) + gzip.compress(txt[5:]),
    "c.rst": txt.replace(b"\n", b"\r\n"),
    "d.jsonl": b"\xef\xbb\xbf" + lines.replace(b"\\n", b"\\r\\n") + b"\n \n",
    "e.jsonl.gz": gzip.compress(lines),
    "f.jsonl.zst": zst.getvalue().to_pybytes(),
  }
  write(folder, **files)
  for name, delimiter in (("g.csv", ","), ("h.tsv", "\t")):
    with open(folder / name, "w", encoding="utf-8-sig", newline="") as file:
      rows = csv.writer(file, delimiter=delimiter)
      rows.writerows([["id", column], *enumerate(records)])
  columns = {"id": range(len(records)), column: records}
  parquet.write_table(pa.table(columns), folder / "i.parquet")
  return sorted(str(path) for path in folder.iterdir())


def test_all_kinds_give_the_same_documents(tmp_path):
  expected = [record for record in RECORDS if record]
  for path in as_kinds(tmp_path, RECORDS, "content"):
    found = joined(
      readers.read_documents(path, readers.RULES["auto"], "content")
    )
    assert found == expected, path


def test_a_dataset_of_hugging_faces(tmp_path, offline, monkeypatch):
  datasets = pytest.importorskip("datasets")
  cache = str(tmp_path / "cache")
  monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
  records = make_text(300).split("\n\n")
  splits = {"train": records, "validation": records[:50], "test": records[:1]}
  contents = {f"{name}.jsonl": jsonl(of, "body") for name, of in splits.items()}
  folder = write(tmp_path / "in", **contents)
  source = f"hf://{folder}"
  corpus = find_corpus([source], column="body")
  assert corpus.train == (f"{source}::train",)
  assert corpus.dev == (f"{source}::validation",)
  assert [*corpus.unused.values()] == [[f"{source}::test"]]
  assert joined(corpus.read("train")) == records[:-1]
  of_hub = prepared(tmp_path, [source], "hub", column="body")
  of_files = prepared(tmp_path, [str(folder)], "files", column="body")
  tokens = [r.train.read(range(9))[0] for r in (of_hub, of_files)]
  assert np.array_equal(*tokens)
  assert find_corpus([f"{source}::validation"]).train == corpus.dev
  runs.refusal(
    "has no split other but train",
    lambda: next(find_corpus([f"{source}::other"]).read("train")),
  )
  runs.refusal(
    f"write {source}::train",
    lambda: next(readers.read_documents(source, readers.RULES["auto"], "body")),
  )
  # Folders of `save_to_disk` hold the files of a cache, too.
  saved = datasets.load_dataset("json", data_files=f"{folder}/train.jsonl")
  saved["train"].save_to_disk(tmp_path / "one")
  saved["train"].save_to_disk(tmp_path / "3:15")  # no dataset 3 of the Hub
  saved.save_to_disk(tmp_path / "all")
  shutil.copy(tmp_path / "one/data-00000-of-00001.arrow",
              tmp_path / "all/train/cache-a.arrow")  # fmt: skip
  for name in ("one", "3:15", "all"):
    for path in (f"hf://{tmp_path / name}", str(tmp_path / name)):
      found = find_corpus([path], column="body")
      assert joined(found.read("train")) == records[:-1]
  runs.refusal("is a dataset that save_to_disk", find_corpus, [str(tmp_path)])
  runs.refusal(
    "cannot load hf://nobody/none", find_corpus, ["hf://nobody/none"]
  )
  monkeypatch.setattr(datasets, "__version__", "3.6.0")
  runs.refusal(
    r"may run code .* datasets 4 or", find_corpus, ["hf://nobody/script"]
  )


def numbered(count: int) -> list[str]:
  """Returns texts of eight words."""
  return [f"the dog number {i} sees a cat ." for i in range(count)]


def test_the_first_words_of_a_dataset_are_streamed(
  tmp_path, monkeypatch, capsys
):
  """Catches a download of everything, other rows, and a failure in between."""
  pytest.importorskip("datasets")
  readers._load_hub_splits.cache_clear()
  files = {}
  for part in range(4):
    for split in ("train", "validation"):
      buffer = pa.BufferOutputStream()
      parquet.write_table(pa.table({"text": numbered(900)}), buffer)
      name = f"{split}-{part:05}-of-00004.parquet"
      files[name] = buffer.getvalue().to_pybytes()
  asked = {"vocab_size": 300, "seq_len": 16, "words": "4k"}
  with hub_emulator.serving(files, tmp_path, monkeypatch) as hub:
    made = prepare("hf://me/set", tmp_path / "out", **asked)
    said = capsys.readouterr().out
    # Only the first file of each split.
    assert hub.sent < sum(map(len, files.values())) / 2
    assert "train: the first 500 documents have 4,000 words\n" in said
    assert "dev: the first 500 documents have 4,000 words\n" in said
    assert made.manifest.settings["words"] == 4000
    source, _ = made.manifest.sources
    assert source["path"] == "first 4,000 words of hf://me/set::train"
    prepare("hf://me/set", tmp_path / "out", **asked)
    assert "is already prepared with these" in capsys.readouterr().out
    again = prepare("hf://me/set", **asked)
    assert again.manifest.splits["train"].sha256 == (
      made.manifest.splits["train"].sha256
    )
    other = {**asked, "words": 8000}
    runs.refusal(
      "words 4000 there, 8000 asked", prepare, "hf://me/set",
      tmp_path / "out", **other,
    )  # fmt: skip
    hub.most = hub.sent + 1000
    line = runs.told(prepare, "hf://me/set::train", **asked)
    assert line.startswith("cannot ") and "hf://me/set" in line
  # The same words of a file are the same rows.
  lines = tmp_path / "lines"
  write(lines, **{"a.train": "\n".join(numbered(9000)), "a.dev": "\n".join(
    numbered(900))})  # fmt: skip
  alike = prepare(lines, documents="line", **asked)
  for split in ("train", "dev"):
    rows = (getattr(data, split).read(range(100))[0] for data in (made, alike))
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("tasks", [1, 2])
def test_the_first_words_are_the_first_documents_of_the_files(
  tmp_path, capsys, tasks
):
  """Catches another selection, a cut document, or words that are too few."""
  first, second = make_text(40), make_text(90)
  folder = write(tmp_path / "in", **{"a.txt": first, "b.txt": second})
  both = [*first.strip().split("\n\n"), *second.strip().split("\n\n")]
  sizes = np.cumsum([len(text.split()) for text in both])
  count = int(np.argmax(sizes >= 1500)) + 1
  assert 40 < count < 120
  data = prepared(
    tmp_path, [str(folder)], words=1500, dev_share=0.1, tasks=tasks
  )
  total = sum(split.words for split in data.manifest.splits.values())
  assert total == sizes[count - 1]
  words = f"--text={folder}", f"--output={tmp_path / 'out'}", "--words=1.5k"
  shape = "--vocab_size=300", "--seq_len=16", "--dev_share=0.1"
  assert prepare_command.done([*words, *shape])
  assert not prepare_command.done([*words[:2], *shape])
  expected = f"train: the first {count} documents have {total:,} words\n"
  assert expected in capsys.readouterr().out
  prepared(tmp_path, [str(folder)], "all", words="1M", dev_share=0.1)
  assert f"{sizes[-1]:,} words, which is all of the text" in (
    capsys.readouterr().out
  )
  runs.refusal("words=0 is not at least 1", prepare, folder, words=0)
  runs.refusal("'ten' is no number of words", prepare, folder, words="ten")
  runs.refusal(
    "'<x>' is nowhere in the first", prepare, folder, words=1500,
    separator="<x>",
  )  # fmt: skip


BAD = {  # test_records has the mistakes that every command finds
  "a.jsonl": (b'{"text": "a"}\n{"text": ', r"a\.jsonl: line 2 is not JSON"),
  "b.jsonl": (b'{"body": "a"}\n', "line 1 has no column 'text' but 'body'"),
  "metadata.csv": (b"id,by\na,b\n", "with --column, or leave out this file"),
  "b2.json": (
    json.dumps({f"a_column_{i}": "a" for i in range(99)}).encode(),
    r"'a_column_3', .* \.\.\.; choose one with --column",
  ),
  "c.jsonl": (b'{"text": ["a"]}\n', r"line 1: 'text' is no text but \['a'\]"),
  "d.jsonl": (b'["a"]\n', "line 1 is no object with a 'text'"),
  "f.jsonl": (b'{"text": "\xe9"}\n', "line 1 is not JSON: 'utf-8' codec"),
  "g.jsonl.gz": (gzip.compress(b'{"text": "a"}' * 99)[:-12], "Truncated"),
  "h.jsonl.zst": (b"{}", "cannot read .*h.jsonl.zst: "),
  "i.csv": (b'id,text\n1,"a\n2,b\n', "line .: unexpected end of data"),
  "i4.csv": (b"text,id\na,1\ntext,id\n", "line 3 repeats the columns' names"),
  "i6.csv": (b"id,text\n1,a\n2,\xe9\n", "line 3 is not UTF-8; .*iconv -f WIN"),
  # Other fields are quoted, so that only the number of lines is a sign.
  "i8.csv": (
    b'text,id\n"a, b",1\n"b,2\n' + b"c,3\n" * 9 + b'd",4\n',
    "line 3: .* to line 13",
  ),
  "j3.tsv": (b'text\n"a\nb"\n', "line 2: .* joins it to line 3"),
  "j4.tsv.gz": (gzip.compress(b"text\ttext\na\tb\n"), "two columns have"),
  "j.tsv": (b"id,text\n1,a\n", "line 2 has no column 'text' but 'id,text'"),
  "k.parquet": (b"PAR1", "cannot read .*k.parquet: "),
  "k2.fa": (b"\nACGT\n>one\nACGT\n", "line 2 is before the first header"),
  "l.pdf": (b"%PDF", r"l\.pdf is of no known kind; give .* \.txt .* \.parquet"),
  "m.txt.gz": (b"text", "cannot read .*m.txt.gz: "),
  "n.txt": (b"ok\ne\xff", "byte 4;"),
  "n2.txt": (b"ok\n" + b"e" * (1 << 21) + b"\xc3", "byte 2097155;"),
  "n.txt.gz": (
    gzip.compress(b"ok\nx\xff"),
    "at byte 4; .*iconv -f WINDOWS-1252 -t",
  ),
  "o2.txt.bz2": (bz2.compress(b"") * 2 + bz2.compress(b"ok"), "; unpack it"),
  "o3.txt.gz": (
    gzip.compress(b"ok") + b"\0" * 512,
    "has bytes after its end; unpack it, or fetch it again",
  ),
  "o4.txt.bz2": (
    bz2.compress(b"ok") + b"\0",
    "has bytes after its end; unpack",
  ),
  "o5.txt.gz": (b"", "it has 0 bytes, which is not gzip: fetch it again"),
  "o.txt.bz2": (
    bz2.compress(b"ok\n" + b"e" * 3_000_000 + b"\xc3"),
    "byte 3000003;",
  ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_told(tmp_path, name):
  content, message = BAD[name]
  path = str(write(tmp_path, **{name: content}) / name)
  line = runs.told(lambda: list(find_corpus([path]).read("train")))
  assert re.search(message, line) and path in line


def test_files_without_text_are_named(tmp_path, capsys):
  """Catches empty files, and descriptions, that are read in silence."""
  empty = gzip.compress(b"")
  names = {"b.txt": "", "c.txt.gz": empty, "d.csv": "id,text\n", "e.txt": "\n"}
  described = {"metadata.jsonl": '{"text": "a b c"}\n'}
  folder = write(tmp_path / "in", **{"a.txt": make_text(90)}, **names)
  write(folder, **described)
  prepared(tmp_path, [str(folder)], dev_share=0.1)
  said = capsys.readouterr().out
  (line,) = (x for x in said.splitlines() if "without text" in x)
  assert line == f"train: without text: {', '.join(map(repr, names))}"
  assert "like a description, but trained on: metadata.jsonl" in said


def test_two_columns_of_one_name_are_refused_only_if_they_are_read(tmp_path):
  """Catches parquet's last column that silently replaces the first."""
  path = tmp_path / "a.parquet"
  columns = [pa.array([text]) for text in "abc"]
  parquet.write_table(pa.table(columns, names=["text", "x", "x"]), path)
  assert joined(find_corpus([str(path)]).read("train")) == ["a"]
  line = runs.told(
    lambda: list(find_corpus([str(path)], column="x").read("train"))
  )
  assert line.startswith(f"cannot read {path}: two columns have the name 'x'")


MARKS = {
  "text": [
    ('"He said so', "a middle line", 'it is over"'),
    ('"quoted" start', 'an 8" disk', 'a ""pair""'),
    ('"Whole"', "x, y", "z"),
    ('"Whole, too"', "x, y", "z"),
    ('"a" "b"', '"', "''"),
    ("x", '"a ""b"""', '"open'),
  ],
  "quoted": [
    ('"He said" so', "a, b", '"all"'),
    ("a tab\there", "x", "y"),
    ("two\nlines", 'or "more"', "x"),
    ("a, b", '""', "x"),
  ],
}


@pytest.mark.parametrize(
  ("kind", "texts"), [(k, texts) for k in MARKS for texts in MARKS[k]]
)
def test_quotation_marks_of_tsv(tmp_path, kind, texts):
  """Catches marks that join rows, and marks of pandas that become text."""
  rows = [("text", "label"), *((text, f"l{i}") for i, text in enumerate(texts))]
  for order in (1, -1):
    file = io.StringIO(newline="")
    if kind == "text":
      file.writelines("\t".join(row[::order]) + "\n" for row in rows)
    else:
      out = csv.writer(file, delimiter="\t")
      out.writerows(row[::order] for row in rows)
    path = write(tmp_path, **{"a.tsv": file.getvalue()}) / "a.tsv"
    asked = dict.fromkeys(("text", "label"), "")
    found = [
      tuple(row) for _, row in readers.read_source_records(str(path), asked)
    ]
    assert found == rows[1:]


@pytest.mark.parametrize("quoting", [csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_tsv_whose_names_are_quoted_is_quoted(tmp_path, quoting):
  """Catches marks around every field that stay in the texts."""
  with open(tmp_path / "a.tsv", "w", newline="") as file:
    out = csv.writer(file, delimiter="\t", quoting=quoting)
    out.writerows([("text", "n"), ("plain", 1), ("x y", 2)])
  found = readers.read_source_records(str(tmp_path / "a.tsv"), {"text": ""})
  assert [row for _, row in found] == [["plain"], ["x y"]]


BOM = "\ufeff".encode()


def test_byte_order_marks_before_a_line_are_no_text(tmp_path):
  """Catches marks within joined files, in each format, that become tokens."""
  lines = [f"the dog {i}" for i in range(4)]
  table = [f"{i},{line}" for i, line in enumerate(lines)]
  records = [json.dumps({"text": line}) for line in lines]
  marked = ["\ufeff" + line for line in lines]
  files = {
    "a.txt": "\n\n".join(marked).encode(),
    "b.jsonl": b"\n".join(BOM + line.encode() for line in [*records, ""]),
    "c.csv": "\n".join(
      ["\ufeffid,text", *("\ufeff" + t for t in table)]
    ).encode(),
    "d.jsonl": jsonl(marked),
    "e.tsv": "\n".join(["\ufefftext", *marked]).encode(),
  }
  folder = write(tmp_path, **files)
  parquet.write_table(pa.table({"text": marked}), folder / "f.parquet")
  for path in sorted(folder.iterdir()):
    found = readers.read_documents(str(path), readers.RULES["line"], "text")
    assert joined(found) == lines, path
    if path.suffix != ".txt":
      values = [
        row for _, row in readers.read_source_records(str(path), {"text": ""})
      ]
      assert values == [[line] for line in lines], path


@pytest.mark.parametrize("rule", ["auto", "line", "text"])
def test_parts_of_joined_files_hold_each_document_once(tmp_path, rule):
  """Catches a mark before a heading or a blank line that moves a part's end."""
  text = "".join(
    f"{mark} = Title {i} = \n\ntext {i}\n{mark}\n"
    for i, mark in enumerate(["\ufeff", "", ""] * 40)
  )
  path = str(write(tmp_path, **{"a.txt": text}) / "a.txt")
  of = rule_of(rule)
  whole = joined(readers.read_documents(path, of, ""))
  assert len(whole) == {"auto": 120, "line": 240, "text": 121}[rule]
  assert not any("\ufeff" in document for document in whole)
  for count in (2, 7, 50):
    parts = ((i, count) for i in range(count))
    found = (
      joined(readers.read_documents(path, of, "", part)) for part in parts
    )
    assert [*itertools.chain.from_iterable(found)] == whole, count


def test_records_without_text_are_counted(tmp_path, capsys):
  """Catches null and blank records that vanish without a word."""
  texts = make_text(200).split("\n\n")[:-1]
  train = jsonl([*texts[:100], None, " \n", *texts[100:], None])
  files = {
    "a.train.jsonl": train,
    "a.dev.csv": "text,id\n" + "a b c d,1\n,2\n" * 40,
  }
  folder = write(tmp_path / "in", **files)
  in_two = [{"tasks": 2, "task": task} for task in (0, 1)]
  for name, parts in (("one", [{}]), ("two", in_two)):
    for part in parts:
      prepared(tmp_path, [str(folder)], name, **part)
    said = capsys.readouterr().out.splitlines()
    left = "records have no text and are left out"
    assert f"train: 3 of 203 {left} (1 blank, 2 null)" in said
    assert f"dev: 40 of 80 {left} (40 blank, 0 null)" in said


def test_a_link_to_nothing_is_refused(tmp_path):
  """Catches text that is lost, and a traceback of loops."""
  folder = write(tmp_path / "in", **{"a.txt": "a"})
  for name, target in (
    ("b.txt", "none.txt"),
    ("sub", "none"),
    ("l.md", "l.md"),
  ):
    (folder / name).symlink_to(folder / target)
    for path in (folder, folder / "*", folder / name):
      line = runs.told(find_corpus, [str(path)])
      assert line.startswith(f"cannot read {folder / name}: ")
      assert line.endswith("; delete or mend this link")
    (folder / name).unlink()
  os.mkfifo(folder / "b.txt")
  assert "b.txt is not a regular file" in runs.told(find_corpus, [str(folder)])


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
  """Catches a sub-folder whose text is left out without a word."""
  folder = write(tmp_path / "in", **{"a.txt": "a", "sub/b.txt": "b"})
  scandir = os.scandir

  def denied(path):  # root may read any folder
    if os.path.basename(path) == "sub":
      raise PermissionError(13, "Permission denied", str(path))
    return scandir(path)

  monkeypatch.setattr(os, "scandir", denied)
  for path in (folder, folder / "**/*.txt"):
    line = runs.told(find_corpus, [str(path)])
    assert line.startswith(f"cannot read the folder {folder}/sub: Permission")
  assert names(find_corpus([f"{folder}/*.txt"]).train) == {"a.txt"}


@hypothesis.given(
  st.lists(st.integers(1, 10**6), min_size=1, max_size=60),
  st.floats(0.005, 0.5),
)
@hypothesis.example([10**6, 1], 0.5)
@hypothesis.example([1, 10**6, 1], 0.02)
def test_the_held_out_share_is_near(sizes, share):
  sizes = np.array(sizes)
  train_sizes = hold_out.sizes_to_train(sizes, share)
  held = sizes - train_sizes
  wanted = share * sizes.sum()
  assert (held >= 0).all() and (train_sizes >= 0).all()
  most = min(2 * wanted, sizes.sum() / 2 + wanted / 2)
  assert wanted / 2 - 1 <= held.sum() <= most + 1  # a byte cannot be cut
  # At most one document is cut, and only if no document is small enough.
  cut = (train_sizes > 0) & (held > 0)
  assert cut.sum() == 0 or (cut.sum() == 1 and (sizes[cut] > wanted).all())


def test_the_held_out_documents_are_spread():
  sizes = np.random.default_rng(0).geometric(0.001, 20_000)
  held = hold_out.sizes_to_train(sizes, 0.02) == 0
  assert set(np.diff(np.flatnonzero(held))) <= {49, 50, 51}
  assert sizes[held].mean() == pytest.approx(sizes.mean(), rel=0.1)


@hypothesis.given(st.integers(1, 300), st.floats(0.005, 0.5))
@hypothesis.settings(max_examples=30)
def test_splits_are_disjoint_and_a_share_is_spread(tmp_path_factory, n, share):
  folder = tmp_path_factory.mktemp("text")
  texts = [f"{1000 + i}" for i in range(n)]
  whole = spool(map(readers.Document, texts), folder)

  sizes = hold_out.divide_documents(
    [fingerprints(whole.read())], share
  ).train_sizes

  def divided(share_of_train):
    parts = hold_out.divide_texts(whole, sizes, share_of_train)
    return ([document.text for document in part.read()] for part in parts)

  train, dev = divided(1.0)
  assert sorted("".join(train + dev)) == sorted("".join(texts))
  some, _ = divided(0.3)
  assert len(some) == math.ceil(0.3 * len(train) - 1e-9)
  # Ten consecutive documents have the same share as all, within 1.
  taken = np.isin(train, some)
  windows = np.convolve(taken, np.ones(10), "valid") if n > 20 else [3]
  assert np.abs(np.array(windows) - 3).max() <= 1 + 1e-6


PARAGRAPHS = make_text(600)
LINES = PARAGRAPHS.replace("\n\n", "\n")
ONE_LINE = PARAGRAPHS.replace("\n\n", " ")
CHINESE = make_text(600, ["猫", "狗", "在", "看", "人"], "。").replace(" ", "")
THAI = make_text(600, ["แมว", "หมา", "เห็น", "บ้าน"], "").replace(" ", "")
EMOJI = make_text(300, ["🐈", "🐕", "👀", "👩\u200d👩\u200d👧"], "!")


def articles(sizes, title="= Title {} =", section=" = = Section = = ") -> str:
  lines = PARAGRAPHS.split("\n\n")
  return "".join(
    f" {title.format(i)} \n \n"
    + f" \n {section} \n \n ".join([*lines[:size], "\n"])
    for i, size in enumerate(sizes)
  )


CORPORA: dict[str, dict[str, str | bytes]] = {
  "paragraphs": {"a.txt": PARAGRAPHS},
  "one line": {"a.txt": ONE_LINE},
  "one huge line": {"a.txt": ONE_LINE * 25},
  "byte order mark": {"a.txt": b"\xef\xbb\xbf" + PARAGRAPHS.encode()},
  "Chinese": {"a.txt": CHINESE},
  "Thai": {"a.txt": THAI},
  "emoji": {"a.txt": EMOJI},
  "verses": {"a.txt": "\n\n".join(PARAGRAPHS.split())},
  "two documents": {"a.txt": LINES[:30_000] + "\n\n" + LINES[30_000:]},
  "one small, one large": {"a.txt": "A title .", "b.txt": ONE_LINE},
  "a giant in front": {"a.txt": LINES, "b.txt": PARAGRAPHS[:20_000]},
  "a giant at the end": {"a.txt": PARAGRAPHS[:600], "b.txt": LINES * 3},
  "WikiText": {"wiki.valid.tokens": articles([9, 30, 60, 4, 80, 20] * 5)},
  "BabyLM's Wikipedia": {"a.train": articles([5, 9, 3] * 40, "= = = {} = = =")},
  "headings only": {"a.txt": articles([0] * 2000)},
  "empty files": {"a.txt": "", "b.txt": " \n\t\n", "c.md": PARAGRAPHS},
  "one record": {"a.jsonl": jsonl([PARAGRAPHS])},
  "records of all sizes": {
    "a.jsonl": jsonl(PARAGRAPHS[: 2**i] for i in range(16))
  },
  "forms": {"a.csv": "text\n" + "".join(
    f'"{part}"\n' for part in PARAGRAPHS.split(" .\n\n")
  )},
}  # fmt: skip


@pytest.mark.sample(5, 6)
@pytest.mark.parametrize("name", CORPORA)
def test_no_corpus_is_held_out_to_more_than_twice_the_share(tmp_path, name):
  share = 0.02
  folder = tmp_path / "in"
  for file, content in CORPORA[name].items():
    write(folder, **{file: content})
  one = len(CORPORA[name]) == 1  # a single file may be called dev
  paths = [str(folder / next(iter(CORPORA[name])) if one else folder)]
  opened = prepared(tmp_path, paths, dev_share=share)
  of = opened.manifest.splits
  whole = sum(len(p.text.encode()) for p in find_corpus(paths).read("train"))
  assert share / 2 <= of["dev"].text_bytes / whole <= 2 * share
  # The equal verses are held out together, and have most tokens for their text.
  if name != "verses":
    held = of["dev"].tokens / (of["train"].tokens + of["dev"].tokens)
    assert share / 2 <= held <= 2 * share
  # No text is lost or repeated.
  texts = sum(split.text_bytes for split in of.values())
  assert whole - 2 <= texts <= whole


@pytest.mark.parametrize("name", ["a.fa", "a.fasta", "a.fna.gz", "a.faa"])
def test_fasta_is_a_sequence_a_record(tmp_path, name):
  """Catches headers, line ends and blanks within sequences that are text."""
  path = tmp_path / name
  content = b";old\n>one x\r\nACGT\r\n;note\nacgN\r\n\r\n>empty\n>two\nMK V*\nL"
  path.write_bytes(gzip.compress(content) if name[-2:] == "gz" else content)
  tally = readers.Tally()
  rule = readers.RULES["auto"]
  found = [*readers.read_documents(str(path), rule, "text", tally=tally)]
  assert [document.text for document in found] == ["ACGTacgN", "MKV*L"]
  assert tally["records"] == 3
  assert tally["blank"] == 1
  how = {"kind": "characters", "vocab_size": 16, "seq_len": 4}
  data = prepare(path, dev=["ACGT" * 9], **how)
  ids = data.tokenizer.encode("ACGTacgN")
  assert data.train.read([0])[0][0].tolist() == [1, *ids[:3]]


@pytest.mark.parametrize("documents", ["auto", "line", "file"])
def test_records_in_a_file_of_text_are_refused(tmp_path, documents):
  """Catches JSON that is trained on as it is, as of WikiExtractor --json."""
  path = tmp_path / "wiki_00"
  lines = ['{"title": "a", "text": "one"}', '{"title": "b", "text": "two"}']
  path.write_text("\n".join(lines) + "\n")
  call = prepare, path
  settings = {"documents": documents, "vocab_size": 300, "seq_len": 8}
  assert "its lines are JSON records: name the" in runs.told(*call, **settings)
  # Other braces are text.
  path.write_text("{a}\n\n" + lines[0] + "\n\nb\n")
  read = readers.read_documents(str(path), readers.RULES["auto"], "text")
  assert [document.text for document in read] == ["{a}", lines[0], "b"]


@pytest.mark.parametrize(
  "settings, why",
  [
    ({"kind": "kmr:6"}, "unknown kind 'kmr:6': write bpe, wordpiece"),
    ({"kind": "kmer:33"}, "kmer:K with 2 to 32 letters"),
    ({"vocab_size": 12}, "vocab_size=12: bpe needs at least 261"),
  ],
)
def test_unknown_kinds_of_tokenizers_are_refused(settings, why):
  """Catches a kind that trains another tokenizer."""
  assert why in runs.told(prepare, ["ACGT", "ACGT"], **settings)


def test_what_export_would_refuse_is_refused_first():
  """Catches hours of training of a model that cannot be exported."""
  backend = tokenizers.Tokenizer.from_str(
    Tokenizer.train(["the dogs"], 300).to_json()
  )
  drop = tokenizers.Regex("[^a-z <>]")
  backend.normalizer = tokenizers.normalizers.Replace(drop, "")
  told = runs.told(prepare, ["the dogs"] * 99, tokenizer=backend)
  assert "cannot read <mask> in a text" in told
  assert "a list: give a path" in runs.told(prepare, ["a"], tokenizer=[1])
