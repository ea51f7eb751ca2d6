"""Turns text into a prepared folder: documents, tokenizer, packed rows.

    python -m antlm_jax.prepare --text corpus/ --output prepared/

The folder holds `manifest.json` (written last, so a folder without one is
unfinished), `tokenizer.json`, `train.array_record`, `dev.array_record`, and
the documents as a tensorflow-datasets dataset.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import pathlib
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence

import tqdm

from antlm_jax import cli, errors
from antlm_jax.data import packing, rows, text, tokenizer

PACKINGS = ("stream", "documents", "chunks")
BOUNDARIES = ("bos_eos", "eos", "none")
_MARKER = ".antlm_jax_prepare"  # tells our unfinished folders from others
_DOCUMENTS = "documents"
_TOKENIZER = "tokenizer.json"
# Text encoded at once; the tokenizers library needs about 100 bytes a token.
_BATCH_CHARACTERS = 1 << 22
# Documents read at once: one by one is ten times slower, and each may be 1 MiB.
_READ = 64
# Of the text's bytes, the disk that documents and rows take, at most.
_DISK_PER_BYTE = 2


@dataclasses.dataclass(frozen=True)
class Settings:
  """What to prepare, and how.

  Attributes:
    text: Text files and folders.
    output: Folder to prepare.
    tokenizer: A tokenizer.json; None trains one on the train split.
    vocab_size: Vocabulary of a trained tokenizer.
    kind: Of a trained tokenizer, `bpe` or `wordpiece`.
    seq_len: Tokens in a row, T.
    packing: `stream`, `documents` or `chunks`.
    documents: Where a document ends: `auto`, `line` or `file`.
    boundary: Tokens around a document: `bos_eos`, `eos` or `none`.
    dev_share: Share of the documents held out, where there are no dev files.
    share: Share of the train documents to take, evenly spread.
    seed: Of the chunks' lengths.
  """

  text: tuple[str, ...]
  output: str
  tokenizer: str | None = None
  vocab_size: int = 16_000
  kind: str = "bpe"
  seq_len: int = 128
  packing: str = "stream"
  documents: str = "auto"
  boundary: str = "bos_eos"
  dev_share: float = 0.02
  share: float = 1.0
  seed: int = 0


@dataclasses.dataclass
class _Tally:
  """Counts what passes on the way to the rows."""

  documents: int = 0
  words: int = 0
  text_bytes: int = 0
  tokens: int = 0

  def encode(
    self, batches: Iterable[list[str]], vocabulary: tokenizer.Tokenizer
  ) -> Iterator:
    for batch in batches:
      self.documents += len(batch)
      self.words += sum(len(document.split()) for document in batch)
      self.text_bytes += sum(len(d.encode("utf-8")) for d in batch)
      yield from vocabulary.encode_batch(batch)

  def count(self, documents: Iterable) -> Iterator:
    for document in documents:
      self.tokens += len(document)
      yield document


def prepare(settings: Settings) -> rows.Manifest:
  """Prepares a folder, or finds it prepared already.

  Raises:
    UserError: The settings, the text or the folder will not do. Nothing
      half-written is left.
  """
  _check(settings)
  sources = text.find(settings.text)
  identity = _identity(settings, sources)
  output = pathlib.Path(settings.output)
  if (output / rows.MANIFEST).exists():
    manifest = rows.load_manifest(output)
    _check_same(output, manifest, identity)
    print(f"{output} is already prepared with these settings and this text")
    return manifest
  with _claimed(output, sources):
    return _write(settings, identity, output)


def _check(settings: Settings) -> None:
  smallest = 2 * packing.SHORTEST_CHUNK if settings.packing == "chunks" else 2
  if settings.seq_len < smallest:
    raise errors.UserError(
      f"seq_len {settings.seq_len} is too small: {settings.packing} packing "
      f"needs at least {smallest}"
    )
  if not 0 < settings.dev_share <= 0.5:
    raise errors.UserError(
      f"dev_share {settings.dev_share} must be above 0 and at most 0.5"
    )
  if not 0 < settings.share <= 1:
    raise errors.UserError(
      f"share {settings.share} must be above 0 and at most 1"
    )
  _check_choice("kind", settings.kind, tuple(tokenizer.KINDS))
  _check_choice("packing", settings.packing, PACKINGS)
  _check_choice("documents", settings.documents, tuple(text.RULES))
  _check_choice("boundary", settings.boundary, BOUNDARIES)
  if settings.tokenizer:
    _check_roles(settings, tokenizer.Tokenizer.load(settings.tokenizer))
  else:
    tokenizer.check_vocab_size(settings.vocab_size, settings.kind)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
  if value not in choices:
    raise errors.UserError(
      f"{name} {value!r} must be one of {' '.join(choices)}"
    )


def _check_roles(settings: Settings, vocabulary: tokenizer.Tokenizer) -> None:
  """Checks that a given tokenizer has the special tokens that packing puts."""
  needed = {
    "bos_id": settings.boundary == "bos_eos",
    "eos_id": settings.boundary != "none",
    "pad_id": settings.packing == "documents",
  }
  for role, used in needed.items():
    if used and getattr(vocabulary, role) is None:
      raise errors.UserError(
        f"{settings.tokenizer} has no {role[:3]} token, which boundary "
        f"{settings.boundary} with {settings.packing} packing puts; choose "
        f"others, or another tokenizer"
      )


def _identity(settings: Settings, sources: text.Sources) -> dict:
  """Describes all that the result depends on, as the manifest keeps it."""
  asked = dataclasses.asdict(settings)
  del asked["output"], asked["text"]
  if settings.tokenizer:
    asked["tokenizer"] = rows.sha256(settings.tokenizer)
    del asked["vocab_size"], asked["kind"]
  files = [
    {"split": split, "path": str(file), **_fingerprint(file)}
    for split in text.SPLITS
    for file in getattr(sources, split)
  ]
  return {"settings": asked, "sources": files}


def _fingerprint(file: pathlib.Path) -> dict:
  try:
    return {"bytes": file.stat().st_size, "sha256": rows.sha256(file)}
  except OSError as error:
    raise errors.UserError(
      f"cannot read {file}: {error.strerror}; check the file"
    ) from error


def _check_same(
  output: pathlib.Path, manifest: rows.Manifest, identity: dict
) -> None:
  there, asked = manifest.settings, identity["settings"]
  names = [*asked, *(name for name in there if name not in asked)]
  differ = [
    f"{name} {there.get(name)} there, {asked.get(name)} asked"
    for name in names
    if there.get(name) != asked.get(name)
  ]
  if _hashes(manifest.sources) != _hashes(identity["sources"]):
    differ.append("other text")
  if differ:
    raise errors.UserError(
      f"{output} is already prepared otherwise ({'; '.join(differ)}); choose "
      f"another --output"
    )


def _hashes(sources: list[dict]) -> list[tuple[str, str]]:
  return [(source["split"], source["sha256"]) for source in sources]


@contextlib.contextmanager
def _claimed(output: pathlib.Path, sources: text.Sources) -> Iterator[None]:
  """Holds a folder for one preparation, and clears it if that fails."""
  _check_output(output)
  _check_disk(output, sum(file.stat().st_size for file in sources.files))
  existed = output.exists()
  with _storage_errors(output):
    output.mkdir(parents=True, exist_ok=True)
    interrupted = (output / _MARKER).exists()
    (output / _MARKER).touch()
  with open(output / _MARKER) as marker:
    _lock(marker, output)
    if interrupted:
      print(f"{output} holds an interrupted preparation: starting it again")
      _clear(output)
    try:
      with _storage_errors(output):
        yield
    except BaseException:
      _clear(output)
      (output / _MARKER).unlink()
      if not existed:
        output.rmdir()
      raise


def _check_output(output: pathlib.Path) -> None:
  if output.exists() and not output.is_dir():
    raise errors.UserError(f"output {output} is a file; choose a folder")
  ours = (output / _MARKER).exists()
  if output.is_dir() and any(output.iterdir()) and not ours:
    raise errors.UserError(
      f"output {output} is not empty, and is no unfinished preparation; "
      f"choose another --output"
    )


def _check_disk(output: pathlib.Path, text_bytes: int) -> None:
  parent = next(p for p in output.absolute().parents if p.exists())
  needed, free = _DISK_PER_BYTE * text_bytes, shutil.disk_usage(parent).free
  if free < needed:
    raise errors.UserError(
      f"{parent} has {free / 1e6:.0f} MB free and {output} may take "
      f"{needed / 1e6:.0f} MB; free some, or choose another --output"
    )


@contextlib.contextmanager
def _storage_errors(output: pathlib.Path) -> Iterator[None]:
  full = os.strerror(errno.ENOSPC)
  try:
    yield
  except (OSError, RuntimeError) as error:
    # array_record raises RuntimeError for what the system says.
    if isinstance(error, RuntimeError) and full not in str(error):
      raise
    reason = full if full in str(error) else error.strerror
    raise errors.UserError(
      f"cannot write {output}: {reason}; make room, or choose another --output"
    ) from error


def _lock(marker, output: pathlib.Path) -> None:
  try:
    fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise errors.UserError(
      f"another process is preparing {output}; wait for it"
    ) from error


def _clear(output: pathlib.Path) -> None:
  """Deletes what a preparation writes, and nothing else."""
  shutil.rmtree(output / _DOCUMENTS, ignore_errors=True)
  names = [
    _TOKENIZER,
    rows.MANIFEST,
    *(f"{s}.array_record" for s in text.SPLITS),
  ]
  for name in names:
    (output / name).unlink(missing_ok=True)


def _write(
  settings: Settings, identity: dict, output: pathlib.Path
) -> rows.Manifest:
  begin = time.monotonic()
  files = len(identity["sources"])
  with _stage(f"documents of {files} {'file' if files == 1 else 'files'}"):
    sources = _documents(settings, output)
  with _stage("tokenizer"):
    vocabulary = _tokenizer(settings, sources["train"])
    (output / _TOKENIZER).write_text(vocabulary.to_json(), "utf-8")
  splits = {}
  for split in text.SPLITS:
    with _stage(f"rows of {split}"):
      splits[split] = _rows(settings, vocabulary, sources[split], output, split)
  manifest = rows.Manifest(
    **identity,
    tokenizer=_about(vocabulary),
    seq_len=settings.seq_len,
    dtype=rows.token_dtype(vocabulary.vocab_size),
    segmented=settings.packing != "stream",
    splits=splits,
  )
  manifest.save(output)
  print(summary(manifest, output, time.monotonic() - begin))
  return manifest


@contextlib.contextmanager
def _stage(name: str) -> Iterator[None]:
  begin = time.monotonic()
  yield
  print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)


def _about(vocabulary: tokenizer.Tokenizer) -> dict:
  digest = hashlib.sha256(vocabulary.to_json().encode("utf-8")).hexdigest()
  return {"sha256": digest, "vocab_size": vocabulary.vocab_size}


def _documents(settings: Settings, output: pathlib.Path) -> dict[str, Sequence]:
  """Writes the documents, and opens each split of them."""
  from antlm_jax.data import babylm  # slow to import: not for --help

  config = babylm.TextConfig(
    name="text",
    paths=tuple(settings.text),
    documents=settings.documents,
    dev_share=settings.dev_share,
    share=settings.share,
  )
  builder = babylm.build(output / _DOCUMENTS, config)
  counts = {
    split: builder.info.splits[split].num_examples for split in text.SPLITS
  }
  if not sum(counts.values()):
    raise errors.UserError(
      f"no words in {' '.join(settings.text)}; give files with text"
    )
  for split, count in counts.items():
    if not count:
      raise errors.UserError(
        f"no document for {split} in {' '.join(settings.text)}; give more "
        f"text, or try --documents=line"
      )
  return {split: builder.as_data_source(split) for split in text.SPLITS}


def _tokenizer(settings: Settings, documents: Sequence) -> tokenizer.Tokenizer:
  if settings.tokenizer:
    return tokenizer.Tokenizer.load(settings.tokenizer)
  texts = (document for batch in _batches(documents) for document in batch)
  return tokenizer.Tokenizer.train(texts, settings.vocab_size, settings.kind)


def _rows(
  settings: Settings,
  vocabulary: tokenizer.Tokenizer,
  documents: Sequence,
  output: pathlib.Path,
  split: str,
) -> rows.Split:
  """Encodes, packs and writes the documents of a split."""
  tally = _Tally()
  encoded = tally.encode(_batches(documents, split), vocabulary)
  bos_id = vocabulary.bos_id if settings.boundary == "bos_eos" else None
  eos_id = vocabulary.eos_id if settings.boundary != "none" else None
  bounded = tally.count(packing.bound(encoded, bos_id, eos_id))
  blocks = _pack(settings, vocabulary, bounded)
  path = output / f"{split}.array_record"
  dtype = rows.token_dtype(vocabulary.vocab_size)
  count = rows.write(path, blocks, dtype, settings.packing != "stream")
  if not count:
    raise errors.UserError(
      f"the {split} split has {tally.tokens} tokens, less than a row of "
      f"{settings.seq_len}; give more text or a smaller --seq_len"
    )
  spare = count * settings.seq_len - tally.tokens
  return rows.Split(
    rows=count,
    **dataclasses.asdict(tally),
    dropped=max(-spare, 0),
    padding=max(spare, 0),
    file=path.name,
    bytes=path.stat().st_size,
    sha256=rows.sha256(path),
  )


def _pack(
  settings: Settings, vocabulary: tokenizer.Tokenizer, documents: Iterable
) -> Iterator[packing.Block]:
  if settings.packing == "chunks":
    return packing.chunks(documents, settings.seq_len, settings.seed)
  if settings.packing == "documents":
    return packing.documents(documents, settings.seq_len, vocabulary.pad_id)
  return packing.stream(documents, settings.seq_len)


def _batches(documents: Sequence, label: str = "") -> Iterator[list[str]]:
  """Yields documents in lists of `_BATCH_CHARACTERS`, with a progress bar."""
  batch, size = [], 0
  # disable=None shows the bar on a terminal only.
  bar = tqdm.tqdm(total=len(documents), desc=label, leave=False, disable=None)
  with bar:
    for first in range(0, len(documents), _READ):
      indices = range(first, min(first + _READ, len(documents)))
      read = documents.__getitems__(indices)
      batch += [example["text"].decode("utf-8") for example in read]
      size += sum(map(len, batch[-len(read) :]))
      bar.update(len(read))
      if size >= _BATCH_CHARACTERS:
        yield batch
        batch, size = [], 0
  yield batch


def summary(
  manifest: rows.Manifest, output: pathlib.Path, seconds: float
) -> str:
  """Says in a few lines what was prepared."""
  lines = [_split_summary(*item, manifest) for item in manifest.splits.items()]
  lines.append(
    f"vocabulary {manifest.tokenizer['vocab_size']:,}, rows of "
    f"{manifest.seq_len} tokens; {output} ready in {seconds:.0f} s"
  )
  return "\n".join(lines)


def _split_summary(
  name: str, split: rows.Split, manifest: rows.Manifest
) -> str:
  padding = split.padding / (split.rows * manifest.seq_len)
  return (
    f"{name}: {split.documents:,} documents, {split.words:,} words, "
    f"{split.tokens:,} tokens ({split.tokens / split.words:.2f} per word, "
    f"{split.text_bytes / split.tokens:.2f} bytes each), {split.rows:,} rows, "
    f"{split.dropped:,} tokens dropped, {padding:.1%} padding"
  )


def _parser() -> cli.Parser:
  parser = cli.Parser(
    prog="python -m antlm_jax.prepare",
    description="Turns text into documents, a tokenizer and packed rows.",
  )
  parser.add_argument(
    "--text",
    nargs="+",
    action="extend",
    required=True,
    metavar="PATH",
    help="text files or folders: BabyLM's *.train and *.dev, or *.txt",
  )
  parser.add_argument(
    "--output", type=cli.here, required=True, help="folder to prepare"
  )
  parser.add_argument(
    "--tokenizer", help="a tokenizer.json; without, one is trained"
  )
  options = {
    "vocab_size": "vocabulary of the trained tokenizer",
    "kind": "of the trained tokenizer",
    "seq_len": "tokens in a row",
    "packing": "documents one after the other; each in a segment of its own; "
    "or the stream in random chunks, two a row (arXiv 2507.00994)",
    "documents": "what ends one: blank lines, headings or 64 KiB; each line; "
    "or each file",
    "boundary": "tokens around a document: <s> and </s>, </s> after, or none",
    "dev_share": "share of the documents held out if there are no dev files",
    "share": "share of the train documents to take, evenly spread",
    "seed": "of the chunks' lengths",
  }
  choices = {
    "kind": tuple(tokenizer.KINDS),
    "packing": PACKINGS,
    "documents": tuple(text.RULES),
    "boundary": BOUNDARIES,
  }
  defaults = Settings((), "")
  for name, about in options.items():
    default = getattr(defaults, name)
    parser.add_argument(
      f"--{name}",
      type=type(default),
      default=default,
      choices=choices.get(name),
      help=about,
    )
  return parser


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  asked = vars(_parser().parse_args(argv))
  prepare(Settings(**asked | {"text": tuple(asked["text"])}))


if __name__ == "__main__":
  cli.run(main)
