"""Our scores compared with those of minicons on real minimal pairs.

BabyLM's 2024 pipeline scores masked models with minicons
(github.com/kanishkamisra/minicons), which opens exported folders.
"""

import json
import re

import numpy as np
import pytest

from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.evals.benchmarks.beside.scoring import minicons_scorer
from antlm_jax.evals.zero_shot import pipelines
from antlm_jax.hf import export
from antlm_jax.hf.architecture import ATTENTIONS
from antlm_jax.inference.model import load
from antlm_jax.inference.scoring import score
from tests import hub, random_models, real, runs

pytest.importorskip("torch")
pytest.importorskip("minicons")

pytestmark = pytest.mark.slow  # half a minute

SHAPE = {"width": 64, "heads": 4, "kv_heads": 2, "mlp_width": 96}


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
  """200 pairs of all paradigms, good and bad sentences in turn."""
  out, folder = [], tmp_path_factory.mktemp("blimp")
  real.unpacked("blimp_filtered", folder)
  for path in sorted(folder.rglob("*.jsonl")):
    for pair in map(json.loads, path.read_text().splitlines()[:3]):
      out += [pair["sentence_good"], pair["sentence_bad"]]
  return out[:400]


@pytest.fixture(scope="module")
def loaded(sentences, tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  tokenizer = Tokenizer.train(sentences, 1500)
  random_models.save(folder, tokenizer, **SHAPE)
  return load(folder)


@pytest.fixture(scope="module")
def exported(loaded, tmp_path_factory):
  """The model's exported folders by attention."""
  folder = tmp_path_factory.mktemp("exported") / "hf"
  paths = export.export_model(loaded, folder, ATTENTIONS)
  return dict(zip(ATTENTIONS, paths, strict=True))


@pytest.fixture(scope="module")
def contexts(sentences):
  return [s for good in sentences[::2] for s in (good, good)][::-1]


def summed(scores):
  return scores.sum().item()


def equal(ours, theirs):
  """Asserts scores within 1e-3, and the same choice in each pair."""
  theirs = np.array(theirs)
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)
  np.testing.assert_array_equal(
    ours[::2] > ours[1::2], theirs[::2] > theirs[1::2]
  )
  assert np.ptp(theirs) > 1  # the model tells sentences apart


def test_the_pages_lines_give_our_sums(loaded, exported, capsys):
  """Catches lines that the installed transformers no longer runs."""
  page = (runs.ROOT / "docs/how_to/export.md").read_text()
  (code,) = re.findall(
    r"```\n(import transformers\n[^`]*minicons_scorer[^`]*)```", page
  )
  causal = code.replace("exports/first/causal", str(exported["causal"].path))
  # As the sentence below the lines says.
  masked = causal.replace("ForCausalLM", "ForMaskedLM")
  masked = masked.replace(', "causal")', ', "mlm")')
  masked = masked.replace(", bos_token=True", "")
  bidirectional = str(exported["bidirectional"].path)
  masked = masked.replace(str(exported["causal"].path), bidirectional)
  for mode, lines in (("causal", causal), ("mlm", masked)):
    capsys.readouterr()
    names = {}
    exec(lines, names)
    printed = capsys.readouterr().out.splitlines()[-1]
    ours = score(loaded, names["texts"], mode)
    np.testing.assert_allclose(json.loads(printed), ours, rtol=0, atol=1e-3)


def test_causal_sums(loaded, exported, sentences, contexts):
  path, late = exported["causal"], pipelines.options("2024", "causal")
  model = minicons_scorer(hub.opened(path, "causal"), path, "causal")
  theirs = model.sequence_score(sentences, reduction=summed, bos_token=True)
  for how in ({}, late):
    equal(score(loaded, sentences, "causal", **how), theirs)
  theirs = model.conditional_score(contexts, sentences, reduction=summed)
  equal(score(loaded, sentences, "causal", contexts=contexts, **late), theirs)


def test_masked_sums_and_the_means_of_the_2024_pipeline(
  loaded, exported, sentences, contexts
):
  path, late = exported["bidirectional"], pipelines.options("2024", "mlm")
  model = minicons_scorer(hub.opened(path, "bidirectional"), path, "mlm")
  theirs = model.sequence_score(sentences, reduction=summed)
  equal(score(loaded, sentences, "mlm"), theirs)
  choices = [f" {s}" for s in sentences]  # lm-eval's delimiter
  theirs = model.conditional_score(["</s>"] * len(choices), choices)
  equal(score(loaded, sentences, "mlm", **late), theirs)
  theirs = model.conditional_score(contexts, choices)
  equal(score(loaded, sentences, "mlm", contexts=contexts, **late), theirs)
