"""Data: text, documents, tokenizer, packing, rows and `antlm prepare`."""

import dataclasses
import functools
import gzip
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import unicodedata

import hypothesis
import numpy as np
import pyarrow
import pytest
import tokenizers
from array_record.python import array_record_module
from hypothesis import strategies as st
from pyarrow import parquet

from antlm_jax import errors
from antlm_jax.commands import prepare
from antlm_jax.data import (
  array_records,
  document_store,
  packing,
  rows,
  spans,
  tokenizer,
)
from antlm_jax.data.preparation import Preparation
from antlm_jax.data.prepared_folder import (
  SPLITS,
  Manifest,
  PreparedData,
  Sources,
)
from antlm_jax.runtime import files
from tests import runs
from tests.runs import refusal

EOS, PAD = 1, 0
TRAIN, DEV = (
  f"{name}-00000-of-00001.array_record" for name in ("train", "dev")
)
NO_DEV = "dev: no dev file is given, so"
WORDS = ["cat", "dog", "sees", "the", "a", "runs", "café", "sleeps", "it's"]


def make_text(lines: int, seed: int = 0) -> str:
  draw = np.random.default_rng(seed).integers(0, len(WORDS), (lines, 9))
  return "".join(" ".join(WORDS[w] for w in row) + " .\n\n" for row in draw)


@pytest.fixture
def corpus(tmp_path) -> pathlib.Path:
  folder = tmp_path / "corpus"
  folder.mkdir()
  (folder / "a.train").write_text(make_text(300), "utf-8")
  (folder / "a.dev").write_text(make_text(60, seed=1), "utf-8")
  return folder


def make(corpus, output, **changes) -> Manifest:
  asked = {"seq_len": 32, **changes}
  if "tokenizer" not in changes:
    asked.setdefault("vocab_size", 300)
  return prepare.prepare(corpus, output, **asked).manifest


@pytest.fixture(scope="module", params=tokenizer.KINDS)
def small_tokenizer(request) -> tokenizer.Tokenizer:
  texts = make_text(300).splitlines()
  return tokenizer.Tokenizer.train(texts, 280, request.param)


@hypothesis.given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokenizer_round_trip(small_tokenizer, string):
  decoded = small_tokenizer.decode(small_tokenizer.encode(string))
  assert decoded == unicodedata.normalize("NFC", string).removeprefix(" ")


def test_tokenizer_ids_and_json(small_tokenizer):
  t = small_tokenizer
  assert (t.pad_id, t.bos_id, t.eos_id, t.mask_id) == (0, 1, 2, 3)
  assert t.vocab_size == 280 == len(t.word_tokens.start) == len(t.special)
  kind = "wordpiece" if "<unk>" in t.to_json() else "bpe"
  special = len(tokenizer.KINDS[kind])
  assert t.special.tolist() == [True] * special + [False] * (280 - special)
  again = tokenizer.Tokenizer.train(make_text(300).splitlines(), 280, kind)
  assert again.to_json() == t.to_json()
  assert tokenizer.Tokenizer.from_json(t.to_json()).to_json() == t.to_json()


def test_text_without_spaces_is_sampled(monkeypatch):
  monkeypatch.setattr(tokenizer, "_TRAINING_PHRASES", 300)
  texts = ["猫狗" * 100, "看人" * 100, "a cat " * 100]
  trained = tokenizer.Tokenizer.train(texts, 400)
  sizes = [len(trained.encode(text * 2)) for text in ("猫狗", "看人", "a cat ")]
  assert sizes[0] < sizes[1] > 12 and sizes[2] < 6


def test_word_starts_count_words_and_special_tokens_are_text(small_tokenizer):
  string = "the xylophone sees\ncafé Ω ."
  ids = small_tokenizer.encode(string)
  assert ids.dtype == np.int32
  assert small_tokenizer.word_tokens.start[ids].sum() == len(string.split())
  ids = small_tokenizer.encode("a </s><mask> b")
  assert not small_tokenizer.special[ids].any()
  assert small_tokenizer.decode(ids) == "a </s><mask> b"


def test_wordpiece_is_understood(tmp_path):
  vocab = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "do": 4, "##g": 5}
  backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab))
  backend.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
  backend.save(str(tmp_path / "t.json"))
  t = tokenizer.Tokenizer.load(tmp_path / "t.json")
  assert (t.pad_id, t.bos_id, t.eos_id, t.mask_id) == (0, 1, 2, 3)
  assert t.word_tokens.start.tolist() == [True] * 5 + [False]


@st.composite
def sequences(draw) -> list[np.ndarray]:
  """Draws documents whose tokens are all distinct."""
  lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=40))
  tokens = np.arange(2, 2 + sum(lengths), dtype=np.int32)
  return np.split(tokens, np.cumsum(lengths)[:-1])


def joined(blocks, seq_len: int) -> packing.Block:
  tokens, starts = zip(*blocks, strict=True)
  tokens, starts = np.concatenate(tokens), np.concatenate(starts)
  assert tokens.shape == starts.shape == (len(tokens), seq_len)
  assert starts[:, 0].all()
  return tokens, starts


@pytest.fixture(autouse=True, scope="module")
def small_windows():
  """Shortens the packers' windows, so that tiny texts cross them."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(packing, "_WINDOW", 200)
    yield


@hypothesis.given(sequences(), st.integers(24, 64), st.integers(0, 9))
def test_a_stream_drops_only_the_end_and_chunks_cut_its_rows_in_two(
  documents, seq_len, seed
):
  plain, starts = joined(packing.pack_stream(documents, seq_len), seq_len)
  everything = np.concatenate(documents)
  kept = len(everything) // seq_len * seq_len
  np.testing.assert_array_equal(plain.ravel(), everything[:kept])
  assert not starts[:, 1:].any()
  tokens, starts = joined(packing.chunks(documents, seq_len, seed), seq_len)
  np.testing.assert_array_equal(tokens, plain)
  assert (starts.sum(1) == 2).all()
  cut = starts[:, 1:].argmax(1) + 1
  assert ((cut >= 12) & (cut <= seq_len - 12)).all()


def test_chunks_are_a_function_of_the_seed_and_uniform(monkeypatch):
  documents = [np.arange(128 * 20_000, dtype=np.int32)]
  cuts = {}
  for seed, window in itertools.product((0, 1), (200, 1 << 20)):
    monkeypatch.setattr(packing, "_WINDOW", window)
    _, starts = joined(packing.chunks(documents, 128, seed), 128)
    cuts[seed, window] = starts[:, 1:].argmax(1) + 1
  np.testing.assert_array_equal(cuts[0, 200], cuts[0, 1 << 20])
  assert (cuts[0, 200] != cuts[1, 200]).mean() > 0.9
  counts = np.bincount(cuts[0, 200])[12:]
  assert len(counts) == 128 - 24 + 1
  assert counts.min() > 100  # of 190 expected


@hypothesis.given(sequences(), st.integers(2, 64))
def test_documents_are_whole_and_apart(documents, seq_len):
  blocks = packing.pack_documents(documents, seq_len, PAD)
  tokens, starts = joined(blocks, seq_len)
  segments = np.split(tokens.ravel(), np.flatnonzero(starts.ravel())[1:])
  padding = [s for s in segments if (s == PAD).any()]
  assert all((segment == PAD).all() for segment in padding)
  pieces = sorted(
    tuple(document[i : i + seq_len])
    for document in documents
    for i in range(0, len(document), seq_len)
  )
  found = sorted(tuple(s) for s in segments if (s != PAD).all())
  assert found == pieces


def test_documents_pack_tightly(monkeypatch):
  monkeypatch.setattr(packing, "_WINDOW", 1 << 20)
  lengths = np.random.default_rng(0).geometric(1 / 25, 40_000)
  documents = [np.ones(length, np.int32) for length in lengths]
  tokens, _ = joined(packing.pack_documents(documents, 128, PAD), 128)
  assert (tokens == PAD).mean() < 0.01


def test_boundaries(small_tokenizer):
  for boundary, around, alone, bound in (
    ("bos_eos", (1, 2), (1, 2), [1, 5, 6, 2]),
    ("bos", (1, None), (1, None), [1, 5, 6]),
    ("eos", (None, 2), (2, 2), [5, 6, 2]),
    ("none", (None, None), (None, None), [5, 6]),
  ):
    assert packing.boundary_ids(small_tokenizer, boundary) == around
    assert packing.frame_ids(small_tokenizer, boundary) == alone
    found = packing.bound(np.array([5, 6], np.int32), *around)
    assert found.tolist() == bound


def write_rows(shards, tokens, starts, dtype, segmented) -> None:
  begin = 0
  for path, count in shards:
    writer, end = rows.RowWriter(path, dtype, segmented), begin + count
    middle = begin + count // 3
    parts = slice(begin, middle), slice(middle, end)
    found, _ = writer.write((tokens[part], starts[part]) for part in parts)
    writer.close()
    assert found == count
    begin = end


@pytest.mark.parametrize("vocab_size", [1 << 16, (1 << 16) + 1])
@pytest.mark.parametrize("segmented", [False, True])
def test_rows_round_trip(tmp_path, vocab_size, segmented):
  generator = np.random.default_rng(0)
  tokens = generator.integers(0, vocab_size, (50, 21)).astype(np.int32)
  tokens[0, 0] = vocab_size - 1
  starts = generator.random((50, 21)) < 0.2
  shards = [(tmp_path / "a", 30), (tmp_path / "b", 0), (tmp_path / "c", 20)]
  write_rows(shards, tokens, starts, rows.token_dtype(vocab_size), segmented)
  read = rows.Rows(shards, 21, vocab_size, segmented)
  assert (len(read), read.seq_len, read.segmented) == (50, 21, segmented)
  found, found_starts = read.read([49, 0, 7])
  np.testing.assert_array_equal(found, tokens[[49, 0, 7]])
  assert found.dtype == np.int32
  expected = starts[[49, 0, 7]] if segmented else None
  np.testing.assert_array_equal(found_starts, expected)
  assert read.read([])[0].shape == (0, 21)
  with pytest.raises(IndexError):
    read.read([50])


@pytest.mark.parametrize("width", [1, 16, 30, 32, 49, 127, 128, 2176])
def test_records_are_found_and_hashed_as_array_record_does(tmp_path, width):
  """Catches a hash that is wrong for some sizes: it would refuse whole rows."""
  rows_of = np.random.default_rng(width).integers(0, 256, (40, width), np.uint8)
  writer = array_record_module.ArrayRecordWriter(
    str(tmp_path / "file"), rows._WRITER_OPTIONS
  )
  for record in rows_of:
    writer.write(record.tobytes())
  writer.close()
  size = array_records.chunk_size(width)
  begin, last = array_records.file_offset(np.array([0, 40 * size - 1])).tolist()
  data = (tmp_path / "file").read_bytes()[begin : last + 1]
  plain = array_records.without_block_headers(data, begin)
  chunks = np.frombuffer(plain, np.uint8).reshape(40, size).copy()
  chunks[7, -1] ^= 1
  found, bad = array_records.records(chunks, width)
  assert np.flatnonzero(bad).tolist() == [7]
  np.testing.assert_array_equal(found[8:], rows_of[8:])


def test_a_shard_of_other_rows_is_refused(tmp_path):
  """Catches rows of another length, whose bytes are cut into wrong rows."""
  shards = [(tmp_path / "a", 30)]
  tokens = np.ones((30, 20), int)
  write_rows(shards, tokens, tokens == 1, "<u2", False)
  read = rows.Rows(shards, 10, 300, False)
  refusal("a has a bad row 4: it has 40 bytes, not 20", read.read, [4, 5])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
  """A prepared folder, whose copies are damaged."""
  folder = tmp_path_factory.mktemp("whole")
  (folder / "a.txt").write_text(make_text(2000), "utf-8")
  make(folder / "a.txt", folder / "out")
  return folder / "out"


@pytest.fixture
def copy(whole, tmp_path) -> pathlib.Path:
  return shutil.copytree(whole, tmp_path / "copy")


def leaves(value, *keys):
  """Yields the keys to each value inside of JSON."""
  if isinstance(value, dict | list):
    each = value if isinstance(value, dict) else range(len(value))
    for key in each:
      yield from leaves(value[key], *keys, key)
  else:
    yield keys


def test_every_field_of_a_manifest_is_checked(copy):
  """Catches `boundary: foo`, and counts or types that fail later or never."""
  path = copy / "manifest.json"
  whole = path.read_text()

  def refused(keys, wrong):
    manifest = json.loads(whole)
    inner = functools.reduce(lambda node, key: node[key], keys[:-1], manifest)
    if inner[keys[-1]] != wrong:
      inner[keys[-1]] = wrong
      path.write_text(json.dumps(manifest))
      message = "json was changed, or is of another|of its manifest"
      refusal(message, PreparedData.open, copy)

  every = list(leaves(json.loads(whole)))
  assert len(every) > 40
  free = "path", "column", "documents", "kind"  # any text may have been asked
  for keys in every:
    refused(keys, [])
    refused(keys, {})
    if keys[-1] not in free:
      refused(keys, "foo")
    if keys != ("settings", "tokenizer"):
      refused(keys, None)
  refused(("tokenizer", "vocab_size"), 300)
  refused(("segmented",), True)
  refused(("seq_len",), 16)
  refused(("splits", "train", "rows"), 1)
  refused(("splits", "train", "padding"), -1)
  refused(("splits", "dev", "shards", 0, "rows"), True)
  for change in ({"version": 1}, {"splits": {}}, {"more": 1}):
    path.write_text(json.dumps(json.loads(whole) | change))
    line = refusal(
      "json was changed, or is of another", PreparedData.open, copy
    )
    assert "another output" in line and "delete" not in line
  path.write_text(whole)
  PreparedData.open(copy)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", None])
def test_a_folder_without_a_manifest_is_refused(copy, content):
  (copy / "manifest.json").unlink()
  if content is not None:
    (copy / "manifest.json").write_bytes(content)
  message = "is not a prepared folder .*; run antlm prepare"
  refusal(message, PreparedData.open, copy)
  refusal(message, Manifest.load, copy / "none")
  missing = copy.with_name(copy.name[:-1])
  assert f"no such folder; did you mean {copy}?" in refusal(
    message, PreparedData.open, missing
  )


def test_another_tokenizer_is_refused(copy, tmp_path):
  texts = make_text(300, seed=5).replace("c", "k").splitlines()
  other = tokenizer.Tokenizer.train(texts, 300)
  assert other.vocab_size == PreparedData.open(copy).tokenizer.vocab_size
  (copy / "tokenizer.json").write_text(other.to_json(), "utf-8")
  message = "is not the tokenizer that the rows were made with"
  refusal(message, PreparedData.open, copy)
  (copy / "tokenizer.json").unlink()
  refusal("cannot read the tokenizer", PreparedData.open, copy)


def flip(path: pathlib.Path, at: int) -> None:
  data = bytearray(path.read_bytes())
  data[at] ^= 4
  path.write_bytes(data)


def documents_json(folder: pathlib.Path, name: str) -> pathlib.Path:
  return folder / "documents" / "train-00000" / name


def test_a_foreign_folder_runs_no_code(copy, whole, tmp_path, monkeypatch):
  """Catches an import of the class that a folder's features.json names."""
  (tmp_path / "planted.py").write_text("raise SystemExit('it ran')")
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  path = documents_json(copy, "features.json")
  path.write_text(
    path.read_text().replace(
      "tensorflow_datasets.core.features.text_feature.Text", "planted.Text"
    )
  )
  assert "planted.Text" in path.read_text()
  documents = list(document_store.read_kept_documents(copy, "train"))
  assert (
    documents == list(document_store.read_kept_documents(whole, "train")) != []
  )
  assert "planted" not in sys.modules


@pytest.mark.parametrize(
  ("old", "new"),
  [
    ('"name": "documents"', '"name": "others"'),
    ('"array_record"', '"tfrecord"'),
    ('"{DATASET}', '"../../../whole/{DATASET}'),
    ('"1.0.0"', '"2.0.0"'),
    ('"splits"', '"parts"'),
  ],
)
def test_other_documents_are_refused(copy, old, new):
  """Catches records of another dataset, or of a file elsewhere, as text."""
  path = documents_json(copy, "dataset_info.json")
  changed = path.read_text().replace(old, new)
  assert changed != path.read_text()
  path.write_text(changed)
  message = r"train-00000 holds no documents of antlm prepare \(.+\)"
  refusal(
    message, lambda: list(document_store.read_kept_documents(copy, "train"))
  )


def test_damaged_rows_are_told_on_opening(copy):
  path = copy / TRAIN
  size = path.stat().st_size
  path.write_bytes(bytes(size))
  refusal(f"{TRAIN} has .* prepare it again", PreparedData.open, copy)
  for other in (size + 100, size - 100):
    os.truncate(path, other)
    of = f"{TRAIN} has {other} bytes, not the {size} of its manifest"
    refusal(of, PreparedData.open, copy)
  path.unlink()
  refusal(f"{TRAIN} has .* prepare it again", PreparedData.open, copy)


def test_a_flipped_bit_is_found(copy):
  path, row = copy / TRAIN, 7
  record = PreparedData.open(copy).train.read([row])[0].astype("<u2").tobytes()
  at = path.read_bytes().index(record) + 9
  flip(path, at)
  opened = PreparedData.open(copy)
  refusal("has a bad row 7: .*; delete", opened.train.read, [3, row, 1])
  refusal("not as it was prepared", opened.verify)
  flip(path, at)
  PreparedData.open(copy).verify()
  flip(path, 3)  # a byte outside the rows
  refusal("not as it was prepared", PreparedData.open(copy).verify)


@pytest.mark.parametrize("pack", packing.PACKINGS)
def test_rows_hold_the_text(corpus, tmp_path, pack):
  manifest = make(corpus, tmp_path / "out", packing=pack)
  opened = PreparedData.open(tmp_path / "out")
  vocabulary = opened.tokenizer
  for name, source in (("train", opened.train), ("dev", opened.dev)):
    split = manifest.splits[name]
    tokens, starts = source.read(range(len(source)))
    expected = (corpus / f"a.{name}").read_text("utf-8").split()
    assert split.words == len(expected)
    assert split.rows * 32 == split.tokens - split.dropped + split.padding
    kept = tokens[tokens != vocabulary.pad_id]
    assert len(kept) == split.tokens - split.dropped
    assert (starts is None) == (pack == "stream")
    if pack != "documents":
      found = vocabulary.decode(tokens.ravel()).replace(".", ". ").split()
      assert found[:-1] == expected[: len(found) - 1]
  assert "tensorflow" not in sys.modules


def test_command_prepares_once(corpus, tmp_path, capsys):
  output = tmp_path / "out"
  args = f"--text {corpus} --output={output} --vocab_size=300".split()
  first = runs.run("antlm_jax.commands.prepare", *args, "--seq_len", "32")
  assert (first.returncode, first.stderr) == (0, "")
  assert "train: 300 documents, 3,000 words" in first.stdout
  files = {p: p.stat().st_mtime_ns for p in output.rglob("*") if p.is_file()}

  prepare.main([*args, "--seq_len=32", "--verify"])
  out, err = capsys.readouterr()
  assert "already prepared" in out and "is as it was prepared" in out
  assert err == ""
  assert files == {p: p.stat().st_mtime_ns for p in files}
  refusal("seq_len 32 there, 64 asked", prepare.main, [*args, "--seq_len=64"])


def test_every_option_of_the_command(corpus, tmp_path):
  held_out, table = tmp_path / "held_out.tsv", tmp_path / "more.csv"
  for path in (held_out, table):
    path.write_text("body\n" + make_text(60, seed=2).replace("\n\n", "\n"))
  line = f"--text {corpus}/a.train --text {table} --dev {held_out}"
  line += f" --dev {corpus} --output={tmp_path}/out --column=body --seed=3"
  line += " --vocab_size=290 --seq_len=32 --kind=wordpiece --packing=chunks"
  line += " --documents=line --boundary=eos --dev_share=0.1 --share=0.5"
  line += " --verify"
  prepare.main(line.split())
  opened = PreparedData.open(tmp_path / "out")
  assert opened.manifest.splits["train"].documents == 180
  assert opened.manifest.splits["dev"].documents == 120
  again = f"--text={corpus} --dev={corpus}/a.dev --output={tmp_path}/again"
  again += f" --seq_len=32 --tokenizer={tmp_path}/out/tokenizer.json"
  prepare.main(again.split())
  assert PreparedData.open(tmp_path / "again").tokenizer.vocab_size == 290


@pytest.mark.parametrize(
  ("text", "dev", "share", "line"),
  [
    ("corpus", (), 1.0, "dev: a.dev"),
    ("corpus", ("more.txt",), 1.0, "dev: more.txt"),
    # The held-out share is one of the whole text, not of the used text.
    *(
      ("corpus/a.train", (), share, f"{NO_DEV} 2.0% of the text is held")
      for share in (0.1, 1.0)
    ),
    ("one.jsonl", (), 1.0, f"{NO_DEV} the end of document 1 is"),
  ],
)
def test_one_line_says_what_is_held_out(corpus, capsys, text, dev, share, line):
  folder = corpus.parent
  (folder / "more.txt").write_text(make_text(60, seed=2), "utf-8")
  record = json.dumps({"text": make_text(600)})
  (folder / "one.jsonl").write_text(record, "utf-8")
  dev = [folder / path for path in dev]
  make(folder / text, folder / "out", dev=dev, share=share, seq_len=8)
  out = capsys.readouterr().out
  assert ("warning: not used, named dev" in out) == bool(dev)
  said = [s for s in out.splitlines() if s[:4] == "dev:"]
  assert len(said) == 2 and said[0].startswith(line)  # the second has counts


@pytest.mark.slow
def test_a_long_document_is_one_document(tmp_path):
  """Catches special tokens between the pieces that it is read in."""
  text = make_text(20_000).replace("\n", " ")  # more than two pieces
  assert len(text) > 3 << 17
  (tmp_path / "a.train").write_text(text * 2, "utf-8")
  (tmp_path / "a.dev").write_text(text, "utf-8")
  for packing_ in ("stream", "documents"):
    output = tmp_path / packing_
    paths = [tmp_path / "a.train"], output
    how = {"packing": packing_, "documents": "file", "dev": tmp_path / "a.dev"}
    made = prepare.prepare(*paths, vocab_size=300, seq_len=64, **how)
    for name, count in (("train", 1), ("dev", 1)):
      tokens = getattr(made, name).read(range(len(getattr(made, name))))[0]
      assert (tokens == made.tokenizer.bos_id).sum() == count
      kept = [*document_store.read_kept_documents(output, name)]
      assert [one.begins for one in kept] == [True] + [False] * (len(kept) - 1)
      assert len(kept) > 1
      assert made.manifest.splits[name].documents == count


def test_documents_of_python_resume_and_are_divided(tmp_path, monkeypatch):
  """Catches a plan that names the temporary file of such documents."""
  documents, pack = make_text(600).split("\n\n")[:-1], Preparation.pack
  how = {"vocab_size": 300, "seq_len": 16}

  def interrupted(*args):
    raise KeyboardInterrupt

  monkeypatch.setattr(Preparation, "pack", interrupted)
  with pytest.raises(KeyboardInterrupt):
    prepare.prepare(documents, tmp_path / "out", **how)
  refusal(
    "begun otherwise", prepare.prepare, documents[1:], tmp_path / "out", **how
  )
  monkeypatch.setattr(Preparation, "pack", pack)
  made = prepare.prepare(iter(documents), tmp_path / "out", **how)
  how |= {"tasks": 2}
  assert prepare.prepare(documents, tmp_path / "two", task=1, **how) is None
  two = prepare.prepare(documents, tmp_path / "two", task=0, **how)
  hashes = (m.manifest.splits["train"].sha256 for m in (made, two))
  assert len({*hashes}) == 1


def test_data_in_memory_that_differ_are_told():
  """Catches a traceback: such data have no folder to name."""
  parts = [make_text(300, seed=seed).split("\n\n")[:-1] for seed in (0, 1)]
  own = [p.replace("cat", "tiger") for p in parts[1]]
  a, b = (
    prepare.prepare(p, vocab_size=300, seq_len=16) for p in (parts[0], own)
  )
  message = "the data a and b differ in tokenizer.json.*the tokenizer of a"
  refusal(message, Sources.of, {"a": a, "b": b})
  refusal("no files to compare", a.verify)


def test_preparing_the_same_or_other_text_again(corpus, tmp_path):
  names, made = ("tokenizer.json", TRAIN, DEV), []
  for folder in (tmp_path / "x", tmp_path / "y"):
    make(corpus, folder, packing="chunks")
    made.append([(folder / name).read_bytes() for name in names])
  assert made[0] == made[1]
  (corpus / "a.train").write_text(make_text(301), "utf-8")
  refusal("other text", make, corpus, folder, packing="chunks")


def counted(folder) -> dict:
  """Returns a manifest's counts and hashes, without its shards."""
  splits = Manifest.load(folder).splits.items()
  return {name: dataclasses.replace(of, shards=()) for name, of in splits}


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> pathlib.Path:
  """Text of several spans: small files, and a large file of each kind."""
  folder = tmp_path_factory.mktemp("large") / "text"
  folder.mkdir()
  texts = make_text(60_000).split("\n\n")[:-1]
  (folder / "plain.txt").write_text("\n\n".join(texts[:20_000]), "utf-8")
  lines = (json.dumps({"text": text}) for text in texts[20_000:40_000])
  (folder / "lines.jsonl").write_text("\n".join(lines), "utf-8")
  table = pyarrow.table({"text": texts[40_000:59_000]})
  parquet.write_table(table, folder / "table.parquet", row_group_size=2000)
  for number in range(10):
    few = texts[59_000 + 100 * number :][:100]
    (folder / f"small{number}.txt").write_text("\n\n".join(few), "utf-8")
  return folder


def large_args(large, output, *more) -> list[str]:
  line = f"--text {large} --output {output} --vocab_size=300 --seq_len=32"
  return [*line.split(), *more]


@pytest.fixture(scope="module")
def in_one_task(large):
  prepare.main(large_args(large, large.parent / "one", "--packing=chunks"))
  return large.parent / "one"


@pytest.mark.slow
def test_the_rows_are_the_same_for_any_number_of_tasks(
  large, in_one_task, tmp_path
):
  whole = PreparedData.open(in_one_task)
  output = tmp_path / "apart"
  args = large_args(large, output, "--packing=chunks", "--tasks=3")
  # Separate tasks may run in any order.
  for task in (2, 0, 1):
    prepare.main([*args, f"--task={task}"])
  made = PreparedData.open(output)
  made.verify()
  assert counted(output) == counted(in_one_task)
  assert len(made.manifest.splits["train"].shards) == 3
  assert made.manifest.sources == whole.manifest.sources
  for ours, theirs in ((made.train, whole.train), (made.dev, whole.dev)):
    every = np.random.default_rng(0).permutation(len(theirs))
    np.testing.assert_equal(ours.read(every), theirs.read(every))
  documents, expected = (
    list(document_store.read_kept_documents(folder, "train"))
    for folder in (output, in_one_task)
  )
  assert documents == expected
  assert not list(output.glob("preparing*"))
  # Every document is kept once.
  own = [
    document.text
    for name in SPLITS
    for document in document_store.read_kept_documents(in_one_task, name)
  ]
  texts = make_text(60_000).split("\n\n")[:-1]
  assert sorted(own) == sorted(texts)


@pytest.mark.slow
def test_a_preparation_goes_on_after_its_end(large, in_one_task, tmp_path):
  """Three signals end it, each later than the one before."""
  output = tmp_path / "out"
  args = large_args(large, output, "--packing=chunks", "--tasks=4")
  # Background jobs of a shell ignore SIGINT.
  line = ["env", "--default-signal=INT"]
  line += runs.command("antlm_jax.commands.prepare", *args)
  pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
  finished = "preparing/?????.json"
  again = b"stopped by a signal: run the same command again"
  for signal_, exists, status, message in (
    (signal.SIGINT, "preparing.lock", errors.INTERRUPTED, b"interrupted"),
    (signal.SIGTERM, "tokenizer.json", errors.RUN_AGAIN, again),
    (signal.SIGKILL, finished, -signal.SIGKILL, b""),
  ):
    process = subprocess.Popen(line, cwd=runs.ROOT, **pipes)
    while not list(output.glob(exists)) and process.poll() is None:
      time.sleep(0.01)
    process.send_signal(signal_)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status, said
    # A slow machine prints lines of progress before the message.
    assert not message or said.splitlines()[-1] == message
  kept = {p: p.stat().st_mtime_ns for p in output.glob(finished)}
  assert kept and not (output / "manifest.json").exists()
  refusal(
    r"begun otherwise \(seq_len 32 there, 64 asked\)",
    prepare.main,
    [*args, "--seq_len=64"],
  )
  prepare.main(args)
  assert counted(output) == counted(in_one_task)


LOST = (
  "train-00000-of-00002.array_record",
  "documents/train-00000/documents-dev.array_record-00000",
)


@pytest.fixture
def parts(tmp_path, monkeypatch) -> pathlib.Path:
  """A small text of several spans."""
  monkeypatch.setattr(spans, "_LEAST", 1 << 12)
  monkeypatch.setattr(spans, "_ROWS", 16)
  text = tmp_path / "text.txt"
  text.write_text(make_text(2000), "utf-8")
  return text


@pytest.fixture
def one(parts) -> pathlib.Path:
  """The same text, prepared in one task."""
  prepare.main(large_args(parts, parts.parent / "one"))
  return parts.parent / "one"


@pytest.mark.sample(1)
@pytest.mark.parametrize("lost", LOST)
def test_a_task_whose_files_are_gone_is_done_again(
  parts, one, tmp_path, lost, capsys
):
  """Catches a folder that is called ready without a shard, or without some
  held-out documents, and a repair that repeats the other tasks."""
  output = tmp_path / "out"
  args = large_args(parts, output, "--tasks=2")
  prepare.main([*args, "--task=0"])
  (output / lost).unlink()
  capsys.readouterr()
  prepare.main([*args, "--task=1"])
  out = capsys.readouterr().out
  assert "warning: files of task 0 are missing or changed" in out
  assert "task 1 is done; tasks left: 1 (0)" in out and "ready" not in out
  other = output / "train-00001-of-00002.array_record"
  before = other.stat().st_mtime_ns
  prepare.main([*args, "--task=0"])
  assert other.stat().st_mtime_ns == before
  PreparedData.open(output).verify()
  assert counted(output) == counted(one)
  assert not list(output.glob("preparing*"))


@pytest.mark.parametrize(
  ("dedup", "counts"), [("", (2940, 60)), ("--dedup", (980, 20))]
)
def test_copies_are_held_out_together(parts, tmp_path, dedup, counts, capsys):
  """Catches copies in other spans or tasks that are trained on."""
  texts = make_text(1000).split("\n\n")[:-1] * 3
  np.random.default_rng(0).shuffle(texts)
  parts.write_text("\n\n".join(texts), "utf-8")
  options = ["--packing=documents", *dedup.split()]
  prepare.main(large_args(parts, tmp_path / "one", *options))
  told = capsys.readouterr().out
  assert "copies: 2,000 of 3,000 documents repeat another" in told
  assert ("; 0 of 60 held-out documents are also" in told) == (not dedup)
  for task in (2, 0, 1):
    options += ["--tasks=3"] * (task == 2)
    prepare.main(
      large_args(parts, tmp_path / "two", *options, f"--task={task}")
    )
  assert counted(tmp_path / "two") == counted(tmp_path / "one")
  train, dev = (
    [
      text
      for text, *_ in document_store.read_kept_documents(
        tmp_path / "one", split
      )
    ]
    for split in SPLITS
  )
  assert not {*train} & {*dev} and len({*train} | {*dev}) == 1000
  assert (len(train), len(dev)) == counts
  # prepare counts leaks of a given file, and leaves them out on request.
  # Also compressed, and in another form of Unicode.
  held = unicodedata.normalize("NFD", "\n\n".join([*texts[:9], "x"]))
  assert "cafe\u0301" in held
  (tmp_path / "held.txt.gz").write_bytes(gzip.compress(held.encode()))
  capsys.readouterr()
  how = {"dev": tmp_path / "held.txt.gz", "dedup": bool(dedup)}
  prepare.prepare(parts, vocab_size=300, seq_len=16, **how)
  leak = "9 of 10 held-out documents are also trained on"
  assert (leak in capsys.readouterr().out) == (not dedup)


def test_tasks_of_different_tokenizers_do_not_mix(parts, tmp_path, capsys):
  """Catches shards of one folder that two tokenizers encoded."""
  args = large_args(parts, tmp_path / "out", "--tasks=2")
  prepare.main([*args, "--task=0"])
  other = tokenizer.Tokenizer.train(make_text(50, seed=9).splitlines(), 270)
  (tmp_path / "out/tokenizer.json").write_text(other.to_json(), "utf-8")
  prepare.main([*args, "--task=1"])
  assert "task 1 is done; tasks left: 1 (0)" in capsys.readouterr().out


def test_other_processes_see_how_much_a_task_has_packed(
  parts, tmp_path, monkeypatch
):
  """Catches a bar of several processes that is not at the packed bytes."""
  pack, seen = Preparation.pack, []

  def watched(self, task):
    total = 0
    for size in pack(self, task):
      total += size
      seen.append((self.packed(task), total))
      yield size

  monkeypatch.setattr(Preparation, "pack", watched)
  prepare.main(large_args(parts, tmp_path / "out"))
  assert len(seen) > 5 and all(packed == total for packed, total in seen)
  assert abs(seen[-1][1] - parts.stat().st_size) <= len(seen)


@pytest.mark.slow
def test_a_task_leaves_the_last_step_to_the_process_of_all_tasks(
  parts, one, tmp_path, capsys
):
  """Catches a task and the process that runs it waiting for each other."""
  output = tmp_path / "out"
  args = large_args(parts, output, "--tasks=2")
  prepare.main([*args, "--task=0"])
  with files.file_lock(output / "preparing.lock"):
    prepare.main([*args, "--task=1"])
  out = capsys.readouterr().out
  assert "task 1 is done; another process makes the folder ready" in out
  assert not (output / "manifest.json").exists()
  prepare.main(args)
  assert counted(output) == counted(one)


@pytest.fixture
def python(tmp_path, monkeypatch):
  """Makes processes of Python run a shell's commands instead."""

  def replace(commands: str) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{commands}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

  return replace


ENDS = [
  ("kill -9 $$", "task [01] was killed by signal 9.* with more --tasks$"),
  ("echo 1/2 >&2; echo 'error: a bad line' >&2; exit 2", "^a bad line$"),
  ("echo 'Traceback: KeyError' >&2; exit 1", r"task [01] failed \(status 1\)"),
]


@pytest.mark.parametrize(("commands", "message"), ENDS)
def test_the_end_of_a_process_is_told(
  parts, tmp_path, python, capsys, commands, message
):
  """Catches a folder that waits for a task whose process has ended, and an
  error of a process that nobody can find."""
  python(commands)
  args = large_args(parts, tmp_path / "out", "--tasks=2")
  if "Traceback" in commands:
    with pytest.raises(RuntimeError, match=message):
      prepare.main(args)
    assert "Traceback: KeyError" in capsys.readouterr().err
  else:
    refusal(message, prepare.main, args)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_processes_use_a_tokenizer_of_python(corpus, tmp_path):
  """Catches processes that train a tokenizer instead, or refuse the folder."""
  own = tokenizer.Tokenizer.train(make_text(50, seed=9).splitlines(), 270)
  made = make(corpus, tmp_path / "two", tokenizer=own, tasks=2)
  assert (
    PreparedData.open(tmp_path / "two").tokenizer.to_json() == own.to_json()
  )
  make(corpus, tmp_path / "one", tokenizer=own)
  assert counted(tmp_path / "two") == counted(tmp_path / "one")
  assert "vocab_size" not in made.settings


def test_a_failure_deletes_only_its_own_files(corpus, tmp_path, monkeypatch):
  """Catches the loss of files that others put into the output meanwhile."""
  output = tmp_path / "out"
  theirs = {"mine.txt", "documents/mine.txt", "preparing/mine.txt"}

  def fail(job):
    for name in theirs:
      (output / name).write_text("mine")
    raise errors.UserError("too few words")

  monkeypatch.setattr(Preparation, "seal", fail)
  refusal("too few words", make, corpus, output)
  left = {p.relative_to(output) for p in output.rglob("*") if p.is_file()}
  assert left == set(map(pathlib.Path, theirs))


@pytest.mark.sample(2, 2)
@pytest.mark.parametrize("kilobytes", [8, 600, 1000])
@pytest.mark.parametrize("tasks", [1, 2])
def test_a_full_disk_is_one_line(corpus, small_disk, kilobytes, tasks):
  """Catches tracebacks of the libraries that write rows and documents."""
  disk = small_disk(kilobytes)
  (corpus / "a.train").write_text(make_text(30_000), "utf-8")
  message = f"cannot write {disk}/out/.*: No space left on device"
  refusal(message, make, corpus, disk / "out", tasks=tasks)
  assert not list(disk.iterdir())


def test_two_preparations_do_not_mix(corpus, tmp_path, monkeypatch):
  pack, output, lines = Preparation.pack, tmp_path / "out", []

  def pack_while_another_prepares(*args):
    line = f"--text {corpus} --output {output} --vocab_size=300 --seq_len=32"
    lines.append(runs.told(prepare.main, line.split()))
    return pack(*args)

  monkeypatch.setattr(Preparation, "pack", pack_while_another_prepares)
  make(corpus, output)
  (line,) = lines
  assert "out is in use by process" in line


@pytest.mark.slow
def test_a_bad_record_names_its_part_and_keeps_what_is_done(large, tmp_path):
  text = shutil.copytree(large, tmp_path / "text")
  with open(text / "table.jsonl", "w") as file:
    file.write('{"text": "a"}\n' * 200_000 + "no record\n")
  args = large_args(text, tmp_path / "out", "--tasks=6")
  refusal(r"line \d+ after byte [\d,]+ is not JSON", prepare.main, args)


BAD_TEXTS = [
  ({}, "no text to train on"),
  ({"a.pdf": b"x"}, "no text to train on.*of no known kind: a.pdf"),
  (
    {"a.parquet.gz": b"x"},
    "no text to train on.*of no known kind: a.parquet.gz",
  ),
  (
    {"caf\udce9.txt": b"x"},
    r"the name of .*/caf\\xe9.txt is not UTF-8: rename",
  ),
  ({"a.txt": b" \n\n"}, "no words"),
  ({"a.txt": b"one document"}, "no words for dev"),
  ({"a.train": b"a b c\n\n" * 99, "a.dev": b"x"}, "the dev split has"),
]


@pytest.mark.parametrize(("files", "message"), BAD_TEXTS)
def test_bad_text(tmp_path, files, message):
  corpus = tmp_path / "corpus"
  corpus.mkdir()
  for name, content in files.items():
    (corpus / name).write_bytes(content)
  refusal(message, make, corpus, tmp_path / "out")
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
  "args, message",
  [
    ("--text nowhere --output {out}", "'nowhere' does not exist"),
    ("--text {corpus}", "--output"),
    ("--output {out}", "give --text, or --verify"),
    ("--output {out} --task=1", "no process prepares .*out now: give --text"),
    ("--output {out} --verify", "run antlm prepare"),
    ("--text /dev/zero --output {out}", "/dev/zero is not a regular file"),
    ("--text {corpus} --output {out}/{long}", "too long for a path"),
    ("{good} --vocab_size=260", "at least 261"),
    ("{good} --packing=chunks --seq_len=23", "at least 24"),
    ("{good} --seq_len=100000", "train split has .* tokens, less than a row"),
    ("{good} --tokenizer={corpus}", "no checkpoint"),
    ("{good} --tokenizer={corpus}/a.dev", "is not a tokenizer"),
    ("{good} --tokenizer=a.Q8.gguf", "run `antlm import --model=a.Q8.gguf"),
    ("{good} --share=0.0", "share=0.0 is not over 0"),
    ("--text {corpus} --output {corpus}/a.dev", "Not a directory"),
    ("--text {corpus} --output {corpus}", "is not empty"),
    ("{good} --task=0", "task=0 needs the number of tasks"),
    ("{good} --tasks=1 --task=1", "task=1: 1 tasks have the numbers 0 to 0"),
  ],
)
def test_bad_commands_are_told_in_one_line(corpus, tmp_path, args, message):
  out = tmp_path / "out"
  args = args.replace("{good}", "--text {corpus} --output {out} --seq_len=32")
  words = args.format(corpus=corpus, out=out, long="x" * 5000).split()
  refusal(message, prepare.main, words)
  assert not out.exists()
  assert sorted(f.name for f in corpus.iterdir()) == ["a.dev", "a.train"]
