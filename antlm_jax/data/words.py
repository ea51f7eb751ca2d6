"""Words of a vocabulary: tokens that begin, end or continue a word.

Most scripts put spaces between words, and tokens have a sign for them. Thai,
Chinese and Japanese do not. There each token is a word, as far as it begins at
a character, and a word of another script ends. All this follows from the bytes
of single tokens, because objectives see only ids.
"""

import unicodedata
from collections.abc import Mapping

# Code points of scripts without spaces, and of their punctuation.
_UNSPACED = (
  (0x0E00, 0x109F),  # Thai, Lao, Tibetan, Myanmar
  (0x1780, 0x17FF),  # Khmer
  (0x1950, 0x19FF),  # Tai Le, New Tai Lue
  (0x1A20, 0x1AAF),  # Tai Tham
  (0x1B00, 0x1B7F),  # Balinese
  (0x2E80, 0xA4CF),  # Han, kana, bopomofo, Yi
  (0xA980, 0xA9FF),  # Javanese, Myanmar
  (0xAA60, 0xAADF),  # Myanmar, Tai Viet
  (0xF900, 0xFAFF),  # Han
  (0xFE30, 0xFE4F),  # upright punctuation
  (0xFF00, 0xFF9F),  # wide forms, half-width kana
  (0x1AFF0, 0x1B2FF),  # kana
  (0x20000, 0x3FFFF),  # Han
)
# Signs for space, newline, tab and carriage return before a word, in byte-level
# BPE, SentencePiece and GPT-BERT.
SPACES = ("Ġ", "Ċ", "ĉ", "č", "▁", "␣", "␤")
_LONG_WORDS = 24  # bytes of a word on average, if a text has few spaces
# Categories of characters that continue a word: marks, joiners, and letters
# that repeat or lengthen the one before (as in Japanese and Thai).
_CONTINUING = ("Mn", "Mc", "Me", "Cf", "Lm")


def note_of_words(size: int, count: int) -> str:
  """Returns a note on a text of `size` bytes if it has few spaces, or ""."""
  if size <= _LONG_WORDS * count:
    return ""
  return (
    f"note: this text has few spaces, so its {count:,} words are whole phrases:"
    " compare tokens or bytes, not words"
  )


def byte_signs() -> dict[str, int]:
  """Returns the byte of each sign of a byte-level vocabulary (GPT-2's)."""
  printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  unprinted = sorted({*range(256)} - {*printed})
  signs = {chr(byte): byte for byte in printed}
  return signs | {chr(256 + n): byte for n, byte in enumerate(unprinted)}


def token_bytes(token: str, signs: Mapping[str, int] | None) -> bytes:
  """Returns the UTF-8 bytes of a token, which may cut a character.

  `signs` are `byte_signs` if the vocabulary is byte-level, or else None. Tokens
  such as `<0xE4>` are a byte.
  """
  if signs and all(sign in signs for sign in token):
    return bytes(signs[sign] for sign in token)
  if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
    try:
      return bytes.fromhex(token[3:5])
    except ValueError:
      pass
  return token.encode("utf-8", "surrogatepass")


def begins_word(token: bytes) -> bool:
  """Whether a token begins with space, or a word of a script without spaces.

  If the token ends inside its first character, all characters that begin with
  its bytes must be of such a script.
  """
  if token[:1].isspace():  # a line end, to which SentencePiece gives no sign
    return True
  size = _character_size(token)
  if not size:
    return False
  if len(token) >= size:
    char = _char(token[:size])
    return is_unspaced(char) and not continues(token)
  # In UTF-8, some first bytes limit the second byte.
  second_bytes = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF)}
  second_bytes[0xF4] = (0x80, 0x8F)
  # Complete the token to the lowest and to the highest possible character.
  extremes = [*token], [*token]
  while len(extremes[0]) < size:
    limits = second_bytes.get(extremes[0][-1], (0x80, 0xBF))
    for extreme, limit in zip(extremes, limits, strict=True):
      extreme.append(limit)
  return _unspaced(*(_char(bytes(extreme)) for extreme in extremes))


def continues(token: bytes) -> bool:
  """Whether a token begins inside a character, or with a mark."""
  size = _character_size(token)
  if not size:
    return bool(token)
  if len(token) < size:
    return False
  return unicodedata.category(_char(token[:size])) in _CONTINUING


def ends_word(token: bytes) -> bool:
  """Whether a token ends with a whole character of a script without spaces.

  A space after other characters also ends a word, such as ".\\n" in Llama 3.
  """
  if token[-1:].isspace():
    return not token.isspace()
  for size in range(1, min(4, len(token)) + 1):
    if character_size := _character_size(token[-size:]):
      char = _char(token[-size:]) if character_size == size else "a"
      return is_unspaced(char)
  return False


def is_unspaced(char: str) -> bool:
  """Whether a character is of a script without spaces between words."""
  return _unspaced(char, char)


def _character_size(token: bytes) -> int:
  """Returns the first character's size; 0 if the token begins inside it."""
  if not token or 0x80 <= token[0] < 0xC2 or token[0] > 0xF4:
    return 0
  return 1 + sum(token[0] >= lead for lead in (0xC2, 0xE0, 0xF0))


def _char(sequence: bytes) -> str:
  """Decodes a character; bytes that are not UTF-8 count as a letter."""
  try:
    return sequence.decode()
  except UnicodeDecodeError:
    return "a"


def _unspaced(low: str, high: str) -> bool:
  """Whether one range of `_UNSPACED` has all characters from low to high."""
  return any(a <= ord(low) <= ord(high) <= b for a, b in _UNSPACED)
