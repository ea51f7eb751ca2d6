"""Mask filling and sampling from masked diffusion, on random models."""

import dataclasses
import functools
import itertools
import math
from collections import Counter

import numpy as np
import pytest
import tokenizers
from scipy import stats

from antlm_jax import config, fill, models
from antlm_jax.commands import fill as command
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.inference import framing
from antlm_jax.masks import AttentionMask
from antlm_jax.training.checkpoint import Meta
from tests import helpers, random_models, runs

run = random_models.run()


@pytest.fixture(scope="module")
def diffusion(loaded):
  """The random model, as if trained by masked diffusion."""
  return random_models.with_curriculum(loaded, "1D")


def in_blocks(loaded):
  """Returns the model with attention in blocks of eight tokens."""
  blocks = {"objectives.D.attention": "block", "objectives.D.block_length": 8}
  return random_models.with_meta(
    loaded, config=config.load_config(loaded.config, blocks)
  )


WORDS = ("<pad>", "<s>", "</s>", "<mask>", "a", "b", "c")
ORDINARY = [4, 5, 6]
MASK, SHIFT = 3, 1


@pytest.fixture(scope="module")
def toy():
  """A random model of three words."""
  vocab = {word: index for index, word in enumerate(WORDS)}
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "a"))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  backend.add_special_tokens(list(WORDS[:4]))
  model = models.build_model(helpers.TINY, len(WORDS))
  return framing.TextModel(
    model=model,
    params=helpers.random_params(model),
    meta=Meta(
      config.Config(curriculum="1D"), Tokenizer(backend), "bos_eos", data=""
    ),
  )


def texts_of(*args, **how) -> list[str]:
  """Returns the texts of `fill`."""
  return [filled.text for filled in fill(*args, **how)]


def law(toy, order, steps, block_length=5):
  """Returns the probability of each filling of `a <mask> <mask> <mask>`.

  Sums over all orders of filling and all tokens, in float64.
  """

  @functools.cache
  def predicted(row):  # probabilities `[n, 3]`
    p = np.exp(helpers.log_softmax(helpers.logits(toy, row)[:, ORDINARY]))
    return np.roll(p, SHIFT, axis=0)

  @functools.cache
  def outcomes(row, left):
    masks = [i for i, token in enumerate(row) if token == MASK]
    if not masks:
      return Counter({row: 1.0})
    masks = [i for i in masks if i // block_length == masks[0] // block_length]
    left = left or steps or len(masks)
    out = Counter()
    for chosen, weight in subsets(masks, left):
      # The step count starts again with the next block.
      after = left - 1 if len(chosen) < len(masks) else 0
      for words in itertools.product(ORDINARY, repeat=len(chosen)):
        filled = dict(zip(chosen, words, strict=True))
        p = [predicted(row)[at, word - 4] for at, word in filled.items()]
        new = tuple(filled.get(at, token) for at, token in enumerate(row))
        for text, q in outcomes(new, after).items():
          out[text] += weight * math.prod(p) * q
    return out

  def subsets(masks, left):
    n = len(masks)
    for size in range(n + 1):
      if order == "ancestral":
        weight = (1 / left) ** size * (1 - 1 / left) ** (n - size)
      else:
        weight = (size == math.ceil(n / left)) / math.comb(n, size)
      for chosen in itertools.combinations(masks, size) if weight else ():
        yield chosen, weight

  found = outcomes((1, 4, MASK, MASK, MASK, 2), 0)
  return {" ".join(WORDS[i] for i in row[1:-1]): p for row, p in found.items()}


def surprise(texts, expected) -> float:
  """Returns the p-value of texts under a law, by a chi-square test."""
  counts = Counter(texts)
  assert set(counts) <= set(expected)
  found = np.array([counts[name] for name in expected])
  wanted = len(texts) * np.array(list(expected.values()))
  common = wanted >= 5
  found, wanted = (
    np.append(x[common], x[~common].sum() + 1e-9) for x in (found, wanted)
  )
  return stats.chisquare(found, wanted).pvalue


@pytest.mark.slow
@pytest.mark.parametrize(
  "how",
  [
    {"order": "random", "steps": 2},
    *(
      pytest.param(how, marks=pytest.mark.nightly)
      for how in (
        {"order": "random", "steps": 0},
        {"order": "ancestral", "steps": 2},
        {"order": "random", "steps": 1, "block_length": 4},
      )
    ),
  ],
)
def test_texts_follow_the_law_by_enumeration(toy, how):
  expected, how = law(toy, **how), dict(how)
  assert len(expected) == 27
  assert sum(expected.values()) == pytest.approx(1)
  texts = []
  for seed in range(2):
    how |= {"temperature": 1, "count": 4096, "top": 0, "seed": seed}
    texts += texts_of(toy, "a <mask> <mask> <mask>", **how)
  assert surprise(texts, expected) > 1e-3
  # The law of filling all masks at once differs.
  assert surprise(texts, law(toy, "random", 1)) < 1e-6


def slow_fill(loaded, seen, text, tokens, shift, steps, block_length):
  """Fills a text with the likeliest tokens, the most probable first."""
  t = loaded.tokenizer
  row = framing.encode_framed(loaded, text, tokens)
  banned = t.special.copy()
  banned[t.eos_id] = not tokens  # a continuation may end early
  canvas = np.flatnonzero(row == t.mask_id)
  ends = (np.arange(len(row)) // seen + 1) * seen  # of blocks that are seen
  mask = AttentionMask(k_end=np.minimum(ends, len(row)).astype(np.int32)[None])
  for block in range(-(-len(row) // block_length)):
    masks = [i for i in canvas if i // block_length == block]
    for left in range(steps or len(masks), 0, -1):
      logits = helpers.logits(loaded, row, mask)
      p = np.exp(helpers.log_softmax(np.where(banned, -np.inf, logits)))
      sure = sorted(masks, key=lambda i: -p[i - shift].max())
      for i in sure[: math.ceil(len(masks) / left)]:
        row[i] = p[i - shift].argmax()
        masks.remove(i)
  ends = [i for i in canvas if row[i] == t.eos_id]
  return t.decode(row[: min(ends, default=len(row))])


@pytest.mark.parametrize(
  ("curriculum", "shift", "seen"),
  [("1C+1M", 0, 99), ("1N", 1, 99), ("1D", 1, 8)],
)
def test_the_surest_tokens_come_first(loaded, curriculum, shift, seen):
  loaded = random_models.with_curriculum(loaded, curriculum)
  loaded = in_blocks(loaded)
  for text, tokens, steps, block_length in (
    ("Tom sat", 17, 4, 0),
    ("the dogs near", 9, 0, 5),
    ("Tom <mask> the <mask> <mask> near <mask>", 0, 3, 6),
  ):
    how = {"steps": steps, "block_length": block_length}
    (found,) = texts_of(loaded, text, tokens=tokens or 1, **how)
    how["block_length"] = block_length or seen
    assert found == slow_fill(loaded, seen, text, tokens, shift, **how)


TEXT = "The <mask> near Tom <mask> ."
SAMPLED = {"tokens": 20, "temperature": 1.0, "steps": 4, "count": 2}


def test_a_stream_is_the_text_as_it_is_filled(diffusion):
  seen = []
  whole = fill(diffusion, TEXT, **SAMPLED, watch=seen.append)
  *growing, last = seen
  assert whole == last == fill(diffusion, TEXT, **SAMPLED)
  assert [one.text.count("<mask>") for one, _ in growing] == [1]
  for (early, _), (late, _) in zip(growing, [whole], strict=True):
    assert early.masks[0] in late.masks
  seen.clear()
  fill(diffusion, "Tom", **SAMPLED, watch=seen.append)
  assert len(seen) == 4
  for one in whole:
    text = one.text
    assert text.startswith("The") and " near Tom" in text and text[-2:] == " ."


def test_a_block_does_not_depend_on_those_behind_it(diffusion):
  def first_block(model, tokens):
    how = {"tokens": tokens, "block_length": 8}
    (text,) = texts_of(model, "Tom sat", **how)
    return model.tokenizer.encode(text)[:7].tolist()  # after BOS

  blocks = in_blocks(diffusion)
  assert first_block(blocks, 9) == first_block(blocks, 20)
  assert first_block(diffusion, 9) != first_block(diffusion, 20)


def test_special_tokens_are_never_drawn(diffusion):
  """A high temperature makes all tokens about equally likely."""
  t = diffusion.tokenizer
  special = {t.decode([i], False) for i in np.flatnonzero(t.special)}
  how = {"temperature": 1e6, "count": 40, "steps": 1, "top": 0}
  for one in fill(diffusion, "<mask>" * 40, **how):
    assert len(one.masks) == 40
    assert not special & {mask.token for mask in one.masks}
  lengths = []
  for one in fill(diffusion, "", tokens=40, **how):
    *tokens, last = (mask.token for mask in one.masks)
    assert not special & {*tokens} and last not in special - {"</s>"}
    assert not any(name in one.text for name in special)
    lengths.append(len(one.masks))
  assert min(lengths) < max(lengths) == 40  # EOS ends a text


def test_candidates_are_those_of_the_step_that_filled_the_mask(diffusion):
  """The model predicts the second mask with the first already filled."""
  t = diffusion.tokenizer
  tokens = framing.encode_framed(diffusion, TEXT)
  seen = []
  fill(diffusion, TEXT, top=4, watch=seen.append)
  (early,), (late,) = seen
  (first,) = early.masks
  (second,) = (mask for mask in late.masks if mask != first)
  for mask in (first, second):
    at = mask.position
    p = np.exp(helpers.log_softmax(helpers.logits(diffusion, tokens)))[at - 1]
    best = np.argsort(-p)[:4]
    names, shares = zip(*mask.candidates, strict=True)
    assert [t.decode([i], False) for i in best] == [*names]
    np.testing.assert_allclose(shares, p[best], rtol=1e-3)
    tokens[at] = np.where(t.special, 0, p).argmax()
    np.testing.assert_allclose(mask.probability, p[tokens[at]], rtol=1e-3)


def test_fill_refuses(loaded, diffusion):
  causal = random_models.with_curriculum(loaded, "1C")
  bare = random_models.with_meta(diffusion, boundary="none")
  for model, text, options, message in (
    (causal, "Tom", {}, "only left to right .curriculum=1C"),
    (bare, "<mask> sat", {}, "put a word before"),
    (diffusion, [], {}, "no text"),
    (diffusion, "Tom sat .", {}, "'Tom sat .' holds no <mask>"),
    (diffusion, "Tom [MASK] .", {}, "is no mask of this model: write <mask>"),
    (diffusion, "Tom [MASK] .", {"tokens": 2}, "write <mask>"),
    (diffusion, "Tom " * 60 + "<mask>", {}, "max_seq_len=48"),
    (diffusion, "Tom", {"tokens": 47}, "max_seq_len=48"),
    (diffusion, "Tom", {"steps": -1}, "steps=-1"),
    (diffusion, "Tom", {"order": "left"}, "order='left' is not one of"),
  ):
    with pytest.raises(UserError, match=message):
      fill(model, text, **options)


def test_the_command(run, loaded, capsys):
  args = f"--checkpoint={run}", "--top=3"
  runs.main("antlm_jax.commands.fill", *args, f"--text={TEXT}")
  (filled,) = fill(loaded, TEXT, top=3)
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].split() == ["probability", "<mask>", "1", "text"]
  assert lines[5].split() == ["probability", "<mask>", "2", "text"]
  token, probability = filled.masks[1].candidates[0]
  before, between, after = TEXT.split("<mask>")
  shown = f"{probability:.4f} {token} {before}<mask>{between}{token}{after}"
  assert lines[6].split() == shown.split()
  assert lines[9:] == ["", filled.text]
  more = "--tokens=4", "--count=2", "--order=ancestral", "--block_length=3"
  runs.main("antlm_jax.commands.fill", *args, "--text=Tom", "--steps=2", *more)
  how = {"steps": 2, "tokens": 4, "order": "ancestral", "block_length": 3}
  texts = texts_of(loaded, "Tom", count=2, **how)
  assert capsys.readouterr().out == "\n---\n".join(texts) + "\n"


def test_the_tokenizers_own_mask_is_a_mask(diffusion, monkeypatch, capsys):
  """Catches the mask of a model card, such as [MASK], read as text."""
  named = diffusion.tokenizer.to_json().replace('"<mask>"', '"[MASK]"')
  other = random_models.with_meta(
    diffusion, tokenizer=Tokenizer.from_json(named)
  )
  assert other.tokenizer.mask_token == "[MASK]"
  expected = fill(diffusion, "Tom <mask> near the <mask> .")
  for text in ("Tom [MASK] near the [MASK] .", "Tom [MASK] near the <mask> ."):
    (found,) = fill(other, text)
    assert found.text == expected[0].text and len(found.masks) == 2
  with pytest.raises(UserError, match=r"holds no <mask> or \[MASK\]"):
    fill(other, "Tom sat .")
  monkeypatch.setattr(command, "open_model", lambda *_: other)
  command.main(["--checkpoint=run", "--text=Tom [MASK] near the <mask> ."])
  printed = capsys.readouterr().out
  assert "<mask> 2" in printed and expected[0].text in printed
  assert printed.count(" near the <mask> .\n") == 5  # candidates of the first


def test_only_ordinary_tokens_fill_a_mask(diffusion):
  """Catches a drawn [SEP], which the filled text then lacks."""
  own = random_models.with_meta(diffusion, boundary=framing.OWN)
  how = {"temperature": 100.0, "count": 200}
  found = fill(own, "Tom <mask> near the <mask> .", **how)
  drawn = {mask.token for one in found for mask in one.masks}
  special = np.flatnonzero(own.tokenizer.special)
  assert len(drawn) > 50 and not drawn & {*map(own.tokenizer.token, special)}


def _unspaced(kind):
  """Returns a tokenizer of Japanese, Chinese or Thai, and its vocabulary."""
  of = tokenizers.pre_tokenizers
  texts = ["私は猫が好き", "今天天气很好", "ฉันชอบแมว"]
  tokens = [*WORDS[:4], *dict.fromkeys("".join(texts))]
  if kind == "WordPiece":
    backend = tokenizers.Tokenizer(
      tokenizers.models.WordPiece(
        {token: i for i, token in enumerate(tokens)}, unk_token="私"
      )
    )
    backend.pre_tokenizer = of.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = tokenizers.decoders.WordPiece()
  else:
    tokens += [f"▁{token}" for token in tokens[4:]] + ["▁"]
    backend = tokenizers.Tokenizer(
      tokenizers.models.Unigram([(token, -1.0) for token in tokens], 4)
    )
    backend.pre_tokenizer = of.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
  backend.add_special_tokens(list(WORDS[:4]))
  return Tokenizer(backend)


@pytest.mark.parametrize("kind", ["WordPiece", "Metaspace"])
def test_a_filled_text_without_spaces_has_none(toy, kind):
  """Catches spaces between the words of Japanese, Chinese and Thai."""
  tokenizer = _unspaced(kind)
  model = models.build_model(helpers.TINY, tokenizer.vocab_size)
  loaded = framing.TextModel(
    model=model,
    params=helpers.random_params(model),
    meta=dataclasses.replace(toy.meta, tokenizer=tokenizer),
  )
  how = {"temperature": 9.0, "count": 9}
  for text in (
    "私は<mask>が好き",
    "今天天<mask>很好",
    "ฉัน<mask>แมว",
    "<mask>は",
  ):
    before, after = text.split("<mask>")
    for filled in fill(loaded, text, **how):
      (mask,) = filled.masks
      assert filled.text == before + mask.token.strip() + after


def test_a_filled_text_is_otherwise_as_it_was_written(toy):
  """Catches capitals, double spaces and signs that a tokenizer drops."""
  vocab = {word: index for index, word in enumerate((*WORDS, "##s", "the"))}
  backend = tokenizers.Tokenizer(
    tokenizers.models.WordPiece(vocab, unk_token="a")
  )
  backend.normalizer = tokenizers.normalizers.BertNormalizer()
  backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  backend.decoder = tokenizers.decoders.WordPiece()
  backend.add_special_tokens(list(WORDS[:4]))
  model = models.build_model(helpers.TINY, len(vocab))
  loaded = framing.TextModel(
    model=model,
    params=helpers.random_params(model),
    meta=dataclasses.replace(toy.meta, tokenizer=Tokenizer(backend)),
  )
  seen = set()
  for filled in fill(loaded, "The <mask>, Café  (x).", temperature=9, count=30):
    token = filled.masks[0].token
    word = token[2:] if token.startswith("##") else f" {token}"
    assert filled.text == f"The{word}, Café  (x)."
    seen.add(token)
  assert {"##s", "b"} <= seen


def test_a_text_may_end_before_the_first_added_mask(toy):
  """Catches a text that is written twice, and words that are joined."""
  how = {"tokens": 2, "temperature": 1e6, "steps": 1, "count": 60}
  texts = set()
  for filled in fill(toy, "a b", **how):
    words = [mask.token for mask in filled.masks if mask.token != "</s>"]
    assert filled.text == " ".join(["a", "b", *words])
    texts.add(filled.text)
  assert {"a b", "a b a", "a b c b"} <= texts
