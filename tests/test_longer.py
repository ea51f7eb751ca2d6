"""Longer rows with another RoPE base, within a run or as a new run."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest

from antlm_jax.config import load_config
from antlm_jax.hf import export, import_
from antlm_jax.inference.model import load
from antlm_jax.training.checkpoint import Checkpoint
from tests import helpers, random_models, runs

# From step 4: rows of 64 with base 500. Before: rows of 32 with base 10,000.
PHASE = (
  "curriculum=8C steps",
  "model.layers=1",
  "train.batch_schedule=2x64@0.5:base=500",
  "eval.objectives=C",
  "checkpoint.every=4",
)
LOSS = "eval/clm/loss"


@pytest.fixture(scope="module")
def run(prepared, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("longer") / "run"
  runs.train(workdir, prepared, *PHASE)
  return workdir


@pytest.mark.slow
def test_a_batch_chooses_the_base_of_its_step():
  """The loss equals that of a model with this base in its settings."""
  params = helpers.random_params(helpers.model())
  batch = helpers.source("C", helpers.FakeRows(length=32))[0]
  losses = []
  for own, given in ((500.0, None), (1e4, 500.0), (1e4, None)):
    step = helpers.train_step(helpers.model(rope_theta=own))
    of = dataclasses.replace(batch, rope_theta=given)
    losses.append(float(step.evaluate(params, of)["loss"].sum()))
  assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
def test_each_checkpoint_has_the_base_and_rows_of_its_last_step(run):
  found = {step: load(run, step) for step in (4, 8)}
  for step, base, rows in ((4, 1e4, 32), (8, 500.0, 64)):
    assert found[step].model.config.rope_theta == base
    assert found[step].longest_row == rows
  assert found[4].config == found[8].config


@pytest.mark.slow
def test_an_export_has_the_last_base_and_the_longest_row(run, tmp_path):
  (path,) = export.export_model(load(run), tmp_path / "hf", ("causal",))
  fields = json.loads((path / "config.json").read_text())
  assert fields["rope_parameters"]["rope_theta"] == 500.0
  tokenizer = json.loads((path / "tokenizer_config.json").read_text())
  assert tokenizer["model_max_length"] == 64
  # Its record of the run has the base of the beginning, too.
  again = import_.Imported(path).meta
  assert again.config.model.rope_theta == 10_000.0
  assert again.encoder.rope_theta == 500.0


@pytest.mark.slow
def test_a_resumed_run_crosses_the_change_exactly(run, prepared, tmp_path):
  """Also catches held-out losses with another base."""
  copy = shutil.copytree(run, tmp_path / "copy")
  shutil.rmtree(copy / "checkpoints" / "8")
  runs.train(copy, prepared, *PHASE)
  assert runs.same_params(run, copy)
  assert runs.logged(run, LOSS) == runs.logged(copy, LOSS)


@pytest.mark.slow
@pytest.mark.parametrize(
  "step", [pytest.param(4, marks=pytest.mark.nightly), 8]
)
def test_a_run_starts_from_it_with_its_base_or_another(
  run, prepared, tmp_path, step, capsys
):
  """Its initial loss is the last loss of the checkpoint's run."""
  start = run / "checkpoints" / str(step)
  losses = []
  for name, base in (("continued", ""), ("longer", ",tokens=64,base=90000")):
    args = runs.train_args(
      tmp_path / name, prepared, "curriculum=4C steps", "eval.objectives=C"
    )
    args[0] = f"--config={name}:shrink,model={start}{base}"
    runs.main("antlm_jax.commands.train", *args)
    losses.append(runs.logged(tmp_path / name, LOSS)[0])
  before = runs.logged(run, LOSS)[step]
  assert math.isclose(losses[0], before, rel_tol=1e-6)
  assert not math.isclose(losses[1], before, rel_tol=1e-5)
  was = Checkpoint(start).meta.encoder.rope_theta
  told = capsys.readouterr().out
  assert f"model.rope_theta was {was}, is 90000.0" in told
  made = load(tmp_path / "longer")
  assert made.model.config.rope_theta == 9e4
  assert made.model.config.max_seq_len == 64


def test_a_base_is_never_below_the_models_by_default(tmp_path):
  """Catches 160,000 in place of a larger base, such as Qwen3's."""
  bases = {}
  for own in (1e4, 1e6):
    model = tmp_path / str(own)
    random_models.save(model, random_models.tokenizer(), rope_theta=own)
    spec = f"longer:model={model},tokens=64"
    bases[own] = load_config(spec).model.rope_theta
  assert bases == {1e4: 160_000.0, 1e6: 1e6}
  # A model's config.json leaves out the base that its encoder has by default.
  for encoder, own in (("gemma", 1e6), ("ultrabert", 2.56e6)):
    model = tmp_path / encoder
    random_models.save(model, random_models.tokenizer(), encoder)
    spec = f"longer:model={model},tokens=64"
    assert load_config(spec).model.rope_theta == own


def test_an_encoder_without_rope_refuses_a_base(prepared, tmp_path):
  config = tmp_path / "config.py"
  config.write_text(
    "from antlm_jax import config\n"
    "get_config = lambda arg: config.changes('ltg_bert')\n"
  )
  args = runs.train_args(tmp_path / "run", prepared, *PHASE)
  args[0] = f"--config={config}:shrink"
  told = runs.refused("antlm_jax.commands.train", *args)
  assert "ltg_bert has no RoPE: leave out :base=" in told


def test_perplexity_by_position_adds_up(tmp_path):
  """Windows of 256 tokens: each position has the tokens and nats scored."""
  text = runs.write_lines(tmp_path / "a.jsonl", [{"text": "the dogs " * 99}])
  longest = 256
  out = tmp_path / "out"
  run = random_models.save(
    tmp_path / "run", random_models.tokenizer(), max_seq_len=longest
  )
  options = "--mode=causal", "--stride=100", f"--window={longest}"
  summary = runs.score(run, text, out, *options, task="perplexity")
  table = np.genfromtxt(out / "positions.csv", delimiter=",", names=True)
  assert table["tokens"].sum() == summary["tokens"]
  assert table["position"][0] == 1 and table["position"][-1] == longest
  nats = (table["tokens"] * table["nats_per_token"]).sum()
  assert math.isclose(nats / summary["tokens"], summary["nats_per_token"])
  assert (out / "positions.svg").read_text().lstrip().startswith("<?xml")
