"""The commands that score minimal pairs, on a random model."""

import collections
import errno
import functools
import json
import os
import pathlib

import numpy as np
import pytest

from antlm_jax.data import toy_english
from antlm_jax.evals import results, score
from antlm_jax.evals.zero_shot import ewok, pipelines
from antlm_jax.evals.zero_shot.choices import Results
from antlm_jax.evals.zero_shot.task import TASKS, evaluate
from antlm_jax.inference import scoring
from antlm_jax.inference.framing import TextModel
from antlm_jax.inference.pairs import (
  Choice,
  Item,
  choice_scores,
  pair_accuracy,
  read_minimal_pairs,
)
from antlm_jax.runtime import progress
from tests import random_models, real, runs

run = random_models.run(max_seq_len=128)


GOOD = '{"sentence_good": "Tom sat .", "sentence_bad": "Tom hills ."}'


def write_pairs(folder, *names):
  for name in names:
    groups = toy_english.make_minimal_pairs(name, 3).values()
    runs.write_lines(folder / name, [one for pairs in groups for one in pairs])
  return folder


def items_of(output):
  lines = (output / "items.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def test_blimp_command(run, loaded, tmp_path):
  data = write_pairs(tmp_path / "pairs", "a.jsonl", "b.jsonl")
  where = f"--checkpoint={run}", f"--data={data}"
  how = "--mode=causal", "--limit=20", "--temperature=2"
  done = runs.run("antlm_jax", "eval", "blimp", *where, *how)
  assert done.returncode == 0, done.stderr
  output = run / "evals" / "pairs" / f"{random_models.STEP}-causal"
  assert {p.name for p in output.iterdir()} == {"items.jsonl", "summary.json"}
  items, summary = items_of(output), runs.summary(output)
  assert len(items) == 40
  for item in items[:3]:
    good, bad = scoring.score(loaded, item["choices"], temperature=2)
    assert item["scores"] == pytest.approx([good, bad], abs=1e-3)
    assert item["correct"] == (good > bad)
  by_uid = {}
  for item in items:
    by_uid.setdefault(item["uid"], []).append(item["correct"])
  macro = np.mean([np.mean(c) for c in by_uid.values()])
  assert summary["macro_accuracy"] == pytest.approx(macro)
  assert 0 < summary["seconds"] < 600
  assert f"{100 * macro:.2f}" in done.stdout


def test_a_log_shows_progress_in_lines(capsys):
  found = list(progress.track(range(3), "batch", "scoring", interval=0))
  assert found == [0, 1, 2]
  lines = capsys.readouterr().err.splitlines()
  assert lines == [f"scoring: batch {done}/3" for done in (1, 2, 3)]


def results_of(*rows, terms=None):
  """Returns results of rows (UID, score of the good choice, of the bad)."""
  both = Choice("", "good"), Choice("", "bad")
  uids, *found = zip(*rows, strict=True)
  items = [
    Item(both, str(i), u, (terms or {}).get(u, "")) for i, u in enumerate(uids)
  ]
  return Results(items, np.array(found))


def table(summary):
  return TASKS["blimp"].table(summary).splitlines()


def test_ties_are_wrong_and_counted():
  summary = results_of(("x", 1, 0), ("x", 0, 0), ("y", 2, 1)).summary()
  assert summary["ties"] == 1
  assert summary["macro_accuracy"] == 0.75
  assert summary["pair_accuracy"] == pytest.approx(2 / 3)


def test_equal_sentences_are_told(tmp_path, capsys):
  """Catches accuracies that white space at the ends lowers, in silence."""
  equal = GOOD.replace("Tom hills .", " Tom sat .")
  (tmp_path / "a.jsonl").write_text(f"{GOOD}\n{equal}")
  assert len(read_minimal_pairs(tmp_path)) == 2
  assert "1 of 2 pairs have the same sentence twice" in capsys.readouterr().out


def test_pairs_without_a_uid_take_the_file_name(tmp_path):
  empty = '"UID": null, "linguistics_term": null, '
  lines = GOOD, GOOD.replace("{", "{" + empty, 1)
  (tmp_path / "hypernym.jsonl").write_text("\n".join(lines))
  found = read_minimal_pairs(tmp_path)
  assert [(p.uid, p.term) for p in found] == [("hypernym", "")] * 2
  lines = table(results_of(("hypernym", 1, 0)).summary())
  assert lines[3].split() == ["hypernym", "1", "100.00"]


def test_pairs_are_a_folder_a_file_or_a_list(loaded, tmp_path):
  """Catches a file or a list that is refused, or scores otherwise."""
  path = tmp_path / "pairs/a.jsonl"
  records = [{"UID": "x", **json.loads(GOOD)}] * 2
  runs.write_lines(path, records)
  items = [
    evaluate(loaded, "blimp", data, mode="causal", quiet=True).items
    for data in (path.parent, path, records)
  ]
  assert items[0] == items[1] == items[2]
  refused = functools.partial(evaluate, loaded, mode="causal")
  assert "data, line 1: not a map" in runs.told(refused, "blimp", ["a"])
  line = runs.told(refused, "blimp", [{"sentence_good": "a"}])
  assert "data, line 1: no text 'sentence_bad'" in line
  assert "is no path" in runs.told(refused, "comps", records)
  assert "data is empty" in runs.told(refused, "comps", "")


def test_the_table_has_means_first_then_phenomena():
  rows = ("x", 1, 0.5), ("y", 0, 0.5), ("z", 1, 0.5)
  terms = {"x": "island", "y": "island", "z": "binding"}
  lines = table(results_of(*rows, terms=terms).summary())
  assert [" ".join(line.split()) for line in lines[1:]] == [
    "mean over UIDs 3 66.67",
    "mean over pairs 3 66.67",
    "binding 1 100.00",
    "island 2 50.00",
  ]


@pytest.mark.parametrize(
  ("name", "read", "uids", "total", "largest"),
  [  # the counts of collate_preds.py in babylm-eval
    ("blimp_filtered", read_minimal_pairs, 67, 59_875, 986),
    ("blimp_supplement_filtered", read_minimal_pairs, 5, 5218, 3867),
    ("ewok", ewok.read_ewok_pairs, 11, 7618, 2210),
  ],
)
def test_sizes_of_the_real_files(tmp_path, name, read, uids, total, largest):
  found = read(real.unpacked(name, tmp_path) / name)
  sizes = collections.Counter(item.uid for item in found)
  assert (len(sizes), sizes.total()) == (uids, total)
  assert max(sizes.values()) == largest


EWOK = """\
Domain,ContextType,ContextDiff,TargetDiff,Context1,Context2,Target1,Target2
a-b,direct,swap,swap,Tom can't sit.,Tom cannot rest.,Dog's here.,"No, it sat."
c-d,direct,swap,swap,Tom sits.,Tom rests.,The zeppelin sits.,Tom sat.
"""
WORDS = "tom ca n't sit . can not rest the dog 's here no , it sat sits rests"


def write_ewok(folder):
  folder.mkdir()
  (folder / "ewok_test.csv").write_text(EWOK)
  (folder / "vocab.txt").write_text("\n".join(WORDS.split()))
  return folder


def test_ewok_makes_two_pairs_of_a_row(tmp_path):
  first, second = ewok.read_ewok_pairs(write_ewok(tmp_path / "ewok"))
  _, turned = ewok.read_ewok_pairs(tmp_path / "ewok", by_context=True)
  assert turned.choices[0] == second.choices[0]
  assert turned.choices[1] == ("Tom can't sit.", "No, it sat.")
  assert first.choices[0] == ("Tom can't sit.", "Dog's here.")
  assert second.choices[0] == ("Tom cannot rest.", "No, it sat.")
  assert first.choices[1] == ("Tom can't sit.", "No, it sat.")
  assert [p.item_id for p in (first, second)] == ["0", "1"]
  assert {p.uid for p in (first, second)} == {"a-b"}  # "zeppelin" is unknown
  assert len(ewok.read_ewok_pairs(tmp_path / "ewok", unfiltered=True)) == 4
  assert (
    len(ewok.read_ewok_pairs(tmp_path / "ewok", limit=1, unfiltered=True)) == 2
  )
  (tmp_path / "ewok/vocab.txt").write_bytes("\r\n".join(WORDS.split()).encode())
  assert ewok.read_ewok_pairs(tmp_path / "ewok") == [first, second]


@pytest.mark.slow
def test_ewok_command(run, loaded, tmp_path, capsys):
  data, output = write_ewok(tmp_path / "ewok"), tmp_path / "out"
  how = "--mode=mlm", "--pipeline=2024", "--unfiltered"
  summary = runs.score(run, data, output, *how, task="ewok")
  assert "4 items" in capsys.readouterr().out
  items = items_of(output)
  assert [item["uid"] for item in items] == ["a-b", "a-b", "c-d", "c-d"]
  first, contexts = zip(
    *((item["choices"][0], item["contexts"][0]) for item in items), strict=True
  )
  late = pipelines.options("2024", "mlm")
  expected = scoring.score(loaded, first, "mlm", contexts=contexts, **late)
  found = [item["scores"][0] for item in items]
  np.testing.assert_allclose(found, expected, atol=1e-3)
  assert summary["request"]["reduction"] == "mean"
  assert summary["request"]["unfiltered"]
  chosen = json.loads((output / "predictions.json").read_text())["ewok"]
  chosen = [p for uid in ("a-b", "c-d") for p in chosen[uid]["predictions"]]
  assert [p["id"] for p in chosen] == ["a-b_0", "a-b_1", "c-d_0", "c-d_1"]
  texts = [item["choices"][0 if item["correct"] else 1] for item in items]
  assert [p["pred"] for p in chosen] == [f" {text}" for text in texts]


@pytest.mark.parametrize(
  ("file", "text", "message"),
  [
    ("ewok_test.csv", None, "cannot read"),
    ("ewok_test.csv", "", "no row of ewok_test.csv is left"),
    ("ewok_test.csv", EWOK.replace("a-b", ""), "line 2: no text 'Domain'"),
    ("ewok_test.csv", EWOK.replace("Target2", "X"), "line 2: no text 'Target2"),
    ("vocab.txt", None, "0 files vocab"),
    ("vocab.txt", "tom", "no row of ewok_test.csv is left"),
  ],
)
def test_ewok_refuses_data(tmp_path, file, text, message):
  folder = write_ewok(tmp_path / "ewok")
  (folder / file).unlink() if text is None else (folder / file).write_text(text)
  assert message in runs.told(ewok.read_ewok_pairs, folder)


@pytest.mark.slow
def test_a_request_is_scored_once(run, tmp_path, monkeypatch, capsys):
  data, output = write_pairs(tmp_path / "pairs", "a.jsonl"), tmp_path / "out"
  scored, score = [], scoring.score
  monkeypatch.setattr(
    scoring, "score", lambda *a, **k: scored.append(1) or score(*a, **k)
  )

  def times(*extra):
    before = len(scored)
    how = "--mode=causal", "--limit=4"
    runs.score(run, data, output, *how, *extra, task="blimp")
    return len(scored) - before

  assert [times(), times()] == [1, 0]
  assert "already scored" in capsys.readouterr().out
  assert times("--overwrite") == 1
  for extra, differs in (
    ("--limit=3", "limit"),
    ("--temperature=2", "temperature"),
    ("--reduction=mean", "reduction"),
    ("--pipeline=2026", "pipeline"),
  ):
    assert f"another request ({differs} differ" in runs.told(times, extra)
    assert [times(extra, "--overwrite"), times(extra)] == [1, 0], extra
    assert times("--overwrite") == 1
  write_pairs(data, "a.jsonl")  # the same pairs, written later
  assert times() == 0
  (data / "a.jsonl").write_text(GOOD)
  assert "another request (data differ)" in runs.told(times)
  (output / "summary.json").write_text("{")
  assert times() == 1


def test_a_sentence_too_long_leaves_nothing(run, tmp_path):
  data, output = tmp_path / "data", tmp_path / "out"
  data.mkdir()
  (data / "x.jsonl").write_text(GOOD.replace("Tom sat", "Tom " * 160))
  assert "max_seq_len=128" in runs.told(
    runs.score, run, data, output, "--mode=mlm", task="blimp"
  )
  assert not output.exists()


@pytest.mark.parametrize("before", [False, True])
def test_a_full_disk_leaves_all_or_nothing(tmp_path, monkeypatch, before):
  """A failed first write leaves no file; a failed second, the old files."""
  folder = tmp_path / "out"
  if before:
    results.write_results(
      folder, {"a": "old", "b": "old"}, {"request": {"n": 1}}
    )
  write_text = pathlib.Path.write_text

  def full(path, *args, **options):
    if path.name.startswith(".b"):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return write_text(path, *args, **options)

  monkeypatch.setattr(pathlib.Path, "write_text", full)
  assert "out/b: No space left on device" in runs.told(
    results.write_results,
    folder,
    {"a": "new", "b": "new"},
    {"request": {"n": 2}},
  )
  found = {path.name: path.read_text() for path in folder.glob("*")}
  assert sorted(found) == ["a", "b", "summary.json"] * before
  assert set(found.values()) & {"old", "new"} == ({"old"} if before else set())
  assert bool(results.finished(folder, {"n": 1})) == before


@pytest.mark.parametrize(
  "text", ["", "{", "[]", '{"request": 1}', "{}", "\udcff"]
)
def test_a_damaged_summary_is_none(tmp_path, text):
  (tmp_path / "summary.json").write_text(text, errors="surrogateescape")
  assert results.finished(tmp_path, {"n": 1}) is None


def test_accuracy_needs_no_checkpoint(loaded, tmp_path):
  """A model in memory is enough, e.g. during training."""
  write_pairs(tmp_path / "pairs", "a.jsonl", "b.jsonl")
  found = read_minimal_pairs(tmp_path / "pairs", limit=6)
  names = ("model", "params", "meta")
  live = TextModel(**{n: getattr(loaded, n) for n in names})
  summary = Results(found, choice_scores(loaded, found, "causal")).summary()
  assert pair_accuracy(live, found, "causal") == summary["macro_accuracy"]


def test_an_output_that_is_a_file_is_refused(run, tmp_path):
  data = write_pairs(tmp_path / "pairs", "a.jsonl")
  where = f"--task=blimp --checkpoint={run} --data={data} --mode=causal"
  words = f"{where} --output={data / 'a.jsonl'}".split()
  assert "cannot write" in runs.told(score.main, words)
