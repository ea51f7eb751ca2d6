"""Fine-tuning: rows, parallel runs, results and the command."""

import contextlib
import dataclasses
import io
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from antlm_jax.errors import UserError
from antlm_jax.evals import finetune
from antlm_jax.evals.finetuning import (
  batching,
  classification,
  glue,
  loop,
  regression,
  summary,
  trial,
)
from antlm_jax.evals.finetuning.answering import Inside, Spans
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.classification import (
  Classifier,
  ClassifierOptions,
)
from antlm_jax.evals.finetuning.loop import TrialRun
from antlm_jax.evals.finetuning.ranking import Towers
from antlm_jax.evals.finetuning.tagging import Tagger
from antlm_jax.evals.finetuning.task import Task
from antlm_jax.evals.finetuning.trial import Hyperparameters
from antlm_jax.masks import AttentionMask
from tests import random_models, runs, tuned
from tests.test_glue import line

STEP = random_models.STEP
QUICK = Hyperparameters(batch_size=16, epochs=2, max_length=48, patience=0)
run = random_models.run(layers=1, tied=False)


def sentences(count, seed=0):
  """Returns sentences of 3 to 6 words; a label says which half of the words."""
  draw = np.random.default_rng(seed)
  words = ["Tom", "sat", "near", "the", "hills", "dogs", "rest", "often"]
  texts, labels = [], []
  for _ in range(count):
    label = int(draw.integers(2))
    text = draw.choice(words[:4] if label else words[4:], draw.integers(3, 7))
    texts.append(" ".join(text))
    labels.append(label)
  return texts, labels


def write_cola(folder, train=96, valid=40):
  """Writes an easy task in CoLA's form."""
  folder.mkdir(parents=True, exist_ok=True)
  for seed, (split, count) in enumerate((("train", train), ("valid", valid))):
    pairs = zip(*sentences(count, seed), strict=True)
    lines = [{"sentence": text, "label": label} for text, label in pairs]
    runs.write_lines(folder / f"cola.{split}.jsonl", lines)
  return folder


def toy(loaded, folder, settings=QUICK):
  """Returns the easy task and its rows."""
  options = ClassifierOptions("first", dropout=0.1)
  task = glue.make_glue_task(
    write_cola(folder), "cola", settings.attention, options
  )
  return task, loop.read_rows(loaded, task, settings.max_length)


# ---------------------------------------------------------------------- rows

HEAD = Classifier(("0", "1"), "first")


@pytest.mark.parametrize("boundary", ["bos_eos", "eos", "none"])
def test_framing(loaded, boundary):
  loaded = random_models.with_meta(loaded, boundary=boundary)
  t = loaded.tokenizer
  bos, eos = {
    "bos_eos": ([t.bos_id], [t.eos_id]),
    "eos": ([t.eos_id], [t.eos_id]),
    "none": ([], []),
  }[boundary]
  pair = "the dogs", "Tom sat near"
  a, b = ([*t.encode(text)] for text in pair)
  examples = [Example(pair, 1, "0"), Example(pair[:1], 0, "1")]
  rows = HEAD.encode(loaded, examples, 48)
  pair = [*bos, *a, *eos, *b, *eos]
  alone = [*bos, *a, *eos]
  assert rows.lengths.tolist() == [len(pair), len(alone)]
  assert rows.tokens[0].tolist() == pair
  assert rows.tokens[1, : len(alone)].tolist() == alone
  assert rows.labels.tolist() == [1, 0]


LONG = "Tom sat near the hills " * 9


@pytest.mark.parametrize(
  ("head", "long", "short"),
  [
    (HEAD, ("the dogs", LONG), ("the dogs", "rest")),
    (Inside(), ("who", LONG), ("who", "Tom sat")),
    (Spans(), (LONG, "Tom sat"), ("who", LONG)),  # a long text is many rows
    (Towers(0.1), ("who", LONG), ("who", "Tom sat")),
  ],
)
def test_what_is_cut_is_counted(loaded, head, long, short):
  examples = [Example(long), Example(short)]
  rows = head.encode(loaded, examples, 32)
  assert rows.cut[0] == 1 and rows.lengths.max() == 32
  assert head.encode(loaded, examples[1:], 32).cut[0] == 0


def test_a_text_that_pairs_repeat_is_cut_once(loaded):
  """Catches twice as many cut texts as the data have."""
  examples = [Example((LONG, LONG)), Example(("who", LONG))]
  assert Towers(0.1).encode(loaded, examples, 32).cut == (1, 2)


def test_a_long_sentence_has_several_rows(loaded):
  """Catches a tagger that cuts sentences."""
  words = tuple(LONG.split())
  rows = Tagger(("O", "B-X")).encode(loaded, [Example(words)], 32)
  assert rows.cut[0] == 0 and len(rows) > 1 and rows.lengths.max() == 32
  assert sorted({*rows.origins.ravel().tolist()}) == [-1, *range(len(words))]


def test_what_is_cut_is_told_once_a_set(loaded, tmp_path, capsys):
  task = toy(loaded, tmp_path)[0]
  for length in (32, 1000):
    loop.read_rows(loaded, task, length)
  assert capsys.readouterr().out == ""
  long = [Example((LONG,), 1), Example(("the dogs",), 0)]
  task = dataclasses.replace(task, load=lambda split: long)
  for length in (32, 1000):
    loop.read_rows(loaded, task, length)
  lines = capsys.readouterr().out.splitlines()
  said = "warning: cola, {}: 1 of 2 texts are cut to fit {} tokens ({})".format
  limits = (32, "max_length"), (48, "the model's longest row")
  names = "train", "cola"
  assert lines == [said(name, *limit) for limit in limits for name in names]
  task = dataclasses.replace(task, load=lambda split: [])
  with pytest.raises(UserError, match=r"cola: its files .* is left for train"):
    loop.read_rows(loaded, task, 8)


@pytest.mark.parametrize(
  ("lengths", "budget", "kept"),
  [
    ((5,), 2, [2]),
    ((5,), -1, [0]),
    # Hugging Face's tokenizers keep these lengths.
    ((9, 2), 7, [5, 2]),
    ((9, 8), 7, [4, 3]),
    ((8, 9), 7, [3, 4]),
    ((8, 8), 7, [3, 4]),
    ((3, 3), 9, [3, 3]),
    ((10, 4), 9, [5, 4]),
    ((9, 1), 4, [3, 1]),
  ],
)
def test_what_is_kept_of_a_pair(lengths, budget, kept):
  assert batching.truncate_lengths(lengths, budget) == kept


def make_rows(n=203):
  lengths = np.random.default_rng(0).integers(1, 101, n).astype(np.int32)
  tokens = np.tile(np.arange(100, dtype=np.int32), (n, 1))
  return batching.ExampleRows(tokens, lengths, np.arange(n))


def test_every_row_is_in_one_batch():
  rows = make_rows()
  for key in ({}, {"seed": 3, "epoch": 1}):
    made = batching.batches_by_length(rows, 16, **key)
    real = np.concatenate([s.rows[s.weights > 0] for s in made])
    assert sorted(real) == list(range(203))
    assert sum((s.weights == 0).any() for s in made) == 1
    assert {s.length for s in made} <= {16, 32, 64, 100}
    assert all(rows.lengths[s.rows].max() <= s.length for s in made)
    assert all(len(s.rows) == len(s.weights) == 16 for s in made)
  few = batching.batches_by_length(make_rows(5), 16, seed=0)
  assert len(few) == 1 and few[0].weights.sum() == 5


def test_what_does_not_fill_a_batch_is_left_out_at_random():
  rows, left = make_rows(), []
  every = set(range(203))
  for epoch in range(60):
    out = []
    for seed in (3, 4):
      made = batching.batches_by_length(rows, 16, seed, epoch, drop_last=True)
      assert len(made) == 203 // 16 and all(s.weights.all() for s in made)
      kept = np.concatenate([s.rows for s in made])
      assert len(kept) == len(set(kept)) == 192
      out.append(every - set(kept.tolist()))
    assert out[0] == out[1]  # parallel runs have the same shapes
    left += out[0]
  # Long and short rows are left out equally often, nearly every row once.
  assert abs(rows.lengths[left].mean() - rows.lengths.mean()) < 5
  assert len(set(left)) > 180
  assert not batching.batches_by_length(make_rows(5), 16, 0, drop_last=True)


def test_order_is_a_function_of_seed_and_epoch():
  rows = make_rows()

  def order(seed, epoch):
    made = batching.batches_by_length(rows, 16, seed, epoch)
    return [s.length for s in made], [s.rows.tolist() for s in made]

  assert order(0, 0) == order(0, 0)
  assert order(0, 0)[0] == order(1, 0)[0]  # the same lengths for all seeds
  assert order(0, 0)[1] != order(1, 0)[1] != order(1, 1)[1]
  assert order(0, 0)[0] != order(0, 1)[0] != sorted(order(0, 1)[0])


# ------------------------------------------------------------------ training


def drawn_tokens(rows, length):
  """Returns random tokens `[rows, length]` that are not special."""
  draw = np.random.default_rng(0)
  return draw.integers(4, 400, (rows, length)).astype(np.int32)


def one_run(loaded, head, settings):
  """Returns the computations of a run."""
  return trial.Trial(loaded, head, settings, [TrialRun(0.0, 0)], 1)._program


class EveryPool(Classifier):
  """Returns the logits of all three pools, `[B, C, 3]`."""

  def __call__(self, params, hidden, lengths, dropout_key=None):
    heads = [Classifier(self.labels, pool) for pool in classification.POOLS]
    return jnp.stack([h(params, hidden, lengths) for h in heads], axis=-1)

  def reduce(self, outputs):
    return outputs


@pytest.mark.parametrize("attention", trial.ATTENTIONS)
def test_padding_and_other_rows_change_no_logit(loaded, attention):
  lengths = np.array([5, 16, 9], np.int32)
  tokens = drawn_tokens(3, 40)
  inside = np.arange(40) < lengths[:, None]
  head = EveryPool(("0", "1"), "first")
  settings = dataclasses.replace(QUICK, attention=attention)
  one = one_run(loaded, head, settings)
  trained, frozen = trial.divided(loaded.params)
  params = trial.init(one, trained, np.array([0, 1], np.uint32)).params

  def logits(tokens, length=40):
    return trial.predict(one, params, frozen, tokens[:, :length], lengths)[0]

  long = logits(tokens)  # [runs, B, C, pools]
  same = {"rtol": 1e-4, "atol": 1e-5}
  np.testing.assert_allclose(logits(tokens, 16), long, **same)
  np.testing.assert_allclose(logits(np.where(inside, tokens, 3)), long, **same)
  other = np.where(np.arange(3)[:, None] == 1, tokens, 3)
  np.testing.assert_allclose(logits(other)[:, 1], long[:, 1], **same)
  assert np.abs(long[0] - long[1]).min() > 1e-4  # heads differ by run
  # With causal attention, the first token sees only itself.
  changed = np.where((np.arange(40) > 0) & inside, 7, tokens)
  moved = np.abs(logits(changed) - long).max(axis=(0, 1, 2))
  for pool, by in zip(classification.POOLS, moved, strict=True):
    blind = pool == "first" and attention == "causal"
    assert (by < 1e-5) if blind else (by > 1e-2)


def adamw(params, grads, rate, decayed, clip):
  """Returns torch's first step of AdamW with decay 0.1, from zero moments."""
  norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
  scale = min(1, clip / norm) if clip else 1
  out = {}
  for name, p in params.items():
    g = scale * grads[name]
    m, v = 0.1 * g, 0.001 * g**2
    p = p * (1 - rate * 0.1) if decayed(name) else p
    step = (m / (1 - 0.9)) / (np.sqrt(v / (1 - 0.999)) + 1e-8)
    out[name] = p - rate * step
  return out


@pytest.mark.slow
@pytest.mark.parametrize(
  ("scope", "clip", "decayed"),
  [
    ("matrices", 0.5, lambda name: "norm" not in name and "bias" not in name),
    ("all", 0.0, lambda name: True),
  ],
)
def test_a_step_is_adamw(loaded, scope, clip, decayed):
  how = {"weight_decay": 0.1, "decay_scope": scope, "clip": clip}
  settings = dataclasses.replace(QUICK, **how)
  head = Classifier(("0", "1"), "last", dropout=0.0)
  model = loaded.model
  one = one_run(loaded, head, settings)
  trained, frozen = trial.divided(loaded.params)
  assert frozen.keys() == {"head/kernel"}
  state = trial.init(one, trained, np.array([4], np.uint32))
  first = jax.tree.map(lambda x: x[0], state.params)
  tokens = drawn_tokens(4, 12)
  lengths = np.array([12, 3, 7, 12], np.int32)
  labels = np.array([0, 1, 1, 0])

  def loss(params):
    own = {n.removeprefix("task_head/"): p for n, p in params.items()}
    encoder = {n: p for n, p in params.items() if n in trained}
    end = jnp.broadcast_to(lengths[:, None], tokens.shape)
    positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)
    mask = AttentionMask(k_end=end)
    hidden = model.encode(encoder | frozen, tokens, positions, mask)
    logits = head(own, hidden, lengths)
    nats = optax.softmax_cross_entropy_with_integer_labels
    return nats(logits[:3], labels[:3]).mean()

  # Three norms and two biases have no decay.
  assert sum(not decayed(n) for n in first) == (0 if scope == "all" else 5)
  value, grads = jax.jit(jax.value_and_grad(loss))(first)
  wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (first, grads))
  expected = adamw(*wide, 1e-3, decayed, clip)
  batch = (x[None] for x in (tokens, lengths, labels, np.array([1.0, 1, 1, 0])))
  batch = batching.TaskBatch(*batch)
  rates, seeds = np.array([1e-3], np.float32), np.array([4], np.uint32)
  state, losses = trial.step(one, state, frozen, batch, rates, seeds, 0)
  assert losses[0] == pytest.approx(float(value), rel=1e-5)
  for name, value in expected.items():
    got = state.params[name][0]
    # Adam's first step is about the sign, which rounding flips near 0.
    close = np.isclose(got, value, rtol=1e-4, atol=2e-5)
    assert close.mean() > 0.99, name
    assert np.abs(got - first[name]).max() > 1e-4, name


class Logits(Classifier):
  """Returns its logits as predictions."""

  def reduce(self, outputs):
    return outputs


@pytest.mark.sample(1)
@pytest.mark.parametrize("weights", trial.WEIGHTS)
def test_bfloat16_loses_small_updates(loaded, weights):
  head = Logits(("0", "1"), "first")
  settings = dataclasses.replace(QUICK, weights=weights)
  one = one_run(loaded, head, settings)
  encoder, frozen = trial.divided(loaded.params)
  rates, seeds = np.array([1e-6], np.float32), np.array([4], np.uint32)
  state = trial.init(one, encoder, seeds)
  before = jax.device_get(state.params)
  tokens = drawn_tokens(4, 12)[None]
  lengths = np.full((1, 4), 12, np.int32)
  labels = np.array([[0, 1, 1, 0]])
  batch = batching.TaskBatch(tokens, lengths, labels, np.ones((1, 4)))
  for step in range(2):
    state, losses = trial.step(one, state, frozen, batch, rates, seeds, step)
  kept = [x for x in jax.tree.leaves(state) if x.dtype != jnp.int32]
  assert len(kept) == 3 * len(before)  # parameters and two moments
  assert {str(x.dtype) for x in kept} == {weights}
  for name, p in before.items():
    large = np.abs(p.astype(np.float32)) > 1e-2
    still = np.asarray(state.params[name] == p)[large]
    if large.any():  # biases begin at 0
      assert still.all() == (weights == "bfloat16"), name
  rows = tokens[0], lengths[0]
  logits, nan = trial.predict(one, state.params, frozen, *rows)
  assert np.isfinite([*losses, *np.ravel(logits)]).all() and not nan.any()


@pytest.mark.parametrize("steps", [1, 7, 83, 100])
def test_rates_rise_and_fall(steps):
  of_2024 = [(steps - s) / steps for s in range(steps)]
  found = Hyperparameters().rate_shares(steps)
  np.testing.assert_allclose(found, of_2024, rtol=1e-6)
  warmup, of_2026 = int(0.06 * steps), []
  for s in range(steps):
    t = (s - warmup) / max(1, steps - warmup)
    cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * t))
    of_2026.append(s / max(1, warmup) if s < warmup else cosine)
  how = Hyperparameters(warmup=0.06, decay="cosine", floor=0.1)
  np.testing.assert_allclose(how.rate_shares(steps), of_2026, rtol=1e-6)
  if steps == 100:
    share = how.rate_shares(steps)[[0, 3, 6, 53, 99]]
    assert share == pytest.approx([0, 0.5, 1, 0.55, 0.100251], abs=1e-6)
    # The root of the way, which has not begun in the warm-up.
    how = Hyperparameters(warmup=0.5, decay="1-sqrt")
    share = how.rate_shares(steps)[[0, 25, 50, 75]]
    assert share == pytest.approx([0, 0.5, 1, 1 - 0.5**0.5], abs=1e-6)


def stopping_epoch(scores, patience, threshold):
  """Returns the last epoch by the rule of transformers' callback, if any."""
  best, waited = None, 0
  for epoch, score in enumerate(scores, start=1):
    better = best is None or (score > best and abs(score - best) > threshold)
    waited = 0 if better else waited + 1
    if waited >= patience:
      return epoch
    best = score if best is None or score > best else best
  return None


class Scored(Classifier):
  """Returns its outputs, which are scores, as predictions."""

  def decode(self, reduced, rows):
    return reduced


def scored():
  """Returns a task that selects epochs by another metric than it reports."""
  head = Scored(("0", "1"), "first")
  task = classification.classification_task(
    "a", None, ["set", "other"], head, best_by="f1"
  )
  metrics = {"accuracy": lambda p, y: 1 - p, "f1": lambda p, y: p}
  return dataclasses.replace(task, metrics=metrics)


ROWS = {name: batching.ExampleRows([], [], []) for name in ("set", "other")}


def add(outcome, score, other=0.0, loss=0.0):
  """Adds an epoch to a run's outcome, with a score of each set."""
  scores = {"set": np.array(score), "other": np.array(other)}
  loop.evaluate(scored(), ROWS, outcome, loss, scores)


@pytest.mark.parametrize(
  "scores",
  [
    (0.5, 0.5009, 0.5018, 0.5027, 0.9),  # gains under the threshold
    (0.5, 0.4, 0.5011, 0.2, 0.5011, 0.1, 0.9),
    (0.5, 0.6, 0.6, 0.6, 0.61, 0.2, 0.3, 0.4),
    (0.0, 0.0, 0.0, 0.0),
    (0.1, 0.2, 0.3, 0.2),
  ],
)
@pytest.mark.parametrize("settings", [{}, {"patience": 0}])
def test_the_best_epoch_and_where_a_run_stops(scores, settings):
  outcome = loop.TuningOutcome(TrialRun(1, 0))
  for score in scores:
    if not outcome.stopped(Hyperparameters(**settings)):
      add(outcome, score, 1.0)
  stop = stopping_epoch(scores, 3, 0.001) if not settings else None
  seen = scores[:stop]
  assert len(outcome.epochs) == len(seen)
  assert outcome.best_epoch == 1 + seen.index(max(seen))
  assert outcome.predictions["set"] == max(seen)
  assert outcome.best["set"] == {"accuracy": 1 - max(seen), "f1": max(seen)}


def test_an_epoch_that_diverges_never_counts():
  runs = [TrialRun(1e-3, 0), TrialRun(1, 1), TrialRun(1e-5, 2)]
  outcomes = late, lost, steady = [*map(loop.TuningOutcome, runs)]
  add(late, 0.2)
  add(late, 0.9, loss=np.inf)
  add(lost, np.nan, loss=np.nan)
  add(steady, 0.1)
  add(steady, 0.1)
  assert [o.diverged for o in outcomes] == [2, 1, None]
  stopped = [o.stopped(Hyperparameters(patience=0)) for o in outcomes]
  assert stopped == [True, True, False]
  assert (late.best_epoch, late.predictions["set"]) == (1, 0.2)
  assert lost.predictions["set"] == 0
  # No run is its rate's best since the last epoch.
  best = loop.BestParams(runs)
  best.update(outcomes, lambda run: pytest.fail("a copy"))
  line = "epoch 2: train loss 0.000, f1 10.0, best 20.0; 2 of 3 runs stopped, 2"
  assert line in loop._epoch_line(scored(), outcomes, 2)


def test_each_rate_has_a_leader_of_its_own():
  """Catches a saved model of another run than the best of the best rate."""
  runs = [TrialRun(rate, seed) for rate in (1e-3, 3e-3) for seed in (0, 1)]
  outcomes = [*map(loop.TuningOutcome, runs)]
  later = [TrialRun(rate, 2) for rate in (1e-3, 3e-3)]
  best = loop.BestParams(runs + later)
  for epoch, scores in enumerate(
    ([0.6, 0.5, 0.8, 0.2], [0.6, 0.7, 0.9, 0.2], [0.7, 0.1, 0.9, 0.9]), 1
  ):
    for outcome, score in zip(outcomes, scores, strict=True):
      add(outcome, score)
    best.update(outcomes, lambda run, epoch=epoch: (run, epoch))
  # Equal scores: the first run of the rate, as in the summary.
  assert best.of_rate(1e-3) == (0, 3) and best.of_rate(3e-3) == (2, 2)
  # The runs of another group: only a better score counts.
  outcomes = [*map(loop.TuningOutcome, later)]
  for outcome, score in zip(outcomes, (0.7, 0.95), strict=True):
    add(outcome, score)
  best.update(outcomes, lambda run: (later[run], 1))
  assert best.of_rate(1e-3) == (0, 3)
  assert best.of_rate(3e-3) == (later[1], 1)


GRID = [TrialRun(3e-3, 0), TrialRun(3e-3, 1), TrialRun(1e-9, 0)]


@pytest.fixture(scope="module")
def toy_fit(loaded, tmp_path_factory):
  """The easy task, and three parallel runs with early stopping."""
  settings = dataclasses.replace(QUICK, epochs=6, patience=2)
  task, data = toy(loaded, tmp_path_factory.mktemp("toy"), settings)
  with contextlib.redirect_stdout(io.StringIO()) as said:
    outcomes = loop.fit(loaded, task, data, settings, GRID)
  return task, data, settings, outcomes, said.getvalue().splitlines()


@pytest.mark.slow
def test_runs_together_are_runs_alone(loaded, toy_fit):
  task, data, settings, together, _ = toy_fit
  for one in together[1:]:
    (alone,) = loop.fit(loaded, task, data, settings, [one.run])
    assert alone.best_epoch == one.best_epoch
    losses = [[e["train_loss"] for e in o.epochs] for o in (alone, one)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert np.array_equal(alone.predictions["cola"], one.predictions["cola"])


@pytest.mark.slow
def test_a_run_that_diverges_takes_no_other_with_it(loaded, toy_fit, capsys):
  task, data, settings, (_, *others), _ = toy_fit
  runs = [TrialRun(1e30, 0), *GRID[1:]]
  best = loop.BestParams(runs)
  outcomes = loop.fit(loaded, task, data, settings, runs, best)
  lines = capsys.readouterr().out.splitlines()
  assert outcomes[0].diverged == 1
  for alone, beside in zip(others, outcomes[1:], strict=True):
    assert alone.epochs == beside.epochs  # to the last bit
    assert alone.predictions == beside.predictions
  assert np.isfinite(best.of_rate(3e-3)["embedding"]).all()
  assert not best.of_rate(1e30)
  examples = {"cola": data["cola"].examples}
  about = tuned.summarised(task, examples, outcomes)
  assert (about.best_lr, about.best_run) == (3e-3, 1)
  assert "of 3 runs stopped, 1 of which diverged" in lines[-1]
  said, *_ = summary.remarks(about)
  assert said == "cola: seed 0 at rate 1e+30 diverged in epoch 1"
  # A single diverged run is reported and has no best model.
  alone = tuned.summarised(task, examples, outcomes[:1])
  assert "1 of 1 diverged" in summary.scores_table([alone], GLUE)
  text = json.dumps(vars(alone), allow_nan=False)
  assert json.loads(text)["best_run"] == 0


def test_it_learns_what_can_be_learnt(toy_fit):
  task, data, settings, outcomes, lines = toy_fit
  examples = {"cola": data["cola"].examples}
  about = tuned.summarised(task, examples, outcomes)
  assert about.best_lr == 3e-3
  assert outcomes[0].best["cola"]["mcc"] > 0.9
  assert about.evaluations["cola"]["baseline"]["mcc"] == 0
  # A run with a rate near 0 does not improve and stops; the others continue.
  assert len(outcomes[2].epochs) == outcomes[2].best_epoch + settings.patience
  assert "of 3 runs stopped" in lines[-1] and "epoch 1" in lines[0]
  for outcome in outcomes:
    scores = [e["cola"]["mcc"] for e in outcome.epochs]
    assert outcome.best_epoch == 1 + int(np.argmax(scores))
    right = data["cola"].labels
    mcc = classification.mcc(outcome.predictions["cola"], right)
    assert mcc == scores[outcome.best_epoch - 1]
  assert outcomes[0].epochs != outcomes[1].epochs  # seeds differ


def test_the_help_says_what_every_preset_is(capsys):
  with pytest.raises(SystemExit):
    finetune.main(["--help"])
  text = capsys.readouterr().out
  for name, preset in finetune.PRESETS.items():
    assert f"\n  {name:15} {preset.description[:40]}" in text, name
  words = " ".join(text.split())
  assert (
    "with a NAME for each preset, finetune, finetune-2026, finetune-study,"
    in words
  )


def test_the_help_of_a_preset_has_its_settings(capsys):
  """Catches options that the preset refuses, in the help that it names."""
  with pytest.raises(UserError, match="--preset=tagging --help lists them"):
    finetune.finetune("none", [], preset="tagging", head="linear")
  with pytest.raises(SystemExit):
    finetune.main(["--preset=tagging", "--help"])
  listed = capsys.readouterr().out
  assert "--tags_column" in listed and "--lrs" in listed
  assert "--pool" not in listed and "--temperature" not in listed


@pytest.mark.parametrize(
  ("room", "sizes"),
  [(30, [30]), (29, [15, 15]), (8, [8, 8, 8, 6]), (1, [1] * 30)],
)
def test_a_device_takes_what_it_has_memory_for(room, sizes, capsys):
  runs, taken = [TrialRun(1e-3, seed) for seed in range(30)], []

  def fit(group):
    if len(group) > room:
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    taken.append(len(group))
    return [run.seed for run in group]

  assert loop.fit_in_groups(fit, runs, 30) == list(range(30))
  assert taken == sizes
  assert ("too little memory" in capsys.readouterr().out) == (room < 30)


@pytest.mark.parametrize("message", ["RESOURCE_EXHAUSTED", "INTERNAL"])
def test_what_no_group_helps_is_told(message):
  def fit(group):
    raise jax.errors.JaxRuntimeError(message)

  with pytest.raises(jax.errors.JaxRuntimeError, match=message):
    loop.fit_in_groups(fit, GRID, 3)


# --------------------------------------------------------- results and tables


LABELS = [1, 1, 1, 0]
EXAMPLES = {"mrpc": [Example(("a", "b"), label) for label in LABELS]}


def outcome(lr, seed, found, task, labels=LABELS, name="mrpc"):
  metrics = {n: metric(found, labels) for n, metric in task.metrics.items()}
  result = loop.TuningOutcome(TrialRun(lr, seed))
  result.add_epoch(task, 0.5, {name: metrics}, {name: found})
  return result


def outcomes_of(task, by_rate, labels=LABELS):
  """Returns the outcomes of answers by rate, one list of answers a seed."""
  return [
    outcome(rate, seed, answers, task, labels)
    for rate, by_seed in by_rate.items()
    for seed, answers in enumerate(by_seed)
  ]


@pytest.fixture
def mrpc(tmp_path):
  for split in ("train", "valid"):
    (tmp_path / f"mrpc.{split}.jsonl").write_text(line("mrpc", 1))
  return glue.make_glue_task(
    tmp_path, "mrpc", "bidirectional", ClassifierOptions()
  )


GLUE = glue.OF_2024


def test_summary(mrpc):
  by_rate = {1e-5: [[1] * 4, [1] * 4], 1e-4: [LABELS, [0, 1, 1, 0]]}
  outcomes = outcomes_of(mrpc, by_rate)
  about = tuned.summarised(mrpc, EXAMPLES, outcomes)
  baseline = about.evaluations["mrpc"]["baseline"]
  assert baseline == pytest.approx({"accuracy": 0.75, "f1": 6 / 7, "mcc": 0.0})
  assert about.best_lr == 1e-4 and about.best_run == 2
  assert about.by_lr[1]["scores"]["mrpc"]["mean"] == pytest.approx(0.9)
  std = math.sqrt(2 * 0.1**2)  # of 1.0 and 0.8
  assert about.by_lr[1]["scores"]["mrpc"]["std"] == pytest.approx(std)
  assert [run["collapsed"] for run in about.runs] == [True] * 2 + [False] * 2
  shares = [run["most_frequent_prediction"]["mrpc"] for run in about.runs]
  assert shares == [1, 1, 0.75, 0.5]
  (said,) = summary.remarks(about)
  assert "2 of 2 runs at lr 1e-05" in said
  text = summary.scores_table([about], GLUE)
  assert "90.0 ± 127.1" in text and "85.7" in text  # t of 1: 12.7
  assert "mean of these 1 of 11 scores, not comparable with GLUE's" in text
  alone = tuned.summarised(mrpc, EXAMPLES, outcomes[:1])
  assert alone.by_lr[0]["scores"]["mrpc"]["std"] is None
  assert "1 of 1 collapsed" in summary.scores_table([alone], GLUE)


def test_the_mean_over_all_is_glue(mrpc):
  outcomes = [outcome(1e-4, 0, LABELS, mrpc)]
  text = json.dumps(vars(tuned.summarised(mrpc, EXAMPLES, outcomes)))
  texts = (text.replace('"mrpc"', f'"{name}"') for name in glue.SCORES)
  everything = [summary.Summary.from_json(json.loads(text)) for text in texts]
  for i, about in enumerate(everything):
    about.by_lr[0]["scores"][about.task]["mean"] = i / 10
  table = summary.scores_table(everything, GLUE)
  assert "GLUE, unweighted mean of all 11: 50.0" in table
  assert "10 of 11 scores" in summary.scores_table(everything[1:], GLUE)


def test_a_mean_counts_no_set_that_chose():
  """Catches the dev sets of SuperGLUE in its mean: they choose the epoch."""
  scores = {"dev": {"mean": 0.9}, "test": {"mean": 0.5}}
  about = [
    tuned.partial_summary(
      task=name,
      best_lr=1e-4,
      also=(),
      evaluations=(names := [f"{name}-{split}" for split in scores]),
      by_lr=[
        {"lr": 1e-4, "scores": dict(zip(names, scores.values(), strict=True))}
      ],
    )
    for name in glue.SUPERGLUE
  ]
  (line,) = summary._mean_lines(about, glue.SUPER)
  assert line == "SuperGLUE, unweighted mean of all 7: 50.0"


def test_the_best_run_is_of_the_best_rate(mrpc):
  """Catches a saved model of a rate that the table does not show."""
  by_rate = {1e-5: [LABELS, [0, 0, 0, 1]], 1e-4: [[0, 1, 1, 0]] * 2}
  about = tuned.summarised(mrpc, EXAMPLES, outcomes_of(mrpc, by_rate))
  assert about.best_lr == 1e-4 and about.best_run == 2


def test_answers_that_are_often_right_are_no_collapse(mrpc):
  labels = [1] * 96 + [0] * 4
  examples = {"mrpc": [Example(("a", "b"), label, "") for label in labels]}
  outcomes = outcomes_of(mrpc, {1e-4: [labels, [1] * 100]}, labels)
  about = tuned.summarised(mrpc, examples, outcomes)
  assert [run["collapsed"] for run in about.runs] == [False, True]


def test_the_rate_is_chosen_by_the_metric_that_chooses_epochs():
  """Catches Pearson's correlation, which ignores a wrong scale, as chooser."""
  examples = [Example((f"{i}",), float(i), f"{i}") for i in range(5)]
  task = Task(
    name="own",
    load=lambda of: examples,
    evaluations=("dev",),
    head=None,
    **regression.FIELDS,
  )
  found = {1e-4: [100.0 * i for i in range(5)], 1e-3: [0.5, 0.5, 2, 3.5, 4]}
  outcomes = [
    outcome(lr, 0, values, task, [e.label for e in examples], "dev")
    for lr, values in found.items()
  ]
  about = tuned.summarised(task, {"dev": examples}, outcomes)
  assert about.best_lr == about.runs[about.best_run]["lr"] == 1e-3


# ------------------------------------------------------------------ command

SHORT = ("--batch_size=16", "--epochs=2")


def cola(run, folder, *more, **counts):
  """Writes data; returns the arguments of the command for a run."""
  data = write_cola(folder / "data", **counts)
  own = f"--data={data}", "--preset=2024", "--task=cola"
  return [f"--checkpoint={run}", *own, *SHORT, *more]


@pytest.mark.slow
def test_command(run, tmp_path, capsys):
  data = write_cola(tmp_path / "data")
  for split in ("train", "valid"):
    (data / f"wsc.{split}.jsonl").write_text(line("wsc", 1) * 3)
  args = [f"--checkpoint={run}", f"--data={data}", "--preset=2024", *SHORT]
  args += ["--attention=causal", "--lrs=3e-3,1e-9", "--seeds=0,1"]
  finetune.main(args)
  said = capsys.readouterr()
  absent = "boolq, mnli, mrpc, multirc, qnli, qqp, rte, sst2"
  assert f"warning: left out, not in {data}: {absent}\n" in said.out
  assert "cola epoch 2" in said.out
  assert "wsc collapsed: 2 of 2 runs at lr 0.003" in said.out
  assert "mean of these 2 of 11" in said.out
  folder = run / f"evals/finetune/cola/{STEP}-causal"
  names = ["cola", "items.jsonl", "predictions.json", "summary.json"]
  assert sorted(path.name for path in folder.iterdir()) == names
  summary = json.loads((folder / "summary.json").read_text())
  grid = [(3e-3, 0), (3e-3, 1), (1e-9, 0), (1e-9, 1)]
  assert [(r["lr"], r["seed"]) for r in summary["runs"]] == grid
  assert summary["request"]["head"]["pool"] == "last"
  text = (folder / "items.jsonl").read_text()
  items = [json.loads(item) for item in text.splitlines()]
  labels = np.array([item["label"] for item in items])
  assert labels.tolist() == sentences(40, 1)[1]
  found = np.array([item["predictions"] for item in items])
  for i, r in enumerate(summary["runs"]):
    mcc = classification.mcc(found[:, i], labels)
    assert r["scores"]["cola"]["mcc"] == pytest.approx(mcc)
  best = json.loads((folder / "predictions.json").read_text())
  assert best["glue"]["cola"]["predictions"] == [
    {"id": f"cola_{i}", "pred": int(p)}
    for i, p in enumerate(found[:, summary["best_run"]])
  ]


@pytest.mark.slow
def test_command_in_2026s_way(run, tmp_path, capsys):
  for split in ("train", "valid"):
    text = "".join(line("rte", label) for label in (0, 1, 1) * 8)
    (tmp_path / f"rte.{split}.jsonl").write_text(text)
  args = [f"--checkpoint={run}", f"--data={tmp_path}", "--preset=2026"]
  args += ["--task=rte", "--epochs=2"]
  with pytest.raises(UserError, match=r"rte has 24 .* for a batch of 32: give"):
    finetune.main(args)
  said = in_process(capsys, *args, "--batch_size=16")
  assert "mean of these 1 of 7 scores, not comparable with GLUE of 20" in said
  folder = run / f"evals/finetune-2026/rte/{STEP}-bidirectional"
  text = (folder / "summary.json").read_text()
  (one,) = json.loads(text)["runs"]
  assert (one["lr"], one["seed"], len(one["epochs"])) == (3e-5, 42, 2)
  found = json.loads((folder / "predictions.json").read_text())
  assert list(found) == ["rte"] and len(found["rte"]["predictions"]) == 24
  with pytest.raises(UserError, match=r"another request \(preset, lrs, seeds"):
    finetune.main([*args, "--preset=2024", f"--output={folder.parents[1]}"])


def in_process(capsys, *args):
  finetune.main(args)
  return capsys.readouterr().out


def test_what_is_done_is_not_done_again(run, tmp_path, capsys):
  more = f"--output={tmp_path / 'out'}", "--lrs=1e-3,1e-5,1e-9"
  args = cola(run, tmp_path, *more, train=32, valid=20)
  summary = tmp_path / f"out/cola/{STEP}-bidirectional/summary.json"
  assert not finetune.done(args)
  first = in_process(capsys, *args)
  assert finetune.done(args) and not finetune.done([*args, "--save"])
  about = json.loads(summary.read_text())
  assert about["request"]["head"]["pool"] == "first"
  text = summary.read_text()
  when = summary.stat().st_mtime_ns
  again = in_process(capsys, *args)
  assert "cola is already done" in again and when == summary.stat().st_mtime_ns
  table = again.splitlines()[1:]
  assert first.splitlines()[-len(table) :] == table
  for other in ("limit=16", "head=plain", "weights=bfloat16"):
    name = other.partition("=")[0]
    with pytest.raises(UserError, match=rf"another request \({name} differ"):
      finetune.main([*args, f"--{other}"])
  data = tmp_path / "data/cola.train.jsonl"
  data.write_text('{"sentence": "a", "label": 1}')
  with pytest.raises(UserError, match=r"another request \(data differ"):
    finetune.main(args)
  assert summary.read_text() == text


def test_groups_of_runs_and_limits(run, tmp_path, capsys):
  more = f"--output={tmp_path / 'out'}", "--limit=20", "--overwrite"
  args = cola(run, tmp_path, *more, train=32, valid=20)
  args += ["--lrs=1e-3,1e-5,1e-9"]
  path = tmp_path / f"out/cola/{STEP}-bidirectional/summary.json"
  summaries = []
  for at_once in (3, 0):  # 0 means single runs on a CPU
    in_process(capsys, *args, f"--runs_at_once={at_once}")
    summaries.append(json.loads(path.read_text()))
  together, alone = summaries
  assert together["train_examples"] == 20
  assert together["request"] == alone["request"]
  for a, b in zip(together["runs"], alone["runs"], strict=True):
    assert a["scores"] == b["scores"]


def test_bad_arguments(run, tmp_path):
  args = cola(run, tmp_path)
  for extra, message in (
    ("--checkpoint=nowhere", "holds no checkpoint"),
    ("--step=5", "has no step 5"),
    ("--data=nowhere", "no such folder"),
    ("--task=rte", "rte is not in "),
    ("--lrs=0", "is not over 0"),
    ("--seeds=-1", "is not at least 0 and at most 4294967295"),
    ("--epochs=0", "cola cannot be evaluated without training: "),
    ("--warmup=1", "--warmup=1 is not at least 0 and under 1"),
    ("--preset=2023", "--preset='2023' is not one of 2024,"),
    ("--preset=retrival", "study; did you mean 'retrieval'?"),
    (f"--output={tmp_path}/data/cola.train.jsonl", "cannot write"),
  ):
    assert message in runs.told(finetune.main, [*args, extra])
