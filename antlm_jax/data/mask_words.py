"""Makes a tokenizer read `<mask>` in a text like a word.

A masked word includes the space before it, and nothing else. The tokens around
a mask are those around a word. A mask at the start of a text includes the space
that the tokenizer adds there. No space is added after a mask. Line breaks
before a mask are split as before a word. Filling, scoring and the exported
tokenizer.json share this.

The tokenizer's own steps stay as they are. A first step writes a stand-in on
both sides of each mask, so that all own steps see a word there. The stand-in is
a letter of no living script. A last step removes the stand-ins and the space
before them.

The library searches normalized texts for the normalized names of tokens, and
decodes a token to that name. So each name stays itself when it is normalized
alone. Another stand-in divides the name in longer texts.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from antlm_jax.errors import UserError

_WORD = "\U00010767"  # a letter of Linear A, which nobody writes
_MASK = "\U00010740\U00010741\U00010742\U00010743"  # more of its letters
_SPECIAL = "\U00010744{}\U00010745"  # a number between two letters
_INSIDE = "\U00010746"  # divides a name in a text


def _in_bytes(letter: str) -> str:
  """Returns a letter as byte-level tokenizers write it."""
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  ((text, _),) = byte_level.pre_tokenize_str(letter)
  return text


_DIVISION = f"{_INSIDE}|{_in_bytes(_INSIDE)}"
_OWN = re.compile("[\U00010740-\U00010767]")


def added(text: str, index: int, *names: str) -> dict[str, Any]:
  """Returns a tokenizer.json that reads masks in a text.

  Args:
    text: JSON of the tokenizer.
    index: Id of the mask.
    *names: Names of the mask in texts, in addition to its own.

  Raises:
    UserError: The tokenizer's own steps drop the stand-ins.
  """
  spec = json.loads(text)
  mask = tokenizers.Tokenizer.from_str(text).id_to_token(index)
  names = sorted({mask, *names})
  found = "|".join(re.escape(name) for name in names)
  steps = [
    _replace_pattern(found, _WORD + _MASK + _WORD),
    *sequence_parts(spec["normalizer"], "normalizers"),
  ]
  spec["normalizer"] = {"type": "Sequence", "normalizers": steps}
  # A text's own name of the mask is another letter now.
  alone = _without_added(spec).normalizer.normalize_str(mask)
  spec["normalizer"]["normalizers"] = [
    *steps,
    *_divide_names(json.loads(text), [mask])[mask],
    _replace_whole(alone, mask),
    _replace_pattern(_MASK, mask),
  ]
  spec["pre_tokenizer"] = {
    "type": "Sequence",
    "pretokenizers": [
      *sequence_parts(spec["pre_tokenizer"], "pretokenizers"),
      removed_split(f"[ ▁␣]?{_WORD}|Ġ?{_in_bytes(_WORD)}"),
    ],
  }
  _remove_divisions(spec)
  # Not special, so that it is a mask where other special tokens are text.
  flags = ("single_word", "lstrip", "rstrip", "special")
  token = {"id": index, "content": mask, **dict.fromkeys(flags, False)}
  others = [one for one in spec["added_tokens"] if one["id"] != index]
  spec["added_tokens"] = [*others, token | {"normalized": True}]
  spec["added_tokens"].sort(key=lambda one: one["id"])
  made = tokenizers.Tokenizer.from_str(json.dumps(spec))
  ids = made.encode(mask * 2 + f" {mask}.", add_special_tokens=False).ids
  if ids[:3] != [index] * 3 or index in ids[3:]:
    raise UserError(
      f"the tokenizer cannot read {mask} in a text, because its normalizer or"
      " pre-tokenizer drops rare letters: use a tokenizer that keeps them"
    )
  return spec


def special_as_text(spec: dict[str, Any], mask_id: int | None) -> None:
  """Makes a tokenizer.json read the names of special tokens as text.

  The library has a flag for this, but it concerns the mask as well. Here a name
  is divided if there is more text. Only a text that is nothing but the name is
  still the token.
  """
  special = [
    token
    for token in spec["added_tokens"]
    if token["special"] and token["id"] != mask_id
  ]
  divided = _divide_names(spec, [token["content"] for token in special])
  normalizer = _without_added(spec).normalizer
  steps = sequence_parts(spec["normalizer"], "normalizers")
  for token in special:
    token["normalized"] = True
    name = token["content"]
    alone = normalizer.normalize_str(name) if normalizer else name
    divide = divided[name]
    # Without a place to divide it, it gets a form that no text has.
    form = name if divide else _SPECIAL.format(token["id"])
    whole = [_replace_whole(alone, form)] if alone != form else []
    steps = [*steps, *whole, *divide]
    if not divide and spec.get("decoder"):
      decoders = sequence_parts(spec["decoder"], "decoders")
      named = {"type": "Replace", "pattern": {"String": form}}
      decoders = [named | {"content": name}, *decoders]
      spec["decoder"] = {"type": "Sequence", "decoders": decoders}
  spec["normalizer"] = {"type": "Sequence", "normalizers": steps}
  _remove_divisions(spec)


def _divide_names(
  spec: dict[str, Any], names: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
  """Returns a normalizer for each name that divides it in longer texts.

  The stand-in changes no tokens of such a text. A name has no normalizer if the
  tokenizer would divide it nowhere.
  """
  made = _without_added(spec)
  own = [made.normalizer] if made.normalizer else []
  split = pre_tokenizers.Split(tokenizers.Regex(_DIVISION), "removed")
  steps = [made.pre_tokenizer] if made.pre_tokenizer else []
  made.pre_tokenizer = pre_tokenizers.Sequence([*steps, split])
  forms = "{0}{0}", "a{0}b", "a {0} b.", "7{0}7", " {0}\n"

  def tokens(name: str, *more: normalizers.Normalizer) -> list[list[int]]:
    made.normalizer = normalizers.Sequence([*own, *more])
    texts = [form.format(name) for form in forms]
    found = made.encode_batch(texts, add_special_tokens=False)
    return [one.ids for one in found]

  out = {name: [] for name in names}
  for name in names:
    wanted = tokens(name)
    for end in range(1, len(name)):
      before, after = re.escape(name[:end]), re.escape(name[end:])
      pattern = rf"(?!\A{before}{after}\z){before}(?={after})"
      content = name[:end] + _INSIDE
      step = normalizers.Replace(tokenizers.Regex(pattern), content)
      if tokens(name, step) == wanted:
        out[name] = [_replace_pattern(pattern, content)]
        break
  return out


def _without_added(spec: dict[str, Any]) -> tokenizers.Tokenizer:
  """Returns the tokenizer of a tokenizer.json without its added tokens."""
  return tokenizers.Tokenizer.from_str(json.dumps(spec | {"added_tokens": []}))


def _remove_divisions(spec: dict[str, Any]) -> None:
  """Adds the step that removes the stand-ins inside names, if it is absent."""
  step = removed_split(_DIVISION)
  parts = sequence_parts(spec["pre_tokenizer"], "pretokenizers")
  if step not in parts:
    steps = [*parts, step]
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}


def removed(text: str) -> str:
  """Returns a tokenizer's JSON without the steps of this module.

  Other JSON is returned as it is. Raises a ValueError if it is none.
  """
  spec = json.loads(text)
  if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
    return text
  for kind in ("normalizer", "pre_tokenizer", "decoder"):
    key = kind.replace("_", "") + "s"
    every = sequence_parts(spec.get(kind), key)
    kept = [part for part in every if not _OWN.search(str(part))]
    if len(kept) == len(every):
      continue
    whole = {"type": "Sequence", key: kept}
    spec[kind] = whole if len(kept) > 1 else next(iter(kept), None)
    for token in spec["added_tokens"]:
      if token["special"]:
        token["normalized"] = False
  return json.dumps(spec)


def sequence_parts(
  part: dict[str, Any] | None, key: str
) -> list[dict[str, Any]]:
  """Returns the parts of a sequence, or a single part in a list."""
  return part.get(key, [part]) if part else []


def removed_split(pattern: str) -> dict[str, Any]:
  """Returns a pre-tokenizer that splits at a pattern and removes it."""
  return {
    "type": "Split",
    "pattern": {"Regex": pattern},
    "behavior": "Removed",
    "invert": False,
  }


def _replace_whole(text: str, content: str) -> dict[str, Any]:
  """Returns a normalizer that replaces a text which is nothing else.

  Its lookahead is always true. `removed` finds the step by the letter in it.
  """
  return _replace_pattern(rf"\A{re.escape(text)}(?!{_INSIDE})\z", content)


def _replace_pattern(pattern: str, content: str) -> dict[str, Any]:
  return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
