"""Scoring, generation and mask filling, on random models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from antlm_jax import config, fill, generate, models, score
from antlm_jax.data import toy_english
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.evals.zero_shot import pipelines
from antlm_jax.inference import framing, generation, scoring
from antlm_jax.inference.framing import encode_framed
from antlm_jax.inference.generation import draw_tokens
from antlm_jax.masks import CAUSAL
from antlm_jax.training.checkpoint import Meta
from tests import helpers, random_models, runs

run = random_models.run()


@pytest.fixture(scope="module")
def sentences():
  return [*toy_english.make_sentences(1, 6), "Tom", "the" + " the" * 19]


def laid_out(loaded, context, text, mode, pipeline):
  """Returns the tokens before a text, its own tokens, and those after it."""
  t = loaded.tokenizer
  before, after = {
    "bos_eos": ([t.bos_id], [t.eos_id]),
    "eos": ([t.eos_id], [t.eos_id]),
    "none": ([], []),
  }[loaded.meta.boundary]
  space = " "
  if pipeline == "2024" and mode == "causal":
    before, after = [t.bos_id] * (not context), []
  elif pipeline == "2024":
    before, space = before + [t.eos_id] * (not context), "  "
  if pipeline != "2024" and not context:
    space = ""
  ids = list(t.encode(context + space + text))
  inside = len(t.encode(context)) if context else 0
  return before + ids[:inside], ids[inside:], after


def slow_score(loaded, text, mode, t=1.0, shift=0, context="", pipeline="ours"):
  """Scores a sentence token by token; returns the sum and the token count."""
  before, ids, after = laid_out(loaded, context, text, mode, pipeline)
  tokens = np.array(before + ids + after)
  shift = {"mlm": 0, "mntp": 1, "causal": 1}.get(mode, shift)
  total, count = 0.0, 0
  for i in range(len(before), len(before) + len(ids)):
    if i == 0 and (shift or mode == "fused"):
      continue
    logits = 0.0
    if mode in ("causal", "fused"):
      logits = logits + helpers.logits(loaded, tokens, CAUSAL)[i - 1]
    if mode != "causal":
      masked = tokens.copy()
      masked[i] = loaded.tokenizer.mask_id
      logits = logits + helpers.logits(loaded, masked)[i - shift]
    total += helpers.log_softmax(logits / t)[tokens[i]]
    count += 1
  return total, count


CASES = [
  *(
    (p, m, "bos_eos") for p, modes in pipelines.PIPELINES.items() for m in modes
  ),
  *(("ours", m, b) for m in scoring.MODES for b in ("eos", "none")),
  # The 2024 pipeline adds special tokens even if training rows had none.
  ("2024", "causal", "none"),
  ("2024", "mlm", "none"),
]


@pytest.mark.sample(3, 6)
@pytest.mark.parametrize(("pipeline", "mode", "boundary"), CASES)
def test_scores_equal_a_slow_loop(loaded, sentences, pipeline, mode, boundary):
  """Of sentences, and of choices after a context."""
  loaded = random_models.with_meta(loaded, boundary=boundary)
  some = [s for s in sentences if len(loaded.tokenizer.encode(s)) > 1][-4:]
  contexts = ("",) * len(some) + ("", "", "the hills near", "the hills near")
  texts = (*some, *("Tom rested .", "rests near") * 2)
  expected = np.array(
    [
      slow_score(loaded, t, mode, context=c, pipeline=pipeline)
      for c, t in zip(contexts, texts, strict=True)
    ]
  )
  options = pipelines.options(pipeline, mode) | {"contexts": contexts}
  mean = options.pop("reduction", "sum")
  sums, means, scores = (
    score(loaded, texts, mode, **options, **reduction)
    for reduction in (
      {"reduction": "sum"},
      {"reduction": "mean"},
      {"reduction": mean},
    )
  )
  np.testing.assert_allclose(sums, expected[:, 0], rtol=2e-5, atol=2e-4)
  np.testing.assert_allclose(means, sums / expected[:, 1])
  late = (pipeline, mode) == ("2024", "mlm")
  np.testing.assert_array_equal(scores, means if late else sums)
  # A text after another context has another score.
  assert len(set(np.round(sums, 3))) == len(texts)
  assert np.ptp(sums) > 2  # the model tells sentences apart


def test_fused_reads_masks_as_trained(loaded, sentences):
  texts = sentences[:3]
  for curriculum, shift in (("1C+1N", 1), ("C:N=1:3", 1), ("1C+1M+1N", 0)):
    trained = random_models.with_curriculum(loaded, curriculum)
    assert trained.mask_shift == shift
    expected = [slow_score(trained, s, "fused", shift=shift)[0] for s in texts]
    got = score(trained, texts, "fused")
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", scoring.MODES)
def test_batching_does_not_matter(loaded, mode):
  texts = list(toy_english.make_sentences(1, 24))
  whole = score(loaded, texts, mode)
  small = score(loaded, texts[::-1], mode, batch_tokens=150)[::-1]
  np.testing.assert_allclose(whole, small, rtol=1e-5, atol=1e-4)


def test_equal_sentences_are_scored_once(loaded, sentences):
  seen = []

  def track(batches):
    for batch in batches:
      seen.extend(zip(batch.text, batch.position, strict=True))
    return batches

  doubled = [*sentences, *sentences]
  scores = score(loaded, doubled, "causal", track=track)
  assert len({text for text, _ in seen}) == len(set(sentences))
  assert len(seen) == len(set(seen))
  np.testing.assert_array_equal(*np.split(scores, 2))


def test_temperatures_in_one_pass(loaded, sentences):
  temperatures = (1.0, 0.5, 2.0)
  texts = sentences[:4]
  got = score(loaded, texts, "mlm", temperature=temperatures)
  assert got.shape == (4, 3)
  for k, t in enumerate(temperatures):
    alone = score(loaded, texts, "mlm", temperature=t)
    np.testing.assert_allclose(got[:, k], alone, rtol=1e-6)
    expected = slow_score(loaded, texts[0], "mlm", t)[0]
    np.testing.assert_allclose(got[0, k], expected, rtol=2e-5)


def test_scoring_refuses(loaded):
  for message, options in (
    ("mode='left' is not one of causal", {"mode": "left"}),
    ("reduction='max'", {"reduction": "max"}),
    ("temperature=0", {"temperature": 0}),
    ("is not over 0", {"temperature": (1.0, -1.0)}),
    ("temperature='warm' is not over 0", {"temperature": "warm"}),
    ("batch_tokens=0 is not at least 1", {"batch_tokens": 0}),
    ("no argument 'modes'; did you mean 'mode'", {"modes": "mlm"}),
    ("is loaded: give the path", {"step": 4}),
    ("max_seq_len=48", {"texts": ["Tom " * 60]}),
    ("no token to score", {"texts": [""], "contexts": ["Tom sat ."]}),
  ):
    given = {"texts": ["Tom sat ."], "mode": "causal"} | options
    assert message in runs.told(score, loaded, **given)
  line = runs.told(pipelines.options, "2024", "mntp")
  assert "'mntp'" in line and "of the 2024 pipeline" in line


def test_masked_modes_need_a_mask_token(loaded, monkeypatch):
  monkeypatch.setattr(loaded.tokenizer, "mask_id", None)
  for mode in ("mlm", "mntp", "fused"):
    assert "no <mask> token" in runs.told(score, loaded, ["Tom sat ."], mode)
  score(loaded, ["Tom sat ."], "causal")
  monkeypatch.setattr(loaded.tokenizer, "mask_id", 3)
  monkeypatch.setattr(loaded.tokenizer, "eos_id", None)
  bare = random_models.with_meta(loaded, boundary="none")
  assert "lacks the token that this pipeline" in runs.told(
    score, bare, ["Tom sat ."], "mlm", **pipelines.options("2024", "mlm")
  )


NAMED = "--checkpoint=nowhere"
PROMPT = (NAMED, "--prompt=Tom")


@pytest.mark.parametrize(
  ("name", "args", "told"),
  [
    ("generate", PROMPT, "nowhere holds no checkpoint"),
    ("generate", (NAMED,), "required: --prompt"),
    ("generate", (*PROMPT, "--top_p=1.5"), "--top_p=1.5 is not over 0"),
    ("generate", (*PROMPT, "--count=1000000000"), "at most 4096"),
    ("generate", (*PROMPT, "--steps=2"), "--steps=2"),
    ("fill", (NAMED, "--text=<mask>"), "nowhere holds no checkpoint"),
    ("fill", (NAMED, "--text=<mask>", "--top=-1"), "--top=-1 is not at"),
  ],
)
def test_bad_input_is_told(name, args, told):
  line = runs.refused(f"antlm_jax.commands.{name}", *args)
  assert told in line and line.isascii()


PROMPTS = ("Tom sat", "", "the dogs near the hills often rested and Tom")


def encoded_whole(loaded, prompt, count):
  """Continues a prompt by the likeliest tokens, encoding it anew for each."""
  t = loaded.tokenizer
  tokens = np.zeros(48, np.int32)
  start = [t.bos_id, *t.encode(prompt)]
  tokens[: len(start)] = start
  banned = t.special.copy()
  banned[t.eos_id] = False

  for end in range(len(start), len(start) + count):
    logits = helpers.logits(loaded, tokens, CAUSAL)[end - 1]
    tokens[end] = np.where(banned, -np.inf, logits).argmax()
    if tokens[end] == t.eos_id:
      return t.decode(tokens[:end])
  return t.decode(tokens[: end + 1])


@pytest.mark.parametrize("encoder", ["llama", "ltg_bert"])
def test_greedy_is_what_encoding_it_all_would_choose(loaded, encoder):
  if encoder == "ltg_bert":
    settings = config.changes(encoder).model.to_dict()
    settings.update(layers=1, width=32, heads=2, mlp_width=48, max_seq_len=48)
    model = models.build_model(settings, loaded.tokenizer.vocab_size)
    params = helpers.random_params(model)
    loaded = dataclasses.replace(loaded, model=model, params=params)
  texts = generate(loaded, PROMPTS, tokens=20, temperature=0, count=2)
  expected = [encoded_whole(loaded, prompt, 20) for prompt in PROMPTS]
  assert texts == np.repeat(expected, 2).tolist()
  assert len(set(texts)) == len(PROMPTS)


SAMPLED = {"tokens": 20, "temperature": 1.0, "count": 2}


FILLED = {"steps": 4, "order": "ancestral", "block_length": 7}


def filled(*args, **how):
  return [one.text for one in fill(*args, **how)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
  ("sample", "prompts", "how"),
  [
    (generate, PROMPTS, SAMPLED),
    (filled, ("Tom sat", "The <mask> near Tom <mask> .", ""), FILLED),
  ],
)
def test_draws_follow_the_seed_not_the_other_rows(loaded, sample, prompts, how):
  how = SAMPLED | how
  alone = [text for one in prompts for text in sample(loaded, one, **how)]
  assert sample(loaded, prompts, **how) == alone
  assert len(set(alone)) == 2 * len(prompts)
  assert sample(loaded, prompts, seed=1, **how) != alone


def test_a_stream_is_the_text_as_it_grows(loaded):
  seen = []
  found = generate(loaded, PROMPTS, **SAMPLED, watch=seen.append)
  *growing, whole = seen
  assert whole == found == generate(loaded, PROMPTS, **SAMPLED)
  assert len(growing) == 2
  for early, late in zip(growing, [*growing[1:], whole], strict=True):
    for a, b in zip(early, late, strict=True):
      assert b.startswith(a.rstrip("\ufffd"))


def test_special_tokens_are_never_sampled(loaded, monkeypatch):
  """A high temperature makes all tokens about equally likely."""
  seen = []
  monkeypatch.setattr(
    loaded.tokenizer, "decode", lambda row: seen.append(row) or ""
  )
  generate(loaded, "Tom", tokens=40, temperature=1e6, count=40)
  special = loaded.tokenizer.special
  assert all(not special[row[1:]].any() for row in seen)
  assert min(map(len, seen)) < max(map(len, seen)) <= 48  # EOS ends a text


def test_top_k_and_top_p():
  """Catches a tiny temperature that overflows in float32."""
  logits = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))
  for sampling, allowed in (
    ({"temperature": 1.0}, {0, 1, 2, 3}),
    ({"temperature": 1.0, "top_k": 2}, {1, 3}),
    ({"temperature": 1.0, "top_p": 0.7}, {1, 3}),
    ({"temperature": 1.0, "top_p": 0.01}, {1}),
    ({"temperature": 0.0}, {1}),
    ({"temperature": 1e-39}, {1}),
  ):
    keys = jax.random.split(jax.random.key(0), 200)
    drawn = jax.jit(
      jax.vmap(lambda key, s=sampling: draw_tokens(key, logits, **s))
    )
    assert set(np.asarray(drawn(keys)).ravel().tolist()) == allowed


def test_a_generated_text_ends_with_a_whole_character():
  """Catches signs of half a character at the end of Japanese."""
  special = ["<pad>", "<s>", "</s>", "<mask>"]
  vocab = {token: i for i, token in enumerate([*special, *"çĮ«"])}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens(special)
  model = models.build_model(helpers.TINY, len(vocab))
  cat = framing.TextModel(
    model=model,
    params=helpers.random_params(model),
    meta=Meta(
      config.Config(curriculum="1C"), Tokenizer(backend), "bos_eos", data=""
    ),
  )
  texts = generate(cat, "猫猫", tokens=1, temperature=9.0, count=20)
  assert {*texts} == {"猫猫"}
  longer = generate(cat, "猫", tokens=3, temperature=9.0, count=200)
  assert "猫猫" in longer


def test_generate_refuses(loaded):
  none = random_models.with_meta(loaded, boundary="none")
  for model, prompt, options, message in (
    (loaded, ["Tom", "Tom " * 60], {}, "max_seq_len=48"),
    (none, "", {}, "the prompt is empty"),
    (random_models.with_curriculum(loaded, "1M"), "Tom", {}, ": use fill"),
    (loaded, "caf\udce9", {}, "half of a surrogate"),
    (loaded, [], {}, "no prompt"),
    (loaded, "Tom", {"tokens": 0}, "tokens=0"),
    (loaded, "Tom", {"count": 0}, "count=0"),
    (loaded, "Tom", {"top_p": 0.0}, "top_p=0"),
    (loaded, "Tom", {"temperature": -1.0}, "temperature=-1"),
  ):
    assert message in runs.told(generate, model, prompt, **options)


def test_generate_command(run, loaded, capsys):
  args = f"--checkpoint={run}", "--prompt=Tom sat", "--tokens=99"
  runs.main("antlm_jax.commands.generate", *args)
  said = capsys.readouterr()
  assert said.out == generate(loaded, "Tom sat", tokens=99)[0] + "\n"
  assert "max_seq_len=48" in said.err


def test_masks_stand_like_words(loaded):
  """The text around a mask is encoded as that around a word."""
  t = loaded.tokenizer
  assert len(t.encode("the")) == 1
  for before, masks, after in (
    ("", 1, " sat ."),
    ("near ", 1, "."),
    ("", 1, ""),
    ("Tom and ", 1, " , Tom sat 0 ."),
    ("near ", 2, " ."),
    ("", 2, " ."),
  ):
    text = before + "<mask>" * masks + after
    ids = [*t.encode(before.strip()), *[t.mask_id] * masks]
    ids += t.encode("the" + after)[1:].tolist()
    assert encode_framed(loaded, text).tolist() == [t.bos_id, *ids, t.eos_id]


def test_a_prompt_may_hold_masks(loaded):
  of = loaded.tokenizer
  start = generation.encode_prompt(
    loaded, "the dogs <mask> rested . <mask>"
  ).tolist()
  first, second = np.flatnonzero(np.array(start) == of.mask_id)
  assert start[:first] == [of.bos_id, *of.encode("the dogs")]
  assert start[first + 1 : second] == of.encode("rested .").tolist()
  assert second == len(start) - 1
