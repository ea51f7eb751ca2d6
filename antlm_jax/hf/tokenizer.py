"""Writes our tokenizer as a fast tokenizer of transformers.

Our evaluations add special tokens around a text in code. They also read a mask
in a text as a word (`data.mask_words`), and all other special tokens as text.
The files make transformers do the same. `hf.check` compares both.
"""

import json
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import normalizers, processors

from antlm_jax.data import mask_words
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.inference import framing

ROLES = ("pad", "bos", "eos", "mask")


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
  if tokenizer.mask_id is None:
    spec = json.loads(tokenizer.to_json())
  else:
    spec = framing.tokenizer_with_masks(tokenizer)
  ids, unknown = special_ids(tokenizer, before), spec["model"].get("unk_token")
  backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
  name = backend.id_to_token
  named = {*ids.values(), unknown and backend.token_to_id(unknown)}
  added = {token["id"]: token for token in spec["added_tokens"]}
  for index in sorted(named - {None} - set(added)):
    flags = "single_word", "lstrip", "rstrip", "normalized"
    added[index] = {"id": index, "content": name(index)}
    added[index] |= dict.fromkeys(flags, False) | {"special": True}
  if tokenizer.mask_id is not None:
    added[tokenizer.mask_id]["special"] = True
  spec["added_tokens"] = [added[index] for index in sorted(added)]
  mask_words.special_as_text(spec, tokenizer.mask_id)
  steps = _trim_offsets(spec, tokenizer.mask_id)
  if before or after:
    steps.append(_frame_processor(name, before, after))
  whole = {"type": "Sequence", "processors": steps}
  spec["post_processor"] = whole if len(steps) > 1 else next(iter(steps), None)

  # Evaluation code that knows these names does not score these tokens.
  first, last = next(iter(before), None), next(iter(after), None)
  roles = ids | {"cls": first, "sep": last}
  # With their flags, which transformers would replace.
  tokens = {
    i: {"__type": "AddedToken"} | {k: v for k, v in token.items() if k != "id"}
    for i, token in added.items()
  }
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": longest,
    "clean_up_tokenization_spaces": False,
    # Omit token types, which some of our encoders lack.
    "model_input_names": ["input_ids", "attention_mask"],
    **{f"{r}_token": tokens[i] for r, i in roles.items() if i is not None},
  }
  if unknown:
    index = backend.token_to_id(unknown)
    config["unk_token"] = tokens.get(index, unknown)
  return {"tokenizer.json": spec, "tokenizer_config.json": config}


def _trim_offsets(
  spec: dict[str, Any], mask_id: int | None
) -> list[dict[str, Any]]:
  """Makes tokens begin at their word, not at the space before it.

  It changes spans, no tokens. Returns the post-processors that this needs.
  """
  steps = mask_words.sequence_parts(spec["pre_tokenizer"], "pretokenizers")
  kinds = [step["type"] for step in steps]
  if "ByteLevel" in kinds:
    place = kinds.index("ByteLevel")
    adds = steps[place]["add_prefix_space"]
    inside = any(
      not token["special"] and token["id"] != mask_id
      for token in spec["added_tokens"]
    )
    if adds and (place > 0 or inside):
      return []  # spaces added inside a text look like its own
    trim = processors.ByteLevel(add_prefix_space=adds, trim_offsets=True)
    if adds:
      # The library takes a text's own first space for an added space.
      own = normalizers.Replace(tokenizers.Regex(r"\A (?=\S)"), "")
      normal = mask_words.sequence_parts(spec["normalizer"], "normalizers")
      normal = [*normal, json.loads(own.__getstate__())]
      spec["normalizer"] = {"type": "Sequence", "normalizers": normal}
    return [json.loads(trim.__getstate__())]
  first = next(iter(steps), {})
  adds = {"type": "Metaspace", "split": True, "prepend_scheme": "always"}
  if adds.items() <= first.items():
    # Drop the space that Metaspace then adds to the word.
    steps = [mask_words.removed_split(r" (?=[^\s▁])"), *steps]
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
  return []


def _frame_processor(
  name, before: Sequence[int], after: Sequence[int]
) -> dict | None:
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
