"""Subword tokenizers: byte-level, trained here, or any tokenizer.json."""

import collections
import contextlib
import functools
import itertools
import json
import os
import re
import string
import types
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import (
  Regex,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
  trainers,
)

from antlm_jax.data import tokenizer_json, words
from antlm_jax.data.tokenizer_json import AROUND_NAMES, TokenizerJson
from antlm_jax.errors import UserError
from antlm_jax.objectives.corruption import WordTokens
from antlm_jax.runtime import files

Spans = list[tuple[int, int]]

MASK = "<mask>"
_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", MASK)
# Fields of transformers' files that name a role's token, by preference.
_FIELDS = {
  "pad": ("pad_token",),
  "bos": ("bos_token", "cls_token"),
  "eos": ("eos_token", "sep_token"),
  "mask": ("mask_token",),
}
_TOKEN_FLAGS = "single_word", "lstrip", "rstrip", "normalized", "special"
# Fields of transformers' files that set BERT's normalizer.
_BERT_FIELDS = {
  "do_lower_case": "lowercase",
  "strip_accents": "strip_accents",
  "tokenize_chinese_chars": "handle_chinese_chars",
}
_GENERIC = "PreTrainedTokenizer", "TokenizersBackend"  # the latter from 5 on
_SIDE_FILES = "tokenizer_config.json", "special_tokens_map.json"
# Usual names of each role's token, GPT-BERT's last, and how they are written.
_NAMES = {
  "pad": ("pad", "␢"),
  "bos": ("s", "bos", "begin_of_text", "startoftext", "cls", "␂"),
  "eos": ("/s", "eos", "end_of_text", "endoftext", "sep", "␃"),
  "mask": ("mask", "␥"),
}
_FORMS = "<{}>", "[{}]", "<|{}|>"


def _spellings(names: Iterable[str]) -> tuple[str, ...]:
  """Returns names as vocabularies write them, such as `<mask>`, `[MASK]`."""
  return tuple(
    form.format(cased)
    for name in names
    for form in (_FORMS if name.isascii() else ("{}",))
    for cased in dict.fromkeys((name, name.upper()))
  )


MASKS = _spellings(_NAMES["mask"])
_OTHERS = _spellings(("unk", "cls", "sep"))
# Special tokens by kind; WordPiece has one for words over 100 bytes.
KINDS = {"bpe": _SPECIAL_TOKENS, "wordpiece": (*_SPECIAL_TOKENS, "<unk>")}
_ALPHABET_TOKENS = KINDS["wordpiece"]
_KMER = re.compile(r"kmer:([2-9]|[12]\d|3[0-2])")
# Merges settle long before this much text (characters, about 50M words), and
# the trainer's memory stays under 1 GB.
_TRAINING_CHARACTERS = 1 << 28
# The same limit for text with few spaces. Its words are whole phrases, and the
# trainer needs about 40 bytes of memory for each of their bytes.
_TRAINING_PHRASES = 1 << 23
# Text from which an alphabet and its k-mers are counted.
_TRAINING_LETTERS = 1 << 26
# Longest word, in bytes, that WordPiece reads and that trainers see. Training
# takes time proportional to the square of a word's length.
_LONGEST_WORD = 100
# Signs of the bytes 0 to 255 in a byte-level vocabulary. A word is cut where no
# byte 0x80 to 0xBF follows, which are those inside a character.
_SIGNS = {byte: sign for sign, byte in words.byte_signs().items()}
_INSIDE = "".join(_SIGNS[byte] for byte in range(0x80, 0xC0))
_SHORT_WORDS = f".{{1,{_LONGEST_WORD}}}(?![{_INSIDE}])"
# The first of ten digits: 0, Arabic, Persian, nine Indian scripts, Thai, Lao,
# Tibetan, Burmese, Khmer, Mongolian, and the wide 0 of Chinese and Japanese.
_ZEROS = (0x30, 0x660, 0x6F0, *range(0x966, 0xD67, 0x80), 0xE50, 0xED0, 0xF20)
_ZEROS += (0x1040, 0x17E0, 0x1810, 0xFF10)
# A space between two characters of Chinese or Japanese, which have none.
_UNSPACED = r"\u2e80-\ua4cf\uf900-\ufaff\uff01-\uff9f\U00020000-\U0003ffff"
_FALSE_SPACE = re.compile(rf"(?<=[{_UNSPACED}]) (?=[{_UNSPACED}])")
# Ids may have gaps: at most this many, and as many as there are tokens.
_MOST_GAPS = 1 << 16


class Tokenizer:
  """Encodes text as token ids, and decodes it.

  Attributes:
    pad_id, bos_id, eos_id, mask_id: Ids of the special tokens, or None.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    names: Mapping[str, Any] = types.MappingProxyType({}),
  ):
    """Takes the library's tokenizer, which it changes.

    A role's token is that of the post-processor, before or after a text. Else
    it is that of the files, then that with a usual name.

    Args:
      backend: The tokenizer.
      names: Fields of transformers' files, such as `bos_token`.
    """
    self._backend = backend
    # Foreign files may ask for padding and truncation.
    backend.no_padding()
    backend.no_truncation()
    if getattr(backend.model, "dropout", None):  # of merges, to train a model
      backend.model.dropout = None
    backend.encode_special_tokens = True  # "</s>" in a text is text
    self._apply_files(names)
    self._check_ids()
    stated = self._recorded_ids() or self._stated_ids(names)
    if names and stated != self._stated_ids({}):
      self._record(stated)
    self.pad_id, self.bos_id, self.eos_id, self.mask_id = (
      self._find(role, stated) for role in _NAMES
    )
    self._flag()

  @classmethod
  def train(
    cls, texts: Iterable[str], vocab_size: int, kind: str = "bpe"
  ) -> "Tokenizer":
    """Trains a tokenizer. The same text gives the same tokenizer.

    Ids are `<pad> <s> </s> <mask>`, the 256 bytes, then merged pairs. Little
    text gives fewer than `vocab_size`, because pairs must be seen twice. The
    kind `bpe` encodes by merging pairs in order (BabyLlama). `wordpiece`
    encodes the longest piece first and digits singly, and has `<unk>`
    (LTG-BERT). LTG-BERT asks for pairs seen ten times, which is the same with
    much text. Words of more than 100 bytes are cut between characters, in `bpe`
    only to train it.

    The kind `characters` has a token for each character, after `<unk>`, the
    most frequent first. `kmer:6` also has the most frequent sequences of six
    letters, as of DNA. These do not overlap: a text is cut after every sixth
    letter, and a sequence without a token is read letter by letter.
    """
    if kind not in KINDS:
      return cls._train_alphabet(texts, vocab_size, letters_of_kind(kind))
    # With a space before it, the first word has the token it has elsewhere.
    split = pre_tokenizers.ByteLevel(add_prefix_space=True)
    cut = pre_tokenizers.Split(Regex(_SHORT_WORDS), "isolated")
    options = {
      "vocab_size": vocab_size,
      "min_frequency": 2,
      "special_tokens": list(KINDS[kind]),
      "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
      "show_progress": False,
    }
    if kind == "bpe":
      model = models.BPE()
      trainer = trainers.BpeTrainer(**options)
    else:
      model = models.WordPiece(unk_token="<unk>")
      # LTG-BERT's `Digits` would take bytes of letters for ² ³ ¹ ¼ ½ ¾.
      digits = pre_tokenizers.Split(Regex(_digits()), "isolated")
      split = pre_tokenizers.Sequence([split, digits, cut])
      trainer = trainers.WordPieceTrainer(
        continuing_subword_prefix="", **options
      )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, cut])
    # Unlike BabyLlama's NFKC, NFC does not rewrite characters (½ to 1⁄2), so
    # decoding returns the encoded text.
    backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(_training_texts(texts), trainer)
    backend.pre_tokenizer = split
    return cls(backend)

  @classmethod
  def _train_alphabet(
    cls, texts: Iterable[str], vocab_size: int, length: int
  ) -> "Tokenizer":
    """Trains a tokenizer of characters and sequences of `length` letters."""
    sequence = rf"\S{{{length}}}"
    characters = collections.Counter()
    sequences = collections.Counter()
    left = _TRAINING_LETTERS
    for text in texts:
      characters.update(text)
      if length > 1:
        sequences.update(re.findall(sequence, text))
      left -= len(text)
      if left < 0:
        break
    tokens = [*_ALPHABET_TOKENS]
    for counts in (characters, sequences):
      tokens += sorted(counts, key=lambda token: (-counts[token], token))
    vocab = {token: index for index, token in enumerate(tokens[:vocab_size])}
    # Other characters, such as those at a mask, divide sequences.
    known = sorted(vocab.keys() & characters)
    letters = "".join("".join(known).split())
    pattern = "[\\s\\S]"
    if length > 1 and letters:
      pattern = f"[{re.escape(letters)}]{{{length}}}|{pattern}"
    # It takes a whole sequence that has a token, else its characters.
    model = models.BPE(
      vocab=vocab, merges=[], ignore_merges=True, unk_token="<unk>"
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([*_ALPHABET_TOKENS])
    return cls(backend)

  @classmethod
  def load(cls, path: str | os.PathLike) -> "Tokenizer":
    """Reads a `tokenizer.json`, with transformers' files in its folder.

    Raises:
      UserError: It cannot be read, or is not a tokenizer.
    """
    if not os.fspath(path).endswith(".json"):
      raise UserError(
        f"{path} is not a tokenizer.json: write one for its model with"
        " transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained("
        "FOLDER), and give FOLDER/tokenizer.json"
      )
    text = files.read_text(path, "the tokenizer")
    names = {}
    for file in reversed(side_files(path)):
      fields = files.read_json(file, "the tokenizer's")
      names |= {k: v for k, v in fields.items() if v or k not in names}
    try:
      return cls.from_json(text, names)
    except ValueError as error:
      raise UserError(
        f"{path} is not a tokenizer.json that antlm_jax can use:"
        f" {str(error).splitlines()[0]}"
      ) from error

  @classmethod
  def from_json(
    cls, text: str, names: Mapping[str, Any] = types.MappingProxyType({})
  ) -> "Tokenizer":
    """Makes a tokenizer from `to_json`'s text, with `names` as for the class.

    Raises:
      ValueError: It is not such a text.
    """
    with _library_errors(ValueError, ""):
      own_steps = tokenizer_json.without_stand_ins(text)
      backend = tokenizers.Tokenizer.from_str(own_steps)
    return cls(backend, names)

  @classmethod
  def wrap(cls, tokenizer: Any) -> "Tokenizer":
    """Copies a tokenizer of the libraries tokenizers or transformers.

    Raises:
      UserError: It is neither.
    """
    if isinstance(tokenizer, cls):
      return tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, tokenizers.Tokenizer):
      raise UserError(
        f"tokenizer is a {type(tokenizer).__name__}: give a path, or a fast"
        " tokenizer of antlm_jax, tokenizers or transformers"
      )
    names = getattr(tokenizer, "special_tokens_map", {})
    return cls.from_json(backend.to_str(), names)

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

  def without_special(self, first: int) -> "Tokenizer":
    """Returns a tokenizer without the added special tokens from an id on."""
    spec = TokenizerJson.parse(self.to_json()).without_special(first)
    return Tokenizer.from_json(spec.to_text())

  def encode(self, text: str) -> np.ndarray:
    """Encodes text, without special tokens, as int32 `[n]`."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Encodes texts on all cores, without special tokens, as int32 `[n]`."""
    encode = self._encoder.encode_batch_fast
    with _library_errors(UserError, _NO_TOKEN):
      encodings = encode(list(texts), add_special_tokens=False)
    return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

  def encode_offsets(self, text: str) -> tuple[np.ndarray, Spans]:
    """Encodes text as `encode` does, and finds the characters of each token.

    Returns:
      ids int32 `[n]`, and n spans (start, end) of characters, without the
      space that a token may begin with. A space that the tokenizer adds has an
      empty span. Marks that the tokenizer joins with a letter, or drops after
      it, belong to its token.
    """
    with _library_errors(UserError, _NO_TOKEN):
      encoding = self._untrimmed.encode(text, add_special_tokens=False)
    spans = _offset_spans(text, encoding.tokens, encoding.offsets)
    return np.asarray(encoding.ids, np.int32), spans

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Returns the text of ids, without a space added before the first word.

    A space is added to texts that begin with none. So one space alone before a
    text is dropped, and several are kept.
    """
    ids = [int(token) for token in ids]
    text = self._backend.decode(ids, skip_special_tokens=skip_special)
    if self._separates_tokens:
      text = _FALSE_SPACE.sub("", text)
    is_added = self._adds_space and not text.startswith("  ")
    return text.removeprefix(" ") if is_added else text

  @property
  def vocab_size(self) -> int:
    """The highest id + 1. Ids may have gaps."""
    return 1 + max(self._vocab.values())

  @functools.cached_property
  def unk_id(self) -> int | None:
    """Id of the token for unknown characters, or None."""
    model = json.loads(self.to_json())["model"]
    if "unk_id" in model:
      return model["unk_id"]
    return self._backend.token_to_id(model.get("unk_token") or "")

  @property
  def mask_token(self) -> str | None:
    """The tokenizer's own name of the mask."""
    return None if self.mask_id is None else self.token(self.mask_id)

  def token(self, index: int) -> str | None:
    """Returns the token of an id, as in the vocabulary; None if it has none."""
    return self._backend.id_to_token(index)

  @functools.cached_property
  def frame(self) -> tuple[list[int], list[int]]:
    """Special tokens that the tokenizer itself adds before and after a text.

    Raises a UserError if it has no token for any text.
    """
    # Not each vocabulary has an "a", such as one of DNA.
    tokens = (self.decode([index]) for index in self._vocab.values())
    for text in itertools.chain("a", tokens):
      with contextlib.suppress(UserError), _library_errors(UserError, ""):
        if not self._backend.encode(text, add_special_tokens=False).ids:
          continue
        encoding = self._backend.encode(text, add_special_tokens=True)
        inside = np.flatnonzero(np.asarray(encoding.special_tokens_mask) == 0)
        ids = encoding.ids
        return ids[: inside[0]], ids[inside[-1] + 1 :]
    raise UserError("the tokenizer has no token for any text")

  @functools.cached_property
  def special(self) -> np.ndarray:
    """Whether each token is a special one, bool `[V]`."""
    special = np.zeros(self.vocab_size, bool)
    for index, token in self._backend.get_added_tokens_decoder().items():
      special[index] = token.special
    return special

  @functools.cached_property
  def special_names(self) -> dict[int, str]:
    """Names of the special tokens by id."""
    ids = np.flatnonzero(self.special).tolist()
    return {index: self.token(index) for index in ids}

  @functools.cached_property
  def word_tokens(self) -> WordTokens:
    """The tokens that begin, end or continue a word."""
    model = self._backend.model
    special = self.special
    # WordPiece's `##` marks pieces inside words, and `</w>` in BPE those that
    # end them. Others mark those that begin, and WordLevel's are whole words.
    inside = getattr(model, "continuing_subword_prefix", None) or ""
    suffix = getattr(model, "end_of_word_suffix", None)
    spaces = inside or words.SPACES
    word_level = isinstance(model, models.WordLevel)
    if not word_level and not suffix and not self._marks_words(spaces):
      spaces = tuple(string.whitespace)
      word_level = not self._marks_words(spaces)
    signs = words.byte_signs() if self._byte_level else None
    out = np.stack([special, special, np.zeros_like(special)])
    for token, index in self._vocab.items():
      if special[index]:
        continue
      marked = token.startswith(spaces)
      parts = words.token_bytes(token.removeprefix(inside), signs)
      begins = word_level or marked != bool(inside) or words.begins_word(parts)
      ends = words.ends_word(parts) or (bool(suffix) and token.endswith(suffix))
      out[:, index] = begins, ends, not begins and words.continues(parts)
    return WordTokens(*out)

  def _marks_words(self, signs: str | tuple[str, ...]) -> bool:
    """Whether any token that is not special begins with a sign."""
    return any(
      token.startswith(signs) and not self.special[index]
      for token, index in self._vocab.items()
    )

  @functools.cached_property
  def _byte_level(self) -> bool:
    """Whether the vocabulary's tokens are made of signs of bytes."""
    spec = json.loads(self.to_json())
    parts = "normalizer", "pre_tokenizer", "decoder"
    return '"ByteLevel"' in json.dumps([spec[name] for name in parts])

  @functools.cached_property
  def _encoder(self) -> tokenizers.Tokenizer:
    """The tokenizer that reads the names of special tokens as text."""
    # The library's flag concerns added tokens. A model may also have the names
    # in its vocabulary, and read them in a text.
    names = self.special_names
    ids = set()
    for form, name in itertools.product(AROUND_NAMES, names.values()):
      with contextlib.suppress(UserError), _library_errors(UserError, ""):
        text = form.format(name)
        ids.update(self._backend.encode(text, add_special_tokens=False).ids)
    named = ids & names.keys()
    # The unknown token is read slowly, and rarely needed.
    if not named or named == {self.unk_id}:
      return self._backend
    return TokenizerJson.parse(self.to_json()).without_names(names).build()

  @functools.cached_property
  def _untrimmed(self) -> tokenizers.Tokenizer:
    """The tokenizer without a post-processor, which may change offsets."""
    if self._encoder.post_processor is None:
      return self._encoder
    backend = tokenizers.Tokenizer.from_str(self._encoder.to_str())
    backend.post_processor = None
    backend.encode_special_tokens = True
    return backend

  @functools.cached_property
  def _vocab(self) -> dict[str, int]:
    return self._backend.get_vocab(with_added_tokens=True)

  @functools.cached_property
  def _separates_tokens(self) -> bool:
    """Whether decoding writes a space between tokens, as WordPiece does."""
    decoder = json.loads(self.to_json())["decoder"]
    return decoder is None or '"WordPiece"' in json.dumps(decoder)

  @functools.cached_property
  def _adds_space(self) -> bool:
    pre_tokenizer = json.loads(self.to_json())["pre_tokenizer"]
    return '"add_prefix_space": true' in json.dumps(pre_tokenizer)

  def _apply_files(self, names: Mapping[str, Any]) -> None:
    """Adds the tokens of transformers' files, and sets their normalizer.

    As transformers does. Raises a ValueError if a token gets another id.
    """
    added = names.get("added_tokens_decoder") or {}
    for index, token in sorted(added.items(), key=lambda item: int(item[0])):
      content = token["content"]
      if self._backend.token_to_id(content) is not None:
        continue
      flags = {name: token[name] for name in _TOKEN_FLAGS if name in token}
      self._backend.add_tokens([tokenizers.AddedToken(content, **flags)])
      actual = self._backend.token_to_id(content)
      if actual != int(index):
        raise ValueError(
          f"tokenizer_config.json gives {content!r:.40} the id {index}, which"
          f" is {actual} after the tokens of tokenizer.json"
        )
    normalizer = self._backend.normalizer
    # transformers' classes for any tokenizer.json leave the normalizer.
    tokenizer_class = names.get("tokenizer_class") or ""
    generic = tokenizer_class.startswith(_GENERIC)
    if isinstance(normalizer, normalizers.BertNormalizer) and not generic:
      for field, attribute in _BERT_FIELDS.items():
        if isinstance(names.get(field), bool):  # null is transformers' default
          setattr(normalizer, attribute, names[field])

  def _check_ids(self) -> None:
    """Raises a ValueError if an id is so far from the others that it is wrong.

    A model has an embedding for each id up to the highest.
    """
    token = max(self._vocab, key=self._vocab.get, default=None)
    if token is None:
      raise ValueError("it has no token")
    gaps = self.vocab_size - len(self._vocab)
    if gaps > max(_MOST_GAPS, len(self._vocab)):
      raise ValueError(
        f"the token {token!r:.40} has the id {self.vocab_size - 1}, but there"
        f" are only {len(self._vocab)} tokens: number them from 0"
      )

  def _flag(self) -> None:
    """Flags the tokens special that have the names of special tokens."""
    backend = self._backend
    added = backend.get_added_tokens_decoder()
    ids = {self.pad_id, self.bos_id, self.eos_id, self.mask_id}
    ids |= set(map(backend.token_to_id, _OTHERS))
    names = [
      backend.id_to_token(index)
      for index in sorted(ids - {None})
      if index not in added or not added[index].special
    ]
    backend.add_special_tokens(names)

  def _stated_ids(self, names: Mapping[str, Any]) -> dict[str, int | None]:
    """Returns the tokens that the post-processor and files state, by role.

    The beginning and the end of a text are None where files say that they have
    no token.
    """
    edges = [], []
    with contextlib.suppress(UserError):
      edges = self.frame
    edge_of = dict(zip(("bos", "eos"), edges, strict=True))
    stated = {}
    for role, fields in _FIELDS.items():
      values = [names[field] for field in fields if field in names]
      tokens = [v.get("content") if isinstance(v, dict) else v for v in values]
      ids = [
        self._backend.token_to_id(token)
        for token in tokens
        if isinstance(token, str)
      ]
      if len(edge_of.get(role, [])) == 1:
        ids.insert(0, *edge_of[role])
      ids = [index for index in ids if index is not None]
      if ids:
        stated[role] = ids[0]
      elif role in edge_of and tokens and not any(tokens):
        stated[role] = None
    # Where the end of a text pads as well, it is no padding in training.
    if stated.get("pad") in (stated.get("bos"), stated.get("eos")):
      stated.pop("pad", None)
    return stated

  def _record(self, stated: Mapping[str, int | None]) -> None:
    """Records the tokens of roles in a post-processor that does nothing.

    So a tokenizer.json of any program keeps them without other files.
    """
    tokens = {
      role: [] if index is None else [index] for role, index in stated.items()
    }
    record = processors.TemplateProcessing(
      single="$A",
      pair="$A $B:1",
      special_tokens=[
        {"id": role, "ids": ids, "tokens": list(map(self.token, ids))}
        for role, ids in tokens.items()
      ],
    )
    post_processor = self._backend.post_processor
    steps = [record]
    if post_processor is not None:
      steps.append(post_processor)
    self._backend.post_processor = processors.Sequence(steps)

  def _recorded_ids(self) -> dict[str, int | None]:
    """Returns the tokens that `_record` recorded by role, or none."""
    if self._backend.post_processor is None:
      return {}
    fields = json.loads(self._backend.post_processor.__getstate__())
    first = next(iter(fields.get("processors", [])), {})
    tokens = first.get("special_tokens", {})
    if not tokens or not {*tokens} <= {*_FIELDS}:
      return {}
    ids = {role: next(iter(tokens[role]["ids"]), None) for role in tokens}
    return {
      role: index
      for role, index in ids.items()
      if index is None or self.token(index) is not None
    }

  def _find(self, role: str, stated: Mapping[str, int | None]) -> int | None:
    """Returns a role's token: the stated one, or that of a usual name."""
    if role in stated:
      return stated[role]
    ids = map(self._backend.token_to_id, _spellings(_NAMES[role]))
    candidates = [index for index in ids if index is not None]
    # If any token has the flag of special tokens, tokens without it are text,
    # as HTML's <s> in Gemma's vocabulary.
    added = self._backend.get_added_tokens_decoder()
    special = {index for index, token in added.items() if token.special}
    flagged = [i for i in candidates if i in special or not special]
    return next(iter(flagged), None)


def letters_of_kind(kind: str) -> int:
  """Returns the letters of the longest token of `characters` or `kmer:K`.

  Raises a UserError if there is no such kind of tokenizer.
  """
  if kind == "characters":
    return 1
  if not (match := _KMER.fullmatch(kind)):
    raise UserError(
      f"unknown kind {kind!r}: write {', '.join(KINDS)}, characters or kmer:K"
      " with 2 to 32 letters, such as kmer:6"
    )
  return int(match[1])


def side_files(path: str | os.PathLike) -> list[str]:
  """Returns the files next to a tokenizer.json that name special tokens."""
  folder, name = os.path.split(path)
  paths = [os.path.join(folder, file) for file in _SIDE_FILES]
  return [p for p in paths if name == "tokenizer.json" and os.path.isfile(p)]


_NO_TOKEN = (
  "the tokenizer cannot encode a text, for it has no token for unknown"
  " characters: "
)


@contextlib.contextmanager
def _library_errors(kind: type[Exception], begin: str) -> Iterator[None]:
  """Raises errors of the library, which are bare Exceptions, as `kind`."""
  try:
    yield
  except Exception as error:
    if type(error) is not Exception:
      raise
    raise kind(f"{begin}{error}") from error


def _offset_spans(text: str, tokens: Sequence[str], offsets: Spans) -> Spans:
  """Returns the spans of `encode_offsets` from those of the library."""
  spans = []
  after = len(text)
  for i, (begin, end) in reversed([*enumerate(offsets)]):
    piece = text[begin:end]
    before = offsets[i - 1][1] if i else 0
    word = piece.lstrip()
    start = end - len(word) if word else begin
    if word and tokens[i] in words.SPACES and tokens[i] != piece:
      # An added space has the offsets of a character next to it. Its span is
      # empty, unless the character has tokens on both sides of the space.
      if before <= begin:
        end = start
      elif after >= end:
        start = end
    while word and start < end < after and _joins(text[start:end], text[end]):
      end += 1
    spans.append((start, end))
    after = begin if start < end else after
  # If a space is added after a letter, it follows the letter's marks.
  ends = itertools.accumulate((end for _, end in reversed(spans)), max)
  return [
    span if span[0] < span[1] else (max(span[0], end),) * 2
    for span, end in zip(reversed(spans), ends, strict=True)
  ]


def _joins(piece: str, char: str) -> bool:
  """Whether a normalizer may join a character with a piece, or drop it there.

  It is a mark or a sign without width, or part of a letter such as a Korean
  syllable.
  """
  if unicodedata.category(char) in ("Mn", "Mc", "Me", "Cf"):
    return True
  alone = unicodedata.normalize("NFKC", piece)
  joined = unicodedata.normalize("NFKC", piece + char)
  return len(joined) <= len(alone)


def _digits() -> str:
  """Returns a regular expression of a digit, in signs of bytes."""
  lasts = {}  # of the characters that share all bytes but the last
  for code in (zero + n for zero in _ZEROS for n in range(10)):
    *lead, last = (_SIGNS[byte] for byte in chr(code).encode())
    lasts.setdefault("".join(lead), []).append(last)
  return "|".join(f"{lead}[{''.join(ends)}]" for lead, ends in lasts.items())


def _training_texts(texts: Iterable[str]) -> Iterator[str]:
  """Yields texts until training has enough characters."""
  characters = _TRAINING_CHARACTERS
  phrases = _TRAINING_PHRASES
  for text in texts:
    if characters <= 0:
      return
    if len(text) > 32 * (1 + text.count(" ") + text.count("\n")):
      phrases -= len(text)
      if phrases < 0:
        continue
    characters -= len(text)
    yield text
