"""Model card: README.md of an exported folder, with metadata for the Hub."""

import math
import os
import pathlib
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from antlm_jax import tables, units
from antlm_jax.errors import UserError
from antlm_jax.hf import heads, import_
from antlm_jax.hf.architecture import Target
from antlm_jax.hf.mapping import ARCHITECTURES
from antlm_jax.inference.model import Loaded
from antlm_jax.objectives.objective import OBJECTIVES
from antlm_jax.runtime import files, progress
from antlm_jax.training import checkpoint, metrics
from antlm_jax.training.checkpoint import HUB_PREFIX

if TYPE_CHECKING:
  from huggingface_hub import EvalResult

_TEMPLATES = pathlib.Path(__file__).parent / "templates"
FILE = "README.md"
_FOREIGN = "antlm_jax imported its weights and did not train them."
_TUNED = "antlm_jax fine-tuned it on the task `{task}`."
_TRAINED = (
  "antlm_jax trained it with the curriculum `{curriculum}`. One transformer"
  " learns causal (C) and masked (M) language modeling, by the attention mask"
  " alone."
)
# Pipelines of transformers by the attention that they need.
_PIPELINES = {"causal": "text-generation", "bidirectional": "fill-mask"}
_TEXTS = {  # example input for each kind of pipeline
  "text-generation": "The dogs",
  "fill-mask": "The dogs {mask} in the house.",
}
_IN_PLACE = "The model predicts a masked token at the mask."
_MNTP = (
  "The model was trained with masked next-token prediction (arXiv 2410.24159)."
  " At a mask, its code returns the logits of the position before, which"
  " predict the masked token. At other tokens, it returns their own logits. You"
  " can read a single mask at its position (fill-mask, BabyLM's backend `mlm`)"
  " or one position before (`mntp`). Read adjacent masks at their positions."
)
# Figures of a summary.json, by metric on the Hub and by name in the card.
_FIGURES = {
  "macro_accuracy": ("accuracy", "accuracy"),
  "accuracy": ("accuracy", "accuracy"),
  "word_perplexity": ("perplexity", "perplexity per word"),
  "bits_per_byte": ("bits_per_byte", "bits per byte"),
  "eye_tracking": ("r2", "explained variance of eye tracking"),
  "self_paced_reading": ("r2", "explained variance of self-paced reading"),
  "correlation": ("pearsonr", "correlation"),
  "ndcg": ("ndcg_at_10", "NDCG@10"),
}
# Errors of a summary.json that holds other values than those of `antlm eval`.
_DAMAGED = ArithmeticError, AttributeError, LookupError, TypeError, ValueError
_SHOWN = 20  # labels in a card
_COUNTS = "pairs", "texts", "documents", "words"  # of a summary.json's items


def card(
  loaded: Loaded,
  attention: str,
  target: Target,
  auto: str,
  results: Sequence["EvalResult"],
  facts: Mapping[str, object],
) -> str:
  """Returns the README.md of a folder.

  Its metadata includes the results as a model-index.

  Args:
    loaded: The model.
    attention: Attention of the exported model, causal or bidirectional.
    target: Model of transformers.
    auto: Class that opens the folder in the example.
    results: Results, as `read_results` returns them.
    facts: Fields of the metadata that only the user knows, such as `license`.
  """
  import huggingface_hub  # slow to import

  name = loaded.config.model.name
  size = units.quantity(loaded.model.size)
  tag = _PIPELINES[attention]
  pipeline_options = ""
  if loaded.headless:
    tag = "feature-extraction"
  if loaded.task:
    place = heads.head_place(loaded.task)
    tag = place.tag
    pipeline_options = place.pipeline
  embedder = auto == heads.EMBEDDER
  # Scores without a task are those of models fine-tuned from this model.
  model_results = [result for result in results if result.task_type] or None
  metadata = huggingface_hub.ModelCardData(
    library_name="sentence-transformers" if embedder else "transformers",
    pipeline_tag=tag,
    tags=["antlm_jax", name],
    model_name=model_results and f"{target.model_type}-{size}",
    eval_results=model_results,
    **{"base_model": _base_model(loaded) or None, **facts},
  )
  curriculum = tables.plain_markdown(loaded.config.curriculum)
  origins = []
  tuning = {}
  if loaded.meta.data:
    origins.append(_TRAINED.format(curriculum=curriculum))
  elif not loaded.task:
    origins.append(_FOREIGN)
  if loaded.task:
    origins.append(_TUNED.format(task=loaded.task.name))
    tuning = _tuning_facts(loaded)
  mask = loaded.tokenizer.mask_id
  word = "" if mask is None else loaded.tokenizer.decode([mask], False)
  # `hub.push` replaces the folder by a repository.
  call = '"FOLDER", trust_remote_code=True' if target.code else '"FOLDER"'
  since = ARCHITECTURES[name].since(loaded.model.config, target)
  use = _filled(
    "embedder" if embedder else "pipeline",
    auto=auto,
    call=call,
    since=since,
    # Its versions 5.0 and 5.1 need transformers 4.
    sentences="5.2" if int(since.partition(".")[0]) > 4 else "5.0",
    tag=tag,
    options=pipeline_options,
    text=repr(_TEXTS.get(tag, "The dogs sleep.").format(mask=word)),
  )
  notes = [use.rstrip(), target.note]
  if attention == "bidirectional" and tag == "fill-mask":
    notes.append(_MNTP if loaded.mask_shift else _IN_PLACE)
  encoder = tables.plain_markdown(name)
  return _filled(
    "card",
    metadata=metadata.to_yaml(),
    title=f"{encoder} with {size} parameters",
    encoder=encoder,
    attention=attention,
    origin=" ".join(origins),
    use="\n\n".join(filter(None, notes)),
    training=_card_table(
      "Training", _training_facts(loaded) if loaded.meta.data else {}
    ),
    tuning=_card_table("Fine-tuning", tuning),
    evaluation=_card_table("Evaluation", dict(map(_result_row, results))),
    paper=ARCHITECTURES[name].paper,
  )


def _filled(template: str, **values: str) -> str:
  """Returns a file of templates/ with values, which are Markdown already."""
  path = _TEMPLATES / f"{template}.md"
  return string.Template(path.read_text("utf-8")).substitute(values)


def without_folders(paths: str) -> str:
  """Returns the last name of each path, of `path` or `name=path,name=path`."""
  return re.sub(r"[^,=]*/", "", paths.rstrip("/"))


def _card_table(title: str, rows: Mapping[str, str]) -> str:
  """Returns a section with a table, or nothing without rows."""
  lines = [row for row in rows.items() if row[1]]
  table = tables.markdown(lines, ("", ""))
  return f"## {title}\n\n{table}\n\n" if lines else ""


def _base_model(loaded: Loaded) -> str:
  """Returns the Hub model from which the run, or an earlier run, began.

  It looks only at folders on this machine. A checkpoint may name a bucket or a
  model on the Hub in place of a folder, and must not open a connection.
  """
  checkpoint_path = loaded.config.init.checkpoint
  folders = set()
  while checkpoint_path and not checkpoint_path.startswith(HUB_PREFIX):
    folder = os.path.realpath(checkpoint_path)
    if folder in folders or not os.path.isdir(folder):  # moved or removed
      return ""
    folders.add(folder)
    try:
      start = import_.open_start(folder)
      checkpoint_path = start.meta.config.init.checkpoint
    except UserError:
      return ""
  return checkpoint_path.removeprefix(HUB_PREFIX)


def _training_facts(loaded: Loaded) -> dict[str, str]:
  config = loaded.config
  trained = ", ".join(objective.name for objective in config.trained)
  start = pathlib.PurePath(config.init.checkpoint.removeprefix(HUB_PREFIX))
  # Name of a run, from the path to it or to one of its checkpoints.
  began = [p for p in start.parts if p != checkpoint.FOLDER and not p.isdigit()]
  return {
    "Initial checkpoint": "".join(began[-1:]),
    "Curriculum": f"`{config.curriculum}` ({trained})",
    "Steps": loaded.step_text,
    "Batch size": f"{config.train.batch_size} rows",
    "Peak learning rate": (
      f"{config.schedule.peak_lr:g} ({config.optimizer.name},"
      f" {config.schedule.name})"
    ),
    "Longest row": f"{loaded.longest_row:,} tokens",
    "Vocabulary": f"{loaded.tokenizer.vocab_size:,} tokens",
    "Data": without_folders(config.data.path),
    "SHA-256 of the rows": f"`{loaded.meta.data}`",
  }


def _tuning_facts(loaded: Loaded) -> dict[str, str]:
  """Returns facts of the fine-tuning, from the summary next to the model."""
  path = loaded.saved.run / "summary.json"
  labels = loaded.task.settings.get("labels", ())
  shown = ", ".join(labels[:_SHOWN]) + ", ..." * (len(labels) > _SHOWN)
  facts = {
    "Head": f"{loaded.task.kind}, {loaded.task.attention} attention",
    "Labels": f"{len(labels):,}: {shown}" if labels else "",
  }
  if files.is_remote(path) or not path.is_file():
    return facts
  try:
    summary = files.read_json(path, "the summary")
    request = summary["request"]
    run = summary["runs"][summary["best_run"]]
    longest = min(request["max_length"], loaded.model.config.max_seq_len)
    return facts | {
      "Training examples": f"{summary['train_examples']:,}",
      "Learning rate": f"{run['lr']:g}, the best of {len(summary['by_lr'])}",
      "Epochs": f"{run['best_epoch']}, the best of {len(run['epochs'])}",
      "Batch size": f"{request['batch_size']} examples",
      "Longest row": f"{longest} tokens",
      "Random seed": str(run["seed"]),
    }
  except (UserError, *_DAMAGED):  # `read_results` warns of it
    return facts


def read_results(loaded: Loaded) -> list["EvalResult"]:
  """Returns the results of a model's step.

  It warns of damaged files, and leaves them out.
  """
  results = []
  tag = ""
  if loaded.task:
    tag = heads.head_place(loaded.task).tag
  else:
    for record in metrics.read_records(loaded.saved.run):
      if record.get("step") == loaded.step:
        results += _held_out_results(loaded, record)
  folder = loaded.saved.run if loaded.task else loaded.saved.evals
  remote = files.is_remote(folder)
  summaries = [] if remote else sorted(folder.rglob("summary.json"))
  for path in summaries:
    try:
      summary = files.read_json(path, "the results")
      if "request" in summary:  # else it is another program's
        results += [*_summary_results(loaded, tag, path, summary)]
    except (UserError, *_DAMAGED) as error:
      why = error if isinstance(error, UserError) else f"{path} is damaged"
      progress.say(f"warning: {why}; the card leaves it out")
  return results


def _summary_results(
  loaded: Loaded, tag: str, path: pathlib.Path, summary: Mapping
) -> Iterator["EvalResult"]:
  """Yields the results of an evaluation's summary, if it is of this step."""
  request = summary["request"]
  if request["step"] != loaded.step:
    return
  part = ", subset" if request.get("limit") else ""
  if "best_run" in summary:
    metric = summary["main_metric"]
    best = summary["runs"][summary["best_run"]]
    kind, label = _FIGURES.get(metric, (metric, metric))
    for name, scores in best["scores"].items():
      evaluation = summary["evaluations"][name]
      baselines = {summary["baseline"]: evaluation["baseline"]}
      baselines |= evaluation["references"]
      compared = ", ".join(
        f"{baseline} {100 * figures[metric]:.1f} %"
        for baseline, figures in baselines.items()
      )
      title = f"{label}, fine-tuned{part} ({compared})"
      yield _card_result(tag, name, kind, scores[metric], title)
    return
  mode = request.get("mode", "")
  data = path.parent.parent.name
  task = _PIPELINES["causal" if mode == "causal" else "bidirectional"]
  count = next((f"{summary[n]:,} {n}" for n in _COUNTS if n in summary), "")
  details = f"{', '.join(filter(None, (mode, count)))}{part}"
  for figure, (metric, name) in _FIGURES.items():
    value = summary.get(figure)
    if isinstance(value, float) and math.isfinite(value):
      yield _card_result(task, data, metric, value, f"{name} ({details})")


def _held_out_results(
  loaded: Loaded, record: Mapping
) -> Iterator["EvalResult"]:
  """Yields held-out losses and perplexities of a record of metrics."""
  data = without_folders(loaded.config.data.path) or "the training data"
  objectives = (*OBJECTIVES.values(), *loaded.config.trained)
  causal = {
    objective.name for objective in objectives if objective.left_to_right
  }
  for key, value in record.items():
    if match := re.fullmatch(r"eval/([^/]+)/(?:(.+)/)?(loss|perplexity)", key):
      objective, part, metric = match.groups()
      name = f"held-out text of {part or data}"
      title = f"{metric} ({objective}{', nats' * (metric == 'loss')})"
      task = _PIPELINES["causal" if objective in causal else "bidirectional"]
      yield _card_result(
        task, name, metric, value, title, dataset_type="text", config=part
      )


def _card_result(
  task: str,
  data: str,
  metric: str,
  value: float,
  name: str,
  *,
  dataset_type: str = "",
  config: str | None = None,
) -> "EvalResult":
  """Returns a result for the Hub; the type of its data is their name."""
  import huggingface_hub  # slow to import

  return huggingface_hub.EvalResult(
    task_type=task,
    dataset_type=dataset_type or data,
    dataset_name=data,
    dataset_config=config,
    metric_type=metric,
    metric_value=round(float(value), 4),
    metric_name=name,
  )


def _result_row(result: "EvalResult") -> tuple[str, str]:
  """Returns the card's row of a result."""
  value = result.metric_value
  plain_metrics = ("loss", "perplexity", "bits_per_byte", "pearsonr")
  is_share = result.metric_type not in plain_metrics
  shown = f"{100 * value:.1f} %" if is_share else f"{value:,.3f}"
  return f"{result.dataset_name}: {result.metric_name}", shown
