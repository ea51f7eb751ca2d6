"""The site builds, and its search finds a page by the field's words."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests import runs
from tests.test_docs import DOCS, PAGES

# The page that the search must list first. A stranger types the words on the
# left; our own words for them are on the page.
FIRST = {
  "A100": "explanation/planning",
  "FAISS": "how_to/embedders",
  "LLM2Vec": "tutorials/decoder_to_encoder",
  "LoRA": "faq",
  "OOM": "faq",
  "RAG": "how_to/embedders",
  "batch size": "how_to/optimizer",
  "context length": "how_to/optimizer",
  "contrastive": "how_to/embedders",
  "domain adaptation": "tutorials/continue",
  "early stopping": "how_to/watch",
  "embedding": "how_to/embedders",
  "fine-tune": "how_to/finetune",
  "freeze": "how_to/finetune",
  "gradient accumulation": "how_to/one_gpu",
  "gradient checkpointing": "how_to/one_gpu",
  "hyperparameter": "how_to/compare",
  "learning rate": "how_to/optimizer",
  "microbatch": "reference/glossary",
  "mixed precision": "how_to/one_gpu",
  "multi-GPU": "how_to/devices",
  "named entity": "how_to/finetune",
  "nats": "reference/glossary",
  "own data": "tutorials/own_text",
  "perplexity": "how_to/score_text",
  "price": "explanation/cost",
  "reranker": "how_to/embedders",
  "sequence length": "how_to/optimizer",
  "single GPU": "how_to/one_gpu",
  "validation loss": "how_to/watch",
  "workdir": "reference/glossary",
}
# The page that the search must list first or second.
SECOND = {
  "AntLM and GPT-BERT": "faq",
  "DNA": "how_to/prepare_text",
  "GGUF": "how_to/import",
  "Japanese": "how_to/one_gpu",
  "NaN loss": "faq",
  "ONNX": "how_to/export",
  "Slurm": "how_to/slurm",
  "T4": "install",
  "TPU": "how_to/tpu",
  "classifier": "tutorials/classifier",
  "diffusion": "tutorials/diffusion",
  "how long does training take": "faq",
  "load a model from Hugging Face": "how_to/import",
  "multiple GPUs": "how_to/devices",
  "number of epochs": "reference/curriculum",
  "other languages": "how_to/one_gpu",
  "overfitting": "how_to/watch",
  "push a model to the Hub": "how_to/export",
  "resume": "how_to/resume",
  "sentence-transformers": "how_to/embedders",
  "streaming": "faq",
  "tokenizer": "how_to/prepare_text",
  "tokens per word": "how_to/one_gpu",
  "train on my own text": "tutorials/own_text",
  "wandb": "how_to/watch",
}
# Our own words, and the field's words for them.
FIELD = {
  r"rows?": r"sequence|example|recipe",
  r"microbatch\w*": r"accumulat",
  r"held[- ]out|holds? out": r"validat",
  r"workdir": r"output (folder|directory)",
  r"modes?": r"scoring direction",
  r"phases?": r"stage",
  r"nats": r"cross-entropy|natural logarithm",
}
_ENOUGH = 3  # times that a page's prose has one of our words
# Runs the site's own web worker: `search.js INDEX WORDS...` after its code.
WORKER = """
const fs = require("fs");
let receive, resolve;
globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => { receive = listener; };
globalThis.postMessage = message => resolve(message);
const ask = data => new Promise(r => { resolve = r; receive({data}); });
const [code, index, ...asked] = process.argv.slice(1);
(0, eval)(fs.readFileSync(code, "utf8"));
(async () => {
  const found = {}, options = {suggest: false};
  const {config, docs} = JSON.parse(fs.readFileSync(index, "utf8"));
  await ask({type: 0, data: {config, docs, options}});
  for (const words of asked) {
    const {data} = await ask({type: 2, data: words});
    found[words] = data.items.map(sections => sections[0].location);
  }
  console.log(JSON.stringify(found));
})();
"""


@pytest.mark.parametrize(
  "page",
  [page for page in PAGES if page.parent.name in ("how_to", "tutorials")],
  ids=lambda page: str(page.relative_to(DOCS)),
)
def test_a_guide_has_the_fields_words_with_ours(page):
  """Catches a page whose words only the glossary explains."""
  prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
  prose = " ".join(re.sub(r"`[^`\n]*`", "", prose).split())
  for ours, field in FIELD.items():
    if len(re.findall(rf"\b({ours})\b", prose, re.I)) >= _ENOUGH:
      assert re.search(field, prose, re.I), ours


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  """The built site's folder."""
  pytest.importorskip("mkdocs")
  folder = tmp_path_factory.mktemp("site") / "site"
  words = "-m", "mkdocs", "build", "--strict", "--site-dir", folder
  done = subprocess.run(
    [sys.executable, *words],
    cwd=runs.ROOT,
    env=os.environ | {"PYTHONPATH": str(runs.ROOT)},
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  return folder


@pytest.mark.slow
def test_the_site_builds_and_its_links_and_anchors_hold(site):
  """Catches a warning of mkdocs, such as a link to a missing heading."""
  page = (site / "reference/settings/index.html").read_text()
  assert 'id="train.batch_size"' in page


@pytest.mark.slow
def test_the_search_finds_a_page_by_the_fields_words(site):
  """Catches a page that only our own words find, or another page before it."""
  node = shutil.which("node")
  if node is None:
    pytest.skip("node runs the site's search engine")
  (worker,) = site.glob("assets/javascripts/workers/search.*.min.js")
  index = site / "search/search_index.json"
  done = subprocess.run(
    [node, "-e", WORKER, worker, index, *FIRST, *SECOND],
    capture_output=True,
    text=True,
    check=True,
    timeout=60,
  )
  pages = {
    words: [place.partition("#")[0].rstrip("/") for place in places]
    for words, places in json.loads(done.stdout).items()
  }
  assert {words: pages[words][0] for words in FIRST} == FIRST
  for words, page in SECOND.items():
    assert page in pages[words][:2], (words, pages[words])
