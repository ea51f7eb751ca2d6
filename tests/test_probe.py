"""Linear probes: a head is trained on a frozen encoder."""

import jax
import numpy as np
import pytest

from antlm_jax.evals import finetune
from antlm_jax.evals.embed import embed
from antlm_jax.evals.finetuning import classification, loop, trial
from antlm_jax.evals.finetuning.loop import TrialRun
from antlm_jax.inference.model import load
from tests import random_models, runs

run = random_models.run()
WORDS = ("Tom", "Ann", "hills", "dogs", "river", "house", "door", "tree")
TEXTS = [f"{a} {b} rest" for a in WORDS for b in WORDS]
QUICK = {"freeze": True, "batch_size": 64, "max_length": 16, "overwrite": True}
QUESTIONS = [
  (f"who is near {b} ?", text, [text.split()[0]])
  for text in TEXTS
  for b in text.split()[1:2]
  if text.split()[0] != b
]
DATA = {
  "classification": [(t, "a" if "Tom" in t else "b") for t in TEXTS],
  "regression": [(t, float("Tom" in t)) for t in TEXTS],
  "tagging": [
    (t.split(), ["B" if w == "Tom" else "O" for w in t.split()]) for t in TEXTS
  ],
  "answering": QUESTIONS,
  "pairs": [(t, t[::-1]) for t in TEXTS],
}


def test_a_probe_is_adamw_on_the_features(loaded):
  """Catches dropout, a wrong gradient and an encoder that moves.

  PyTorch trains the linear layer on the vectors of `embed`.
  """
  torch = pytest.importorskip("torch")
  head = classification.LinearHead(("a", "b"), "mean")
  labels = np.array(["Tom" in text for text in TEXTS]).astype(int)
  examples = [
    loop.batching.Example((t,), int(y))
    for t, y in zip(TEXTS, labels, strict=True)
  ]
  task = classification.classification_task(
    "own", lambda _: examples, ("own-dev",), head, main_metric="accuracy"
  )
  settings = trial.Hyperparameters(
    batch_size=64, epochs=5, max_length=16, patience=0, freeze=True, clip=0.0
  )
  data = loop.read_rows(loaded, task, 16)
  runs = [TrialRun(1e-2, 3)]
  best = loop.BestParams(runs)
  (outcome,) = loop.fit(loaded, task, data, settings, runs, best)
  assert {*best.of_rate(1e-2)} == {"task_head/classes/kernel"}
  x = torch.tensor(embed(loaded, TEXTS, normalize=False))
  start = head.init(jax.random.key(3), x.shape[1])["classes/kernel"]
  kernel = torch.tensor(np.array(start), requires_grad=True)
  adamw = torch.optim.AdamW([kernel], weight_decay=0.0)
  losses = []
  for step in range(5):
    adamw.param_groups[0]["lr"] = 1e-2 * (1 - step / 5)
    adamw.zero_grad()
    loss = torch.nn.functional.cross_entropy(x @ kernel, torch.tensor(labels))
    loss.backward()
    adamw.step()
    losses.append(loss.item())
  found = [epoch["train_loss"] for epoch in outcome.epochs]
  assert found == pytest.approx(losses, rel=1e-4)
  assert losses[-1] < losses[0] - 1e-3


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize(
  "preset", ["classification", "regression", "tagging", "answering"]
)
def test_only_the_head_of_a_probe_changes(loaded, preset):
  """Catches a kind of task whose encoder moves, or whose head does not."""
  tuned = finetune.finetune(
    loaded,
    DATA[preset],
    preset=preset,
    epochs=2,
    lrs=(1e-3, 1e-2),
    seeds=(0, 1),
    save=True,
    **QUICK,
  )
  saved = load(tuned.model)
  for name, values in loaded.params.items():
    np.testing.assert_array_equal(saved.params[name], values)
  width = loaded.model.config.width
  head = finetune.saved.saved_head(saved.task, saved.path)
  seed = next(iter(tuned.tasks.values())).seed
  begun = head.init(jax.random.key(seed), width)
  moved = [np.abs(saved.task.params[n] - begun[n]).max() for n in begun]
  assert min(moved) > 1e-5


@pytest.mark.parametrize(
  ("preset", "settings", "words"),
  [
    ("pairs", {}, "has no head with parameters: leave out freeze"),
    ("tagging", {"encoder_dropout": 0.1}, "dropout=0.1: a frozen encoder has"),
    ("tagging", {"epochs": 0}, "epochs=0 evaluates"),
  ],
)
def test_a_probe_without_sense_is_refused(loaded, preset, settings, words):
  """Catches a probe that trains nothing, or as without the setting."""
  call, how = finetune.finetune, QUICK | settings
  assert words in runs.told(call, loaded, DATA[preset], preset=preset, **how)
