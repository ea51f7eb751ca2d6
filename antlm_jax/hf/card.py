"""The model card: what a stranger needs to know of an exported model."""

import json
import pathlib
from collections.abc import Iterator, Mapping

from antlm_jax import units
from antlm_jax.hf import heads
from antlm_jax.hf.mapping import ARCHITECTURES
from antlm_jax.inference import framing
from antlm_jax.runtime import files
from antlm_jax.training import metrics
from antlm_jax.training.checkpoint import Loaded


def card(loaded: Loaded, attention: str, classes: Mapping[str, str]) -> str:
  """Returns README.md of a model folder.

  Args:
    loaded: The model.
    attention: Its attention there, causal or bidirectional.
    classes: Of transformers, by auto class; the first is shown.
  """
  name = loaded.config.model.name
  front = [
    *("---", "library_name: transformers"),
    f"pipeline_tag: {_tag(loaded, attention)}",
    *("tags:", "- antlm_jax", f"- {name}", "---", "", ""),
  ]
  sections = [
    _what(loaded, attention),
    _use(loaded, attention, next(iter(classes))),
    _training(loaded),
    _figures(loaded),
    _sources(name),
  ]
  return "\n".join(front) + "\n\n".join(filter(None, sections)) + "\n"


def _tag(loaded: Loaded, attention: str) -> str:
  if loaded.task:
    return heads.place(loaded.task).tag
  return "text-generation" if attention == "causal" else "fill-mask"


def _trained_here(loaded: Loaded) -> bool:
  """Whether these weights were trained here, not only brought here."""
  return bool(loaded.meta.data)


def _what(loaded: Loaded, attention: str) -> str:
  size = units.quantity(loaded.model.size)
  title = (
    f"# {loaded.config.model.name} of {size} parameters, read {attention}ly"
  )
  if not _trained_here(loaded):
    return f"{title}\n\nIts weights were trained elsewhere, and are unchanged."
  return (
    f"{title}\n\n"
    f"Trained with the curriculum `{loaded.config.curriculum}` by antlm_jax:"
    " one transformer for causal (C) and masked (M) language modeling, which"
    " differ by its attention mask alone."
  )


def _use(loaded: Loaded, attention: str, auto: str) -> str:
  call = '"FOLDER", trust_remote_code=True' if _code(loaded) else '"FOLDER"'
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
  if attention == "bidirectional" and not loaded.task:
    lines += ["", *_masked(loaded)]
  return "\n".join(lines)


def _masked(loaded: Loaded) -> Iterator[str]:
  if not framing.mask_shift(loaded.config):
    yield "A masked token is predicted where it stands."
  elif needs_shift(loaded):
    yield MNTP
  else:
    yield (
      "It was trained with masked next-token prediction (arXiv 2410.24159):"
      " its code moves the scores by one position, so that they stand where the"
      " masked token does."
    )


def needs_shift(loaded: Loaded) -> bool:
  """Whether whoever reads the exported model's masks has to look before them.

  The code that a model brings along looks there by itself.
  """
  return bool(framing.mask_shift(loaded.config)) and not _code(loaded)


def _code(loaded: Loaded) -> tuple[str, ...]:
  return ARCHITECTURES[loaded.config.model.name].code


MNTP = (
  "It was trained with masked next-token prediction (arXiv 2410.24159): the"
  " scores of a masked token at position p are `logits[:, p - 1]`, so a"
  " fill-mask pipeline, which reads `logits[:, p]`, is not for it."
)


def _training(loaded: Loaded) -> str:
  if not _trained_here(loaded):
    return ""
  config = loaded.config
  trained = ", ".join(objective.name for objective in framing.trained(config))
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
    "data": f"`{config.data.path}`",
    "data, SHA-256 of the rows": f"`{loaded.meta.data}`",
  }
  if config.init.checkpoint:
    rows = {"began from": f"`{config.init.checkpoint}`"} | rows
  lines = ["## Training", "", "| | |", "|---|---|"]
  return "\n".join(lines + [f"| {k} | {v} |" for k, v in rows.items()])


def _figures(loaded: Loaded) -> str:
  if loaded.task:
    rows = list(_evaluated(loaded, loaded.run))
  else:
    rows = [*_held_out(loaded), *_evaluated(loaded, loaded.evals)]
  if not rows:
    return ""
  lines = ["## Evaluation", "", "| | |", "|---|---|"]
  return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows])


def _held_out(loaded: Loaded) -> Iterator[tuple[str, str]]:
  for record in metrics.read_records(loaded.run):
    if record.get("step") == loaded.step:
      for key, value in record.items():
        if key.startswith("eval/") and key.endswith("/loss"):
          yield f"held-out loss, {key.split('/')[1]}", f"{value:.3f} nats"


def _evaluated(
  loaded: Loaded, folder: pathlib.Path
) -> Iterator[tuple[str, str]]:
  """What evaluations of this step left under a folder on this machine."""
  if files.is_remote(folder):
    return
  for path in sorted(folder.rglob("summary.json")):
    try:
      summary = json.loads(path.read_text("utf-8"))
      request = summary["request"]
      if request["step"] != loaded.step:
        continue
    except (OSError, ValueError, KeyError, TypeError):
      continue  # not an evaluation's, or not whole
    part = ", a part" if request.get("limit") else ""
    if "macro_accuracy" in summary:
      name = f"{path.parent.parent.name}, {request['mode']}{part}"
      pairs = f"{summary['pairs']:,} pairs"
      yield name, f"{100 * summary['macro_accuracy']:.1f} % of {pairs}"
    elif "best_run" in summary:
      metric = summary["main_metric"]
      best = summary["runs"][summary["best_run"]]
      for name, scores in best["scores"].items():
        tuned = f"{name} fine-tuned{part}, {metric}"
        yield tuned, f"{100 * scores[metric]:.1f}"


def _sources(name: str) -> str:
  return (
    "## Sources\n\n"
    "- AntLM, bridging causal and masked language models:"
    " https://arxiv.org/abs/2412.03275\n"
    "- Should we still pretrain encoders with masked language modeling?"
    " https://arxiv.org/abs/2507.00994\n"
    f"- the architecture: {ARCHITECTURES[name].paper}"
  )
