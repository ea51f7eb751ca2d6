"""The model card: what a stranger needs to know of an exported model."""

import json
import pathlib
from collections.abc import Iterator

from antlm_jax import checkpoint, monitor, reading
from antlm_jax.checkpoint import Loaded, Meta

_PAPERS = {
  "llama": "https://arxiv.org/abs/2307.09288",
  "ltg_bert": "https://arxiv.org/abs/2303.09859",
}


def card(loaded: Loaded, meta: Meta, form: str, classes: dict) -> str:
  """Returns README.md of a model folder.

  Args:
    loaded: The model.
    meta: What its checkpoint says.
    form: How the folder reads it, causal or bidirectional.
    classes: Of transformers, by auto class; the first is shown.
  """
  name = meta.config.model.name
  front = [
    *(
      "---",
      "library_name: transformers",
      f"pipeline_tag: {_tag(loaded, form)}",
    ),
    *("tags:", "- antlm_jax", f"- {name}", "---", ""),
  ]
  sections = [
    _what(loaded, meta, form),
    _use(loaded, form, next(iter(classes))),
    _training(loaded, meta),
    _figures(loaded),
    _sources(name),
  ]
  return "\n".join(front) + "\n\n".join(filter(None, sections)) + "\n"


def _tag(loaded: Loaded, form: str) -> str:
  if loaded.task:
    return "text-classification"
  return "text-generation" if form == "causal" else "fill-mask"


def _what(loaded: Loaded, meta: Meta, form: str) -> str:
  size = monitor.quantity(loaded.model.size)
  return (
    f"# {meta.config.model.name} of {size} parameters, read {form}ly\n\n"
    f"Trained with the curriculum `{meta.config.curriculum}` by antlm_jax:"
    " one transformer for causal (C) and masked (M) language modeling, which"
    " differ by its attention mask alone."
  )


def _use(loaded: Loaded, form: str, auto: str) -> str:
  remote = loaded.config.model.name != "llama"
  call = '"FOLDER", trust_remote_code=True' if remote else '"FOLDER"'
  lines = [
    "## Use",
    "",
    "```python",
    f"from transformers import AutoTokenizer, {auto}",
    "",
    f"tokenizer = AutoTokenizer.from_pretrained({call})",
    f"model = {auto}.from_pretrained({call})",
    "```",
  ]
  if form == "bidirectional" and not loaded.task:
    lines += ["", *_masked(loaded)]
  return "\n".join(lines)


def _masked(loaded: Loaded) -> Iterator[str]:
  if not reading.mask_shift(loaded.config):
    yield "A masked token is predicted where it stands."
  elif loaded.config.model.name == "llama":
    yield MNTP
  else:
    yield (
      "It was trained with masked next-token prediction (arXiv 2410.24159):"
      " its code moves the scores by one position, so that they stand where the"
      " masked token does."
    )


MNTP = (
  "It was trained with masked next-token prediction (arXiv 2410.24159): the"
  " scores of a masked token at position p are `logits[:, p - 1]`, so a"
  " fill-mask pipeline, which reads `logits[:, p]`, is not for it."
)


def _training(loaded: Loaded, meta: Meta) -> str:
  config = meta.config
  trained = ", ".join(objective.name for objective in reading.trained(config))
  rows = {
    "curriculum": f"`{config.curriculum}` ({trained})",
    "steps": f"{loaded.step:,}",
    "batch": f"{config.train.batch_size} rows",
    "peak learning rate": (
      f"{config.schedule.peak_lr:g} ({config.optimizer.name},"
      f" {config.schedule.name})"
    ),
    "longest row": f"{config.model.max_seq_len:,} tokens",
    "vocabulary": f"{loaded.tokenizer.vocab_size:,}",
    "data": f"`{config.data.path or 'not known'}`",
    "data, SHA-256 of the rows": f"`{meta.data or 'not known'}`",
  }
  lines = ["## Training", "", "| | |", "|---|---|"]
  return "\n".join(lines + [f"| {k} | {v} |" for k, v in rows.items()])


def _figures(loaded: Loaded) -> str:
  rows = [*_held_out(loaded), *_pairs(loaded)]
  if loaded.task:
    rows = [*_tuned(loaded)]
  if not rows:
    return ""
  lines = ["## Evaluation", "", "| | |", "|---|---|"]
  return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows])


def _run(loaded: Loaded) -> pathlib.Path:
  above = loaded.path.parent
  return above.parent if above.name == checkpoint.FOLDER else above


def _held_out(loaded: Loaded) -> Iterator[tuple[str, str]]:
  try:
    records = monitor.read_records(_run(loaded))
  except OSError:
    return
  for record in records:
    if record["step"] == loaded.step:
      for key, value in record.items():
        if key.startswith("eval/") and key.endswith("/loss"):
          yield f"held-out loss, {key.split('/')[1]}", f"{value:.3f} nats"


def _pairs(loaded: Loaded) -> Iterator[tuple[str, str]]:
  """Minimal pairs of this step, as the evaluations left them."""
  for path in sorted((_run(loaded) / "evals").glob("*/*/summary.json")):
    summary = json.loads(path.read_text("utf-8"))
    request = summary.get("request", {})
    if "macro_accuracy" in summary and request.get("step") == loaded.step:
      part = ", a part" if request.get("limit") else ""
      name = f"{path.parent.parent.name}, {request['mode']}{part}"
      pairs = f"{summary['pairs']:,} pairs"
      yield name, f"{100 * summary['macro_accuracy']:.1f} % of {pairs}"


def _tuned(loaded: Loaded) -> Iterator[tuple[str, str]]:
  path = loaded.path.parent / "summary.json"
  if path.exists():
    summary = json.loads(path.read_text("utf-8"))
    best = summary["runs"][summary["best_run"]]
    for name, scores in best["scores"].items():
      for metric, value in scores.items():
        yield f"{name}, {metric}", f"{100 * value:.1f}"


def _sources(name: str) -> str:
  return (
    "## Sources\n\n"
    "- AntLM, bridging causal and masked language models:"
    " https://arxiv.org/abs/2412.03275\n"
    "- Should we still pretrain encoders with masked language modeling?"
    " https://arxiv.org/abs/2507.00994\n"
    f"- the architecture: {_PAPERS[name]}"
  )
