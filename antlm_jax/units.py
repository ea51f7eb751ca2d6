"""What a run shows and records: progress, metrics, and where time went."""


def duration(seconds: float) -> str:
  """Writes seconds as people do: 12.3s, 4m05s, 3h20m."""
  if seconds < 60:
    return f"{seconds:.1f}s"
  minutes, rest = divmod(round(seconds), 60)
  if minutes < 60:
    return f"{minutes}m{rest:02d}s"
  return f"{minutes // 60}h{minutes % 60:02d}m"


def quantity(number: float) -> str:
  """Writes a large number shortly: 950, 12.3k, 4.56M."""
  for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
    if number >= size:
      return f"{number / size:.3g}{unit}"
  return f"{number:.0f}"
