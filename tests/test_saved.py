"""Models that are kept: checkpoints of weights alone, and of a task's head."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from antlm_jax import config as config_lib
from antlm_jax import models, units
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.evals import finetune
from antlm_jax.evals.finetuning import glue, loop, saved, trial
from antlm_jax.evals.finetuning.classification import Classifier, Options
from antlm_jax.evals.finetuning.loop import Run
from antlm_jax.evals.finetuning.task import Task
from antlm_jax.inference.model import FineTuned, Loaded, load, write
from antlm_jax.training import checkpoint
from antlm_jax.training.checkpoint import Checkpoint
from antlm_jax.training.step import TrainState
from tests import random_models, runs
from tests.helpers import equal
from tests.test_finetune import QUICK, STEP, cola, sentences, toy
from tests.test_glue import line

run = random_models.run(layers=1, tied=False)


@pytest.fixture(scope="module")
def foreign(prepared, tmp_path_factory):
  """A workdir of one step, written of NumPy arrays, and these."""
  workdir = tmp_path_factory.mktemp("foreign")
  config = config_lib.load(runs.QUICK)
  tokenizer = Tokenizer.from_json((prepared / "tokenizer.json").read_text())
  model = models.build(config.model, tokenizer.vocab_size)
  params = jax.device_get(jax.jit(lambda: model.init(3))())
  meta = checkpoint.Meta(config, tokenizer, "eos", "nothing of ours")
  path = write(workdir / "checkpoints" / "5", 5, params, meta)
  assert path == workdir / "checkpoints" / "5"
  return workdir, params


def test_weights_alone_are_a_checkpoint(foreign):
  workdir, params = foreign
  assert list(checkpoint.steps(workdir)) == [5]
  found = load(workdir)
  assert equal(found.params, params)
  assert (found.step, found.boundary, found.task) == (5, "eos", None)
  size = units.quantity(found.model.size)
  assert repr(found) == f"<llama, {size} parameters, step 5, {workdir}>"
  # By content: not the place, but the weights.
  assert found.digest == checkpoint.digest(checkpoint.sums(params))
  other = params | {"norm/scale": params["norm/scale"] + 1}
  assert found.digest != checkpoint.digest(checkpoint.sums(other))
  assert Checkpoint(found.path).meta.data == "nothing of ours"
  zeros = jax.tree.map(jnp.zeros_like, found.params)
  like = TrainState(jnp.int32(0), zeros, {"mu": jnp.ones(2)}, zeros)
  state = Checkpoint(found.path).restore(like, with_optimizer=False)
  assert equal(state.params, params) and equal(state.ema, params)
  assert state.step == 5 and equal(state.opt_state, like.opt_state)


@pytest.mark.slow
def test_an_absent_optimizer_cannot_be_kept(foreign, prepared, tmp_path):
  args = runs.train_args(tmp_path, prepared, f"init.checkpoint={foreign[0]}")
  message = runs.error_of(runs.run("antlm_jax.train", *args))
  assert str(foreign[0]) in message and "no optimizer's state" in message
  assert "init.optimizer=reset" in message


def test_nothing_is_written_over_or_halfway(foreign, tmp_path, monkeypatch):
  workdir, params = foreign
  path = workdir / "checkpoints" / "5"
  meta = Checkpoint(path).meta
  before = load(path).params
  assert "already exists" in runs.told(write, path, 6, params, meta)
  assert equal(load(path).params, before)
  full = shutil._ntuple_diskusage(10, 9, 1)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
  with pytest.raises(UserError, match="No space left on device"):
    write(tmp_path / "full", 5, params, meta)
  assert not list(tmp_path.iterdir())


GRID = "--lrs=1e-9,3e-3,1e-3"  # as many as in other tests: compiled once


def recomputed(folder) -> Loaded:
  """Loads a kept model, which must predict what is written beside it."""
  model = load(folder / "model")
  written = json.loads((folder / "predictions.json").read_text())
  written = written["glue"]["cola"]["predictions"]
  texts = sentences(len(written), 1)[0]
  logits = saved.outputs(model, [(text,) for text in texts])
  assert logits.shape == (len(written), 2)
  assert logits.argmax(axis=1).tolist() == [one["pred"] for one in written]
  classes = saved.predict(model, texts)
  assert classes == [str(one["pred"]) for one in written]
  return model


@pytest.mark.slow
def test_the_best_model_is_kept(run, loaded, tmp_path):
  more = f"--output={tmp_path}", "--head=plain", "--pool=mean", GRID
  how = "--attention=causal", "--dropout=0.2", "--save"
  finetune.main(cola(run, tmp_path, *more, *how))
  folder = tmp_path / f"cola/{STEP}-causal"
  model = recomputed(folder)
  task = model.task
  head = {"labels": ["0", "1"], "pool": "mean", "dropout": 0.2}
  head |= {"norms": False, "last_norm": False}
  expected = FineTuned("cola", "causal", "classifier", head, {})
  assert dataclasses.replace(task, params={}) == expected
  shapes = {name: value.shape for name, value in task.params.items()}
  width = model.model.config.width
  expected = {"dense/kernel": (width, width), "dense/bias": (width,)}
  expected |= {"classes/kernel": (width, 2), "classes/bias": (2,)}
  assert shapes == expected
  # The encoder: what was not trained is as it was, all else is not.
  assert model.params.keys() == loaded.params.keys()
  same = {n for n, p in loaded.params.items() if equal(p, model.params[n])}
  assert same == {"head/kernel"}
  assert (model.step, model.boundary) == (loaded.step, loaded.boundary)
  assert model.config == loaded.config
  assert model.tokenizer.to_json() == loaded.tokenizer.to_json()
  meta, before = (Checkpoint(m.path).meta for m in (model, loaded))
  assert meta.data == before.data
  request = json.loads((folder / "summary.json").read_text())["request"]
  assert request["head"]["norms"] is False and "save" not in request


def test_pairs_and_words_for_classes(loaded, tmp_path):
  for split in ("train", "valid"):
    (tmp_path / f"mnli.{split}.jsonl").write_text(line("mnli", 0))
  options = Options("last", "plain")
  task = glue.make(tmp_path, "mnli", "bidirectional", options)
  head = task.head.init(jax.random.key(0), loaded.model.config.width)
  params = trial.joined(loaded.params, head)
  saved.save(tmp_path, loaded, task, "bidirectional", params)
  model = load(tmp_path / "model")
  assert saved.head(model) == task.head
  assert task.head.labels == ("entailment", "neutral", "contradiction")
  assert equal(model.params, loaded.params) and equal(model.task.params, head)
  pairs = [("p", "h"), ("Tom sat", "the dogs rest near the hills")]
  both = saved.outputs(model, pairs)
  assert both.shape == (2, 3)
  alone = [saved.outputs(model, [pair])[0] for pair in pairs]
  np.testing.assert_allclose(both, alone, rtol=1e-4, atol=1e-5)
  swapped = saved.outputs(model, [pair[::-1] for pair in pairs])
  assert np.abs(swapped - both).max() > 1e-3


def test_only_a_known_head_has_outputs(loaded):
  line = runs.told(saved.outputs, loaded, [("the dogs",)])
  assert "is not fine-tuned" in line and str(loaded.path) in line
  for kind, settings, message in (
    ("other", {}, "a head of the kind 'other', which is not one of classifier"),
    ("classifier", {"size": 2}, "of another version: .*'size'"),
  ):
    task = FineTuned("a", "causal", kind, settings, {})
    with pytest.raises(UserError, match=message):
      saved.predict(dataclasses.replace(loaded, task=task), [("the dogs",)])


def test_one_text_is_no_list(loaded):
  head = Classifier(("a", "b"), "mean", norms=False)
  own = head.init(jax.random.key(0), loaded.model.config.width)
  task = FineTuned("a", "causal", head.kind, head.settings, own)
  model = dataclasses.replace(loaded, task=task)
  texts = ["the dogs", "Tom sat near the hills"]
  found = saved.predict(model, texts)
  alone = saved.outputs(model, [(text,) for text in texts])
  assert found == [head.labels[i] for i in alone.argmax(axis=1)]
  with pytest.raises(UserError, match="'the dogs' is one text: give a list"):
    saved.predict(model, texts[0])
  task = FineTuned("a", "causal", "towers", {"temperature": 1.0}, {})
  embedder = dataclasses.replace(loaded, task=task)
  assert saved.outputs(embedder, texts).shape[0] == 2
  with pytest.raises(UserError, match=r"`saved.outputs` returns their vectors"):
    saved.predict(embedder, texts)


def backwards(task: Task) -> Task:
  """A task that is the better done the worse."""

  def errors(found, labels):
    return float(np.mean(np.asarray(found) != np.asarray(labels)))

  how = {"metrics": {"errors": errors}, "main_metric": "errors", "best_by": ""}
  return dataclasses.replace(task, **how)


@pytest.mark.slow
def test_parameters_are_those_of_the_best_epoch(loaded, tmp_path):
  settings = dataclasses.replace(QUICK, epochs=8)
  task, data = toy(loaded, tmp_path / "data", settings)
  task, grid = backwards(task), [Run(2e-4, seed) for seed in range(3)]
  best = saved.Best(grid)
  copies = []

  def keep(run, score, copy):
    copies.append((run, score))
    best(run, score, copy)

  outcomes = loop.fit(loaded, task, data, settings, grid, keep=keep)
  scores = [o.best["cola"]["errors"] for o in outcomes]
  leader = outcomes[int(np.argmax(scores))]
  assert leader.best_epoch < settings.epochs
  assert leader.epochs[-1]["cola"]["errors"] < max(scores) - 0.1
  assert copies[-1] == (leader.run, max(scores))
  assert len(copies) <= leader.best_epoch  # not after it
  saved.save(tmp_path, loaded, task, "bidirectional", best.params)
  model = load(tmp_path / "model")
  logits = saved.outputs(model, [(text,) for text in sentences(40, 1)[0]])
  assert np.array_equal(logits.argmax(axis=1), leader.predictions["cola"])


@pytest.mark.parametrize("group", [0, 1])
def test_the_best_of_all_groups_is_kept(run, tmp_path, group):
  rates = ("3e-3,1e-9", "1e-9,3e-3")[group]  # one of them learns nothing
  more = "--seeds=0,1,2", "--runs_at_once=3", f"--lrs={rates}", "--save"
  more = f"--output={tmp_path}", *more
  finetune.main(cola(run, tmp_path, *more, train=48, valid=20))
  folder = tmp_path / f"cola/{STEP}-bidirectional"
  recomputed(folder)
  summary = json.loads((folder / "summary.json").read_text())
  assert summary["best_run"] // 3 == group


def test_the_first_of_equals_is_the_best():
  grid = [Run(lr, 0) for lr in (1.0, 2.0, 3.0)]
  offers = [(1, 0.5), (2, 0.5), (1, 0.5), (0, 0.5), (2, 0.4), (2, 0.6)]
  best, taken = saved.Best(grid), []
  for run, score in offers:
    best(grid[run], score, lambda run=run: taken.append(run) or {"run": run})
  assert taken == [1, 0, 2] and best.params == {"run": 2}


def test_a_model_is_there_in_the_end(run, tmp_path, capsys, monkeypatch):
  args = cola(run, tmp_path, f"--output={tmp_path}", GRID, train=16, valid=8)
  folder = tmp_path / f"cola/{STEP}-bidirectional"
  results = {"items.jsonl", "predictions.json", "summary.json", "cola"}

  def done(*more):
    finetune.main([*args, *more])
    there = {path.name for path in folder.iterdir()}
    return "already done" in capsys.readouterr().out, there - results

  assert done() == (False, set())
  with monkeypatch.context() as patch:  # interrupted while it is written

    async def interrupted(*args, **kwargs):
      raise KeyboardInterrupt

    patch.setattr(ocp.JsonCheckpointHandler, "async_save", interrupted)
    with pytest.raises(KeyboardInterrupt):
      done("--save")
  assert not (folder / "model").exists() and (folder / "summary.json").exists()
  assert list(folder.glob("model*"))  # a part of it, by another name
  with pytest.raises(UserError, match="holds no checkpoint"):
    load(folder / "model")
  assert done("--save") == (False, {"model"})
  assert done("--save") == done() == (True, {"model"})
  (folder / "model").rename(folder / "model.old")  # as one that was removed
  assert done("--save") == (False, {"model"})
  before = load(folder / "model").params
  assert done("--overwrite", "--seeds=5", "--save") == (False, {"model"})
  assert not equal(load(folder / "model").params, before)
  # Other results, and no model: the one that was there was of those before.
  assert done("--overwrite", "--seeds=6") == (False, set())
