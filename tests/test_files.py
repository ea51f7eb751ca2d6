"""Reading and writing of files, locks, tables and units."""

import contextlib
import csv
import os
import signal
import subprocess
import sys

import jax
import pytest

from antlm_jax import tables, units
from antlm_jax.errors import UserError
from antlm_jax.runtime import files
from tests import runs

# ------------------------------------------------------------------- reading


@pytest.mark.parametrize("read", ["read_json", "read_jsonl", "read_csv"])
def test_what_cannot_be_read_is_told_with_its_name(tmp_path, read):
  (tmp_path / "folder").mkdir()
  (tmp_path / "bytes").write_bytes(b'{}\n"\xff"')
  for name, why in (
    ("none", "No such file"),
    ("folder", "Is a directory"),
    ("bytes", "line 2: not UTF-8: .*iconv -f WINDOWS-1252 -t"),
  ):
    told = pytest.raises(UserError, match=f"cannot read the x .*{name}.*{why}")
    with told:
      list(getattr(files, read)(tmp_path / name, "the x"))


@pytest.mark.parametrize(
  ("text", "told"),
  [
    ("", "line 1: not JSON: Expecting value"),
    ('{\n "a": 1,\n b}', "line 3: not JSON: Expecting property name"),
    ("[1]", "line 1: not a JSON object"),
  ],
)
def test_what_is_no_json_is_told_with_its_line(tmp_path, text, told):
  path = tmp_path / "x.json"
  path.write_text(text)
  runs.refusal(told, files.read_json, path, "x")
  path.write_text('{"a": 1}\n\n' + text.replace("\n", "") + "\n")
  if text:
    runs.refusal(
      r"x.json, line 3: n", lambda: list(files.read_jsonl(path, "x"))
    )
  skipped = []
  found = list(files.read_jsonl(path, "x", skipped.append))
  assert found == [(1, {"a": 1})] and len(skipped) == bool(text)


def test_a_bug_is_not_a_bad_file(tmp_path, monkeypatch):
  def bug(*args, **kwargs):
    raise ValueError("a bug")

  monkeypatch.setattr(files.pathlib.Path, "read_bytes", bug)
  with pytest.raises(ValueError, match="a bug"):
    files.read_text(tmp_path, "x")
  with pytest.raises(ValueError, match="a bug"), files.writing(tmp_path):
    bug()
  lost = jax.errors.JaxRuntimeError("UNAVAILABLE: a peer has ended")
  with pytest.raises(jax.errors.JaxRuntimeError), files.writing(tmp_path):
    raise lost


def test_other_line_separators_are_part_of_a_line(tmp_path):
  path = tmp_path / "x.jsonl"
  path.write_text('{"a": "b\u2028c\x85d"}\r\n{"a": "\\ud83d\\ude00"}')
  found = [(1, {"a": "b\u2028c\x85d"}), (2, {"a": "\U0001f600"})]
  assert list(files.read_jsonl(path, "x")) == found
  path.write_text('a,b\r\n1,x\u2028y\r\n\r\n2,"3\n4"\r\n')
  rows = [(2, {"a": "1", "b": "x\u2028y"}), (5, {"a": "2", "b": "3\n4"})]
  assert list(files.read_csv(path, "x")) == rows


def test_byte_order_marks_are_dropped_by_all_readers(tmp_path):
  """Catches a mark that one reader of JSON accepts and another refuses."""
  path = tmp_path / "x"
  path.write_text('{"a": "b"}', "utf-8-sig")
  assert files.read_json(path, "x") == {"a": "b"}
  path.write_text('\ufeff{"a": "b"}\n\ufeff{"a": "c"}\n\ufeff', "utf-8")
  found = [(1, {"a": "b"}), (2, {"a": "c"})]
  for skipping in (None, print):
    assert list(files.read_jsonl(path, "x", skipping)) == found
  path.write_text("\ufeffa,b\n\ufeffc,d\n", "utf-8")
  assert list(files.read_csv(path, "x")) == [(2, {"a": "c", "b": "d"})]


@pytest.mark.parametrize(
  ("read", "text", "told"),
  [
    ("read_csv", "a,b\n1\n", "line 2 has fewer columns than line 1 names"),
    ("read_csv", "a,b\n1,2,3\n", "line 2 has more columns than line 1 names"),
    ("read_csv", "a,a\n1,2\n", "two columns have the name 'a'"),
    ("read_jsonl", '{"b": 1}\n{"a": 1, "a": 2}', "line 2: two columns have"),
    ("read_jsonl", '{"b": 1}\n{"a": "\\uDC00"}', "line 2: it has half of a"),
    ("read_json", '{"a": ["\\ud800"]}', "line 1: it has half of a surrogate"),
    ("read_jsonl", "[" * 100_000, "line 1: it is nested too deeply"),
  ],
)
def test_records_that_would_be_misread_are_told(tmp_path, read, text, told):
  """Catches evaluation files whose columns move, repeat or are cut."""
  path = tmp_path / "x"
  path.write_text(text)
  runs.refusal(
    f"cannot read the x {path}, {told}",
    lambda: list(getattr(files, read)(path, "the x")),
  )


def test_lines_cut_off_are_left_out_where_that_is_asked(tmp_path):
  path = tmp_path / "x.jsonl"
  path.write_bytes(b'{"a": 1}\n{"a"\n\xff\xfe\n3\n{"a": 2}\n{"a": 3')
  skipped = []
  found = list(files.read_jsonl(path, "x", skipped.append))
  assert found == [(1, {"a": 1}), (5, {"a": 2})]
  lines = [str(error).partition(": ")[0].split()[-1] for error in skipped]
  assert lines == ["2", "3", "4", "6"]


def test_a_damaged_csv_is_told(tmp_path):
  path = tmp_path / "x.csv"
  path.write_text("a,b\n" + "x" * 2000)
  before = csv.field_size_limit(1000)  # the process's
  try:
    runs.refusal(
      r"x.csv, line 2: field larger", lambda: list(files.read_csv(path, "x"))
    )
  finally:
    csv.field_size_limit(before)


# ------------------------------------------------------------------- writing


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
  path = tmp_path / "new" / "x.json"
  files.write_json(path, {"a": "ä"})
  assert files.read_json(path, "x") == {"a": "ä"}
  with pytest.raises(ValueError), files.replacing(path) as aside:
    aside.write_text("part")
    raise ValueError
  assert files.read_json(path, "x") == {"a": "ä"}
  assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
  for end in (KeyboardInterrupt, None):
    ended = contextlib.suppress(KeyboardInterrupt)
    with ended, files.replacing(tmp_path / "x") as aside:
      (aside / "of").mkdir(parents=True)
      (aside / "of" / "it").write_text("all")
      if end:
        raise end
    assert (tmp_path / "x").is_dir() == (end is None)
  assert [p.name for p in tmp_path.iterdir()] == ["x"]
  told = pytest.raises(UserError, match=r"write .*/x: Directory not empty")
  with told, files.replacing(tmp_path / "x") as aside:
    aside.mkdir()
  assert (tmp_path / "x" / "of" / "it").read_text() == "all"


def test_content_reaches_the_disk_before_the_rename(tmp_path, monkeypatch):
  calls = []
  monkeypatch.setattr(files.os, "fsync", lambda file: calls.append("fsync"))
  replace = files.pathlib.Path.replace

  def renamed(*where):
    calls.append("rename")
    replace(*where)

  monkeypatch.setattr(files.pathlib.Path, "replace", renamed)
  files.write_text(tmp_path / "x", "x")
  assert calls == ["fsync", "rename"]


@pytest.mark.parametrize(
  "error",
  [
    OSError(28, "No space left on device"),
    RuntimeError("Failed: No space left on device (os error 28)"),
    ValueError("Error writing: No space left on device [os_error_code='28']"),
  ],
)
def test_a_full_disk_is_told_with_the_path(error):
  told = pytest.raises(UserError, match="cannot write some/x: No space left")
  with told, files.writing("some/x"):
    raise error
  with pytest.raises(RuntimeError, match="other"), files.writing("x"):
    raise RuntimeError("other")


def test_writing_is_checked_before_the_work(tmp_path):
  (tmp_path / "file").touch()
  files.check_writable(tmp_path / "file")
  files.check_writable(tmp_path / "a" / "b")
  files.check_writable(tmp_path, folder=True)
  file = tmp_path / "file"
  bad = [
    (path, False) for path in (tmp_path, "/dev/null", file / "x", "/proc/x")
  ]
  for path, folder in (*bad, (file, True), (file / "x", True)):
    runs.refusal("cannot write", files.check_writable, path, folder)


# --------------------------------------------------------------------- locks

_HOLDER = """
import sys
from antlm_jax.runtime import files
with files.file_lock(sys.argv[1]):
  print("held", flush=True)
  sys.stdin.read()
"""


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path):
  path = tmp_path / "lock"
  path.write_text("what an earlier holder wrote")
  holder = subprocess.Popen(
    [sys.executable, "-c", _HOLDER, path],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  try:
    assert holder.stdout.readline() == b"held\n"
    told = f"{tmp_path} is in use by process {holder.pid} on .* since 20"
    with pytest.raises(UserError, match=told), files.file_lock(path):
      pass
    holder.send_signal(signal.SIGKILL)
    with files.file_lock(path, wait=True):
      assert path.read_text().startswith(f"process {os.getpid()} on ")
  finally:
    holder.kill()
    holder.communicate()


_WRITER = """
import sys
from antlm_jax.runtime import files
with files.replacing(sys.argv[1]) as aside:
  if sys.argv[2] == "folder":
    aside.mkdir()
    (aside / "half").write_text("half")
  else:
    aside.write_text("half")
  print("writing", flush=True)
  sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_process_left_is_removed(tmp_path, kind):
  """Catches hidden temporary files that stay for ever, and the removal of
  those of a process that still writes, or of another host."""
  target, hosts = tmp_path / "out.v1", tmp_path / ".out.v1.another-host.1.tmp"
  hosts.write_text("")
  words = [sys.executable, "-c", _WRITER, target, kind]
  pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
  writers = [subprocess.Popen(words, **pipes) for _ in range(2)]
  try:
    for writer in writers:
      assert writer.stdout.readline() == b"writing\n"
    writers[0].kill()
    writers[0].communicate()
    assert len(list(tmp_path.iterdir())) == 3
    files.write_text(target, "whole")
    left = {p.name.split(".")[-2] for p in tmp_path.glob(".*.tmp")}
    assert left == {"1", str(writers[1].pid)}
    assert target.read_text() == "whole"
  finally:
    for writer in writers:
      writer.kill()
      writer.communicate()


def test_a_lock_on_a_full_disk_names_its_file(small_disk):
  """Catches an error without a path, as a sweep on a full disk printed."""
  disk = small_disk(4)
  lock = disk / "lock"
  lock.touch()
  (disk / "all").write_bytes(bytes(4096))
  told = f"cannot write {lock}: No space left"
  with pytest.raises(UserError, match=told), files.file_lock(lock):
    pass


# ------------------------------------------------------------ tables and units


def test_a_table_is_as_wide_as_what_it_holds():
  rows = [("a", 1, None), ("long", 1000)]
  shown = tables.text_table(rows, ("", "n", "x"), "<>").split("\n")
  assert shown == ["         n  x", "a        1  -", "long  1000"]
  assert tables.text_table([]) == ""
  assert tables.table_line(("a", 1), (3, 4), "<>") == "a       1"


def test_a_table_in_markdown():
  shown = tables.markdown([("a|b", 1), ("c\nd", None)], ("", "n")).split("\n")
  rule = ["|  | n |", "| --- | ---: |"]
  assert shown == [*rule, "| a\\|b | 1 |", "| c d | - |"]


def test_quantities_durations_and_milliseconds():
  numbers = 0, 12.34, 950, 999.7, 12_345, 999_999, 4.56e6, 1.5e12
  shown = "0 12.3 950 1k 12.3k 1M 4.56M 1.5T"
  assert " ".join(map(units.quantity, numbers)) == shown
  assert units.quantity(4.56e6, "B") == "4.56 MB"
  assert units.quantity(12, "B") == "12 B"
  assert units.gib(3 * 2**29) == "1.50 GiB"
  assert units.milliseconds(1.2345) == "1,234.5 ms"
  durations = " ".join(map(units.duration, (9.99, 245, 12_000)))
  assert durations == "10.0s 4m05s 3h20m"
