"""The configuration: files, overrides and differences."""

import dataclasses
import json

import numpy as np
import pytest

from antlm_jax import config, optim, sections, settings
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.objective import OBJECTIVES, Objective
from tests import random_models
from tests.runs import ROOT, told

QUICK = str(ROOT / "configs/quickstart.py")
FILES = sorted((ROOT / "configs").rglob("*.py"))
ARGUMENTS = {
  "antlm_babyllama": ["curriculum=24C", "curriculum=24M"],
  "antlm_ltg_bert": ["curriculum=72C", "size=xs", "size=small"],
  "antlm_table": ["row=babyllama_mixed_1_7,scale=small"]
  + [
    f"row={row},scale={scale},seed=2"
    for row in ("babyllama_mixed_1_7", "ltg_bert_mntp_1_15", "ltg_bert_antlm")
    for scale in ("tiny", "paper")
  ],
  "continued": ["curriculum=300C+700M steps", "mask_ratio=0.2"],
  "detour": ["steps=100,decay=0.5"],
  "from_decoder": ["steps=100,causal=0.5,objective=N", "causal=0"],
  "longer": ["tokens=64,base=500"],
  "gpt_bert": ["size=base"],
  "modernbert": ["size=1B", "size=150M,curriculum=20M"],
  "babylm_small": ["curriculum=24M", "curriculum=C:M=1:15"],
  "encoders": ["size=610M", "size=1B", "curriculum=42000C"],
  "regularised": ["row=fresh_antlm_10_5,seed=2"],
  "clm_then_mlm": ["row=m_short,seed=2"],
  "wider_grid": ["row=objectives_40_50,scale=grid,seed=2"],
  "quickstart": [],
  "own_text": [
    *("words=1M", "memory=8", "objectives=C", "dtype=float32"),
    *("words=100M", "words=1B,memory=80,objectives=M"),
  ],
  "clm_or_mlm": ["row=tiny_mlm20_42", "row=tiny_mlm40_42_more_12,seed=2"]
  + [
    f"row={row},scale=paper"
    for row in ("210m_clm_42", "610m_clm40_mlm30_42", "1b_mlm50_42")
  ],
}

ARGUMENTS["encoders"] += ["size=610M,curriculum=10000C+32000M,mask_ratio=0.2"]


@pytest.fixture(scope="module")
def required(tmp_path_factory):
  """Required arguments by the config's name."""
  run = tmp_path_factory.mktemp("run")
  random_models.save(run, random_models.tokenizer())
  names = "continued", "detour", "from_decoder", "longer"
  return dict.fromkeys(names, f"model={run}")


def spec(path, *arguments):
  """Returns a config file with arguments, as on the command line."""
  return f"{path}:{','.join(filter(None, arguments))}"


def load(*overrides):
  return config.load_config(QUICK, [f"--config.{o}" for o in overrides])


def test_a_run_resumes_from_any_folder_without_its_start(tmp_path, monkeypatch):
  """Catches a relative path, and a start that is missed when it is gone."""
  (tmp_path / "runs/base").mkdir(parents=True)
  for folder, path in (("runs", "base/"), ("runs", "base"), (".", "runs/base")):
    monkeypatch.chdir(tmp_path / folder)
    before = load(f"init.checkpoint={path}")
    assert before.init.checkpoint == str(tmp_path / "runs/base")
  assert load("init.checkpoint=hf://A/B").init.checkpoint == "hf://A/B"
  (tmp_path / "runs/base").rmdir()
  gone, other = load(f"init.checkpoint={path}"), load("init.checkpoint=other")
  assert not config.config_differences(before, gone)
  assert config.config_differences(before, other)


@pytest.mark.parametrize(
  "text, value",
  [
    ("seed=7", 7),
    ("train.batch_size=1e3", 1000),
    ("optimizer.eps=1e-5", 1e-5),
    ("schedule.warmup_steps=300", 300),
    ("schedule.warmup_steps=1", 1),
    ("schedule.warmup_steps=0.5", 0.5),
    ("model.tied=false", False),
    ("model.windows=8,0", (8, 0)),
    ("curriculum=C:M=1:15", "C:M=1:15"),
    ("data.path=a=b,c d", "a=b,c d"),
    ("data.path=", ""),
    ("eval.objectives=C,M,N", ("C", "M", "N")),
    ("eval.objectives=()", ()),
    ("objectives.M.mask_ratio=0.4", 0.4),
    ("objectives.M.mask_ratio_end=None", None),
  ],
)
def test_override_is_read_as_its_settings_type(text, value):
  key, _, word = text.partition("=")
  for change in ([f"--config.{text}"], {key: word}, {key: value}):
    changed = config.load_config("babylm_small", change)
    found = config.leaves(changed)[key]
    assert found == value and type(found) is type(value)


def test_letters_with_a_ratio_are_objectives_where_they_are_used():
  found = load(
    "curriculum=30C+2*(10M30:C=1:3+20M15)+3M5",
    "eval.objectives=C,M40",
    "objectives.M.unit=word",
    "objectives.M.mask_ratio_end=0.1",
  )
  known = found.known_objectives
  assert set(known) - set(OBJECTIVES) == {"M30", "M15", "M5", "M40"}
  for percent in (30, 15, 5, 40):
    made = known[f"M{percent}"]
    assert (made.name, made.unit) == (f"mlm{percent}", "word")
    assert made.ratio_at(0) == made.ratio_at(1) == percent / 100
  parsed = curriculum.parse_curriculum(found.curriculum, list(known), 10)
  assert parsed.objectives == ("C", "M30", "M15", "M5")
  assert parsed.steps == 10 * (30 + 2 * (10 + 20) + 3)
  assert "unknown objective 'D30'" in told(
    curriculum.parse_curriculum, "D30", list(known), 10
  )


def test_an_override_changes_nothing_else_and_the_last_one_wins():
  before = config.leaves(load())
  after = config.leaves(load("model.layers=3", "seed=1", "seed=0"))
  assert {k for k in before if before[k] != after[k]} == {"model.layers"}


@pytest.mark.parametrize(
  "text, words",
  [
    ("sed=1", "unknown config key 'sed'; did you mean 'seed'?"),
    ("train.batchsize=1", "did you mean 'train.batch_size'?"),
    ("optimiser.name=lamb", "did you mean 'optimizer.name'?"),
    ("bach_size=3", "did you mean 'train.batch_size'?"),
    ("learning_rate=1", "did you mean 'schedule.peak_lr'?"),
    ("bf16=true", "did you mean 'model.dtype'?"),
    ("objective=mlm", "did you mean 'curriculum'?"),
    ("output_dir=x", "; give the run's folder as workdir"),
    ("model.peak_lr=1", "did you mean 'schedule.peak_lr'?"),
    ("optim.name=lamb", "did you mean 'optimizer.name'?"),
    ("optimizer.beta1=0.9", "did you mean 'optimizer.b1'?"),
    ("seed.x=1", "unknown config key 'seed.x'"),
    ("objectives.Q.mask_ratio=1", "unknown config key"),
    ("seed=one", "seed=one: not int"),
    ("peak_lr=fast", "schedule.peak_lr=fast: not float"),
    ("model.tied=maybe", "not bool"),
    ("train=3", "train is a group: set one setting of it (batch_size"),
    # The last name of init.checkpoint, too.
    ("checkpoint=x", "checkpoint is a group: set one setting of it (every"),
    ("every=5", "'eval.every', 'checkpoint.every' or 'log.every'"),
    ("mask_ratio=0.3", "did you mean 'objectives.M.mask_ratio'?"),
    # Catches words of other libraries that are similar to unrelated settings.
    ("gradient_clip=1", "did you mean 'optimizer.clip'?"),
    ("gradient_checkpointing=1", "did you mean 'model.remat'?"),
    ("num_key_value_heads=1", "did you mean 'model.kv_heads'?"),
    ("vocab_size=300", "; prepare the data with vocab_size"),
    ("resume_from_checkpoint=1", "; the same command resumes a run"),
    ("weight=2", "did you mean 'objectives.C.weight', 'obj"),
    ("lr=1", "did you mean 'schedule.peak_lr'?"),
    (
      "schedule.decay_steps=9",
      "schedule.decay_steps is a setting of wsd alone",
    ),
    ("optimiser=muon", "did you mean 'optimizer'?"),
    ("zzzzzzzzz=1", "--help"),
    # Values out of range.
    ("schedule.min_lr_ratio=-1", "is not at least 0 and at most 1"),
    ("optimizer.decay_scope=x", "is not one of all, matrices, hidden"),
    ("optimizer.eps=1e300", "optimizer.eps=1e300 is not finite in float32"),
    ("objectives.M.mask_ratio=2", "objectives.M.mask_ratio=2 is not at"),
    ("model.name=gpt", "model.name='gpt' is not one of bert, "),
  ],
)
def test_bad_override_is_told(text, words):
  """Catches a guess, and other words for Python than for a command line."""
  line = told(load, text)
  assert words in line and len(line) < 300 and "--config" not in line
  key, _, value = text.partition("=")
  for start in (QUICK, config.load_config(QUICK)):
    assert told(config.load_config, start, {key: value}) == line


def test_no_hint_at_a_setting_that_the_kind_lacks():
  """Catches a traceback, and `did you mean optimizer.b1` of an optimizer."""
  kinds = {"optimizer.name": "adamw", "optimizer.weight_decay": 0.1}
  assert "b1" not in config.meant_key("optimizer.beta1", kinds)
  kinds["optimizer.b1"] = 0.9
  assert config.meant_key("optimizer.beta1", kinds).endswith("'optimizer.b1'?")


def test_objectives_of_a_run_whose_plugin_is_absent():
  """Catches a report that needs the plugin, or lacks M30."""
  stored = json.loads(config.to_json(load("curriculum=300C+700M30 steps")))
  assert config.stored_objectives(stored)["M30"]["mask_ratio"] == 0.3
  stored["objectives"]["X"] = {"kind": "of a plugin", "name": "x"}
  stored["curriculum"] = "300X+700M30 steps"
  objectives = config.stored_objectives(stored)
  assert objectives["X"] == {"kind": "of a plugin", "name": "x"}
  assert objectives["M30"]["mask_ratio"] == 0.3


@pytest.mark.parametrize(
  "changes, line",
  [
    (["--config.seed"], "--config.seed: give a value, --config.seed=VALUE"),
    ({"steps": 2.5}, "train.steps=2.5 is not of type int"),
    ({"steps": None}, "train.steps=None is not of type int"),
    ({"steps": 5, "train.steps": 6}, "train.steps is set twice: leave out one"),
    ({"optimizer": "muon", "optimizer.name": "lamb"}, "optimizer.name is set"),
    ({"optimizer": sections.Train()}, "optimizer=Train("),
    ({"train.steps": 5, "epochs": 2}, "train.epochs and train.steps are both"),
  ],
)
def test_changes_that_cannot_be_meant_are_told(changes, line):
  assert told(config.load_config, QUICK, changes).startswith(line)


def test_another_implementation_drops_no_typo():
  """Catches a config's misspelled setting that an override hides."""
  settings_in_groups = {"optimizer": {"weight_dacay": 0.1}}
  line = told(config.load_config, settings_in_groups, {"optimizer": "adamw"})
  assert line.startswith("unknown config key 'optimizer.weight_dacay'")


def test_a_list_keeps_brackets_inside_its_texts():
  field = settings.ListField(value_type=tuple, part=settings.Field())
  assert field.parse("text (en)", "columns") == ("text (en)",)
  assert field.parse("(a,b (c))", "columns") == ("a", "b (c)")
  assert field.parse("()", "columns") == ()


def test_every_number_has_bounds():
  texts = {int: ("1e30", "-2"), float: ("nan", "-1")}
  for key, value in config.leaves(config.Config()).items():
    for text in texts.get(type(value), ()):
      line = told(load, "schedule.name=wsd", f"{key}={text}")
      assert f"{key.split('.')[-1]}=" in line and len(line) < 300


def test_a_loaded_config_does_not_change_but_makes_another():
  loaded = load()
  with pytest.raises(AttributeError):
    loaded.seed = 1
  other = config.load_config(loaded, {"seed": 1, "model.layers": 3})
  assert (other.seed, other.model.layers, loaded.seed) == (1, 3, 0)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_config_loads_shrinks_and_is_stored_exactly(path, required):
  needed = required.get(path.stem, "")
  plain = config.load_config(spec(path, needed))
  for arg in ["", *ARGUMENTS[path.stem]]:
    whole = config.load_config(spec(path, needed, arg))
    small = config.load_config(spec(path, "shrink", needed, arg))
    for part in arg.split(","):
      name, _, value = part.partition("=")
      if name == "curriculum":
        assert whole.curriculum == value
    assert not arg or config.leaves(whole) != config.leaves(plain)
    check_shrunk(whole, small)
    again = config.config_from_json(config.to_json(small))
    assert repr(again) == repr(small)  # repr shows types
    assert config.config_differences(small, again) == []


def check_shrunk(whole, small):
  """Asserts that a shrunk run has the same phases in about 12 small steps."""
  names = list(whole.known_objectives)
  long = curriculum.parse_curriculum(whole.curriculum, names, 1000, 1000)
  short = curriculum.parse_curriculum(small.curriculum, names, 1, None)
  assert 2 <= short.steps <= max(24, len(long.phases))
  assert small.model.width <= 64
  assert len(short.phases) == len(long.phases)
  for a, b in zip(short.phases, long.phases, strict=True):
    assert a.shares == pytest.approx(b.shares, abs=1e-5)
    part = (b.stop - b.start) / long.steps
    assert (a.stop - a.start) / short.steps == pytest.approx(part, abs=0.1)
  assert small.objectives == whole.objectives


@pytest.mark.parametrize(
  "overrides, curriculum_, steps",
  [
    ((), "4C+16M+4C", 12),
    (("curriculum=10C+50M",), "10C+50M", 12),
    (("curriculum=42000M",), "42000M", 12),
    (("curriculum=0.25C+0.5M+0.25C",), "0.25C+0.5M+0.25C", 12),
    (("curriculum=20C+30M steps",), "20C+30M steps", 50),
    (("train.steps=300",), "4C+16M+4C", 300),
    (("curriculum=25%C+75%M", "train.steps=8"), "25%C+75%M", 8),
  ],
)
def test_shrink_heeds_the_overrides(overrides, curriculum_, steps):
  changes = [f"--config.{word}" for word in (*overrides, "model.layers=3")]
  small = config.load_config("antlm_babyllama:shrink", changes)
  known = ["C", "M"]
  parsed = curriculum.parse_curriculum(small.curriculum, known, 10_000, None)
  whole = curriculum.parse_curriculum(curriculum_, known, 1000, 1000)
  assert (parsed.steps, small.train.steps) == (steps, 0)
  for a, b in zip(parsed.phases, whole.phases, strict=True):
    assert abs(a.stop / parsed.steps - b.stop / whole.steps) < 1 / steps
  assert (small.model.layers, small.model.width) == (3, 32)
  epochs = ["--config.train.epochs=2", "--config.curriculum=1C+1M"]
  assert config.load_config("quickstart:shrink", epochs).curriculum == "1C+1M"


def test_shrink_drops_steps_that_it_never_reaches(tmp_path):
  """Catches a shrunk run that `checkpoint.at` refuses."""
  path = tmp_path / "late.py"
  path.write_text(MAKE.format("config.checkpoint.at = (3000,)"))
  assert config.load_config(path).checkpoint.at == (3000,)
  assert not config.load_config(f"{path}:shrink").checkpoint.at


@pytest.mark.parametrize("steps", [1, 3, 6, 40, 41, 100])
def test_shrink_takes_the_steps_that_are_asked_for(steps):
  """Catches a curriculum of many phases that ignores `train.steps`."""
  change = [f"--config.train.steps={steps}"]
  small = config.load_config("quickstart:shrink", change)  # 40 phases
  parsed = curriculum.parse_curriculum(small.curriculum, ["C", "M"], 1000)
  assert (parsed.steps, small.train.steps) == (steps, 0)
  assert len(parsed.phases) == min(steps, 40)
  kinds = [tuple(phase.shares) for phase in parsed.phases]
  assert kinds == [("C",), ("M",)] * (len(kinds) // 2) + [("C",)] * (
    len(kinds) % 2
  )


@pytest.mark.parametrize(
  "change, steps, epochs",
  [
    ("curriculum=400C:D steps", 0, 0),
    ("curriculum=2*(2C+3D)", 0, 0),
    ("curriculum=50%C+50%D", 2000, 0),
    ("train.epochs=2", 0, 2),
  ],
)
def test_a_length_replaces_that_of_the_config(change, steps, epochs):
  train = config.load_config("quickstart", [f"--config.{change}"]).train
  assert (train.steps, train.epochs) == (steps, epochs)


def test_encoders_take_the_papers_mask_ratio():
  loaded = config.load_config("encoders:mask_ratio=0.2")
  assert loaded.known_objectives["M"] == dataclasses.replace(
    OBJECTIVES["M"], mask_ratio=0.2, mask_token=1.0, random_token=0.0
  )


def test_own_text_drops_nothing_if_it_trains_masks_alone():
  """Catches MLM with the dropout and decay that were chosen for CLM."""

  def regularisation(arg):
    found = config.load_config(f"own_text:{arg}", [])
    assert found.model.max_seq_len == 512
    return found.model.dropout, found.optimizer.weight_decay

  strong, moderate = (0.2, 1.5), (0.0, 0.5)
  for words in ("words=1M", "words=10M,memory=8"):
    for objectives, expected in (
      ("C:M=1:1", strong),
      ("C", strong),
      ("M", moderate),
      ("M40", moderate),
    ):
      assert regularisation(f"{words},objectives={objectives}") == expected
  assert regularisation("words=100M") == moderate


def test_a_run_does_not_need_an_objective_that_it_did_not_use():
  """Until 0.2, every run stored fill-in-the-middle, and rare tokens' power."""
  stored = json.loads(config.to_json(config.Config()))
  stored["objectives"]["F"] = {"kind": "fim", "name": "fim", "middle_rate": 0.5}
  stored["objectives"]["M"]["frequency_power"] = 0.0
  text = json.dumps(stored)
  assert config.config_from_json(text).objectives == OBJECTIVES
  # "s" is a letter of the unit, and not used.
  stored["objectives"]["s"] = stored["objectives"].pop("F")
  stored["curriculum"] = "20C+20M steps"
  assert config.config_from_json(json.dumps(stored)).objectives == OBJECTIVES
  stored["objectives"]["F"] = stored["objectives"].pop("s")
  stored["curriculum"] = "4C+4F"
  line = told(config.config_from_json, json.dumps(stored))
  assert "config.objectives.F: objective.kind='fim'" in line or "fim" in line


@pytest.mark.parametrize(
  "spec, words",
  [
    ("configs/none.py", "configs/none.py: no such file"),
    ("quickstar", "nor such a name; did you mean 'quickstart'?"),
    ("configs/continued.py", "config argument model=FOLDER is missing"),
    (f"{QUICK}:shrnk", "'shrnk' is unknown; did you mean 'shrink'?"),
    ("configs/encoders.py:size=2B", "size='2B' is not one of 210M, 610M, 1B"),
    ("configs/encoders.py:mask_ratio=lots", "mask_ratio=lots: not float"),
    ("configs/encoders.py:size", None),
    ("clm_or_mlm:row=tiny_c", "row='tiny_c' is not one of tiny_clm_42,"),
    ("clm_or_mlm:row=tiny_clm_42,scale=paper", "has no row tiny_clm_42"),
    ("antlm_table:scale=large", "scale='large' is not one of tiny,"),
    # A detour needs both phases, and has its own curriculum.
    ("detour:model=nowhere,decay=1.0", "config argument decay="),
    ("detour:model=nowhere,decay=2", "config argument decay="),
    ("detour:model=nowhere,decay=0", "config argument decay="),
    # Catches 24 and 4C that are read as 244C.
    *(
      (f"own_text:objectives={text}", "write one mix without counts")
      for text in ("4C+16M+4C", "10000C+32000M", "25%C+75%M", "C+M", "C steps")
    ),
  ],
)
def test_bad_file_or_argument_is_told(spec, words, monkeypatch):
  monkeypatch.chdir(ROOT)
  assert (words or "size=") in told(config.load_config, spec)


def test_a_study_of_papers_needs_a_clone(monkeypatch):
  """Catches an installed wheel that calls our own study an unknown name."""
  monkeypatch.setattr(config, "STUDIES", config.CONFIGS / "none")
  line = told(config.load_config, "antlm_table:row=babyllama_c")
  assert "studies of papers are in configs/studies of a clone" in line


MAKE = """from antlm_jax import config as config_lib
def get_config(arg):
  config = config_lib.changes()
  {}
  return config
"""


def test_an_error_is_told_of_whom_it_is(tmp_path):
  """Catches blaming a file for a user's value, or a user for the file's."""
  bad = MAKE.format("config.train.update(steps=5, batch_size=0)")
  (tmp_path / "bad.py").write_text(bad)
  (tmp_path / "good.py").write_text(MAKE.format("config.train.steps = 5"))
  of_file = "train.batch_size=0 is not at least 1"
  for name, change, line in (
    # The message has the key of a user's own good setting.
    ("bad", "train.steps=7", f"config={tmp_path}/bad.py: {of_file}"),
    ("bad", "train.batch_size=-1", "train.batch_size=-1 is not at least 1"),
    ("bad", "train.batch_size=1.5", "train.batch_size=1.5: not int"),
    # The message has no key of the user's.
    ("good", "model=gpt", "model.name='gpt' is not one of"),
    ("good", "model.heads=7", "model.width=768 is not a multiple of"),
    ("good", "objectives.M.random_token=0.5", "objective 'mlm': random_token"),
  ):
    args = str(tmp_path / f"{name}.py"), [f"--config.{change}"]
    assert told(config.load_config, *args).startswith(line)


MISSPELT = "key 'train.bacth_size'; did you mean 'train.batch_size'?"


@pytest.mark.parametrize(
  "content, words",
  [
    ("x = (", "line 1"),
    ("x = 1", "defines no get_config"),
    ("import sys\nimport nonsense", "line 2: ModuleNotFoundError: No module"),
    ("1 / 0\n", "line 1: ZeroDivisionError: division by zero"),
    ("def get_config():\n  return 1", "get_config() takes 0 positional"),
    ("get_config = 3", "TypeError: 'int' object is not callable"),
    ("def get_config(a):\n  1 / 0", "line 2: ZeroDivisionError"),
    ("def get_config(a):\n  return {}", "returns dict, not a ConfigDict"),
    (MAKE.format("raise ValueError('a\\nb')"), "line 4: ValueError: a b"),
    (MAKE.format("config.train.bacth_size = 3"), MISSPELT),
    (MAKE.format("config.objectives.M.maks_ratio = 1.0"), "M.mask_ratio'"),
    (MAKE.format("config.objectives.Q = 3"), "objectives.Q is a group: set"),
    (MAKE.format("config.model.name = 'gpt'"), "model.name='gpt' is not one"),
    (MAKE.format("config.steps = 3"), "key 'steps'; did you mean 'train.st"),
    (MAKE.format("config.train = 3"), "train is a group: set one setting"),
    (MAKE.format("config.checkpoint.at = (-3,)"), "at=-3 is not at least 1"),
    ("import sys\ndef get_config(a):\n  sys.exit(0)", "line 3: SystemExit: 0"),
  ],
)
def test_a_file_that_is_no_config_is_told(content, words, tmp_path):
  (tmp_path / "bad.py").write_text(content)
  line = told(config.load_config, str(tmp_path / "bad.py"))
  assert words in line and len(line) < 400 + len(str(tmp_path))
  (tmp_path / "notes.txt").write_text("")
  assert "not a Python file" in told(
    config.load_config, str(tmp_path / "notes.txt")
  )


def test_parse_arg_gives_each_name_its_type():
  parsed = config.parse_arg("a,c=x=y,b=3", a=False, b=1, c="", d=0.5)
  assert parsed.to_dict() == {"a": True, "b": 3, "c": "x=y", "d": 0.5}
  assert "'aa' is unknown; did you mean 'a'?" in told(
    config.parse_arg, "aa", a=False, b=1
  )
  assert "config argument b=x: not int" in told(config.parse_arg, "b=x", b=1)


NO_CONFIGS = ["", "{", "[]", "{}", '{"model": 3}', '{"model": {"name": "x"}}']


@pytest.mark.parametrize(
  "text", [*NO_CONFIGS, '{"model": {"name": "llama"}, "train": 3}']
)
def test_what_is_no_configs_json_is_told(text):
  told(config.config_from_json, text)


def test_sections_take_numbers_of_numpy():
  """Catches values of an array that are refused, or that JSON cannot write."""
  rate, steps = np.linspace(0.5, 1, 2, dtype=np.float32)[0], np.arange(5)[4]
  made = config.Config(
    optimizer=optim.Muon(ema=rate), train=sections.Train(steps=steps)
  )
  again = config.config_from_json(config.to_json(made))
  assert (again.optimizer.ema, again.train.steps) == (0.5, 4)


FREE = (
  "data.path=b data.threads=4 log.every=5 eval.rows=9 checkpoint.every=7"
  " mesh.fsdp=2 train.microbatches=4 train.loss_chunk=8"
  " objectives.N.mask_ratio=0.3"  # of no phase
)


@pytest.mark.parametrize(
  "old, new, lines",
  [
    ("seed=1", f"seed=2 {FREE}", ["seed was 1, is 2"]),
    (
      "objectives.M.mask_ratio=0.3",
      "objectives.M.mask_ratio=0.5 data.shuffle=false",
      [
        "data.shuffle was True, is False",
        "objectives.M.mask_ratio was 0.3, is",
      ],
    ),
    # M30 is made of M.
    (
      "curriculum=4C+4M30",
      "curriculum=4C+4M30 objectives.M.unit=word",
      ["objectives.M.unit was 'token', is 'word'"],
    ),
    (
      "schedule.name=cosine",
      "schedule.name=wsd",
      [
        "schedule.decay was None, is 'linear'",
        "schedule.decay_steps was None, is 0.1",
        "schedule.name was 'cosine', is 'wsd'",
      ],
    ),
  ],
)
def test_differences_name_what_matters_and_leave_out_the_rest(old, new, lines):
  found = config.config_differences(load(*old.split()), load(*new.split()))
  assert len(found) == len(lines)
  assert all(map(str.startswith, found, lines))


def test_a_name_brings_its_own_settings_and_keeps_common_ones():
  found = load("schedule.decay=1-sqrt", "schedule.name=wsd")
  common = {"peak_lr": 3e-3, "warmup_steps": 0.05}
  assert found.schedule == optim.WSD(**common, decay="1-sqrt")
  assert load("optimizer=muon").optimizer == optim.Muon()
  encoder = load("model=ltg_bert").model
  assert (encoder.name, encoder.width, encoder.dropout) == (
    "ltg_bert",
    128,
    0.1,
  )


@pytest.mark.parametrize("key", ["schedule.warmup_steps", "eval.every"])
@pytest.mark.parametrize("value", ["1.0", 1.0, "1e0", "2.5", 2.5])
def test_an_amount_is_a_share_or_a_whole_number_of_steps(key, value):
  """Catches a share of 1.0 that is one step, and steps that are rounded."""
  line = told(config.load_config, "babylm_small", {key: value})
  assert f"{key}={value} is no whole number of steps, nor a share" in line


def test_an_int_beyond_floats_is_refused():
  """Catches an OverflowError."""
  assert "lr=1e+39 is not finite" in told(lambda: optim.WSD(peak_lr=10**400))


def test_old_runs_may_have_other_settings():
  stored = load("seed=3", "eval.every=1").to_dict()
  stored["eval"]["every"] = 1.0  # as version 0.1 stored it
  assert config.config_from_json(json.dumps(stored)).eval.every == 1
  stored = load("seed=3").to_dict()
  del stored["eval"]["pairs"], stored["init"]
  stored["model"]["went"] = stored["schedule"]["decay_steps"] = 0.7
  stored["objectives"]["M"]["went"] = stored["went"] = 1
  assert config.config_from_json(json.dumps(stored)) == load("seed=3")


def test_an_objective_that_is_not_used_is_no_difference():
  old, new = config.changes(), config.changes()
  new.objectives.X = dataclasses.asdict(Objective("x"))
  pair = config.load_config(old), config.load_config(new)
  assert (
    config.config_differences(*pair)
    == config.config_differences(*pair[::-1])
    == []
  )
  new.curriculum = "4X"
  (line,) = config.config_differences(pair[0], config.load_config(new))
  assert line.startswith("curriculum was")


@pytest.mark.parametrize(
  "value, steps, expected",
  [(0, 100, 0), (0.1, 100, 10), (0.001, 100, 1), (1, 100, 1), (300.0, 9, 300)],
)
def test_amounts_under_one_are_shares(value, steps, expected):
  found = curriculum.amount(value, steps)
  assert found == expected and isinstance(found, int)
