"""Documented launches can start, and others are refused before a queue."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from antlm_jax import config, models
from antlm_jax.commands import train
from antlm_jax.errors import UserError
from antlm_jax.objectives.batch import BatchLayout
from antlm_jax.planning import compilers, places
from antlm_jax.planning import topology as topologies
from tests import runs
from tests.launching import LAUNCH, ROOT, launch, run, write_script
from tests.test_launch import dry, guides


def prepared_data() -> tuple[dict[str, str], str, str]:
  """Returns how the encoders' page prepares its data, and both places of it.

  They are the options of `antlm prepare`, and a folder here and in a bucket.
  """
  page = (ROOT / "docs/how_to/train_encoders.md").read_text()
  page = page.replace("\\\n", " ")
  # The second prepares a sample of it.
  prepare, _ = re.findall(r"^antlm prepare .*$", page, re.M)
  options = dict(w.split("=", 1) for w in shlex.split(prepare)[2:])
  copy = r"storage rsync --recursive \S+documents/\S+ (\S+)\s+(gs://\S+)"
  folder, bucket = re.search(copy, page).groups()
  assert folder == options["--output"]
  return options, folder, bucket


def test_documented_launches_have_own_workdirs_and_the_data_of_their_page():
  """Catches two configs in a workdir, and a path that no page prepares."""
  _, *paths = prepared_data()
  configs = {}
  for _, line in guides():
    words = shlex.split(line)
    if words[1] == "run":
      given = dict(word.split("=", 1) for word in words if "=" in word)
      assert given["--workdir"].endswith(f"/{words[2]}")
      # A reader's own text has no page that prepares it.
      assert given["--config.data.path"] in (*paths, "data/own")
      spec = given["--config"], given.get("--config.curriculum")
      assert configs.setdefault(words[2], spec) == spec
  assert len(configs) >= 5


def test_a_fresh_clone_says_that_it_did_not_check(tmp_path):
  """Catches a launcher that needs the package, or is silent about it."""
  shutil.copytree(LAUNCH, tmp_path / "launch")
  words = "run a --dry_run --zone=z --type=v5litepod-256 -- --config=c"
  words += " --workdir=gs://b/a --config.data.path=gs://b/d"
  done = run(tmp_path / "launch/tpu_vm.sh", *words.split())
  assert done.returncode == 0 and done.stdout
  assert "not checked against the devices" in done.stderr
  assert done.stderr.count("\n") == 1


def test_a_run_refuses_devices_of_another_topology(tmp_path, prepared):
  """Catches a full encoder that trains on the wrong machine for hours."""
  name = "encoders:size=610M,topology="
  assert "is for 8 devices, but this machine has" in runs.told(
    train.train, f"{name}h100:8", tmp_path / "a", prepared, quiet=True
  )
  small = config.load_config(f"{name}v5e:16x16,shrink")
  assert small.mesh.sizes(1) == (1, 1, 1)
  assert "parameters do not fit" in runs.told(
    train.main, ["--config=encoders:size=1B,topology=v5e:1x1", "--help"]
  )


@pytest.mark.parametrize("topology", ["256", "v5e:16x16", "h100:8", "v6e:2x4"])
@pytest.mark.parametrize("size", ["210M", "610M", "1B"])
def test_encoders_take_a_topology(topology, size):
  """Catches settings of the config's own that a batch or a mesh refuses."""
  spec = f"{ROOT}/configs/encoders.py:size={size},topology={topology}"
  made, place = config.load_config(spec), places.parse_topology(topology)
  BatchLayout(made.train.batch_size, made.train.microbatches, place.devices)
  assert place.devices % made.mesh.fsdp == 0
  assert abs(made.train.batch_size - 1152) <= place.devices / 2
  assert made.model.width % made.mesh.fsdp == 0
  assert models.build_model(made.model, 128_256).size > 3e8


@pytest.mark.parametrize("topology", ["v5e:8x16", "v5e:8x8", "v5e:2x2"])
@pytest.mark.parametrize("size", ["610M", "1B"])
def test_activations_and_state_of_a_topology_fit(topology, size):
  """Catches microbatches that ignore the memory of a small topology."""
  made = config.load_config(
    f"{ROOT}/configs/encoders.py:size={size},topology={topology}"
  )
  place, model = places.parse_topology(topology), made.model
  rows = made.train.batch_size / place.devices / made.train.microbatches
  # A layer's products of matrices, in bfloat16.
  head = model.width // model.heads
  wide = 2 * model.width + 2 * (model.heads + model.kv_heads) * head
  wide += 2 * model.mlp_width
  saved = 2 * rows * model.max_seq_len * model.layers * wide
  state = 16 * models.build_model(model, 128_256).size / made.mesh.fsdp
  assert 0.2 < (saved + state) / place.chip.memory < 0.85


def test_a_batch_that_does_not_divide_proposes_the_nearest():
  """Catches an error without a remedy, after the queue of a pod."""
  assert "use 1024 or 1280" in runs.told(BatchLayout, 1152, 1, 256)
  assert runs.told(BatchLayout, 3, 2, 8).endswith("use 16")


def test_the_table_of_names_is_that_of_the_code():
  """Catches a chip whose name in a cloud differs from plan's launch."""
  text = (ROOT / "docs/how_to/tpu.md").read_text()
  rows = re.findall(r"^\| (\d+) \| (\S+) \| (\S+) \| (\S+) \|$", text, re.M)
  assert len(rows) == 5
  for chips, gcloud, gke, topology in rows:
    place = places.parse_topology(topology)
    assert place.chips == int(chips) and place.type("gke") == gke
    assert (place.type("gcloud") or "-") == gcloud


@pytest.mark.parametrize("topology", ["v5p:4x4x8", "tpu7x:4x4x4", "h100:4x8"])
def test_the_launch_that_plan_prints_runs(topology):
  """Catches a printed launch that its launcher refuses."""
  line = places.launch(topology, 1, ["--config=configs/a.py"])
  line = line.replace("\\\n", " ").replace("BUCKET", "b")
  words = shlex.split(line.replace("NAME", "name"))
  script = words[0].split("/")[-1].removesuffix(".sh")
  assert dry(script, "--unchecked", *words[1:])
  assert len([w for w in words if w.startswith("--config.data.path")]) == 1


@pytest.mark.parametrize("installed", [False, True])
def test_a_missing_compiler_is_installed_as_the_package_was(
  installed, tmp_path, monkeypatch
):
  """Catches a remedy that names a script which a wheel lacks."""
  if installed:
    monkeypatch.setattr(compilers, "__file__", str(tmp_path / "a/b/c.py"))
  monkeypatch.setattr(compilers, "libtpu", lambda: None)
  monkeypatch.setattr(compilers, "cuda", lambda: None)
  for kind, extra, name in (
    ("v5e:2x2", "plan-tpu", "libtpu"),
    ("h100:8", "plan-gpu", "cuda-compiler"),
  ):
    with pytest.raises(UserError) as told:
      topologies.topology_devices(kind)
    remedy = f"pip install 'antlm_jax[{extra}]'"
    assert str(told.value).endswith(
      remedy if installed else f"./launch/setup.sh {name}"
    )


def test_the_filters_of_web_text_have_help_without_datatrove(tmp_path):
  """Catches a traceback on a fresh clone, where no package is installed."""
  script = [sys.executable, "-S", LAUNCH / "prepare_datatrove.py"]
  done = subprocess.run([*script, "--help"], capture_output=True, text=True)
  assert done.returncode == 0 and done.stdout.startswith("Filter and dedup")
  done = subprocess.run(script, capture_output=True, text=True)
  assert done.returncode == 2 and "setup.sh datatrove" in done.stderr


def test_status_without_a_project_shows_the_whole_error(tmp_path):
  """Catches a status of 0, or the last line alone, when gcloud fails."""
  error = (
    "echo 'ERROR: (gcloud) The required property [project] is not set.' >&2\n"
    "echo 'You may set it with: gcloud config set project' >&2\nexit 1\n"
  )
  write_script(tmp_path / "gcloud", error)
  env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
  place = "--zone=z", "--workdir=gs://b/first"
  done = launch("tpu_vm", "status", "first", *place, env=env)
  assert done.returncode == 1
  assert "required property [project]" in done.stderr
  assert "gcloud config set project" in done.stderr


RESULTS = ROOT / "evals/benchmarks/results"
STORED = [*RESULTS.glob("plan-*.json"), *RESULTS.glob("step-*-after.json")]
# A bucket's name is the user's, and the launchers refuse the placeholder.
LAUNCHES = [
  (guide, line.replace("gs://BUCKET", "gs://b"))
  for guide, line in guides()
  if re.match(r"\./launch/(tpu_vm|gke|slurm)\.sh run ", line)
]


def needs(run: config.Config, place: places.Topology) -> tuple:
  """Returns the properties that decide a device's memory."""
  parts = place.devices * run.train.microbatches
  fixed = {"attention": "auto"}
  model = tuple(sorted({**config.settings.to_dict(run.model), **fixed}.items()))
  each = run.train.batch_size / parts
  return place.kind, run.mesh.fsdp, each, run.train.microbatches > 1, model


def stored() -> dict[tuple, dict]:
  """Returns the plans that fit, by `needs`; two documents a row."""
  out = {}
  for path in STORED:
    plan = json.loads(path.read_text())
    steps = [p for p in plan["programs"] if p["steps"]]
    if plan.get("pieces") == 2 and all(p["memory"]["fits"] for p in steps):
      made = config.load_config(str(ROOT / "configs/encoders.py") + ":" + plan[
        "config"].partition(":")[2], plan["overrides"])  # fmt: skip
      out[needs(made, places.parse_topology(plan["topology"]))] = plan
  return out


def place_of(script: str, options: dict[str, str], arg: str) -> places.Topology:
  """Returns the devices of a launch; a topology of the config names them."""
  if script == "slurm":
    nodes = options.get("--nodes", "1")
    found = places.parse_topology(f"h100:{nodes}x{options['--gpus']}")
  else:
    kind, _, size = options["--type"].partition("-")
    halved = script == "tpu_vm" and kind in ("v4", "v5p")
    kind = {"v5litepod": "v5e"}.get(kind, kind)
    found = places.parse_topology(f"{kind}:{int(size) // (1 + halved)}")
  if named := re.search(r"topology=([\w:]+)", arg):
    named = places.parse_topology(named[1])
    assert (named.kind, named.chips) == (found.kind, found.chips)
  return found


@pytest.mark.sample(1, 3)
@pytest.mark.parametrize("guide, line", LAUNCHES)
def test_a_documented_launch_can_start(guide, line):
  """Catches rows that do not divide, too little memory, other data.

  test_launch prints its commands.
  """
  words = shlex.split(line)
  script = words[0].split("/")[-1].removesuffix(".sh")
  end = words.index("--")
  options = dict(w.split("=", 1) for w in words[:end] if "=" in w)
  training = dict(w.split("=", 1) for w in words[end + 1 :])
  spec = training.pop("--config")
  overrides = [f"{k}={v}" for k, v in training.items() if "--config." in k]
  own_text = spec.startswith("own_text:")
  made = config.load_config(spec if own_text else f"{ROOT}/{spec}", overrides)
  assert [objective.name for objective in made.trained] == ["clm", "mlm"]
  place = place_of(script, options, spec)
  BatchLayout(made.train.batch_size, made.train.microbatches, place.devices)
  if own_text:
    return  # own-text.json has its memory, and no page prepares its data
  assert needs(made, place) in stored(), "no stored plan shows that it fits"
  # The data are those that the road's page prepares for this config.
  prepare, folder, bucket = prepared_data()
  assert prepare["--tokenizer"].startswith("EuroBERT/")
  assert prepare["--seq_len"] == str(made.model.max_seq_len)
  assert (prepare["--packing"], prepare["--boundary"]) == ("chunks", "eos")
  bucket = bucket.replace("BUCKET", "b")
  assert made.data.path == (folder if script == "slurm" else bucket)


def plan_of(name: str) -> tuple[dict, list[dict], float]:
  """Returns a stored plan, its training programs, and their seconds."""
  plan = json.loads((RESULTS / f"{name.strip('`')}.json").read_text())
  programs = [p for p in plan["programs"] if p["steps"]]
  seconds = sum(p["steps"] * p["forecast"]["seconds"] for p in programs)
  return plan, programs, seconds


def table_rows(page: str, first: str) -> list[list[str]]:
  """Returns the cells of a page's rows that begin with a pattern."""
  text = (ROOT / "docs" / page).read_text()
  rows = re.findall(rf"^\| {first} \|.*$", text, re.M)
  return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_table_of_costs_is_that_of_its_plans():
  """Catches hours next to the curriculum or the rows of another plan."""
  rows = table_rows("how_to/train_encoders.md", r"\w+ \| \w+:\w+ \| \w\S+")
  assert len(rows) == 7
  for size, topology, curriculum, pieces, step, hours, cost, name in rows:
    plan, programs, _ = plan_of(name)
    assert f"size={size}," in plan["config"] and topology == plan["topology"]
    phases = re.findall(r"(\d+)([CM])", curriculum)
    counts = {letter: int(count) for count, letter in phases}
    assert sorted(counts) == sorted(p["name"] for p in programs)
    # Larger batches read the same text in fewer steps.
    steps = sum(counts.values())
    assert steps * programs[0]["rows"] == 42_000 * 1152
    each = {p["name"]: p["forecast"]["seconds"] for p in programs}
    seconds = sum(counts[objective] * each[objective] for objective in counts)
    assert int(pieces) == plan["pieces"]
    assert step == f"{seconds / steps:.2f} s"
    chip_hours = seconds / 3600 * places.parse_topology(topology).chips
    assert (hours, cost) == (f"{seconds / 3600:.1f}", f"{chip_hours:,.0f}")


def test_the_table_of_encoders_is_that_of_its_plans():
  """Catches hours or memory of another plan than the plan that a row names."""
  rows = table_rows("explanation/planning.md", r"(?:210M|610M|1B) \| \w+:\S+")
  assert len(rows) >= 8
  for size, topology, *cells, _, hours, name in rows:
    plan, programs, seconds = plan_of(name)
    settings = plan["config"].partition(":")[2]
    made = config.load_config(
      f"{ROOT}/configs/encoders.py:{settings}", plan["overrides"]
    )
    rows_of_step = programs[0]["rows"]
    needed = max(p["memory"]["needed"] for p in programs) / 2**30
    assert f"size={size}" in settings and topology == plan["topology"]
    assert cells == [
      f"{rows_of_step:,}",
      str(plan["mesh"]["fsdp"]),
      str(made.train.microbatches),
      str(plan["pieces"]),
      f"{rows_of_step * programs[0]['seq_len']:,}",
      f"{needed:.1f} GiB",
    ]
    assert hours == f"{seconds / 3600:.1f} h"
