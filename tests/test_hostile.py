"""Folders of strangers: nothing of them is run, obeyed, or written through."""

import functools
import json
import os
import shutil
import subprocess
import sys
import types

import pyarrow
import pytest
from pyarrow import parquet

from antlm_jax import cli, tables, terminal
from antlm_jax.commands.prepare import prepare
from antlm_jax.data import document_store, readers
from antlm_jax.data.readers import Document
from antlm_jax.evals.finetuning import (
  classification,
  labelled,
  record_values,
  tagging,
)
from antlm_jax.evals.studies import jobs
from antlm_jax.hf import card
from antlm_jax.page import plots
from antlm_jax.planning import topology
from antlm_jax.runtime import files, records
from antlm_jax.runtime import jobs as processes
from antlm_jax.training import metrics
from tests import runs

COLOUR = "\x1b]0;owned\x07\x1b[31m"
TEXT = "the dogs rest near the old house\n" * 300
SMALL = {"vocab_size": 300, "seq_len": 16, "quiet": True}


@pytest.fixture
def corpus(tmp_path, monkeypatch):
  """The present folder, with two texts and a Python file that says it ran."""
  monkeypatch.chdir(tmp_path)
  for name in "ab":
    (tmp_path / f"{name}.txt").write_text(TEXT)
  code = 'open("RAN", "w"); raise SystemExit'
  (tmp_path / "tqdm.py").write_text(code)
  return tmp_path


@pytest.mark.slow
def test_processes_import_nothing_from_the_present_folder(corpus):
  """Catches `python -m` without -P, which puts the folder first on the path."""
  prepare([*corpus.glob("*.txt")], corpus / "out", tasks=2, **SMALL)
  job = jobs.Job("none", "antlm_jax.evals.studies.jobs", (), corpus)
  assert jobs.start_job(job).wait() == 0
  done = subprocess.run(cli.python_command("tqdm", "--version"))
  assert done.returncode == 0
  assert not (corpus / "RAN").exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "dangling"])
def test_a_lock_that_is_no_plain_file_is_refused(tmp_path, kind):
  """Catches a lock that writes its line into the file that a link names."""
  target, lock = tmp_path / "precious", tmp_path / ".lock"
  if kind == "pipe":
    os.mkfifo(lock)
  else:
    lock.symlink_to(target)
  if kind == "link":
    target.write_text("precious")
  told = f"cannot write {lock}: it is a link or no regular file: delete it"
  assert told == runs.told(files.file_lock(lock).__enter__)
  assert kind != "link" or target.read_text() == "precious"
  assert kind != "dangling" or not target.exists()


def test_a_log_is_not_written_through_a_link(tmp_path):
  """Catches the log of a study's job that replaces another file."""
  target = tmp_path / "precious"
  target.write_text("precious")
  log = tmp_path / "a.log"
  log.symlink_to(target)
  start = functools.partial(processes.Child, "a", ["antlm_jax"], log=log)
  assert "a.log: it is a link or no regular file" in runs.told(start)
  assert target.read_text() == "precious"


def test_rows_are_not_written_through_a_link(corpus):
  """Catches a shard in a folder of tasks that is a link to another file."""
  (corpus / "precious").write_text("precious")
  how = SMALL | {"tasks": 2}
  prepare([*corpus.glob("*.txt")], corpus / "out", task=0, **how)
  rows = corpus / "out/train-00001-of-00002.array_record"
  rows.symlink_to("../precious")
  assert prepare([*corpus.glob("*.txt")], corpus / "out", task=1, **how)
  assert (corpus / "precious").read_text() == "precious"
  assert not rows.is_symlink()


@pytest.mark.parametrize(
  ("text", "shown"),
  [
    (COLOUR, r"\x1b]0;owned\x07\x1b[31m"),
    ("a\rb\x7f\x9b1m", r"a\x0db\x7f\x9b1m"),
    ("a\u202eb\u2066c", r"a\u202eb\u2066c"),
    (os.fsdecode(b"n\xff"), r"n\xff"),
    ("\ud800", r"\ud800"),
    ("line\n\tñ 中 👍🏽 ﷽", "line\n\tñ 中 👍🏽 ﷽"),
  ],
)
def test_control_characters_are_visible(text, shown):
  assert terminal.visible(text) == shown


def test_no_stream_of_a_command_obeys_a_name():
  """Catches a way to the terminal around `visible`, and bars that lost it."""
  code = f"""
import sys, warnings
from antlm_jax import cli
from antlm_jax.errors import UserError
from antlm_jax.runtime import progress
name = {COLOUR!r}
def main(argv):
  print(name)
  progress.say(name)
  warnings.warn(name)
  sys.stderr.writelines([name, "\\n"])
  print("\\rbar " + name, file=sys.stderr)
  raise argv and UserError("no " + name + "\\nmore") or ValueError(name)
sys.argv = ["x", *sys.argv[1:]]
cli.run_command(main)
"""
  for words, last in (["a"], r"error: no \x1b"), ([], r"ValueError: \x1b"):
    done = subprocess.run(
      [sys.executable, "-c", code, *words], capture_output=True
    )
    assert b"\x1b" not in done.stdout + done.stderr
    assert done.stdout.count(rb"\x1b]0;owned\x07\x1b[31m") == 2
    assert b"\n\rbar \\x1b]0;" in done.stderr
    assert done.stderr.decode().splitlines()[-1].startswith(last)


@pytest.mark.parametrize("name", ["b$x^{2$", r"a$\frac$", "a$1 vs $2", "$"])
def test_dollar_signs_are_text_in_pictures(name, tmp_path):
  """Catches names that matplotlib reads as mathematics, or refuses."""
  figure = plots.canvas(4, 3, name)
  axes = figure.subplots()
  axes.plot([0, 1], label=name)
  axes.set_title(name)
  axes.set_yticks([0, 1], [name, name])
  plots.legend(axes, name)
  plots.save_figure(figure, tmp_path / "a.png")
  texts = [t for t in figure.findobj(plain_text) if t.get_text() == name]
  assert len(texts) >= 6 and not any(t.get_parse_math() for t in texts)


def plain_text(artist) -> bool:
  return hasattr(artist, "get_parse_math")


@pytest.mark.slow
def test_a_run_ends_well_without_its_picture(tmp_path, prepared, monkeypatch):
  """Catches a finished training that fails for its page or its picture."""

  def fail(*_):
    raise RuntimeError("no picture\x1b")

  monkeypatch.setattr(plots, "draw_run_curves", fail)
  steps = "curriculum=2C steps", "eval.objectives=C"
  said = runs.train(tmp_path / "r", prepared, *steps).stdout
  assert r"warning: curves.png is not written: no picture\x1b" in said
  assert runs.summary(tmp_path / "r")["steps"] == 2
  assert (tmp_path / "r/README.md").exists()


@pytest.mark.parametrize("shape", ["0x0", "4x0", "", "-1", "9000x9000"])
def test_a_plan_needs_chips(shape):
  """Catches a shape by which libtpu divides, which ends the process."""
  told = f"unknown topology 'v5e:{shape}': write a shape of at most 16,384"
  assert told in runs.told(topology.topology_devices, f"v5e:{shape}")


@pytest.mark.parametrize(
  "text", ["-" * 6000, "3in 1 oil", "not " * 3000 + "1", "[" * 10**5, "[...]"]
)
def test_texts_are_not_evaluated(text):
  """Catches Python's parser, which some texts exhaust or make warn."""
  record_values.refuse_list(text, "record 1")


@pytest.mark.parametrize(
  "value",
  [
    ["a", "it's", 'say "x"', "new\nline", "\\", "\x1b\u202e\U0001f600"],
    [1, -2, 0.5, 1e-07, None, True],
    ["x]", "[", "', '"],
    [],
  ],
)
def test_lists_that_are_written_as_text_are_refused(value):
  nested = ([value, value], [(1, value)], [{"a": value}]) if value else ()
  for one in (value, *nested):
    told = runs.told(record_values.refuse_list, repr(one), "record 1")
    assert "is a list that is written as text" in told


# ------------------------------------------------------------- damaged results


def test_a_card_leaves_out_damaged_results(tmp_path, capsys):
  """Catches tracebacks of an export for files that it does not need."""
  run, evals = tmp_path, tmp_path / "evals"
  good = {"request": {"step": 4, "mode": "mlm"}, "macro_accuracy": 0.5}
  for name, text in {
    "<b>good": json.dumps(good | {"pairs": 3}),
    "pairs": json.dumps(good | {"pairs": "many"}),
    "request": '{"request": 3}',
    "best": json.dumps(good | {"best_run": "0"}),
    "cut": '{"request": {"step',
    "deep": "[" * 100_000,
    "program": '{"accuracy": "high"}',
  }.items():
    files.write_text(evals / name / "4-mlm/summary.json", text)
  lines = ('{"step": 4, "eval/mlm/loss": null}', '{"step": 4', '{"step": true}')
  good = '{"step": 4, "eval/mlm/loss": 2.5}\n'
  (run / metrics.METRICS).write_text(good + "\n".join(lines))
  config = types.SimpleNamespace(
    data=types.SimpleNamespace(path="d"), trained=()
  )
  saved = types.SimpleNamespace(run=run, evals=evals)
  loaded = types.SimpleNamespace(task=None, saved=saved, config=config, step=4)
  found = card.read_results(loaded)
  assert [one.metric_value for one in found] == [2.5, 0.5]
  said = capsys.readouterr().out.splitlines()
  assert "line 2: 'eval/mlm/loss' is no number; 3" in said[0]
  names = ["best", "cut", "deep", "pairs", "request"]
  assert len(said) == 6 and all(
    f"/{name}/4-mlm/summary.json" in line and "leaves it out" in line
    for name, line in zip(names, said[1:], strict=True)
  )


@pytest.mark.parametrize("file", ["plan.json", "00000.json"])
def test_a_preparation_with_damaged_files_is_told(corpus, file, capsys):
  texts, out = [*corpus.glob("*.txt")], corpus / "out"
  how = SMALL | {"tasks": 2, "quiet": False}
  prepare(texts, out, task=0, **how)
  (out / "preparing" / file).write_text("{}")
  if file == "plan.json":
    told = "plan.json has no settings: delete"
    assert told in runs.told(lambda: prepare(texts, out, task=1, **how))
  else:
    assert prepare(texts, out, task=1, **how) is None
    assert "files of task 0 are missing or changed" in capsys.readouterr().out


# ------------------------------------------------------------ tables for others


def test_values_without_end_are_refused(tmp_path):
  """Catches tracebacks for a label of many lists, and a tag of many digits."""
  label = "[" * 3000 + "]" * 3000
  (tmp_path / "a.jsonl").write_text(f'{{"text": "a", "label": {label}}}\n')
  (tmp_path / "a.conll").write_text(f"a {'9' * 5000}\nb O\n")
  how = "own", "causal", classification.ClassifierOptions(), labelled.Columns()
  read = functools.partial(labelled.classify, str(tmp_path / "a.jsonl"), *how)
  assert "line 1: it is nested too deeply" in runs.told(read)
  read = functools.partial(tagging.own_task, str(tmp_path / "a.conll"))
  assert "is of no scheme that is read" in runs.told(read)


@pytest.mark.parametrize(
  ("text", "shown"),
  [
    ("a<img src=x onerror=1>", "a&lt;img src=x onerror=1>"),
    ("[x](javascript:alert(1))", "[x]\\(javascript:alert(1))"),
    ("`<s>` and <s>", "`<s>` and &lt;s>"),
    # No code spans of CommonMark.
    ("`<s>``", "`&lt;s>``"),
    ("\\`<s>`", "\\`&lt;s>`"),
    ("a\r<s>", "a\\x0d&lt;s>"),
  ],
)
def test_names_are_no_html_and_no_links_in_tables(text, shown):
  head, _, row = tables.markdown([(text,)], (text,)).split("\n")
  assert head == row == f"| {shown} |"


# ----------------------------------------------------------- packed and endless


def documents(path) -> int:
  rule = readers.RULES["line"]
  return sum(1 for _ in readers.read_documents(str(path), rule, "text"))


@pytest.mark.parametrize(
  "name", ["a.jsonl", "a.jsonl.zst", "a.csv", "a.tsv.gz"]
)
def test_a_line_has_a_longest_length(tmp_path, monkeypatch, name):
  """Catches a line that is read whole before its length is known."""
  monkeypatch.setattr(records, "LONGEST_RECORD", 1 << 20)
  text = "a" * (1 << 20)
  content = f'{{"text": "b"}}\n{{"text": "{text}"}}\n'
  if ".jsonl" not in name:
    content = f"text\nb\n{text}c\n"
  write_packed(tmp_path / name, content)
  told = runs.told(documents, tmp_path / name)
  number = 2 if ".jsonl" in name else 3
  assert f"{name}: line {number} is longer than 1 MiB" in told


def write_packed(path, content: str) -> None:
  kind = readers.COMPRESSED.get(path.suffix)
  with pyarrow.output_stream(path, compression=kind) as file:
    file.write(content.encode())


@pytest.mark.parametrize("ending", [".zst", ".gz", ".bz2"])
def test_a_packed_text_is_not_a_thousand_times_its_size(
  tmp_path, monkeypatch, ending
):
  """Catches some kilobytes that fill the memory or the disk."""
  monkeypatch.setattr(readers, "_SMALL", 1 << 20)
  monkeypatch.setattr(readers, "_RATIO", 100)
  path = tmp_path / f"a.txt{ending}"
  write_packed(path, "dogs\n" * (1 << 20))
  assert "as much: if that is right, unpack it" in runs.told(documents, path)
  write_packed(path, "dogs\n" * (1 << 17))
  assert documents(path) == 1 << 17


@pytest.mark.slow
def test_a_value_of_parquet_is_not_repeated_without_end(tmp_path, monkeypatch):
  """Catches a text that is in the file once, and in memory for each row."""
  path = tmp_path / "a.parquet"
  indices = pyarrow.array([0] * 2000, pyarrow.int32())
  for text in ("a " * (1 << 19), "a"):
    column = pyarrow.DictionaryArray.from_arrays(indices, [text])
    parquet.write_table(pyarrow.table({"text": column}), path)
    if text == "a":
      assert documents(path) == 2000
    else:
      assert path.stat().st_size < 1 << 17
      assert "if that is right, unpack it" in runs.told(documents, path)
  monkeypatch.setattr(records, "LONGEST_RECORD", 1 << 19)
  monkeypatch.setattr(readers, "_BLOCK", 1 << 10)
  parquet.write_table(pyarrow.table({"text": ["b", "a " * (1 << 19)]}), path)
  assert "row 2 is longer than 0 MiB" in runs.told(documents, path)


def test_a_disk_that_is_too_small_is_told_before_it_is_full(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(document_store, "_CHECKED", 1 << 10)
  texts = [Document("a" * 100)] * 50
  assert len(document_store.spool(texts, tmp_path).sizes) == 50
  monkeypatch.setattr(
    shutil, "disk_usage", lambda _: types.SimpleNamespace(free=2000)
  )
  told = runs.told(document_store.spool, texts, tmp_path)
  assert "2 kB left, too little for the rows of over 4.4 kB of text" in told


def test_a_local_dataset_names_no_files_outside_of_its_folder(
  tmp_path, offline, monkeypatch
):
  """Catches a README, a link or a state that names private files."""
  datasets = pytest.importorskip("datasets")
  cache = str(tmp_path / "cache")
  monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
  monkeypatch.chdir(tmp_path)
  secret = runs.write_lines(tmp_path / "secret/s.jsonl", [{"text": "private"}])
  for name, path in {
    "parent": "../secret/s.jsonl",
    "whole": str(secret),
    "many": "../**/*.jsonl",
  }.items():
    head = "---\nconfigs:\n- config_name: default\n  data_files:\n"
    head += f"  - split: train\n    path: '{path}'\n---\n"
    files.write_text(tmp_path / name / "README.md", head)
  (tmp_path / "link").mkdir()
  (tmp_path / "link/s.jsonl").symlink_to(secret)
  datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk("saved")
  shutil.copytree("saved", "moved")
  state = files.read_json("moved/state.json", "the state")
  state["_data_files"][0]["filename"] = "../saved/data-00000-of-00001.arrow"
  files.write_json("moved/state.json", state)
  files.write_json("splits/dataset_dict.json", {"splits": ["../saved"]})
  for name in ("parent", "whole", "many", "link", "moved", "splits"):
    told = runs.told(readers.splits_of, f"hf://{name}")
    assert f"hf://{name} names " in told and "outside of the folder" in told
  blob, snapshot = (
    tmp_path / "datasets--x" / name for name in ("blobs/1", "snapshots/0")
  )
  blob.parent.mkdir(parents=True)
  shutil.copy(secret, blob)
  snapshot.mkdir(parents=True)
  (snapshot / "s.jsonl").symlink_to("../../blobs/1")
  for name in (snapshot, "saved", "secret"):
    (source,) = readers.splits_of(f"hf://{name}")
    assert documents(source) == 1
