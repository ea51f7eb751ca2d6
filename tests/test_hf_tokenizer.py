"""The exported tokenizer.json, compared with the model's own tokenizer."""

import json
import re

import pytest
import tokenizers

from antlm_jax.data import toy_english
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.hf import check, export
from antlm_jax.hf import tokenizer as hf_tokenizers
from antlm_jax.inference import framing
from antlm_jax.inference.model import load
from tests import random_models, runs

of = tokenizers.pre_tokenizers
LLAMA_3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  random_models.save(folder, random_models.tokenizer())
  return load(folder)


def sentence_piece(normalizer=None, pre_tokenizer=None):
  """Returns a tokenizer that writes spaces as SentencePiece does."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = metaspace("always")  # no token spans two words
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    show_progress=False,
    initial_alphabet=[*"▁abcdefghijklmnopqrstuvwxyz.,()A0</>"],
    special_tokens=["<pad>", "<s>", "</s>", "<mask>"],
  )
  backend.train_from_iterator(toy_english.make_sentences(0, 300), trainer)
  backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
  return backend


def metaspace(scheme):
  return of.Metaspace(prepend_scheme=scheme)


def llama_2():
  norm = tokenizers.normalizers
  return norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])


def in_bytes(*steps):
  """Returns our vocabulary with other pre-tokenizers."""
  backend = random_models.tokenizer()._backend
  backend.pre_tokenizer = of.Sequence(list(steps))
  return backend


def without_space(**options):
  """Returns SmolLM2's pre-tokenizer, which adds no space before a text."""
  return of.ByteLevel(add_prefix_space=False, **options)


def llama_3():
  split = of.Split(tokenizers.Regex(LLAMA_3), "isolated")
  return in_bytes(split, without_space(use_regex=False))


def lower_case():
  """Returns a tokenizer whose mask has another name in normalized texts."""
  text = random_models.tokenizer().to_json().replace("<mask>", "[MASK]")
  backend = tokenizers.Tokenizer.from_str(text)
  backend.normalizer = tokenizers.normalizers.Lowercase()
  return backend


def added_last():
  """Returns a tokenizer whose mask follows special tokens outside the model.

  So have Llama 3, Qwen and ModernBERT.
  """
  text = random_models.tokenizer().to_json().replace("<mask>", "<|sep|>")
  tokens = "<|im_start|>", "<|im_end|>", "<mask>"
  return Tokenizer.from_json(text).extended(tokens)._backend


def alphabet(kind):
  """Returns a tokenizer of letters, to which a space is a letter as well."""
  return Tokenizer.train(toy_english.make_sentences(0, 300), 300, kind)._backend


TOKENIZERS = {
  "ours": lambda: random_models.tokenizer()._backend,
  "wordpiece": lambda: random_models.tokenizer(400, "wordpiece")._backend,
  "SmolLM2": lambda: in_bytes(without_space()),
  "digits first": lambda: in_bytes(of.Digits(), of.ByteLevel()),
  "Llama 3": llama_3,
  "lower case": lower_case,
  "added last": added_last,
  "Llama 2": lambda: sentence_piece(llama_2()),
  "Metaspace always": lambda: sentence_piece(None, metaspace("always")),
  "XLM-R": lambda: sentence_piece(
    None, of.Sequence([of.WhitespaceSplit(), metaspace("always")])
  ),
  "Metaspace first": lambda: sentence_piece(None, metaspace("first")),
  "characters": lambda: alphabet("characters"),
  "kmer:3": lambda: alphabet("kmer:3"),
}


# Those that cut texts into words, so that a word's tokens depend on it alone.
OTHERS = "Llama 2", "digits first", "characters", "kmer:3"
WORDS = [kind for kind in TOKENIZERS if kind not in OTHERS]
TEXTS = [
  *toy_english.make_sentences(0, 12),
  "the dogs near\n\nthe house (rest), don't they",
  "a cat\trests \n often.\n\n  the dogs  rest",
  "1984 dogs and 3 cats; Ann's horse",
  "dogs",
]


@pytest.fixture(params=TOKENIZERS)
def made(request, llama):
  """A model with a tokenizer, and the tokenizer that it exports."""
  tokenizer = Tokenizer(TOKENIZERS[request.param]())
  loaded = random_models.with_meta(llama, tokenizer=tokenizer)
  ids = [tokenizer.bos_id], [tokenizer.eos_id]
  files = hf_tokenizers.files(tokenizer, *ids, 48)
  text = json.dumps(files["tokenizer.json"])
  return request.param, loaded, tokenizers.Tokenizer.from_str(text)


def test_special_tokens_are_decoded_by_their_names(made):
  """Catches stand-ins in a decoded text."""
  _, loaded, theirs = made
  own = loaded.tokenizer
  for index in own.special.tolist():
    assert theirs.id_to_token(index) == own.token(index)
    assert theirs.decode([index], skip_special_tokens=False).strip(" ") in (
      own.token(index),
      own.decode([index], skip_special=False).strip(" "),
    )
  text = "the dogs rest"
  ids = theirs.encode(text).ids
  assert ids[0] == own.bos_id and ids[-1] == own.eos_id
  assert theirs.decode(ids).strip(" ▁") == own.decode(ids).strip(" ▁")
  bos = own.token(own.bos_id)
  found = theirs.encode(f"a{bos} dog {bos}", add_special_tokens=False).ids
  assert own.bos_id not in found


def test_changes_of_a_tokenizer_json_are_copies(made):
  """Catches a method that edits its tokenizer.json in place."""
  _, loaded, _ = made
  tokenizer = loaded.tokenizer
  masked = framing.tokenizer_with_masks(tokenizer)
  text = masked.to_text()
  names = {tokenizer.bos_id: "<s>", tokenizer.eos_id: "</s>"}
  for changed in (
    masked.with_special_tokens({7: "seven"}),
    masked.with_flag("special", True, {tokenizer.mask_id}),
    masked.without_special(0),
    masked.special_as_text(tokenizer.mask_id),
    masked.with_frame([tokenizer.bos_id], [tokenizer.eos_id], names),
  ):
    assert changed.to_text() != text
    changed.with_trimmed_offsets(tokenizer.mask_id).build()
    assert masked.to_text() == text


def test_a_mask_that_only_normalization_writes_is_text():
  """Catches stand-ins among the tokens that antlm scores."""
  backend = random_models.tokenizer()._backend
  backend.normalizer = tokenizers.normalizers.NFKC()
  own = Tokenizer(backend)
  read = framing.tokenizer_with_masks(own).build()
  bare = json.loads(own.to_json()) | {"added_tokens": []}
  plain = tokenizers.Tokenizer.from_str(json.dumps(bare))
  text = "the \uff1cmask\uff1e dogs"  # NFKC makes it <mask>
  ids = plain.encode(text, add_special_tokens=False).ids
  assert read.encode(text, add_special_tokens=False).ids == ids


def test_a_mask_stands_for_a_word_of_the_whole_text(made):
  """Catches tokens that change, or text that is lost, next to a mask."""
  kind, loaded, theirs = made
  if kind not in WORDS:
    pytest.skip("a word's tokens depend on the words next to it")
  backend, mask_id = loaded.tokenizer._backend, loaded.tokenizer.mask_id
  mask = backend.id_to_token(mask_id)
  for text in TEXTS:
    whole = backend.encode(text, add_special_tokens=False)
    for word in re.finditer(r"(?<!\S)[a-zA-Z]+", text):
      start, end = word.span()
      if text[start - 1 : start] == " ":
        start -= 1
      expected, masked = [], False
      for token, (a, b) in zip(whole.ids, whole.offsets, strict=True):
        if a < end and b > start and text[a:b].strip() + " " != " ":
          expected += [] if masked else [mask_id]
          masked = True
        elif not (a < end and b > start):
          expected.append(token)
      masked = text[: word.start()] + mask + text[word.end() :]
      for found in (
        framing.encode_framed(loaded, masked),
        theirs.encode(masked).ids,
      ):
        assert list(found)[1:-1] == expected, masked


def test_texts_without_masks_are_read_by_the_tokenizers_own_steps(made):
  """Catches exports that rewrite a step: XLM-R's read four of five unlike."""
  _, loaded, theirs = made
  for text in (*TEXTS, *check._ODD, "</s> the", " the dogs"):
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ids == loaded.tokenizer.encode(text).tolist(), text


@pytest.mark.sample(6)
def test_the_check_accepts_every_tokenizer(made):
  """Catches a check that would refuse tokenizers in use."""
  _, loaded, theirs = made
  frame = [loaded.tokenizer.bos_id], [loaded.tokenizer.eos_id]
  exported = {"tokenizer.json": json.loads(theirs.to_str())}
  check.same_tokens(loaded, exported, *frame)


def test_tokens_begin_at_their_word(made):
  """Catches spans with a space, of which a tagger's entities are made."""
  kind, _, theirs = made
  if kind in ("Llama 2", "Metaspace first", "digits first"):
    pytest.skip("no step of the library trims these")
  for text in ("the dogs near", " the dogs", "  the  dogs rest.", "a cat"):
    for start, end in theirs.encode(text, add_special_tokens=False).offsets:
      assert text[start:end].strip() in ("", text[start:end]), text
    words = re.finditer(r"\S+", text)
    begins = {a for a, b in theirs.encode(text).offsets if b > a}
    assert {word.start() for word in words} <= begins, text


def test_an_exported_tokenizer_is_read_back(made):
  """Catches masks of an export that become tokens of a prepared text."""
  _, loaded, theirs = made
  again = Tokenizer.from_json(theirs.to_str())
  for text in (*TEXTS, "the <mask> [MASK] dogs", "a </s> b", "<s>"):
    assert again.encode(text).tolist() == loaded.tokenizer.encode(text).tolist()
  assert again.special.tolist() == loaded.tokenizer.special.tolist()


def test_a_difference_is_an_error_and_writes_nothing(
  llama, tmp_path, monkeypatch
):
  """Catches an export that is written although it reads texts unlike ours."""
  right = hf_tokenizers.files

  def wrong(*args):
    made = right(*args)
    steps = made["tokenizer.json"]["pre_tokenizer"]["pretokenizers"]
    steps[0]["add_prefix_space"] = False
    return made

  monkeypatch.setattr(hf_tokenizers, "files", wrong)
  with pytest.raises(UserError, match=r"would read '.*' as \[1, .*\], but"):
    export.export_model(llama, tmp_path / "hf")
  assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_drops_the_stand_ins_is_refused(llama):
  """Catches masks that vanish from a text without a word."""
  backend = random_models.tokenizer()._backend
  drop = tokenizers.Regex("[^a-z <>]")
  backend.normalizer = tokenizers.normalizers.Replace(drop, "")
  loaded = random_models.with_meta(llama, tokenizer=Tokenizer(backend))
  assert "cannot read <mask> in a text" in runs.told(
    framing.encode_framed, loaded, "the <mask> rest"
  )
