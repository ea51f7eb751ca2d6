"""The notebook: what it installs, and the whole of it in its short form."""

import ast
import base64
import io
import json
import os
import re
import subprocess
import sys
import types

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from antlm_jax.runtime.progress import Progress
from launch import colab_setup
from tests import runs

NOTEBOOK = runs.ROOT / "launch" / "colab.ipynb"
SETUP = (runs.ROOT / "setup.py").read_text("utf-8")


# As of when the cases below were written; setup.py's own is read further down.
PAIRED = """PAIRED = [
  "jax>=0.10.2,<0.11.1; python_version < '3.12'",
  "flax>=0.12.8,<0.12.9; python_version < '3.12'",
  "jax>=0.11.2,<0.13; python_version >= '3.12'",
  "flax>=0.12.10,<0.13; python_version >= '3.12'",
]"""


def jax(version: str, *plugins: str, **others: str) -> dict[str, str]:
  """The packages of a runtime with a jax, all of one version."""
  names = ("jax", "jaxlib", *plugins)
  return dict.fromkeys(names, version) | others


CUDA12 = ("jax-cuda12-plugin", "jax-cuda12-pjrt")


@pytest.mark.parametrize(
  ("python", "installed", "device", "wanted", "why"),
  [
    # Colab of June 2026 with a T4, then as if its jax were newer.
    (
      (3, 12),
      jax("0.7.2", *CUDA12, flax="0.11.2"),
      "cuda12",
      ["jax[cuda12]"],
      "changing jax 0.7.2 together with jaxlib and jax-cuda12",
    ),
    (
      (3, 12),
      jax("0.12.0", *CUDA12, flax="0.12.10"),
      "cuda12",
      [
        "jax==0.12.0",
        "jax-cuda12-pjrt==0.12.0",
        "jax-cuda12-plugin==0.12.0",
        "jaxlib==0.12.0",
      ],
      "keeping jax 0.12.0; ",
    ),
    # A newer driver is no reason to leave CUDA 12.
    ((3, 12), jax("0.7.2", *CUDA12), "cuda13", ["jax[cuda12]"], "changing"),
    # Its plugin moves along even where there is no GPU.
    ((3, 12), jax("0.7.2", *CUDA12), "cpu", ["jax[cuda12]"], "changing"),
    # What Python 3.11 takes, 3.12 does not, and the other way round.
    (
      (3, 11),
      jax("0.10.2"),
      "cpu",
      ["jax==0.10.2", "jaxlib==0.10.2"],
      "keeping jax 0.10.2; ",
    ),
    ((3, 12), jax("0.10.2"), "cpu", ["jax"], "changing jax 0.10.2"),
    ((3, 11), jax("0.12.0"), "cpu", ["jax"], "changing jax 0.12.0"),
    # flax alone does not fit: jax stays.
    (
      (3, 13),
      jax("0.12.0", flax="0.12.8"),
      "cpu",
      ["jax==0.12.0", "jaxlib==0.12.0"],
      "(here is 0.12.8, which is changed)",
    ),
    # No jax, and parts of one.
    ((3, 12), {}, "cpu", ["jax"], "installing jax together with jaxlib; "),
    ((3, 12), {}, "cuda13", ["jax[cuda13]"], "jaxlib and jax-cuda13-plugin"),
    ((3, 12), {"jax": "0.12.0"}, "cpu", ["jax"], "changing"),
    ((3, 12), jax("0.12.0") | {"jaxlib": "0.7.2"}, "cpu", ["jax"], "changing"),
    # A TPU with an old jax, a new one, and a new one that lacks its library.
    ((3, 13), jax("0.7.2", libtpu="0.0.21"), "tpu", ["jax[tpu]"], "libtpu"),
    (
      (3, 13),
      jax("0.12.0", libtpu="0.0.50"),
      "tpu",
      ["jax==0.12.0", "jaxlib==0.12.0"],
      "keeping jax 0.12.0; ",
    ),
    (
      (3, 13),
      jax("0.12.0"),
      "tpu",
      ["jax==0.12.0", "jaxlib==0.12.0", "jax[tpu]==0.12.0"],
      "keeping jax 0.12.0, adding libtpu; ",
    ),
  ],
)
def test_a_jax_that_fits_is_kept_and_another_changes_whole(
  python, installed, device, wanted, why, tmp_path
):
  (tmp_path / "setup.py").write_text(PAIRED)
  plan = colab_setup.plan(python, installed, device, tmp_path)
  *library, checkout = plan.arguments[:3]
  arguments = plan.arguments[3:]
  assert (library, checkout) == (["install", "--editable"], str(tmp_path))
  assert sorted(arguments) == sorted(wanted)
  assert why in plan.why and "\n" not in plan.why


def paired() -> list[Requirement]:
  (value,) = (
    node.value
    for node in ast.parse(SETUP).body
    if isinstance(node, ast.Assign) and node.targets[0].id == "PAIRED"
  )
  return [Requirement(text) for text in ast.literal_eval(value)]


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_the_allowed_versions_are_read_as_pip_reads_them(minor):
  found = colab_setup.ranges(SETUP, (3, minor))
  environment = {"python_version": f"3.{minor}"}
  expected = {
    r.name: r.specifier for r in paired() if r.marker.evaluate(environment)
  }
  assert {n: SpecifierSet(v) for n, v in found.items()} == expected
  assert found.keys() == {"jax", "flax"}
  for versions in found.values():
    edges = re.findall(r"[\d.]+", versions)
    for version in ("0.7.2", "1.0", *edges, *(f"{e}.1" for e in edges)):
      expected = SpecifierSet(versions).contains(version)
      assert colab_setup.fits(version, versions) == expected, version


@pytest.mark.parametrize(
  "text", ["", "PAIRED = ['jax~=0.10; python_version < \"3.12\"']"]
)
def test_a_list_of_another_form_is_not_misread(text):
  with pytest.raises(ValueError, match="PAIRED"):
    colab_setup.ranges(text, (3, 12))


@pytest.mark.parametrize(
  ("driver", "device"), [("550.54.15", "cuda12"), ("580.82.07", "cuda13")]
)
def test_the_driver_says_which_cuda(driver, device, tmp_path, monkeypatch):
  fake = tmp_path / "nvidia-smi"
  fake.write_text(f"#!/bin/sh\necho {driver}\n")
  fake.chmod(0o755)
  monkeypatch.setenv("PATH", str(tmp_path))
  assert colab_setup.device() == device


def test_a_session_with_an_older_import_is_told_to_restart():
  colab_setup.check({"jax": sys.modules["jax"]})
  colab_setup.check({})
  old = types.SimpleNamespace(__version__="0.7.2")
  with pytest.raises(RuntimeError, match=r"imported jax 0\.7\.2.*restart"):
    colab_setup.check({"jax": old})


def test_a_failed_installation_is_told(tmp_path):
  (tmp_path / "setup.py").write_text(
    "PAIRED = [\"flax>=99; python_version >= '3.11'\"]"
  )
  with pytest.raises(RuntimeError, match=r"flax .*which will not do"):
    colab_setup.check({}, tmp_path)


class Stream(io.StringIO):
  """A notebook's stdout, as its module tells."""


Stream.__module__ = "ipykernel.iostream"


def test_progress_in_a_notebook_is_one_bar_under_the_lines(monkeypatch):
  monkeypatch.setattr(sys, "stdout", Stream())
  progress = Progress(0, 3)
  for step in range(1, 4):
    progress.step()
    progress.show(step, f"clm {step}.0")
    progress.say(f"line {step}")
  progress.close()
  drawn = sys.stdout.getvalue().split("\n")
  # A carriage return writes over what stands in its line.
  shown = [line.rstrip("\r").split("\r")[-1] for line in drawn]
  assert shown[:3] == ["line 1", "line 2", "line 3"]
  assert len(shown) == 5 and shown[4] == ""
  assert "3/3" in shown[3] and "clm 3.0" in shown[3]


def test_it_is_committed_without_outputs():
  cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
  code = [cell for cell in cells if cell["cell_type"] == "code"]
  assert len(code) >= 10
  assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


# What the last cells compare, for the test to look at.
REPORT = """
print(json.dumps({
  "ours": ours, "theirs": theirs, "our_text": our_text,
  "their_text": their_text, "accuracy": accuracy, "python": sys.executable,
}))
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
  """The notebook after all cells, in its short form."""
  nbclient = pytest.importorskip("nbclient", reason="runs notebooks")
  for name in ("ipykernel", "torch", "transformers.models.eurobert"):
    pytest.importorskip(name, reason="the notebook needs it")
  import nbformat

  folder = tmp_path_factory.mktemp("colab")
  notebook = nbformat.read(NOTEBOOK, as_version=4)
  notebook.cells.append(nbformat.v4.new_code_cell(REPORT))
  client = nbclient.NotebookClient(
    notebook, timeout=600, resources={"metadata": {"path": NOTEBOOK.parent}}
  )
  environment = {
    "ANTLM_COLAB_SHORT": "1",
    "HF_HUB_OFFLINE": "1",
    "JAX_PLATFORMS": "cpu",
    "RUNS": str(folder),
  }
  client.execute(env=os.environ | environment)
  nbformat.write(notebook, folder / "executed.ipynb")
  return notebook


def printed(cell) -> str:
  return "".join(o.text for o in cell.outputs if o.output_type == "stream")


def cell_with(notebook, words: str):
  """The code cell whose source has these words."""
  (cell,) = (
    c for c in notebook.cells if c.cell_type == "code" and words in c.source
  )
  return cell


@pytest.mark.nightly
def test_training_shows_a_bar_and_the_curves(executed):
  output = printed(cell_with(executed, "train.train("))
  assert "40/40" in output and "held out after step 40" in output
  (image,) = cell_with(executed, "curves.png").outputs
  png = base64.b64decode(image.data["image/png"])
  assert png.startswith(b"\x89PNG") and len(png) > 20_000


@pytest.mark.nightly
def test_the_pairs_are_scored_in_both_modes(executed):
  lines = printed(cell_with(executed, "minimal_pairs")).splitlines()
  assert "left to right" in lines[0] and "masked" in lines[0]
  rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
  report = json.loads(printed(executed.cells[-1]))["accuracy"]
  for column, shares in enumerate(report.values()):
    assert len(shares) == 13  # twelve paradigms and their mean
    assert {n: f"{100 * s:.1f}" for n, s in shares.items()} == {
      name: row[column] for name, row in rows.items()
    }


@pytest.mark.nightly
def test_transformers_says_the_same(executed):
  report = json.loads(printed(executed.cells[-1]))
  ours, theirs = report["ours"], report["theirs"]
  assert len(ours) == 5
  assert [w.strip() for w, _ in ours] == [w.strip() for w, _ in theirs]
  for (_, mine), (_, its) in zip(ours, theirs, strict=True):
    assert mine == pytest.approx(its, rel=1e-3)
  assert report["our_text"] == report["their_text"] != ""
  assert report["python"] == sys.executable  # what else was tested?


@pytest.mark.slow
def test_without_a_checkout_it_says_what_to_do(tmp_path):
  nbclient = pytest.importorskip("nbclient", reason="runs notebooks")
  pytest.importorskip("ipykernel", reason="the notebook needs it")
  import nbformat

  client = nbclient.NotebookClient(
    nbformat.read(NOTEBOOK, as_version=4),
    resources={"metadata": {"path": tmp_path}},
  )
  with pytest.raises(nbclient.exceptions.CellExecutionError) as caught:
    client.execute(env=os.environ | {"ANTLM_COLAB_SHORT": "1"})
  assert caught.value.ename == "RuntimeError"
  assert caught.value.evalue.startswith(
    "antlm_jax is not here: set REPOSITORY above"
  )


@pytest.mark.slow
def test_pip_leaves_a_kept_jax_alone():
  pytest.importorskip("setuptools", reason="pip reads setup.py by it")
  installed = colab_setup.installed_versions()
  plan = colab_setup.plan(sys.version_info[:2], installed, "cpu")
  assert plan.why.startswith("keeping")
  options = "--dry-run", "--no-index", "--no-build-isolation"
  done = subprocess.run(
    [sys.executable, "-m", "pip", *plan.arguments, *options],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  (changed,) = re.findall("Would install (.*)", done.stdout)
  assert re.fullmatch(r"antlm[-_]jax-[\d.]+", changed)
