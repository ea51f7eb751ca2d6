"""`antlm study`: jobs, dry runs and errors."""

import itertools
import json
import pathlib
import shlex

import pytest

from antlm_jax import cli
from antlm_jax import config as config_lib
from antlm_jax.commands import COMMANDS
from antlm_jax.data.prepared_folder import Manifest
from antlm_jax.errors import RUN_AGAIN, Stopped
from antlm_jax.evals.studies import make, study
from tests import real, runs

CONFIGS = runs.ROOT / "configs"
TABLE = f"--config={CONFIGS / 'studies/antlm_table.py'}"
MADE = pathlib.Path("/made")
# A trunk, its branch, and rows that start from the end of another row.
ROWS = """
from antlm_jax import config
from antlm_jax.evals.studies.study import Evaluation, Row, Scale, ExpectedText
def row(title, text, **how):
  how = {"seeds": {"tiny": 2}, "curriculum": {"tiny": text}} | how
  return Row("One", title, **how)
ROWS = {
  "trunk": row("CLM", "20C steps", looks={"tiny": (4, 16)}),
  "branch": row("both", "6C+10M steps", looks={"tiny": (9,)}),
  "after": row("more", "10M steps", after="trunk"),
  "last": row("most", "20M steps", after="after", seeds={"tiny": 1}),
}
SCALES = {
  "tiny": Scale(
    {"One": ("--seq_len=32",)},
    ExpectedText(64, 32),
    (
      Evaluation("pairs", "eval blimp", ("--data={data}", "--mode={mode}"), 1),
      Evaluation("tuning", "eval finetune", ("{attention}",), looks=True),
    ),
    ("pairs",),
  ),
  "empty": Scale({}, ExpectedText(64, 32), (), ()),
}
def get_config(arg):
  arg = config.parse_arg(arg, row="trunk", seed=0, scale="tiny")
  out = config.changes()
  out.seed, out.curriculum = arg.seed, ROWS[arg.row].curriculum["tiny"]
  out.schedule.update(warmup_steps=2, decay_steps=2)
  out.train.batch_size = 4
  out.model.update(layers=1, width=32, heads=2, kv_heads=2, mlp_width=32)
  return out
"""


@pytest.fixture
def path(tmp_path):
  """A small study's config."""
  found = tmp_path / "small.py"
  found.write_text(ROWS)
  return found


def made(path, *rows, overrides=(), folder=MADE, seeds=0):
  """Returns module and arguments of the jobs of rows, by description."""
  asked = study.read_study(str(path), "tiny", rows, seeds, overrides)
  found = make.study_jobs(asked, folder, "text", "data")
  return {job.title: (job.command, job.arguments) for job in found}


def training(jobs, row, seed=0):
  """Returns a training's settings beyond its config, data and workdir."""
  module, arguments = jobs[f"{row}, seed {seed}: training"]
  assert module == "train"
  assert arguments[1] == f"--workdir={MADE / row / str(seed)}"
  return [word.removeprefix("--config.") for word in arguments[3:]]


def step(row, seed, at):
  return f"init.checkpoint={MADE}/{row}/{seed}/checkpoints/{at}"


def test_rows_go_on_from_what_they_share_and_what_they_come_after(path):
  jobs = made(path)
  keep = ["init.step=keep", "init.optimizer=keep"]
  for seed in (0, 1):
    # A run saves its branch points, and its looks after the shared steps.
    assert training(jobs, "trunk", seed) == ["checkpoint.at=4,6,16"]
    begins = [step("trunk", seed, 6), *keep]
    assert training(jobs, "branch", seed) == ["checkpoint.at=9", *begins]
    end = [f"init.checkpoint={MADE}/trunk/{seed}"]
    assert training(jobs, "after", seed) == end
  assert training(jobs, "last") == [f"init.checkpoint={MADE}/after/0"]
  assert "last, seed 1: training" not in jobs


def test_side_by_side_a_row_waits_for_its_data_and_its_start(path):
  """Catches a branch that begins before its trunk's checkpoint exists."""
  asked = study.read_study(str(path), "tiny")
  jobs = {j.title: j for j in make.study_jobs(asked, MADE, "text", "data")}
  data = MADE / "data/one"
  assert jobs["text for One"].folder == data
  for row, starts in {
    "trunk": (),
    "branch": (MADE / "trunk/1",),
    "after": (MADE / "trunk/1",),
  }.items():
    training = jobs[f"{row}, seed 1: training"]
    assert training.folder == MADE / row / "1"
    assert training.needs == (data, *starts)
  # Evaluations wait for the training of their folder.
  assert jobs["trunk, seed 0: pairs"].folder == MADE / "trunk/0"


def test_all_rows_have_the_seeds_that_are_asked_for(path):
  # This includes a row with one seed in the config.
  jobs = made(path, seeds=3)
  for seed in range(3):
    end = [f"init.checkpoint={MADE}/after/{seed}"]
    assert training(jobs, "last", seed) == end
    assert f"branch, seed {seed} at step 9: tuning" in jobs
  assert "last, seed 3: training" not in jobs


def test_the_pieces_of_a_seed_come_in_order(path):
  assert [*made(path, "branch", "trunk")] == [
    "text for One",
    "trunk, seed 0: training",
    "branch, seed 0: training",
    "trunk, seed 0: pairs",
    "trunk, seed 0 at step 4: tuning",
    "trunk, seed 0 at step 16: tuning",
    "branch, seed 0: pairs",
    "branch, seed 0 at step 9: tuning",
    "trunk, seed 1: training",
    "branch, seed 1: training",
    "trunk, seed 1 at step 4: tuning",
    "trunk, seed 1 at step 16: tuning",
    "branch, seed 1 at step 9: tuning",
  ]


def test_evaluations_are_told_of_what_and_how(path):
  asked = study.read_study(str(path), "tiny", ("trunk",))
  found = [
    p for p in make.study_jobs(asked, MADE, "t", "d") if "seed 0" in p.title
  ]
  assert [job.arguments for job in found[1:]] == [
    (f"--checkpoint={MADE}/trunk/0", "--data=d", "--mode=causal"),
    (f"--checkpoint={MADE}/trunk/0", "--data=d", "--mode=mlm"),
    (f"--checkpoint={MADE}/trunk/0/checkpoints/4", "bidirectional"),
    (f"--checkpoint={MADE}/trunk/0/checkpoints/16", "bidirectional"),
  ]


def test_rows_that_are_asked_for_bring_what_they_come_after(path):
  assert {about.split(",")[0] for about in made(path, "last")} == {
    *("text for One", "trunk", "after", "last")
  }


def test_a_branch_without_its_trunk_is_trained_from_scratch(path):
  assert training(made(path, "branch"), "branch") == ["checkpoint.at=9"]
  # The trunk saves checkpoints for branches that may be requested later.
  alone = training(made(path, "trunk"), "trunk")
  assert alone == training(made(path), "trunk")


def test_a_run_goes_on_as_it_was_begun_whatever_is_asked_for(path, tmp_path):
  def begun(at, *rows):
    folder = tmp_path / "runs"
    config_json = folder / "branch" / "0" / "config.json"
    config_json.parent.mkdir(parents=True, exist_ok=True)
    config_json.write_text(json.dumps({"init": {"checkpoint": at}}))
    _, found = made(path, *rows, folder=folder)["branch, seed 0: training"]
    return [word for word in found if "init" in word]

  trunk = str(tmp_path / "runs/trunk/0/checkpoints/6")
  assert not begun("", "branch") and not begun("")
  assert begun(trunk, "branch") == begun(trunk)
  assert begun(trunk)[0] == f"--config.init.checkpoint={trunk}"
  # It was trained in a bucket, and copied back.
  there = "gs://bucket/runs/trunk/0/checkpoints/6"
  assert begun(there)[0] == f"--config.init.checkpoint={there}"
  assert begun(there, "branch") == begun(there)


def test_what_every_training_is_told_counts_for_what_it_shares(path):
  jobs = made(path, overrides=("--config.checkpoint.at=5,16",))
  words = training(jobs, "trunk")
  assert words == ["checkpoint.at=5,16", "checkpoint.at=4,5,6,16"]
  # The decay may begin earlier, and batches may grow with the run's length.
  for word, begins in (
    ("schedule.decay_steps=12", step("trunk", 0, 4)),
    ("train.batch_start=0.5", "checkpoint.at=9"),
    ("curriculum=20M steps", step("trunk", 0, 19)),
  ):
    jobs = made(path, overrides=(f"--config.{word}",))
    found = [w for w in training(jobs, "branch") if not w.endswith("=keep")]
    assert found[0] == word and found[-1] == begins


def test_a_dry_run_tells_and_touches_nothing(path, monkeypatch, capsys):
  def said(*args):
    make.main([f"--config={path}", "--dry_run", *args])
    return capsys.readouterr().out

  (path.parent / "here").mkdir()
  monkeypatch.chdir(path.parent / "here")
  table = said()
  assert "4 rows, 7 runs" in table
  assert "112 steps, of which 12 are shared, and trained once: 100 are" in table
  begins = "from scratch", "trunk at 6", "trunk, at its", "after, at its"
  for line, where in zip(table.splitlines()[1:5], begins, strict=True):
    assert f" {where} " in line
  assert "32 steps, of which 0 are shared" in said("--rows=branch")
  assert not [*pathlib.Path.cwd().iterdir()]
  # Without data, epochs are estimated for the config's text.
  words = [TABLE, "--dry_run", "--scale=small", "--rows=babyllama_c"]
  make.main(words)
  table = capsys.readouterr().out
  assert "1 rows, 8 runs\n30,000 steps, of which 0 are shared" in table
  assert " 3,750     3,750   7.68M" in table
  assert "has no data yet: epochs are estimated at 2,500 rows" in table
  assert not [*pathlib.Path.cwd().iterdir()]


def test_a_dry_run_counts_the_epochs_of_the_data(prepared, tmp_path, capsys):
  (tmp_path / "data").mkdir()
  (tmp_path / "data/babyllama").symlink_to(prepared)
  rows = Manifest.load(prepared).splits["train"].rows
  words = "--rows=babyllama_c", f"--runs={tmp_path}"
  make.main([TABLE, "--dry_run", *words])
  table = capsys.readouterr().out
  assert f"\n{3 * round(6 * rows / 16):,} steps" in table
  assert "estimated" not in table


@pytest.mark.parametrize("name", ["antlm_table", "clm_or_mlm", "regularised"])
def test_every_command_of_a_study_works_without_a_checkout(name):
  scales = config_lib.config_module(
    str(CONFIGS / f"studies/{name}.py")
  ).SCALES.values()
  found = {e.command for scale in scales for e in scale.evaluations}
  assert found <= {*COMMANDS}


def test_the_commands_are_printed_to_be_run_elsewhere(
  path, capsys, monkeypatch
):
  folder = path.parent
  monkeypatch.chdir(folder)
  for name in ("pairs", "blimp_filtered", "blimp_supplement_filtered", "ewok"):
    (folder / name).mkdir()
  words = f"--runs={folder / 'runs'}", f"--text={folder}", f"--data={folder}"
  make.main([f"--config={path}", *words, "--commands"])
  lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
  # As the study itself runs them: with this Python, and with -P.
  first = [cli.python_command("antlm_jax", x) for x in ("prepare", "train")]
  assert "-P" in first[0]
  assert [w[: len(first[0])] for w in lines[:2]] == first
  trained = [w for w in lines if w[:5] == first[1]]
  assert len(trained) == 7 and not (folder / "runs").exists()
  assert trained[0][5].startswith(f"--config={path}:")
  # Other machines know our configs by name, and not this checkout's paths.
  make.main([TABLE, "--scale=tiny", *words, "--commands"])
  lines = capsys.readouterr().out.splitlines()
  named = [x for x in lines if " --config=antlm_table:row=" in x]
  assert named and len(named) == sum(" antlm_jax train " in x for x in lines)


@pytest.fixture
def data(tmp_path):
  for name in ("blimp_filtered", "blimp_supplement_filtered", "ewok"):
    (tmp_path / "data" / name).mkdir(parents=True)
  return tmp_path / "data"


@pytest.mark.parametrize(
  "args, words",
  [
    ([TABLE, "--rows=gpt5"], "--rows: 'gpt5' is not one of babyllama_c, bab"),
    (["--rows=tiny_c"], "--rows: 'tiny_c' is not one of tiny_clm_42, tiny_mlm"),
    # A row of another scale
    (["--rows=610m_clm_42"], "--rows: '610m_clm_42' is not one of tiny_clm_42"),
    ([TABLE, "--scale=8m", "--rows=ltg_bert_m"], "'ltg_bert_m' is not one"),
    (["--minutes=0"], "--minutes=0 is not over 0"),
    (["--minutes=nan"], "--minutes=nan is not finite"),
    (["--seeds=-1"], "--seeds=-1"),
    (["--dry_run", "--config.sed=3"], "config key 'sed'; did you mean 'seed'?"),
    (["--scale=shrink"], "--scale=shrink is not one of tiny, paper"),
    ([TABLE, "--scale=1B"], "--scale=1B is not one of shrink, tiny, small,"),
    (["--config=none.py"], "none.py: no such file"),
    ([f"--config={CONFIGS}/gpt_bert.py"], "is no study: it defines no ROWS"),
    ([TABLE], "runs/data/babyllama is not there yet: give --text"),
    ([], "--data={data} holds no sst2: unpack the evaluations' data"),
  ],
)
def test_bad_input_is_told(data, tmp_path, args, words):
  args = [f"--data={data}", f"--runs={tmp_path}/runs", *args]
  assert words.format(data=data) in runs.refused(
    "antlm_jax.evals.studies.make", *args
  )
  assert not (tmp_path / "runs").exists()


def test_the_evaluations_folder_is_looked_at_first(data, tmp_path):
  for args, words in (
    ([], "--data is missing: the folder that evaluations read"),
    ([f"--data={tmp_path}"], f"--data={tmp_path} holds no blimp_filtered:"),
  ):
    assert words in runs.refused("antlm_jax.evals.studies.make", TABLE, *args)


def test_a_study_without_rows_or_with_lost_ones_is_told(path):
  def told(*args):
    return runs.refused(
      "antlm_jax.evals.studies.make", f"--config={path}", *args
    )

  assert "has no rows at --scale=empty" in told("--scale=empty")
  path.write_text(ROWS.replace('after="trunk"', 'after="trnk"'))
  words = "after begins after trnk, which is no row at --scale=tiny"
  assert words in told("--dry_run")


@pytest.mark.slow
def test_rows_are_trained_and_scored_side_by_side(tmp_path, capfd):
  """Catches a run that is lost at the end of the time, or not scored."""
  text, data, made = (tmp_path / name for name in ("text", "data", "runs"))
  text.mkdir()
  for name in "train", "dev":
    lines = (f"The dog {i % 97} barks at the cat {i}.\n" for i in range(9000))
    (text / f"all.{name}").write_text("".join(lines))
  sets = "blimp_filtered", "blimp_supplement_filtered"
  for name in sets:
    (data / name).mkdir(parents=True)
    pair = {"sentence_good": "The dog barks.", "sentence_bad": "The dog bark."}
    pair |= {"linguistics_term": "agreement", "UID": name, "pair_id": 0}
    (data / name / f"{name}.jsonl").write_text(json.dumps(pair) + "\n")
  words = [TABLE, "--scale=8m_shrink", f"--data={data}", f"--text={text}"]
  words += [f"--runs={made}", "--seeds=1", "--jobs=2"]
  words += ["--rows=babyllama_c,babyllama_antlm", "--config.model.layers=1"]
  with pytest.raises(Stopped) as stopped:
    make.main([*words, "--minutes=0.3"])
  assert stopped.value.status == RUN_AGAIN
  make.main(words)
  assert "all done" in capfd.readouterr().out
  for row in "babyllama_c", "babyllama_antlm":
    for name, mode in itertools.product(sets, ("causal", "mlm")):
      (scores,) = (made / row / "0/evals" / name).glob(f"*-{mode}")
      assert (scores / "summary.json").is_file()
  assert "AntLM" in (made / "report/report.md").read_text()


@pytest.mark.slow
def test_a_row_from_text_to_report(tmp_path):
  blimp = "blimp_filtered", "blimp_supplement_filtered"
  for name in ("babylm_like_10M", *blimp, "ewok", "glue"):
    real.unpacked(name, tmp_path / "data")
  (tmp_path / "text").mkdir()
  for file in (tmp_path / "data").glob("*.*[nv]"):  # .train and .dev
    text = file.read_text("utf-8")[:200_000]
    (tmp_path / "text" / file.name).write_text(text, "utf-8")
  made, row = tmp_path / "runs", "ltg_bert_mntp_1_15"
  words = [TABLE, "--scale=shrink", f"--rows={row}"]
  words += [f"--text={tmp_path}/text", f"--data={tmp_path}/data"]
  make.main([*words, f"--runs={made}", "--jobs=2"])
  for mode in ("causal", "mntp"):
    found = made / row / "0/evals/blimp_filtered" / f"12-{mode}/summary.json"
    assert json.loads(found.read_text())["pairs"] == 2 * 67
  report = (made / "report/report.md").read_text()
  assert "mixed MNTP 1:15" in report
