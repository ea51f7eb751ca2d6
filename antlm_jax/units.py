"""Numbers as people write them: durations, quantities, memory."""

_PREFIXES = {"E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}


def duration(seconds: float) -> str:
  """Writes seconds as people do: 12.3s, 4m05s, 3h20m."""
  if seconds < 60:
    return f"{seconds:.1f}s"
  minutes, remainder = divmod(round(seconds), 60)
  if minutes < 60:
    return f"{minutes}m{remainder:02d}s"
  return f"{minutes // 60}h{minutes % 60:02d}m"


def milliseconds(seconds: float) -> str:
  """Writes seconds as milliseconds: 1,234.5 ms."""
  return f"{1e3 * seconds:,.1f} ms"


def quantity(number: float, unit: str = "") -> str:
  """Writes a number in three digits: 950, 12.3k, 4.56M, or 4.56 MB."""
  prefix, size = next(
    # A value that rounds to 1000 becomes 1 of the next prefix.
    ((p, s) for p, s in _PREFIXES.items() if number >= 0.9995 * s),
    ("", 1.0),
  )
  return f"{number / size:.3g}{' ' if unit else ''}{prefix}{unit}"


def parse_quantity(text: str) -> float:
  """Reads a number that `quantity` wrote without a unit, or a ValueError."""
  size = _PREFIXES.get(text[-1:], 1.0)
  return float(text[:-1] if text[-1:] in _PREFIXES else text) * size


def gib(size: float) -> str:
  """Writes bytes of memory: 12.34 GiB."""
  return f"{size / 2**30:.2f} GiB"
