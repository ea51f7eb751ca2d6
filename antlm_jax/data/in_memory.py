"""Prepared data in memory, for tests, notebooks and small texts."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from antlm_jax.data.prepared_folder import Manifest, PreparedData, PreparedSplit
from antlm_jax.data.rows import Indices, Rows
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.runtime import records

_DEV_SHARE = 0.02
_SHOWN = 5  # names in a list of columns
_MOST_IDS = 1 << 20  # words of a tokenizer that is made of ids


class Held(Rows):
  """Rows whose tokens `[N, T]` and segments' starts `[N, T]` are in memory."""

  def __init__(
    self,
    tokens: npt.NDArray[np.int32],
    starts: npt.NDArray[np.bool_] | None = None,
  ):
    self.seq_len = tokens.shape[1]
    self.segmented = starts is not None
    self._row_count = len(tokens)
    self._tokens = tokens
    self._starts = starts

  def by_blocks(self, size: int, at_once: int) -> Rows:
    return self

  def read(self, indices: Indices) -> tuple[np.ndarray, np.ndarray | None]:
    starts = None if self._starts is None else self._starts[indices]
    return self._tokens[indices], starts


def copy(prepared: PreparedData) -> PreparedData:
  """Reads a prepared folder, which may then be deleted."""
  train, dev = (
    Held(*rows.read(range(len(rows))))
    for rows in (prepared.train, prepared.dev)
  )
  return dataclasses.replace(prepared, folder=None, train=train, dev=dev)


def columns_error(table: str, columns: Sequence[object]) -> UserError:
  """Returns the error for a table in place of rows; `table` begins it."""
  shown = ", ".join(map(str, columns[:_SHOWN]))
  return UserError(
    f"{table} the columns {shown}: give rows of token ids, such as"
    " data['input_ids'], or of texts antlm_jax.prepare(data)"
  )


def _checked_tokens(tokens: npt.ArrayLike, name: str) -> np.ndarray:
  """Returns rows as an array; UserError if they are not int `[N, T]`."""
  if (columns := records.column_names(tokens)) is not None:
    table = f"{name} data are a {type(tokens).__name__} with"
    raise columns_error(table, columns)
  if isinstance(tokens, str | os.PathLike | PreparedData):
    raise UserError(
      f"{name} data are no rows of token ids: prepare all texts together,"
      ' antlm_jax.prepare({"train": TEXT, "dev": TEXT})'
    )
  try:
    rows = np.asarray(tokens)
  except ValueError as error:
    raise UserError(f"{name} rows are not all as long: give [N, T]") from error
  if rows.dtype.kind == "U":
    raise UserError(f"{name} data are texts: give antlm_jax.prepare(texts)")
  enough = rows.ndim == 2 and len(rows) > 1 and rows.size
  if not enough or rows.dtype.kind not in "iu":
    raise UserError(
      f"{name} rows are {rows.dtype} of the shape {rows.shape}: give at least"
      " two rows of token ids, int [N, T]"
    )
  return rows


def from_rows(
  tokens: npt.ArrayLike,
  dev: npt.ArrayLike | None = None,
  tokenizer: Tokenizer | None = None,
) -> PreparedData:
  """Makes prepared data of rows of tokens, int `[N, T]`.

  Each row is one document and has no special tokens.

  Args:
    tokens: Rows to train on.
    dev: Rows to hold out; by default the last 2 % of the others.
    tokenizer: Their tokenizer; by default its words are the ids.

  Raises:
    UserError: The rows are no two-dimensional integers, or no ids of the
      tokenizer.
  """
  if tokenizer is not None:
    tokenizer = Tokenizer.wrap(tokenizer)
  train, dev = (
    None if rows is None else _checked_tokens(rows, name)
    for name, rows in (("train", tokens), ("dev", dev))
  )
  if dev is None:
    train, dev = np.split(train, [-max(1, round(_DEV_SHARE * len(train)))])
  parts = {"train": train, "dev": dev}
  low = min(rows.min() for rows in parts.values())
  high = int(max(rows.max() for rows in parts.values()))
  most = tokenizer.vocab_size - 1 if tokenizer else min(high, _MOST_IDS - 1)
  if low < 0 or high > most:
    raise UserError(
      f"rows have the token ids {low} to {high}: give ids from 0 to {most}"
    )
  tokenizer = tokenizer or Tokenizer.of_ids(high + 1)
  held = {}
  splits = {}
  for name, rows in parts.items():
    held[name] = Held(rows.astype(np.int32))
    splits[name] = PreparedSplit(
      rows=len(rows),
      documents=len(rows),
      words=rows.size,
      text_bytes=0,
      tokens=rows.size,
      dropped=0,
      padding=0,
      sha256=hashlib.sha256(rows.astype("<i4").tobytes()).hexdigest(),
      shards=(),
    )
  json = tokenizer.to_json().encode()
  manifest = Manifest(
    settings={"boundary": "none"},
    sources=[],
    tokenizer={
      "sha256": hashlib.sha256(json).hexdigest(),
      "vocab_size": tokenizer.vocab_size,
    },
    seq_len=train.shape[1],
    dtype="<i4",
    segmented=False,
    splits=splits,
  )
  return PreparedData(None, manifest, tokenizer, **held)
