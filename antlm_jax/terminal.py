"""Text on a terminal: control characters are shown, and control nothing."""

import io
import os
import re
import sys

# C0 without tab and line end, DEL, C1, embedded and overridden directions of
# text, and halves of surrogate pairs. Python gives names not in UTF-8 the last.
_CONTROLS = re.compile(
  "[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# A progress bar writes over its line, and moves up to those of other bars.
_BAR = re.compile(r"\r(?!\n)|(\x1b\[A)+\Z")


def visible(text: str) -> str:
  """Replaces control characters by their escapes, such as `\\x1b`.

  Names of files, labels and texts may have them. A terminal would obey them.
  """
  return text if text.isprintable() else _CONTROLS.sub(_escape, text)


def _escape(match: re.Match) -> str:
  code = ord(match[0])
  if 0xDC80 <= code <= 0xDCFF:  # of a byte, as os.fsdecode returns it
    code -= 0xDC00
  return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class _Shown:
  """A stream that writes its text visibly."""

  def __init__(self, stream: io.TextIOBase, bars: bool):
    self._stream = stream
    self._bars = bars

  def write(self, text: str) -> int:
    bar = _BAR.match(text) if self._bars else None
    start = bar[0] if bar else ""
    self._stream.write(start + visible(text[len(start) :]))
    return len(text)

  def writelines(self, lines) -> None:
    for line in lines:
      self.write(line)

  def __getattr__(self, name: str):
    return getattr(self._stream, name)


def show_controls() -> None:
  """Makes all text on stdout and stderr visible, until the process ends.

  Only bars, on stderr, may control the terminal.
  """
  # Python 3.13 colours tracebacks.
  os.environ["PYTHON_COLORS"] = "0"
  sys.stdout = _Shown(sys.stdout, bars=False)
  sys.stderr = _Shown(sys.stderr, bars=True)
