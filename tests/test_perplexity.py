"""Perplexity and LAMBADA, compared with lm-eval and slow loops."""

import dataclasses
import json
import math

import numpy as np
import pytest

from antlm_jax import score
from antlm_jax.data import document_store, toy_english
from antlm_jax.data.prepared_folder import Manifest
from antlm_jax.evals.zero_shot import lambada, perplexity, texts
from antlm_jax.inference import scoring
from antlm_jax.inference.scoring import EncodedText
from antlm_jax.masks import CAUSAL
from tests import helpers, hub, random_models, runs

run = random_models.run()
LONGEST = 48  # the model's max_seq_len
SENTENCES = list(toy_english.make_sentences(1, 40))
# Shorter than a row, and several times as long
DOCUMENTS = [SENTENCES[0], " ".join(SENTENCES[1:4]), " ".join(SENTENCES[4:])]


def predicted(loaded, documents, mode="causal"):
  """Returns the outcome, and the nats of each document."""
  asked = perplexity.PerplexitySettings(data="x", mode=mode)
  found = perplexity.measure_perplexity(loaded, documents, asked)
  return found, [item["nats"] for item in found.items]


def last_words(loaded, items, mode="causal"):
  return lambada.score_clozes(
    loaded, items, texts.TextSettings(data="x", mode=mode)
  )


@pytest.mark.parametrize("length", [1, 9, 10, 11, 12, 57])
@pytest.mark.parametrize("stride", [1, 4, 9, 10])
@pytest.mark.parametrize("mode", ["causal", "mlm", "mntp"])
def test_every_token_is_scored_once(length, stride, mode):
  """Scores `length` tokens between a first and a last token, in rows of 10."""
  wanted = scoring.Pass(mode != "causal", int(mode != "mlm"))
  text = EncodedText(np.arange(length + 2), 1, length + 1)
  found = []
  if mode == "mntp" and stride == 10:
    # No position of a window would predict its first token.
    assert "stride=10 is over 9, the most" in runs.told(
      next, perplexity.windows(text, [wanted], 10, stride)
    )
    return
  for part in perplexity.windows(text, [wanted], 10, stride):
    targets = part.tokens[part.start : part.stop].tolist()
    found += targets
    assert wanted.reads(part) <= 10
    before, end = targets[0] - part.tokens[0], part.tokens[-1]
    # Each token sees all or at least the promised context; if masked, also
    # to its right.
    promised = (10 - stride) // (1 if mode == "causal" else 2)
    assert part.tokens[0] == 0 or before >= promised
    assert part.start >= wanted.shift
    if mode != "causal":
      assert end == length + 1 or end - targets[-1] >= promised
  assert found == list(range(1, length + 1))


def test_a_short_text_has_the_sum_of_its_scores(loaded):
  for mode in scoring.MODES:
    _, nats = predicted(loaded, SENTENCES[:6], mode)
    expected = score(loaded, SENTENCES[:6], mode)
    np.testing.assert_allclose(nats, -expected, rtol=1e-5)


def test_unknown_tokens_are_counted(loaded, monkeypatch, capsys):
  """Catches text that cannot be read and is therefore easy to predict."""
  ids = loaded.tokenizer.encode(SENTENCES[0])
  monkeypatch.setitem(vars(loaded.tokenizer), "unk_id", int(ids[0]))
  predicted(loaded, SENTENCES[:1])
  count = int((ids == ids[0]).sum())
  said = f"{count} of {len(ids)} tokens are unknown"
  assert said in capsys.readouterr().out


def test_figures_are_their_definitions():
  found = perplexity.perplexity_figures(
    ["é b", " c\n"], [3, 2], np.array([4, 1.0]), np.array([1, 1])
  )
  expected = {"documents": 2, "tokens": 5, "words": 3, "bytes": 7}
  expected |= {"nats_per_token": 1.0, "token_perplexity": math.e}
  expected |= {"word_perplexity": math.exp(5 / 3), "accuracy": 0.4}
  expected |= {"bits_per_byte": 5 / math.log(2) / 7}
  assert found.summary == pytest.approx(expected)


def test_windows_are_as_long_as_the_rows_of_training(loaded):
  """Catches positions of which training knows nothing."""
  asked = perplexity.PerplexitySettings(data="x", mode="causal")
  meta = dataclasses.replace(loaded.meta, row_tokens=32)
  short = dataclasses.replace(loaded, meta=meta)
  found = perplexity.measure_perplexity(short, DOCUMENTS, asked)
  own = dataclasses.replace(asked, window=32)
  expected = perplexity.measure_perplexity(loaded, DOCUMENTS, own)
  assert found.summary == expected.summary
  assert found.by_position[-1]["position"] == 32
  assert found.summary != predicted(loaded, DOCUMENTS)[0].summary


def test_texts_in_memory_are_those_of_a_file(loaded, run, tmp_path, capsys):
  """The function and the command measure the same."""
  path = runs.write_lines(tmp_path / "a.jsonl", [{"x": t} for t in DOCUMENTS])
  how = {"mode": "mlm", "stride": 7, "limit": 2, "quiet": True}
  found = perplexity.perplexity(loaded, iter(DOCUMENTS), **how)
  read = perplexity.perplexity(run, path, column="x", **how)
  assert capsys.readouterr().out == "" and found == read
  assert found.documents == 2 and len(found.items) == 2
  words = "--mode=mlm", "--stride=7", "--limit=2", "--column=x"
  told = runs.score(run, path, tmp_path / "out", *words, task="perplexity")
  assert found.summary.items() <= told.items()
  assert f"{found.bits_per_byte:.4f} bits per byte" in repr(found)
  causal = perplexity.perplexity(loaded, DOCUMENTS, mode="clm", quiet=True)
  assert causal == predicted(loaded, DOCUMENTS)[0]
  for given, more, message in (
    ([], {}, "the list of texts holds no text"),
    (DOCUMENTS, {"mode": "both"}, "mode='both' is not one of causal"),
    (DOCUMENTS, {"stride": 49}, "stride=49 is over 48, the most in windows"),
    (DOCUMENTS, {"window": 49}, "window=49 is over the model's max_seq_len"),
  ):
    line = runs.told(perplexity.perplexity, loaded, given, **more)
    assert line.startswith(message)


@pytest.fixture(scope="module")
def theirs(loaded, tmp_path_factory):
  pytest.importorskip("torch")
  pytest.importorskip("lm_eval")
  from lm_eval.models.huggingface import HFLM

  from antlm_jax.hf import export

  folder = tmp_path_factory.mktemp("hf")
  (path,) = export.export_model(loaded, folder / "hf", ("causal",))
  how = {"dtype": "float32", "device": "cpu", "max_length": LONGEST}
  return HFLM(pretrained=str(path), batch_size=1, **how)


def requests(kind, *args):
  from lm_eval.api.instance import Instance

  return [Instance(kind, {}, a, i) for i, a in enumerate(args)]


class TestLmEval:
  pytestmark = hub.MARKS

  def test_rolling_log_likelihoods(self, loaded, theirs, monkeypatch):
    # Otherwise lm-eval adds <s> to the <s> of the tokenizer.
    monkeypatch.setattr(theirs, "add_bos_token", False)
    asked = requests("loglikelihood_rolling", *((d,) for d in DOCUMENTS))
    found = theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    got, nats = predicted(loaded, DOCUMENTS)
    np.testing.assert_allclose(nats, -np.array(found), rtol=1e-6)
    assert got.summary["tokens"] > 5 * LONGEST
    words = sum(len(d.split()) for d in DOCUMENTS)
    expected = math.exp(-sum(found) / words)
    assert got.summary["word_perplexity"] == pytest.approx(expected, rel=1e-6)

  def test_last_words(self, loaded, theirs):
    """Random contexts, some too long, followed by likely and other words."""
    tokens = loaded.tokenizer
    items = []
    for index in range(60):
      context = " ".join(SENTENCES[index % 30 : index % 30 + 1 + index // 10])
      word = SENTENCES[-1].split()[index % 3]
      ids = np.append([tokens.bos_id], tokens.encode(context))[-LONGEST:]
      likeliest = helpers.logits(loaded, ids, CAUSAL)[-1].argmax()
      said = tokens.decode([*tokens.encode("a"), likeliest])[1:]
      if said.startswith(" ") and said.strip():
        word = said.strip()
      items.append((context, word))
    asked = requests("loglikelihood", *((c, f" {w}") for c, w in items))
    found = theirs.loglikelihood(asked, disable_tqdm=True)
    got = last_words(loaded, items)
    logprobs, greedy = zip(*found, strict=True)
    ours = [line["logprob"] for line in got.lines]
    np.testing.assert_allclose(ours, logprobs, rtol=1e-5)
    assert [line["correct"] for line in got.lines] == list(greedy)
    assert 5 < sum(greedy) < 55
    assert got.summary["word_perplexity"] == pytest.approx(
      math.exp(-np.mean(logprobs)), rel=1e-6
    )


def test_a_last_word_behind_masks(loaded):
  tokenizer = loaded.tokenizer
  items = [
    ("the dogs near", "xyzzy", ""),
    ("Tom", "sat", ""),
    ("Tom", "sat", '." the dogs'),  # which masked modes see
  ]
  got = last_words(loaded, items, "mlm")
  for (context, word, ending), line in zip(items, got.lines, strict=True):
    behind = tokenizer.encode(f"a{ending}")[len(tokenizer.encode("a")) :]
    before = [tokenizer.bos_id, *tokenizer.encode(context)]
    pieces = tokenizer.encode(f"a {word}")[len(tokenizer.encode("a")) :]
    total, hits = 0.0, []
    for i, piece in enumerate(pieces):
      hidden = [tokenizer.mask_id] * (len(pieces) - i)
      row = [*before, *pieces[:i], *hidden, *behind, tokenizer.eos_id]
      logits = helpers.logits(loaded, row)[len(before) + i]
      total += helpers.log_softmax(logits)[piece]
      hits.append(logits.argmax() == piece)
    assert line["logprob"] == pytest.approx(total, rel=1e-5)
    assert line["correct"] == all(hits)


def test_the_same_texts_of_any_kind(run, loaded, prepared, tmp_path, capsys):
  """A prepared folder with another tokenizer, and its text as files."""
  names = (tmp_path / str(i) for i in range(9))

  def summary(data, *options):
    how = "--mode=causal", *options
    return runs.score(run, data, next(names), *how, task="perplexity")

  found = summary(prepared)
  dev = Manifest.load(prepared).splits["dev"]
  counts = [found[name] for name in ("documents", "words", "bytes")]
  assert counts == [dev.documents, dev.words, dev.text_bytes]
  kept = document_store.read_kept_documents(prepared, "dev")
  those = [document.text for document in kept]
  ours = predicted(loaded, those)[0].summary
  assert {k: found[k] for k in ours} == pytest.approx(ours)
  plain = tmp_path / "dev.txt"
  plain.write_text("\n".join(those))
  lines = runs.write_lines(tmp_path / "dev.jsonl", [{"body": t} for t in those])
  for data, option in ((plain, "--documents=line"), (lines, "--column=body")):
    again = summary(data, option)
    assert {k: again[k] for k in ours} == {k: found[k] for k in ours}
  assert f"{found['bits_per_byte']:.4f}" in capsys.readouterr().out
  assert summary(lines, "--column=body", "--limit=3")["documents"] == 3


def test_lambada_command(run, tmp_path, capsys):
  rows = [{"text": " ".join(SENTENCES[i : i + 9])} for i in range(4)]
  data = runs.write_lines(tmp_path / "lambada.jsonl", rows)
  how = "--mode=causal", "--documents=line"
  found = runs.score(run, data, tmp_path / "out", *how, task="lambada")
  assert found["texts"] == 4 and found["word_perplexity"] > 1
  # The same texts as prompts and answers.
  parts = [row["text"].rpartition(" ")[::2] for row in rows]
  rows = [{"prompt": a + " ", "answer": b} for a, b in parts]
  data = runs.write_lines(tmp_path / "parts.jsonl", rows)
  again = runs.score(run, data, tmp_path / "parts", *how, task="lambada")
  assert again["word_perplexity"] == found["word_perplexity"]
  # The same texts as lines, the form of the original.
  data = tmp_path / "lambada.txt"
  data.write_text("".join(f"{' '.join(pair)}\n" for pair in parts))
  again = runs.score(run, data, tmp_path / "lines", how[0], task="lambada")
  assert again["texts"] == 4
  assert again["word_perplexity"] == found["word_perplexity"]
  assert "perplexity" in capsys.readouterr().out


def test_an_answer_is_at_its_place_in_the_prompt(run, tmp_path):
  """Catches a placeholder that is read as text before the answer."""
  plain = [("the dogs near", "sat"), ("Tom near the", "hills")]
  rows = [{"prompt": f"{a} {{answer}}.”", "answer": f" {b}"} for a, b in plain]
  lines = {}
  for name, those in (
    ("plain", [{"prompt": a, "answer": b} for a, b in plain]),
    ("placed", rows),
  ):
    data = runs.write_lines(tmp_path / f"{name}.jsonl", those)
    runs.score(run, data, tmp_path / name, "--mode=causal", task="lambada")
    (found,) = (tmp_path / name).rglob("items.jsonl")
    lines[name] = [json.loads(x) for x in found.read_text().splitlines()]
  # From left to right, a model does not see the ending.
  for placed, one in zip(lines["placed"], lines["plain"], strict=True):
    assert placed.pop("ending") == ".”"
    assert placed == one | {"logprob": pytest.approx(one["logprob"])}


def test_files_that_are_not_read_are_told(tmp_path, capsys):
  """Catches the perplexity of train alone as that of the whole folder."""
  for name in ("train.txt", "more.txt"):
    (tmp_path / name).write_text(f"text of {name}\n")
  asked = texts.TextSettings(data=str(tmp_path), mode="causal")
  assert texts.read_texts(asked) == ["text of train.txt"]
  told = capsys.readouterr().out
  assert "train is read" in told and "named train: more.txt" in told


def test_a_test_set_needs_no_text_to_train_on(tmp_path):
  """Catches a long path to a file that is taken for a text."""
  path = tmp_path.joinpath(*["d" * 100] * 3, "wiki.test.tokens")
  path.parent.mkdir(parents=True)
  path.write_text("a test\n")
  for data in (tmp_path, path):
    asked = texts.TextSettings(data=str(data), mode="causal", split="test")
    assert texts.read_texts(asked) == ["a test"]
