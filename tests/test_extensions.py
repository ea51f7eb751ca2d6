"""Plugins: each part is one file of tests/plugins, without other changes.

Commands load the files by --plugin, and Python imports them.
"""

import contextlib
import functools
import json
import pathlib
import re
import sqlite3

import numpy as np
import optax
import pytest
from flax import nnx

import antlm_jax as ax
from antlm_jax import __main__ as antlm
from antlm_jax import config, config_help, models, optim, plugins, sections
from antlm_jax.attention import BACKENDS
from antlm_jax.data import readers, toy_english
from antlm_jax.data.prepared_folder import PreparedData
from antlm_jax.evals.finetuning import presets
from antlm_jax.evals.zero_shot.tasks import TASKS
from antlm_jax.hf import export
from antlm_jax.models import encoder, layers, llama
from antlm_jax.objectives import objective
from antlm_jax.objectives.corruption import Draw, Segments
from antlm_jax.training import hooks, notes, writers
from tests import helpers, random_models, runs

FOLDER = pathlib.Path(__file__).parent / "plugins"
REGISTRIES = {
  "optimizer": optim.OPTIMIZERS,
  "schedule": optim.SCHEDULES,
  "objective": objective.KINDS,
  "objectives": objective.OBJECTIVES,
  "attention": BACKENDS,
  "encoder": models.ENCODERS,
  "writer": writers.WRITERS,
  "hook": hooks.HOOKS,
  "reader": readers.READERS,
  "finetuning_task": presets.PRESETS,
  "zero_shot_task": TASKS,
}
# Plugins and settings of one training run
TRAINS = ("optimizer", "schedule", "objective", "encoder", "writer", "hook")
SETTINGS = {
  "optimizer.name": "lion",
  "optimizer.b2": 0.95,
  "schedule.name": "inverse_root",
  "schedule.warmup_steps": 4,
  "objectives.F.middle_rate": 0.75,
  "curriculum": "16C:F=1:1 steps",
  "eval.objectives": "C,F",
  "log.writers": "sqlite",
  "log.every": 1,
}
run = random_models.run(layers=1)


@contextlib.contextmanager
def forgetting():
  """Undoes the registrations of its block."""
  before = {name: dict(registry) for name, registry in REGISTRIES.items()}
  try:
    yield
  finally:
    for name, registry in REGISTRIES.items():
      registry.clear()
      registry.update(before[name])


@pytest.fixture(autouse=True)
def restored(monkeypatch):
  """Keeps a test's plugins from other tests."""
  monkeypatch.setenv(plugins.VARIABLE, "")
  with forgetting():
    yield


def plugin(name: str) -> str:
  """Returns the argument that loads a file."""
  return f"--plugin={FOLDER / name}.py"


def imported(*names: str) -> list:
  """Imports files, as Python does."""
  return [plugins.run_file(str(FOLDER / f"{n}.py"), n) for n in names]


def command(name: str, *words: str) -> None:
  """Runs `antlm --plugin=NAME words` in this process."""
  antlm.main(plugins.load_plugins([plugin(name), *words]))


@pytest.fixture(scope="session")
def trained(shared, prepared):
  """Two runs: 0 by the command in a new process, 1 from Python."""

  def train(folder):
    folder.mkdir()
    (folder / "toy.py").write_text(TOY)
    given = {"data.path": prepared, "log.hooks": "norm", **SETTINGS}
    done = runs.run(
      "antlm_jax",
      *map(plugin, TRAINS),
      "train",
      f"--config={folder}/toy.py",
      f"--workdir={folder}/toy/0",
      *(f"--config.{key}={value}" for key, value in given.items()),
    )
    assert done.returncode == 0, done.stderr
    where = folder / "toy.py", folder / "toy/1", prepared
    with forgetting():
      *_, hook = imported(*TRAINS)
      ax.train(*where, hooks=[hook.Norm()], quiet=True, **SETTINGS)

  return shared("extended", train)


# The config is also a study, for the report.
TOY = """
from antlm_jax import config
from antlm_jax.evals.studies.study import Row, Scale, ExpectedText

ROWS = {"toy": Row("Toy", "toy", {"tiny": ""}, {"tiny": 1}, masked="mlm")}
SCALES = {"tiny": Scale({}, ExpectedText(8, 8), (), ())}
REPORT = "controls"


def get_config(arg):
  out = config.changes("gated_llama")
  out.curriculum = "2C+8M+2C steps"
  out.model.update(layers=1, width=32, heads=4, kv_heads=2, mlp_width=64)
  out.train.batch_size = 4
  out.schedule.update(peak_lr=1e-3, warmup_steps=0.1, decay_steps=0.2)
  out.eval.update(every=0.5, rows=8)
  out.checkpoint.every = 0.5
  out.log.every = 1
  return out
"""


@pytest.mark.slow
def test_the_command_and_python_train_the_same(trained, tmp_path):
  imported(*TRAINS)
  lacks = "transformers has no model for the encoder 'gated_llama'"
  runs.refusal(lacks, ax.export, trained / "toy/0", tmp_path / "hf")
  assert runs.same_params(trained / "toy/0", trained / "toy/1")
  page = (trained / "toy/0/README.md").read_text()
  uses = [line for line in page.splitlines() if "--checkpoint=" in line]
  assert all(plugin(name) in line for name in TRAINS for line in uses) and uses


@pytest.mark.parametrize("name", ["optimizer", "schedule", "objective"])
def test_a_model_names_the_plugin_that_it_lacks(trained, name):
  imported(*TRAINS)
  registry = REGISTRIES[name]
  lost = {"optimizer": "lion", "schedule": "inverse_root"}.get(name, "fim")
  del registry[lost]
  line = runs.told(ax.load, trained / "toy/0")
  assert f"{lost!r} is not one of" in line
  assert "give --plugin=FILE.py" in line


def test_an_objective_that_a_model_does_not_use_may_be_lacking():
  before = config.load_config(config.changes())
  imported("objective")
  text = config.to_json(config.load_config(config.changes()))
  assert "F" in config.config_from_json(text).objectives
  del objective.KINDS["fim"], objective.OBJECTIVES["F"]
  assert config.config_from_json(text) == before


def test_a_model_needs_neither_writers_nor_hooks(trained):
  imported("optimizer", "schedule", "objective", "encoder")
  loaded = ax.load(trained / "toy/0")
  assert loaded.config.log == sections.Log(
    every=1, writers=("sqlite",), hooks=("norm",)
  )
  for key, kind in ("log.hooks", "norm"), ("log.writers", "sqlite"):
    given = {"log.hooks": "", "log.writers": "", key: kind}
    again = loaded.config, trained / "none"
    line = runs.told(functools.partial(ax.train, *again, **given))
    assert f"{key}={kind!r} is not one of" in line


def test_an_optimizer(trained):
  imported(*TRAINS)
  made = optim.OPTIMIZERS["lion"](clip=0.0, weight_decay=0.0)
  built = made.build({"w": ("embed", "mlp")})
  params = {"w": np.zeros((2, 2), np.float32)}
  gradient = {"w": np.array([[3.0, -0.1], [0.0, -7.0]], np.float32)}
  updates, _ = built.update(gradient, built.init(params), params)
  assert np.array_equal(updates["w"], np.sign(gradient["w"]))
  found = ax.load(trained / "toy/0").config.optimizer
  assert (found.name, found.b1, found.b2) == ("lion", 0.9, 0.95)


@pytest.mark.slow
def test_an_attention_backend(prepared, tmp_path):
  """Catches attention that is chosen from a list that plugins cannot change."""
  (module,) = imported("attention")
  how = {"data.path": str(prepared), "curriculum": "2C steps"}
  found = [
    ax.train(
      "quickstart:shrink",
      tmp_path / name,
      quiet=True,
      **{"model.attention": name, **how},
    )
    for name in ("counted", "reference")
  ]
  assert module.calls > 0
  assert runs.same_params(*(one.workdir for one in found))


def test_a_schedule(trained):
  rates = runs.logged(trained / "toy/0", "train/learning_rate")
  expected = [1e-3 * min(t / 4, (4 / t) ** 0.5) for t in range(1, 17)]
  assert list(rates.values()) == pytest.approx(expected)


def test_an_objective_with_its_own_corruption(trained):
  (module,) = imported("objective")
  tokens = helpers.tokens(400, 12, special=0)
  starts = helpers.starts(400, 12)
  args = tokens, Segments.of(starts), Draw(0, 3, np.c_[:400])
  fim = module.FillInTheMiddle("x", middle_rate=0.75)
  corrupted = fim.corrupt(*args, helpers.vocabulary())
  moved = documents = 0
  for row, new, start in zip(tokens, corrupted.targets, starts, strict=True):
    cuts = np.flatnonzero(start)[1:]
    for old, now in zip(np.split(row, cuts), np.split(new, cuts), strict=True):
      documents += len(old) >= 4
      if np.array_equal(old, now):
        continue
      first, second = np.flatnonzero(now == helpers.MASK)
      prefix, suffix, middle = np.split(now, [first, second])
      text = np.concatenate([prefix, middle[1:], suffix[1:]])
      assert np.array_equal(text, old[:-2])
      moved += 1
  assert moved / documents == pytest.approx(0.75, abs=0.05)
  is_mask = corrupted.targets == helpers.MASK
  assert np.array_equal(corrupted.predicted, ~starts & ~is_mask)
  losses = runs.logged(trained / "toy/0", "eval/fim/loss")
  assert list(losses) == [0, 8, 16] and losses[16] < losses[0]
  help = config_help.described()
  assert "  objectives.NAME.middle_rate=0.5" in help
  word = "--config.objectives.F.middle_rate=2"
  line = runs.told(config.load_config, "quickstart", [word])
  assert "objectives.F.middle_rate=2 is not at least 0 and at" in line


def test_settings_of_a_kind_of_objective_are_its_own():
  imported("objective")
  word = "--config.objectives.F.middle_rate=0.3"
  loaded = config.load_config("quickstart", [word])
  assert loaded.objectives["F"].middle_rate == 0.3
  assert config.config_from_json(config.to_json(loaded)) == loaded
  line = runs.told(config.load_config, "quickstart", [word.replace("F", "C")])
  assert "objectives.C.middle_rate is a setting of fim alone" in line
  word = "--config.objectives.F.kind=other"
  line = runs.told(config.load_config, "quickstart", [word])
  assert "objective.kind='other' is not one of fim; if a file" in line


@pytest.mark.parametrize("name", ["objective", "encoder"])
def test_a_page_shows_this_part_whole(name):
  """Catches an example that no test runs."""
  page = (runs.ROOT / f"docs/how_to/{name}.md").read_text("utf-8")
  (code,) = re.findall(r"cat > \w+.py << 'EOF'\n(.*?)\nEOF\n", page, re.S)
  assert code + "\n" == (FOLDER / f"{name}.py").read_text("utf-8")


class Listed(models.Encoder):
  """An encoder that keeps its blocks in a list."""

  def __init__(self, rngs, config):
    norms = [layers.RMSNorm(config.width, 1e-5) for _ in range(2)]
    self.blocks = nnx.List(norms)


class Plain(models.Encoder):
  """An encoder with a layer of Flax."""

  def __init__(self, rngs, config):
    self.up = nnx.Linear(config.width, 8, rngs=rngs)


class Looping(llama.Llama):
  """A llama whose own loop gives each block the masks of all layers."""

  def __call__(self, tokens, positions, mask, dropout_key=None):
    x, masks, _ = encoder.block_inputs(
      self.config, self.embed(tokens), mask, dropout_key
    )
    for block in encoder.unstack(self.blocks):
      x = block(x, None, masks, None)
    return x


def encoded(make, cached: bool = False):
  """Encodes four tokens with an encoder of a class."""

  class Settings(llama.LlamaConfig):
    def module(self, rngs):
      return make(rngs, self)

  model = models.build_model(
    Settings(layers=2, width=32, heads=4, kv_heads=2, scan_layers="no"), 50
  )
  tokens = np.ones((1, 4), np.int32)
  params = model.init(0)
  if cached:
    return model.extend(params, tokens, np.zeros(1, int), model.cache(1, 8))
  return model.encode(params, tokens, tokens, ax.AttentionMask(causal=True))


class Unregistered(objective.Objective):
  """An objective that no checkpoint could name."""


class Taken(llama.LlamaConfig):
  """An encoder with the name of another."""


REFUSED = [
  ("Plain.up/bias of shape (8,) has the axes None", encoded, Plain),
  ("Listed.blocks is a list of modules: stack", encoded, Listed),
  ("a mask of type PerLayer: give it an AttentionMask", encoded, Looping),
  ("caches of all layers: give it mask.of_layer", encoded, Looping, True),
  (
    "model: no checkpoint could name the class Taken: register it",
    lambda: config.Config(model=Taken()),
  ),
  (
    "objectives.F: no checkpoint could name the class Unregistered",
    lambda: config.Config(objectives={"F": Unregistered("f")}),
  ),
  ("model 'llama' is LlamaConfig of", models.ENCODERS.register("llama"), Taken),
  ("is no class of settings", models.ENCODERS.register("mine"), Plain),
  (
    "OBJECTIVES['C'] is clm: give yours another letter",
    objective.OBJECTIVES.__setitem__,
    "C",
    objective.Objective("mine"),
  ),
  (
    "unknown config key 'objectives.R.name': there is no objective R; give",
    config.load_config,
    "quickstart",
    ["--config.objectives.R.name=r"],
  ),
  (
    "once for each file: --plugin=a.py --plugin=b.py",
    plugins.load_plugins,
    ["--plugin=a.py,b.py"],
  ),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0][:30])
def test_parts_that_cannot_work_are_refused_in_a_line(case):
  """Catches tracebacks, and names that are saved but belong to others."""
  expected, call, *args = case
  assert expected in runs.told(call, *args)


def test_a_part_may_be_registered_again():
  """Catches a notebook's cell that runs only once."""
  _, module = imported("encoder", "encoder")
  assert models.ENCODERS["gated_llama"] is module.GatedConfig


def test_surplus_targets_of_an_own_corruption_are_its_own():
  """Catches advice about words for a plugin's objective."""
  (module,) = imported("objective")
  line = notes.lost_targets(0.25, [module.FillInTheMiddle("fim")])
  assert "25.00% of the targets: corrupt of fim predicts more" in line
  assert "words" in notes.lost_targets(0.25, [objective.OBJECTIVES["M"]])


def test_an_encoder(trained):
  imported(*TRAINS)
  loaded = ax.load(trained / "toy/0")
  assert loaded.config.model.name == "gated_llama"
  assert loaded.params["blocks/gate/kernel"].shape == (1, 32, 32)
  losses = runs.logged(trained / "toy/0", "eval/clm/loss")
  assert losses[16] < losses[0]
  assert len(ax.generate(loaded, "the dogs", tokens=3)) > 0


def test_a_writer(trained):
  for name in "01":
    folder = trained / "toy" / name
    with sqlite3.connect(folder / "metrics.db") as db:
      rows = db.execute("SELECT * FROM metrics").fetchall()
    db.close()
    rates = [value for _, of, value in rows if of == "train/learning_rate"]
    assert rates == [*runs.logged(folder, "train/learning_rate").values()]
    assert not (folder / "metrics.csv").exists()


def test_a_hook(trained):
  imported(*TRAINS)
  norms = runs.logged(trained / "toy/0", "eval/norm")
  assert norms == runs.logged(trained / "toy/1", "eval/norm")
  assert list(norms) == [0, 8, 16]
  params = ax.load(trained / "toy/0").params
  assert norms[16] == pytest.approx(float(optax.tree.norm(params)), rel=1e-5)
  last = runs.summary(trained / "toy/0")["held_out"][-1]
  assert last["eval/norm"] == norms[16]


def test_a_reader(run, tmp_path, capsys):
  texts = [text.strip() for text in toy_english.make_sentences(0, 300)]
  divs = "".join(f"<div>\n<p>{text}</p>\n</div>" for text in texts)
  (tmp_path / "a.tei").write_text(f"<TEI><text>{divs}</text></TEI>")
  line = runs.told(ax.prepare, str(tmp_path / "a.tei"))
  assert "is of no known kind" in line
  words = ["--vocab_size=300", "--seq_len=32", "--packing=documents"]
  words = [f"--text={tmp_path}/a.tei", f"--output={tmp_path}/data", *words]
  command("reader", "prepare", *words)
  by_hand = ax.prepare(
    texts, vocab_size=300, seq_len=32, packing="documents", quiet=True
  )
  at = np.arange(len(by_hand.train))
  read = PreparedData.open(tmp_path / "data").train.read(at)
  for found, expected in zip(read, by_hand.train.read(at), strict=True):
    assert np.array_equal(found, expected)
  capsys.readouterr()
  words = [f"--checkpoint={run}", f"--data={tmp_path}/a.tei", "--mode=causal"]
  command("reader", "eval", "perplexity", *words, f"--output={tmp_path}/out")
  summary = json.loads((tmp_path / "out/summary.json").read_text())
  found = ax.perplexity(run, tmp_path / "a.tei", quiet=True)
  assert found.summary.items() <= summary.items()
  assert found.summary == ax.perplexity(run, texts, quiet=True).summary
  (tmp_path / "b.tei").write_text("<TEI>")
  line = runs.told(ax.perplexity, run, tmp_path / "b.tei")
  assert f"cannot read {tmp_path}/b.tei: not XML: no element found" in line


def test_a_fine_tuning_task(run, tmp_path, capsys):
  words = [f"--checkpoint={run}", "--data=none", "--preset=toy", "--save"]
  words += [f"--output={tmp_path}", "--toy_examples=90", "--seeds=0"]
  words = ["eval", "finetune", *words]
  command("finetuning_task", *words)
  said = capsys.readouterr().out
  assert "tip:" not in said and "toy" in said
  folder = tmp_path / "toy" / f"{random_models.STEP}-bidirectional"
  about = json.loads((folder / "summary.json").read_text())
  assert about["train_examples"] == 90 and about["best_lr"] == 1e-2
  baseline = about["evaluations"]["toy"]["baseline"]["accuracy"]
  first = about["runs"][0]
  assert first["scores"]["toy"]["accuracy"] > 0.9 > 0.6 > baseline > 0.3
  assert not first["collapsed"]
  items = map(json.loads, (folder / "items.jsonl").read_text().splitlines())
  expected = [item["predictions"][0] for item in items]
  (module,) = imported("finetuning_task")
  model = ax.load(folder / "model")
  found = ax.predict(model, module.load("toy"), max_length=16)
  assert [one.value for one in found] == expected
  texts = [example.texts for example in module.load("toy")]
  assert ax.predict(model, texts, max_length=16) == found
  (hf,) = export.export_model(model, tmp_path / "hf")
  described = json.loads((hf / "config.json").read_text())
  assert described["architectures"] == ["EuroBertForTokenClassification"]
  assert described["id2label"] == {"0": "O", "1": "NAME", "2": "VERB"}
  runs.refusal(
    r"another request \(data differ",
    command,
    "finetuning_task",
    *words,
    "--toy_examples=91",
  )
  runs.refusal(
    "toy_examples=0 is not at least 1",
    command,
    "finetuning_task",
    *words,
    "--toy_examples=0",
  )
  given = {"toy_examples": 90, "seeds": (0,), "output": tmp_path}
  tuned = ax.finetune(run, "none", preset="toy", quiet=True, **given)
  assert tuned.score == first["scores"]["toy"]["accuracy"]
  with pytest.raises(SystemExit):
    command("finetuning_task", "eval", "finetune", "--help")
  assert "--toy_examples" in capsys.readouterr().out


def test_a_zero_shot_task_that_the_report_shows(trained, tmp_path, capsys):
  imported(*TRAINS)
  data = tmp_path / "sentences"
  data.mkdir()
  texts = ["Tom sat .", "A dog sat near the hills .", "the dogs often rested ."]
  (data / "text.txt").write_text("\n".join(texts))
  run, step = tmp_path / "runs/toy/0", 16
  run.parent.mkdir(parents=True)
  run.symlink_to(trained / "toy/0")
  words = f"--checkpoint={run}", f"--data={data}", "--mode=causal"
  words = "eval", "score", "--task=order", *words
  command("zero_shot_task", *words)
  folder = run / "evals/sentences" / f"{step}-causal"
  summary = json.loads((folder / "summary.json").read_text())
  share = f"{summary['accuracy']:.1%}"
  assert capsys.readouterr().out == (
    f"3 items of {data}, mode causal\nfigure     value\n"
    f"accuracy  {share}\nwritten to {folder}\n"
  )
  lines = map(json.loads, (folder / "items.jsonl").read_text().splitlines())
  assert [line["text"] for line in lines] == texts
  command("zero_shot_task", *words)
  out = capsys.readouterr().out
  assert f"accuracy  {share}\nalready scored" in out
  found = ax.evaluate(run, "order", data, mode="causal", quiet=True)
  assert found.score == summary["accuracy"]
  for asked, said in (("--help", "  order  "), (words[2], "holds text.txt")):
    with pytest.raises(SystemExit):
      command("zero_shot_task", "eval", "score", asked, "--help")
    assert said in capsys.readouterr().out
  study = f"--runs={tmp_path}/runs", f"--config={trained}/toy.py"
  command("zero_shot_task", "report", *study)
  text = (tmp_path / "runs/report/report.md").read_text()
  scores = text.split("\n## Scores\n")[1].split("\n## ")[0]
  head, _, causal, *_ = [x for x in scores.splitlines() if x.startswith("|")]
  column = [cell.strip() for cell in head.split("|")].index("Word order")
  shown = causal.split("|")[column].strip()
  assert shown == f"{100 * summary['accuracy']:.1f}"
  assert "Word order, mlm: not evaluated" in text
