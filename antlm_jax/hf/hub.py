"""Downloads from and uploads to Hugging Face's Hub.

A model's name is ORG/NAME or ORG/NAME@REVISION.
"""

import pathlib
import shlex
from collections.abc import Mapping, Sequence

from antlm_jax.errors import UserError
from antlm_jax.runtime import files, progress
from antlm_jax.training.checkpoint import HUB_NAME


def download_model(name: str, inside: str = "") -> pathlib.Path:
  """Downloads a model from the Hub and returns its folder.

  It uses the cache of huggingface_hub. `inside` is a subfolder to download
  instead of the files outside of subfolders. Raises a UserError if the download
  fails.
  """
  import huggingface_hub

  match = HUB_NAME.fullmatch(name)
  repo = match["repo"]
  revision = match["revision"]

  def download(*patterns: str) -> pathlib.Path:
    # Subfolders contain formats of other programs.
    selection = {
      "allow_patterns": [start + pattern for pattern in patterns],
      "ignore_patterns": [f"{start}*/*"],
    }
    path = huggingface_hub.snapshot_download(
      repo, revision=revision, **selection
    )
    return pathlib.Path(path)

  start = f"{inside}/" if inside else ""
  try:
    path = download("*.json", "*.jinja", "model*.safetensors")
    if not any((path / inside).glob("*.safetensors")):
      path = download("*.bin")
  except _hub_failures() as error:
    arguments = f"{repo} --revision={revision}" if revision else repo
    raise UserError(
      f"{name} is not a local folder, and its download failed"
      f" ({_hub_reason(error)}): on a machine with a network, run `hf download"
      f" {arguments} --local-dir=FOLDER`, then give that folder"
    ) from error
  return path


def push(
  exports: Mapping[str | None, Sequence[pathlib.Path]],
  repo: str,
  private: bool = False,
) -> None:
  """Uploads folders to the Hub, by their revisions; None is the main revision.

  Several folders become REPO-causal and REPO-bidirectional, and their cards
  name them. Log in first (`hf auth login`). A new repository is private if
  `private`. Raises a UserError, with the commands that upload the rest, if an
  upload fails.
  """
  import huggingface_hub

  api = huggingface_hub.HfApi()
  uploads = [
    (path, f"{repo}-{path.name}" if len(folders) > 1 else repo, revision)
    for revision, folders in exports.items()
    for path in folders
  ]
  for done, (path, name, revision) in enumerate(uploads):
    try:
      name = api.create_repo(name, private=private, exist_ok=True).repo_id
      if revision:
        api.create_branch(name, branch=revision, exist_ok=True)
      _name_in_card(path, name, revision)
      # transformers would prefer older shards to the new files.
      api.upload_folder(
        repo_id=name,
        revision=revision,
        folder_path=path,
        delete_patterns=["*.safetensors*"],
      )
    except _hub_failures() as error:
      commands = []
      for folder, target, branch in uploads[done:]:
        _name_in_card(folder, target, branch)
        words = ["hf", "upload", target, str(files.shown_path(folder))]
        words += ["--private"] * private
        words += [f"--revision={branch}"] if branch else []
        commands.append(f"`{shlex.join(words)}`")
      raise UserError(
        f"pushing to {name} failed ({_hub_reason(error)}), but all is written:"
        f" later, run {' and '.join(commands)}"
      ) from error
    shown = f", revision {revision}" if revision else ""
    progress.say(f"pushed to {name}{shown}")


def _name_in_card(
  folder: pathlib.Path, repo: str, revision: str | None
) -> None:
  """Writes a repository's name into the example of a folder's card."""
  path = folder / "README.md"
  name = f'"{repo}", revision="{revision}"' if revision else f'"{repo}"'
  path.write_text(path.read_text("utf-8").replace('"FOLDER"', name), "utf-8")


def _hub_failures() -> tuple[type[Exception], ...]:
  """Returns the errors that huggingface_hub raises for network and names."""
  try:  # huggingface_hub 2 or later
    import httpx2 as httpx
  except ImportError:
    import httpx
  from huggingface_hub import errors

  xet = getattr(errors, "XetDownloadError", OSError)  # absent in old versions
  missing = errors.EntryNotFoundError
  return OSError, ValueError, RuntimeError, httpx.HTTPError, missing, xet


def _hub_reason(error: Exception) -> str:
  text = (str(error).strip() or type(error).__name__).splitlines()[0]
  return text.split(". ")[0]
