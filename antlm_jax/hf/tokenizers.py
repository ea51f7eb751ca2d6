"""Our tokenizer as the files of a fast tokenizer of transformers.

Beside the vocabulary those say what our evaluations do in code: which special
tokens frame a text, that `<mask>` takes the space before it as a word does, and
that the text after it is not the beginning of a text.
"""

import json
import re
from typing import Any

import tokenizers

from antlm_jax.data.tokenizer import Tokenizer

_ROLES = ("pad", "bos", "eos", "mask")


def files(
  tokenizer: Tokenizer, before: int | None, after: int | None, longest: int
) -> dict[str, dict[str, Any]]:
  """Returns tokenizer.json and tokenizer_config.json.

  Args:
    tokenizer: The tokenizer.
    before: The special token put before a text, if any.
    after: That put after it, if any.
    longest: Tokens of a row, at most.
  """
  spec = json.loads(tokenizer.to_json())
  name = tokenizers.Tokenizer.from_str(json.dumps(spec)).id_to_token
  _leading_space_once(spec, name(tokenizer.mask_id or 0))
  for token in spec["added_tokens"]:
    if token["id"] == tokenizer.mask_id:
      token |= {"lstrip": True, "normalized": True}
  spec["post_processor"] = _frame(name, before, after)
  return {
    "tokenizer.json": spec,
    "tokenizer_config.json": _config(tokenizer, spec, name, longest),
  }


def _leading_space_once(spec: dict[str, Any], mask: str) -> None:
  """Puts a text's leading space by its normalizer.

  A byte-level pre-tokenizer with add_prefix_space puts one after every special
  token too: "<mask>." would be a mask and " .".
  """
  found = [
    p for p in _parts(spec["pre_tokenizer"]) if p.get("add_prefix_space")
  ]
  if not found:
    return
  for part in found:
    part["add_prefix_space"] = False
  once = [
    *([spec["normalizer"]] if spec["normalizer"] else []),
    {"type": "Prepend", "prepend": " "},
    # A text that begins with one gets no second.
    _replace(r"\A  ", " "),
    # The library finds the mask by its own normalized form: without a space.
    _replace(rf"\A {re.escape(mask)}\z", mask),
  ]
  spec["normalizer"] = {"type": "Sequence", "normalizers": once}


def _replace(pattern: str, content: str) -> dict[str, Any]:
  return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _parts(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
  if pre_tokenizer is None:
    return []
  return pre_tokenizer.get("pretokenizers", [pre_tokenizer])


def _frame(name, before: int | None, after: int | None) -> dict | None:
  """Returns the post-processor that puts special tokens around a text.

  Of two texts each is followed by the last one, as in fine-tuning.
  """
  if before is None and after is None:
    return None

  def special(index, kind):
    if index is None:
      return []
    return [{"SpecialToken": {"id": name(index), "type_id": kind}}]

  def sequence(letter, kind):
    return [{"Sequence": {"id": letter, "type_id": kind}}]

  first = [*special(before, 0), *sequence("A", 0), *special(after, 0)]
  return {
    "type": "TemplateProcessing",
    "single": first,
    "pair": [*first, *sequence("B", 0), *special(after, 0)],
    "special_tokens": {
      name(i): {"id": name(i), "ids": [i], "tokens": [name(i)]}
      for i in dict.fromkeys((before, after))
      if i is not None
    },
  }


def _config(tokenizer, spec, name, longest: int) -> dict[str, Any]:
  out: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": longest,
    "clean_up_tokenization_spaces": False,
    # Some of our encoders have no token types, and no position needs them.
    "model_input_names": ["input_ids", "attention_mask"],
  }
  whole = {token["id"]: token for token in spec["added_tokens"]}
  for role in _ROLES:
    index = getattr(tokenizer, f"{role}_id")
    if index is None:
      continue
    out[f"{role}_token"] = name(index)
    if role == "mask":
      fields = {k: v for k, v in whole[index].items() if k != "id"}
      out["mask_token"] = {"__type": "AddedToken", **fields}
  unknown = spec["model"].get("unk_token")
  return out | ({"unk_token": unknown} if unknown else {})
