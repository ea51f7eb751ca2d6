"""The pictures of the first pages, which docs/draw_pictures.py draws."""

import importlib.util
import itertools

import numpy as np
import pytest
from matplotlib.text import Text

from antlm_jax import config
from tests import runs


def load_pictures():
  path = runs.ROOT / "docs/draw_pictures.py"
  spec = importlib.util.spec_from_file_location("draw_pictures", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


pictures = pytest.fixture(load_pictures, scope="module")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run's folder: three blocks of CLM and MLM in turn, 10 steps each."""
  losses = {
    step: {"clm": 5 - step / 10, "mlm": step / 20} for step in (0, 10, 20, 30)
  }
  summary = {"steps": 30, "switches": [10, 20], "unigram_entropy": 4.0}
  folder = tmp_path_factory.mktemp("run")
  return runs.write_run(folder, config.Config(), losses, summary)


def test_the_picture_of_masks_shows_what_each_token_sees(pictures):
  """Catches a grid that is not the mask of its title, by the rules in words."""
  rules = (
    lambda i, j: j <= i,
    lambda i, j: True,
    lambda i, j: j < 3 or j <= i,
    lambda i, j: (i < 3) == (j < 3),
  )
  masks = pictures.masks()
  for mask, rule in zip(masks.values(), rules, strict=True):
    seen = pictures.seen_tokens(mask)
    for i, j in itertools.product(range(6), repeat=2):
      assert seen[i, j] == rule(i, j), (i, j)
  for axes, mask in zip(
    pictures.draw_masks().axes, masks.values(), strict=True
  ):
    shown = {p.get_xy() for p in axes.patches if p.get_facecolor()[0] < 0.5}
    cells = np.argwhere(pictures.seen_tokens(mask))
    assert shown == {(j - 0.5, i - 0.5) for i, j in cells}


def test_the_start_picture_tells_own_blocks_from_others(pictures, run):
  """Catches losses after CLM's blocks that are drawn as those after MLM's."""
  lines = pictures.draw_start(run).axes[0].lines[:4]
  found = [dict(zip(*line.get_data(), strict=True)) for line in lines]
  assert found == [{10: 4, 30: 2}, {20: 3}, {20: 1}, {10: 0.5, 30: 1.5}]
  assert [line.get_linestyle() for line in lines] == ["-", "--", "-", "--"]


def check_letters(figure):
  """Asserts that no letter has under 10 pixels at a width of 400, or is cut."""
  figure.draw_without_rendering()
  texts = [text for text in figure.findobj(Text) if text.get_text()]
  assert len(texts) > 8
  for text in texts:
    box = text.get_window_extent()
    assert text.get_fontsize() / figure.get_figwidth() >= 1.8, text  # 10 pixels
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, text


def test_the_pictures_can_be_read_on_a_small_screen(pictures, run):
  check_letters(pictures.draw_start(run))
  for name in ("masks", "route", "pod", "curricula", "clm_then_mlm"):
    check_letters(getattr(pictures, f"draw_{name}")())
