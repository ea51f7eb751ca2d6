"""Predicts with a fine-tuned model: labels, entities, answers.

  antlm predict --checkpoint=RUN/evals/finetune/own/60-bidirectional/model \\
    --data=reviews.csv --output=labels.jsonl
  antlm predict --checkpoint=MODEL --text "Who sat?" "Tom sat near the hills."

`antlm eval finetune --save` writes MODEL. Without --output, prints a line of
JSON for each text. A classifier gives `label` and `probabilities`, and with
several labels for a text `labels` and `probabilities`. A regression gives
`value`, a tagger `labels` of words and `entities`, and an answering model
`answer`.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence

from antlm_jax import cli
from antlm_jax import settings as settings_lib
from antlm_jax.errors import UserError
from antlm_jax.evals import results
from antlm_jax.evals.finetuning import retrieval, saved, sets, tagging
from antlm_jax.evals.finetuning.task import Prediction
from antlm_jax.evals.finetuning.trial import Hyperparameters
from antlm_jax.inference import inputs
from antlm_jax.inference.model import Loaded, add_arguments, from_args, opened
from antlm_jax.runtime import files, progress
from antlm_jax.settings import setting


@dataclasses.dataclass(frozen=True)
class Predicting:
  """Texts and rows of predictions."""

  text_column: tuple[str, ...] = setting(
    (),
    "Columns of a file's records, several as A,B that are read together; by"
    " default those of training, or else text (question,context for answering)."
    " For a tagger the column may hold lists of words",
  )
  max_length: int = setting(
    0,
    "Largest number of tokens in a row; 0 for the longest trained row",
    least=0,
  )
  batch_size: int = setting(
    Hyperparameters.batch_size,
    "Number of rows that are computed together",
    least=1,
  )


def predict(
  model: Loaded | files.Path,
  texts: files.Path | Iterable[str | Sequence[str]],
  *,
  text_column: str | Sequence[str] = Predicting.text_column,
  max_length: int = Predicting.max_length,
  batch_size: int = Predicting.batch_size,
  quiet: bool = False,
) -> list[Prediction]:
  """Predicts with a fine-tuned model.

      predict(model, ["a fine film"])[0].label
      predict(model, [("Who sat?", "Tom sat near the hills.")])[0].answer

  Args:
    model: Result of `finetune(save=True)`, or a fine-tuned model, or the path
      to it.
    texts: A text for each prediction, or several texts that are read together,
      such as a question and its context. For a tagger, a sentence whose words
      spaces divide, or its words. Or the path to a file of lines or records,
      whose words for a tagger may be a list.
    text_column: Columns of a file's records; by default those of training, or
      else `text`, or `question` and `context`.
    max_length: Largest number of tokens in a row; 0 for the longest row that
      the model was trained on.
    batch_size: Number of rows that are computed together.
    quiet: Whether to print nothing.

  Raises:
    UserError: The model is not fine-tuned, or embeds texts, the file cannot be
      read or lacks a column, or a value is not text.
  """
  given = dict(text_column=text_column, max_length=max_length)
  asked = settings_lib.choose(Predicting, given | {"batch_size": batch_size})
  with progress.quietly(quiet):
    loaded = opened(model)
    head = saved.head(loaded.task, loaded.path)
    if isinstance(head, retrieval.Towers):
      raise UserError(f"{loaded.path} embeds texts: use `antlm embed`")
    if isinstance(texts, str | os.PathLike):
      columns = asked.text_column or loaded.task.columns or head.columns
      words = isinstance(head, tagging.Tagger)
      texts = sets.texts(os.fspath(texts), columns, words)
    examples = inputs.rows(texts)
    if not examples:
      return []
    length = asked.max_length or loaded.longest_row
    found, rows = saved.compute(loaded, examples, length, asked.batch_size)
  return head.predictions(found, rows)


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__)
  add_arguments(parser)
  either = parser.add_mutually_exclusive_group(required=True)
  either.add_argument("--data", help="File of lines, or of records")
  about = "A text, or several texts that are read together"
  either.add_argument("--text", nargs="+", help=about)
  settings_lib.add_arguments(parser, Predicting)
  results.add_output(parser, ".jsonl", ".parquet")
  args = parser.parse_args(argv)
  texts = args.data or [args.text[0] if len(args.text) == 1 else args.text]
  how = vars(settings_lib.from_args(Predicting, args))
  found = predict(from_args(args), texts, quiet=not args.output, **how)
  rows = [one.to_json() for one in found]
  if args.output:
    results.write_rows(args.output, rows)
    print(f"{len(rows):,} predictions are written to {args.output}")
  else:
    print("\n".join(map(json.dumps, rows)))
