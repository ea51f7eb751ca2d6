"""The training command: results, resuming and bad input."""

import csv
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from antlm_jax import sections
from antlm_jax.commands import train
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.inference.model import load
from antlm_jax.page import plots
from antlm_jax.training import checkpoint, hooks, loop, metrics, saving
from antlm_jax.training import run as run_lib
from antlm_jax.training.checkpoint import Checkpoint
from tests import helpers, pods, random_models, runs

# The objective changes at steps 20 and 40; the run ends in the decay.
LONG = ("curriculum=20C+20M+20C:M=1:1 steps", "checkpoint.every=7")


@pytest.fixture(scope="module")
def whole(prepared, shared):
  """An uninterrupted run."""
  options = (prepared, *LONG, "log.trace=30:33")
  return shared(
    "whole", lambda workdir: runs.train(workdir, *options, devices=1)
  )


@pytest.fixture
def copy(whole, tmp_path):
  """A copy of the run, for further training."""
  return shutil.copytree(whole, tmp_path / "copy")


@pytest.mark.slow
def test_a_run_leaves_all_that_it_promises(whole):
  assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
  assert list((whole / "tensorboard").iterdir())
  assert len(list((whole / "trace").rglob("*.xplane.pb"))) == 1
  summary = runs.summary(whole)
  assert summary["switches"] == [20, 40]
  assert [row["step"] for row in summary["held_out"]] == [0, 20, 40, 60]
  losses = [row["eval/clm/loss"] for row in summary["held_out"]]
  assert losses[1] < losses[0]
  page = (whole / "README.md").read_text()
  assert re.search(r"\n\S*antlm train --config=", page)
  for row in summary["held_out"]:
    figures = (row[f"eval/{name}/loss"] for name in ("clm", "mlm"))
    assert " | ".join(f"{value:.3f}" for value in figures) in page
  assert "| tokens seen | 7.68k |" in page and "antlm fill" in page


def test_a_training_curve_is_means_over_300_parts_of_the_run():
  noise = np.random.default_rng(0).normal(3, 1, 12_001)
  rows = {
    step: {f"train/{'mlm' if 3000 < step <= 6000 else 'clm'}/loss": noise[step]}
    for step in range(1, 12_001)
  } | {0: {"eval/clm/loss": 6.0}}
  before, after = plots.smooth(rows, "train/clm/loss", 12_000)
  means = noise[1:].reshape(300, 40).mean(1)
  # The curve has a gap while the other objective trains.
  assert np.allclose(before[1], means[:75])
  assert np.allclose(after[1], means[150:])
  assert before[0][0] == 20.5 and after[0][0] == 6020.5
  # A short run's curve has the values themselves.
  few = {step: rows[step] for step in range(1, 101)}
  ((steps, values),) = plots.smooth(few, "train/clm/loss", 100)
  assert list(steps) == list(few) and np.array_equal(values, noise[1:101])


def test_metrics_hold_each_step_once_and_each_objective_in_its_phase(whole):
  clm, mlm = (runs.logged(whole, f"train/{n}/loss") for n in ("clm", "mlm"))
  assert [*clm] == [*range(1, 21), *range(41, 61)]
  assert [*mlm] == [*range(21, 61)]
  records = metrics.read_records(whole)
  assert sum("train/learning_rate" in record for record in records) == 60


def snapshot(folder) -> dict:
  """Returns the modification times of a folder's files."""
  return {p: p.stat().st_mtime_ns for p in folder.rglob("*")}


def test_a_finished_run_run_again_changes_nothing(copy, prepared):
  before = snapshot(copy / "checkpoints")
  summary = runs.summary(copy)
  done = runs.train(copy, prepared, *LONG)
  assert "already finished: step 60 of 60" in done.stdout
  assert snapshot(copy / "checkpoints") == before
  assert runs.summary(copy) == summary


def ended(workdir, prepared, moment, by=signal.SIGKILL):
  return runs.ended(workdir, prepared, *LONG, moment=moment, by=by)


def after_step(workdir, step):
  def moment():
    records = metrics.read_records(workdir)
    return bool(records) and records[-1]["step"] >= step

  return moment


@pytest.mark.slow
def test_stopped_again_and_again_once_in_a_save_is_bit_exact(
  whole, prepared, tmp_path
):
  status, out = ended(
    tmp_path, prepared, after_step(tmp_path, 5), signal.SIGINT
  )
  assert status == 130 and "Traceback" not in out
  assert "saved: run the same command to resume" in out
  assert re.search(r"time: .*(steps|compile) \d+%", out)
  steps = f"| steps | {max(checkpoint.checkpoint_steps(tmp_path))} of 60 |"
  assert steps in (tmp_path / "README.md").read_text()
  moments = [after_step(tmp_path, 28)]  # in the second objective
  moments += [lambda: any((tmp_path / "checkpoints").glob("*tmp*"))]  # a save
  moments += [after_step(tmp_path, 55)]  # in the mixture of both
  for moment in moments:
    assert ended(tmp_path, prepared, moment)[0] == -signal.SIGKILL
  done = runs.train(tmp_path, prepared, *LONG)
  assert "resuming from step" in done.stdout
  assert runs.same_params(tmp_path, whole)
  records = metrics.read_records(tmp_path)
  steps = [r["step"] for r in records if "train/learning_rate" in r]
  assert steps == list(range(1, 61))
  assert metrics.read_rows(tmp_path) == metrics.read_rows(whole)
  with (tmp_path / "metrics.csv").open(newline="") as file:
    rows = [(int(step), *of) for step, *of in list(csv.reader(file))[1:]]
  by_step = metrics.by_step(records).items()
  pairs = [(step, n, repr(x)) for step, of in by_step for n, x in of.items()]
  assert sorted(rows) == sorted(pairs)


def state(path):
  """Returns the whole state of a checkpoint."""
  saved = Checkpoint(path)
  run = run_lib.build_run(saved.meta.config)
  return saved.restore(jax.jit(run.step.init)())


@pytest.mark.slow
def test_branching_with_the_optimizer_kept_is_the_longer_run(
  prepared, tmp_path
):
  same = "schedule.name=wsd schedule.decay_steps=4 checkpoint.every=0"
  same = *same.split(), "checkpoint.at=6", "checkpoint.keep_last=1"
  both = "curriculum=6C+10M steps"
  runs.train(tmp_path / "clm", prepared, *same, "curriculum=16C steps")
  runs.train(tmp_path / "both", prepared, *same, both)
  trunk = tmp_path / "clm" / "checkpoints" / "6"
  # Steps of one and of two objectives compile to different programs.
  assert helpers.equal(state(trunk), state(tmp_path / "both/checkpoints/6"))
  init = f"init.checkpoint={trunk}"
  runs.train(tmp_path / "kept", prepared, *same, both, init)
  ends = [tmp_path / name / "checkpoints/16" for name in ("kept", "both")]
  assert helpers.equal(*map(state, ends))
  reset = (init, "init.optimizer=reset")
  runs.train(tmp_path / "reset", prepared, *same, both, *reset)
  assert not runs.same_params(tmp_path / "reset", tmp_path / "both")


@pytest.mark.slow
@pytest.mark.parametrize(
  "ema, init, words",
  [
    (0.0, "init.step=reset init.optimizer=reset", "with the average of"),
    (0.5, "init.step=reset init.optimizer=reset", "with the average of"),
    (0.5, "init.step=keep", "with the last weights, and their average"),
    (0.0, "init.step=reset init.weights=last", "with the last weights"),
    (0.5, "init.weights=last init.optimizer=reset", "with the last weights"),
  ],
)
def test_a_start_has_the_weights_that_its_run_evaluated(
  prepared, tmp_path, shared, ema, init, words
):
  """Catches a start from other weights than those whose loss is known.

  In the last case, it catches an average that is not that of these weights.
  """
  base = shared("averaged", lambda folder: runs.train(
    folder, prepared, "curriculum=9C steps", "optimizer.ema=0.9"
  ))  # fmt: skip
  steps = "curriculum=11C steps", f"optimizer.ema={ema}"
  settings = *steps, *init.split(), f"init.checkpoint={base}"
  printed = runs.train(tmp_path, prepared, *settings).stdout
  assert f"it kept an average: the run begins {words}" in printed
  assert "(average of the weights)" in repr(load(base))
  before = runs.summary(base)["held_out"][-1]["eval/clm/loss"]
  first = runs.summary(tmp_path)["held_out"][0]["eval/clm/loss"]
  assert (first == pytest.approx(before)) == ("last" not in init)
  # From step 0, it trains the whole curriculum.
  steps = runs.logged(tmp_path, "train/learning_rate")
  assert [*steps] == [*range(1 if "step=reset" in init else 10, 12)]


@pytest.mark.slow
def test_settings_at_a_switch_change_the_run(whole, prepared, tmp_path):
  reset = ("optimizer.reset_at_switch=true", "schedule.restart_at_switch=true")
  runs.train(tmp_path, prepared, *LONG, *reset)
  assert not runs.same_params(tmp_path, whole)
  rates = runs.logged(tmp_path, "train/learning_rate")
  assert rates[20] == 0.0 and rates[22] > 0  # decayed, then warm again


@pytest.mark.parametrize(
  "override, words",
  [
    ("curriculum=4C+16Z", "character 6.*unknown objective 'Z'"),
    ("curriculum=4CLM+M", r"'4CLM\+M', character 2.*did you mean 'C'\?"),
    ("model.max_seq_len=16", "32 tokens.*model.max_seq_len=16"),
    ("train.microbatches=3", "batch_size=4 .*multiple of.* 3"),
    ("mesh.data=2", "mesh.*is for 2 devices, but this machine has 1"),
    ("data.path=/nowhere", "/nowhere.*antlm prepare"),
    ("data.path=", "data.path is not set"),
    ("data.path={whole}/config.json", "config.json .*is a file, not a folder"),
    ("init.checkpoint=/nowhere", "no checkpoint: no such folder"),
    ("eval.objectives=C,Q", "eval.objectives.*Q"),
    ("curriculum=8C steps;train.steps=9", "leave those at 0.*'9C steps'"),
    ("schedule.warmup_steps=99", "do not fit in.*warmup_steps=0.1"),
    (
      "schedule.name=wsd;curriculum=1C steps",
      r"warmup_steps \(1\).*do not fit in 1 steps.*train for more steps",
    ),
    ("log.trace=5", "log.trace='5'.*FIRST:LAST"),
    ("objectives.E.name=mlm", "E and M.*'mlm'"),
    ("train.batch_schedule=99999999999x32@0.5", "batch_size=99999999999"),
    ("eval.watch=clm,mntp", "eval.watch: mntp.*known: clm, mlm"),
    ("eval.patience=2", "eval.patience needs eval.watch.*clm, mlm"),
    (
      "data.random_offset=true;objectives.M.choice=covering",
      "M.choice=covering.*data.random_offset=True",
    ),
    ("eval.pairs=/nowhere", "/nowhere holds no pairs: no such folder"),
    (
      "init.checkpoint={whole};model.width=48;model.dropout=0.1",
      "checkpoints/60 is of another model.*model.width was 32, is 48",
    ),
    (
      "init.checkpoint={whole};optimizer.average=tail;curriculum=70C steps",
      "tail begins before step 60, and .*/60 has no average",
    ),
    ("log.trace=90:9500", "log.trace=90:9500 ends after the run"),
    ("checkpoint.at=5,9500", "checkpoint.at=9500 is never reached: the run"),
    ("checkpoint.words=1M", "1M is never reached.*2.69k words"),
    ("train.max_epochs=0.01", " epochs of the data.*train.max_epochs=0.01"),
    (
      "curriculum=8C steps;train.epochs=0.001",
      "is 8 steps long, but train.steps or train.epochs make it 1",
    ),
  ],
)
def test_bad_settings_are_told_in_one_line(
  prepared, whole, tmp_path, override, words
):
  settings = override.format(whole=whole).split(";")
  args = runs.train_args(tmp_path / "run", prepared, *settings)
  runs.refusal(words, train.main, args)
  assert not (tmp_path / "run").exists()


def test_a_run_mixes_with_nothing_else(prepared, whole, tmp_path):
  """Catches a run among the files of its data, or of another run's step."""
  data = shutil.copytree(prepared, tmp_path / "data")
  step = shutil.copytree(whole / "checkpoints/60", tmp_path / "60")
  assert "holds prepared data: give" in runs.refused_training(data, prepared)
  assert "holds a checkpoint: give" in runs.refused_training(step, prepared)


@pytest.mark.slow
def test_a_tokenizer_without_a_mask_trains_causally_alone(english, tmp_path):
  text = Tokenizer.train(["the dogs rest ."], 300).to_json()
  backend = json.loads(random_models.without_mask(text))
  del backend["model"]["vocab"]["masked"]
  (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
  data = tmp_path / "data"
  words = f"--text={english}/text --output={data} --seq_len=32"
  words += f" --tokenizer={tmp_path}/tokenizer.json"
  runs.main("antlm_jax.commands.prepare", *words.split())
  line = runs.refused_training(tmp_path / "both", data)
  # The removed token leaves a gap, so that antlm cannot add a mask.
  assert "cannot add <mask> to the tokenizer as token 260" in line
  done = runs.train(tmp_path / "causal", data, "curriculum=4C steps")
  assert "clm" in done.stdout and "mlm" not in done.stdout


@pytest.mark.slow
def test_microbatches_may_change_when_a_run_goes_on(copy, whole, prepared):
  """Catches a refusal of the FAQ's remedy for a lack of memory."""
  shutil.rmtree(copy / "checkpoints" / "60")
  less = "train.microbatches=2", "train.loss_chunk=16"
  done = runs.train(copy, prepared, *LONG, *less)
  assert "resuming from step 56" in done.stdout
  before, after = load(whole).params, load(copy).params
  for name, value in before.items():
    np.testing.assert_allclose(after[name], value, atol=1e-5)


def test_what_is_evaluated_may_change_in_a_finished_run(copy, prepared):
  """Catches C's loss that counts as that of all objectives."""
  done = runs.train(copy, prepared, *LONG, "eval.objectives=C,N")
  # The output includes earlier evaluations of other objectives.
  assert "mlm" in done.stdout and "nan" not in done.stdout
  last = metrics.by_step(metrics.read_records(copy))[60]
  assert {"eval/clm/loss", "eval/mntp/loss"} <= last.keys()


@pytest.mark.slow
def test_other_held_out_rows_are_said(copy, prepared, tmp_path):
  """Catches curves and a best step that mix the losses of two texts."""
  shutil.rmtree(copy / "checkpoints" / "60")
  done = runs.train(copy, prepared, *LONG, "eval.rows=4")
  assert "warning: the run measured other held-out rows before" in done.stdout
  done = runs.train(copy, prepared, *LONG, "eval.rows=4")
  assert "held-out rows before" not in done.stdout


def test_a_run_whose_checkpoints_are_gone_keeps_its_records(copy, prepared):
  """Catches a run that begins anew over the metrics of another."""
  before = (copy / "metrics.jsonl").read_bytes()
  shutil.rmtree(copy / "checkpoints")
  args = runs.train_args(copy, prepared, *LONG, "schedule.peak_lr=0.5")
  for link in (False, True):
    if link:  # to a disk that is not mounted
      (copy / "checkpoints").symlink_to(copy / "none")
    line = runs.refused("antlm_jax.commands.train", *args)
    assert "has ended, but no checkpoint: restore checkpoints/" in line
  assert (copy / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
  "name, content",
  [("README.md", "# A project"), ("config.json", '{"model_type": "llama"}')],
)
def test_a_run_replaces_no_file_of_others(tmp_path, prepared, name, content):
  """Catches a project or a model of transformers that is the workdir."""
  (tmp_path / name).write_text(content)
  line = runs.refused_training(tmp_path, prepared, *LONG)
  assert f"has a {name} of no run" in line
  assert {path.name for path in tmp_path.iterdir()} <= {name, ".lock"}
  assert (tmp_path / name).read_text() == content


def test_a_run_that_goes_on_has_not_ended(copy, prepared):
  """Catches a summary that makes an interrupted run count as finished."""
  shutil.rmtree(copy / "checkpoints" / "60")

  class Broken(hooks.Hook):
    def after_step(self, trainer, done_step):
      raise ArithmeticError

  assert train.done(runs.train_args(copy, prepared, *LONG))
  with pytest.raises(ArithmeticError):
    loop.train_run(runs.settings(prepared, *LONG), copy, [Broken()])
  assert not (copy / "summary.json").exists()
  assert not train.done(runs.train_args(copy, prepared, *LONG))


@pytest.mark.parametrize("sign", "[]\\")
def test_a_path_that_loses_checkpoints_is_refused(prepared, tmp_path, sign):
  """Catches checkpoints that orbax saves and nobody can read."""
  run = tmp_path / f"a{sign}" / "run"
  line = runs.refused_training(run, prepared)
  assert f"under a path with {sign}: rename the folder" in line
  assert not run.parent.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
  "by", ["pipe", pytest.param("terminal", marks=pytest.mark.nightly)]
)
def test_a_run_that_nobody_watches_saves_and_ends(prepared, tmp_path, by):
  """Catches work that is lost with `| head`, or with a closed terminal."""
  words = "curriculum=20000C steps", "eval.every=1", "checkpoint.every=0"
  args = runs.train_args(tmp_path / "run", prepared, *words, "eval.rows=4")
  pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
  command = runs.command("antlm_jax", "train", *args)
  with subprocess.Popen(command, cwd=runs.ROOT, text=True, **pipes) as process:
    while not re.match("held out after step [1-9]", process.stdout.readline()):
      assert process.poll() is None
    if by == "pipe":
      process.stdout.close()
    else:
      process.send_signal(signal.SIGHUP)
      process.stdout.read()
    process.stderr.read()
  assert process.returncode == 75
  assert load(tmp_path / "run").step > 0


def test_a_workdir_of_another_config_is_refused(copy, prepared):
  line = runs.refused_training(copy, prepared, *LONG, "schedule.peak_lr=0.5")
  assert "schedule.peak_lr was 0.003, is 0.5" in line
  kept = json.loads((copy / "config.json").read_text())
  assert kept["schedule"]["peak_lr"] == 0.003


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_before_any_save(
  prepared, tmp_path
):
  args = "schedule.peak_lr=1e30 schedule.warmup_steps=0 optimizer.clip=0"
  line = runs.refused_training(tmp_path, prepared, *LONG, *args.split())
  assert "stopped before saving" in line and "at step" in line
  assert "there is no good checkpoint" in line
  assert not (tmp_path / "checkpoints").exists()
  # Without a checkpoint, a run may change its settings.
  runs.train(tmp_path, prepared, "curriculum=4C steps")


def test_a_second_training_on_a_workdir_is_refused(copy, prepared, tmp_path):
  args = runs.train_args(copy, prepared, *LONG)
  with saving.lock_workdir(copy):
    before = snapshot(copy)
    line = runs.refused("antlm_jax.commands.train", *args)
    assert snapshot(copy) == before
  for word in (f"{copy} is in use by process", str(os.getpid()), "since 20"):
    assert word in line
  with (
    pytest.raises(UserError, match="in use"),
    saving.lock_workdir(tmp_path / "a"),
  ):
    saving.lock_workdir(tmp_path / "a").__enter__()
  assert not (tmp_path / "a").exists()


def test_arrays_of_another_model_are_named(whole):
  step = checkpoint.checkpoint_steps(whole)[60]
  with pytest.raises(checkpoint.Unreadable) as told:
    Checkpoint(step).read({"counters": {"step": None, "other": None}})
  assert str(told.value) == (
    f"{step} is of another model or optimizer: it has no counters/other"
  )
  with pytest.raises(checkpoint.Unreadable) as told:
    Checkpoint(step).read({"optimizer": {"0/count": None}})
  assert "has no optimizer/0/count; init.optimizer=reset" in str(told.value)


@pytest.mark.slow
def test_a_damaged_config_and_junk_in_the_metrics_do_not_matter(
  whole, copy, prepared
):
  shutil.rmtree(copy / "checkpoints" / "60")
  (copy / "config.json").write_text('{"model": ')
  with (copy / "metrics.jsonl").open("a") as file:
    file.write('\0\0\n[1]\n{"steps": 3}\n{"step": "x"}\nnull\n{"step": 5')
  runs.train(copy, prepared, *LONG)
  assert runs.same_params(copy, whole)
  assert pods.losses(copy) == pods.losses(whole)
  assert json.loads((copy / "config.json").read_text())["seed"] == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
  "part, size, why",
  [
    ("params", 100, "its files are damaged"),
    ("optimizer", None, "its files are damaged, or not all there"),
    ("meta", 0, "Expecting value"),
    ("meta", 2, "it is not what was saved"),  # {}
  ],
)
def test_a_damaged_checkpoint_is_told_in_a_line(part, size, why, copy):
  newest, largest = copy / "checkpoints" / "60", runs.largest_file
  meta = Checkpoint(copy / "checkpoints" / "56").meta
  if size is None:
    shutil.rmtree(newest / part)
  elif size == 2:
    largest(newest / part).write_text("{}")
  else:
    os.truncate(largest(newest / part), size)
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
    jax.eval_shape(run_lib.build_run(meta.config).step.init),
  )
  saver = saving.RunCheckpoints(copy, meta, sections.Saving())
  state, _, (note, then) = saver.read_newest(like, check=lambda meta: None)
  assert int(state.step) == 56 and then == "resuming from step 56"
  assert f"{newest}: {part}: {why}" in note and "kept as 60.unreadable" in note
  gc.collect()  # orbax's dropped reads must end without a warning


@pytest.mark.slow
def test_a_step_that_is_not_whole_is_set_aside(copy, whole, prepared):
  """Catches a run that ends in orbax's StepAlreadyExistsError every time: orbax
  counts a folder without metadata as a step, and antlm does not."""
  folder = copy / "checkpoints"
  shutil.rmtree(folder / "60" / "meta")
  (folder / "58" / "params").mkdir(parents=True)
  (folder / "59").write_text("")
  done = runs.train(copy, prepared, *LONG)
  for step in (58, 59, 60):
    note = f"{step} is not whole: it has no meta: skipped, and kept as"
    assert f"{note} {step}.unreadable" in done.stdout
    assert (folder / f"{step}.unreadable").exists()
  assert "resuming from step 56" in done.stdout
  assert set(checkpoint.checkpoint_steps(copy)) == {56, 60}
  assert runs.same_params(copy, whole)


@pytest.mark.slow
def test_a_full_disk_is_told_and_costs_no_checkpoint(prepared, small_disk):
  disk, keep = small_disk(3072), (*LONG, "checkpoint.keep_last=20")
  args = runs.train_args(disk / "run", prepared, *keep)
  line = runs.error_of(runs.run("antlm_jax", "train", *args))
  assert "No space left" in line and "last good checkpoint is step" in line
  assert load(disk / "run").step == int(line.rpartition("step ")[2])


@pytest.mark.slow
def test_a_file_in_the_checkpoints_place_ends_the_run(prepared, tmp_path):
  run = tmp_path / "run"
  run.mkdir()
  (run / "checkpoints").write_text("")
  args = runs.train_args(run, prepared, "curriculum=1C steps", "eval.rows=0")
  line = runs.error_of(runs.run("antlm_jax", "train", *args))
  folder = run / "checkpoints"
  assert f"cannot write step 1 under {folder}: File exists" in line
  assert line.endswith("; the last good checkpoint is none")


IMPORTING = """
import os, signal, sys
from antlm_jax import cli
from antlm_jax.commands import train

class Signalled:
  def find_spec(self, name, *rest):
    if name == "antlm_jax.training.loop":
      os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Signalled())
cli.run_command(train.main)
"""


@pytest.mark.slow
def test_told_to_end_during_imports_it_is_to_be_run_again(prepared, tmp_path):
  args = runs.train_args(tmp_path / "run", prepared)
  done = runs.run_words([sys.executable, "-W", "error", "-c", IMPORTING, *args])
  assert done.returncode == 75, done.stderr
  assert done.stderr == "stopped by a signal: run the same command again\n"
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_programs_are_kept_and_the_run_is_the_same(
  prepared, tmp_path, monkeypatch
):
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  short = ("curriculum=4C steps", "model.layers=1", "eval.objectives=C")
  how = (prepared, *short)
  for name in "ab":
    runs.train(tmp_path / name, *how, devices=1)
  kept = tmp_path / "cache" / "antlm_jax" / "compiled"
  assert any(path.name.startswith("jit_update") for path in kept.rglob("*"))
  assert pods.losses(tmp_path / "a") == pods.losses(tmp_path / "b")
  assert runs.same_params(tmp_path / "a", tmp_path / "b")


LOADING = """
import sys
import jax
import antlm_jax

jax.jit(lambda x: x + 1)(1)  # before a cache folder is set
antlm_jax.load(sys.argv[1])
"""


@pytest.mark.slow
def test_loading_in_python_keeps_its_programs(whole, tmp_path, monkeypatch):
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
  runs.run_code(LOADING, str(whole), devices=1)
  assert list((tmp_path / "antlm_jax" / "compiled").rglob("jit_*"))


NO_HOME = """
import os
import pwd
import sys

import antlm_jax

def unknown(uid):
  raise KeyError(uid)

pwd.getpwuid = unknown
if sys.argv[2]:
  os.environ["HOME"] = sys.argv[2]
else:
  del os.environ["HOME"]
antlm_jax.load(sys.argv[1])
print(os.path.exists("~"))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("home", ["", "/dev/null/home"])
def test_a_container_without_a_home_loads(whole, tmp_path, monkeypatch, home):
  """Catches a traceback where HOME is unset, or a file, and no user is known,
  and a folder named ~."""
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
  monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
  assert runs.run_code(NO_HOME, str(whole), home, devices=1) == "False"
