"""Tokenizers of many forms: ids, spans, special tokens, digits, training."""

import functools
import itertools
import json
import time
import unicodedata

import hypothesis
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import (
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
  trainers,
)

from antlm_jax.commands.prepare import prepare
from antlm_jax.data import coverage, packing, toy_english
from antlm_jax.data.tokenizer import KINDS, Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.hf.check import check_exportable
from antlm_jax.inference import framing
from antlm_jax.objectives.corruption import Draw, Segments, Vocabulary
from antlm_jax.objectives.objective import OBJECTIVES
from tests import runs

_TEXTS = (
  "Tom lives in Amsterdam near the old harbour .",
  "café Zoë naïve Łódź the cat sat in Paris 1990 — 2000 (approx.)",
  "Mary\u2019s “book” cost €5 … 한국 서울 我们 喜欢 ไทย ก็ ﬁn",
) * 20
_SPLITS = {
  "byte level": lambda: _byte_level(True),
  "byte level, no space": lambda: _byte_level(False),
  "digits first": lambda: _both(_digits(), _byte_level(True)),
  "digits last": lambda: _both(_byte_level(True), _digits()),
  "marks first": lambda: _both(pre_tokenizers.Punctuation(), _byte_level(True)),
  "words, bytes": lambda: _both(pre_tokenizers.Whitespace(), _byte_level(True)),
  **{
    f"metaspace {scheme}": functools.partial(
      pre_tokenizers.Metaspace, prepend_scheme=scheme
    )
    for scheme in ("always", "first", "never")
  },
  "words, metaspace": lambda: _both(
    pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()
  ),
  "BERT": pre_tokenizers.BertPreTokenizer,
}
_NORMALIZERS = {
  "none": lambda: None,
  "NFC": normalizers.NFC,
  "NFD": normalizers.NFD,
  "NFKC": normalizers.NFKC,
  "lower case": normalizers.Lowercase,
  "no accents": lambda: normalizers.Sequence(
    [normalizers.NFD(), normalizers.StripAccents()]
  ),
  "BERT": lambda: normalizers.BertNormalizer(lowercase=True),
}
# Letters, digits, spaces, marks, joined forms and signs of several scripts.
_CHARACTERS = (
  "aTé e19 \t\n.,(\u2019—▁ﬁ½٣२İ我。한국"
  "ᄒ\u1161\u0301\u0308\u0323ก็ไ🙂\u200d्न\xa0"
)


def _byte_level(space: bool):
  return pre_tokenizers.ByteLevel(add_prefix_space=space)


def _digits():
  return pre_tokenizers.Digits(individual_digits=True)


def _both(*parts):
  return pre_tokenizers.Sequence(list(parts))


@functools.cache
def trained(split: str, normalizer: str, model: str) -> Tokenizer:
  if split == "ours":
    return Tokenizer.train(_TEXTS, 400, model)
  options = {
    "special_tokens": ["<pad>", "<s>", "</s>", "<mask>", "<unk>"],
    "vocab_size": 400,
    "show_progress": False,
  }
  if model == "unigram":
    made = models.Unigram()
    trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
  elif model == "wordpiece":
    made = models.WordPiece(unk_token="<unk>")
    trainer = trainers.WordPieceTrainer(**options)
  else:
    made = models.BPE(unk_token="<unk>")
    trainer = trainers.BpeTrainer(
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options
    )
  backend = tokenizers.Tokenizer(made)
  backend.pre_tokenizer = _SPLITS[split]()
  if (found := _NORMALIZERS[normalizer]()) is not None:
    backend.normalizer = found
  backend.train_from_iterator(_TEXTS, trainer)
  if "ByteLevel" in backend.to_str():
    backend.decoder = decoders.ByteLevel()
  return Tokenizer(backend)


def letters(text: str) -> str:
  """Returns a text without marks, which normalizers put in another order."""
  text = unicodedata.normalize("NFD", text)
  return "".join(c for c in text if unicodedata.category(c)[0] != "M")


def check(t: Tokenizer, text: str, normalizer: str) -> None:
  """Checks the ids and spans of a text."""
  ids, spans = t.encode_offsets(text)
  np.testing.assert_array_equal(ids, t.encode(text))
  for ends in zip(*spans, strict=True):
    assert all(0 <= a <= b <= len(text) for a, b in itertools.pairwise(ends))
  covered, byte_level = np.zeros(len(text), bool), "ByteLevel" in t.to_json()
  made = _NORMALIZERS[normalizer]()
  normal = made.normalize_str if made else str
  for index, (start, end) in zip(ids, spans, strict=True):
    assert 0 <= start <= end <= len(text)
    covered[start:end] = True
    piece, token = text[start:end], t.decode([index], skip_special=False)
    assert piece == piece.lstrip() or not piece.strip()
    if byte_level and "\ufffd" not in token:
      assert letters(token.strip()) in letters(normal(piece))
      assert piece or not token.strip()
  for at in np.flatnonzero(~covered):
    # Characters without a token are those dropped, but not marks of a letter.
    mark = unicodedata.category(text[at])[0] == "M"
    assert text[at].isspace() or not normal(text[at]).strip()
    letter = at and covered[at - 1] and not text[at - 1].isspace()
    assert not (mark and letter)


_FORMS = [
  *(("ours", "NFC", kind) for kind in KINDS),
  *itertools.product(_SPLITS, _NORMALIZERS, ["bpe"]),
  ("metaspace always", "NFKC", "unigram"),
  ("words, metaspace", "NFC", "unigram"),
  ("BERT", "BERT", "wordpiece"),
]


@pytest.mark.parametrize("split, normalizer, model", _FORMS)
@hypothesis.settings(max_examples=30)
@hypothesis.given(text=st.text(_CHARACTERS, max_size=12))
def test_spans_are_those_of_the_encoding(split, normalizer, model, text):
  """Catches ids that differ with offsets, and characters without a token."""
  t = trained(split, normalizer, model)
  check(t, text, normalizer)
  check(t, unicodedata.normalize("NFD", text), normalizer)


ENGLISH = [
  *toy_english.make_sentences(0, 300),
  "in 1990 it cost 3.50, or 12 in 2001",
]
WORDS = {
  "russian": "мы живём старом городе реки домов садов улица окно 22 157",
  "turkish": "üç gün için ½ ó çok güzel süt köy şimdi 22 157",
  "thai": "เรา ไป ตลาด เช้า นี้ ดี มาก กิน ข้าว ที่ บ้าน แม่ น้ำ",
  "chinese": "我们 今天 去 北京 的 市场 买 东西 。 你 喜欢 学习 中文",
  "japanese": "きょう は 市場 へ 行き ます 。 コーヒー を 飲み たい 人々",
}
UNSPACED = ["thai", "chinese", "japanese"]


@functools.cache
def texts(language: str) -> list[str]:
  """Returns texts of random words, without spaces where there are none."""
  words, draw = WORDS[language].split(), np.random.default_rng(0)
  space = "" if language in UNSPACED else " "
  return [space.join(draw.choice(words, 12)) for _ in range(300)]


def test_coverage_is_of_all_of_train_and_dev(monkeypatch, capsys):
  """Catches unknown characters at the end of a text, or held out, unsaid."""
  monkeypatch.setattr(coverage, "MOST_READ", 100)
  train = ["ab ba"] * 900 + ["ab\u0436b ab"] * 100
  shape = {"kind": "characters", "vocab_size": 7, "seq_len": 8}
  prepare(train, dev=["ab\u0436\u0436 ab"] * 9, **shape)
  told = capsys.readouterr().out
  assert "train: the tokenizer has no token for 2." in told
  assert "dev: the tokenizer has no token for 33.33% of" in told


@pytest.mark.parametrize("language", WORDS)
def test_wordpiece_cuts_no_character_for_its_bytes(language):
  """Catches bytes of letters that count as digits: ², ³, ¹, ¼, ½ and ¾."""
  text, sizes = texts(language)[0].replace("22", "").replace("157", ""), {}
  for kind in ("bpe", "wordpiece"):
    t = Tokenizer.train(texts(language), 350, kind)
    sizes[kind] = len(t.encode(text))
    assert "<unk>" not in t.decode(t.encode(text * 9), skip_special=False)
  assert sizes["wordpiece"] <= 1.1 * sizes["bpe"]


def test_digits_are_tokens_as_in_ltg_bert_and_in_other_scripts():
  """Catches another order of English tokens, and digits that are merged."""
  t = Tokenizer.train([*ENGLISH, "१९९० ١٩٩٠"] * 5, 600, "wordpiece")
  spec = json.loads(t.to_json())
  first, *_ = spec["pre_tokenizer"]["pretokenizers"]
  digits = {"type": "Digits", "individual_digits": True}
  spec["pre_tokenizer"]["pretokenizers"] = [first, digits]
  theirs = tokenizers.Tokenizer.from_str(json.dumps(spec))
  for text in ENGLISH:
    assert t.encode(text).tolist() == theirs.encode(text).ids
  for text in ("1990", "१९९०", "١٩٩٠"):
    spans = [span for span in t.encode_offsets(text)[1] if span[0] < span[1]]
    assert {end - start for start, end in spans} == {1}


def test_long_words_are_read_whole_and_cost_no_time():
  """Catches training in the square of a word's length (minutes per MB)."""
  letters = np.random.default_rng(0).choice([*"ACGT"], 400_000)
  text, begin = "".join(letters), time.process_time()
  for kind in ("bpe", "wordpiece"):
    t = Tokenizer.train([text], 1024, kind)
    assert t.decode(t.encode(text[:5000]), skip_special=False) == text[:5000]
    assert len(t.encode(text[:5000])) < 2000
  assert time.process_time() - begin < 15  # the square takes 80 s


NAMES = ["<pad>", "<s>", "</s>", "<mask>", "<unk>", "[CLS]"]


def unflagged() -> Tokenizer:
  """A tokenizer of vocab.json and merges.txt: no special token has a flag."""
  spec = json.loads(Tokenizer.train(ENGLISH, 300).to_json())
  spec["model"]["vocab"] |= {"<unk>": 300, "[CLS]": 301}
  return Tokenizer.from_json(json.dumps(spec | {"added_tokens": []}))


def test_special_tokens_need_no_flag():
  """Catches `<s>` masked, drawn at random or decoded as a word."""
  t = unflagged()
  ids = [t._backend.token_to_id(name) for name in NAMES]
  assert np.flatnonzero(t.special).tolist() == sorted(ids)
  again = Tokenizer.from_json(t.to_json())
  assert again.to_json() == t.to_json()
  text = t.encode("a <s> b</s>")  # in a text they are text
  assert not t.special[text].any() and t.decode(text) == "a <s> b</s>"
  assert t.decode([*ids, *text, *ids]) == "a <s> b</s>"
  rows = np.tile(np.array([*ids, *t.encode("the dogs rest .")]), (500, 1))
  words = vocabulary(t)
  draw = Draw(0, 0, np.arange(500)[:, None])
  found = OBJECTIVES["M"].corrupt(
    rows.astype(np.int32), Segments.whole(*rows.shape), draw, words
  )
  assert not found.predicted[t.special[rows]].any()
  changed = found.inputs[(found.inputs != rows) & (found.inputs != t.mask_id)]
  assert len(changed) and not t.special[changed].any()


def pieces() -> Tokenizer:
  """A Unigram tokenizer with the names of special tokens, as T5's."""
  special = ["<pad>", "<s>", "</s>", "<mask>", "<unk>"]
  letters = [(letter, -5.0) for letter in "▁abcdefghijklmnopqrstuvwxyz</>."]
  scores = [*((name, 0.0) for name in special), *letters, ("▁the", -4.0)]
  backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=4))
  backend.pre_tokenizer = pre_tokenizers.Metaspace()
  backend.add_special_tokens(special)
  return Tokenizer(backend)


def whole_words() -> Tokenizer:
  vocab = {name: i for i, name in enumerate([*NAMES, "the", "dogs"])}
  backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
  backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  return Tokenizer(backend)


@pytest.mark.parametrize(
  "make", [pieces, whole_words, lambda: Tokenizer.train(ENGLISH, 300, "kmer:3")]
)
def test_the_name_of_a_special_token_is_text_to_each_model(make):
  """Catches an end of a document that a text has as a word or piece."""
  t = make()
  special = t.special.copy()
  special[t.unk_id] = False
  for text in ("the <s>dogs</s> </s> the", "<mask>", "<s>the</s>"):
    ids, _ = t.encode_offsets(text)
    assert not special[ids].any()
    assert ids.tolist() == t.encode(text).tolist()
  check_exportable(t, "bos_eos")


def test_a_role_is_that_of_a_special_token():
  """Catches Gemma's tags of HTML, <s> and </s>, taken for <bos> and <eos>."""
  spec = json.loads(Tokenizer.train(ENGLISH, 300).to_json())
  roles = {300 + i: name for i, name in enumerate(("<pad>", "<eos>", "<bos>"))}
  flags = dict.fromkeys(
    ("single_word", "lstrip", "rstrip", "normalized"), False
  )
  del spec["model"]["vocab"]["<pad>"]
  spec["model"]["vocab"] |= {"[pad]": 0} | {n: i for i, n in roles.items()}
  spec["added_tokens"] = [
    flags | {"id": i, "content": name, "special": i >= 300}
    for i, name in ({1: "<s>", 2: "</s>"} | roles).items()
  ]
  t = Tokenizer.from_json(json.dumps(spec))
  assert (t.pad_id, t.eos_id, t.bos_id) == (300, 301, 302)
  assert not t.special[[1, 2]].any() and t.decode([1, 2]) == "<s></s>"


def vocabulary(t: Tokenizer) -> Vocabulary:
  words = t.word_tokens
  return Vocabulary(t.mask_id, t.pad_id, t.eos_id, t.special, lambda: words)


def begun(t: Tokenizer, text: str) -> list[str]:
  """Returns the words of a text, from the tokens that begin them."""
  ids, spans = t.encode_offsets(text)
  begins = vocabulary(t).words(ids[None])[0] == np.arange(len(ids))
  places = [span[0] for span, begin in zip(spans, begins, strict=True) if begin]
  ends = [*places[1:], len(text)]
  found = [text[a:b].strip() for a, b in zip(places, ends, strict=True)]
  return [word for word in found if word]  # a space may be a token of its own


@pytest.mark.parametrize("language", UNSPACED)
@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
@pytest.mark.parametrize("size", [285, 310])
def test_words_without_spaces_are_short_and_begin_at_characters(
  kind, size, language
):
  """Catches clauses taken for words, and words that begin in a character.

  The smaller vocabulary cuts most characters.
  """
  t = Tokenizer.train(texts(language), size, kind)
  for text in texts(language)[:20]:
    words = begun(t, text)
    assert "".join(words) == text  # no word begins inside a character
    assert max(map(len, words)) <= 12 and len(words) >= 10
    for word in words:
      assert unicodedata.category(word[0]) not in ("Mn", "Mc", "Lm")


def test_words_end_where_a_script_without_spaces_does():
  """Catches a word of two scripts, and English words that are cut."""
  t = Tokenizer.train([*texts("chinese"), *ENGLISH, "ab我cd"] * 3, 500)
  assert begun(t, "我cd") == ["我", "cd"]
  english = ENGLISH[0] + " it's (1990), café naïve"
  assert begun(t, english) == english.split()


def test_bytes_begin_words_if_all_their_characters_are_of_such_scripts():
  """Catches first bytes of Korean, Hindi or accented letters cut as words."""
  t = Tokenizer.train(ENGLISH, 300)
  lone = {}  # the first byte of a character, as a token
  for char in "éяи한क가ﬁ😀我あ。京":
    ids, spans = t.encode_offsets("a" + char)
    index = next(i for i, (at, _) in zip(ids, spans, strict=True) if at == 1)
    lone[char] = bool(t.word_tokens.start[index])
    assert t.decode([index]) == "\ufffd"
  assert [char for char, begins in lone.items() if begins] == [*"我あ。京"]


def test_words_of_tokenizers_that_mark_ends_or_nothing():
  """Catches one word for a row, where `</w>` ends words or tokens are words."""
  vocab = {"a": 0, "b": 1, "c</w>": 2, "d</w>": 3, "<s>": 4}
  backend = tokenizers.Tokenizer(
    models.BPE(vocab=vocab, merges=[], end_of_word_suffix="</w>")
  )
  of = vocabulary(Tokenizer(backend))
  assert of.words(np.array([[0, 2, 0, 1, 3, 2]])).tolist() == [
    [0, 0, 2, 2, 2, 5]
  ]
  whole = vocabulary(Tokenizer.of_ids(9))
  assert whole.words(np.array([[5, 3, 3]])).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
  ("tokens", "decoder", "text", "begins"),
  [
    # Llama 2 and Gemma
    ("▁a b <0x0A> .\n\n", None, [0, 1, 2, 1, 3, 1], [0, 0, 2, 2, 2, 5]),
    # Llama 3
    ("Ġa b Ċ .Ċ", decoders.ByteLevel(), [0, 1, 3, 1, 2, 1], [0, 0, 0, 3, 4, 4]),
  ],
)
def test_a_line_end_divides_words(tokens, decoder, text, begins):
  """Catches the last word of a line and the first of the next in one word."""
  vocab = {token: number for number, token in enumerate(tokens.split(" "))}
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
  if decoder is not None:
    backend.decoder = decoder
  of = vocabulary(Tokenizer(backend))
  assert of.words(np.array([text])).tolist() == [begins]


def far_id() -> str:
  spec = json.loads(Tokenizer.train(ENGLISH, 300).to_json())
  spec["model"]["vocab"]["far"] = 4_294_967_295
  return json.dumps(spec)


@pytest.mark.parametrize(
  ("text", "why"),
  [
    (far_id, "'far' has the id 4294967295"),
    *((text, "") for text in ("[]", '{"decoder": 1, "a": 0}', "{}")),
  ],
)
def test_other_json_is_no_tokenizer(tmp_path, text, why):
  """Catches a traceback for vocab.json, and an id that asks for gigabytes."""
  path = tmp_path / "tokenizer.json"
  path.write_text(text if isinstance(text, str) else text())
  line = runs.told(Tokenizer.load, path)
  assert line.startswith(f"{path} is not a tokenizer.json") and why in line


@pytest.mark.parametrize("name", ["spm.model", "vocab.txt", "merges.txt"])
def test_files_of_slow_tokenizers_are_named(tmp_path, name):
  """Catches SentencePiece's file called UTF-16, with advice to convert it."""
  path = tmp_path / name
  path.write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
  line = runs.told(prepare, ["the dogs"] * 9, tokenizer=path, quiet=True)
  assert line.startswith(f"{path} is not a tokenizer.json: write one")
  assert "iconv" not in line


def test_unknown_text_without_a_token_is_refused():
  """Catches a traceback of the library, whose errors are bare Exceptions."""
  whole = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"the": 0})))
  for encode in (whole.encode, whole.encode_offsets):
    assert "no token for unknown" in runs.told(encode, "кот")


def test_dropped_merges_are_for_training_alone():
  """Catches tokens that differ each time that a text is encoded."""
  spec = json.loads(Tokenizer.train(ENGLISH, 300).to_json())
  spec["model"]["dropout"] = 0.9
  made = Tokenizer.from_json(json.dumps(spec))
  plain = Tokenizer.train(ENGLISH, 300).encode(ENGLISH[0])
  assert made.encode(ENGLISH[0]).tolist() == plain.tolist()
  assert json.loads(made.to_json())["model"]["dropout"] is None


def test_special_tokens_around_a_text_need_no_letter_a():
  """Catches a tokenizer of DNA, whose tokens at the end move before it."""
  vocab = {"[CLS]": 0, "[SEP]": 1, "G": 2, "T": 3}
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
  ends = [("[CLS]", 0), ("[SEP]", 1)]
  single = "[CLS] $A [SEP]"
  backend.post_processor = processors.TemplateProcessing(
    single=single, special_tokens=ends
  )
  assert Tokenizer(backend).frame == ([0], [1])
  alone = tokenizers.Tokenizer(models.BPE(vocab={"[CLS]": 0}, merges=[]))
  with pytest.raises(UserError, match="no token for any text"):
    Tokenizer(alone).frame  # noqa: B018


_BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
_CHAT = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
_GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "mask_token": "<mask>"}
_ESM = {"cls_token": "<cls>", "eos_token": "<eos>", "mask_token": "<mask>"}
_TEXT_END = "<|endoftext|>"
_GPT2 = {"bos_token": _TEXT_END, "eos_token": _TEXT_END, "pad_token": _TEXT_END}
_HOLE = {"bos_token": "<a>", "eos_token": "<b>", "mask_token": "<c>"}
_S = {"bos_token": "<s>", "eos_token": "</s>"}
# A tokenizer's special tokens, its template around a text, and fields of its
# files. Expected are the documents' boundary, and the tokens bos, eos and mask.
_STYLES = {
  "GPT-2": (_TEXT_END, "$A", _GPT2, ("eos", _TEXT_END, _TEXT_END, None)),
  "OPT": (
    "<pad> </s>",
    "</s> $A",
    {"bos_token": "</s>", "eos_token": "</s>"},
    ("bos", "</s>", "</s>", None),
  ),
  "Llama": ("<s> </s>", "<s> $A", _S, ("bos_eos", "<s>", "</s>", None)),
  "Llama 3, no files": (
    "<|begin_of_text|> <|end_of_text|> <|eot_id|>",
    "<|begin_of_text|> $A",
    {},
    ("bos_eos", "<|begin_of_text|>", "<|end_of_text|>", None),
  ),
  "BERT": (
    "[PAD] [UNK] [CLS] [SEP] [MASK]",
    "[CLS] $A [SEP]",
    _BERT,
    ("bos_eos", "[CLS]", "[SEP]", "[MASK]"),
  ),
  "BigBird": (
    "<s> </s> [CLS] [SEP] [MASK]",
    "[CLS] $A [SEP]",
    _BERT | _S,
    ("bos_eos", "[CLS]", "[SEP]", "[MASK]"),
  ),
  "RoBERTa": (
    "<s> <pad> </s> <mask>",
    "<s> $A </s>",
    _S | {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"},
    ("bos_eos", "<s>", "</s>", "<mask>"),
  ),
  "Qwen": (
    "<|endoftext|> <|im_start|> <|im_end|>",
    "$A",
    {"bos_token": None, "eos_token": "<|im_end|>"},
    ("eos", None, "<|im_end|>", None),
  ),
  "chat": (
    "<|endoftext|> <|im_start|> <|im_end|>",
    "$A",
    _CHAT,
    ("bos_eos", "<|im_start|>", "<|im_end|>", None),
  ),
  "Gemma": (
    "<pad> <eos> <bos> <mask>",
    "<bos> $A",
    _GEMMA,
    ("bos_eos", "<bos>", "<eos>", "<mask>"),
  ),
  "T5": (
    "<pad> </s> <unk>",
    "$A </s>",
    {"eos_token": "</s>", "pad_token": "<pad>"},
    ("eos", None, "</s>", None),
  ),
  "ESM": (
    "<cls> <pad> <eos> <mask>",
    "<cls> $A <eos>",
    _ESM,
    ("bos_eos", "<cls>", "<eos>", "<mask>"),
  ),
  "Nucleotide Transformer": (
    "<cls> <eos> <mask>",
    "<cls> $A",
    _ESM | {"eos_token": None},
    ("bos", "<cls>", None, "<mask>"),
  ),
  "own names": ("<a> <b> <c>", "$A", _HOLE, ("bos_eos", "<a>", "<b>", "<c>")),
  "template of own names": (
    "<a> <b> <MASK>",
    "<a> $A <b>",
    {},
    ("bos_eos", "<a>", "<b>", "<MASK>"),
  ),
  "capitals": (
    "[BOS] [EOS] <MASK>",
    "$A",
    {},
    ("bos_eos", "[BOS]", "[EOS]", "<MASK>"),
  ),
  "start of text": (
    "<|startoftext|> <|endoftext|> <|mask|>",
    "$A",
    {},
    ("bos_eos", "<|startoftext|>", "<|endoftext|>", "<|mask|>"),
  ),
}
_PROCESSORS = {"BERT": processors.BertProcessing}
_PROCESSORS |= {"RoBERTa": processors.RobertaProcessing}


@pytest.mark.parametrize("form", ["names", "tokens", "map"])
@pytest.mark.parametrize("style", _STYLES)
def test_special_tokens_are_those_of_the_tokenizers_own_files(
  style, form, tmp_path
):
  """Catches documents without a boundary, and frames that import lacks."""
  special, single, fields, expected = _STYLES[style]
  special = special.split()
  # HTML's tag is an ordinary token.
  vocab = {t: i for i, t in enumerate([*special, "G", "T", "<s>"][::-1])}
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
  backend.add_special_tokens(special)
  ids = [(token, vocab[token]) for token in special]
  backend.post_processor = processors.TemplateProcessing(
    single=single, special_tokens=ids
  )
  if style in _PROCESSORS and form == "tokens":
    first, *_, last = (ids[special.index(t)] for t in single.split()[::2])
    own = _PROCESSORS[style](last, first)
    steps = [processors.ByteLevel(trim_offsets=False), own]
    backend.post_processor = processors.Sequence(steps)
  path = tmp_path / "tokenizer.json"
  backend.save(str(path))
  if form == "tokens":
    fields = {
      field: name and {"__type": "AddedToken", "content": name}
      for field, name in fields.items()
    }
  file = "special_tokens_map.json" if form == "map" else "tokenizer_config.json"
  (tmp_path / file).write_text(json.dumps(fields))
  t = Tokenizer.load(path)
  for again in (t, Tokenizer.from_json(t.to_json()), t.extended(["<new>"])):
    ids = again.bos_id, again.eos_id, again.mask_id
    tokens = [None if index is None else again.token(index) for index in ids]
    assert (packing.boundary_of(again), *tokens) == expected
    whole = backend.encode("GT").ids
    at = whole.index(vocab["G"])
    assert again.frame == (whole[:at], whole[at + 2 :])
  assert t.pad_id in (None, vocab.get("<pad>"), vocab.get("[PAD]"))


def test_transformers_files_add_tokens_and_set_the_case(tmp_path):
  """Catches tokens and capitals that only tokenizer_config.json has."""
  path = tmp_path / "tokenizer.json"
  vocab = {"[UNK]": 0, "paris": 1, "Paris": 2}
  backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
  backend.normalizer = normalizers.BertNormalizer(lowercase=True)
  backend.save(str(path))
  names = {3: "<|begin|>", 4: "<|stop|>", 5: "<|hole|>"}
  tokens = {str(i): {"content": x, "special": True} for i, x in names.items()}
  fields = {
    "tokenizer_class": "BertTokenizer",
    "do_lower_case": False,
    "added_tokens_decoder": tokens,
    "bos_token": "<|begin|>",
    "eos_token": "<|stop|>",
    "mask_token": "<|hole|>",
  }
  config = tmp_path / "tokenizer_config.json"
  config.write_text(json.dumps(fields))
  t = Tokenizer.load(path)
  assert (t.bos_id, t.eos_id, t.mask_id, t.vocab_size) == (3, 4, 5, 6)
  for again in (t, Tokenizer.from_json(t.to_json())):
    assert again.encode("Paris").tolist() == [2]
  for generic in ("PreTrainedTokenizerFast", "TokenizersBackend"):
    config.write_text(json.dumps(fields | {"tokenizer_class": generic}))
    assert Tokenizer.load(path).encode("Paris").tolist() == [1]
  nulls = {"tokenizer_class": None, "do_lower_case": None}
  config.write_text(json.dumps(fields | nulls))
  assert Tokenizer.load(path).encode("Paris").tolist() == [1]
  tokens["7"] = {"content": "<|far|>", "special": True}
  config.write_text(json.dumps(fields))
  line = runs.told(Tokenizer.load, path)
  assert "gives '<|far|>' the id 7, which is 6 after" in line


def test_two_tokens_before_a_text_are_said(capsys):
  """Catches GLM's `[gMASK] <sop>`, of which rows have one, in silence.

  It also catches a boundary that is not shown because it was given.
  """
  backend = whole_words()._backend
  backend.post_processor = processors.TemplateProcessing(
    single="[CLS] <s> $A", special_tokens=[("[CLS]", 5), ("<s>", 1)]
  )
  text = ["the dogs"] * 40
  prepare(text, tokenizer=backend, seq_len=8, dev_share=0.5)
  assert "itself adds [CLS] <s> before a text, of" in capsys.readouterr().out
  prepare(text, tokenizer=backend, seq_len=8, dev_share=0.5, boundary="none")
  said = capsys.readouterr().out
  assert "boundary none: no token before a document and no token after" in said


_DNA = ["ACGTACGGTTAC" * 9, "ACGTNNacgt"]


@pytest.mark.parametrize(
  "kind, size, tokens",
  [
    ("characters", 99, [*"ACGTNNacgt", "<unk>", "<unk>", "A"]),
    ("characters", 9, [*"ACGT", *["<unk>"] * 8, "A"]),
    ("kmer:2", 99, [*["AC", "GT", "NN", "ac", "gt", "<unk>", "<unk>", "A"]]),
    ("kmer:6", 99, ["ACGTNN", *"acgt", "<unk>", "<unk>", "A"]),
  ],
)
def test_alphabets_and_sequences_of_letters(kind, size, tokens):
  """Catches letters that are lost, and a row that is a single word."""
  t = Tokenizer.train(_DNA, size, kind)
  text = "ACGTNNacgtX\nA"
  assert [t.token(index) for index in t.encode(text)] == tokens
  if size == 99:
    for known in _DNA:
      assert t.decode(t.encode(known)) == known
  assert t.word_tokens.start.all() and t.vocab_size <= size
  check_exportable(t, "bos_eos")


def test_sequences_of_letters_begin_again_after_a_mask():
  """Catches letters one by one after a mask, which no training has."""
  t = Tokenizer.train(_DNA, 99, "kmer:4")
  ids = framing.tokenizer_with_masks(t).build().encode("ACGT<mask>ACGTA").ids
  assert [t.token(index) for index in ids] == ["ACGT", "<mask>", "ACGT", "A"]


def test_coverage_counts_unknown_characters(monkeypatch):
  """Catches a tokenizer of another language that reads nothing, in silence."""
  backend = tokenizers.Tokenizer(
    models.WordLevel({"<unk>": 0, "the": 1, "dogs": 2}, unk_token="<unk>")
  )
  backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  known = Tokenizer(backend)
  found = coverage.measure_coverage(known, ["the dogs", "the кот"], 16)
  assert found == coverage.Coverage(13, 4, 3, 1)
  lines = [*found.lines("train")]
  assert "23.08% of the characters; 25.00%" in lines[0]
  assert lines[1].startswith("warning:") and "23.1%" in lines[1]
  # A sample is from all places of long and short texts, in whole words.
  monkeypatch.setattr(coverage, "_SAMPLE", 40_000)
  monkeypatch.setattr(coverage, "_PIECE", 200)
  long, short = "the " * 9000 + "кот " * 9000, ["dogs"] * 9000
  found = coverage.measure_coverage(known, [*short, long], 108_000)
  assert 25_000 < found.characters < 40_000
  assert abs(found.unknown_characters / found.characters - 0.3) < 0.01
  found = coverage.measure_coverage(known, ["the dogs " * 9000], 81_000)
  assert found.characters > 25_000 and not found.unknown_characters
  # Only a tokenizer that was not trained on the text is of another language.
  rare = coverage.Coverage(characters=10, tokens=15)
  assert "another language" in "".join(rare.lines("train"))
  assert [*rare.lines("train", trained=True)] == [
    "tip: train needs 1.5 tokens per character: a larger vocab_size gives fewer"
  ]
  # Without <unk>, unknown characters have no token at all.
  dropping = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
  found = coverage.measure_coverage(Tokenizer(dropping), ["abc"], 3)
  assert found == coverage.Coverage(3, 2, 1, 0)
  # Bytes read all, but are far more than the characters of another script.
  english = Tokenizer.train(ENGLISH, 300)
  (line,) = coverage.measure_coverage(english, texts("thai"), 3e4).lines(
    "train"
  )
  assert "needs 3.0 tokens per character" in line  # bytes of a Thai letter
  assert not [*coverage.measure_coverage(english, ENGLISH, 2e4).lines("train")]
