"""Toy English, which short contexts do not suffice to learn."""

import json
import math
from collections import Counter

import pytest

from antlm_jax import errors
from antlm_jax.data import toy_english

SENTENCES, PAIRS = 60_000, 100
SIDES = ("sentence_good", "sentence_bad")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  """The folder, its training and held-out lines, and pairs by UID."""
  folder = tmp_path_factory.mktemp("toy")
  toy_english.write_toy_english(
    folder, seed=1, sentences=SENTENCES, pairs=PAIRS
  )
  train, dev = (
    (folder / f"text/toy.{split}").read_text().splitlines()
    for split in ("train", "dev")
  )
  pairs = {
    path.stem: [json.loads(line) for line in path.read_text().splitlines()]
    for path in (folder / "pairs").iterdir()
  }
  return folder, train, dev, pairs


def everything(pairs) -> list[dict]:
  return [pair for group in pairs.values() for pair in group]


class Ngrams:
  """An interpolated Witten-Bell model of word trigrams."""

  def __init__(self, lines, order=3):
    self.order = order
    self.count, self.total, self.types = Counter(), Counter(), Counter()
    for line in lines:
      self.count.update(g for grams in self.grams(line) for g in grams)
    for gram, n in self.count.items():
      self.total[gram[:-1]] += n
      self.types[gram[:-1]] += 1

  def grams(self, line):
    """Yields the n-grams that end in each word, shortest first."""
    words = ["<s>"] * (self.order - 1) + line.split()
    for end in range(self.order, len(words) + 1):
      yield [tuple(words[end - n : end]) for n in range(1, self.order + 1)]

  def score(self, line) -> float:
    return sum(math.log(self.probability(g)) for g in self.grams(line))

  def probability(self, grams) -> float:
    p = 1 / self.types[()]
    for gram in grams:
      seen, types = self.total[gram[:-1]], self.types[gram[:-1]]
      if seen:
        p = (self.count[gram] + types * p) / (seen + types)
    return p


@pytest.mark.slow
def test_short_contexts_do_not_decide(data):
  _, train, _, pairs = data
  score = Ngrams(train).score
  margins = [score(p[SIDES[0]]) - score(p[SIDES[1]]) for p in everything(pairs)]
  right = sum((m > 0) + 0.5 * (m == 0) for m in margins)  # ties count half
  assert right / len(margins) <= 0.65


def test_equal_seeds_write_equal_files(data, tmp_path):
  folder, *_ = data
  toy_english.write_toy_english(
    tmp_path, seed=1, sentences=SENTENCES, pairs=PAIRS
  )
  names = sorted(p.relative_to(folder) for p in folder.rglob("*.*"))
  assert len(names) == 2 + len(toy_english.PHENOMENA)
  for name in names:
    assert (folder / name).read_bytes() == (tmp_path / name).read_bytes()


def test_texts_and_pairs_are_disjoint(data):
  _, train, dev, pairs = data
  tested = {pair[side] for pair in everything(pairs) for side in SIDES}
  assert (len(train), len(dev)) == (SENTENCES, SENTENCES // 20)
  assert set(train).isdisjoint(dev)
  assert tested.isdisjoint(train + dev)
  # Every tested word is frequent.
  counts = Counter(word for line in train for word in line.split())
  assert min(counts[word] for line in tested for word in line.split()) >= 100
  assert len(counts) <= 300


def test_pairs_have_blimps_form_and_differ_in_one_word(data):
  *_, pairs = data
  assert set(pairs) == set(toy_english.PHENOMENA)
  fields = {*SIDES, "field", "linguistics_term", "UID", "pair_id"}
  for uid, group in pairs.items():
    assert [pair["pair_id"] for pair in group] == [*map(str, range(PAIRS))]
    swaps = Counter()
    for pair in group:
      assert set(pair) == fields and pair["UID"] == uid
      both = zip(*(pair[side].split() for side in SIDES), strict=True)
      ((good, bad),) = ((g, b) for g, b in both if g != b)
      swaps.update([good])
      swaps.subtract([bad])
    # The good words are bad words of other pairs.
    if uid != "existential_quantifier":  # "there all", never "here many"
      assert max(map(abs, swaps.values())) <= PAIRS * 0.4, uid


def test_the_command(tmp_path, capsys):
  toy_english.main([f"--output={tmp_path}", "--sentences=50", "--pairs=2"])
  out = capsys.readouterr().out
  assert "Wrote 50 sentences" in out
  assert out.count("\n* ") == len(toy_english.PHENOMENA)


def test_bad_options(tmp_path):
  for wrong in ("pairs=0", "pairs=100000", "sentences=0", "sentences=x"):
    with pytest.raises(errors.UserError):
      toy_english.main([f"--output={tmp_path}", f"--{wrong}"])
  (tmp_path / "file").write_text("")
  with pytest.raises(errors.UserError, match="cannot write"):
    toy_english.write_toy_english(tmp_path / "file", sentences=1, pairs=1)
