"""The notebook: its installation, its stored outputs, and a complete run."""

import base64
import importlib.metadata
import importlib.util
import io
import json
import os
import pathlib
import re
import sys

import pytest
from packaging.requirements import Requirement

from antlm_jax import config as config_lib
from antlm_jax.objectives import curriculum
from antlm_jax.page import plots
from antlm_jax.runtime import progress
from tests import runs
from tests.test_from_decoder import begun

NOTEBOOK = runs.ROOT / "launch" / "colab.ipynb"


def install(monkeypatch, source: str, **form: str) -> str:
  """Runs the installing cell; returns its first pip command."""
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
  scope |= {"TEXT": "", "DECODER": "", "PAIRS": ""} | form
  exec(transform.TransformerManager().transform_cell(cell), scope)
  (name, line), *others = asked
  embeds = [("pip", "install --quiet sentence-transformers")]
  assert name == "pip" and others == (embeds if scope["PAIRS"] else [])
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
  assert wanted.extras == {"hf", "datasets"} | ({"cuda12"} if gpu else set())
  known = importlib.metadata.metadata("antlm_jax").get_all("Provides-Extra")
  assert wanted.extras | {"tpu"} <= set(known)
  assert wanted.url == "git+https://example.org/antlm_jax"


def test_a_failed_installation_says_what_to_change(tmp_path, monkeypatch):
  """Catches an ImportError, far below, while the repository is not public."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(RuntimeError, match="upload a wheel, antlm_jax-"):
    install(monkeypatch, "git+https://example.org/antlm_jax")


@pytest.mark.parametrize("field", ["PAIRS", "DECODER"])
def test_pairs_and_a_decoder_need_real_text(field, tmp_path, monkeypatch):
  """Catches an embedder, or an encoder, of generated English."""
  monkeypatch.chdir(tmp_path)
  address = "git+https://example.org/antlm_jax"
  form = {field: "pairs.csv"}
  with pytest.raises(RuntimeError, match="set TEXT"):
    install(monkeypatch, address, **form)
  assert install(monkeypatch, address, TEXT="mine.txt", **form)


def test_a_wheel_and_a_checkout_are_installed_from_their_path(
  tmp_path, monkeypatch
):
  """Catches an upload that is not found, or the network in a checkout."""
  monkeypatch.chdir(tmp_path)
  wheel = tmp_path / "antlm_jax-1-py3-none-any.whl"
  wheel.write_text("")
  address = "git+https://example.org/antlm_jax"
  assert wheel.as_uri() in install(monkeypatch, address)
  monkeypatch.chdir(NOTEBOOK.parent)
  line = install(monkeypatch, address)
  assert f" @ {runs.ROOT.resolve().as_uri()}" in line


def test_all_pages_name_one_address():
  """Catches a notebook, README or page that installs from another address."""
  cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
  settings = "".join(cells[1]["source"])
  (address,) = re.findall(r'^SOURCE = "git\+(\S+)"', settings, re.M)
  setup = (runs.ROOT / "setup.py").read_text("utf-8")
  assert f'URL = "{address}"' in setup
  for page in ("README.md", "docs/install.md"):
    text = (runs.ROOT / page).read_text("utf-8")
    assert f"git clone {address} " in text
    there = address.removeprefix("https://github.com/")
    opened = f"https://colab.research.google.com/github/{there}/blob/main/"
    assert f"{opened}launch/colab.ipynb" in text


class Stream(io.StringIO):
  """A notebook's stdout, recognized by its module."""


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
  # A carriage return overwrites the line.
  lines = [line.rstrip("\r").split("\r")[-1] for line in drawn]
  assert lines[:3] == ["line 1", "line 2", "line 3"]
  assert len(lines) == 5 and lines[4] == ""
  assert "3/3" in lines[3] and "clm 3.0" in lines[3]


def test_many_blocks_are_a_line_after_own_blocks_and_one_after_others():
  """Catches a picture whose zigzag hides the loss that a block adds."""
  config = config_lib.load_config("quickstart")
  blocks = curriculum.parse_curriculum(
    "20*(2%C+3%M)", config.known_objectives, 100, 2000
  )
  ends = [phase.stop for phase in blocks.phases]
  rows = {step: {"eval/clm/loss": 2.0 + step / 1e4} for step in ends}
  figure = plots.draw_run_curves(config, blocks, None, rows, 4.0)
  lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
  assert [*lines["clm, after clm blocks"].get_xdata()] == ends[::2]
  assert [*lines["clm, after others"].get_xdata()] == ends[1::2]


def run_notebook(settings: str, folder: pathlib.Path) -> list:
  """Runs all cells in the short form; returns the cells of code."""
  nbclient = pytest.importorskip("nbclient", reason="runs notebooks")
  needs = "ipykernel", "torch", "transformers.models.eurobert"
  for name in (*needs, "sentence_transformers"):
    pytest.importorskip(name, reason="the notebook needs it")
  import nbformat

  notebook = nbformat.read(NOTEBOOK, as_version=4)
  notebook.cells[1].source += f"\n{settings}"
  where = {"metadata": {"path": NOTEBOOK.parent}}
  client = nbclient.NotebookClient(notebook, timeout=600, resources=where)
  short = {"ANTLM_COLAB_SHORT": "1", "HF_HUB_OFFLINE": "1"}
  short |= {"JAX_PLATFORMS": "cpu", "RUNS": str(folder)}
  client.execute(env=os.environ | short)
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cells: list, words: str) -> str:
  """Returns the text that the one cell with these words prints."""
  (cell,) = (cell for cell in cells if words in cell.source)
  return "".join(o.text for o in cell.outputs if o.output_type == "stream")


@pytest.mark.slow
@pytest.mark.parametrize(
  "curriculum",
  ["auto", "100%C", pytest.param("100%M", marks=pytest.mark.nightly)],
)
def test_training_shows_a_bar_and_the_curves(curriculum, tmp_path):
  """Catches a cell that needs both modes."""
  cells = run_notebook(f'CURRICULUM = "{curriculum}"', tmp_path)
  assert "held out after step 12" in printed(cells, "ax.train(")
  train = next(cell for cell in cells if "ax.train(" in cell.source)
  # The bar is a widget, whose text is that of its beginning.
  (bar,) = (o.data for o in train.outputs if o.output_type == "display_data")
  assert "application/vnd.jupyter.widget-view+json" in bar
  assert "0/12" in bar["text/plain"]
  (curves,) = (cell for cell in cells if "curves.png" in cell.source)
  png = base64.b64decode(curves.outputs[0].data["image/png"])
  assert png.startswith(b"\x89PNG") and len(png) > 20_000


@pytest.mark.slow
def test_a_decoder_becomes_an_embedder_and_nothing_else_is_trained(tmp_path):
  """Catches a model from scratch before the decoder, and a prompt of a toy.

  It also catches an embedder without its scores or cost.
  """
  pairs, text = tmp_path / "pairs.csv", tmp_path / "text.txt"
  lines = [f"the dog {i},the cat {i}" for i in range(40)]
  pairs.write_text("\n".join(["query,positive", *lines]))
  sentences = (f"A bird {i} sings in tree {i}." for i in range(2000))
  text.write_text("\n\n".join(sentences))
  decoder = begun(tmp_path / "decoder")
  settings = f'TEXT, PAIRS, DECODER = "{text}", "{pairs}", "{decoder}"'
  cells = run_notebook(f"{settings}\nLENGTH = 32", tmp_path)
  made = tmp_path / "colab"
  assert [path.parent.name for path in made.glob("*/summary.json")] == [
    "first-encoder"
  ]
  assert (made / "first-encoder-transformers").is_dir()
  said = printed(cells, "ax.prepare(")
  assert re.search(r"^40 pairs: \d+ tokens to train the embedder", said, re.M)
  assert "with SmolLM2-135M" in said
  filled = printed(cells, "count=3")
  assert " sings in" in filled and "the dogs" not in filled
  embeds = printed(cells, "encode_query")
  assert "BM25 (%)" in embeds and "the dog 0\n" in embeds
  shown = re.findall(r"^ +-?\d\.\d{4}  the cat \d$", embeds, re.M)
  assert len(shown) == 3 and (made / "first-embedder").is_dir()


@pytest.mark.slow
def test_wrong_pairs_fail_before_training(tmp_path):
  """Catches an error of PAIRS after hours of a decoder's training."""
  pairs, text = tmp_path / "pairs.csv", tmp_path / "text.txt"
  pairs.write_text("question,answer\na,b\n")
  text.write_text("the dogs rest .\n")
  with pytest.raises(Exception, match="query"):
    run_notebook(f'TEXT, PAIRS = "{text}", "{pairs}"', tmp_path)
  assert not (tmp_path / "colab").exists()


def test_the_forms_curricula_parse():
  """Catches a choice of the form that no run accepts."""
  cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
  choices = re.search(r"CURRICULUM = .*(\[.*\])", "".join(cells[1]["source"]))
  for text in json.loads(choices[1])[1:]:
    known = config_lib.Config(curriculum=text).known_objectives
    assert curriculum.parse_curriculum(text, known, 100, 2000).steps == 2000


def test_what_it_shows_is_stored_for_its_readers():
  cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
  code = [cell for cell in cells if cell["cell_type"] == "code"]
  counts = [cell["execution_count"] for cell in code]
  assert counts == list(range(1, len(code) + 1))
  outputs = [output for cell in code for output in cell["outputs"]]
  assert not [o for o in outputs if o["output_type"] == "error"]
  (picture,) = (o for o in outputs if "image/png" in o.get("data", {}))
  assert len(base64.b64decode(picture["data"]["image/png"])) > 20_000
  text = "".join("".join(o.get("text", "")) for o in outputs)
  assert "held out after step 2000" in text and "pairs, % right" in text
  assert "/root" not in text and "/tmp" not in text and "/home" not in text
