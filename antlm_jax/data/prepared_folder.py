"""A prepared folder: its manifest, and opening one folder or several.

Opening a folder checks the sizes of its files and the tokenizer's hash. Reading
a row checks that row. `PreparedData.verify` checks all rows.
"""

import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Iterator, Mapping

from antlm_jax.data.joined_rows import Joined
from antlm_jax.data.packing import BOUNDARIES, PACKINGS
from antlm_jax.data.rows import Rows, damaged, token_dtype
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import Unavailable, UserError
from antlm_jax.objectives import curriculum
from antlm_jax.runtime import files

SPLITS = ("train", "dev")
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
_VERSION = 2


COUNTS = "rows", "documents", "words", "text_bytes", "tokens"
COUNTS += "dropped", "padding"


@dataclasses.dataclass(frozen=True)
class Shard:
  """A file of rows."""

  rows: int
  bytes: int
  sha256: str


@dataclasses.dataclass(frozen=True)
class PreparedSplit:
  """Counts of a split, and its files of rows."""

  rows: int
  documents: int
  words: int  # separated by space
  text_bytes: int  # in UTF-8
  tokens: int  # of all documents, with boundaries
  dropped: int  # tokens that filled no row
  padding: int  # tokens
  sha256: str  # of the rows, however many files they are in
  shards: tuple[Shard, ...]

  @classmethod
  def load(cls, fields: dict) -> "PreparedSplit":
    """Makes a split of the fields of a JSON file."""
    shards = tuple(Shard(**shard) for shard in fields["shards"])
    return cls(**fields | {"shards": shards})

  @property
  def row_words(self) -> float:
    """Mean number of words in a row."""
    return self.words * (1 - self.dropped / self.tokens) / self.rows


@dataclasses.dataclass(frozen=True)
class Manifest:
  """Contents of a prepared folder, and the settings that made it."""

  settings: dict  # the recorded `shards.Recipe`
  sources: list[dict]  # split, path, bytes and sha256 of each text file
  tokenizer: dict  # sha256 of its file, and vocab_size
  seq_len: int  # tokens in a row, T
  dtype: str  # of the tokens on disk
  segmented: bool  # whether rows are divided into segments
  splits: dict[str, PreparedSplit]  # train and dev
  version: int = _VERSION  # of this format

  @classmethod
  def load(cls, folder: str | os.PathLike) -> "Manifest":
    """Reads and checks the manifest of a prepared folder.

    Raises:
      UserError: The folder has no manifest, or another version of antlm_jax
        wrote it.
      Unavailable: The bucket or the network fails now.
    """
    path = files.absolute_path(folder) / MANIFEST
    try:
      fields = files.read_json(path, "the manifest")
    except Unavailable:
      raise  # the folder may still have a manifest
    except UserError as error:
      reason = files.absent(path.parent) or error
      raise UserError(
        f"{folder!s:.200} is not a prepared folder ({reason});"
        " run antlm prepare"
      ) from error
    try:
      splits = {
        name: PreparedSplit.load(fields["splits"][name]) for name in SPLITS
      }
      manifest = cls(**fields | {"splits": splits})
      fault = next(_invalid_fields(manifest), "")
    except (AttributeError, KeyError, TypeError) as error:
      # A field is missing or unknown, or has another type.
      fault = " ".join(str(error).split())
    if fault:
      raise UserError(
        f"{path} was changed, or is of another version of antlm_jax (see"
        f" {fault:.80}); run antlm prepare with another output"
      )
    return manifest


# Types of settings that only comparisons read.
_KINDS = {"column": str, "documents": str, "kind": str, "seed": int}
_KINDS |= {"vocab_size": int, "dev_share": float, "share": float, "words": int}


def _invalid_fields(manifest: Manifest) -> Iterator[str]:
  """Yields the names of the fields whose values `prepare` never writes.

  A value of another type may raise an AttributeError, KeyError or TypeError.
  """
  settings = manifest.settings
  tokenizer = manifest.tokenizer
  packing = settings["packing"]
  length = manifest.seq_len
  size = "vocab_size"
  checks = {
    "version": manifest.version == _VERSION,
    "settings.boundary": settings["boundary"] in [*BOUNDARIES],
    "settings.packing": packing in PACKINGS,
    "settings.seq_len": settings["seq_len"] == length,
    "seq_len": _is_count(length, 2),
    "segmented": manifest.segmented is (packing != "stream"),
    f"tokenizer.{size}": _is_count(tokenizer[size], 1)
    and tokenizer[size] <= 1 << 31,
    "tokenizer.sha256": _is_hash(tokenizer["sha256"]),
  }
  for name, kind in _KINDS.items():
    value = settings.get(name, kind())
    kinds = (int, float) if kind is float else kind
    valid = isinstance(value, kinds) and not isinstance(value, bool)
    checks[f"settings.{name}"] = valid
  tokenizer_hash = settings["tokenizer"]
  trained = tokenizer_hash is None
  checks["settings.tokenizer"] = trained or _is_hash(tokenizer_hash)
  checks["dtype"] = manifest.dtype == token_dtype(tokenizer[size])
  for index, source in enumerate(manifest.sources):
    checks |= {
      f"sources[{index}].split": source["split"] in SPLITS,
      f"sources[{index}].path": isinstance(source["path"], str),
      f"sources[{index}].bytes": _is_count(source["bytes"]),
      f"sources[{index}].sha256": _is_hash(source["sha256"]),
    }
  for name, split in manifest.splits.items():
    # Every split has rows, and so documents, words and tokens.
    for field in COUNTS:
      least = 0 if field in ("dropped", "padding") else 1
      value = getattr(split, field)
      checks[f"splits.{name}.{field}"] = _is_count(value, least)
    rows = [shard.rows for shard in split.shards]
    checks |= {
      f"splits.{name}.tokens": split.dropped < split.tokens,
      f"splits.{name}.sha256": _is_hash(split.sha256),
      f"splits.{name}.shards": all(map(_is_count, rows))
      and sum(rows) == split.rows
      and all(_is_count(s.bytes) and _is_hash(s.sha256) for s in split.shards),
    }
  yield from (name for name, valid in checks.items() if not valid)


def _is_count(value, least: int = 0) -> bool:
  return type(value) is int and value >= least


def _is_hash(value) -> bool:
  return isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value))


@dataclasses.dataclass(frozen=True, repr=False)
class PreparedData:
  """A prepared folder, or the same data in memory."""

  folder: pathlib.Path | None  # None in memory
  manifest: Manifest
  tokenizer: Tokenizer  # that encoded its rows
  train: Rows
  dev: Rows  # held out

  def __repr__(self) -> str:
    rows = self.train
    words = self.tokenizer.vocab_size
    return (
      f"<prepared data: {len(rows):,} rows of {rows.seq_len} tokens, vocabulary"
      f" {words:,}, {self.folder or 'in memory'}>"
    )

  @classmethod
  def open(cls, folder: str | os.PathLike) -> "PreparedData":
    """Opens a folder, on this machine or in a bucket, without reading all.

    Raises:
      UserError: It is not a prepared folder, or a file of it is damaged.
    """
    folder = files.absolute_path(folder)  # outlives a change of the folder
    manifest = Manifest.load(folder)
    path = folder / TOKENIZER
    made_with = manifest.tokenizer
    content = files.read_text(path, "the tokenizer")
    # Ids mean nothing to another tokenizer, even one of the same size.
    if hashlib.sha256(content.encode()).hexdigest() != made_with["sha256"]:
      raise damaged(path, "is not the tokenizer that the rows were made with")
    tokenizer = Tokenizer.from_json(content)
    size = made_with["vocab_size"]
    if tokenizer.vocab_size != size:
      fault = (
        f"has {tokenizer.vocab_size} tokens, not the {size} of its manifest"
      )
      raise damaged(path, fault)
    segmented = manifest.segmented
    rows = {}
    for name, split in manifest.splits.items():
      shards = _shard_paths(folder, name, split)
      for path, shard in shards:
        if files.is_remote(path):
          continue  # reading its rows raises the error
        size_on_disk = path.stat().st_size if path.is_file() else 0
        if size_on_disk != shard.bytes:
          fault = (
            f"has {size_on_disk} bytes, not the {shard.bytes} of its manifest"
          )
          raise damaged(path, fault)
      counts = [(path, shard.rows) for path, shard in shards]
      rows[name] = Rows(counts, manifest.seq_len, size, segmented)
      # A file that was zeroed or is of other rows fails here.
      rows[name].read([0, split.rows - 1])
    return cls(folder, manifest, tokenizer, **rows)

  def verify(self) -> None:
    """Compares all rows with the manifest's hashes.

    Raises:
      UserError: A file of rows is not as it was prepared, or there are no files
        because the data are in memory.
    """
    if self.folder is None:
      raise UserError("these data are in memory: there are no files to compare")
    for name, split in self.manifest.splits.items():
      for path, shard in _shard_paths(self.folder, name, split):
        if sha256(path) != shard.sha256:
          raise damaged(path, "is not as it was prepared")


@dataclasses.dataclass(frozen=True)
class Sources:
  """The data of a run: prepared folders by name, with the same preparation.

  A single folder may have the name "".
  """

  train: Mapping[str, Rows]
  held_out: Mapping[str, Rows]  # of these folders, then of further folders
  tokenizer: Tokenizer  # of all folders
  boundary: str  # special tokens around documents, of `packing.BOUNDARIES`
  words: Mapping[str, float]  # mean number of words in a train row
  sha256: str  # of the train rows
  held_out_sha256: str  # of the rows that the run's own data hold out

  @classmethod
  def open(cls, path: str, further: str = "") -> "Sources":
    """Opens folders, each `FOLDER` or `NAME=FOLDER,NAME=FOLDER`.

    They may be in a bucket. Held-out rows of `further` are measured as well.

    Raises:
      UserError: A folder cannot be opened, two have the same name, or they were
        not prepared alike.
    """
    if not path:
      raise no_path()
    return cls.of(open_prepared(path, "data.path"), further)

  @classmethod
  def of(
    cls, prepared: Mapping[str, PreparedData], further: str = ""
  ) -> "Sources":
    """Joins prepared data by name; `further` and errors are those of `open`."""
    held_out_only = open_prepared(further, "eval.data")
    if {*held_out_only} & {"", *prepared}:
      raise UserError(
        f"eval.data={further}: give each folder a name that no other has, such"
        " as news=FOLDER"
      )
    all_prepared = {**prepared, **held_out_only}
    _check_alike(all_prepared)
    first = next(iter(prepared.values()))
    splits, dev = (
      {name: data.manifest.splits[split] for name, data in prepared.items()}
      for split in ("train", "dev")
    )
    return cls(
      train={name: data.train for name, data in prepared.items()},
      held_out={name: data.dev for name, data in all_prepared.items()},
      tokenizer=first.tokenizer,
      boundary=first.manifest.settings["boundary"],
      words={name: part.row_words for name, part in splits.items()},
      sha256=_hash_of_splits(splits),
      held_out_sha256=_hash_of_splits(dev),
    )

  @property
  def rows(self) -> Rows:
    """All rows to train on."""
    first, *further = parts = [*self.train.values()]
    if further and any(type(rows) is not Rows for rows in parts):
      return Joined(parts)  # some are in memory
    return first.followed_by(further) if further else first


def no_path() -> UserError:
  """Returns the error of a run without data."""
  return UserError(
    "data.path is not set: give --config.data.path=FOLDER, made by `antlm"
    " prepare` (in Python, data)"
  )


def _hash_of_splits(splits: Mapping[str, PreparedSplit]) -> str:
  hashes = ",".join(f"{name}={part.sha256}" for name, part in splits.items())
  return hashes if len(splits) > 1 else hashes.partition("=")[2]


def hash_of_rows(text: str) -> str:
  """Returns the hash of the rows that data.path names, from manifests alone.

  It is `Sources.sha256` of the opened folders.

  Raises:
    UserError: A folder is missing, or its manifest is damaged.
  """
  folders = folders_by_name(text, "data.path").items()
  manifests = {name: Manifest.load(folder) for name, folder in folders}
  return _hash_of_splits(
    {name: manifest.splits["train"] for name, manifest in manifests.items()}
  )


def open_prepared(text: str, key: str) -> dict[str, PreparedData]:
  """Opens the folders that a setting names, also in a bucket."""
  folders = folders_by_name(text, key).items()
  return {name: PreparedData.open(folder) for name, folder in folders}


def folders_by_name(text: str, key: str) -> dict[str, str]:
  """Reads `FOLDER`, or `NAME=FOLDER,NAME=FOLDER`, as folders by name.

  A path that exists is a path, also `seed=1/data`.

  Raises:
    UserError: Two folders have the same name. The error names the setting
      `key`.
  """
  name = f"{curriculum.NAME}="
  if os.path.exists(text) or not re.match(name, text):
    return {"": text} if text else {}
  # Folders may have commas: only one before a name divides, unless both sides
  # are one path that exists.
  parts = re.split(f",(?={name})", text)
  pairs = []
  while parts:
    for count in range(len(parts), 0, -1):
      pair = ",".join(parts[:count])
      if count == 1 or os.path.exists(pair.partition("=")[2]):
        break
    pairs.append(pair)
    del parts[:count]
  out = dict(pair.split("=", 1) for pair in pairs)
  if len(out) < len(pairs):
    raise UserError(f"{key}={text}: two folders have the same name")
  return out


def _check_alike(prepared: Mapping[str, PreparedData]) -> None:
  """Checks that rows of all folders can be in one batch."""
  (first, like), *others_by_name = prepared.items()
  layout = _manifest_layout(like.manifest)
  for name, data in others_by_name:
    for field, value in _manifest_layout(data.manifest).items():
      if value != layout[field]:
        if like.folder and data.folder:
          pair = f"{like.folder} and {data.folder}"
          remedy = f"tokenizer={like.folder / TOKENIZER}"
        else:  # some are in memory
          pair = f"the data {first or 'to train on'} and {name}"
          remedy = f"the tokenizer of {first or 'the first'}"
        raise UserError(
          f"{pair} differ in {field}, which is"
          f" {layout[field]} for {first or 'the first'} and {value} for {name}."
          f" Prepare {name} again, with {remedy} and the same options"
        )


def _manifest_layout(manifest: Manifest) -> dict:
  return {
    "tokenizer.json": manifest.tokenizer["sha256"][:8],
    "seq_len": manifest.seq_len,
    "boundary": manifest.settings["boundary"],
    "rows divided into segments (packing)": manifest.segmented,
  }


def rows_file(split: str, index: int, count: int) -> str:
  """Returns the name of a file of a split's rows, one of `count`."""
  return f"{split}-{index:05}-of-{count:05}.array_record"


def _shard_paths(folder, name: str, split: PreparedSplit) -> list:
  """Returns the path to each shard, and the shard."""
  # The names are not in the manifest, where they could lead elsewhere.
  count = len(split.shards)
  return [
    (folder / rows_file(name, index, count), shard)
    for index, shard in enumerate(split.shards)
  ]


def sha256(path: str | os.PathLike) -> str:
  """Returns the hash of a file."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def span_hash(span: int, digest: bytes) -> int:
  """Returns the hash of a span's rows as a number.

  The sum of these numbers identifies all rows, in any order of the spans.
  """
  span_hash = hashlib.sha256(span.to_bytes(8, "little") + digest).digest()
  return int.from_bytes(span_hash, "big")


def hexadecimal(total: int) -> str:
  """Returns a sum of spans' hashes, as 64 digits."""
  return f"{total % (1 << 256):064x}"
