"""Embeds texts: a vector for each.

  antlm embed --checkpoint=RUN --data=texts.txt --output=vectors.npy

A vector is the mean of a text's token states, or as a fine-tuned model pools
them. Those of `--preset=pairs` and `simcse` have length 1, as in their export
for sentence-transformers. A text that is longer than the longest row of
training is cut.
"""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from antlm_jax import cli, settings
from antlm_jax.errors import UserError
from antlm_jax.evals import results
from antlm_jax.evals.finetuning import ranking, saved, sets
from antlm_jax.evals.finetuning.classification import pooled
from antlm_jax.evals.finetuning.trial import ATTENTIONS
from antlm_jax.inference import inputs
from antlm_jax.inference.model import Loaded, ModelOrPath, open_model
from antlm_jax.inference.scoring import BATCH_TOKENS
from antlm_jax.runtime import files, progress
from antlm_jax.settings import PythonOnly, argument

PROMPTS = "query", "document"


@dataclasses.dataclass(frozen=True)
class _Pool(ranking.Towers):
  """The mean of a text's token states, or one of them."""

  temperature: float = 1.0
  pool: str = "mean"
  normalize: bool = False

  def __call__(self, params, hidden, lengths, dropout_key=None):
    """Returns vectors, float32 `[B, D]`."""
    vectors = pooled(hidden, lengths, self.pool).astype(jnp.float32)
    norms = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / norms if self.normalize else vectors


@settings.checked
def embed(
  model: ModelOrPath[Loaded],
  texts: Annotated[
    files.Path | Iterable[str],
    argument("--data", help="File of lines, or records"),
  ],
  *,
  output: Annotated[
    files.Path | None,
    results.output_argument(".npy", ".jsonl", ".parquet", required=True),
  ] = None,
  prompt: Annotated[str | None, argument(choices=PROMPTS)] = None,
  normalize: bool | None = None,
  attention: Annotated[str | None, argument(choices=ATTENTIONS)] = None,
  text_column: str | None = None,
  batch_tokens: Annotated[int, argument(least=1)] = BATCH_TOKENS,
  step: int | None = None,
  quiet: PythonOnly[bool] = False,
) -> npt.NDArray[np.float32]:
  """Embeds texts.

  Args:
    model: Model, or the path to its run or checkpoint; usually an embedder, the
      result of `finetune(preset="pairs", save=True)`.
    texts: n texts, or the path to a file of lines or records.
    output: Path to a file for the results: .npy, .jsonl, .parquet.
    prompt: Prefix of each text that an embedder was trained with, if it has
      one: query or document.
    normalize: Scale vectors to length 1; by default those of an embedder.
    attention: Attention of the encoder; by default the only one of training,
      or else bidirectional.
    text_column: Column of a file's records; by default that of training, or
      else text.
    batch_tokens: Number of tokens encoded at once.
    step: Step of the run; by default the newest.
    quiet: Print nothing.

  Returns:
    float32 `[n, D]`: the mean over each text's tokens, with the
    special tokens of training, or as a fine-tuned model pools them.

  Raises:
    UserError: An argument is wrong, or the file cannot be read or lacks the
      column.
  """
  with progress.quietly(quiet):
    results.check_output(output, texts)
    loaded = open_model(model, step)
    head, causal = _pooling_head(loaded, prompt, normalize, attention)
    examples = _texts(loaded, texts, text_column)
    if examples:
      _check_tokens(loaded, head, examples)
      length = loaded.longest_row
      batch_size = max(1, batch_tokens // length)
      vectors, _ = saved.compute(
        loaded, examples, length, batch_size, head, causal
      )
    else:
      vectors = np.zeros((0, loaded.model.config.width), np.float32)
  if output is not None:
    _write(os.fspath(output), examples, vectors)
  return vectors


def _texts(
  loaded: Loaded, texts: files.Path | Iterable[str], column: str | None
) -> list[str]:
  """Returns the texts of a file or of a list, and warns of blank texts."""
  if isinstance(texts, str | os.PathLike):
    trained_columns = loaded.task.columns if loaded.task else ()
    columns = trained_columns if len(trained_columns) == 1 else ["text"]
    columns = [column] if column else columns
    # Also says how many are blank.
    records = sets.source_texts(os.fspath(texts), columns)
    return inputs.as_texts(text for (text,) in records)
  examples = inputs.as_texts(texts)
  if blank := sum(not text.strip() for text in examples):
    progress.say(f"warning: {blank:,} of {len(examples):,} texts are blank")
  return examples


def _check_tokens(loaded: Loaded, head: _Pool, texts: Sequence[str]) -> None:
  """Raises a UserError for a text without tokens, also around it."""
  if any(map(len, loaded.frame)):
    return
  for index, text in enumerate(texts):
    if not len(loaded.tokenizer.encode((head.prompts[1] + text).strip())):
      raise UserError(
        f"text {index} (counted from 0) has no token, and the model adds none:"
        " leave it out"
      )


def _pooling_head(
  loaded: Loaded,
  prompt: str | None,
  normalize: bool | None,
  attention: str | None,
) -> tuple[_Pool, bool]:
  """Returns the head that pools, and whether the attention is causal."""
  task = loaded.task
  task_settings = task.settings if task else {}
  trained = [task] if task else loaded.config.trained
  if attention is None:
    only_causal = all(part.attention == "causal" for part in trained)
    attention = "causal" if only_causal else "bidirectional"
  prefixes = task_settings.get("prompts", ("", ""))
  if prompt and not any(prefixes):
    raise UserError(f"prompt={prompt!r}: the model has no prompts")
  prefix = dict(zip(PROMPTS, prefixes, strict=True))[prompt] if prompt else ""
  kind = ranking.Towers.kind
  embeds = task is not None and kind in (task.kind, task.export_as)
  return _Pool(
    prompts=("", prefix),
    pool=task_settings.get("pool", "mean"),
    normalize=embeds if normalize is None else normalize,
  ), attention == "causal"


def _write(path: str, texts: Sequence[str], vectors: np.ndarray) -> None:
  """Writes vectors, and the texts too unless the file is .npy."""
  if path.endswith(".npy"):
    with files.replacing(path) as aside, aside.open("wb") as file:
      np.save(file, vectors)
  else:
    pairs = zip(texts, vectors.tolist(), strict=True)
    results.write_rows(path, [{"text": t, "vector": v} for t, v in pairs])


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  arguments = cli.parsed(embed, argv, __doc__)
  shape = list(embed(**arguments).shape)
  print(f"vectors {shape} are written to {arguments['output']}")
