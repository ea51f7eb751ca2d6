"""Saved models: checkpoints of weights only, and with a task's head."""

import dataclasses
import io
import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from pyarrow import parquet

from antlm_jax import config as config_lib
from antlm_jax import models, terminal, units
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.evals import embed as embed_command
from antlm_jax.evals import finetune, results
from antlm_jax.evals import predict as predict_command
from antlm_jax.evals.embed import embed
from antlm_jax.evals.finetuning import (
  answering,
  glue,
  labelled,
  loop,
  saved,
  tagging,
  trial,
)
from antlm_jax.evals.finetuning.classification import (
  Classifier,
  ClassifierOptions,
)
from antlm_jax.evals.finetuning.loop import TrialRun
from antlm_jax.evals.predict import predict
from antlm_jax.inference.model import FineTuned, Loaded, load, write_checkpoint
from antlm_jax.masks import AttentionMask
from antlm_jax.training import checkpoint
from antlm_jax.training.checkpoint import Checkpoint
from antlm_jax.training.step import TrainState
from tests import random_models, runs
from tests.helpers import equal
from tests.test_finetune import QUICK, STEP, cola, sentences, toy
from tests.test_glue import line
from tests.tuned import outputs

run = random_models.run(layers=1, tied=False)
HEAD = Classifier(("a", "b"), "mean", norms=False)


@pytest.fixture(scope="module")
def foreign(prepared, tmp_path_factory):
  """A workdir of one step, written from NumPy arrays, and the arrays."""
  workdir = tmp_path_factory.mktemp("foreign")
  config = config_lib.load_config(runs.QUICK)
  tokenizer = Tokenizer.from_json((prepared / "tokenizer.json").read_text())
  model = models.build_model(config.model, tokenizer.vocab_size)
  params = jax.device_get(jax.jit(lambda: model.init(3))())
  meta = checkpoint.Meta(config, tokenizer, "eos", "nothing of ours")
  path = write_checkpoint(workdir / "checkpoints" / "5", 5, params, meta)
  assert path == workdir / "checkpoints" / "5"
  return workdir, params


def test_weights_alone_are_a_checkpoint(foreign):
  workdir, params = foreign
  assert list(checkpoint.checkpoint_steps(workdir)) == [5]
  found = load(workdir)
  assert equal(found.params, params)
  assert (found.step, found.meta.boundary, found.task) == (5, "eos", None)
  size = units.quantity(found.model.size)
  assert repr(found) == f"<llama, {size} parameters, step 5, {workdir}>"
  # The digest is that of the weights, not of the path.
  assert found.saved.digest == checkpoint.json_checksum(
    checkpoint.bit_sums(params)
  )
  other = params | {"norm/scale": params["norm/scale"] + 1}
  assert found.saved.digest != checkpoint.json_checksum(
    checkpoint.bit_sums(other)
  )
  assert Checkpoint(found.path).meta.data == "nothing of ours"
  zeros = jax.tree.map(jnp.zeros_like, found.params)
  like = TrainState(jnp.int32(0), zeros, {"mu": jnp.ones(2)}, zeros)
  state = Checkpoint(found.path).restore(like, with_optimizer=False)
  assert equal(state.params, params) and equal(state.ema, params)
  assert state.step == 5 and equal(state.opt_state, like.opt_state)


def test_an_absent_optimizer_cannot_be_kept(foreign, prepared, tmp_path):
  args = runs.train_args(tmp_path, prepared, f"init.checkpoint={foreign[0]}")
  message = runs.refused("antlm_jax.commands.train", *args)
  assert str(foreign[0]) in message and "no optimizer's state" in message
  assert "init.optimizer=reset" in message


def test_nothing_is_written_over_or_halfway(foreign, tmp_path, monkeypatch):
  workdir, params = foreign
  path = workdir / "checkpoints" / "5"
  meta = Checkpoint(path).meta
  before = load(path).params
  assert "already exists" in runs.told(write_checkpoint, path, 6, params, meta)
  assert equal(load(path).params, before)
  full = shutil._ntuple_diskusage(10, 9, 1)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
  with pytest.raises(UserError, match="No space left on device"):
    write_checkpoint(tmp_path / "full", 5, params, meta)
  assert not list(tmp_path.iterdir())


GRID = "--lrs=1e-9,3e-3,1e-3"  # the number in other tests: compiled once


def recomputed(folder) -> Loaded:
  """Loads a saved model and asserts that it predicts the written answers."""
  model = load(folder / "model")
  written = json.loads((folder / "predictions.json").read_text())
  written = written["glue"]["cola"]["predictions"]
  texts = sentences(len(written), 1)[0]
  logits = outputs(model, [(text,) for text in texts])
  assert logits.shape == (len(written), 2)
  assert logits.argmax(axis=1).tolist() == [one["pred"] for one in written]
  found = predict(model, texts)
  assert [one.label for one in found] == [str(x["pred"]) for x in written]
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
  # Only the unused head keeps its weights.
  assert model.params.keys() == loaded.params.keys()
  same = {n for n, p in loaded.params.items() if equal(p, model.params[n])}
  assert same == {"head/kernel"}
  assert model.step == loaded.step
  assert model.meta.boundary == loaded.meta.boundary
  assert model.config == loaded.config
  assert model.tokenizer.to_json() == loaded.tokenizer.to_json()
  meta, before = (Checkpoint(m.path).meta for m in (model, loaded))
  assert meta.data == before.data
  request = json.loads((folder / "summary.json").read_text())["request"]
  assert request["head"]["norms"] is False and "save" not in request


def test_pairs_and_words_for_classes(loaded, tmp_path):
  for split in ("train", "valid"):
    (tmp_path / f"mnli.{split}.jsonl").write_text(line("mnli", 0))
  options = ClassifierOptions("last", "plain")
  task = glue.make_glue_task(tmp_path, "mnli", "bidirectional", options)
  head = task.head.init(jax.random.key(0), loaded.model.config.width)
  params = trial.join_params(loaded.params, head)
  saved.save_model(tmp_path, loaded, task, "bidirectional", params)
  model = load(tmp_path / "model")
  assert saved.saved_head(model.task, model.path) == task.head
  assert task.head.labels == ("entailment", "neutral", "contradiction")
  assert equal(model.params, loaded.params) and equal(model.task.params, head)
  pairs = [("p", "h"), ("Tom sat", "the dogs rest near the hills")]
  both = outputs(model, pairs)
  assert both.shape == (2, 3)
  alone = [outputs(model, [pair])[0] for pair in pairs]
  np.testing.assert_allclose(both, alone, rtol=1e-4, atol=1e-5)
  swapped = outputs(model, [pair[::-1] for pair in pairs])
  assert np.abs(swapped - both).max() > 1e-3


def test_a_request_tells_heads_apart(loaded, tmp_path):
  """Catches results of one head on a frozen encoder that pass for another's."""
  digests = []
  for seed in (0, 1):
    model = random_models.with_head(loaded, HEAD, "causal", seed)
    path = random_models.saved(model, tmp_path / str(seed)).path
    digests.append(results.model_digest(Checkpoint(path)))
  assert digests[0]["params_digest"] == digests[1]["params_digest"]
  assert digests[0] != digests[1]


def test_only_a_known_head_has_outputs(loaded):
  line = runs.told(outputs, loaded, [("the dogs",)])
  assert "is not fine-tuned" in line and str(loaded.path) in line
  for kind, settings, message in (
    ("other", {}, "a head of the kind 'other', which is not one of classifier"),
    ("classifier", {"size": 2}, "of another version: .*'size'"),
  ):
    task = FineTuned("a", "causal", kind, settings, {})
    with pytest.raises(UserError, match=message):
      predict(dataclasses.replace(loaded, task=task), [("the dogs",)])


@pytest.fixture
def classifier(loaded):
  return random_models.with_head(loaded, HEAD, "causal")


def test_a_saved_model_is_evaluated_at_its_length(classifier, tmp_path):
  """Catches 128 tokens for longer rows, and classes read as kinds of tags."""
  meta = dataclasses.replace(classifier.meta, row_tokens=200)
  model = dataclasses.replace(classifier, meta=meta)
  model = random_models.saved(model, tmp_path / "model")
  records = [("the dogs", "a"), ("the cats", "b")]
  found = finetune.finetune(model, records, epochs=0, quiet=True)
  about = json.loads((found["own"].folder / "summary.json").read_text())
  assert about["request"]["max_length"] == 200
  tags = [(["the", "dogs"], ["O", "B-X"])]
  with pytest.raises(UserError, match="has no head of the kind 'tagger'"):
    finetune.finetune(model, tags, preset="tagging", epochs=0, quiet=True)


def test_a_classifier_of_pairs_takes_pairs(classifier):
  """Catches labels of each text alone, and of two joined texts."""
  pairs = [(("a", "b"), "x"), (("b", "a"), "y"), (("c", "d"), "x")]
  pairs = {"train": pairs, "dev": pairs}
  task = labelled.classify(
    pairs, "own", "causal", ClassifierOptions(), labelled.Columns()
  )
  assert task.columns == ("text1", "text2")
  for columns, text, message in (
    (("text1", "text2"), "one", "0 is 1 text, but the model reads 2 together"),
    (("text",), ("a", "b"), "0 is 2 texts, but the model reads 1 together"),
  ):
    own = dataclasses.replace(classifier.task, columns=columns)
    model = dataclasses.replace(classifier, task=own)
    with pytest.raises(UserError, match=message):
      predict(model, [text])


TEXTS = ["the dogs", "Tom sat near the hills", ("the dogs " * 30).strip()]


def test_predictions_have_labels_and_probabilities(
  classifier, loaded, tmp_path, capsys
):
  """From a list, an iterator, lines and records; long texts are cut."""
  found = predict(classifier, TEXTS, quiet=True)
  assert capsys.readouterr().out == ""
  logits = outputs(classifier, TEXTS)
  for one, row, text in zip(found, logits, TEXTS, strict=True):
    shares = np.exp(row) / np.exp(row).sum()
    assert list(one.probabilities.values()) == pytest.approx(shares, rel=1e-5)
    assert (one.label, one.texts) == ("ab"[row.argmax()], (text,))
  lines = tmp_path / "a.txt"
  lines.write_text("\n".join(TEXTS))
  records = runs.write_lines(tmp_path / "a.jsonl", [{"x": t} for t in TEXTS])
  for texts, more in (
    (iter(TEXTS), {}),
    (lines, {}),
    (records, {"text_column": "x"}),
  ):
    again = predict(classifier, texts, batch_size=2, **more)
    assert "1 of 3 texts are cut to fit 48 tokens" in capsys.readouterr().out
    assert [one.label for one in again] == [one.label for one in found]
  pair, alone = predict(classifier, [("the dogs", "Tom sat"), "the dogs"])
  assert pair.probabilities != alone.probabilities
  assert predict(classifier, []) == []
  message = "has no column 'text' but 'x'; choose one with --text_column"
  with pytest.raises(UserError, match=message):
    predict(classifier, records)
  with pytest.raises(UserError, match="is not fine-tuned"):
    predict(loaded, TEXTS)
  task = FineTuned("a", "causal", "towers", {"temperature": 1.0}, {})
  with pytest.raises(UserError, match="embeds texts: use `antlm embed`"):
    predict(dataclasses.replace(loaded, task=task), TEXTS)


@pytest.mark.parametrize(
  ("second", "message"),
  [
    (None, "text 1 is None, not a str"),
    (np.nan, "text 1 is nan, not a str"),
    (("the dogs", None), "text 1 is None, not a str"),
    ("\ud800", r"text 1: '\\ud800' has half of a surrogate pair"),
  ],
)
def test_what_is_no_text_has_no_prediction(classifier, second, message):
  """Catches missing texts of pandas that end in a traceback."""
  with pytest.raises(UserError, match=message):
    predict(classifier, ["the dogs", second])
  found = predict(classifier, np.array(["the dogs", "Tom sat"]), quiet=True)
  assert [one.texts for one in found] == [("the dogs",), ("Tom sat",)]


@pytest.mark.parametrize(
  ("head", "texts", "blank"),
  [
    (HEAD, ["the dogs", " ", "Tom"], {}),
    (
      tagging.Tagger(("O", "B-X")),
      ["the dogs", " ", ["Tom"], []],
      {"labels": (), "entities": ()},
    ),
    (answering.Spans(), [("Who?", "Tom"), ("Who?", ""), (" ", " ")], {}),
    (answering.Inside(), [("Who?", "Tom"), ("", "")], {"answer": ""}),
  ],
)
def test_a_blank_text_is_told_and_others_keep_their_predictions(
  loaded, capsys, head, texts, blank
):
  """Catches a traceback, and a blank context in silence."""
  model = random_models.with_head(loaded, head, "bidirectional")
  predictions = predict(model, texts)
  count = {HEAD: 1, answering.Inside(): 1}.get(head, 2)
  said = f"{count} of {len(texts)} texts are blank"
  assert said in capsys.readouterr().out
  (alone,) = predict(model, texts[:1])
  for name in ("texts", "label", "labels", "answer"):
    assert getattr(predictions[0], name) == getattr(alone, name)
  for name, value in blank.items():
    assert getattr(predictions[1], name) == value


@pytest.mark.slow
def test_vectors_are_pooled_as_the_model_was_tuned(classifier, loaded, capsys):
  """Uses the task's pool and attention; by default embedders normalize."""

  def slow(model, text, pool, causal, prefix=""):
    before, after = model.frame
    ids = [*before, *model.tokenizer.encode(prefix + text)][: 48 - len(after)]
    tokens = jnp.array([[*ids, *after]])
    mask = AttentionMask(causal)
    at = jnp.arange(tokens.shape[1])[None]
    hidden = jax.jit(model.model.encode)(model.params, tokens, at, mask)[0]
    return hidden.mean(0) if pool == "mean" else hidden[0]

  def check(model, vectors, *how, unit=False):
    for text, vector in zip(TEXTS, vectors, strict=True):
      expected = slow(model, text, *how)
      expected /= np.linalg.norm(expected) if unit else 1
      np.testing.assert_allclose(vector, expected, rtol=2e-4, atol=2e-5)

  vectors = embed(loaded, TEXTS, quiet=True)
  assert capsys.readouterr().out == "" and vectors.dtype == np.float32
  check(loaded, vectors, "mean", False)
  check(loaded, embed(loaded, TEXTS, attention="causal"), "mean", True)
  unit = embed(loaded, iter(TEXTS), normalize=True, batch_tokens=48)
  check(loaded, unit, "mean", False, unit=True)
  settings = classifier.task.settings | {"pool": "first"}
  task = dataclasses.replace(classifier.task, settings=settings)
  model = dataclasses.replace(classifier, task=task)
  check(model, embed(model, TEXTS), "first", True)
  settings = {"temperature": 1.0, "prompts": ("a cat ", "dogs ")}
  task = FineTuned("a", "bidirectional", "towers", settings, {})
  model = dataclasses.replace(loaded, task=task)
  found = embed(model, TEXTS, prompt="query")
  check(model, found, "mean", False, "a cat ", unit=True)
  found = embed(model, TEXTS, prompt="document")
  np.testing.assert_allclose(found, outputs(model, TEXTS), rtol=1e-5, atol=1e-6)
  assert embed(loaded, []).shape == (0, loaded.model.config.width)
  with pytest.raises(UserError, match=r"^prompt='x' is not one of query, d"):
    embed(model, TEXTS, prompt="x")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_predictions_have_the_letters_of_their_text(
  classifier, tmp_path, encoding, monkeypatch
):
  """Catches letters as escapes, and escapes on a terminal that are no JSON."""
  model = random_models.saved(classifier, tmp_path / "model")
  where = f"--checkpoint={model.path}", "--text"
  for text in ("Köln", "\x9bKöln", "Köln\u2028Łódź"):
    printed = io.BytesIO()
    # As the command writes to a terminal.
    output = io.TextIOWrapper(printed, encoding, "backslashreplace")
    with monkeypatch.context() as patch:
      patch.setattr(sys, "stdout", output)
      predict_command.main([*where, text])
      output.flush()
    (line,) = printed.getvalue().decode(encoding).splitlines()
    assert line == terminal.visible(line)
    assert json.loads(line)["texts"] == [text]
    assert ("ö" in line) == (text == "Köln" and encoding != "ascii")
  data = runs.write_lines(tmp_path / "a.jsonl", [{"text": "Köln Łódź"}])
  predict(model, data, output=tmp_path / "b.jsonl")
  assert "Köln Łódź" in (tmp_path / "b.jsonl").read_text("utf-8")


@pytest.mark.slow
def test_commands_write_predictions_and_vectors(
  classifier, loaded, run, tmp_path, capsys
):
  """The files hold the results of the Python functions."""
  meta = Checkpoint(loaded.path).meta
  model = write_checkpoint(
    tmp_path / "model", 7, loaded.params, meta, classifier.task
  )
  data = runs.write_lines(tmp_path / "a.jsonl", [{"text": t} for t in TEXTS])
  expected = [one.to_json() for one in predict(classifier, TEXTS)]
  where = [f"--checkpoint={model}", f"--data={data}"]
  capsys.readouterr()
  predict_command.main(where)
  said = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
  predict_command.main([where[0], "--text", "the dogs", "Tom sat"])
  (pair,) = map(json.loads, capsys.readouterr().out.splitlines())
  assert pair["texts"] == ["the dogs", "Tom sat"]
  output = tmp_path / "p.parquet"
  predict_command.main([*where, f"--output={output}"])
  written = parquet.read_table(output).to_pylist()
  for one, other, third in zip(said, expected, written, strict=True):
    assert one["label"] == other["label"] == third["label"]
    assert one["probabilities"] == pytest.approx(other["probabilities"])
    assert one == third
  vectors = embed(loaded, TEXTS)
  where[0] = f"--checkpoint={run}"
  for ending in (".npy", ".jsonl", ".parquet"):
    output = tmp_path / f"v{ending}"
    embed_command.main([*where, f"--output={output}"])
    if ending == ".npy":
      found = np.load(output)
    else:
      read = (
        parquet.read_table(output).to_pylist()
        if "q" in ending
        else map(json.loads, output.read_text().splitlines())
      )
      texts, found = zip(*(row.values() for row in read), strict=True)
      assert list(texts) == TEXTS
    np.testing.assert_array_equal(np.array(found, np.float32), vectors)
    again = tmp_path / f"again{ending}"
    embed(loaded, data, output=again, quiet=True)
    assert again.read_bytes() == output.read_bytes()
  again = tmp_path / "again.parquet"
  predict(classifier, data, output=again, quiet=True)
  assert parquet.read_table(again).to_pylist() == written
  told = runs.refused("antlm_jax.evals.embed", *where, "--output=a.csv")
  assert "a.csv ends in none of .npy, .jsonl, .parquet" in told


@pytest.mark.slow
def test_parameters_are_those_of_the_best_epoch(loaded, tmp_path):
  settings = dataclasses.replace(QUICK, epochs=8)
  task, data = toy(loaded, tmp_path / "data", settings)

  def errors(found, labels):  # a metric that decreases
    return float(np.mean(np.asarray(found) != np.asarray(labels)))

  how = {"metrics": {"errors": errors}, "main_metric": "errors", "best_by": ""}
  task = dataclasses.replace(task, **how)
  grid = [TrialRun(2e-4, seed) for seed in range(3)]
  best = loop.BestParams(grid)
  outcomes = loop.fit(loaded, task, data, settings, grid, best)
  scores = [o.best["cola"]["errors"] for o in outcomes]
  leader = outcomes[int(np.argmax(scores))]
  assert leader.best_epoch < settings.epochs
  assert leader.epochs[-1]["cola"]["errors"] < max(scores) - 0.1
  saved.save_model(tmp_path, loaded, task, "bidirectional", best.of_rate(2e-4))
  model = load(tmp_path / "model")
  logits = outputs(model, [(text,) for text in sentences(40, 1)[0]])
  assert np.array_equal(logits.argmax(axis=1), leader.predictions["cola"])


def test_a_model_is_there_in_the_end(run, tmp_path, capsys, monkeypatch):
  args = cola(run, tmp_path, f"--output={tmp_path}", GRID, train=16, valid=8)
  folder = tmp_path / f"cola/{STEP}-bidirectional"
  results = {"items.jsonl", "predictions.json", "summary.json", "cola"}

  def done(*more):
    finetune.main([*args, *more])
    there = {path.name for path in folder.iterdir()}
    return "already done" in capsys.readouterr().out, there - results

  assert done() == (False, set())
  with monkeypatch.context() as patch:  # an interrupted write

    async def interrupted(*args, **kwargs):
      raise KeyboardInterrupt

    patch.setattr(ocp.JsonCheckpointHandler, "async_save", interrupted)
    with pytest.raises(KeyboardInterrupt):
      done("--save")
  assert not (folder / "model").exists() and (folder / "summary.json").exists()
  assert list(folder.glob("model*"))  # a partial file with another name
  with pytest.raises(UserError, match="holds no checkpoint"):
    load(folder / "model")
  assert done("--save") == (False, {"model"})
  with pytest.raises(UserError, match=r"did you mean .*/model\?"):
    load(folder)
  assert done("--save") == done() == (True, {"model"})
  (folder / "model").rename(folder / "model.old")
  assert done("--save") == (False, {"model"})
  before = load(folder / "model").params
  assert done("--overwrite", "--seeds=5", "--save") == (False, {"model"})
  assert not equal(load(folder / "model").params, before)
  # New results without --save remove the model of the old results.
  assert done("--overwrite", "--seeds=6") == (False, set())
