"""The experiment of evals/benchmarks/from_decoder.py, in miniature."""

import json
import pathlib

import numpy as np
import pytest

from antlm_jax.commands.export import export
from antlm_jax.commands.prepare import prepare
from antlm_jax.data import toy_english
from antlm_jax.evals.benchmarks import from_decoder
from antlm_jax.evals.embed import embed
from antlm_jax.evals.finetuning import retrieval
from antlm_jax.inference.model import load
from tests import random_models, runs

MODULE = "antlm_jax.evals.benchmarks.from_decoder"
LINES = list(toy_english.make_sentences(5, 400))


def write_sets(folder: pathlib.Path) -> pathlib.Path:
  """Writes small sets in the form of the real sets."""
  for name in from_decoder.SETS:
    (folder / name / "qrels").mkdir(parents=True)
    texts = [{"_id": f"d{i}", "text": x} for i, x in enumerate(LINES[:60])]
    runs.write_lines(folder / name / "corpus.jsonl", texts)
    asked = [
      {"_id": f"q{i}", "text": " ".join(x.split()[:3])}
      for i, x in enumerate(LINES[:30])
    ]
    runs.write_lines(folder / name / "queries.jsonl", asked)
    for split, first in {"train": 0, "dev": 20, "test": 24}.items():
      last = {"train": 20, "dev": 24, "test": 30}[split]
      lines = (f"q{i}\td{i}\t1\n" for i in range(first, last))
      (folder / name / f"qrels/{split}.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(lines)
      )
  (folder / "sst2").mkdir()
  for name, lines in {"train_full": LINES[:80], "dev": LINES[80:100]}.items():
    rows = (f"{x}\t{i % 2}\n" for i, x in enumerate(lines))
    (folder / f"sst2/{name}.tsv").write_text(
      "sentence\tlabel\n" + "".join(rows)
    )
  (folder / "conll2003").mkdir()
  for name in ("train", "testa", "testb"):
    sentences = (
      "".join(f"{w} {'I-PER' if len(w) > 5 else 'O'}\n" for w in x.split())
      for x in LINES[:40]
    )
    (folder / f"conll2003/eng.{name}").write_text("\n".join(sentences))
  return folder


def measured(output: pathlib.Path) -> dict[tuple, dict]:
  """Returns the results by row and measure."""
  found = from_decoder.read_results(output)
  assert not [one["error"] for one in found if "error" in one]
  keys = [(one["row"], one["measure"]) for one in found]
  assert len(keys) == len(set(keys))  # nothing is done twice
  return dict(zip(keys, found, strict=True))


@pytest.mark.slow
def test_an_experiment_stops_resumes_and_gives_the_same(tmp_path):
  """Catches a lost or repeated result, and another attention."""
  run = random_models.save(tmp_path / "run", random_models.tokenizer())
  loaded = random_models.with_curriculum(load(run), "1C")
  (model,) = export(loaded, tmp_path / "model", quiet=True)
  text, data = tmp_path / "text", write_sets(tmp_path / "data")
  prepare(LINES, text, tokenizer=model.path, seq_len=16, quiet=True)
  output = tmp_path / "output"
  words = f"--model={model}", f"--text={text}", f"--data={data}"
  words += f"--work={tmp_path}/work", f"--output={output}", "--size=tiny"
  words += "--rows=clm_mlm,causal", "--seeds=0", "--workers=1"
  done = runs.run(MODULE, *words)
  assert done.returncode == 0, done.stderr
  assert done.stdout.endswith("\n0 measures are left\n")
  first = measured(output)
  row = {measure for name, measure in first if name == "clm_mlm"}
  assert row == {*from_decoder.MEASURES}
  assert {m for name, m in first if name == "causal"} == row - {"loss"}
  held_out = first["clm_mlm", "loss"]["held_out"]
  assert [at["step"] for at in held_out] == [0, 1, 4]  # a quarter is CLM

  # NDCG@10 of the vectors of `embed`, with the attention of the row.
  task = retrieval.make_retrieval_task(
    data, "scifact", "causal", retrieval.RetrievalOptions()
  )
  examples = task.load("scifact-test")
  queries = [e for e in examples if e.label is not None]
  documents = [e for e in examples if e.label is None]
  start = load(tmp_path / "work/start")
  start = random_models.with_meta(start, row_tokens=16)
  found = {}
  for attention in ("causal", "bidirectional"):
    one, other = (
      embed(
        start,
        [e.texts[0] for e in some],
        attention=attention,
        normalize=True,
        quiet=True,
      )
      for some in (queries, documents)
    )
    ranks = np.argsort(-one @ other.T, axis=-1, kind="stable")[:, :10]
    found[attention] = [
      retrieval.ndcg([documents[i].id for i in ranked], e.label)
      for ranked, e in zip(ranks, queries, strict=True)
    ]
  zero = first["causal", "zero_shot"]["scifact_queries"]
  assert found["causal"] != found["bidirectional"]
  np.testing.assert_allclose(zero, found["causal"], atol=1e-4)

  # A stopped run has lost some results, and half a line.
  lost = {("clm_mlm", "pairs"), ("clm_mlm", "sst2_tuned"), ("causal", "pairs")}
  kept = [json.dumps(x) + "\n" for key, x in first.items() if key not in lost]
  (output / from_decoder.RESULTS).write_text("".join(kept) + '{"row": "cau')
  done = runs.run(MODULE, *words)
  assert done.returncode == 0, done.stderr
  again = measured(output)
  assert again.keys() == first.keys()
  for key in lost:
    one, other = ({**x[key], "seconds": 0} for x in (first, again))
    assert one == other
