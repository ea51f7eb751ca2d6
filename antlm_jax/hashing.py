"""Randomness as a function of counters: no generator, no state.

A draw is a hash of (seed, purpose, step, row, position, ...). So any process
can make any row of any step alone, in any order.
"""

import numpy as np

_GOLDEN = np.uint32(0x9E3779B9)


def bits(seed: int, *counters) -> np.ndarray:
  """Hashes counters, broadcast together, to uniform uint32.

  Counters are integers or integer arrays, each read modulo 2^32. Put the
  largest array last, since each is mixed at the shape reached so far.
  """
  state = _mix(np.asarray(seed & 0xFFFFFFFF, np.uint32))
  for counter in counters:
    state = mix_counter(state, np.asarray(counter).astype(np.uint32))
  return state


def mix_counter(state, counter):
  """Hashes one more counter into a state, both uint32, broadcast together.

  Works on NumPy and JAX arrays, also inside a kernel: host and device compute
  the same bits.
  """
  with np.errstate(over="ignore"):
    return _mix((state + _GOLDEN) ^ (counter * _GOLDEN))


def uniform(seed: int, *counters) -> np.ndarray:
  """Like `bits`, as float64 in [0, 1) with 24 bits: n times it is under n."""
  return (bits(seed, *counters) >> np.uint32(8)) * 2.0**-24


def _mix(x):
  """A bijection of uint32 in which every bit depends on every other."""
  with np.errstate(over="ignore"):
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x21F0AAAD)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0xD35A2D97)
    return x ^ (x >> np.uint32(15))


def spread(number: int) -> float:
  """Maps consecutive numbers to [0, 1), so that neighbours lie far apart.

  These are multiples of the golden ratio, modulo 1. Any few that follow one
  another are spread evenly. Prepared rows depend on its three digits.
  """
  return number * 0.618 % 1


def permute(
  indices: np.ndarray, size: int, *key: int | np.ndarray
) -> np.ndarray:
  """Maps indices by a pseudorandom permutation of range(size).

  A Feistel network over the next even power of two, repeated until the result
  is in range. It needs no table, and every index of every epoch costs the same.
  The `key` chooses the permutation; indices are int64 `[n]`, in [0, size). If
  parts of the key are arrays `[n]`, each index has its own permutation.
  """
  half = max(1, ((size - 1).bit_length() + 1) // 2)
  out = np.asarray(indices, np.int64)
  walking = np.ones(out.shape, bool)
  while walking.any():
    out = np.where(walking, _feistel(out, half, key), out)
    walking = out >= size
  return out


def _feistel(x: np.ndarray, half: int, key: tuple) -> np.ndarray:
  low_mask = (1 << half) - 1
  left = x >> half
  right = x & low_mask
  for turn in range(4):
    mixed = bits(key[0], *key[1:], turn, right).astype(np.int64)
    left, right = right, left ^ (mixed & low_mask)
  return (left << half) | right
