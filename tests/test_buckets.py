"""Runs, data and checkpoints in an emulated bucket on loopback."""

import concurrent.futures
import errno
import json
import math
import os
import pathlib
import re
import shutil
import socket
import subprocess
import threading
import time
import types

import numpy as np
import pytest
from array_record.python import array_record_module

from antlm_jax import errors
from antlm_jax.commands import export, import_, prepare
from antlm_jax.data import rows as rows_lib
from antlm_jax.data import toy_english
from antlm_jax.data.order import Order, Stage
from antlm_jax.data.prepared_folder import PreparedData
from antlm_jax.errors import Unavailable, UserError
from antlm_jax.evals import score
from antlm_jax.inference import pairs
from antlm_jax.inference.model import load
from antlm_jax.objectives.batch import BatchLayout
from antlm_jax.runtime import buckets, files, signals
from antlm_jax.training import checkpoint, metrics
from tests import pods, runs
from tests.gcs_emulator import Emulator

pytest.importorskip("gcsfs", reason="gs:// paths need gcsfs: pip install gcsfs")
import aiohttp
import google.api_core.exceptions
import google.auth.exceptions
import requests
from gcsfs.retry import HttpError

from tests import pauses

ARGS = ("curriculum=10C+10M steps", "checkpoint.every=4")


@pytest.fixture(scope="module")
def gcs(tmp_path_factory):
  """An emulator with a bucket, for this process and its children."""
  with pytest.MonkeyPatch.context() as patch:
    emulator = Emulator("bucket")
    for name, value in emulator.environment.items():
      patch.setenv(name, value)
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    yield emulator
    emulator.close()


@pytest.fixture
def allowed(gcs):
  """The emulator; after the test, all requests are allowed again."""
  yield gcs
  gcs.forbid = lambda method, name: False


@pytest.fixture(scope="module")
def data(gcs, prepared):
  """The prepared data, copied to the bucket."""
  for path in prepared.rglob("*"):
    if path.is_file():
      name = f"data/{path.relative_to(prepared).as_posix()}"
      gcs.put("bucket", name, path.read_bytes(), {})
  return "gs://bucket/data"


@pytest.fixture(scope="module")
def whole(prepared, shared):
  """The run on the local disk."""
  return shared("on_disk", lambda out: runs.train(out, prepared, *ARGS))


@pytest.fixture(scope="module")
def finished(gcs, data, tmp_path_factory):
  """The same run in the bucket, stopped once and resumed."""
  scratch = tmp_path_factory.mktemp("scratch")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TMPDIR", str(scratch))
    second = "run/checkpoints/8/commit_success.txt"
    url = "gs://bucket/run"
    status, out = runs.ended(
      url, data, *ARGS, moment=lambda: second in gcs.names("bucket")
    )
    assert status == 75, out
    assert "saved: run the same command to resume" in out
    assert "Traceback" not in out
    saved = max(checkpoint.checkpoint_steps(url))
    assert 8 <= saved < 20
    gcs.put("bucket", f"run/checkpoints/{saved}/meta/metadata", b"{", {})
    before = max(
      step for step in checkpoint.checkpoint_steps(url) if step < saved
    )
    # A kill in the middle of the next save leaves such a file.
    due = 4 * (saved // 4 + 1)
    gcs.put("bucket", f"run/checkpoints/{due}/meta/metadata", b"{", {})
    done = runs.train(url, data, *ARGS, devices=1)
    assert f"kept as {saved}.unreadable" in done.stdout
    assert f"resuming from step {before}" in done.stdout
  assert not list(scratch.glob("antlm_jax_*"))
  return url


@pytest.mark.slow
def test_a_run_in_a_bucket_is_the_run_on_disk_bit_for_bit(whole, finished):
  assert runs.same_params(finished, whole)
  assert max(checkpoint.checkpoint_steps(finished)) == 20


@pytest.mark.slow
def test_the_bucket_holds_all_that_a_run_promises(gcs, whole, finished):
  names = {name.removeprefix("run/") for name in gcs.names("bucket")}
  assert {"config.json", "metrics.jsonl", "summary.json", "curves.png"} <= names
  assert any(name.startswith("tensorboard/") for name in names)
  assert not any(name.startswith(".writable") for name in names)
  records = metrics.read_records(finished)
  steps = [r["step"] for r in records if "train/learning_rate" in r]
  assert steps == list(range(1, 21))
  summary = json.loads(
    (files.absolute_path(finished) / "summary.json").read_text()
  )
  here = json.loads((whole / "summary.json").read_text())
  assert summary["held_out"] == here["held_out"]


@pytest.mark.slow
def test_a_finished_run_in_a_bucket_keeps_its_times(data, finished):
  """Catches a summary that its command replaces with times of no steps."""
  path = files.absolute_path(finished) / "summary.json"
  before = json.loads(path.read_text())["seconds"]
  done = runs.train(finished, data, *ARGS, devices=1)
  assert "already finished" in done.stdout
  assert json.loads(path.read_text())["seconds"] == before


@pytest.mark.slow
def test_commands_read_a_run_in_a_bucket(
  english, finished, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  runs.main(
    "antlm_jax.commands.generate", f"--checkpoint={finished}", "--prompt=the"
  )
  assert capsys.readouterr().out.startswith("the")
  step = f"--checkpoint={finished}/checkpoints/20"
  pairs = f"--data={english / 'pairs'}"
  score.main(["--task=blimp", step, pairs, "--mode=mlm", "--limit=2"])
  assert "written to runs/run/evals/pairs/20-mlm" in capsys.readouterr().out
  export.main([f"--checkpoint={finished}", "--output=out", "--as=causal"])
  card = (tmp_path / "out" / "README.md").read_text()
  assert ": loss (mlm, nats)" in card and "pairs: accuracy (mlm, " in card


@pytest.mark.slow
def test_a_checkpoint_out_of_reach_is_not_unreadable(allowed, finished):
  allowed.forbid = lambda method, name: "/params/" in name
  with pytest.raises(UserError, match="cannot read the checkpoint") as told:
    load(finished)
  assert not isinstance(told.value, checkpoint.Unreadable)


@pytest.mark.slow
def test_two_processes_train_in_a_bucket_as_on_disk(gcs, data, tmp_path):
  sizes = ("curriculum=3C+3M steps", "checkpoint.every=3", "mesh.data=2")
  options, found = {"count": 2, "cache": tmp_path / "cache"}, {}
  for url in ("gs://bucket/two", str(tmp_path / "two")):
    args = runs.train_args(url, data, *pods.SMALL, *sizes)
    command = runs.command("antlm_jax", "train", *args)
    status, out = pods.Training(command, tmp_path / "pids", **options).end()
    assert status == 0, out
    found[url] = pods.losses(url)
  first, second = found
  assert found[first] == found[second] and len(found[first]) == 6
  assert runs.same_params(first, second)


def test_a_path_without_a_bucket_is_told_in_one_line():
  """Catches an IndexError."""
  assert "gs:///x: it names no bucket" in runs.told(load, "gs:///x")


def test_a_missing_bucket_is_told_in_one_line(gcs, prepared):
  line = runs.refused_training("gs://nowhere/run", prepared)
  assert "gs://nowhere/run" in line and "no such bucket" in line


@pytest.mark.parametrize(
  "method, name",
  [("POST", "x/"), ("GET", "x/"), ("DELETE", "x/"), ("GET", "/bucket")],
)
def test_a_missing_right_is_told_before_anything(allowed, method, name):
  before = allowed.names("bucket")
  allowed.forbid = lambda asked, of: asked == method and of.startswith(name)
  runs.refusal(
    f"bucket/x cannot .*to {method} {name}", buckets.Mirror, "gs://bucket/x"
  )
  left = set(allowed.names("bucket")) - set(before)
  assert all("/.writable-" in name for name in left)


def test_pairs_of_a_bucket_are_read(gcs):
  """Catches a path that loses a slash: gs:/bucket/pairs."""
  line = b'{"sentence_good": "a b", "sentence_bad": "b a"}'
  gcs.put("bucket", "pairs/x.jsonl", line, {})
  (item,) = pairs.read_minimal_pairs("gs://bucket/pairs")
  assert [choice.text for choice in item.choices] == ["a b", "b a"]


@pytest.mark.parametrize("url", ["gs://bucket/nothing", "gs://nowhere/data"])
def test_data_that_is_not_there_is_told(gcs, url):
  runs.refusal(f"{url} is not a prepared folder", PreparedData.open, url)


@pytest.fixture(
  scope="module",
  params=[pytest.param("stream", marks=pytest.mark.slow), "chunks"],
)
def shards(request, tmp_path_factory):
  """A prepared folder of 4 shards whose rows cross ArrayRecord's blocks."""
  folder = tmp_path_factory.mktemp("shards")
  toy_english.write_toy_english(folder / "text", sentences=80_000)
  settings = {"vocab_size": 300, "seq_len": 24, "packing": request.param}
  for task in range(4):  # one after the other, without a process for each
    prepared = prepare.prepare(
      *(folder / "text", folder / "out"), tasks=4, task=task, **settings
    )
  return prepared


def put(gcs, folder, name) -> str:
  for path in folder.iterdir():
    if path.is_file():
      gcs.put("bucket", f"{name}/{path.name}", path.read_bytes(), {})
  return f"gs://bucket/{name}"


@pytest.mark.sample(0, 1)
def test_rows_of_a_bucket_are_read_by_ranges_and_once(gcs, shards):
  remote = PreparedData.open(put(gcs, shards.folder, "shards")).train
  generator = np.random.default_rng(0)
  for count in (1, 64, 64):
    rows = generator.choice(len(remote), count, replace=False)
    gcs.sent = 0
    found = remote.read(rows)
    np.testing.assert_equal(found, shards.train.read(rows))
    width = 24 * 2 + 3 * shards.train.segmented
    assert gcs.sent <= count * (width + 80)  # ArrayRecord's own bytes
    assert gcs.sent < 0.1 * sum(
      s.bytes for s in shards.manifest.splits["train"].shards
    )
    gcs.sent = 0
    np.testing.assert_equal(remote.read(rows), found)
    assert gcs.sent == 0
  every = np.arange(len(remote))  # neighbours share requests
  before = len(gcs.log)
  np.testing.assert_equal(remote.read(every), shards.train.read(every))
  assert len(gcs.log) - before < 200


@pytest.mark.sample(0, 1)
def test_a_block_of_rows_is_one_request_and_read_once(gcs, shards):
  """Catches a request a row, or a block that each thread reads again."""
  plain = PreparedData.open(put(gcs, shards.folder, "blocks")).train
  ends = np.cumsum([x.rows for x in shards.manifest.splits["train"].shards])
  size = 6400  # a multiple of the block; the first shard ends between
  first = (ends[0] - size // 2) // 64 * 64
  assert first + size < ends[1]

  def requests(block: int, steps: int) -> int:
    layout, options = BatchLayout(32), {"seed": 5, "row_block": block}
    order = Order({"": size}, (Stage(0.0, layout),), **options)
    remote = plain.by_blocks(block, order.blocks_at_once)

    def read(step: int) -> None:
      rows = first + order.slots(step).rows[:, 0]
      np.testing.assert_equal(remote.read(rows), shards.train.read(rows))

    before = len(gcs.log)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      list(pool.map(read, range(steps)))
    return len(gcs.log) - before

  # Neighbours that a step reads by chance share a request.
  assert requests(1, steps=10) > 0.9 * 320
  # Memory keeps blocks that are divided among lanes. A block is in two shards.
  assert requests(64, steps=size // 32) <= size // 64 + 1


@pytest.mark.slow
def test_blocks_of_a_bucket_take_bounded_memory(gcs, shards, monkeypatch):
  plain = PreparedData.open(put(gcs, shards.folder, "memory")).train
  width = 24 * 2 + 3 * plain.segmented
  monkeypatch.setattr(rows_lib, "_CACHE_BYTES", 8 * 10 * width)
  remote = plain.by_blocks(10, 4)
  for first in (*range(0, 200, 10), 190, 130):
    rows = np.arange(first, first + 10)
    np.testing.assert_equal(remote.read(rows), shards.train.read(rows))
    assert sum(map(len, remote._cache.values())) <= 8 * 10 * width
  before = len(gcs.log)
  remote.read([191, 135])  # the blocks that were used last
  assert len(gcs.log) == before
  runs.refusal(r"shuffle_block=10 keeps.*at most 8$", plain.by_blocks, 10, 5)


@pytest.fixture
def quick_tries(monkeypatch):
  """Makes gcsfs and antlm try again without pauses."""
  pauses.shorten(monkeypatch.setattr, tries=60.0)


class Failing:
  """Refuses the first `times` requests for rows with a status."""

  def __init__(self, status: int, times: float = math.inf):
    self.status, self.left = status, times

  def __call__(self, method: str, name: str) -> int:
    if ".array_record" not in name or self.left <= 0:
      return 0
    self.left -= 1
    return self.status


# The next test has the other statuses.
@pytest.mark.parametrize("status", [408, 502, 503])
def test_rows_are_read_once_a_bucket_answers_again(
  allowed, shards, quick_tries, status, capsys
):
  remote = PreparedData.open(put(allowed, shards.folder, "passing")).train
  allowed.forbid = Failing(status, times=20)  # gcsfs itself tries six times
  found = remote.read([3])
  np.testing.assert_equal(found, shards.train.read([3]))
  told = capsys.readouterr().err
  assert re.search(r"trying again for \d+ s.*answers after \d+ s", told, re.S)


@pytest.mark.parametrize("status", [429, 500, 504])
def test_a_bucket_that_fails_for_long_ends_with_a_status_to_run_again(
  allowed, shards, quick_tries, monkeypatch, status
):
  url = put(allowed, shards.folder, "failing")
  remote = PreparedData.open(url).train
  monkeypatch.setattr(buckets, "TRIES", 0.3)
  allowed.forbid = Failing(status)
  with pytest.raises(Unavailable) as told:
    remote.read([3])
  found, line = errors.explain(told.value)
  assert found == 75 and line.endswith(": run the same command again")
  assert f"cannot read {url}/train-0" in line and "\n" not in line
  # The threads that build batches do not wait again.
  allowed.forbid = refuses = Failing(status, times=100)
  with pytest.raises(Unavailable):
    remote.read([4])
  assert refuses.left == 94
  with pytest.raises(Unavailable, match="cannot read the manifest"):
    allowed.forbid = lambda method, name: status
    PreparedData.open(url)
  with pytest.raises(Unavailable, match="cannot reach gs://bucket/run"):
    checkpoint.checkpoint_steps("gs://bucket/run")


@pytest.mark.parametrize("status, words", [(403, "Forbidden"), (404, "")])
def test_a_missing_right_or_file_is_not_tried_again(
  allowed, shards, quick_tries, status, words
):
  url = put(allowed, shards.folder, "missing")
  remote = PreparedData.open(url).train
  allowed.forbid = refuses = Failing(status, times=100)
  with pytest.raises(UserError, match=f"cannot read {url}/train.*{words}") as e:
    remote.read([3])
  assert refuses.left == 99
  assert errors.explain(e.value)[0] == 2


def passing_errors():
  """Yields errors that gcsfs, tensorstore, orbax and their libraries raise."""
  for code in (408, 429, 500, 503, 504):
    yield HttpError({"code": code, "message": "no"})
  yield requests.exceptions.ProxyError()  # gcsfs raises it for 502
  yield aiohttp.ServerDisconnectedError()
  request = types.SimpleNamespace(real_url="gs://b/o")
  yield aiohttp.ClientResponseError(request, (), status=503)
  yield google.api_core.exceptions.ServiceUnavailable("no")
  yield ConnectionResetError(errno.ECONNRESET, "reset")
  yield TimeoutError()
  yield OSError(errno.ENETUNREACH, "unreachable")
  yield socket.gaierror(socket.EAI_AGAIN, "no name")
  yield ValueError("ABORTED: Error reading gs://b/o: All 32 retry attempts")
  yield ValueError("DEADLINE_EXCEEDED: Error writing gs://b/o")
  wrapped = google.auth.exceptions.RefreshError("no token")
  wrapped.__cause__ = google.auth.exceptions.TransportError("no metadata")
  yield wrapped


@pytest.mark.parametrize("error", [*passing_errors()], ids=repr)
def test_a_checkpoint_that_fails_for_now_is_neither_unreadable_nor_refused(
  gcs, error
):
  """Catches a good checkpoint that is put aside because a bucket was down."""
  with pytest.raises(Unavailable), checkpoint.readable(pathlib.Path("1/meta")):
    raise error
  with pytest.raises(Unavailable), files.writing("gs://bucket/x"):
    raise error


@pytest.mark.parametrize(
  "error",
  [
    HttpError({"code": 401, "message": "no"}),
    OSError("Forbidden: b/bucket/o"),
    FileNotFoundError("b/bucket/o"),
    google.api_core.exceptions.NotFound("no"),
    google.auth.exceptions.DefaultCredentialsError("no"),
    ValueError("PERMISSION_DENIED: Error writing gs://b/o"),
  ],
  ids=repr,
)
def test_an_error_that_does_not_pass_is_refused(gcs, error):
  with pytest.raises(UserError) as told, files.writing("gs://bucket/x"):
    raise error
  assert errors.explain(told.value)[0] == 2


def test_a_signal_ends_the_tries(allowed, shards, quick_tries, monkeypatch):
  remote = PreparedData.open(put(allowed, shards.folder, "signal")).train
  monkeypatch.setattr(buckets, "TRIES", 100.0)
  allowed.forbid = Failing(503)
  with pytest.raises(Unavailable), signals.listening() as stop:
    stop.status = 75
    remote.read([3])


@pytest.mark.slow
@pytest.mark.parametrize(
  "tries", [pytest.param(60, marks=pytest.mark.nightly), 0]
)
def test_a_bucket_that_fails_in_a_run_changes_no_bit(
  allowed, data, tmp_path, tries
):
  """It waits for its rows, or ends with 75 and `rerun.sh` resumes it."""
  sizes = ("data.shuffle_block=2", "train.batch_size=16")
  runs.train(tmp_path / "here", data, *ARGS, *sizes)
  url = f"gs://bucket/failing-{tries}"
  args = runs.train_args(url, data, *ARGS, *sizes)
  command = runs.command("antlm_jax", "train", *args)
  saved = f"failing-{tries}/checkpoints/4/commit_success.txt"
  failing, ended = threading.Event(), threading.Event()

  def forbid(method: str, name: str) -> int:
    if name == saved:
      failing.set()
    affected = not tries or ".array_record" in name
    return 503 * (affected and failing.is_set() and not ended.is_set())

  allowed.forbid = forbid
  with subprocess.Popen(
    ["launch/rerun.sh", "--pause=1", *command, "--plugin=tests/pauses.py"],
    cwd=runs.ROOT,
    env=os.environ | {pauses.TRIES: str(tries)},
    text=True,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
  ) as process:
    lines = []
    for line in process.stderr:
      lines.append(line)
      if "again" in line:
        ended.set()
  text = "".join(lines)
  assert process.returncode == 0, text
  assert ("exit status 75" in text) == (not tries), text
  assert ("trying again for 60 s" in text) == bool(tries), text
  assert runs.same_params(url, tmp_path / "here")


def test_a_shard_of_a_bucket_that_is_damaged_is_told(allowed, shards):
  url = put(allowed, shards.folder, "damaged")
  remote = PreparedData.open(url).train
  name = "damaged/train-00002-of-00004.array_record"
  data = allowed.buckets["bucket"][name][0]
  rows = [len(remote) * 5 // 8]
  allowed.put("bucket", name, data[:1000], {})
  runs.refusal(f"{name} ends before byte|cannot read", remote.read, rows)
  allowed.put("bucket", name, bytes(len(data)), {})
  runs.refusal(f"{name} has a bad row .*; delete", remote.read, rows)
  allowed.forbid = lambda method, name: name.startswith("damaged/train")
  runs.refusal("cannot read gs://bucket/damaged/train", remote.read, rows)


def test_a_flipped_bit_of_a_row_in_a_bucket_is_refused(gcs, shards):
  """Catches a row that changed in the bucket and is trained on in silence."""
  name = "flipped/train-00000-of-00004.array_record"
  url = put(gcs, shards.folder, "flipped")
  whole = gcs.buckets["bucket"][name][0]
  row, rows = 41, shards.train
  record = rows.read([row])[0].astype("<u2").tobytes()
  begin = whole.index(record)
  end = begin + len(record) + 3 * rows.segmented
  told = f"{name} has a bad row {row}: its hash is wrong.*; delete gs://"
  # The row, the bytes before it (its size, no compression), and the header's
  # hash, kind and number of records.
  for at in (*range(begin - 3, end), begin - 20, begin - 19, begin - 10):
    changed = bytearray(whole)
    changed[at] ^= 4
    gcs.put("bucket", name, bytes(changed), {})
    remote = PreparedData.open(url).train
    runs.refusal(told, remote.read, [row + 1, row, 3])
    np.testing.assert_equal(remote.read([3]), rows.read([3]))


@pytest.mark.parametrize("options", ["group_size:1,zstd", "group_size:2"])
def test_rows_written_otherwise_are_refused_in_a_bucket(gcs, shards, options):
  """Catches reading bytes that are compressed, or of other rows, as a row."""
  url = put(gcs, shards.folder, "otherwise")
  path = shards.folder.parent / "otherwise"
  tokens, _ = shards.train.read(range(60))
  writer = array_record_module.ArrayRecordWriter(str(path), options)
  for row in tokens:
    writer.write(row.astype("<u2").tobytes() + b"123" * shards.train.segmented)
  writer.close()
  name = "otherwise/train-00000-of-00004.array_record"
  gcs.put("bucket", name, path.read_bytes(), {})
  runs.refusal(
    f"{name} has a bad row 0: its hash",
    lambda: PreparedData.open(url).train.read([5]),
  )


def test_a_folder_on_this_machine_is_its_own_mirror(tmp_path):
  with buckets.Mirror(tmp_path, "metrics.jsonl") as mirror:
    assert mirror.folder == mirror.workdir == tmp_path
    mirror.push(wait=1)
  assert not list(tmp_path.iterdir())


def test_a_mirror_goes_on_and_copies_what_has_changed(gcs):
  gcs.put("bucket", "mirror/log", b"one\n", {})
  with buckets.Mirror("gs://bucket/mirror", "log", "none") as mirror:
    assert sorted(os.listdir(mirror.folder)) == ["log"]
    with (mirror.folder / "log").open("a") as file:
      file.write("two\n")
    (mirror.folder / "deep").mkdir()
    (mirror.folder / "deep" / "file").write_text("x")
    (mirror.folder / "file.tmp").write_text("half")
    mirror.push(wait=10)
    before = len(gcs.log)
    mirror.push(wait=10)
    assert len(gcs.log) == before
  assert not mirror.folder.exists()
  names = [n for n in gcs.names("bucket") if n.startswith("mirror/")]
  assert names == ["mirror/deep/file", "mirror/log"]
  assert gcs.buckets["bucket"]["mirror/log"][0] == b"one\ntwo\n"


def test_a_mirror_that_fails_says_so_once_and_keeps_its_files(allowed, capsys):
  with buckets.Mirror("gs://bucket/failing") as mirror:
    allowed.forbid = lambda method, name: method == "POST"
    (mirror.folder / "log").write_text("one\n")
    mirror.push(wait=10)
    mirror.push(wait=10)
  told = capsys.readouterr().out
  assert told.count("warning: metrics cannot be copied") == 1
  assert "no right to POST" in told
  assert f"are in {mirror.folder}" in told
  assert (mirror.folder / "log").read_text() == "one\n"
  shutil.rmtree(mirror.folder)


def test_a_bug_in_copying_is_not_an_unreachable_bucket(gcs, monkeypatch):
  def bug(path):
    raise ValueError("a bug")

  with (
    pytest.raises(ValueError, match="a bug"),
    buckets.Mirror("gs://bucket/bug") as mirror,
  ):
    (mirror.folder / "log").write_text("one\n")
    monkeypatch.setattr(type(mirror.folder), "read_bytes", bug)
    mirror.push(wait=10)
    mirror.push(wait=10)
  assert (mirror.folder / "log").exists()
  shutil.rmtree(mirror.folder)


def test_training_does_not_wait_for_a_bucket_that_hangs(allowed):
  release = threading.Event()
  with buckets.Mirror("gs://bucket/slow") as mirror:
    allowed.forbid = lambda method, name: (
      method == "POST" and (release.wait(10) and False)
    )
    (mirror.folder / "log").write_text("one\n")
    began = time.monotonic()
    mirror.push()
    mirror.push(wait=0.1)
    assert time.monotonic() - began < 5
    release.set()
  assert "slow/log" in allowed.names("bucket")


def test_without_gcsfs_the_package_is_named(monkeypatch):
  monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
  runs.refusal("pip install gcsfs", files.absolute_path, "gs://bucket/run")


def test_another_kind_of_bucket_is_refused():
  """Catches a run that is lost in a folder s3:/bucket of its machine."""
  runs.refusal(
    "s3://bucket/run: s3:// is not support",
    files.absolute_path,
    "s3://bucket/run",
  )


@pytest.mark.parametrize(
  "main", [prepare.main, toy_english.main, export.main, import_.main]
)
def test_what_cannot_be_written_to_a_bucket_says_so(main):
  option = "--workdir" if main is import_.main else "--output"
  runs.refusal(
    f"{option}: gs://b/x is not on this", main, [f"{option}=gs://b/x"]
  )
