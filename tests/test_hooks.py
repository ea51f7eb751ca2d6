"""Hooks and metrics of the train step."""

import collections
import dataclasses
import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from antlm_jax import config as config_lib
from antlm_jax.commands import train as command
from antlm_jax.errors import Stopped
from antlm_jax.inference import pairs
from antlm_jax.inference.model import load
from antlm_jax.inference.pairs import read_minimal_pairs
from antlm_jax.objectives.batch import BatchLayout
from antlm_jax.objectives.objective import OBJECTIVES
from antlm_jax.page.hook import Page
from antlm_jax.runtime import chips
from antlm_jax.training import checkpoint, flops, held_out, hooks, loop, metrics
from antlm_jax.training import run as run_lib
from antlm_jax.training.step import TrainStep
from tests import helpers, runs

# All runs share one compiled program: same objective, same shapes.
SMALL = "model.layers=1 log.every=5 eval.objectives=C eval.every=4"
SMALL += " checkpoint.every=4 log.writers="
SMALL = ("curriculum=12C steps", *SMALL.split())


@pytest.fixture(scope="module")
def train(prepared):
  """Trains in this process."""

  def go(workdir, *given):
    loop.train_run(runs.settings(prepared, *SMALL), workdir, [*given, Page()])

  return go


class Largest(hooks.Evaluator):
  """An evaluator."""

  prefixes = ("eval/largest",)

  def measure(self, trainer):
    leaves = trainer.state.params.values()
    return {"eval/largest": max(float(abs(leaf).max()) for leaf in leaves)}


class Seen(hooks.Hook):
  """Records its calls, and sends SIGTERM after a step."""

  def __init__(self, ends_after=-1):
    self.ends_after, self.calls = ends_after, []

  def start(self, trainer):
    self.calls.append(("start", trainer.step))

  def after_step(self, trainer, done_step):
    assert isinstance(done_step.metrics["total_loss"], np.generic | np.ndarray)
    self.calls.append(("after", done_step.step))
    if done_step.step == self.ends_after:
      os.kill(os.getpid(), signal.SIGTERM)

  def due(self, trainer):
    return trainer.step % 5 == 0

  def run(self, trainer):
    assert int(trainer.state.step) == trainer.step
    self.calls.append(("run", trainer.step))

  def finish(self, trainer):
    self.calls.append(("finish", trainer.step))

  def end(self):
    self.calls.append(("end",))


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
  """A run with a hook, an evaluator and a metric, and the hook's calls."""
  workdir, seen = tmp_path_factory.mktemp("whole") / "run", Seen()
  update = TrainStep.update

  def with_metric(self, state, batch):
    after, found = update(self, state, batch)
    moved = jnp.abs(after.params["norm/scale"] - state.params["norm/scale"])
    return after, found | {"moved": moved.max()}

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(TrainStep, "update", with_metric)
    train(workdir, seen, Largest())
  return workdir, seen.calls


@pytest.mark.slow
def test_a_hook_is_called_around_the_steps(whole):
  _, calls = whole
  assert calls[0] == ("start", 0) and calls[-1] == ("end",)
  assert [c[1] for c in calls if c[0] == "after"] == list(range(1, 13))
  assert [c[1] for c in calls if c[0] == "run"] == [5, 10]
  # A due hook runs after the results of its step are known.
  for step in (5, 10):
    assert calls.index(("run", step)) == calls.index(("after", step)) + 1


def test_a_wait_for_data_is_said_once_a_minute(prepared, tmp_path, monkeypatch):
  """Catches a run that waits for its batches in silence."""
  monkeypatch.setattr(loop, "_SLOW_BATCH", -1.0)
  printed = runs.train(tmp_path, prepared, *SMALL).stdout
  assert printed.count("for a batch: try data.threads=4") == 1


def test_an_evaluator_is_recorded_shown_and_summed_up(whole):
  workdir, _ = whole
  found = runs.logged(workdir, "eval/largest")
  assert list(found) == [0, 4, 8, 12] and len(set(found.values())) == 4
  rows = runs.summary(workdir)["held_out"]
  assert [row["eval/largest"] for row in rows] == [found[0], found[12]]
  assert all("eval/clm/loss" in row for row in rows)


def test_every_scalar_of_the_step_is_recorded(whole):
  workdir, _ = whole
  logged = [r for r in metrics.read_records(workdir) if "train/moved" in r]
  assert [r["step"] for r in logged] == [5, 10, 12]
  names = ("clm/loss", "total_loss", "grad_norm", "param_norm", "learning_rate")
  for record in logged:
    assert record["train/moved"] >= 0
    assert all(f"train/{name}" in record for name in names)


@pytest.mark.slow
def test_a_run_that_resumes_logs_the_mean_of_all_its_steps(
  whole, train, tmp_path, capsys
):
  ended = Seen(ends_after=7)
  with pytest.raises(Stopped) as stopped:
    train(tmp_path / "run", ended)
  assert stopped.value.saved and stopped.value.status == 75
  (step,) = (call[1] for call in ended.calls if call[0] == "finish")
  assert step in (8, 9)  # the device is a step ahead of the host
  assert list(runs.logged(tmp_path / "run", "train/clm/loss")) == [5]
  train(tmp_path / "run")
  # The time is that of this start, and so are its steps.
  assert f"done: {12 - step} of 12 steps in" in capsys.readouterr().out
  ours, theirs = tmp_path / "run", whole[0]
  assert runs.logged(ours, "train/clm/loss") == runs.logged(
    theirs, "train/clm/loss"
  )
  assert runs.same_params(tmp_path / "run", whole[0])


@pytest.mark.slow
def test_a_run_that_gets_no_better_ends_and_keeps_its_best_step(
  prepared, tmp_path, capsys
):
  run = tmp_path / "run"

  def train(patience):
    settings = f"eval.watch=clm eval.patience={patience} checkpoint.keep_last=1"
    settings = *settings.split(), "schedule.peak_lr=0.02"
    settings += ("curriculum=8C+52M steps",)
    done = runs.train(run, prepared, *SMALL, *settings)
    return runs.summary(run), done.stdout

  summary, printed = train(3)
  end, best = summary["steps"], summary["best"]["step"]
  # Half of the held-out rows selects the step, the other half gives its loss.
  every, losses, others = (
    runs.logged(run, f"eval/clm/loss{half}")
    for half in ("", "/choose", "/report")
  )
  assert summary["best"]["loss"] == others[best]
  for step, loss in every.items():
    low, high = sorted((losses[step], others[step]))
    assert low < loss < high
  # The run ends after three losses in a row without a new minimum.
  lowest = [min(list(losses.values())[: i + 1]) for i in range(len(losses))]
  assert lowest[-4] == lowest[-1] == losses[best] != lowest[-5]
  assert end == max(losses) < 60 and best == end - 12
  assert set(checkpoint.checkpoint_steps(run)) == {best, end}
  assert f"ended after step {end}: clm has not improved in 3" in printed
  assert f"checkpoints/{end}, checkpoints/{best} (best)" in printed
  rows = {row["step"] for row in summary["held_out"]}
  assert rows == {0, 8, best, end}
  # A command that takes the run's newest step names the better step.
  said = f"By eval.watch, step {best} is better: {run}/checkpoints/{best}"
  capsys.readouterr()
  assert load(run).step == end and said in capsys.readouterr().out
  assert load(load(run, best).path).step == best
  assert not capsys.readouterr().out
  # So does a run that starts from it.
  start = f"init.checkpoint={run}", "init.step=reset"
  printed = runs.train(tmp_path / "branch", prepared, *SMALL, *start).stdout
  assert printed.count(said) == 1
  # The same command ends there again; with more patience, training continues.
  again, printed = train(3)
  assert again == summary and f"ended after step {end}" in printed
  longer, _ = train(5)
  assert longer["steps"] > end and longer["best"] == summary["best"]
  assert best in checkpoint.checkpoint_steps(run)


@pytest.mark.slow
@pytest.mark.parametrize(
  "before, after", [("", "eval.rows=8"), ("clm", "eval.rows=4")]
)
def test_a_watch_that_changes_chooses_a_step_that_is_kept(
  prepared, whole, tmp_path, before, after
):
  """Catches a best step that is gone, or whose loss is on other rows."""
  settings = f"init.checkpoint={whole[0]} init.step=reset schedule.peak_lr=0.5"
  settings = *SMALL, *settings.split(), "checkpoint.keep_last=1"
  first = runs.settings(prepared, *settings, f"eval.watch={before}")
  with pytest.raises(Stopped):
    loop.train_run(first, tmp_path, [Seen(ends_after=7)])
  stopped = max(checkpoint.checkpoint_steps(tmp_path))
  runs.train(tmp_path, prepared, *settings, "eval.watch=clm", after)
  # The loss was lowest at step 0.
  best = runs.summary(tmp_path)["best"]["step"]
  assert stopped <= best and best in checkpoint.checkpoint_steps(tmp_path)


@pytest.mark.slow
def test_a_run_that_patience_ends_logs_its_last_steps(
  prepared, whole, tmp_path
):
  """Catches up to log.every steps without a loss, and a best step unsaved."""
  settings = f"init.checkpoint={whole[0]} init.step=reset eval.watch=clm"
  settings += " eval.patience=2 schedule.peak_lr=0.5 log.every=100"
  run, settings = tmp_path / "run", (*SMALL, *settings.split())
  done = runs.train(run, prepared, *settings)
  summary = runs.summary(run)
  assert (summary["steps"], summary["best"]["step"]) == (8, 0)
  assert list(runs.logged(run, "train/clm/loss")) == [8]
  assert "checkpoints/8, checkpoints/0 (best)" in done.stdout
  assert {0, 8} <= {*checkpoint.checkpoint_steps(run)}
  again = runs.train(run, prepared, *settings)
  assert "ended after step 8" in again.stdout
  assert runs.same_params(whole[0], run / "checkpoints/0")


@pytest.mark.slow
def test_a_signal_in_the_last_evaluation_leaves_the_run_unfinished(
  train, whole, tmp_path
):
  """Catches a summary with the loss of an evaluation before the last."""
  run = tmp_path / "run"
  with pytest.raises(Stopped):
    train(run, Seen(ends_after=12))
  assert 12 in checkpoint.checkpoint_steps(run)
  assert not (run / metrics.SUMMARY).exists()
  train(run)
  assert runs.summary(run)["modes"] == runs.summary(whole[0])["modes"]


def test_a_batch_that_grows_has_the_work_of_its_filled_rows(prepared):
  """Catches a head that shrinks twice, and plans of the smallest batch."""
  settings = "curriculum=100C steps", "train.batch_start=0.25"
  settings += ("train.batch_size=64", "train.microbatches=4")
  run = run_lib.build_run(runs.settings(prepared, *SMALL, *settings))
  (kind,) = run.batch_kinds(evaluations=False)
  whole = flops.train_step(run.model, kind.batch)
  for step in (0, 50, 99):
    share = run.order.batch_size(step) / 64
    work = flops.train_step(run.model, run.batches[step], share)
    # Padding differs between the rows.
    assert work == pytest.approx(share * whole, rel=0.05)
  assert run.order.batch_size(0) == 16
  assert (kind.steps, kind.batches) == (
    100,
    run.order.slots_between(0, 100) / 64,
  )


@pytest.mark.slow
def test_a_held_out_loss_counts_targets_by_their_weights(prepared, tmp_path):
  settings = "curriculum=10C:D=1:1 steps", "eval.objectives=C,D"
  settings += ("train.z_loss=0.1",)  # not a part of held-out losses
  runs.train(tmp_path, prepared, *SMALL, *settings)
  loaded = load(tmp_path)
  source = run_lib.build_run(loaded.config).evaluations["diffusion"][""]
  lost = weights = 0.0
  for step in range(len(source)):
    batch = source[step]
    scores = helpers.target_scores(loaded.model, loaded.params, batch)
    lost += (batch.weights * np.subtract(*scores)).sum()
    weights += batch.weights.sum()
  assert len(np.unique(batch.weights)) > 2
  *_, found = runs.logged(tmp_path, "eval/diffusion/loss").values()
  assert found == pytest.approx(lost / weights, rel=1e-5)
  # Each row has its loss, in a list for each half whose mean is that loss.
  *_, rows = metrics.read_rows(tmp_path)
  assert {len(rows[f"{x}/choose"]) for x in ("clm", "diffusion")} == {
    -(-source.held_out // 2)
  }
  for half in metrics.HALVES:
    *_, found = runs.logged(tmp_path, f"eval/diffusion/loss/{half}").values()
    mean = np.mean(rows[f"diffusion/{half}"])
    assert mean == pytest.approx(found, abs=1e-3)


def test_batches_of_any_size_measure_the_same(prepared):
  """Masks and halves belong to rows, not to batches and their parts."""
  objectives = {"N": dataclasses.replace(OBJECTIVES["N"], choice="covering")}
  settings = "eval.objectives=C,M,N,D", "eval.rows=13"
  config = runs.settings(prepared, *settings)
  sets = {"": helpers.FakeRows(31)}

  def measured(layout):
    training = helpers.source(layout=layout, objectives=objectives)
    sources = held_out.held_out_sources(config, training, sets)
    out = {}
    for name, of_sets in sources.items():
      halves = out[name] = collections.Counter(), collections.Counter()
      for number in range(len(of_sets[""])):
        batch = of_sets[""][number]
        weighted = batch.weights > 0
        targets = zip(
          batch.targets[weighted], batch.weights[weighted], strict=True
        )
        halves[number % 2].update(targets)
    return out

  expected = measured(BatchLayout(64))
  for halves in expected.values():
    assert all(half.total() > 5 for half in halves)
  for layout in ((2,), (8, 4), (16, 1, 4), (64, 1, 16), (12, 2, 3)):
    assert measured(BatchLayout(*layout)) == expected, layout


@pytest.mark.slow
def test_a_hook_that_fails_ends_the_run_and_the_other_hooks(train, tmp_path):
  class Broken(hooks.Hook):
    def after_step(self, trainer, done_step):
      raise ArithmeticError

  seen = Seen()
  with pytest.raises(ArithmeticError):
    train(tmp_path / "run", seen, Broken())
  assert seen.calls[-1] == ("end",)


@pytest.mark.slow
def test_pairs_are_scored_while_training(english, prepared, tmp_path):
  workdir = tmp_path / "run"
  settings = (f"eval.pairs={english / 'pairs'}", "curriculum=4C+4M steps")
  done = runs.train(workdir, prepared, *SMALL, *settings)
  # The checkpoint of the same step gives the same scores.
  loaded, read = load(workdir), read_minimal_pairs(english / "pairs")
  row = runs.summary(workdir)["held_out"][-1]
  for mode in ("causal", "mlm"):
    found = runs.logged(workdir, f"eval/pairs/{mode}")
    assert list(found) == [0, 4, 8]
    assert found[8] == pytest.approx(pairs.pair_accuracy(loaded, read, mode))
    assert row[f"eval/pairs/{mode}"] == found[8]
  assert "pairs after step 8: causal" in done.stdout
  assert "pairs mlm" in done.stdout


@pytest.mark.sample(1)
@pytest.mark.parametrize(
  "step, name, good, advice",
  [
    (1, "total_loss", None, "The first step already had it"),
    (1, "param_norm", None, "Try a lower schedule.peak_lr"),
    (6, "grad_norm", 4, "Try a lower schedule.peak_lr"),
  ],
)
def test_the_advice_fits_what_blew_up(
  step, name, good, advice, train, tmp_path, monkeypatch
):
  check = loop.Trainer._check_metrics

  def blown_up(trainer, done_step):
    if done_step.step == step:
      done_step.metrics[name] = np.float32(np.nan)
    check(trainer, done_step)

  monkeypatch.setattr(loop.Trainer, "_check_metrics", blown_up)
  line = runs.told(train, tmp_path / "run")
  assert f"{name} is nan at step {step}: stopped before saving" in line
  assert advice in line
  last = f"checkpoint is step {good}" if good else "there is no good checkpoint"
  assert last in line


def test_a_config_that_no_command_has_loaded_is_checked(prepared, tmp_path):
  made = config_lib.changes()
  made.data.path, made.optimizer.b1 = str(prepared), 2.0
  runs.refusal(r"optimizer\.b1=2", command.train, made, tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_log_line_has_the_speed_of_its_own_steps(prepared, tmp_path):
  """Catches a last line of one step that leaves out the step's time.

  Also a multiple that is kept only if checkpoint.every saves it.
  """
  settings = "log.every=11", "eval.every=0", "checkpoint.keep_every=5"
  settings += ("checkpoint.keep_last=1",)
  runs.train(tmp_path / "run", prepared, *SMALL, *settings)
  found = runs.logged(tmp_path / "run", "train/tokens_per_second")
  assert list(found) == [11, 12]
  assert found[12] < 2 * found[11], found
  assert [*checkpoint.checkpoint_steps(tmp_path / "run")] == [5, 10, 12]


def test_a_known_chip_gives_the_share_of_its_peak(
  train, tmp_path, monkeypatch, capsys
):
  """Catches operations that are not those of the run's own batches."""
  peak, works = 1e12, []
  monkeypatch.setattr(hooks.chips, "chip_of", lambda _: chips.Chip(peak))

  class Count(hooks.Hook):
    def after_step(self, trainer, done_step):
      of = flops.train_step(trainer.run.model, done_step.batch)
      works.append(of / done_step.batch.inputs.size)

  train(tmp_path / "run", Count())
  found = runs.logged(tmp_path / "run", "train/mfu")
  speed = runs.logged(tmp_path / "run", "train/tokens_per_second")
  assert list(found) == list(speed) and 12 in found
  for step, share in found.items():
    assert share == pytest.approx(np.mean(works) * speed[step] / peak, rel=0.05)
  # The end says the median, which `--speed` compares with the forecast.
  median = np.median([*found.values()])
  assert runs.summary(tmp_path / "run")["mfu"] == median
  assert f"MFU {median:.1%}" in capsys.readouterr().out
