"""`antlm compare` and `antlm sweep`."""

import functools
import json
import os
import pathlib
import shlex
import shutil
import signal
import statistics
import subprocess
import time

import numpy as np
import pytest
from scipy import stats

from antlm_jax import config as config_lib
from antlm_jax.errors import RUN_AGAIN, Stopped, UserError
from antlm_jax.evals.finetuning import classification, multi_label, regression
from antlm_jax.evals.finetuning.loop import TrialRun
from antlm_jax.evals.finetuning.task import item_scores
from antlm_jax.evals.studies import compare, jobs, sweep
from antlm_jax.evals.studies.reporting import comparison, plots
from antlm_jax.evals.studies.reporting.runs import read_run
from antlm_jax.runtime.jobs import Child
from tests import runs, tuned

GRID = "--grid=schedule.peak_lr=1e-3,3e-3;seed=1,2"
VALUES = [str(n) for n in range(1, 100)]
TRAINING = ("--", "--config=quickstart", "--config.curriculum", "2C+2M steps")
TRAINING += ("--config.train.steps=0",)


def write(folder, config, losses, ended=True, **summary):
  """Writes a run; its half that chooses no step is worse by 0.5 nats."""
  about = {"switches": [2]} | summary if ended else None
  return runs.write_run(folder, config, losses, about, gap=0.5)


def config(*overrides):
  words = "--config.curriculum=2C+2M steps", *overrides
  return config_lib.load_config("quickstart", words)


@pytest.fixture(autouse=True)
def empty_pictures(monkeypatch):
  """Only tests of pictures draw them."""
  monkeypatch.setattr(plots, "draw_losses", tuned.draw_nothing)


@pytest.fixture
def three(tmp_path):
  """Three runs: complete, best before its end, and unfinished."""
  watched = config("--config.eval.watch=mlm", "--config.eval.patience=2")
  fast = config("--config.schedule.peak_lr=1")
  early = {"steps": 2, "switches": [], "best": {"step": 1, "loss": 2.0}}

  def losses(**by_step):
    found = {0: (7.0, 8.0)} | {int(s[1:]): both for s, both in by_step.items()}
    return {s: {"clm": c, "mlm": m} for s, (c, m) in found.items()}

  return [
    write(tmp_path / "a", config(), losses(s4=(3.0, 4.0))),
    write(tmp_path / "b", watched, losses(s1=(3.5, 2), s2=(2.5, 5)), **early),
    write(tmp_path / "c", fast, losses(s2=(1.0, 1.0)), ended=False),
  ]


def compared(capsys, *args):
  """Returns `antlm compare`'s rows, its table.json and its report."""
  capsys.readouterr()
  compare.main([str(arg) for arg in args])
  lines = capsys.readouterr().out.splitlines()
  written = lines[-1].removeprefix("written to ").replace("report.md", "{}")
  with open(written.format("table.json")) as file:
    numbers = json.load(file)
  with open(written.format("report.md")) as file:
    return [line.split() for line in lines[1:4]], numbers, file.read()


def test_runs_are_ranked_at_their_best_or_last_step(
  three, tmp_path, capsys, monkeypatch
):
  monkeypatch.undo()  # draws the picture
  rows, numbers, text = compared(capsys, *three)
  # The score of b is (3.5 + 2.0) / 2, at step 1. Run c is better than both but
  # unfinished. The half of held-out rows that selects no step is worse by 0.5.
  assert [row[:5] for row in rows[:2]] == [
    ["b", "1", "4.000", "2.500", "3.250"],
    ["a", "4", "3.500", "4.500", "4.000"],
  ]
  assert " ".join(rows[2]).startswith("c 2, not at its end 1.500 1.500 1.500")
  assert "the losses are those of the other half, for all runs" in text
  assert numbers["best"] == "b" and numbers["by"] == ["clm", "mlm"]
  (lr,) = numbers["settings"][""]  # eval settings have no influence on training
  assert lr == {"setting": "schedule.peak_lr", "a": 3e-3, "b": 3e-3, "c": 1.0}
  assert (tmp_path / "comparison/curves.png").stat().st_size > 10_000
  assert "not compare" not in text
  rows, numbers, text = compared(capsys, *three[:2], "--by=clm")
  assert numbers["best"] == "a" and "They are the same." in text


def tuned_results(folder, right, seeds=(0,), **task):
  """Writes results of a fine-tuning whose answers are right where it says."""
  answers = np.where(right, tuned.LABELS, 1 - tuned.LABELS)
  found = {TrialRun(0.1, seed): {"x-dev": answers} for seed in seeds}
  tuned.write(folder.parent / "new", "x", found, 4, "causal", **task)
  return (folder.parent / "new/x/4-causal").rename(folder)


def test_fine_tuned_models_are_compared_on_the_same_items(tmp_path, capsys):
  """Catches an interval that is not the paired one, and items that differ."""
  draw = np.random.default_rng(0)
  first, other = draw.random((2, 100)) < [[0.8], [0.6]]
  folders = [
    tuned_results(tmp_path / name, right, seeds)
    for name, right, seeds in (("a", first, (0,)), ("b", other, (0,)))
  ]
  (folders[1] / "model").mkdir()
  compare.main([str(folders[0]), str(folders[1] / "model")])
  printed = capsys.readouterr().out
  report = tmp_path / comparison.FOLDER / "report.md"
  assert printed.splitlines()[2] in report.read_text()
  # Models with other seeds are paired by items alone.
  seeds = tuned_results(tmp_path / "c", other, (0, 1))
  result = compare.compare([*folders, seeds])
  assert [(row.label, row.seeds) for row in result.rows] == [
    ("a", 1),
    ("b", 1),
    ("c", 2),
  ]
  assert result.best.label == "a" and result.best.metric == "accuracy"
  values = first.astype(float), other.astype(float)
  theirs = stats.ttest_rel(values[1], values[0]).confidence_interval(0.95)
  for row in result.rows[1:]:
    interval = row.difference
    assert interval.estimate == pytest.approx(other.mean() - first.mean())
    assert (interval.low, interval.high) == pytest.approx(tuple(theirs))
    assert row.paired_by == "items"
  line = runs.told(compare.compare, [tmp_path])
  assert f"is a folder of results: name each, such as {tmp_path}/a" in line
  for wrong, message in (
    (tmp_path / "nope", "nope does not exist"),
    (tmp_path, "has results of a fine-tuned model, and"),
  ):
    assert message in runs.told(compare.compare, [folders[0], wrong])
  # An item less, and the same item with another label or another text
  text = (folders[1] / "items.jsonl").read_text()
  *lines, last = text.splitlines(keepends=True)
  label = last.replace('"label": 1', '"label": 0')
  changed = {**json.loads(last), "text": "0" * 16}
  assert label != last
  for wrong in (lines, [*lines, label], [*lines, json.dumps(changed)]):
    (folders[1] / "items.jsonl").write_text("".join(wrong))
    with pytest.raises(UserError, match="b has other items than a: evaluate"):
      compare.compare(folders)


def test_models_with_a_missing_seed_are_paired_by_those_they_share(tmp_path):
  """Catches an interval without the variance over seeds, and its name."""
  right = {"a": {0: 50, 1: 50, 2: 50}, "b": {1: 60, 0: 40}, "c": {2: 50, 1: 50}}
  folders = []
  for name, by_seed in right.items():
    trials = {
      TrialRun(0.1, seed): {"x-dev": tuned.answers(count)}
      for seed, count in by_seed.items()
    }
    tuned.write(tmp_path / name, "x", trials, 4, "causal")
    folders.append(tmp_path / name / "x/4-causal")
  result = compare.compare(folders)
  assert str(result).count("2 seeds, items") == 2
  # Half of the interval is 12.7, Student's t, times the error of 0.1.
  assert result.rows[1].difference[1:] == pytest.approx((-1.27, 1.27), abs=0.01)
  # b and c share one seed alone.
  assert compare.compare(folders[1:]).rows[1].paired_by == "items"


def test_equal_texts_are_one_item(tmp_path):
  """Catches a task without the texts' hashes, whose items are told by ids."""
  draw = np.random.default_rng(0)
  right = draw.random((2, 100)) < [[0.8], [0.6]]
  folders = [
    tuned_results(tmp_path / name, row, repeats=2)
    for name, row in zip("ab", right, strict=True)
  ]
  _, row = compare.compare(folders).rows
  first, other = right.reshape(2, 50, 2).mean(axis=-1)
  theirs = stats.ttest_rel(other, first).confidence_interval(0.95)
  assert row.difference[1:] == pytest.approx(tuple(theirs))


@pytest.mark.parametrize("metric", ["mcc", "f1", "pearson"])
def test_models_are_compared_by_the_metric_that_finetune_reports(
  tmp_path, metric
):
  """Catches a ranking by another metric, and an interval that is too narrow.

  The deviation of the difference is that of resampled items.
  """
  draw = np.random.default_rng(0)
  fields = regression.FIELDS | {"also": ()} if metric == "pearson" else {}
  fields |= {"main_metric": metric}
  answers = []
  folders = []
  for name, spread in (("a", 0.4), ("b", 0.8)):
    values = tuned.LABELS + spread * draw.normal(size=100)
    if not fields.get("metrics"):
      values = (values > 0.5).astype(int)
    found = {TrialRun(0.1, 0): {"x-dev": values}}
    tuned.write(tmp_path / name, "x", found, 4, "causal", **fields)
    answers.append(values)
    folders.append(tmp_path / name / "x/4-causal")
  rows = compare.compare(folders).rows
  metrics = regression.FIELDS["metrics"] | vars(classification)
  measure = metrics[metric]
  scores = [measure(x.tolist(), tuned.LABELS.tolist()) for x in answers]
  assert [row.metric for row in rows] == [metric] * 2
  assert [row.score for row in rows] == pytest.approx(scores)
  resampled = [
    measure(answers[1][drawn], tuned.LABELS[drawn])
    - measure(answers[0][drawn], tuned.LABELS[drawn])
    for drawn in draw.integers(0, 100, (1000, 100))
  ]
  interval = rows[1].difference
  assert interval.estimate == pytest.approx(scores[1] - scores[0])
  half = stats.t.ppf(0.975, 99) * np.std(resampled)
  assert (interval.high - interval.low) / 2 == pytest.approx(half, rel=0.15)


def test_the_parts_of_items_in_a_ratio_are_the_jackknifes():
  """Catches parts whose mean is not the metric, or that are one by one."""
  predictions = [[1, 2], [0], [2], [], [1]]
  labels = [[1], [0], [1, 2], [2], []]
  ratio = multi_label.micro_f1
  found = item_scores(ratio, predictions, labels)
  slow = item_scores(lambda *sides: ratio(*sides), predictions, labels)
  assert found.mean() == pytest.approx(ratio(predictions, labels))
  assert found.tolist() == pytest.approx(slow.tolist())
  # Lists of equal length are items too.
  pairs = [[0, 1], [1, 2]], [[0, 1], [0, 2]]
  ratios = item_scores(ratio, *pairs)
  assert item_scores(lambda *sides: ratio(*sides), *pairs) == pytest.approx(
    ratios
  )
  # Groups of items give nearly the interval of single items.
  numbers = np.random.default_rng(0).normal(size=(2, 3000)).cumsum(axis=0)
  found = item_scores(regression.spearman, *numbers.tolist())
  value = regression.spearman(*numbers)
  # The variance of rank correlations (Bonett and Wright 2000) is
  # (1 + r^2 / 2) (1 - r^2)^2.
  expected = (1 + value**2 / 2) ** 0.5 * (1 - value**2)
  assert found.mean() == pytest.approx(value)
  assert found.std() == pytest.approx(expected, rel=0.1)
  exact = item_scores(multi_label.exact_match, predictions, labels)
  assert exact.tolist() == [0, 1, 0, 0, 0]


def test_what_cannot_be_compared_is_told(three, tmp_path, capsys):
  other = tmp_path / "x/other"
  write(other, config(), {4: {"clm": 3.0}}, unigram_entropy=6.1)
  none = write(tmp_path / "none", config(), {0: {}})
  _, numbers, text = compared(capsys, three[0], other)
  assert "do not compare" in text and numbers["best"] is None
  # The printed table and the result name no best run, as the report.
  comparison = compare.compare([three[0], other])
  assert comparison.warning in str(comparison)
  assert "best: " not in str(comparison) and comparison.failed == ()
  assert [row["run"] for row in numbers["runs"][""]] == ["a", "x/other"]
  # Held-out text is known before the end of a run.
  for number, path in enumerate(("x", "x", "y")):
    with_data = config(f"--config.data.path=/nowhere/{path}")
    folder = tmp_path / f"running/{number}"
    write(folder, with_data, {2: {"clm": 3.0}}, ended=False)
  begun = sorted((tmp_path / "running").iterdir())
  for some, comparable in ((begun[:2], True), (begun, False)):
    _, numbers, text = compared(capsys, *some)
    assert ("do not compare" not in text) == comparable
    assert (numbers["best"] is not None) == comparable
  (empty := tmp_path / "empty").mkdir()
  for words, told in (
    ((*three, other, "--by=mlm"), "--by=mlm: not every run measured this loss"),
    ((*three, tmp_path / "x"), "is a folder of runs: name each"),
    ((*three, empty), "is no run's folder"),
    ((tmp_path,), f"is a folder of runs: name each, such as {three[0]}"),
    ((none,), "every run must measure the same loss (measured by some: none)"),
  ):
    assert told in runs.refused("antlm_jax.evals.studies.compare", *words)


def test_runs_with_masking_ratios_in_the_curriculum(tmp_path, capsys):
  """Catches a config whose M30 only the training understood."""
  both = config("--config.curriculum=2M30+2C steps", "--config.eval.watch=clm")
  folders = [
    write(tmp_path / name, both, {4: {"clm": loss, "mlm": 3.0}})
    for name, loss in (("one", 3.0), ("two", 2.0))
  ]
  _, numbers, _ = compared(capsys, *folders)
  assert numbers["best"] == "two" and numbers["settings"][""] == []


def test_runs_without_a_finite_loss_rank_last_and_are_named(tmp_path, capsys):
  """Catches a mean over the seeds that did not diverge, and an empty run."""
  nan = float("nan")
  losses = {"a=1": (2.0, nan), "a=2": (3.0, 5.0), "a=3": (None,)}
  found = {}
  for label, by_seed in losses.items():
    for seed, loss in enumerate(by_seed):
      folder = tmp_path / f"{label}_seed={seed}"
      by_step = {} if loss is None else {0: {"clm": 9.0}, 4: {"clm": loss}}
      write(folder, config(f"--config.seed={seed}"), by_step, loss is not None)
      found.setdefault(label, []).append(read_run(label, folder))
  result = comparison.compare_runs("runs", found, folder=tmp_path / "out")
  assert [row.label for row in result.rows] == ["a=2", "a=1", "a=3"]
  assert result.best.loss.mean == 4.0 and result.rows[1].loss is None
  line = "no finite loss, so ranked last: a=1_seed=1, a=3"
  assert line in str(result)
  assert line in (tmp_path / "out/report.md").read_text()
  assert not result.warning
  # Without a loss, no line is the best.
  result = comparison.compare_runs("runs", {"a=1": found["a=1"]})
  assert result.warning == "warning: no line has a finite loss"


def test_a_loss_that_a_run_did_not_train_ranks_no_run(tmp_path, capsys):
  """Catches a best run by the untrained loss of the other attention."""
  paths = {}
  for name, curriculum, clm, mlm in (
    ("c1", "4C steps", 3.0, 29.0),
    ("c2", "4C steps", 3.5, 9.0),
    ("m", "4M steps", 9.0, 2.0),
    ("both", "4C:M steps", 3.2, 3.0),
  ):
    asked = config(f"--config.curriculum={curriculum}")
    losses = {4: {"clm": clm, "mlm": mlm}}
    paths[name] = write(tmp_path / name, asked, losses, switches=[])
  c1, c2, m, both = paths.values()
  for some in ((c1, c2), (c1, c2, both)):
    _, numbers, text = compared(capsys, *some)
    assert numbers["best"] == "c1" and numbers["by"] == ["clm"]
  _, numbers, text = compared(capsys, c1, m, both)
  assert "the runs trained different objectives" in text
  assert numbers["best"] is None
  _, numbers, text = compared(capsys, c1, m, both, "--by=mlm")
  assert "different objectives" not in text and numbers["best"] == "m"


@pytest.mark.slow
def test_losses_under_different_masks_rank_no_run(tmp_path, capsys):
  """Catches the run with the fewest masks as the best."""
  paths = {}
  for percent in (15, 50):
    words = [f"--config.objectives.M.mask_ratio={percent / 100}"]
    losses = {4: {"clm": 3.0, "mlm": 3.0 + percent, "mlm15": 3.0}}
    folder = tmp_path / str(percent)
    asked = config(*words, "--config.eval.objectives=C,M,M15")
    paths[percent] = write(folder, asked, losses)
  _, numbers, text = compared(capsys, *paths.values(), "--by=mlm")
  assert numbers["best"] is None
  assert "differ in mask_ratio of mlm, so their losses do not compare" in text
  for by in ("clm", "mlm15", "clm,mlm15"):
    _, numbers, text = compared(capsys, *paths.values(), f"--by={by}")
    assert numbers["best"] and "not compare" not in text
  # The weight of a loss, and how the share of masks begins, are not measured.
  falls = "mask_ratio=0.5", "mask_ratio_end=0.15", "weight=2"
  words = [f"--config.objectives.M.{word}" for word in falls]
  asked = config(*words, "--config.eval.objectives=C,M")
  write(tmp_path / "falls", asked, {4: {"clm": 3.0, "mlm": 2.0}})
  _, numbers, _ = compared(capsys, paths[15], tmp_path / "falls", "--by=mlm")
  assert numbers["best"] == "falls"
  # Held-out sets of other sizes, and rows with other tokens at their ends
  for key, value in {"eval.rows": 8, "data.framed": True}.items():
    write(tmp_path / key, config(f"--config.{key}={value}"), losses)
    _, _, text = compared(capsys, paths[15], tmp_path / key, "--by=clm")
    assert f"differ in {key}, so" in text and "same objective" not in text


def test_runs_of_different_length_share_an_axis(three, tmp_path, monkeypatch):
  long = {100 * n: {"clm": 5.0 - n, "mlm": 5.0} for n in range(5)}
  write(tmp_path / "long", config(), long, steps=400)
  drawn = {}

  def draw(title, axis, panels, tops, path):
    drawn[axis] = {
      k: [x for x, _ in v] for k, v in panels["clm, held out"].items()
    }

  monkeypatch.setattr(plots, "draw_losses", draw)
  paths = [str(path) for path in (three[0], three[2], tmp_path / "long")]
  compare.main(paths)
  # Run c has half of its steps.
  assert drawn.pop("share of the run (%)") == {
    "a": [0, 100],
    "c": [0, 50],
    "long": [0, 25, 50, 75, 100],
  }
  compare.main(paths[:2])
  assert drawn == {"step": {"a": [0, 4], "c": [0, 2]}}


@pytest.mark.parametrize(
  "file, text, told",
  [
    ("metrics.jsonl", '{"step": 4, "eval/clm/loss": NaN}', None),
    ("metrics.jsonl", '{"step": 4, "eval/clm/loss": 1e400}', None),
    ("metrics.jsonl", '{"step": 4, "eval/clm/loss": [1.0]}', ""),
    ("metrics.jsonl", "", ""),
    ("config.json", "", "config.json"),
    ("summary.json", "", "summary.json"),
    ("summary.json", '{"steps": 4}', "it has no 'parameters'"),
  ],
)
def test_files_without_numbers_are_no_tracebacks(
  file, text, told, three, tmp_path, capsys
):
  bad = shutil.copytree(three[0], tmp_path / "bad")
  (bad / file).write_text(
    (bad / file).read_text() + text if told is None else text
  )
  if told:
    assert told in runs.refused(
      "antlm_jax.evals.studies.compare", three[0], bad
    )
    return
  # A loss that is absent or not finite is worse than any other.
  rows, numbers, _ = compared(capsys, three[0], bad)
  step = "0" if told == "" else "4"
  assert numbers["best"] == "a"
  assert ["bad", step, "-"] in [row[:3] for row in rows]


@pytest.fixture
def trained(monkeypatch):
  """Replaces training; records (rate, seed) of each call and writes a run."""
  calls = []

  def start(job, log):
    """Runs a job here; returns a process that has ended."""
    child = Child(job.title, ["timeit", "-n1", "-r1"])
    child.wait()
    child.returncode = call(job)
    return child

  def call(job):
    of, *overrides = job.arguments[1:]
    assert job.command == "train" and of == "--config=quickstart"
    words = " ".join(overrides).replace("curriculum ", "curriculum=", 1)
    words = [f"--config.{w.strip()}" for w in words.split("--config.")[1:]]
    found = config_lib.load_config("quickstart", words)
    calls.append((found.schedule.peak_lr, found.seed))
    failing = {1: 2, 2: RUN_AGAIN}
    if calls[-1][0] == 3e-3 and len(calls) < 5 and found.seed in failing:
      return failing[found.seed]
    loss = 1000 * found.schedule.peak_lr + found.seed
    write(job.folder, found, {0: {"clm": 9.0}, 4: {"clm": loss}})
    return 0

  monkeypatch.setattr(jobs, "start_job", start)
  return calls


@pytest.mark.slow
def test_a_sweep_goes_on_and_says_which_is_best(
  trained, prepared, tmp_path, capsys
):
  words = [GRID, f"--output={tmp_path}", *TRAINING]
  words.append(f"--config.data.path={prepared}")
  with pytest.raises(Stopped):
    sweep.main(words)
  every = [(lr, seed) for lr in (1e-3, 3e-3) for seed in (1, 2)]
  assert trained == every
  sweep.main(words)  # repeats failed or interrupted runs
  assert trained[4:] == every[2:]
  with open(tmp_path / "comparison/table.json") as file:
    numbers = json.load(file)
  assert numbers["best"] == "peak_lr=1e-3"
  first, second = numbers["runs"][""]
  assert first["clm"]["mean"] == statistics.mean([2, 3])
  assert second["clm"]["std"] == pytest.approx(statistics.stdev([4, 5]))
  assert (first["run"], first["seeds"]) == ("peak_lr=1e-3", 2)
  assert "2.500 ± 0.707" in capsys.readouterr().out
  # A complete sweep needs no data.
  sweep.main([*words[:-1], "--config.data.path=/nowhere"])
  assert len(trained) == 6
  # Runs of other settings are not ranked with these, and none is trained.
  line = runs.told(sweep.main, [*words, "--config.train.batch_size=8"])
  assert "is a run of another sweep (train.batch_size was 32, is 8)" in line
  assert len(trained) == 6
  # A larger grid trains only new runs.
  words[0] = GRID.replace("1,2", "1,2,3")
  sweep.main(words)
  assert trained[6:] == [(1e-3, 3), (3e-3, 3)]


@pytest.mark.slow
def test_from_python_a_sweep_is_the_commands(
  trained, prepared, tmp_path, capsys
):
  """Values of any type, and the result's attributes; quiet prints nothing."""
  trained.append(None)  # the fifth call passes
  grid = {"schedule.peak_lr": [0.001, 0.003], "seed": (1, 2)}
  how = {"curriculum": "2C+2M steps", "eval.objectives": ("C", "M")}
  how |= {"train.steps": 0}
  found = sweep.sweep(
    "quickstart", grid, tmp_path, data=prepared, quiet=True, **how
  )
  assert capsys.readouterr().out == ""
  assert found.failed == ("peak_lr=0.003, seed=1",) and found.by == ("clm",)
  assert found.best is found.rows[0] and found.best.label == "peak_lr=0.001"
  assert found.best.loss == found.best.losses["clm"]
  assert (found.best.loss.mean, found.best.step) == (2.5, 4)
  seeds = [f"schedule.peak_lr=0.001_seed={seed}" for seed in (1, 2)]
  assert found.best.folders == tuple(tmp_path / seed for seed in seeds)
  said = "<2 compared, 1 failed; best peak_lr=0.001 (2.500 ± 0.707)>"
  assert repr(found) == said and "2.500 ± 0.707" in str(found)
  one = compare.compare(found.best.folders, by="clm")
  assert one.folder is None and one.best.label == seeds[0]
  assert sorted(path.name for path in tmp_path.glob("comp*")) == ["comparison"]
  for grid, message in (
    ({}, "the grid {} has no values to vary"),
    ({"seed": []}, "has no values to vary"),
    ({"seeds": [1]}, "unknown config key 'seeds'; did you mean 'seed'?"),
  ):
    assert message in runs.told(
      functools.partial(sweep.sweep, "quickstart", grid, tmp_path, **how)
    )


@pytest.mark.slow
def test_a_run_that_fails_is_named(trained, prepared, tmp_path, capsys):
  trained.append(None)  # the fifth call passes
  words = [GRID, f"--output={tmp_path}", *TRAINING]
  words.append(f"--config.data.path={prepared}")
  told = runs.told(sweep.main, words)
  assert "1 of 4 runs failed (peak_lr=3e-3, seed=1)" in told
  assert "peak_lr=3e-3, seed=1 failed (status 2)" in capsys.readouterr().out
  assert (tmp_path / "comparison/report.md").exists()
  assert trained[1:] == [(lr, s) for lr in (1e-3, 3e-3) for s in (1, 2)]


@pytest.mark.parametrize(
  "grid, training, told",
  [
    ("seed=1,2", ("--",), "arguments are required: --config"),
    ("seed=1,2", (), "the training is missing"),
    ("seed=1,2", (*TRAINING, "--workdir=w"), "unknown argument '--workdir=w'"),
    ("sed=1,2", TRAINING, "unknown config key 'sed'; did you mean 'seed'?"),
    ("seed=1,x", TRAINING, "seed=x: not int"),
    ("seed", TRAINING, "'seed' is not KEY=VALUE,VALUE,..."),
    ("seed=1,", TRAINING, "'seed=1,' is not KEY=VALUE,VALUE,..."),
    ("seed=1; seed=2", TRAINING, "'seed=2' is not KEY=VALUE,VALUE,... with a"),
    (" ; ", TRAINING, "--grid= ; : give KEY=VALUE,VALUE,... to vary"),
    (
      ";".join(f"objectives.{x}.weight={','.join(VALUES)}" for x in "CMNDS"),
      TRAINING,
      "9,509,900,499 combinations, over 4,096: give fewer values",
    ),
  ],
)
def test_a_wrong_sweep_writes_nothing(grid, training, told, tmp_path):
  words = f"--grid={grid}", f"--output={tmp_path / 'sweep'}", *training
  assert told in runs.refused("antlm_jax.evals.studies.sweep", *words)
  assert not list(tmp_path.iterdir())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
  "grid, by, told",
  [
    ("curriculum=2C steps,2Q steps", "mlm", "unknown objective 'Q'"),
    ("model.heads=4,5", "mlm", "heads"),
    ("seed=1,2", "mlm,foo", "by=foo: not every run measures this; measured:"),
  ],
)
def test_every_run_is_built_before_the_first_is_trained(
  grid, by, told, trained, prepared, tmp_path
):
  words = [f"--grid={grid}", f"--by={by}", f"--output={tmp_path / 'sweep'}"]
  words += ["--", "--config=quickstart:shrink"]
  words += [f"--config.data.path={prepared}"]
  assert told in runs.refused("antlm_jax.evals.studies.sweep", *words)
  assert not trained and not list(tmp_path.iterdir())


LONG = "curriculum=300C+300M steps"


def grid_of_seeds(output, prepared) -> list[str]:
  """Returns the words of a sweep over two seeds."""
  words = ["--grid=seed=1,2", f"--output={output}", "--"]
  words += [f"--config={runs.QUICK}", f"--config.data.path={prepared}"]
  return [*words, f"--config.{LONG}"]


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_bit_for_bit(prepared, tmp_path):
  words = grid_of_seeds(tmp_path / "sweep", prepared)
  command = runs.command("antlm_jax.evals.studies.sweep", *words)
  first = tmp_path / "sweep/seed=1"
  process = subprocess.Popen(command, cwd=runs.ROOT)
  while not (first / "checkpoints").is_dir():
    time.sleep(0.1)
    assert process.poll() is None
  # The training survives the sweep, and the same command waits for it.
  children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
  (training,) = (
    int(pid)
    for pid in children.read_text().split()
    if "antlm_jax\0train" in pathlib.Path(f"/proc/{pid}/cmdline").read_text()
  )
  os.kill(training, signal.SIGSTOP)
  process.kill()
  process.wait()
  told = []
  pipe = {"stdout": subprocess.PIPE, "text": True}
  with subprocess.Popen(command, cwd=runs.ROOT, **pipe) as again:
    for line in again.stdout:
      told.append(line)
      if line.endswith("waiting\n"):
        os.kill(training, signal.SIGCONT)
  assert again.returncode == 0
  assert any(line.endswith("waiting\n") for line in told)
  assert any(line.startswith("best: all seeds") for line in told)
  runs.train(tmp_path / "alone", prepared, LONG, "seed=1")
  assert runs.same_params(first, tmp_path / "alone")


@pytest.mark.nightly
def test_a_printed_command_is_stopped_and_goes_on_bit_for_bit(
  prepared, tmp_path, capsys
):
  """Both runs are in one process; `antlm compare`'s page sweeps this way."""
  words = grid_of_seeds(tmp_path / "array", prepared)
  sweep.main(["--commands", "--together=2", *words])
  (line,) = capsys.readouterr().out.splitlines()
  command = shlex.split(line)
  process = subprocess.Popen(command, cwd=runs.ROOT)
  while not (tmp_path / "array/seed=1/checkpoints").is_dir():
    time.sleep(0.1)
    assert process.poll() is None
  process.terminate()
  assert process.wait() == RUN_AGAIN
  assert not (tmp_path / "array/seed=1/summary.json").exists()
  subprocess.run(command, cwd=runs.ROOT, check=True)
  sweep.main(words)  # only ranks the runs
  told = capsys.readouterr().out
  assert "[1/2]" not in told and "best: all seeds" in told
  for seed in (1, 2):
    alone = tmp_path / f"alone-{seed}"
    runs.train(alone, prepared, LONG, f"seed={seed}")
    assert runs.same_params(tmp_path / f"array/seed={seed}", alone)
