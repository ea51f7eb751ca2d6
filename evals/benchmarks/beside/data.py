"""Preparing text and reading batches, compared with datasets and transformers.

Both begin with the same files and tokenizer, and end with rows on disk. Then
both read, shuffle and mask batches of these, without training.
"""

import itertools
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np

from antlm_jax import config
from antlm_jax.commands.prepare import prepare
from antlm_jax.data import source, text_files
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.evals.benchmarks.beside import models
from antlm_jax.evals.benchmarks.turns import TimedCase
from antlm_jax.training import run as run_lib

_LENGTH = 128  # tokens of a row
_ROWS = 64  # of a batch
_BATCHES = 50


def preparation_cases(
  folder: pathlib.Path, text: tuple[str, ...]
) -> Iterator[TimedCase]:
  """Yields the cases of text files."""
  paths = [pathlib.Path(path) for path in text_files.find_corpus(text).train]
  tokenizer = Tokenizer.train(
    (p.read_text("utf-8") for p in paths), models.vocab_size("7M")
  )
  file = folder / "tokenizer.json"
  file.write_text(tokenizer.to_json(), "utf-8")
  ours = folder / "ours"
  theirs = folder / "theirs"
  yield TimedCase(
    "prepare text",
    "datasets",
    lambda: _prepare_anew(paths, ours, file),
    lambda: _group_texts(paths, file, theirs),
    work=sum(p.stat().st_size for p in paths) / 1e6,
    unit="MB",
    same=lambda a, b: abs(a / b - 1) < 0.1,  # documents end otherwise
  )
  for objective in ("C", "M"):
    yield TimedCase(
      f"read batches {objective}, {_ROWS} x {_LENGTH}",
      "datasets",
      _benchmark_batches(ours, objective),
      _collated(theirs, file, masked=objective == "M"),
      work=_BATCHES * _ROWS * _LENGTH,
      unit="tokens",
      same=lambda a, b: a == b,
    )


def _prepare_anew(
  paths: list[pathlib.Path], folder: pathlib.Path, tokenizer: pathlib.Path
) -> int:
  """Prepares anew, and returns the number of rows."""
  shutil.rmtree(folder, ignore_errors=True)
  prepared = prepare(
    paths,
    folder,
    tokenizer=tokenizer,
    seq_len=_LENGTH,
    boundary="eos",
    quiet=True,
  )
  return len(prepared.train)


def _group_texts(paths, file: pathlib.Path, folder: pathlib.Path) -> int:
  """Does as transformers' run_clm.py does: lines, tokens, groups of them."""
  transformers, _ = models.torch_modules()
  import datasets

  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_file=str(file), eos_token="</s>"
  )

  def encode(lines):
    return {"input_ids": fast(lines["text"])["input_ids"]}

  def group(some):
    joined = list(itertools.chain(*some["input_ids"]))
    starts = range(0, len(joined) - _LENGTH + 1, _LENGTH)
    return {"input_ids": [joined[i : i + _LENGTH] for i in starts]}

  datasets.disable_progress_bars()
  shutil.rmtree(folder, ignore_errors=True)
  rows = datasets.load_dataset(
    "text",
    data_files=[str(path) for path in paths],
    split="train",
    cache_dir=str(folder / "cache"),
  )
  rows = rows.map(encode, batched=True, remove_columns=["text"])
  rows = rows.map(group, batched=True)
  rows.save_to_disk(str(folder / "rows"))
  return len(rows)


def _benchmark_batches(folder: pathlib.Path, objective: str):
  changes = config.changes()
  changes.data.path = str(folder)
  changes.curriculum = f"{_BATCHES}{objective} steps"
  changes.train.batch_size = _ROWS
  batches = run_lib.build_run(config.load_config(changes)).source
  return lambda: sum(x.inputs.size for x in source.load_batches(batches))


def _collated(folder: pathlib.Path, file: pathlib.Path, masked: bool):
  transformers, torch = models.torch_modules()
  import datasets

  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_file=str(file), pad_token="<pad>", mask_token="<mask>"
  )
  collate = transformers.DataCollatorForLanguageModeling(fast, mlm=masked)

  def call():
    rows = datasets.load_from_disk(str(folder / "rows"))
    loader = torch.utils.data.DataLoader(
      rows, batch_size=_ROWS, shuffle=True, drop_last=True, collate_fn=collate
    )
    taken = itertools.islice(loader, _BATCHES)
    return sum(int(np.prod(batch["input_ids"].shape)) for batch in taken)

  return call
