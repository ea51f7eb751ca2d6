"""Writes a trained model as a folder of Hugging Face's transformers.

  python -m antlm_jax.export_hf --checkpoint=RUN --output=FOLDER

A llama encoder needs no code of ours there: read causally it is a Llama
(AutoModelForCausalLM), bidirectionally a EuroBERT (AutoModelForMaskedLM,
AutoModel, ...). LTG-BERT brings its code along (trust_remote_code=True).
--as=both writes FOLDER/causal and FOLDER/bidirectional, the weights once.

Nothing goes over the network without --repo.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax.errors import UserError
from antlm_jax.hf import card, heads
from antlm_jax.hf import config as configs
from antlm_jax.hf import mapping as names
from antlm_jax.hf import tokenizer as tokenizers
from antlm_jax.hf import weights as folder
from antlm_jax.hf.mapping import FORMS
from antlm_jax.inference import framing
from antlm_jax.training import checkpoint
from antlm_jax.training.checkpoint import Loaded

NATIVE = "antlm_jax.json"  # what import needs to give back the same checkpoint
_CODE = pathlib.Path(__file__).parent / "hf" / "remote"


def export(
  loaded: Loaded,
  output: str | os.PathLike,
  forms: Sequence[str] = (),
  dtype: str = "float32",
  shard_bytes: int = 5 * 10**9,
  sentences: bool = False,
) -> list[pathlib.Path]:
  """Writes a model as one folder or, of two forms, two folders in one.

  Args:
    loaded: The model; of a fine-tuned one its head comes along.
    output: The folder, which must not exist.
    forms: Of `FORMS`; those that it was trained in by default.
    dtype: Of the weights, one of `folder.DTYPES`.
    shard_bytes: Of one file of weights, at most.
    sentences: Also as a sentence-transformers model, the mean over tokens.

  Returns:
    The folders that transformers opens.

  Raises:
    UserError: if the output exists, or the model has no such form.
  """
  output = pathlib.Path(output).absolute()
  forms = tuple(forms) or trained_forms(loaded)
  if loaded.task and forms != trained_forms(loaded):
    raise UserError(
      f"{loaded.path} was fine-tuned reading {loaded.task.attention}ly, and is"
      " exported so: leave the form out"
    )
  architecture = names.ARCHITECTURES[loaded.config.model.name]
  texts = {form: _texts(loaded, form, dtype, sentences) for form in forms}
  weights = folder.tensors(loaded.params, architecture.weights, dtype)
  if loaded.task:
    places = heads.place(loaded.task).weights
    head = folder.tensors(loaded.task.params, places, dtype)
    weights = {n: w for n, w in weights.items() if "lm_head" not in n} | head
  inside = list(forms) if len(forms) > 1 else ["."]
  with folder.new(output) as aside:
    for i, (name, form) in enumerate(zip(inside, forms, strict=True)):
      (aside / name).mkdir(exist_ok=True)
      for path, text in texts[form].items():
        (aside / name / path).parent.mkdir(exist_ok=True)
        (aside / name / path).write_text(text, "utf-8")
      for code in architecture.code:
        shutil.copyfile(_CODE / code, aside / name / code)
      if i == 0:
        folder.write(aside / name, weights, shard_bytes)
      else:
        _share(aside / inside[0], aside / name)
  return [output / name for name in inside]


def trained_forms(loaded: Loaded) -> tuple[str, ...]:
  """Returns the forms that a model was trained in, or fine-tuned."""
  if loaded.task:
    return (loaded.task.attention,)
  read = {objective.attention for objective in framing.trained(loaded.config)}
  both = {"causal": read != {"bidirectional"},
          "bidirectional": "bidirectional" in read}  # fmt: skip
  return tuple(form for form in FORMS if both[form])


def _texts(
  loaded: Loaded, form: str, dtype: str, sentences: bool
) -> dict[str, str]:
  """Returns the text files of a folder, by path in it."""
  architecture = names.ARCHITECTURES[loaded.config.model.name]
  chosen = architecture.forms[form]
  if form == "bidirectional" and loaded.tokenizer.mask_id is None:
    raise UserError(
      f"the tokenizer of {loaded.path} has no <mask> token: only --as=causal"
      " makes sense of this model"
    )
  before, after = (ids.tolist() for ids in framing.frame(loaded))
  # What is generated comes after the text, so nothing else may.
  after = after if form == "bidirectional" or loaded.task else []
  config = configs.config(
    loaded.model, loaded.tokenizer, architecture, chosen, dtype
  )
  if architecture.code:
    config["mask_shift"] = framing.mask_shift(loaded.config)
  if loaded.task:
    config |= heads.config(loaded, chosen)
  files = {
    configs.CONFIG: config,
    **tokenizers.files(
      loaded.tokenizer,
      *(before[0] if before else None, after[0] if after else None),
      loaded.model.config.max_seq_len,
    ),
    NATIVE: loaded.meta.to_json() | {"step": loaded.step},
  }
  if form == "causal" and not loaded.task:
    files["generation_config.json"] = configs.generation_config(
      loaded.tokenizer
    )
  if sentences:
    files |= _sentences(loaded.model.config)
  texts = {
    path: json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    for path, value in files.items()
  }
  return texts | {"README.md": card.card(loaded, form, chosen.classes)}


def _sentences(config) -> dict[str, object]:
  """Returns what sentence-transformers reads: the mean of all tokens."""
  package = "sentence_transformers.models"
  modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
  return {
    "modules.json": [
      {"idx": i, "name": str(i), "path": path, "type": f"{package}.{kind}"}
      for i, (path, kind) in enumerate(modules)
    ],
    "sentence_bert_config.json": {
      "max_seq_length": config.max_seq_len,
      "do_lower_case": False,
    },
    "config_sentence_transformers.json": {"similarity_fn_name": "cosine"},
    "1_Pooling/config.json": {
      "word_embedding_dimension": config.width,
      "pooling_mode_cls_token": False,
      "pooling_mode_mean_tokens": True,
      "pooling_mode_max_tokens": False,
      "include_prompt": True,
    },
  }


def _share(whole: pathlib.Path, other: pathlib.Path) -> None:
  """Puts the same weights into another folder: linked, where that works."""
  for path in whole.glob("model*.safetensors*"):
    try:
      os.link(path, other / path.name)
    except OSError:
      shutil.copyfile(path, other / path.name)


def push(folders: Sequence[pathlib.Path], repo: str, step: int | None) -> None:
  """Uploads folders to the Hub, a step as a revision of its own.

  Several folders go to REPO-causal and REPO-bidirectional. Log in before
  (`hf auth login`).

  Raises:
    UserError: if the Hub refuses.
  """
  import huggingface_hub  # only here does anything go over the network

  api = huggingface_hub.HfApi()
  revision = None if step is None else f"step-{step}"
  for path in folders:
    name = f"{repo}-{path.name}" if len(folders) > 1 else repo
    try:
      name = api.create_repo(name, exist_ok=True).repo_id
      if revision:
        api.create_branch(name, branch=revision, exist_ok=True)
      api.upload_folder(
        repo_id=name,
        folder_path=path,
        revision=revision,
        # Weights in other shards would be read instead of the new ones.
        delete_patterns=["*.safetensors*"],
      )
    except Exception as error:  # what a network can do has no common base
      reason = (str(error).strip() or type(error).__name__).splitlines()[0]
      raise UserError(
        f"pushing to {name} failed: {reason}; {path} is written"
      ) from error
    print(f"pushed to {name}" + (f", revision {revision}" if revision else ""))


def _parser() -> cli.Parser:
  parser = cli.Parser(prog="python -m antlm_jax.export_hf", description=__doc__)
  add = parser.add_argument
  checkpoint.add_arguments(parser)
  add(
    "--output",
    type=cli.here,
    required=True,
    help="a folder, which must not exist",
  )
  add(
    "--as",
    dest="form",
    choices=(*FORMS, "both"),
    help="how it is read; as it was trained by default",
  )
  add("--dtype", choices=folder.DTYPES, default="float32", help="of weights")
  add("--shard_gb", type=float, default=5.0, help="GB of a file, at most")
  add(
    "--sentence_transformers",
    action="store_true",
    help="also as a sentence-transformers model, by the mean over tokens",
  )
  add("--repo", help="also push it to this repository of the Hugging Face Hub")
  return parser


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = _parser().parse_args(argv)
  if not args.shard_gb > 0:
    raise UserError(f"--shard_gb={args.shard_gb:g} is not positive")
  folder.check_new(pathlib.Path(args.output))  # before minutes of reading
  loaded = checkpoint.load(args.checkpoint, args.step)
  forms = FORMS if args.form == "both" else args.form and (args.form,)
  forms = forms or trained_forms(loaded)
  folders = export(
    loaded,
    args.output,
    forms,
    args.dtype,
    round(args.shard_gb * 10**9),
    args.sentence_transformers,
  )
  kind = loaded.config.model.name
  for path, form in zip(folders, forms, strict=True):
    opens = names.ARCHITECTURES[kind].forms[form].classes
    print(f"{path}: {form}, opens by {', '.join(opens)}")
  shifted = framing.mask_shift(loaded.config) and "bidirectional" in forms
  if shifted and kind == "llama":
    print(f"note: {card.MNTP}")
  if args.repo:
    push(folders, args.repo, args.step)


if __name__ == "__main__":
  cli.run(main)
