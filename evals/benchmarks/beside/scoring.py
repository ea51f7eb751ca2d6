"""Scores and vectors of texts, ours compared with three peers.

lm-eval and minicons sum log-probabilities, and sentence-transformers embeds,
all in batches of 32 texts.
"""

import dataclasses
import pathlib

import numpy as np
import tokenizers

from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.evals import embed
from antlm_jax.evals.benchmarks import turns
from antlm_jax.evals.benchmarks.beside import models
from antlm_jax.inference import pairs
from antlm_jax.inference.scoring import score

_BATCH = 32
_ATTENTION = {"causal": "causal", "mlm": "bidirectional"}


@dataclasses.dataclass(frozen=True)
class Texts(turns.Work):
  """Sentences of toy English's minimal pairs, to score or embed."""

  unit = "texts"

  kind: str  # score or embed
  mode: str  # key of `_ATTENTION`
  size: str
  limit: int  # most pairs of each file

  def __str__(self) -> str:
    return f"{self.kind} {self.mode} {self.size}"

  def read(self, folder: pathlib.Path) -> list[str]:
    """Returns different sentences: ours scores equal texts once."""
    items = pairs.read_minimal_pairs(folder.parent / "toy/pairs", self.limit)
    texts = [choice.text for item in items for choice in item.choices]
    return list(dict.fromkeys(texts))

  def tiny(self) -> "Texts":
    return dataclasses.replace(self, size=models.tiny(self.size), limit=2)


def ours(work: Texts, folder: pathlib.Path) -> tuple[turns.Call, float]:
  """Prepares our scores or vectors."""
  texts = work.read(folder)
  tokenizer = Tokenizer.train(texts, models.SIZES[work.size].vocab_size)
  attention = _ATTENTION[work.mode]
  loaded = models.make_benchmark_model(work.size, tokenizer, attention, folder)
  if work.kind == "embed":
    return lambda: embed.embed(loaded, texts), len(texts)
  return lambda: score(loaded, texts, work.mode), len(texts)


def sentence_transformers(
  work: Texts, folder: pathlib.Path
) -> tuple[turns.Call, float]:
  """Prepares vectors by sentence-transformers."""
  models.torch_modules()
  from sentence_transformers import SentenceTransformer

  path = str(models.exported(folder))
  peer = SentenceTransformer(path, device=models.torch_device())
  texts = work.read(folder)
  return lambda: peer.encode(texts, batch_size=_BATCH), len(texts)


def lm_eval(work: Texts, folder: pathlib.Path) -> tuple[turns.Call, float]:
  """Prepares causal scores by lm-eval."""
  model = models.in_transformers("causal", folder).eval()
  transformers, _ = models.torch_modules()
  from lm_eval.api.instance import Instance
  from lm_eval.models.huggingface import HFLM

  path = models.exported(folder)
  tokenizer = transformers.AutoTokenizer.from_pretrained(path)
  peer = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=_BATCH)
  texts = work.read(folder)

  def call():
    requests = [
      Instance("loglikelihood", {}, ("", text), n)
      for n, text in enumerate(texts)
    ]
    scores = peer.loglikelihood(requests, disable_tqdm=True)
    return np.array([total for total, _ in scores])

  return call, len(texts)


def minicons_scorer(model, path: pathlib.Path, mode: str):
  """Returns minicons' scorer of an exported model; causally it adds <s>."""
  transformers, _ = models.torch_modules()
  from minicons import scorer

  class WithOldMethod(transformers.PreTrainedTokenizerFast):
    """With the method that minicons calls and transformers 5 has dropped."""

    def batch_encode_plus(self, *args, **options):
      return self(*args, **options)

  tokenizer = WithOldMethod.from_pretrained(path)
  # minicons writes their names into texts, which an export reads as text.
  ends = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
  tokenizer.add_special_tokens(ends)
  arguments = model.eval(), str(model.device)
  if mode == "mlm":
    return scorer.MaskedLMScorer(*arguments, tokenizer=tokenizer)
  bare = tokenizers.processors.TemplateProcessing("$A", special_tokens=[])
  tokenizer.backend_tokenizer.post_processor = bare
  return scorer.IncrementalLMScorer(*arguments, tokenizer=tokenizer)


def minicons(work: Texts, folder: pathlib.Path) -> tuple[turns.Call, float]:
  """Prepares scores by minicons."""
  model = models.in_transformers(_ATTENTION[work.mode], folder)
  peer = minicons_scorer(model, models.exported(folder), work.mode)
  options = {"bos_token": True} if work.mode == "causal" else {}
  texts = work.read(folder)

  def call():
    scores = []
    for start in range(0, len(texts), _BATCH):
      scores += peer.sequence_score(
        texts[start : start + _BATCH],
        reduction=lambda x: x.sum().item(),
        **options,
      )
    return np.array(scores)

  return call, len(texts)
