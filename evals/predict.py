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

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

from antlm_jax import cli, settings
from antlm_jax.arguments import add_arguments, read_arguments
from antlm_jax.errors import UserError
from antlm_jax.evals import results
from antlm_jax.evals.finetuning import (
  classification,
  ranking,
  record_values,
  saved,
  sets,
  tagging,
)
from antlm_jax.evals.finetuning.task import Prediction
from antlm_jax.inference import inputs
from antlm_jax.inference.model import Loaded, ModelOrPath, open_model
from antlm_jax.runtime import files, progress
from antlm_jax.settings import PythonOnly, argument


@settings.checked
def predict(
  model: ModelOrPath[Loaded],
  texts: PythonOnly[files.Path | Iterable[str | Sequence[str]]],
  *,
  text_column: str | Sequence[str] = (),
  max_length: Annotated[int, argument(least=0)] = 0,
  batch_size: Annotated[int, argument(least=1)] = 64,
  output: Annotated[
    files.Path | None, results.output_argument(".jsonl", ".parquet")
  ] = None,
  step: int | None = None,
  quiet: PythonOnly[bool] = False,
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
      whose words for a tagger may be a list, or to a file of columns.
    text_column: Columns of a file's records, several as A,B that are read
      together; by default those of training, or else text (question,context for
      answering). For a tagger the column may hold lists of words, or be the
      number of the words' column, from 1, in a file of columns.
    max_length: Largest number of tokens in a row; 0 for the longest trained
      row.
    batch_size: Number of rows that are computed together.
    output: Path to a file for the results: .jsonl, .parquet.
    step: Step of the run; by default the newest.
    quiet: Print nothing.

  Raises:
    UserError: The model is not fine-tuned, or embeds texts, the file cannot be
      read or lacks a column, or a value is not text.
  """
  with progress.quietly(quiet):
    results.check_output(output, texts)
    loaded = open_model(model, step)
    head = saved.saved_head(loaded.task, loaded.path)
    if isinstance(head, ranking.Towers):
      raise UserError(f"{loaded.path} embeds texts: use `antlm embed`")
    if is_file := isinstance(texts, str | os.PathLike):
      path = os.fspath(texts)
      columns = text_column or loaded.task.columns or head.columns
      sentences = None
      is_tagger = isinstance(head, tagging.Tagger)
      if is_tagger:
        chosen = [text_column] if isinstance(text_column, str) else text_column
        sentences = tagging.read_words(path, chosen, head.labels)
      texts = sentences
      if sentences is None:
        texts = sets.source_texts(path, columns, is_tagger)
    examples = inputs.as_items(texts)
    predictions = []
    if isinstance(head, classification.LinearHead):
      _check_counts(examples, loaded.task.columns)
    if examples:
      length = max_length or loaded.longest_row
      outputs, rows = saved.compute(loaded, examples, length, batch_size)
      predictions = head.predictions(outputs, rows)
    blank = sum(not all(map(str.strip, x.texts or [""])) for x in predictions)
    if blank and not is_file:
      progress.say(f"warning: {blank:,} of {len(examples):,} texts are blank")
  if output is not None:
    records = [prediction.to_json() for prediction in predictions]
    results.write_rows(os.fspath(output), records)
  return predictions


def _check_counts(examples: Sequence, columns: Sequence[str]) -> None:
  """Raises a UserError if a model reads more or fewer texts together."""
  if not columns:
    return
  for index, example in enumerate(examples):
    texts = record_values.plain_text(example, index)
    count = 1 if isinstance(texts, str) else len(texts)
    if count != len(columns):
      raise UserError(
        f"text {index} is {count} text{'s' * (count > 1)}, but the model reads"
        f" {len(columns)} together ({', '.join(columns)})"
      )


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__)
  add_arguments(parser, predict)
  either = parser.add_mutually_exclusive_group(required=True)
  either.add_argument("--data", help="File of lines, or of records")
  help = "A text, or several texts that are read together"
  either.add_argument("--text", nargs="+", help=help)
  args = parser.parse_args(argv)
  texts = args.data or [args.text[0] if len(args.text) == 1 else args.text]
  arguments = read_arguments(predict, args)
  output = arguments["output"]
  predictions = predict(texts=texts, **arguments, quiet=not output)
  if output:
    print(f"{len(predictions):,} predictions are written to {output}")
  else:
    encoding = sys.stdout.encoding or "utf-8"
    rows = (prediction.to_json() for prediction in predictions)
    print("\n".join(results.json_line(row, encoding) for row in rows))
