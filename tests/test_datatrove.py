"""datatrove's filters and deduplication before `prepare`."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from antlm_jax.data import document_store
from antlm_jax.data.prepared_folder import SPLITS, PreparedData
from tests import runs

pytest.importorskip("datatrove", reason="pip install .[datatrove]")

TASKS = 3
COMMON = ["the", "be", "to", "of", "and", "that", "have", "with"]


def document(seed: int) -> str:
  """Returns lines of made-up words that pass all filters."""
  draw = np.random.default_rng(seed)
  letters = draw.integers(97, 123, (40, 6)).astype(np.uint8)
  rare = [bytes(word).decode() for word in letters]
  lines = [[*draw.choice(rare, 9), *draw.choice(COMMON, 4)] for _ in range(8)]
  return "\n".join(" ".join(draw.permutation(line)) + "." for line in lines)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
  """Text in three files, and the documents that are good, once each."""
  folder = tmp_path_factory.mktemp("raw")
  good = [document(seed) for seed in range(300)]
  # A copy with another last word is a duplicate, too.
  copies = [*good[:40], *(f"{text[:-1]} others." for text in good[40:60])]
  bad = ["too short", "word " * 100, "# $ % & " * 50]
  every = np.random.default_rng(0).permutation([*good, *copies, *bad * 10])
  for task in range(TASKS):
    with gzip.open(folder / f"{task}.jsonl.gz", "wt") as file:
      for text in every[task::TASKS].tolist():
        file.write(json.dumps({"text": text}) + "\n")
  return folder, good


def start(text, place) -> subprocess.Popen:
  words = f"--text {text} --output={place}/out --work={place}/work"
  words += f" --tasks={TASKS} --vocab_size=400 --seq_len=32 --option=workers=2"
  return subprocess.Popen(
    [sys.executable, "launch/prepare_datatrove.py", *words.split()],
    cwd=runs.ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )


def finish(text, place) -> PreparedData:
  """Prepares to the end."""
  process = start(text, place)
  said, _ = process.communicate(timeout=300)
  assert process.returncode == 0, said
  made = PreparedData.open(place / "out")
  made.verify()
  return made


@pytest.fixture
def resumed(raw, tmp_path):
  """The data of a preparation that was killed once."""
  text, _ = raw
  killed = start(text, tmp_path / "again")
  logs = tmp_path / "again/work" / f"{TASKS}-tasks/logs"
  while not list(logs.glob("remove/completions/*")) and killed.poll() is None:
    time.sleep(0.01)
  os.killpg(killed.pid, signal.SIGKILL)
  killed.communicate()
  assert not (tmp_path / "again/out/manifest.json").exists()
  return finish(text, tmp_path / "again")


@pytest.mark.slow
def test_duplicates_and_bad_text_are_gone_also_after_a_kill(raw, resumed):
  _, good = raw
  assert len(resumed.manifest.splits["train"].shards) == TASKS
  kept = [
    document.text
    for s in SPLITS
    for document in document_store.read_kept_documents(resumed.folder, s)
  ]
  # Deduplication may keep a document or its near copy.
  assert len(kept) == len(good)
  assert {t.split(".")[0] for t in kept} == {t.split(".")[0] for t in good}


@pytest.mark.nightly
def test_a_killed_preparation_has_the_rows_of_a_whole_one(
  raw, resumed, tmp_path
):
  whole = finish(raw[0], tmp_path / "whole")
  assert resumed.manifest.splits == whole.manifest.splits
