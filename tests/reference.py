"""Layers by definition in float64 NumPy, independent of antlm_jax."""

import math
from typing import NamedTuple

import numpy as np


def layer_norm(x, eps):
  """Returns states of mean 0 and variance 1, without scale and bias."""
  x = x - x.mean(-1, keepdims=True)
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def gelu(x):
  return x * np.vectorize(lambda t: 0.5 * (1 + math.erf(t / 2**0.5)))(x)


def gelu_tanh(x):
  return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def visible(mask, batch, queries, keys):
  """Returns which keys each query sees, bool `[B, T, S]`."""
  i, j = np.arange(queries)[:, None], np.arange(keys)
  seen = (j <= i) | (not mask.causal)
  start = 0 if mask.k_start is None else np.asarray(mask.k_start)[..., None]
  end = keys if mask.k_end is None else np.asarray(mask.k_end)[..., None]
  seen = seen & (start <= j) & (j < end)
  return np.broadcast_to(seen, (batch, queries, keys))


class Attended(NamedTuple):
  """Attention's output and its gradients for an upstream gradient.

  `dquery` and `dkey` are the gradients by the position terms, if any.
  """

  out: np.ndarray
  dq: np.ndarray
  dk: np.ndarray
  dv: np.ndarray
  dquery: np.ndarray | None = None
  dkey: np.ndarray | None = None


def attention(q, k, v, seen, g, kept=None, relative=None, scale=None):
  """Computes attention and its gradients.

  Args:
    q: Queries `[B, T, N, H]`.
    k: Keys `[B, S, K, H]`.
    v: Values `[B, S, K, H]`.
    seen: Which keys each query sees, bool `[B, T, S]`.
    g: Gradient of the output, `[B, T, N, H]`.
    kept: Factors of the attention weights (dropout), `[B, N, T, S]`.
    relative: Terms of the queries `[B, T, N, C]` and keys `[B, S, N, C]`, and
      the index into C of each pair, `[T, S]`.
    scale: Factor of the scores; None for H ** -0.5.

  Returns:
    The results, and for each result the norm of its cancelling terms. A smaller
    result is rounding error: a query that sees one key has a gradient of zero,
    the difference of two equal products.
  """
  q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
  results = [np.zeros_like(x) for x in (q, q, k, v)]
  if relative is not None:
    *terms, index = (np.asarray(x) for x in relative)
    terms = [x.astype(np.float64) for x in terms]
    results += [np.zeros_like(x) for x in terms]
  squares = [np.zeros_like(x) for x in results]
  group = q.shape[2] // k.shape[2]
  scale = q.shape[3] ** -0.5 if scale is None else scale
  for b, n in np.ndindex(q.shape[0], q.shape[2]):
    m = n // group
    scores = q[b, :, n] @ k[b, :, m].T
    if relative is not None:
      i, j = np.ogrid[: index.shape[0], : index.shape[1]]
      scores = scores + terms[0][b, i, n, index] + terms[1][b, j, n, index]
    p = _softmax(scale * scores, seen[b])
    factor = 1.0 if kept is None else kept[b, n]
    out = (p * factor) @ v[b, :, m]
    dp = factor * (g[b, :, n] @ v[b, :, m].T)
    ds = scale * p * (dp - (p * dp).sum(1, keepdims=True))
    products = factor**2 * (g[b, :, n] ** 2 @ v[b, :, m].T ** 2)
    products = products + (out**2 * g[b, :, n] ** 2).sum(1, keepdims=True)
    for found, d, power in ((results, ds, 1), (squares, None, 2)):
      d = (scale * p) ** 2 * products if d is None else d
      found[1][b, :, n] = d @ k[b, :, m] ** power
      found[2][b, :, m] += d.T @ q[b, :, n] ** power
      if relative is not None:
        np.add.at(found[4][b, :, n], (i, index), d)
        np.add.at(found[5][b, :, n], (j, index), d)
    results[0][b, :, n] = out
    results[3][b, :, m] += (p * factor).T @ g[b, :, n]
  return Attended(*results), Attended(*(np.sqrt(x.sum()) for x in squares))


def _softmax(scores, seen):
  some = seen.any(axis=1, keepdims=True)
  scores = np.where(seen, scores, -np.inf)
  p = np.exp(scores - np.where(some, scores.max(1, keepdims=True), 0))
  return np.divide(p, p.sum(1, keepdims=True), where=some, out=0 * p)


def relative_error(x, y, floor=0.0) -> float:
  """Returns ||x - y|| / max(||y||, floor)."""
  x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
  return np.linalg.norm(x - y) / max(np.linalg.norm(y), floor, 1e-30)
