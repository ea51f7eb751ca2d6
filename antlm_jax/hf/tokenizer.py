"""Writes our tokenizer as a fast tokenizer of transformers.

Our evaluations add special tokens around a text in code. They also treat a mask
as a word: it includes the space before it, and no space is added after it. The
files make transformers do the same.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import tokenizers

from antlm_jax.data.tokenizer import Tokenizer

ROLES = ("pad", "bos", "eos", "mask")
_SPACE = "▁"  # a space in SentencePiece


def special_ids(
  tokenizer: Tokenizer, before: Sequence[int] = ()
) -> dict[str, int | None]:
  """Returns token ids for transformers by role.

  `bos` is the token before a text, even if it is `</s>`, because libraries use
  it as the context when they compute likelihoods. If there is no token for
  padding, `</s>` pads, as usual, and the attention mask marks padding.
  """
  ids = {role: getattr(tokenizer, f"{role}_id") for role in ROLES}
  found = (i for i in ids.values() if i is not None)
  fallback = ids["eos"] if ids["eos"] is not None else next(found, None)
  ids["bos"] = next(iter(before), ids["bos"])
  return ids | {"pad": fallback if ids["pad"] is None else ids["pad"]}


def files(
  tokenizer: Tokenizer,
  before: Sequence[int],
  after: Sequence[int],
  longest: int,
) -> dict[str, dict[str, Any]]:
  """Returns tokenizer.json and tokenizer_config.json.

  Args:
    tokenizer: The tokenizer.
    before: Special tokens before a text.
    after: Special tokens after a text.
    longest: Largest number of tokens in a row.
  """
  spec = json.loads(tokenizer.to_json())
  ids = special_ids(tokenizer, before)
  name = tokenizers.Tokenizer.from_str(json.dumps(spec)).id_to_token
  added = {token["id"]: token for token in spec["added_tokens"]}
  for index in sorted({i for i in ids.values() if i is not None} - set(added)):
    flags = "single_word", "lstrip", "rstrip", "normalized"
    added[index] = {"id": index, "content": name(index)}
    added[index] |= dict.fromkeys(flags, False) | {"special": True}
  spec["added_tokens"] = list(added.values())
  if tokenizer.mask_id is not None:
    _mask_like_a_word(spec, added[tokenizer.mask_id])
  framed = len(before) + len(after) > 0
  spec["post_processor"] = _frame(name, before, after) if framed else None
  # Evaluation code that knows these names does not score these tokens.
  first, last = next(iter(before), None), next(iter(after), None)
  roles = ids | {"cls": first, "sep": last}
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": longest,
    "clean_up_tokenization_spaces": False,
    # Omit token types, which some of our encoders lack.
    "model_input_names": ["input_ids", "attention_mask"],
    **{f"{r}_token": name(i) for r, i in roles.items() if i is not None},
  }
  if tokenizer.mask_id is not None:
    fields = {k: v for k, v in added[tokenizer.mask_id].items() if k != "id"}
    config["mask_token"] = {"__type": "AddedToken", **fields}
  if unknown := spec["model"].get("unk_token"):
    config["unk_token"] = unknown
  return {"tokenizer.json": spec, "tokenizer_config.json": config}


def _mask_like_a_word(spec: dict[str, Any], mask: dict[str, Any]) -> None:
  """Makes the mask include the space before it, and add no space after it.

  Tokenizers add a space before a text, and also after a special token, so that
  "<mask>." would become a mask and " .". There are three ways to add it. If the
  normalizer adds it, tokenizers must find the mask after normalizing.
  """
  mask["lstrip"] = True
  escaped, content = re.escape(mask["content"]), mask["content"]
  byte_level = []
  for part in _parts(spec["pre_tokenizer"], "pretokenizers"):
    if part["type"] == "Metaspace" and part.get("prepend_scheme") == "always":
      part["prepend_scheme"] = "first"
    elif part["type"] == "ByteLevel" and part["add_prefix_space"]:
      byte_level.append(part)
  steps = _parts(spec["normalizer"], "normalizers")
  if byte_level:
    for part in byte_level:
      part["add_prefix_space"] = False
    # Do not add a second space to a text that begins with a space.
    prepend = {"type": "Prepend", "prepend": " "}
    steps = [*steps, prepend, _replace(r"\A  ", " ")]
    # The library searches for the normalized mask, which must have no space.
    steps.append(_replace(rf"\A {escaped}\z", content))
  elif any(step.get("prepend") == _SPACE for step in steps):
    steps = [*steps, _replace(f"{_SPACE}{escaped}", content)]
  else:
    return
  mask["normalized"] = True
  spec["normalizer"] = {"type": "Sequence", "normalizers": steps}


def _replace(pattern: str, content: str) -> dict[str, Any]:
  return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _parts(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
  """Returns the parts of a sequence, or a single part in a list."""
  return part.get(key, [part]) if part else []


def _frame(name, before: Sequence[int], after: Sequence[int]) -> dict | None:
  """Returns the post-processor that adds special tokens around a text."""

  def special(ids):
    return [{"SpecialToken": {"id": name(i), "type_id": 0}} for i in ids]

  one, two = ({"Sequence": {"id": letter, "type_id": 0}} for letter in "AB")
  first = [*special(before), one, *special(after)]
  return {
    "type": "TemplateProcessing",
    "single": first,
    "pair": [*first, two, *special(after)],
    "special_tokens": {
      name(i): {"id": name(i), "ids": [i], "tokens": [name(i)]}
      for i in dict.fromkeys([*before, *after])
    },
  }
