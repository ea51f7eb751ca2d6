"""Special tokens that are written in a text, such as `<|endoftext|>`.

They are text, and the tokenizer cuts them into pieces. Most of them were meant
as the ends of documents.
"""

import re
from collections.abc import Iterable, Iterator

from antlm_jax.data.readers import Document, Tally
from antlm_jax.data.tokenizer import Tokenizer

_COMMON = (
  r"<[|\uff5c][^\s|\uff5c<>]{1,40}[|\uff5c]>",
  r"</?s>",
  r"(?i:<(?:eos|bos|eot|eod|sep|cls)>|\[(?:eos|bos|eot|eod|sep|cls)\])",
  r"<(?:start|end)_of_\w+>",
  r"<doc(?= id=)|</doc>",
)
_END = re.compile("/|end|eo|sep", re.IGNORECASE)
_KEY = "mark: "  # how the names of counts begin
_SHOWN = 3


def marks_of(tokenizer: Tokenizer) -> re.Pattern:
  """Returns a pattern of common marks and of a tokenizer's special tokens."""
  names = tokenizer.special_names.values()
  return re.compile("|".join([*map(re.escape, names), *_COMMON]))


def counted(
  documents: Iterable[Document], marks: re.Pattern, tally: Tally
) -> Iterator[Document]:
  """Yields documents, and counts the marks in them."""
  for document in documents:
    tally.update(_KEY + match[0] for match in marks.finditer(document.text))
    yield document


def warning(tally: Tally, tokenizer: Tokenizer) -> str:
  """Returns a warning about the marks that a tally counts, or "" if none.

  It lists a few marks: first those that may end a document, each group from the
  most common on. It suggests the first mark as a separator.
  """
  counts = [
    (key.removeprefix(_KEY), count)
    for key, count in tally.most_common()
    if key.startswith(_KEY)
  ]
  if not counts:
    return ""
  eos_token = None
  if tokenizer.eos_id is not None:
    eos_token = tokenizer.token(tokenizer.eos_id)
  # Marks that may end a document are first. The sort keeps the order otherwise.
  counts.sort(
    key=lambda pair: pair[0] != eos_token and not _END.search(pair[0])
  )
  marks = ", ".join(f"{mark!r} ({count:,})" for mark, count in counts[:_SHOWN])
  marks += ", ..." if counts[_SHOWN:] else ""
  return (
    f"warning: special tokens are written in the text and read as text: {marks}"
    f"; if one ends documents, give it: --separator={counts[0][0]!r}"
  )
