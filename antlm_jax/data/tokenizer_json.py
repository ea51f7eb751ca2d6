"""A tokenizer.json, and the changes that make a text's tokens exact.

Our evaluations add special tokens around a text in code. They read a mask in a
text like a word, and all other special tokens as text. `TokenizerJson` makes a
tokenizer of the library do the same. Filling and scoring need only the masks;
export needs all of its methods.

A masked word includes the space before it, if the tokenizer's words do, and
nothing else. The tokens around a mask are those around a word. A mask at the
start of a text includes the space that the tokenizer adds there. No space is
added after a mask. Line breaks before a mask are split as before a word.

The tokenizer's own steps stay as they are. A first step writes a stand-in on
both sides of each mask, so that all own steps see a word there. The stand-in is
a letter of no living script. A last step removes the stand-ins and the space
before them.

The library searches normalized texts for the normalized names of tokens, and
decodes a token to that name. So each name stays itself when it is normalized
alone. Another stand-in divides the name in longer texts.
"""

import dataclasses
import json
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from antlm_jax.errors import UserError

# The stand-ins are letters of Linear A, which nobody writes.
_BESIDE_MASK = "\U00010767"
_HIDDEN_MASK = "\U00010740\U00010741\U00010742\U00010743"
_SPECIAL = "\U00010744{}\U00010745"  # a number between two letters
_DIVIDER = "\U00010746"  # divides a name in a text
_UNREAD = "\U00010747"  # is in place of a name that is an unknown word
_STAND_INS = re.compile("[\U00010740-\U00010767]")

# Parts of a tokenizer.json, and the field with the steps of a sequence.
_STEPS = {
  "normalizer": "normalizers",
  "pre_tokenizer": "pretokenizers",
  "post_processor": "processors",
  "decoder": "decoders",
}
# Texts around the name of a special token.
AROUND_NAMES = ("{0}{0}", "a{0}b", "a {0} b.", "7{0}7", " {0}\n")


def _in_bytes(letter: str) -> str:
  """Returns a letter as byte-level tokenizers write it."""
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  ((text, _),) = byte_level.pre_tokenize_str(letter)
  return text


# A divider, as it is or in bytes.
_DIVIDER_PATTERN = f"{_DIVIDER}|{_in_bytes(_DIVIDER)}"


@dataclasses.dataclass(frozen=True, eq=False)
class TokenizerJson:
  """A tokenizer.json. Its methods return changed copies."""

  fields: Mapping[str, Any]

  @classmethod
  def parse(cls, text: str) -> "TokenizerJson":
    """Reads the JSON of a tokenizer."""
    return cls(json.loads(text))

  def to_text(self) -> str:
    """Returns the JSON as a text."""
    return json.dumps(self.fields)

  def build(self) -> tokenizers.Tokenizer:
    """Builds the library's tokenizer."""
    return tokenizers.Tokenizer.from_str(self.to_text())

  @property
  def added_tokens(self) -> list[dict[str, Any]]:
    """Added tokens, such as special tokens, in the order of their ids."""
    return self.fields["added_tokens"]

  def steps(self, part: str) -> list[dict[str, Any]]:
    """Returns the steps of a part, one of `_STEPS`."""
    fields = self.fields.get(part)
    return [*fields.get(_STEPS[part], [fields])] if fields else []

  def with_masks(self, mask_id: int, mask: str, *names: str) -> "TokenizerJson":
    """Returns a tokenizer.json that reads masks in a text.

    Args:
      mask_id: Id of the mask.
      mask: Name of the mask.
      *names: Other names of the mask in texts.

    Raises:
      UserError: The tokenizer's own steps drop the stand-ins.
    """
    # A text meets the steps in the order of these assignments. Each comment
    # shows "a <mask>" after the step, for own steps that write spaces as ▁.
    # There • is `_BESIDE_MASK`, and # is `_HIDDEN_MASK`.
    all_names = "|".join(re.escape(name) for name in sorted({mask, *names}))
    # a •#•: the own steps see a word in place of the mask.
    hide_masks = _replace_pattern(
      all_names, _BESIDE_MASK + _HIDDEN_MASK + _BESIDE_MASK
    )
    # ▁a▁•#•
    own_steps = self.steps("normalizer")
    # Unchanged. The own steps may write the mask's name, as NFKC does from wide
    # letters. That name is text, and a divider in it keeps it text.
    divide_own_name = self._divide_names([mask])[mask]
    # Unchanged. The library also normalizes the name alone, and searches texts
    # for the result, which must be the name.
    hiding = self._with_steps("normalizer", [hide_masks, *own_steps])
    hidden_name = hiding._build_normalizer().normalize_str(mask)
    keep_name_alone = _replace_whole(hidden_name, mask)
    # ▁a▁•<mask>•, which the library splits at the mask: ▁a▁•, <mask> and •.
    show_masks = _replace_pattern(_HIDDEN_MASK, mask)
    # ▁a and <mask>, after the own pre-tokenizer: a mask includes the space
    # before it.
    remove_neighbours = _remove_pattern(
      f"[ ▁␣]?{_BESIDE_MASK}|Ġ?{_in_bytes(_BESIDE_MASK)}"
    )
    normalizer_steps = [
      hide_masks,
      *own_steps,
      *([divide_own_name] if divide_own_name else []),
      keep_name_alone,
      show_masks,
    ]
    pre_tokenizer_steps = [*self.steps("pre_tokenizer"), remove_neighbours]
    # Not special, so that it is a mask where other special tokens are text.
    flags = ("single_word", "lstrip", "rstrip", "special")
    mask_token = {"id": mask_id, "content": mask}
    mask_token |= dict.fromkeys(flags, False) | {"normalized": True}
    tokens = [token for token in self.added_tokens if token["id"] != mask_id]
    masked = (
      self._with_steps("normalizer", normalizer_steps)
      ._with_steps("pre_tokenizer", pre_tokenizer_steps)
      ._with_divider_removal()
      ._with_added_tokens([*tokens, mask_token])
    )
    _check_reads_masks(masked, mask_id, mask)
    return masked

  def with_special_tokens(self, names: Mapping[int, str]) -> "TokenizerJson":
    """Adds special tokens, names by id, where there are no added tokens."""
    ids = {token["id"] for token in self.added_tokens}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    tokens = [
      {"id": index, "content": name, **dict.fromkeys(flags, False)}
      | {"special": True}
      for index, name in names.items()
      if index not in ids
    ]
    return self._with_added_tokens([*self.added_tokens, *tokens])

  def with_flag(
    self, flag: str, value: bool, ids: Collection[int]
  ) -> "TokenizerJson":
    """Sets a flag of added tokens, such as `special`."""
    return self._with_added_tokens(
      [
        {**token, flag: value} if token["id"] in ids else token
        for token in self.added_tokens
      ]
    )

  def without_names(self, names: Mapping[int, str]) -> "TokenizerJson":
    """Returns a tokenizer.json that reads these names, by id, as text.

    A model may have them as tokens, as Unigram often has `</s>`. Here it has
    other names in their place, which no text has. All ids stay.
    """
    model = dict(self.fields["model"])
    vocab = model["vocab"]
    is_mapping = isinstance(vocab, Mapping)
    pieces = vocab if is_mapping else {piece for piece, _ in vocab}
    forms = {
      name: _SPECIAL.format(index)
      for index, name in names.items()
      if name in pieces and name != model.get("unk_token")
    }
    if forms and is_mapping:
      model["vocab"] = {forms.get(x, x): index for x, index in vocab.items()}
    elif forms:
      model["vocab"] = [[forms.get(x, x), score] for x, score in vocab]
    if forms and "merges" in model:
      model["merges"] = [
        merge
        for merge in model["merges"]
        if not _merge_names(merge) & forms.keys()
      ]
    # The library numbers added tokens by their places: those that only the
    # list has keep theirs, for the tokens after them.
    tokens = [
      token
      if token["id"] not in names
      else {**token, "content": _SPECIAL.format(token["id"])}
      | {"normalized": False}
      for token in self.added_tokens
      if token["id"] not in names or token["content"] not in pieces
    ]
    return self._with(model=model)._with_added_tokens(tokens)

  def without_special(self, first: int) -> "TokenizerJson":
    """Removes the added special tokens from an id on."""
    return self._with_added_tokens(
      [
        token
        for token in self.added_tokens
        if token["id"] < first or not token["special"]
      ]
    )

  def special_as_text(self, mask_id: int | None) -> "TokenizerJson":
    """Returns a tokenizer.json that reads the names of special tokens as text.

    The library has a flag for this, but it concerns the mask as well. Here a
    name is divided if there is more text. Only a text that is nothing but the
    name is still the token.
    """
    names = {
      token["id"]: token["content"]
      for token in self.added_tokens
      if token["special"] and token["id"] != mask_id
    }
    dividers = self._divide_names([*names.values()])
    normalizer = self._build_normalizer()
    normalizer_steps = self.steps("normalizer")
    decoder_steps = self.steps("decoder")
    for index, name in names.items():
      divider = dividers[name]
      form = name
      if not divider:
        # Without a place to divide it, it gets a form that no text has.
        form = _SPECIAL.format(index)
        named = {"type": "Replace", "pattern": {"String": form}}
        decoder_steps.insert(0, named | {"content": name})
      normalized = normalizer.normalize_str(name) if normalizer else name
      if normalized != form:
        normalizer_steps.append(_replace_whole(normalized, form))
      if divider:
        normalizer_steps.append(divider)
    changed = self.with_flag("normalized", True, names)
    if self.fields.get("decoder") and not all(dividers.values()):
      changed = changed._with_steps("decoder", decoder_steps)
    changed = changed._with_steps("normalizer", normalizer_steps)
    return changed._with_divider_removal()

  def with_trimmed_offsets(self, mask_id: int | None) -> "TokenizerJson":
    """Makes tokens begin at their word, not at the space before it.

    It changes spans, no tokens. The tokenizer's own post-processor goes.
    """
    bare = self._with(post_processor=None)
    steps = self.steps("pre_tokenizer")
    kinds = [step["type"] for step in steps]
    if "ByteLevel" not in kinds:
      always = {"type": "Metaspace", "split": True, "prepend_scheme": "always"}
      if not steps or not always.items() <= steps[0].items():
        return bare
      # Drop the space that Metaspace then adds to the word.
      space = _remove_pattern(r" (?=[^\s▁])")
      return bare._with_steps("pre_tokenizer", [space, *steps])
    place = kinds.index("ByteLevel")
    adds_space = steps[place]["add_prefix_space"]
    added_inside = any(
      not token["special"] and token["id"] != mask_id
      for token in self.added_tokens
    )
    if adds_space and (place > 0 or added_inside):
      return bare  # spaces added inside a text look like its own
    if adds_space:
      # The library takes a text's own first space for an added space.
      first_space = _replace_pattern(r"\A (?=\S)", "")
      normalizer_steps = [*self.steps("normalizer"), first_space]
      bare = bare._with_steps("normalizer", normalizer_steps)
    trim = {
      "type": "ByteLevel",
      "add_prefix_space": adds_space,
      "trim_offsets": True,
      "use_regex": True,
    }
    return bare._with(post_processor=trim)

  def with_frame(
    self, before: Sequence[int], after: Sequence[int], names: Mapping[int, str]
  ) -> "TokenizerJson":
    """Adds special tokens around each text, after the other steps.

    Args:
      before: Ids of the tokens before a text.
      after: Ids of the tokens after a text.
      names: Names of both by id.
    """
    if not names:
      return self
    special = {
      index: {"SpecialToken": {"id": name, "type_id": 0}}
      for index, name in names.items()
    }
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    end = [special[index] for index in after]
    single = [*(special[index] for index in before), first, *end]
    frame = {
      "type": "TemplateProcessing",
      "single": single,
      "pair": [*single, second, *end],
      "special_tokens": {
        name: {"id": name, "ids": [index], "tokens": [name]}
        for index, name in names.items()
      },
    }
    steps = [*self.steps("post_processor"), frame]
    return self._with(post_processor=_shortest("post_processor", steps))

  def _with(self, **changes) -> "TokenizerJson":
    return TokenizerJson({**self.fields, **changes})

  def _with_steps(
    self, part: str, steps: Sequence[Mapping[str, Any]]
  ) -> "TokenizerJson":
    return self._with(**{part: _sequence(part, steps)})

  def _with_added_tokens(
    self, tokens: Sequence[Mapping[str, Any]]
  ) -> "TokenizerJson":
    by_id = operator.itemgetter("id")
    return self._with(added_tokens=sorted(tokens, key=by_id))

  def _build_normalizer(self) -> normalizers.Normalizer | None:
    """Builds the normalizer alone, which added tokens would divide."""
    # The vocabulary may be large.
    model = {"type": "BPE", "vocab": {}, "merges": []}
    return self._with(added_tokens=[], model=model).build().normalizer

  def _divide_names(
    self, names: Sequence[str]
  ) -> dict[str, dict[str, Any] | None]:
    """Returns a normalizer for each name that divides it in longer texts.

    A name that is an unknown word is replaced. The stand-in changes no tokens
    of such a text, whose names are no tokens of the model. A name has None if
    the tokenizer would divide it nowhere.
    """
    ids = {
      token["id"]: token["content"]
      for token in self.added_tokens
      if token["content"] in names
    }
    hidden = self.without_names(ids)
    backend = hidden._with(added_tokens=[]).build()
    own_normalizers = [backend.normalizer] if backend.normalizer else []
    own_splits = [backend.pre_tokenizer] if backend.pre_tokenizer else []
    split = pre_tokenizers.Split(tokenizers.Regex(_DIVIDER_PATTERN), "removed")
    backend.pre_tokenizer = pre_tokenizers.Sequence([*own_splits, split])

    def token_ids(name: str, *added: normalizers.Normalizer) -> list[list[int]]:
      backend.normalizer = normalizers.Sequence([*own_normalizers, *added])
      texts = [form.format(name) for form in AROUND_NAMES]
      encodings = backend.encode_batch(texts, add_special_tokens=False)
      return [encoding.ids for encoding in encodings]

    dividers = dict.fromkeys(names)
    for name in names:
      undivided = token_ids(name)
      contents = {end: name[:end] + _DIVIDER for end in range(1, len(name))}
      for end, content in (contents | {len(name): _UNREAD}).items():
        before = re.escape(name[:end])
        after = re.escape(name[end:])
        pattern = rf"(?!\A{before}{after}\z){before}(?={after})"
        divider = normalizers.Replace(tokenizers.Regex(pattern), content)
        if token_ids(name, divider) == undivided:
          dividers[name] = _replace_pattern(pattern, content)
          break
    return dividers

  def _with_divider_removal(self) -> "TokenizerJson":
    """Adds the step that removes dividers inside names, if it is absent."""
    steps = self.steps("pre_tokenizer")
    removal = _remove_pattern(_DIVIDER_PATTERN)
    if removal in steps:
      return self
    return self._with_steps("pre_tokenizer", [*steps, removal])


def _check_reads_masks(masked: TokenizerJson, mask_id: int, mask: str) -> None:
  """Raises a UserError if a tokenizer does not read the masks in a text."""
  text = mask * 2 + f" {mask}."
  ids = masked.build().encode(text, add_special_tokens=False).ids
  # The tokenizer may read the space as a separate token, as in DNA.
  if ids[:2] != [mask_id] * 2 or ids.count(mask_id) != 3:
    raise UserError(
      f"the tokenizer cannot read {mask} in a text, because its normalizer or"
      " pre-tokenizer drops rare letters: use a tokenizer that keeps them"
    )


def without_stand_ins(text: str) -> str:
  """Returns a tokenizer's JSON without the steps of `TokenizerJson`.

  Other JSON is returned as it is. Raises a ValueError if it is none.
  """
  fields = json.loads(text)
  if not isinstance(fields, dict) or not isinstance(fields.get("model"), dict):
    return text
  bare = TokenizerJson(fields)
  for part in ("normalizer", "pre_tokenizer", "decoder"):
    steps = bare.steps(part)
    own_steps = [step for step in steps if not _STAND_INS.search(str(step))]
    if len(own_steps) == len(steps):
      continue
    special = {token["id"] for token in bare.added_tokens if token["special"]}
    bare = bare._with(**{part: _shortest(part, own_steps)})
    bare = bare.with_flag("normalized", False, special)
  return bare.to_text()


def _merge_names(merge: str | Sequence[str]) -> set[str]:
  """Returns the tokens of a merge: two, given as `a b` or apart, and both."""
  parts = merge.split(" ") if isinstance(merge, str) else merge
  return {*parts, "".join(parts)}


def _sequence(part: str, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  return {"type": "Sequence", _STEPS[part]: [*steps]}


def _shortest(
  part: str, steps: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
  """Returns a sequence only of several steps, or a single step, or None."""
  return _sequence(part, steps) if len(steps) > 1 else next(iter(steps), None)


def _remove_pattern(pattern: str) -> dict[str, Any]:
  """Returns a pre-tokenizer that splits at a pattern and removes it."""
  return {
    "type": "Split",
    "pattern": {"Regex": pattern},
    "behavior": "Removed",
    "invert": False,
  }


def _replace_whole(text: str, content: str) -> dict[str, Any]:
  """Returns a normalizer that replaces a text which is nothing else.

  Its lookahead is always true. `without_stand_ins` finds the step by the letter
  in it.
  """
  return _replace_pattern(rf"\A{re.escape(text)}(?!{_DIVIDER})\z", content)


def _replace_pattern(pattern: str, content: str) -> dict[str, Any]:
  return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
