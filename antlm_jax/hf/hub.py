"""Hugging Face's Hub: all that goes over the network.

A model's name there is ORG/NAME, or ORG/NAME@REVISION.
"""

import os
import pathlib
import re
from collections.abc import Sequence

from antlm_jax.errors import UserError

PREFIX = "hf://"  # before the name, in a config, of what a run began from
_NAME = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_FILES = ["*.json", "model*.safetensors"]


def is_name(model: str | os.PathLike) -> bool:
  """Whether it is a name on the Hub rather than a folder here."""
  if not _NAME.fullmatch(os.fspath(model)) or os.path.exists(model):
    return False
  # runs/slip, where there are other runs, is a slip.
  return not pathlib.Path(model).parent.exists()


def folder(name: str) -> pathlib.Path:
  """Returns the folder of a model on the Hub, after downloading it.

  What is in the cache of huggingface_hub is not downloaded again.

  Raises:
    UserError: if it cannot be had, with what to do.
  """
  import huggingface_hub

  found = _NAME.fullmatch(name)
  repo, revision = found["repo"], found["revision"]

  def download(patterns: Sequence[str]) -> pathlib.Path:
    path = huggingface_hub.snapshot_download(
      repo,
      revision=revision,
      allow_patterns=list(patterns),
      ignore_patterns=["*/*"],  # other programs' forms of it
    )
    return pathlib.Path(path)

  try:
    path = download(_FILES)
    if not any(path.glob("*.safetensors")):
      path = download(["*.bin"])
  except Exception as error:  # what a network can do has no common base
    where = f"{repo} --revision={revision}" if revision else repo
    raise UserError(
      f"{name} is no folder here, and the Hub does not give it"
      f" ({_reason(error)}): where it does, run `hf download {where}"
      " --local-dir=FOLDER`, and give --model=FOLDER"
    ) from error
  return path


def push(
  folders: Sequence[pathlib.Path], repo: str, revision: str | None
) -> None:
  """Uploads folders to the Hub, by default as its main revision.

  Several folders go to REPO-causal and REPO-bidirectional. Log in before
  (`hf auth login`).

  Raises:
    UserError: if the Hub refuses.
  """
  import huggingface_hub

  api = huggingface_hub.HfApi()
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
    except Exception as error:
      raise UserError(
        f"pushing to {name} failed: {_reason(error)}; {path} is written"
      ) from error
    print(f"pushed to {name}" + (f", revision {revision}" if revision else ""))


def _reason(error: Exception) -> str:
  said = (str(error).strip() or type(error).__name__).splitlines()[0]
  return said.split(". ")[0]
