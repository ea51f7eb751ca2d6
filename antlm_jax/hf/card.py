"""The model card: what a stranger needs to know of an exported model."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterator, Sequence

from antlm_jax import units
from antlm_jax.errors import UserError
from antlm_jax.hf import heads, hub, import_
from antlm_jax.hf.architecture import Target
from antlm_jax.hf.mapping import ARCHITECTURES
from antlm_jax.inference import framing
from antlm_jax.inference.model import Loaded
from antlm_jax.runtime import files
from antlm_jax.settings import setting
from antlm_jax.training import checkpoint, metrics

_USE = """\
## Use

With transformers {since} or later:

```python
from transformers import AutoTokenizer, {auto}, pipeline

tokenizer = AutoTokenizer.from_pretrained({call})
model = {auto}.from_pretrained({call})
print(pipeline("{tag}", model=model, tokenizer=tokenizer)({text!r}))
```"""
_EMBED = """\
## Use

With sentence-transformers 5 or later:

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer({call})
queries = model.encode_query(["dogs that sleep"])
documents = model.encode_document(["The dogs sleep.", "It rains."])
print(model.similarity(queries, documents))
```"""
_TEXTS = {  # a text for each kind of pipeline
  "text-generation": "The dogs",
  "fill-mask": "The dogs {mask} in the house.",
}
_SOURCES = """\
## Sources

- AntLM, bridging causal and masked language models: https://arxiv.org/abs/2412.03275
- Should we still pretrain encoders with masked language modeling? https://arxiv.org/abs/2507.00994
- the architecture: {paper}"""
_MNTP = (
  "It was trained with masked next-token prediction (arXiv 2410.24159): where"
  " the mask stands its code gives the logits of the position before, which"
  " predict it, and everywhere else the position's own. So one mask at a time"
  " is read where it stands (fill-mask, BabyLM's backend `mlm`) or one position"
  " before (`mntp`), and several adjacent ones where they stand."
)


@dataclasses.dataclass(frozen=True)
class About:
  """What a card says that only its writer knows."""

  license: str = setting("", "as the Hub calls it, such as apache-2.0")
  language: tuple[str, ...] = setting((), "of its text, such as en,de")
  base_model: str = setting(
    "", "the Hub's name of what it began from; an import's own by default"
  )


def card(
  loaded: Loaded, attention: str, target: Target, about: About = About()
) -> str:
  """Returns README.md of a model folder, read causally or bidirectionally.

  Of the target's classes, by auto class, the first is shown.
  """
  name = loaded.config.model.name
  figures = [*_held_out(loaded), *_evaluated(loaded)]
  sections = [
    _what(loaded, attention),
    _use(loaded, attention, target),
    _table("Training", _training(loaded)),
    _table("Evaluation", figures),
    _SOURCES.format(paper=ARCHITECTURES[name].paper),
  ]
  front = _front(loaded, attention, about)
  return front + "\n\n".join(filter(None, sections)) + "\n"


def _front(loaded: Loaded, attention: str, about: About) -> str:
  """Returns what the Hub reads, in YAML, of which JSON is a part."""
  fields = {
    "library_name": "sentence-transformers"
    if heads.prompts(loaded)
    else "transformers",
    "pipeline_tag": _tag(loaded, attention),
    "license": about.license,
    "language": about.language,
    "base_model": about.base_model or _base_model(loaded),
    "tags": ["antlm_jax", loaded.config.model.name],
  }
  lines = [f"{k}: {json.dumps(v)}" for k, v in fields.items() if v]
  return "\n".join(["---", *lines, "---", "", ""])


def _base_model(loaded: Loaded) -> str:
  """Returns the model on the Hub that it began from, as far as runs say."""
  found = loaded.config.init.checkpoint
  while found and not found.startswith(hub.PREFIX):
    try:
      before = import_.start(found).meta
    except UserError:  # it is no longer there
      return ""
    found = before.config.init.checkpoint
  return found.removeprefix(hub.PREFIX)


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
  """Returns a section that is a table, or nothing without rows."""
  lines = [f"| {name} | {value} |" for name, value in rows]
  head = [f"## {title}", "", "| | |", "|---|---|"]
  return "\n".join(head + lines) if lines else ""


def _tag(loaded: Loaded, attention: str) -> str:
  if loaded.task:
    return heads.place(loaded.task).tag
  return "text-generation" if attention == "causal" else "fill-mask"


def _trained_here(loaded: Loaded) -> bool:
  """Whether these weights were trained here, not only brought here."""
  return bool(loaded.data)


def _what(loaded: Loaded, attention: str) -> str:
  size = units.quantity(loaded.model.size)
  title = (
    f"# {loaded.config.model.name} of {size} parameters, read {attention}ly"
  )
  if loaded.merged and not loaded.task:
    return f"{title}\n\nMerged by antlm_jax, without training: {loaded.merged}."
  if not _trained_here(loaded):
    return f"{title}\n\nIts weights were trained elsewhere, and are unchanged."
  return (
    f"{title}\n\n"
    f"Trained with the curriculum `{loaded.config.curriculum}` by antlm_jax:"
    " one transformer for causal (C) and masked (M) language modeling, which"
    " differ by its attention mask alone."
  )


def _use(loaded: Loaded, attention: str, target: Target) -> str:
  tag, mask = _tag(loaded, attention), loaded.tokenizer.mask_id
  word = "" if mask is None else loaded.tokenizer.decode([mask], False)
  embeds = heads.prompts(loaded) is not None
  text = (_EMBED if embeds else _USE).format(
    auto=heads.place(loaded.task).auto
    if loaded.task
    else next(iter(target.classes)),
    call='"FOLDER", trust_remote_code=True' if target.code else '"FOLDER"',
    since=target.since,
    tag=tag,
    text=_TEXTS.get(tag, "The dogs sleep.").format(mask=word),
  )
  notes = [target.note]
  if attention == "bidirectional" and not loaded.task:
    shift = loaded.mask_shift
    notes.append(
      _MNTP if shift else "A masked token is predicted in its place."
    )
  return "\n\n".join(filter(None, [text, *notes]))


def _training(loaded: Loaded) -> list[tuple[str, str]]:
  if not _trained_here(loaded):
    return []
  config = loaded.config
  trained = ", ".join(objective.name for objective in framing.trained(config))
  rows = {
    "began from": _run_name(config.init.checkpoint),
    "curriculum": f"`{config.curriculum}` ({trained})",
    "steps": f"{loaded.step:,}",
    "batch": f"{config.train.batch_size} rows",
    "peak learning rate": (
      f"{config.schedule.peak_lr:g} ({config.optimizer.name},"
      f" {config.schedule.name})"
    ),
    "longest row": f"{loaded.longest_row:,} tokens",
    "vocabulary": f"{loaded.tokenizer.vocab_size:,}",
    "data": without_folders(config.data.path),
    "data, SHA-256 of the rows": f"`{loaded.data}`",
  }
  return [(name, value) for name, value in rows.items() if value]


def without_folders(paths: str) -> str:
  """Returns the last name of each path, of `path` or `name=path,name=path`."""
  return re.sub(r"[^,=]*/", "", paths.rstrip("/"))


def _run_name(path: str) -> str:
  """Returns a run's name, of a path to it or to one of its steps."""
  parts = pathlib.PurePath(path.removeprefix(hub.PREFIX)).parts
  named = [p for p in parts if p != checkpoint.FOLDER and not p.isdigit()]
  return "".join(named[-1:])


def _held_out(loaded: Loaded) -> Iterator[tuple[str, str]]:
  for record in metrics.read_records(loaded.run):
    if record.get("step") == loaded.step and not loaded.task:
      for key, value in record.items():
        if key.startswith("eval/") and key.endswith("/loss"):
          yield f"held-out loss, {key.split('/')[1]}", f"{value:.3f} nats"


def _evaluated(loaded: Loaded) -> Iterator[tuple[str, str]]:
  """What evaluations of this step left on this machine."""
  folder = loaded.run if loaded.task else loaded.evals
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
