"""Runs, data and checkpoints in an emulated bucket on loopback."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from array_record.python import array_record_module

from antlm_jax.commands import export, import_, prepare
from antlm_jax.data import toy_english
from antlm_jax.data.prepared_folder import PreparedData
from antlm_jax.errors import UserError
from antlm_jax.evals import score
from antlm_jax.inference.model import load
from antlm_jax.runtime import buckets, files
from antlm_jax.training import checkpoint, metrics
from tests import pods, runs
from tests.gcs_emulator import Emulator

pytest.importorskip("gcsfs", reason="gs:// paths need gcsfs: pip install gcsfs")

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
def whole(prepared, tmp_path_factory):
  """The run on the local disk."""
  workdir = tmp_path_factory.mktemp("whole")
  runs.train(workdir, prepared, *ARGS)
  return workdir


def ended(workdir, data, moment) -> tuple[int, str, str]:
  """Starts a run and stops it by SIGTERM once `moment()` is true."""
  args = runs.train_args(workdir, data, *ARGS)
  process = subprocess.Popen(
    runs.command("antlm_jax", "train", *args),
    cwd=runs.ROOT,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  while process.poll() is None and not moment():
    time.sleep(0.01)
  process.send_signal(signal.SIGTERM)
  out, err = process.communicate(timeout=120)
  return process.returncode, out, err


@pytest.fixture(scope="module")
def finished(gcs, data, tmp_path_factory):
  """The same run in the bucket, stopped once and resumed."""
  scratch = tmp_path_factory.mktemp("scratch")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TMPDIR", str(scratch))
    second = "run/checkpoints/8/commit_success.txt"
    url = "gs://bucket/run"
    status, out, err = ended(url, data, lambda: second in gcs.names("bucket"))
    assert status == 75, err
    assert "saved: run the same command to resume" in out
    assert "Traceback" not in err
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


def test_a_missing_bucket_is_told_in_one_line(gcs, prepared):
  args = runs.train_args("gs://nowhere/run", prepared)
  line = runs.error_of(runs.run("antlm_jax", "train", *args))
  assert "gs://nowhere/run" in line and "no such bucket" in line


@pytest.mark.parametrize(
  "method, name",
  [("POST", "x/"), ("GET", "x/"), ("DELETE", "x/"), ("GET", "/bucket")],
)
def test_a_missing_right_is_told_before_anything(allowed, method, name):
  before = allowed.names("bucket")
  allowed.forbid = lambda asked, of: asked == method and of.startswith(name)
  with pytest.raises(UserError, match=f"bucket/x cannot .*to {method} {name}"):
    buckets.Mirror("gs://bucket/x")
  left = set(allowed.names("bucket")) - set(before)
  assert all("/.writable-" in name for name in left)


@pytest.mark.parametrize("url", ["gs://bucket/nothing", "gs://nowhere/data"])
def test_data_that_is_not_there_is_told(gcs, url):
  with pytest.raises(UserError, match=f"{url} is not a prepared folder"):
    PreparedData.open(url)


@pytest.fixture(
  scope="module",
  params=[pytest.param("stream", marks=pytest.mark.slow), "chunks"],
)
def shards(request, tmp_path_factory):
  """A prepared folder of 4 shards whose rows cross ArrayRecord's blocks."""
  folder = tmp_path_factory.mktemp("shards")
  toy_english.write_toy_english(folder / "text")
  args = {"vocab_size": 300, "seq_len": 24, "tasks": 4}
  how = args | {"packing": request.param}
  return prepare.prepare(folder / "text", folder / "out", **how)


def put(gcs, folder, name) -> str:
  for path in folder.iterdir():
    if path.is_file():
      gcs.put("bucket", f"{name}/{path.name}", path.read_bytes(), {})
  return f"gs://bucket/{name}"


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


def test_a_shard_of_a_bucket_that_is_damaged_is_told(allowed, shards):
  url = put(allowed, shards.folder, "damaged")
  remote = PreparedData.open(url).train
  name = "damaged/train-00002-of-00004.array_record"
  data = allowed.buckets["bucket"][name][0]
  rows = [len(remote) * 5 // 8]
  allowed.put("bucket", name, data[:1000], {})
  with pytest.raises(UserError, match=f"{name} ends before byte|cannot read"):
    remote.read(rows)
  allowed.put("bucket", name, bytes(len(data)), {})
  with pytest.raises(UserError, match=f"{name} has a bad row .*; delete"):
    remote.read(rows)
  allowed.forbid = lambda method, name: name.startswith("damaged/train")
  with pytest.raises(UserError, match="cannot read gs://bucket/damaged/train"):
    remote.read(rows)


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
    with pytest.raises(UserError, match=told):
      remote.read([row + 1, row, 3])
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
  with pytest.raises(UserError, match=f"{name} has a bad row 0: its hash"):
    PreparedData.open(url).train.read([5])


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
  with pytest.raises(UserError, match="pip install gcsfs"):
    files.absolute_path("gs://bucket/run")


def test_another_kind_of_bucket_is_refused():
  """Catches a run that is lost in a folder s3:/bucket of its machine."""
  with pytest.raises(UserError, match="s3://bucket/run: s3:// is not support"):
    files.absolute_path("s3://bucket/run")


@pytest.mark.parametrize(
  "main", [prepare.main, toy_english.main, export.main, import_.main]
)
def test_what_cannot_be_written_to_a_bucket_says_so(main):
  option = "--workdir" if main is import_.main else "--output"
  with pytest.raises(UserError, match=f"{option}: gs://b/x is not on this"):
    main([f"{option}=gs://b/x"])
