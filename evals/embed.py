"""Embeds texts: a vector for each.

  antlm embed --checkpoint=RUN --data=texts.txt --output=vectors.npy

A vector is the mean of a text's token states, or as a fine-tuned model pools
them. Those of `--preset=pairs` and `simcse` have length 1, as in the folder
that `antlm export` makes for sentence-transformers. A text that is longer than
the longest row of training is cut.
"""

import argparse
import dataclasses
import os
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from antlm_jax import cli
from antlm_jax import settings as settings_lib
from antlm_jax.errors import UserError
from antlm_jax.evals import results
from antlm_jax.evals.finetuning import retrieval, saved, sets
from antlm_jax.evals.finetuning.classification import pooled
from antlm_jax.evals.finetuning.trial import ATTENTIONS
from antlm_jax.inference import inputs
from antlm_jax.inference.model import Loaded, add_arguments, from_args, opened
from antlm_jax.inference.scoring import BATCH_TOKENS
from antlm_jax.runtime import files, progress
from antlm_jax.settings import setting

PROMPTS = "query", "document"


@dataclasses.dataclass(frozen=True)
class Embedding:
  """How texts are embedded."""

  prompt: str | None = setting(
    None,
    "Prefix of each text that an embedder was trained with, if it has one:"
    " query or document",
    choices=PROMPTS,
  )
  normalize: bool | None = setting(
    None,
    "Scale vectors to length 1; by default those of an embedder",
    action=argparse.BooleanOptionalAction,
  )
  attention: str | None = setting(
    None,
    "Attention of the encoder; by default as fine-tuned, or else bidirectional",
    choices=ATTENTIONS,
  )
  text_column: str | None = setting(
    None,
    "Column of a file's records; by default that of training, or else text",
  )
  batch_tokens: int = setting(
    BATCH_TOKENS, "Number of tokens encoded at once", least=1
  )


@dataclasses.dataclass(frozen=True)
class _Pool(retrieval.Towers):
  """The mean of a text's token states, or one of them."""

  temperature: float = 1.0
  pool: str = "mean"
  normalize: bool = False

  def __call__(self, params, hidden, lengths, dropout_key=None):
    """Returns vectors, float32 `[B, D]`."""
    found = pooled(hidden, lengths, self.pool).astype(jnp.float32)
    length = jnp.linalg.norm(found, axis=-1, keepdims=True)
    return found / length if self.normalize else found


def embed(
  model: Loaded | files.Path,
  texts: files.Path | Iterable[str],
  *,
  prompt: str | None = Embedding.prompt,
  normalize: bool | None = Embedding.normalize,
  attention: str | None = Embedding.attention,
  text_column: str | None = Embedding.text_column,
  batch_tokens: int = Embedding.batch_tokens,
  quiet: bool = False,
) -> npt.NDArray[np.float32]:
  """Embeds texts.

  Args:
    model: Model, or the path to its run or checkpoint; usually an embedder, the
      result of `finetune(preset="pairs", save=True)`.
    texts: n texts, or the path to a file of lines or records.
    prompt: Prefix of each text that an embedder was trained with: `query`,
      `document`; none by default.
    normalize: Whether vectors are scaled to length 1; by default those of an
      embedder are.
    attention: `bidirectional` or `causal`; as fine-tuned, or else
      bidirectional, by default.
    text_column: Column of a file's records; by default that of training, or
      else `text`.
    batch_tokens: Number of tokens encoded at once.
    quiet: Whether to print nothing.

  Returns:
    float32 `[n, D]`: the mean over each text's tokens, with the special tokens
    of training, or as a fine-tuned model pools them.

  Raises:
    UserError: An argument is wrong, the model has a vector for each token, or
      the file cannot be read or lacks the column.
  """
  asked = Embedding(prompt, normalize, attention, text_column, batch_tokens)
  settings_lib.check(asked, "--")
  with progress.quietly(quiet):
    loaded = opened(model)
    of_file = isinstance(texts, str | os.PathLike)
    if of_file:  # which says itself how many texts are blank
      texts = _texts(loaded, os.fspath(texts), text_column)
    examples = inputs.texts(texts)
    if not of_file and (blank := sum(not text.strip() for text in examples)):
      progress.say(
        f"warning: {blank:,} of {len(examples):,} texts are blank; their"
        " vectors are of the special tokens alone"
      )
    if not examples:
      return np.zeros((0, loaded.model.config.width), np.float32)
    length = loaded.longest_row
    size = max(1, asked.batch_tokens // length)
    how = length, size, *_head(loaded, asked)
    return saved.compute(loaded, examples, *how)[0]


def _texts(loaded: Loaded, path: str, column: str | None) -> list[str]:
  """Returns the texts of a file."""
  of_training = loaded.task.columns if loaded.task else ()
  own = of_training if len(of_training) == 1 else ["text"]
  return [text for (text,) in sets.texts(path, [column] if column else own)]


def _head(loaded: Loaded, asked: Embedding) -> tuple[_Pool, bool]:
  """Returns the head that pools, and whether the attention is causal."""
  task, kind = loaded.task, retrieval.Towers.kind
  if task and task.kind == retrieval.TokenTowers.kind:
    raise UserError(
      f"{loaded.path} has a vector for each token, not for each text: export"
      " it, and encode by sentence-transformers' MultiVectorEncoder"
    )
  settings = task.settings if task else {}
  attention = asked.attention or (task.attention if task else ATTENTIONS[0])
  prompts = zip(PROMPTS, settings.get("prompts", ("", "")), strict=True)
  prefix = dict(prompts)[asked.prompt] if asked.prompt else ""
  embeds = task is not None and kind in (task.kind, task.export_as)
  return _Pool(
    prompts=("", prefix),
    pool=settings.get("pool", "mean"),
    normalize=embeds if asked.normalize is None else asked.normalize,
  ), attention == "causal"


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__)
  add_arguments(parser)
  parser.add_argument("--data", required=True, help="File of lines, or records")
  results.add_output(parser, ".npy", ".jsonl", ".parquet", required=True)
  settings_lib.add_arguments(parser, Embedding)
  args = parser.parse_args(argv)
  how = vars(settings_lib.from_args(Embedding, args))
  loaded = from_args(args)
  texts = _texts(loaded, args.data, args.text_column)
  vectors = embed(loaded, texts, **how)
  if args.output.endswith(".npy"):
    with files.replacing(args.output) as aside, aside.open("wb") as file:
      np.save(file, vectors)
  else:
    pairs = zip(texts, vectors.tolist(), strict=True)
    results.write_rows(
      args.output, [{"text": t, "vector": v} for t, v in pairs]
    )
  print(f"vectors {list(vectors.shape)} are written to {args.output}")
