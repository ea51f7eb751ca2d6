"""Helpers for tests that open folders in transformers, or push them."""

import types
from typing import ClassVar

import numpy as np
import pytest

from antlm_jax.hf import import_
from tests import helpers, runs

MARKS = [
  pytest.mark.slow,
  pytest.mark.usefixtures("offline"),
  # transformers and its dependencies warn about their own code.
  pytest.mark.filterwarnings("ignore::DeprecationWarning"),
  pytest.mark.filterwarnings("ignore::FutureWarning"),
  pytest.mark.filterwarnings("ignore::UserWarning"),
]


def opens(test):
  """Marks a test that opens models in transformers."""
  for mark in MARKS:
    test = mark(test)
  return test


# Names of transformers.
ENCODERS = "EuroBert", "ModernBert", "Ultrabert", "Bert", "Roberta"


def import_error(folder) -> str:
  """Returns the message that refuses to import a folder, or a name."""

  def read():
    imported = import_.Imported(folder)
    return imported.meta, imported.params

  return runs.told(read)


def opened(path, form, **options):
  """Opens a folder as a language model; all weights must match."""
  import transformers

  auto = {
    "causal": transformers.AutoModelForCausalLM,
    "bidirectional": transformers.AutoModelForMaskedLM,
  }[form]
  model, info = auto.from_pretrained(
    path, output_loading_info=True, trust_remote_code=True, **options
  )
  assert not any(info[name] for name in info if name != "error_msgs"), info
  return model.eval()


def drawn(kind, **settings):
  """Returns a random model of transformers whose scores differ clearly."""
  import torch
  import transformers

  shape = {
    "vocab_size": 8192,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
  }
  torch.manual_seed(0)
  config = getattr(transformers, f"{kind}Config")(**shape | settings)
  head = "MaskedLM" if kind in ENCODERS else "CausalLM"
  model = getattr(transformers, f"{kind.removesuffix('Text')}For{head}")(config)
  for value in model.parameters():
    if value.ndim == 1:  # biases are zeros, norms are 1
      torch.nn.init.normal_(value, float(value[0]), 0.3)
  return model.eval()


def our_logits(loaded, ids, mask, positions=None):
  """Returns our model's logits of rows of tokens."""
  if positions is None:
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
  run = helpers.forward(loaded.model.config)
  return np.asarray(run(loaded.params, ids, positions, mask))


def log_probability(model, ids, places, shift=1, mask_id=None) -> float:
  """Sums log-probabilities of tokens, from the logits `shift` positions before.

  With `mask_id`, each token is scored in a separate row that masks it.
  """
  import torch

  rows = torch.tensor([ids] * (1 if mask_id is None else len(places)))
  each = range(len(places))
  if mask_id is not None:
    rows[each, places] = mask_id
  with torch.no_grad():
    found = model(rows).logits.double().log_softmax(dim=-1).numpy()
  found = np.broadcast_to(found, (len(places), *found.shape[1:]))
  tokens = [ids[at] for at in places]
  return found[each, np.array(places) - shift, tokens].sum()


class FakeHub:
  """Records requests to the Hub; with `refuses`, fails as without a token."""

  calls: ClassVar[list] = []
  refuses = False

  def create_repo(self, name, private, exist_ok):
    if self.refuses:
      raise OSError("Token is required\nand a long story")
    self.calls.append(("repo", name))
    return types.SimpleNamespace(repo_id=f"me/{name}")

  def create_branch(self, name, branch, exist_ok):
    self.calls.append(("branch", name, branch))

  def upload_folder(self, repo_id, folder_path, revision, delete_patterns):
    assert delete_patterns == ["*.safetensors*"]
    self.calls.append(("upload", repo_id, folder_path.name, revision))
