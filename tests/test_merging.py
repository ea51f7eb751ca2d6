"""Merging: identities, definitions and the command."""

import dataclasses

import numpy as np
import pytest

from antlm_jax.data.tokenizer import MASK, Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.hf import export
from antlm_jax.hf.architecture import NATIVE
from antlm_jax.inference import merging
from antlm_jax.inference.merging import merge
from antlm_jax.inference.model import FineTuned, load
from tests import helpers, random_models, runs

run = random_models.run()


@pytest.fixture(scope="module")
def three(loaded):
  """Three random models of the same shape."""
  params = (helpers.random_params(loaded.model, seed) for seed in range(3))
  return [
    dataclasses.replace(loaded, params={n: np.asarray(x) for n, x in p.items()})
    for p in params
  ]


def merged(*args):
  return merge(*args)[1]


@pytest.mark.parametrize("method", merging.METHODS)
def test_identities(method, three):
  a, b, c = three
  base = [c] if method == "task" else []
  assert helpers.equal(merged([a, b], (1, 0), method, *base), a.params)
  assert helpers.equal(merged([a, b], (0, 1), method, *base), b.params)
  one_way = merged([a, b], (0.3, 0.7), method, *base)
  assert helpers.equal(merged([b, a], (0.7, 0.3), method, *base), one_way)
  assert not helpers.equal(one_way, a.params)
  base = [a] if method == "task" else []
  assert helpers.equal(merged([a, a], (0.3, 0.7), method, *base), a.params)


def test_the_definitions(three):
  a, b, c = three
  mean, sums = merged(three), merged([a, b], (0.5, 2), "task", c)
  uneven = merged(three, (2, 1, 1))
  for name, found in mean.items():
    x, y, z = (np.float64(one.params[name]) for one in three)
    for one, expected in (
      (found, (x + y + z) / 3),
      (uneven[name], x / 2 + y / 4 + z / 4),
      (sums[name], z + 0.5 * (x - z) + 2 * (y - z)),
    ):
      np.testing.assert_allclose(one, expected, rtol=2e-7, atol=1e-12)
  assert merged([a, c], (1, 1)).keys() == a.params.keys()


def test_slerp_turns_each_layer_by_a_part_of_the_angle(three):
  a, b, _ = three
  name = "blocks/mlp/up/kernel"
  x, y = (np.float64(one.params[name]) for one in (a, b))
  size = np.linalg.norm(x, axis=(1, 2), keepdims=True)
  y *= size / np.linalg.norm(y, axis=(1, 2), keepdims=True)  # equal norms
  b = dataclasses.replace(b, params=b.params | {name: y.astype(np.float32)})
  found = np.float64(merged([a, b], (0.75, 0.25), "slerp")[name])
  for layer, u, v in zip(found, x, y, strict=True):
    norm = np.linalg.norm(u)
    assert np.linalg.norm(layer) == pytest.approx(norm, rel=1e-6)
    whole = np.arccos((u * v).sum() / norm**2)
    turned = np.arccos((u * layer).sum() / norm**2)
    assert turned == pytest.approx(whole / 4, rel=1e-5)
    across = v - (u * v).sum() / norm**2 * u
    across *= norm / np.linalg.norm(across)
    expected = np.cos(whole / 4) * u + np.sin(whole / 4) * across
    np.testing.assert_allclose(layer, expected, atol=1e-6)


def test_slerp_where_there_is_no_arc():
  x = np.ones(4)
  for y in (x, 2 * x, 0 * x, -x, x + 1e-12):
    found = merging.slerp([x, y], (0.5, 0.5))
    np.testing.assert_allclose(found, (x + y) / 2, atol=1e-12)


def test_one_without_a_mask_gets_the_mean(loaded):
  text = random_models.without_mask(loaded.tokenizer.to_json())
  bare = dataclasses.replace(loaded, tokenizer=Tokenizer.from_json(text))
  old = np.asarray(bare.params["embedding"])
  masked = dataclasses.replace(
    loaded,
    tokenizer=bare.tokenizer.extended([MASK]),
    params=loaded.params | {"embedding": np.append(old, old[:1], axis=0)},
  )
  meta, params = merge([masked, bare], (0, 1))
  assert meta.tokenizer.mask_id == len(old)
  new = params["embedding"]
  assert np.array_equal(new[:-1], old)
  np.testing.assert_allclose(new[-1], old.mean(axis=0), atol=1e-6)


def test_models_that_differ_are_told(loaded):
  tuned = FineTuned("rte", "causal", "linear", {}, {"a": 0})
  for message, changes in (
    ("width is 64 there, 32 here", {"model": helpers.model(width=64)}),
    ("another tokenizer", {"tokenizer": random_models.tokenizer(300)}),
    ("has a head for rte", {"task": tuned}),
  ):
    with pytest.raises(UserError, match=message):
      merge([loaded, dataclasses.replace(loaded, **changes)])


def test_the_command(run, loaded, tmp_path):
  """Merges a run and a folder of transformers, and tests bad input."""
  (path,) = export.export(loaded, tmp_path / "hf", ["causal"])
  (path / NATIVE).unlink()
  words = (f"--models={run},{path}", "--method=slerp", "--weights=3,1")
  runs.main("antlm_jax.commands.merge", *words, f"--workdir={tmp_path / 'new'}")
  made = load(tmp_path / "new")
  assert helpers.equal(made.params, dict(loaded.params))
  told = f"slerp: 3 * {run.name} (step 7) + 1 * hf"
  assert (made.merged, made.step) == (told, 0)
  export.export(made, tmp_path / "out", ["causal"])
  assert told in (tmp_path / "out/README.md").read_text()

  two, slerp = f"--models={run},{run}", "--method=slerp"
  for told, *words in (
    ("2 models have 3 weights", two, "--weights=1,1,1"),
    ("slerp merges exactly two models, got 3", f"{two},{run}", slerp),
    ("give --base", two, "--method=task"),
    ("weights of at least 0", two, "--weights=1,-1"),
    ("give --models=MODEL,MODEL", "--models="),
    ("holds no checkpoint", f"--models={run},{tmp_path}"),
    ("holds a run", two, f"--workdir={tmp_path / 'new'}"),
  ):
    where = f"--workdir={tmp_path / 'none'}"
    assert told in runs.refused("antlm_jax.commands.merge", where, *words)
    assert not (tmp_path / "none").exists()
