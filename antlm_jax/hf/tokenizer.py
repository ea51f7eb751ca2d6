"""Writes our tokenizer as a fast tokenizer of transformers.

The files make transformers read a text as our evaluations do
(`data.tokenizer_json`). `hf.check` compares both.
"""

from collections.abc import Sequence
from typing import Any

from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.data.tokenizer_json import TokenizerJson
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
  if ids["pad"] is None:
    known_ids = [index for index in ids.values() if index is not None]
    fallbacks = [ids["eos"]] if ids["eos"] is not None else known_ids
    ids["pad"] = next(iter(fallbacks), None)
  ids["bos"] = next(iter(before), ids["bos"])
  return ids


def files(
  tokenizer: Tokenizer,
  before: Sequence[int],
  after: Sequence[int],
  longest: int,
  padding_side: str = "right",
) -> dict[str, dict[str, Any]]:
  """Returns tokenizer.json and tokenizer_config.json.

  Args:
    tokenizer: The tokenizer.
    before: Special tokens before a text.
    after: Special tokens after a text.
    longest: Largest number of tokens in a row.
    padding_side: Side of padding; left to continue several texts at once.
  """
  ids = special_ids(tokenizer, before)
  spec = TokenizerJson.parse(tokenizer.to_json())
  # Read before `spec` changes.
  unknown = spec.fields["model"].get("unk_token")
  special = {*ids.values(), tokenizer.unk_id if unknown else None} - {None}
  if tokenizer.mask_id is not None:
    spec = framing.tokenizer_with_masks(tokenizer)
  frame_names = {i: tokenizer.token(i) for i in (*before, *after)}
  # The order matters: `special_as_text` needs the special tokens, and
  # `with_frame` adds to the post-processor of `with_trimmed_offsets`.
  spec = (
    spec.with_special_tokens({i: tokenizer.token(i) for i in special})
    .with_flag("special", True, {tokenizer.mask_id})
    .special_as_text(tokenizer.mask_id)
    .with_trimmed_offsets(tokenizer.mask_id)
    .with_frame(before, after, frame_names)
  )
  # Tokens with their flags: transformers would give names alone other flags.
  tokens = {
    token["id"]: {"__type": "AddedToken"}
    | {name: value for name, value in token.items() if name != "id"}
    for token in spec.added_tokens
  }
  # Evaluation code that knows cls and sep does not score these tokens.
  first = next(iter(before), None)
  last = next(iter(after), None)
  roles = ids | {"cls": first, "sep": last}
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": longest,
    "padding_side": padding_side,
    "clean_up_tokenization_spaces": False,
    # Omit token types, which some of our encoders lack.
    "model_input_names": ["input_ids", "attention_mask"],
    **{f"{r}_token": tokens[i] for r, i in roles.items() if i is not None},
  }
  if unknown:
    config["unk_token"] = tokens.get(tokenizer.unk_id, unknown)
  return {"tokenizer.json": spec.fields, "tokenizer_config.json": config}
