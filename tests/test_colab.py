"""The notebook: what it installs, what is stored, and a run of all of it."""

import base64
import importlib.metadata
import io
import json
import os
import sys

import pytest
from packaging.requirements import Requirement

from antlm_jax.runtime import progress
from tests import runs

NOTEBOOK = runs.ROOT / "launch" / "colab.ipynb"


def install(monkeypatch, source: str) -> list[str]:
  """Runs the cell that installs; returns what it asks of IPython."""
  transform = pytest.importorskip("IPython.core.inputtransformer2")
  cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
  texts = map("".join, (cell["source"] for cell in cells))
  (cell,) = (text for text in texts if "%pip install --quiet" in text)
  asked = []

  class Shell:
    def run_line_magic(self, name, line):
      asked.append((name, line))

  monkeypatch.delenv("ANTLM_COLAB_SHORT", raising=False)
  scope = {"SOURCE": source, "get_ipython": Shell}
  exec(transform.TransformerManager().transform_cell(cell), scope)
  ((name, line),) = asked
  assert name == "pip"
  return line.format(**scope)


@pytest.mark.parametrize("gpu", [False, True])
def test_one_line_installs_it_for_the_device(gpu, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PATH", str(tmp_path))
  if gpu:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
  line = install(monkeypatch, "git+https://example.org/antlm_jax")
  quiet, _, wanted = line.removeprefix("install ").partition(" ")
  wanted = Requirement(wanted.strip('"'))
  assert quiet == "--quiet" and wanted.name == "antlm_jax"
  assert wanted.extras == ({"cuda12"} if gpu else set())
  known = importlib.metadata.metadata("antlm_jax").get_all("Provides-Extra")
  assert wanted.extras | {"tpu"} <= set(known)
  assert wanted.url == "git+https://example.org/antlm_jax"


def test_without_a_checkout_it_says_what_to_do(tmp_path, monkeypatch):
  (tmp_path / "content").mkdir()
  monkeypatch.chdir(tmp_path / "content")
  with pytest.raises(RuntimeError, match="set SOURCE above"):
    install(monkeypatch, "")


class Stream(io.StringIO):
  """A notebook's stdout, as its module tells."""


Stream.__module__ = "ipykernel.iostream"


def test_progress_in_a_notebook_is_one_bar_under_the_lines(monkeypatch):
  monkeypatch.setattr(sys, "stdout", Stream())
  shown = progress.Progress(0, 3)
  for step in range(1, 4):
    shown.step()
    shown.show(step, f"clm {step}.0")
    progress.say(f"line {step}")
  shown.close()
  drawn = sys.stdout.getvalue().split("\n")
  # A carriage return writes over what stands in its line.
  lines = [line.rstrip("\r").split("\r")[-1] for line in drawn]
  assert lines[:3] == ["line 1", "line 2", "line 3"]
  assert len(lines) == 5 and lines[4] == ""
  assert "3/3" in lines[3] and "clm 3.0" in lines[3]


def test_what_it_shows_is_stored_for_its_readers():
  cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
  code = [cell for cell in cells if cell["cell_type"] == "code"]
  counts = [cell["execution_count"] for cell in code]
  assert counts == list(range(1, len(code) + 1))  # all, from top to bottom
  outputs = [output for cell in code for output in cell["outputs"]]
  assert not [o for o in outputs if o["output_type"] == "error"]
  (picture,) = (o for o in outputs if "image/png" in o.get("data", {}))
  assert len(base64.b64decode(picture["data"]["image/png"])) > 20_000
  text = "".join("".join(o.get("text", "")) for o in outputs)
  assert "held out after step 2000" in text and "pairs, % right" in text
  assert "/root" not in text and "/tmp" not in text and "/home" not in text


# What the last cells compare, for the test to look at.
REPORT = """
import sys
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
  where = {"metadata": {"path": NOTEBOOK.parent}}
  client = nbclient.NotebookClient(notebook, timeout=600, resources=where)
  short = {"ANTLM_COLAB_SHORT": "1", "HF_HUB_OFFLINE": "1"}
  short |= {"JAX_PLATFORMS": "cpu", "RUNS": str(folder)}
  client.execute(env=os.environ | short)
  nbformat.write(notebook, folder / "executed.ipynb")
  return notebook


def printed(cell) -> str:
  return "".join(o.text for o in cell.outputs if o.output_type == "stream")


def cell_with(notebook, words: str):
  """The code cell whose source has these words."""
  code = (c for c in notebook.cells if c.cell_type == "code")
  (cell,) = (c for c in code if words in c.source)
  return cell


@pytest.mark.slow  # it runs all cells, as those below
def test_training_shows_a_bar_and_the_curves(executed):
  output = printed(cell_with(executed, "ax.train("))
  assert "40/40" in output and "held out after step 40" in output
  (image,) = cell_with(executed, "curves.png").outputs
  png = base64.b64decode(image.data["image/png"])
  assert png.startswith(b"\x89PNG") and len(png) > 20_000


@pytest.mark.nightly
def test_the_pairs_are_scored_in_both_modes(executed):
  _, *lines = printed(cell_with(executed, "ax.evaluate(")).splitlines()
  assert lines[0].split()[-2:] == ["clm", "mlm"]
  rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
  report = json.loads(printed(executed.cells[-1]))["accuracy"]
  for column, shares in enumerate(report.values()):
    assert len(shares) == 13  # twelve paradigms and their mean
    shown = {name: row[column] for name, row in rows.items()}
    assert {n: f"{100 * s:.1f}" for n, s in shares.items()} == shown


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
