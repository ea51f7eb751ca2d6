"""Model card: README.md of an exported folder, with metadata for the Hub."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterator, Mapping

from antlm_jax import units
from antlm_jax.errors import UserError
from antlm_jax.hf import heads, hub, import_
from antlm_jax.hf.architecture import Target
from antlm_jax.hf.mapping import ARCHITECTURES
from antlm_jax.inference.model import Loaded
from antlm_jax.runtime import files
from antlm_jax.settings import setting
from antlm_jax.training import checkpoint, metrics

_CARD = """\
---
{metadata}
---

# {encoder} with {size} parameters, read {attention}ly

{origin}

## Use

{use}

{training}{evaluation}## Sources

- AntLM, bridging causal and masked language models: https://arxiv.org/abs/2412.03275
- Should we still pretrain encoders with masked language modeling? https://arxiv.org/abs/2507.00994
- the architecture: {paper}
"""
_TABLE = """\
## {title}

| | |
|---|---|
{rows}

"""
_MERGED = "Merged by antlm_jax, without training: {merged}."
_FOREIGN = "The weights were trained elsewhere and are unchanged."
_TRAINED = (
  "Trained with the curriculum `{curriculum}` by antlm_jax: one transformer for"
  " causal (C) and masked (M) language modeling, which differ only by the"
  " attention mask."
)
_PIPELINE = """\
With transformers {since} or later:

```python
from transformers import AutoTokenizer, {auto}, pipeline

tokenizer = AutoTokenizer.from_pretrained({call})
model = {auto}.from_pretrained({call})
print(pipeline("{tag}", model=model, tokenizer=tokenizer)({text!r}))
```"""
_EMBEDDER = """\
With sentence-transformers {since} or later:

```python
from sentence_transformers import {auto}

model = {auto}({call})
queries = model.encode_query(["dogs that sleep"])
documents = model.encode_document(["The dogs sleep.", "It rains."])
print(model.similarity(queries, documents))
```"""
_TEXTS = {  # example input for each kind of pipeline
  "text-generation": "The dogs",
  "fill-mask": "The dogs {mask} in the house.",
}
_IN_PLACE = "The model predicts a masked token at the mask."
_MNTP = (
  "It was trained with masked next-token prediction (arXiv 2410.24159). At a"
  " mask, its code gives the logits of the position before, which predict the"
  " masked token. At any other token it gives the position's own logits. So you"
  " can read one mask at its own position (fill-mask, BabyLM's backend `mlm`)"
  " or one position before (`mntp`), and adjacent masks at their own positions."
)


@dataclasses.dataclass(frozen=True)
class About:
  """Facts for the card that only the user knows."""

  license: str = setting("", "license by its name on the Hub: apache-2.0")
  language: tuple[str, ...] = setting((), "languages of its text: en,de")
  base_model: str = setting(
    "", "name on the Hub of the model that training began from"
  )


def card(
  loaded: Loaded, attention: str, target: Target, about: About = About()
) -> str:
  """Returns the README.md of a folder, read causally or bidirectionally.

  The example opens it with the first of the target's classes.
  """
  import huggingface_hub  # slow to import

  name = loaded.config.model.name
  tag = "text-generation" if attention == "causal" else "fill-mask"
  auto, since, embedder = next(iter(target.classes)), target.since, ""
  if loaded.task:
    place = heads.place(loaded.task)
    tag, auto, embedder = place.tag, place.auto, place.embedder
  if embedder:
    auto, since = embedder, heads.EMBEDDERS[embedder]
  metadata = huggingface_hub.ModelCardData(
    library_name="sentence-transformers" if embedder else "transformers",
    pipeline_tag=tag,
    license=about.license or None,
    language=list(about.language) or None,
    base_model=about.base_model or _base_model(loaded) or None,
    tags=["antlm_jax", name],
  )
  origin = _TRAINED.format(curriculum=loaded.config.curriculum)
  if loaded.merged and not loaded.task:
    origin = _MERGED.format(merged=loaded.merged)
  elif not loaded.data:
    origin = _FOREIGN
  mask = loaded.tokenizer.mask_id
  word = "" if mask is None else loaded.tokenizer.decode([mask], False)
  use = (_EMBEDDER if embedder else _PIPELINE).format(
    auto=auto,
    call='"FOLDER", trust_remote_code=True' if target.code else '"FOLDER"',
    since=since,
    tag=tag,
    text=_TEXTS.get(tag, "The dogs sleep.").format(mask=word),
  )
  notes = [use, target.note]
  if attention == "bidirectional" and not loaded.task:
    notes.append(_MNTP if loaded.mask_shift else _IN_PLACE)
  return _CARD.format(
    metadata=metadata.to_yaml(),
    encoder=name,
    size=units.quantity(loaded.model.size),
    attention=attention,
    origin=origin,
    use="\n\n".join(filter(None, notes)),
    training=_table("Training", _training(loaded) if loaded.data else {}),
    evaluation=_table("Evaluation", dict(_scores(loaded))),
    paper=ARCHITECTURES[name].paper,
  )


def without_folders(paths: str) -> str:
  """Returns the last name of each path, of `path` or `name=path,name=path`."""
  return re.sub(r"[^,=]*/", "", paths.rstrip("/"))


def _table(title: str, rows: Mapping[str, str]) -> str:
  """Returns a section with a table, empty without rows."""
  lines = [f"| {name} | {value} |" for name, value in rows.items() if value]
  return _TABLE.format(title=title, rows="\n".join(lines)) if lines else ""


def _base_model(loaded: Loaded) -> str:
  """Returns the model on the Hub that the run, or those before, began from."""
  found = loaded.config.init.checkpoint
  while found and not found.startswith(hub.PREFIX):
    try:
      found = import_.start(found).meta.config.init.checkpoint
    except UserError:  # it was moved or removed
      return ""
  return found.removeprefix(hub.PREFIX)


def _training(loaded: Loaded) -> dict[str, str]:
  config = loaded.config
  trained = ", ".join(objective.name for objective in config.trained)
  start = pathlib.PurePath(config.init.checkpoint.removeprefix(hub.PREFIX))
  # A run's name, from the path to it or to one of its steps.
  began = [p for p in start.parts if p != checkpoint.FOLDER and not p.isdigit()]
  return {
    "began from": "".join(began[-1:]),
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


def _scores(loaded: Loaded) -> Iterator[tuple[str, str]]:
  """Yields this step's held-out losses and the scores of evaluations."""
  for record in metrics.read_records(loaded.run):
    if record.get("step") == loaded.step and not loaded.task:
      for key, value in record.items():
        if key.startswith("eval/") and key.endswith("/loss"):
          yield f"held-out loss, {key.split('/')[1]}", f"{value:.3f} nats"
  folder = loaded.run if loaded.task else loaded.evals
  found = [] if files.is_remote(folder) else folder.rglob("summary.json")
  for path in sorted(found):
    try:
      summary = json.loads(path.read_text("utf-8"))
      request = summary["request"]
      if request["step"] != loaded.step:
        continue
    except (OSError, ValueError, KeyError, TypeError):
      continue  # of something else, or cut off
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
