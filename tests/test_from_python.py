"""Preparing and training from Python, with data in memory."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re

import numpy as np
import pyarrow
import pytest

import antlm_jax as ax
from antlm_jax import config, settings
from antlm_jax.commands import plan
from antlm_jax.commands import train as train_command
from antlm_jax.data import in_memory
from antlm_jax.errors import UserError
from antlm_jax.evals.studies import sweep
from antlm_jax.inference import model as model_lib
from antlm_jax.training import loop
from tests import helpers, runs

PACKED = {"vocab_size": 300, "seq_len": 16, "documents": "line"}


@pytest.fixture(scope="module")
def lines(english):
  (path,) = english.glob("text/*train*")
  return path.read_text().splitlines()[:600]


def train(folder, data, **more):
  more = {"curriculum": "6C+6M steps"} | more
  return ax.train("quickstart:shrink", folder, data, quiet=True, **more)


def test_a_run_without_a_folder_gets_a_new_one(monkeypatch):
  """Catches a second call that resumes, or refuses, the run of the first."""

  def refuse(config, workdir, *others):
    raise UserError(str(workdir))

  monkeypatch.setattr(loop, "train_run", refuse)
  line = runs.told(ax.train, "quickstart:shrink", data=[[1, 2]] * 9)
  date = r"\d{4}-\d\d-\d\d-\d{6}"
  assert re.fullmatch(f"runs/quickstart-{date}", line)


def _tables(lines):
  """Yields documents as the libraries that are installed hold them."""
  with contextlib.suppress(ImportError):
    import pandas

    yield pandas.DataFrame({"text": [*lines, None]})
    yield pandas.Series([*lines[:9], None, *lines[9:]])
  with contextlib.suppress(ImportError):
    import datasets

    yield datasets.Dataset.from_dict({"text": lines})
    yield datasets.Dataset.from_dict({"text": lines}).to_iterable_dataset()


def test_a_mapping_of_splits_is_held_out_as_its_keys_say(lines, capfd):
  """Catches a dev set that is trained on, or replaced by a share of train."""
  sets = {"train": lines[:500], "validation": lines[500:], "test": lines[:9]}
  of_mapping = ax.prepare(sets | {"unsupervised": lines}, **PACKED)
  printed = capfd.readouterr().out
  assert "not used, named test" in printed
  assert "beside a set named train: 'unsupervised'" in printed
  alone = ax.prepare(lines[:500], dev=lines[500:], quiet=True, **PACKED)
  assert of_mapping.manifest.splits == alone.manifest.splits
  both = runs.told(ax.prepare, sets, dev=lines[:9], quiet=True, **PACKED)
  assert both == "data has a dev set, and dev is given: leave one out"


def test_texts_are_paths_or_documents(lines, tmp_path, capfd):
  """The same documents give the same rows from every source."""
  path = tmp_path / "lines.txt"
  path.write_text("\n".join(lines))
  made = [
    ax.prepare(text, output, quiet=True, **PACKED)
    for text, output in (
      (path, tmp_path / "data"),
      (str(path), None),
      ([path], None),
      (lines, None),
      (iter(lines), None),
      ({"text": lines}, None),
      ([{"text": line} for line in lines], None),
      (pyarrow.table({"text": lines}), None),
      *((table, None) for table in _tables(lines)),
    )
  ]
  hashes = [data.manifest.splits["train"].sha256 for data in made]
  assert len({*hashes}) == 1 and made[0].folder and not made[1].folder
  rows = range(len(made[0].train))
  for data in made[1:]:
    found, wanted = (of.train.read(rows)[0] for of in (data, made[0]))
    np.testing.assert_array_equal(found, wanted)
  assert repr(made[0]).startswith(f"<prepared data: {len(rows):,} rows of 16")
  assert capfd.readouterr() == ("", "")  # quiet
  # With a list of documents, too, an existing folder is reused.
  for output in (tmp_path / "new", tmp_path / "new"):
    ax.prepare(lines, output, **PACKED)
  assert "is already prepared with these settings" in capfd.readouterr().out
  line = runs.told(ax.prepare, [str(path)])
  assert "is a path, " in line and " a list of pathlib.Path" in line
  line = runs.told(ax.prepare, [], quiet=True)
  assert line == "no text to train on: the list of texts is empty"


def test_bad_documents_are_told_by_their_index():
  """Catches a temporary file's name in errors, and columns' names as texts."""
  for texts, message in (
    (["a", "x\ud83d"], "text 1 "),
    (["a", 1.5], "text 1 is 1.5, not a str"),
    (["a.txt", "a text", "gs://a", 1.5], "text 3 is 1.5, not a str"),
    ([None, *"ab", 3], "text 3 is 3, not a str"),
    ({"body": ["a"]}, "data has the sets 'body': give train, dev and test"),
    (dict.fromkeys(range(9999), "a"), "data has the sets 0, 1, 2, 3,"),
    ([{"text": "a"}, {"body": "b"}], "text 1 (counted from 0) has no column"),
    ("a text .\n" * 99, "'a text .\\na text"),
  ):
    line = runs.told(ax.prepare, texts, seq_len=8, quiet=True)
    assert line.startswith(message) and len(line) < 300


@pytest.mark.slow
def test_data_in_memory_train_as_a_folder_does(lines, tmp_path, capfd):
  """Parameters are equal bit for bit, and a run resumes on either."""
  folder = ax.prepare(lines, tmp_path / "data", quiet=True, **PACKED)
  held = ax.prepare(lines, quiet=True, **PACKED)
  path = tmp_path / "data"
  for data in (path, str(path), folder):
    expected = {"data.path": str(path)}, {}
    assert train_command._data_sources(data) == expected
  first, second = train(tmp_path / "a", path), train(tmp_path / "b", held)
  assert capfd.readouterr() == ("", "")
  assert first.steps == second.steps == 12
  assert repr(first).startswith(f"<run {tmp_path / 'a'}, 12 steps, clm ")
  assert {*first.losses} == {"clm", "mlm"}
  assert helpers.equal(first.load().params, second.load().params)
  # The run is complete, and is recognized with its data in a folder.
  assert train(tmp_path / "b", folder).losses == second.losses


@pytest.fixture(scope="module")
def mixed(lines, tmp_path_factory):
  """Two runs on the same two sources; one source of the second is in memory."""
  path = tmp_path_factory.mktemp("mixed")
  how = PACKED | {"packing": "documents", "quiet": True}
  how["tokenizer"] = path / "tokenizer.json"
  tokenizer = ax.prepare(lines[:300], **PACKED, quiet=True).tokenizer
  how["tokenizer"].write_text(tokenizer.to_json())
  del how["vocab_size"]
  one, two = lines[:300], lines[300:]
  folders = (
    ax.prepare(one, path / "a", **how),
    ax.prepare(two, path / "b", **how),
  )
  held = ax.prepare(two, **how)
  return [
    train(path / f"run{i}", {"one": folders[0], "two": second}, mix="one:two")
    for i, second in enumerate((folders[1], held))
  ]


@pytest.mark.slow
def test_sources_in_memory_mix_as_folders_do(mixed):
  """Catches rows in memory that mix with no others, or other rows."""
  first, second = (run.load().params for run in mixed)
  assert helpers.equal(first, second)


@pytest.mark.slow
def test_rows_of_token_ids_need_no_tokenizer(tmp_path):
  rows = np.random.default_rng(0).integers(0, 40, (200, 8))
  ended = []

  class End(ax.Hook):
    def finish(self, trainer):
      ended.append(trainer.step)

  run = train(
    tmp_path / "run", rows, hooks=iter([End()]), **{"train.batch_size": 8}
  )
  assert ended == [run.steps]
  model = run.load()
  assert model.tokenizer.decode([3, 39]) == "3 39"
  assert model.tokenizer.vocab_size == 41  # with the mask
  # "clm" names the causal mode, too, and a model may be a path.
  scores = ax.score(model, "1 2 3", mode="clm")
  for path in (run.workdir, str(run.workdir), run):
    np.testing.assert_array_equal(scores, ax.score(path, ["1 2 3"]))
  # Steps 6 and 12 have checkpoints.
  assert ax.score(run, "1 2 3", step=6) < scores
  earlier, last = (
    ax.perplexity(run, ["1 2 3"], mode="clm", step=step, quiet=True)
    for step in (6, 12)
  )
  assert earlier.nats_per_token > last.nats_per_token
  # A run refuses to resume on other rows.
  assert "on other rows" in runs.told(
    train, tmp_path / "run", rows[::-1], **{"train.batch_size": 8, "seed": 0}
  )


def test_rows_of_dev_are_held_out():
  """Catches rows of dev that are a second source to train on."""
  rows = np.random.default_rng(0).integers(0, 40, (200, 8))
  _, held = train_command._data_sources({"train": rows, "valid": rows[:9]})
  (prepared,) = held.values()
  np.testing.assert_array_equal(prepared.train.read(range(200))[0], rows)
  np.testing.assert_array_equal(prepared.dev.read(range(9))[0], rows[:9])
  _, held = train_command._data_sources({"news": rows, "web": rows})
  assert [*held] == ["news", "web"]
  for wrong in ({"train": rows, "test": rows}, {"news": rows, "dev": rows}):
    with pytest.raises(UserError, match=r"data has the sets .*give .*train"):
      train_command._data_sources(wrong)


@pytest.mark.parametrize(
  "rows, told",
  [
    (np.zeros(3, int), "rows are int64 of the shape (3,)"),
    (np.zeros((9, 4)), "rows are float64"),
    ([[1, 2], [1]], "rows are not all as long"),
    (["a text"], "are texts: give antlm_jax.prepare"),
    (-np.ones((9, 4), int), "token ids -1 to -1"),
    (np.full((9, 4), 2**31), "give ids from 0 to 1048575"),
    (np.zeros((9, 0), int), "rows are int64 of the shape (9, 0)"),
  ],
)
def test_bad_rows_are_one_line(rows, told):
  assert told in runs.told(in_memory.from_rows, rows)


def test_a_config_is_a_name_or_a_value():
  """Settings change a config given by name, as a value or as a dict."""
  changes = {"optimizer.name": "muon", "train.steps": 5, "eval.watch": ("clm",)}
  by_name = config.load_config("quickstart", changes)
  assert isinstance(by_name.optimizer, ax.Muon)
  assert by_name.train.steps == 5 and by_name.eval.watch == ("clm",)
  assert (
    config.load_config(config.load_config("quickstart"), changes) == by_name
  )
  as_dict = config.config_module("quickstart").get_config("")
  assert config.load_config(as_dict, changes) == by_name
  line = runs.told(config.load_config, "quikstart", {})
  assert line.startswith("config=quikstart: ") and "'quickstart'" in line


@pytest.mark.parametrize(
  "short, whole",
  [
    ({"steps": 5, "peak_lr": 3e-3}, "train.steps=5 schedule.peak_lr=3e-3"),
    (
      {"watch": ["clm", "mlm"], "steps": 1e3},
      "eval.watch=clm,mlm train.steps=1000",
    ),
    (
      {"optimizer": "muon", "average": "tail"},
      "optimizer=muon optimizer.average=tail",
    ),
    ({"schedule": "wsd"}, "schedule.name=wsd"),
    (
      {"model": "ltg_bert", "layers": np.int64(3)},
      "model.name=ltg_bert model.layers=3",
    ),
    ({"init.checkpoint": pathlib.Path("runs/x")}, "init.checkpoint=runs/x"),
    ({"curriculum": "8C+8M"}, "curriculum=8C+8M"),
  ],
)
def test_a_setting_has_a_short_name(short, whole):
  """Catches a name that sets another setting than the command's whole key."""
  words = [f"--config.{word}" for word in whole.split()]
  expected = config.load_config("quickstart", words)
  assert config.load_config("quickstart", short) == expected
  assert config.load_config(config.load_config("quickstart"), short) == expected
  words = [f"--config.{x}={settings.text(short[x])}" for x in short]
  assert config.load_config("quickstart", words) == expected


def test_a_section_replaces_that_of_the_config():
  """Catches settings of the config's own section that stay behind."""
  muon, train_, wsd = ax.Muon(average="tail"), ax.Train(steps=9), ax.WSD()
  made = config.load_config(
    "quickstart", {"optimizer": muon, "train": train_, "schedule": wsd}
  )
  assert (made.optimizer, made.train, made.schedule) == (muon, train_, wsd)
  before = config.load_config("quickstart")
  assert made.model == before.model and made.eval == before.eval
  # `plan` prints the settings as a command has them.
  words = {"steps": 9, "watch": ("clm",), "optimizer": ax.Muon(average="tail")}
  keys = plan.whole_keys(config.load_config(before, words), words)
  assert keys["train.steps"] == "9" and keys["eval.watch"] == "clm"
  again = config.load_config(
    "quickstart", [f"--config.{k}={v}" for k, v in keys.items()]
  )
  assert again == config.load_config(before, words)


@pytest.mark.slow
def test_a_run_has_a_history_and_a_picture(mixed, tmp_path):
  """Catches other values than metrics.jsonl's, and a picture of other steps."""
  run = mixed[1]
  text = (run.workdir / "metrics.jsonl").read_text()
  recorded = [json.loads(line) for line in text.splitlines()]
  history = run.history()
  assert {(m.step, m.name): m.value for m in history} == {
    (record["step"], name): value
    for record in recorded
    for name, value in record.items()
    if name != "step"
  }
  losses = run.history("eval/clm/loss")
  assert losses[-1].value == run.losses["clm"] and losses[-1].step == 12
  assert losses._repr_html_().count("<tr>") == 1 + len(losses)
  assert str(losses).splitlines()[-1].split()[:2] == ["12", "eval/clm/loss"]
  assert "'eval/x' is none of eval/clm/loss" in runs.told(run.history, "eval/x")
  assert "names=5 is not of type str" in runs.told(run.history, 5)
  # The curriculum and the mix are shaded as in the run's own picture.
  assert run.plot()._repr_png_() == (run.workdir / "curves.png").read_bytes()
  (run.workdir / "summary.json").unlink()  # as of a run that has not ended
  model = ax.load(run)
  assert model.history() == history
  panel, *_ = model.plot().axes
  assert panel.get_xlim() == (0, 12) and panel.lines and not panel.patches
  assert "has no measurements of a run" in runs.told(
    model_lib.load(
      model_lib.write_checkpoint(tmp_path / "1", 1, model.params, model.meta)
    ).history
  )


def test_a_value_alone_is_one_value_of_a_grid():
  """Catches a text that is cut into its characters."""
  grid = {"seed": "12", "curriculum": "4C steps", "schedule.peak_lr": [1, 2]}
  points = sweep._grid_points(grid)
  assert [point["schedule.peak_lr"] for point in points] == ["1", "2"]
  assert {(p["seed"], p["curriculum"]) for p in points} == {("12", "4C steps")}


@pytest.mark.slow
def test_results_are_models_and_paths(lines, tmp_path, monkeypatch):
  """Catches a result that a function takes only as its `model` or `path`."""
  run = train(tmp_path / "run", ax.prepare(lines, quiet=True, **PACKED))
  records = [
    {"review": line, "stars": "ab"[i % 2]} for i, line in enumerate(lines[:60])
  ]
  how = {"preset": "classification", "epochs": 1, "quiet": True}
  how |= {"text_column": "review", "label_column": "stars"}
  monkeypatch.chdir(tmp_path)
  tuned = ax.finetune(run, records, output="tuned", save=True, **how)
  (tmp_path / "other").mkdir()
  monkeypatch.chdir(tmp_path / "other")  # results keep their places
  assert "own" in tuned and [*tuned] == ["own"] and len(tuned) == 1
  model = ax.load(tuned)
  assert model == model and model != ax.load(tuned) and {model: 1}[model]
  texts = ax.generate(run, "the", tokens=np.int64(2), temperature=np.float32(0))
  assert texts == ax.generate(run, "the", tokens=2, temperature=0)
  assert model.path == tuned.model and model.task.columns == ["review"]
  found = ax.predict(model, lines[:3])
  for one in (tuned, tuned["own"], tuned.model):
    assert ax.predict(one, lines[:3]) == found
  np.testing.assert_array_equal(
    ax.embed(tuned, lines[:2]), ax.embed(model, lines[:2])
  )
  (folder,) = ax.export(tuned, tmp_path / "hf", language="en,de", quiet=True)
  assert "\n- en\n- de\n" in (folder / "README.md").read_text()
  assert folder.attention == "bidirectional" and repr(folder).endswith(
    f"{folder}: bidirectional, opens with {folder.classes[0]}>"
  )
  assert str(folder) == os.fspath(folder) == str(tmp_path / "hf")
  assert (folder / "config.json").is_file() and pathlib.Path(folder).is_dir()
  # A run starts from another run, or from a model.
  for start in (run, model, tuned):
    changes = {"init.checkpoint": start}
    assert config.load_config(
      "quickstart", changes
    ).init.checkpoint == os.fspath(start)
  unsaved = ax.finetune(run, records, output=tmp_path / "b", **how)
  line = runs.told(ax.predict, unsaved, ["a"])
  assert "own is not saved: fine-tune with save=" in line
  untrained = ax.finetune(tuned, {"test": records}, **how | {"epochs": 0})
  assert "own was evaluated without training" in runs.told(ax.load, untrained)
  several = dataclasses.replace(
    tuned, tasks={"a": tuned["own"], "b": tuned["own"]}
  )
  line = runs.told(ax.load, several)
  assert "a, b are several models: " in line and "['a']" in line
  assert "None is no model: give a path, or" in runs.told(ax.score, None, "a")


@pytest.mark.parametrize(
  "call, told",
  [
    (lambda: ax.train("quickstart", "w", hooks=["norm"]), "'norm' is no Hook"),
    (lambda: ax.train("quickstart", "w", hooks=[ax.Hook]), "is no Hook: give"),
    (lambda: ax.train("quickstart", "w", ["a text"]), "data are texts: give"),
    (lambda: ax.Config(optimizer="muon"), "optimizer='muon' is no section"),
    (lambda: ax.Config(model=ax.Train()), r"model=Train\(.* is no section"),
    (lambda: ax.prepare([b"text"]), "text 0 is b'text', not a str"),
    # Catches names of files, datasets and globs that are trained on as texts.
    (
      lambda: ax.prepare(["a.txt", "b.md.gz"]),
      "'a.txt' is a path, but .* with",
    ),
    (lambda: ax.prepare(["a"], dev=iter(["hf://a/b"])), "'hf://a/b' is a path"),
    (
      lambda: ax.prepare({"text": ["../*/"]}),
      "'../\\*/' is a path, but a list",
    ),
    # Catches documents that are single characters.
    (lambda: ax.prepare({"text": "a b"}), "column 'text' is a str: give a li"),
    (lambda: ax.train("quickstart", "w", hooks=ax.Hook()), "is no list: give"),
    (lambda: ax.train(None, "w"), "config=None is no config: give a name"),
    (lambda: ax.Config(optimizer=ax.Muon), "is no section .*Muon\\(\\)"),
    (
      lambda: ax.train("quickstart", "w", np.ones((9, 4), int), path="data"),
      "data and data.path are both given",
    ),
    (lambda: ax.prepare(["a"], tasks=2, task=0), "task=0 needs an output"),
    (
      lambda: ax.prepare(["the dogs"], quiet=True),
      "no words for .* in documents of the list; give more",
    ),
    (lambda: ax.prepare(None), "text=None is no text, path or list of them"),
    (lambda: ax.train("quickstart", 3), "workdir=3 is no path"),
    # Catches a folder named ~.
    (lambda: ax.train("quickstart", "~/w"), "workdir=~/w: .* write /"),
    (lambda: ax.prepare(["a"], pathlib.Path("~/w")), "output=~/w: .* write /"),
    (lambda: ax.load("~/w"), "=~/w: .* write /"),
    (
      lambda: ax.plan("quickstart", "h100:8", check=True, sweep=True),
      "check compiles nothing: leave out sweep",
    ),
    # Catches a run in the current folder.
    (lambda: ax.train("quickstart", ""), "workdir is empty: give a path"),
    # Catches tracebacks, and "has no step 20, but steps 20".
    (lambda: ax.load("run", step="20"), "step='20' is not of type int"),
    (lambda: ax.load("run", stp=20), "load: no argument 'stp'; did you mean"),
    (lambda: ax.load(), "load: give path: Path to the run"),
    (lambda: ax.train(), "train: give config: Name of a config"),
    (lambda: ax.train("quickstart", "w", "d", []), "train: too many positio"),
    # Catches a text that is true.
    (lambda: ax.train("quickstart", "w", quiet="no"), "quiet='no' is not of"),
    (
      lambda: ax.train("quickstart", "w", {"input_ids": [[1]], "labels": [1]}),
      "data has the columns input_ids, labels: give rows",
    ),
    (
      lambda: ax.train("quickstart", "w", {"train": [[1], [2]], "eval": "a"}),
      "dev data are no rows of token ids",
    ),
    (lambda: ax.evaluate("run", "cola"), "finetune .* has the tasks that need"),
    (lambda: ax.export("run"), "export: give output: Path to a new folder"),
    (lambda: ax.evaluate("run", "blimp", None), "data=None is no path"),
    (lambda: ax.export("run", 3), "output=3 is no path"),
    (lambda: ax.sweep(ax.Config(), "seed=1", "w"), "give a sweep the name of"),
    (lambda: ax.sweep("quickstart", None, "w"), "None is no mapping and no"),
    (
      lambda: ax.sweep("quickstart", {"optimizer": [ax.Muon()]}, "w"),
      "is no value of a sweep: give its name and settings",
    ),
  ],
)
def test_mistakes_are_told_in_one_line(call, told, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match=told) as error:
    call()
  assert "\n" not in str(error.value) and not list(tmp_path.iterdir())
