"""Checkpoints by words of text seen, and their exported revisions."""

import dataclasses

import numpy as np
import pytest
import safetensors.numpy

from antlm_jax import config
from antlm_jax.commands import export as export_command
from antlm_jax.data.prepared_folder import Manifest
from antlm_jax.inference.model import load
from antlm_jax.inference.model import write_checkpoint as write_model
from antlm_jax.training import checkpoint, notes
from antlm_jax.training import run as run_lib
from tests import random_models, runs
from tests.hub import FakeHub


@pytest.mark.parametrize("schedule", ["", "8x64@0.4"])
def test_a_milestone_is_the_step_that_has_seen_the_words(prepared, schedule):
  settings = (
    "curriculum=30C+30M steps",
    "train.batch_size=32",
    f"train.batch_schedule={schedule}",
    "checkpoint.words=3k,12k,20k",
  )
  run = run_lib.build_run(runs.settings(prepared, *settings))
  # Count the words of each step's decoded rows.
  seen = [0]
  for step in range(60):
    rows = run.order.slots(step).rows[: run.order.batch_size(step)]
    tokens, _ = run.sources.rows.read(rows.reshape(-1))
    texts = (run.tokenizer.decode(row) for row in tokens)
    seen.append(seen[-1] + sum(len(text.split()) for text in texts))
  for name, words in {"0.003": 3e3, "0.012": 12e3, "0.02": 20e3}.items():
    step = run.milestones[f"chck_{name}M"]
    exact = next(s for s in range(61) if seen[s] >= words)
    assert abs(step - exact) <= 1
  assert run.words(60) == pytest.approx(seen[60], rel=0.01)
  # An epoch sees each word of the text once.
  words = Manifest.load(prepared).splits["train"].words
  epochs = run.order.rows_read(60)[""] / len(run.sources.rows)
  assert run.words(60) == pytest.approx(words * epochs)
  assert np.isclose(epochs, run.epochs, rtol=0.02)


@pytest.mark.parametrize("rounding", ["carry", "up", "down"])
def test_ten_epochs_are_within_the_rules_and_more_are_told(prepared, rounding):
  def first_lines(curriculum, *more):
    given = ("train.steps=0", "train.batch_size=4", f"curriculum={curriculum}")
    settings = (*given, f"data.rounding={rounding}", *more)
    words = runs.train_args("unused", prepared, *settings)[2:]
    # A shrunk config would have steps, not epochs.
    run = run_lib.build_run(config.load_config("quickstart", words))
    return " ".join(notes.notes_of_run(run))

  babylm = "checkpoint.words=babylm"
  assert "rules" not in first_lines("4C+6M", babylm)
  assert "rules" not in first_lines("4C+7M")
  assert "has 11 epochs of its data" in first_lines("4C+7M", babylm)
  runs.refusal(
    r"takes 11 epochs .* 20%C\+80%M",
    first_lines,
    "4C+7M",
    "train.max_epochs=10",
  )


def test_milestones_stay_and_are_exported_as_revisions(
  prepared, tmp_path, monkeypatch
):
  settings = (
    "curriculum=12C steps",
    "model.layers=1",
    "eval.rows=0",
    "log.writers=",
    "checkpoint.words=200,400,600",
    "checkpoint.keep_last=1",
  )
  run, output = tmp_path / "run", tmp_path / "out"
  runs.train(run, prepared, *settings)
  steps = load(run).meta.milestones
  assert list(steps) == ["chck_0.0002M", "chck_0.0004M", "chck_0.0006M"]
  assert set(checkpoint.checkpoint_steps(run)) == {*steps.values(), 12}
  monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
  monkeypatch.setattr(FakeHub, "calls", [])
  words = (f"--checkpoint={run}", f"--output={output}", "--revisions")
  runs.main("antlm_jax.commands.export", *words, "--repo=it")
  assert {p.name for p in output.iterdir()} == {"main", *steps}
  branches = [call[2] for call in FakeHub.calls if call[0] == "branch"]
  uploads = {call[3]: call[2] for call in FakeHub.calls if call[0] == "upload"}
  assert branches == [*steps] and uploads == {
    None if name == "main" else name: name for name in ("main", *steps)
  }
  for name, step in {"main": 12, **steps}.items():
    tensors = safetensors.numpy.load_file(output / name / "model.safetensors")
    trained = load(run, step).params["norm/scale"]
    np.testing.assert_array_equal(tensors["model.norm.weight"], trained)


def test_revisions_are_written_all_or_none(tmp_path, monkeypatch):
  """Catches a folder that a Ctrl-C leaves, so that the command refuses it."""
  run = random_models.save(tmp_path / "run", random_models.tokenizer())
  monkeypatch.setattr(
    export_command.model_lib, "revisions", lambda _: {"chck_1M": run}
  )

  def interrupted(*_):
    raise KeyboardInterrupt

  words = [f"--checkpoint={run}", f"--output={tmp_path}/out", "--revisions"]
  with monkeypatch.context() as patch:
    patch.setattr(export_command.model_lib, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
      export_command.main(words)
  assert {path.name for path in tmp_path.iterdir()} == {"run"}
  export_command.main(words)
  assert {p.name for p in (tmp_path / "out").iterdir()} == {"main", "chck_1M"}


@pytest.mark.parametrize("name", ["../chck_1M", "/tmp/x", "a/b", "..", ""])
def test_a_foreign_checkpoint_names_no_folder_elsewhere(tmp_path, name):
  """Catches `export --revisions` and `eval babylm` writing outside --output."""
  run = random_models.save(tmp_path / "run", random_models.tokenizer())
  loaded = load(run)
  meta = dataclasses.replace(loaded.meta, milestones={name: 1})
  write_model(tmp_path / "foreign/checkpoints/1", 1, loaded.params, meta)
  words = f"--checkpoint={tmp_path / 'foreign'}", "--revisions"
  line = runs.refused(
    "antlm_jax.commands.export", *words, f"--output={tmp_path / 'in/out'}"
  )
  assert f"{name!r} is no step's name" in line
  assert {p.name for p in tmp_path.iterdir()} == {"run", "foreign"}
