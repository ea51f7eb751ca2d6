"""Subword tokenizers: byte-level, trained here, or any tokenizer.json."""

import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from antlm_jax.data import mask_words
from antlm_jax.errors import UserError
from antlm_jax.runtime import files

Spans = list[tuple[int, int]]

MASK = "<mask>"
_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", MASK)
# Special tokens by kind; WordPiece needs one for words over 100 bytes.
KINDS = {"bpe": _SPECIAL_TOKENS, "wordpiece": (*_SPECIAL_TOKENS, "<unk>")}
# Signs for space, newline, tab and carriage return before a word, in byte-level
# BPE, SentencePiece and GPT-BERT.
_SPACES = ("Ġ", "Ċ", "ĉ", "č", "▁", "␣", "␤")
# Merges settle long before this much text (characters, about 50M words), and
# the trainer's memory stays under 1 GB.
_TRAINING_CHARACTERS = 1 << 28
# The same limit for text with few spaces. Its words are whole phrases, and the
# trainer needs about 40 bytes of memory for each of their bytes.
_TRAINING_PHRASES = 1 << 23


class Tokenizer:
  """Encodes text as token ids, and decodes it.

  Attributes:
    pad_id, bos_id, eos_id, mask_id: Ids of the special tokens, or None.
  """

  def __init__(self, backend: tokenizers.Tokenizer):
    self._backend = backend
    # Foreign files may ask for padding and truncation.
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True  # "</s>" in a text is text
    # Names in common vocabularies: ours first, GPT-BERT's last.
    self.pad_id = self._find("<pad>", "[PAD]", "<|pad|>", "␢")
    self.bos_id = self._find("<s>", "[CLS]", "<bos>", "<|begin_of_text|>", "␂")
    self.eos_id = self._find(
      "</s>", "[SEP]", "<eos>", "<|end_of_text|>", "<|endoftext|>", "␃"
    )
    self.mask_id = self._find(MASK, "[MASK]", "<|mask|>", "␥")

  @classmethod
  def train(
    cls, texts: Iterable[str], vocab_size: int, kind: str = "bpe"
  ) -> "Tokenizer":
    """Trains a tokenizer. The same text gives the same tokenizer.

    Ids are `<pad> <s> </s> <mask>`, the 256 bytes, then merged pairs. Little
    text gives fewer than `vocab_size`. The kind `bpe` encodes by merging pairs
    in order (BabyLlama: pairs seen at least twice). `wordpiece` encodes the
    longest piece first and digits one by one, and has `<unk>` (LTG-BERT: pairs
    seen at least ten times).
    """
    # With a space before it, the first word has the token it has elsewhere.
    split = pre_tokenizers.ByteLevel(add_prefix_space=True)
    options = {
      "vocab_size": vocab_size,
      "special_tokens": list(KINDS[kind]),
      "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
      "show_progress": False,
    }
    if kind == "bpe":
      model = models.BPE()
      trainer = trainers.BpeTrainer(min_frequency=2, **options)
    else:
      model = models.WordPiece(unk_token="<unk>")
      digits = pre_tokenizers.Digits(individual_digits=True)
      split = pre_tokenizers.Sequence([split, digits])
      options |= {"min_frequency": 10, "continuing_subword_prefix": ""}
      trainer = trainers.WordPieceTrainer(**options)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = split
    # Unlike BabyLlama's NFKC, NFC does not rewrite characters (½ to 1⁄2), so
    # decoding returns the encoded text.
    backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(_first(texts), trainer)
    return cls(backend)

  @classmethod
  def load(cls, path: str | os.PathLike) -> "Tokenizer":
    """Reads a `tokenizer.json`.

    Raises:
      UserError: It cannot be read, or is not a tokenizer.
    """
    text = files.read_text(path, "the tokenizer")
    try:
      return cls.from_json(text)
    except ValueError as error:
      raise UserError(
        f"{path} is not a tokenizer.json that antlm_jax can use:"
        f" {str(error).splitlines()[0]}"
      ) from error

  @classmethod
  def from_json(cls, text: str) -> "Tokenizer":
    """Makes a tokenizer from `to_json`'s text.

    Raises:
      ValueError: It is not such a text.
    """
    try:
      backend = tokenizers.Tokenizer.from_str(mask_words.removed(text))
    except Exception as error:
      if type(error) is not Exception:  # the library raises bare Exceptions
        raise
      raise ValueError(str(error)) from error
    return cls(backend)

  @classmethod
  def of_ids(cls, vocab_size: int) -> "Tokenizer":
    """Makes a tokenizer whose words are the ids `0` to `vocab_size - 1`."""
    words = {str(index): index for index in range(vocab_size)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return cls(backend)

  def to_json(self) -> str:
    return self._backend.to_str()

  def extended(self, tokens: Sequence[str]) -> "Tokenizer":
    """Returns a tokenizer with further special tokens, which get the next ids.

    Raises:
      UserError: It has one of them already, or ids without a token.
    """
    # A copy: the library's tokenizers change in place.
    backend = tokenizers.Tokenizer.from_str(self.to_json())
    backend.add_special_tokens(list(tokens))
    for index, token in enumerate(tokens, start=self.vocab_size):
      if backend.token_to_id(token) != index:
        raise UserError(
          f"cannot add {token} to the tokenizer as token {index}: it is there"
          f" already, or ids under {index} have no token; choose a tokenizer"
          " that has it"
        )
    return Tokenizer(backend)

  def encode(self, text: str) -> np.ndarray:
    """Encodes text, without special tokens, as int32 `[n]`."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Encodes texts on all cores, without special tokens, as int32 `[n]`."""
    encode = self._backend.encode_batch_fast
    found = encode(list(texts), add_special_tokens=False)
    return [np.asarray(encoding.ids, np.int32) for encoding in found]

  def encode_offsets(self, text: str) -> tuple[np.ndarray, Spans]:
    """Encodes text, and finds the characters of each token.

    Returns:
      ids int32 `[n]`, and n spans (start, end) of characters, without the
      space that a token may begin with.
    """
    # A space that the library adds would share the first character's span.
    lead = " " if self._adds_space and text[:1].strip() else ""
    text = lead + text
    encoding, spans = self._backend.encode(text, add_special_tokens=False), []
    for start, end in encoding.offsets:
      if token := text[start:end].lstrip():
        start = end - len(token)
      spans.append((max(start - len(lead), 0), max(end - len(lead), 0)))
    return np.asarray(encoding.ids, np.int32), spans

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Returns the text of ids, without a space added before the first word."""
    ids = [int(token) for token in ids]
    text = self._backend.decode(ids, skip_special_tokens=skip_special)
    return text.removeprefix(" ") if self._adds_space else text

  @property
  def vocab_size(self) -> int:
    """The highest id + 1. Ids may have gaps."""
    return 1 + max(self._vocab.values())

  @functools.cached_property
  def word_start(self) -> np.ndarray:
    """Whether each token begins a word, or is special, bool `[V]`."""
    # WordPiece's `##` marks pieces inside words. Others mark those that begin.
    inside = getattr(self._backend.model, "continuing_subword_prefix", None)
    begins = self.special.copy()
    for token, index in self._vocab.items():
      marked = token.startswith(inside or _SPACES)
      begins[index] |= marked != bool(inside)
    return begins

  @functools.cached_property
  def frame(self) -> tuple[list[int], list[int]]:
    """Special tokens that the tokenizer itself adds before and after a text."""
    found = self._backend.encode("a", add_special_tokens=True)
    text = [i for i, own in enumerate(found.special_tokens_mask) if not own]
    first, last = (text[0], text[-1]) if text else (len(found.ids),) * 2
    return found.ids[:first], found.ids[last + 1 :]

  @functools.cached_property
  def special(self) -> np.ndarray:
    """Whether each token is a special one, bool `[V]`."""
    special = np.zeros(self.vocab_size, bool)
    for index, token in self._backend.get_added_tokens_decoder().items():
      special[index] = token.special
    return special

  @functools.cached_property
  def _vocab(self) -> dict[str, int]:
    return self._backend.get_vocab(with_added_tokens=True)

  @functools.cached_property
  def _adds_space(self) -> bool:
    pre_tokenizer = json.loads(self.to_json())["pre_tokenizer"]
    return '"add_prefix_space": true' in json.dumps(pre_tokenizer)

  def _find(self, *names: str) -> int | None:
    ids = map(self._backend.token_to_id, names)
    return next((index for index in ids if index is not None), None)


def _first(texts: Iterable[str]) -> Iterator[str]:
  """Yields texts until training has enough characters."""
  characters, phrases = _TRAINING_CHARACTERS, _TRAINING_PHRASES
  for text in texts:
    if characters <= 0:
      return
    if len(text) > 32 * (1 + text.count(" ") + text.count("\n")):
      phrases -= len(text)
      if phrases < 0:
        continue
    characters -= len(text)
    yield text
