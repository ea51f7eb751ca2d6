"""Toy English: a small generated language, the quickstart's built-in data.

A probabilistic grammar, written for this project, of about 130 word forms. It
yields training text, held-out text, and minimal pairs in BLiMP's form, one
UID for each of its rules. What a rule tests spans at least three words, and
every pair type occurs in both directions (singular and plural, he and she), so
neither word frequency nor a trigram decides a pair, while a small transformer
learns them all within minutes.

A rule is a function from a `Speaker` to a list of words. Where the list holds
a *slot* `(right, wrong)` instead of a word, the sentence is good with `right`
and bad with `wrong`:

  no | every   king near the hill has   ever | already   rested .

A rule with several slots yields a pair from any one of them. Training text is
made of the good sentences of the same rules, near dependencies included.

  python -m antlm_jax.data.toy_english --output=DIR
"""

import json
import random
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from antlm_jax import cli, errors

Slot = tuple[str, str]  # (right, wrong)
Words = list[str | Slot]

# ---------------------------------------------------------------- the lexicon

# Every agreeing word is a tuple of forms, indexed by number; verbs have the
# participle as a third form, and the plural form is also the bare one.
SINGULAR, PLURAL, PARTICIPLE = 0, 1, 2
BARE = PLURAL
MALE, FEMALE = 0, 1


def _forms(words: str) -> tuple[tuple[str, ...], ...]:
  return tuple(tuple(word.split("/")) for word in words.split())


NAMES = (("Tom", "Ben", "Max", "Sam"), ("Anna", "Eva", "Mia", "Jane"))
TITLES = (("king", "father"), ("queen", "mother"))
PEOPLE = (
  _forms("boy/boys king/kings father/fathers"),
  _forms("girl/girls queen/queens mother/mothers"),
)
ANIMALS = _forms("dog/dogs cat/cats horse/horses bird/birds")
PLACES = _forms("hill/hills house/houses tree/trees river/rivers")
ANIMATE = (*PEOPLE[MALE], *PEOPLE[FEMALE], *ANIMALS)
NOUNS = (*ANIMATE, *PLACES)

INTRANSITIVE = _forms(
  "walks/walk/walked jumps/jump/jumped rests/rest/rested "
  "waits/wait/waited plays/play/played laughs/laugh/laughed"
)
TRANSITIVE = _forms(
  "helps/help/helped pushes/push/pushed follows/follow/followed "
  "visits/visit/visited greets/greet/greeted watches/watch/watched"
)
KNOWING = _forms("knows/know forgets/forget hears/hear")
HAVE = ("has", "have")
MODALS = ("can", "will")

ADJECTIVES = ("big", "small", "young", "red", "kind", "good", "wild", "sad")
ADVERBS = ("often", "really", "soon", "still", "now", "again")
PREPOSITIONS = ("near", "behind", "beside", "below")

REFLEXIVES = ("himself", "herself")
# What may follow "there will be", and what may not. Both kinds also serve as
# determiners that agree, so that their words are about equally frequent.
WEAK = (("one", "two"), ("a", "many"))
STRONG = (("every", "most"), ("each", "all"))
DETERMINERS = (*WEAK, *STRONG, ("this", "these"))
# By polarity, negative first: the words that set it, those that need it.
SUBJECTS = (("no", "every"), ("nobody", "everybody"))
FREQUENCIES = ("never", "always")
MOMENTS = ("ever", "already")
AMOUNTS = ("any", "some")


def slot(forms: Sequence[str], right: int) -> Slot:
  """The form wanted of two, against the other one."""
  return forms[right], forms[1 - right]


# ---------------------------------------------------------------- the phrases


class Speaker:
  """Makes the random choices of one sentence, and its phrases.

  Attributes:
    far: whether optional material between the two ends of a dependency is
      always there, as in the test pairs, or by a coin's toss.
  """

  def __init__(self, rng: random.Random, far: bool = False):
    self._random = rng.random
    self.far = far

  def pick(self, options):
    return options[int(self._random() * len(options))]

  def coin(self) -> int:
    """A number, a gender, a polarity: 0 or 1, equally often."""
    return int(self._random() < 0.5)

  def between(self, phrase: Callable[[], Words]) -> Words:
    """A phrase that lengthens the dependency around it."""
    return phrase() if self.far or self.coin() else []

  def optional(self, phrase: Callable[[], Words]) -> Words:
    return phrase() if self.coin() else []

  def adjective(self) -> Words:
    return [self.pick(ADJECTIVES)]

  def adverb(self) -> Words:
    return [self.pick(ADVERBS)]

  def the(self, noun: Sequence[str], number: int) -> Words:
    return ["the", *self.optional(self.adjective), noun[number]]

  def name(self, gender: int) -> Words:
    """Tom, or king Tom: the titles tell which names are whose."""
    title = self.optional(lambda: [self.pick(TITLES[gender])])
    return [*title, self.pick(NAMES[gender])]

  def someone(self, number: int) -> Words:
    """An animate noun phrase: names are singular."""
    if number == SINGULAR and self.coin():
      return self.name(self.coin())
    return self.the(self.pick(ANIMATE), number)

  def anyone(self) -> Words:
    return self.someone(self.coin())

  def person(self, gender: int) -> Words:
    """One person, whose gender the word tells."""
    if self.coin():
      return self.name(gender)
    return self.the(self.pick(PEOPLE[gender]), SINGULAR)

  def where(self) -> Words:
    """A prepositional phrase; its noun is an attractor of agreement."""
    preposition = self.pick(PREPOSITIONS)
    if self.coin():
      return [preposition, *self.anyone()]
    return [preposition, *self.the(self.pick(PLACES), self.coin())]

  def action(self) -> tuple[Sequence[str], Words]:
    """A verb's forms and its object, if it takes one."""
    if self.coin():
      return self.pick(INTRANSITIVE), []
    return self.pick(TRANSITIVE), self.anyone()

  def predicate(self, number: int) -> Words:
    """A finite verb phrase, the slot in its agreeing verb."""
    verb, rest = self.action()
    if self.coin():
      return [slot(verb, number), *rest]
    return [slot(HAVE, number), verb[PARTICIPLE], *rest]

  def auxiliary(self, number: int) -> tuple[str, int]:
    """An auxiliary, and the form of the verb that it wants."""
    if self.coin():
      return HAVE[number], PARTICIPLE
    return self.pick(MODALS), BARE


# ------------------------------------------------------------------ the rules

Rule = Callable[[Speaker], Words]


class Phenomenon(NamedTuple):
  """A rule, what BLiMP would call it, and its share of the training text."""

  rule: Rule
  field: str
  term: str
  weight: int


PHENOMENA: dict[str, Phenomenon] = {}  # by UID: the name of the rule


def phenomenon(field: str, term: str, weight: int = 2):
  """Enters the rule that it decorates in the table of phenomena."""

  def enter(rule: Rule) -> Rule:
    PHENOMENA[rule.__name__] = Phenomenon(rule, field, term, weight)
    return rule

  return enter


@phenomenon("morphology", "subject_verb_agreement")
def agreement_across_phrase(s: Speaker) -> Words:
  """The dogs near the red house often rest | rests."""
  number = s.coin()
  return [
    *s.someone(number),
    *s.between(s.where),
    *s.optional(s.adverb),
    *s.predicate(number),
  ]


@phenomenon("morphology", "subject_verb_agreement")
def agreement_across_clause(s: Speaker) -> Words:
  """The boy that the girls help rests | rest."""
  number, other = s.coin(), s.coin()
  verb = s.pick(TRANSITIVE)
  if s.coin():
    clause = [verb[number], *s.someone(other)]
  else:
    clause = [*s.someone(other), verb[other]]
  noun = s.the(s.pick(ANIMATE), number)
  return [*noun, "that", *clause, *s.predicate(number)]


@phenomenon("morphology", "subject_verb_agreement")
def agreement_coordination(s: Speaker) -> Words:
  """Tom and | beside the boy near the hills wait | waits."""
  number = s.coin()
  return [
    *s.someone(SINGULAR),
    slot((s.pick(PREPOSITIONS), "and"), number),
    *s.someone(SINGULAR),
    *s.between(s.where),
    *s.predicate(number),
  ]


@phenomenon("morphology", "determiner_noun_agreement")
def determiner_noun(s: Speaker) -> Words:
  """Anna helps this | these big red dog | dogs."""
  number = s.coin()
  auxiliary, form = s.auxiliary(subject := s.coin())
  return [
    *s.someone(subject),
    auxiliary,
    s.pick(TRANSITIVE)[form],
    slot(s.pick(DETERMINERS), number),
    *s.between(s.adjective),
    *s.between(s.adjective),
    slot(s.pick(NOUNS), number),
  ]


@phenomenon("morphology", "anaphor_agreement", weight=3)
def anaphor_gender(s: Speaker) -> Words:
  """The queen near Tom has often helped herself | himself."""
  gender = s.coin()
  auxiliary, form = s.auxiliary(SINGULAR)
  verb = s.pick(TRANSITIVE)
  distant = s.between(lambda: [auxiliary, *s.adverb(), verb[form]])
  return [
    *s.person(gender),
    *s.between(s.where),
    *(distant or [verb[SINGULAR]]),
    slot(REFLEXIVES, gender),
  ]


@phenomenon("morphology", "anaphor_agreement")
def anaphor_number(s: Speaker) -> Words:
  """The queens near Tom will often help themselves | herself."""
  gender, number = s.coin(), s.coin()
  auxiliary, form = s.auxiliary(number)
  return [
    *s.the(s.pick(PEOPLE[gender]), number),
    *s.between(s.where),
    auxiliary,
    *s.between(s.adverb),
    s.pick(TRANSITIVE)[form],
    slot((REFLEXIVES[gender], "themselves"), number),
  ]


@phenomenon("semantics", "npi_licensing")
def npi_subject(s: Speaker) -> Words:
  """No | every king near the hill has ever | already rested."""
  polarity = s.coin()
  subject = s.pick(SUBJECTS)
  noun = [] if "nobody" in subject else [s.pick(ANIMATE)[SINGULAR]]
  verb, rest = s.action()
  return [
    slot(subject, polarity),
    *noun,
    *s.between(s.where),
    HAVE[SINGULAR],
    slot(MOMENTS, polarity),
    verb[PARTICIPLE],
    *rest,
  ]


@phenomenon("semantics", "npi_licensing", weight=1)
def npi_adverb(s: Speaker) -> Words:
  """The girl has never | always really helped any | some dogs."""
  polarity, number = s.coin(), s.coin()
  return [
    *s.someone(number),
    HAVE[number],
    slot(FREQUENCIES, polarity),
    *s.between(s.adverb),
    s.pick(TRANSITIVE)[PARTICIPLE],
    slot(AMOUNTS, polarity),
    *s.optional(s.adjective),
    s.pick(NOUNS)[PLURAL],
  ]


@phenomenon("syntax", "filler_gap_dependency")
def filler_gap(s: Speaker) -> Words:
  """Tom knows who | that the dogs near Eva help; that they help Ben."""
  number, gap = s.coin(), s.coin()
  auxiliary, form = s.auxiliary(subject := s.coin())
  return [
    *s.someone(number),
    s.pick(KNOWING)[number],
    slot(("that", "who"), gap),
    *s.the(s.pick(ANIMATE), subject),
    *s.optional(s.where),
    auxiliary,
    s.pick(TRANSITIVE)[form],
    *([] if gap else s.anyone()),
  ]


@phenomenon("syntax", "argument_structure")
def argument_structure(s: Speaker) -> Words:
  """Tom knows who the dog can now help | walk near the hill."""
  number, gap = s.coin(), s.coin()
  auxiliary, form = s.auxiliary(subject := s.coin())
  verbs = s.pick(INTRANSITIVE)[form], s.pick(TRANSITIVE)[form]
  return [
    *s.someone(number),
    s.pick(KNOWING)[number],
    ("that", "who")[gap],
    *s.the(s.pick(ANIMATE), subject),
    auxiliary,
    *s.between(s.adverb),
    slot(verbs, gap),
    *s.where(),
  ]


@phenomenon("morphology", "auxiliary_selection", weight=1)
def auxiliary_form(s: Speaker) -> Words:
  """The girls have often really helped | help the boys."""
  number = s.coin()
  auxiliary, form = s.auxiliary(number)
  verb, rest = s.action()
  return [
    *s.someone(number),
    auxiliary,
    *s.between(s.adverb),
    *s.between(s.adverb),
    (verb[form], verb[BARE + PARTICIPLE - form]),
    *rest,
  ]


@phenomenon("semantics", "quantifiers")
def existential_quantifier(s: Speaker) -> Words:
  """There will soon be many | all dogs; here | there will be all dogs."""
  number = s.coin()
  strong = s.pick(STRONG)[number]
  if s.coin():
    opening, quantifier = "there", (s.pick(WEAK)[number], strong)
  else:
    opening, quantifier = ("here", "there"), strong
  return [
    opening,
    s.pick(MODALS),
    *s.between(s.adverb),
    "be",
    quantifier,
    *s.optional(s.adjective),
    s.pick(ANIMATE)[number],
    *s.optional(s.where),
  ]


# -------------------------------------------------------- sentences and pairs

# What the quickstart trains on and tests with.
SENTENCES, PAIRS = 160_000, 150
# Below what every rule can make, so that looking for new pairs must end.
MOST_PAIRS = 2000
RULES = tuple(p.rule for p in PHENOMENA.values() for _ in range(p.weight))


def sentences(
  seed: int | str, count: int, exclude: Collection[str] = frozenset()
) -> Iterator[str]:
  """Yields `count` good sentences, none of them in `exclude`.

  Words and the full stop stand apart, by spaces; short sentences recur, as in
  any text.
  """
  speaker = Speaker(random.Random(f"sentences {seed}"))
  while count > 0:
    line = _line(speaker.pick(RULES)(speaker))
    if line not in exclude:
      yield line
      count -= 1


def minimal_pairs(
  seed: int | str, per_phenomenon: int, exclude: Collection[str] = frozenset()
) -> dict[str, list[dict]]:
  """Makes distinct minimal pairs in BLiMP's form, equally many of each UID.

  Args:
    seed: equal seeds make equal pairs.
    per_phenomenon: the number of pairs of each UID, at most `MOST_PAIRS`.
    exclude: sentences that no pair may contain.
  """
  if not 0 < per_phenomenon <= MOST_PAIRS:
    raise errors.UserError(
      f"{per_phenomenon} pairs of a phenomenon: choose 1 to {MOST_PAIRS}"
    )
  return {
    uid: _rows(uid, _pairs(f"{uid} {seed}", rule, per_phenomenon, exclude))
    for uid, (rule, *_) in PHENOMENA.items()
  }


def _rows(uid: str, pairs: list[tuple[str, str]]) -> list[dict]:
  """The pairs of one UID as BLiMP writes them."""
  _, field, term, _ = PHENOMENA[uid]
  return [
    {
      "sentence_good": good,
      "sentence_bad": bad,
      "field": field,
      "linguistics_term": term,
      "UID": uid,
      "pair_id": str(number),
    }
    for number, (good, bad) in enumerate(pairs)
  ]


def _pairs(
  seed: str, rule: Rule, count: int, exclude: Collection[str]
) -> list[tuple[str, str]]:
  """`count` pairs of a rule, no two of which share a sentence."""
  speaker = Speaker(random.Random(f"pairs {seed}"), far=True)
  used, pairs = set(exclude), []
  while len(pairs) < count:
    pair = _pair(rule(speaker), speaker)
    if used.isdisjoint(pair):
      pairs.append(pair)
      used.update(pair)
  return pairs


def _pair(words: Words, speaker: Speaker) -> tuple[str, str]:
  """The sentence with all slots right, and with one of them wrong."""
  slots = [i for i, word in enumerate(words) if isinstance(word, tuple)]
  tested = speaker.pick(slots)
  _, wrong = words[tested]
  return _line(words), _line([*words[:tested], wrong, *words[tested + 1 :]])


def _line(words: Words) -> str:
  """The sentence as text, all its slots right."""
  right = (word if isinstance(word, str) else word[0] for word in words)
  return " ".join([*right, "."])


# ------------------------------------------------------------------ the files


def write(
  folder: str | Path,
  seed: int = 0,
  sentences: int = SENTENCES,
  pairs: int = PAIRS,
) -> None:
  """Writes text/toy.train, text/toy.dev and pairs/UID.jsonl under `folder`.

  One sentence a line. No sentence is in two of the three: the pairs come
  first, their good and bad sentences are left out of the held-out text, and
  both are left out of the training text.

  Args:
    folder: made if it is missing; files of these names are replaced.
    seed: equal arguments write equal files.
    sentences: of the training text; the held-out text has a twentieth.
    pairs: of each phenomenon.
  """
  if sentences < 1:
    raise errors.UserError(f"{sentences} sentences: choose 1 or more")
  made = minimal_pairs(seed, pairs)
  held_out = {
    pair[side]
    for group in made.values()
    for pair in group
    for side in ("sentence_good", "sentence_bad")
  }
  dev = _text(f"dev {seed}", -(-sentences // 20), held_out)
  train = _text(f"train {seed}", sentences, held_out.union(dev))
  files = {"text/toy.train": train, "text/toy.dev": dev}
  for uid, group in made.items():
    files[f"pairs/{uid}.jsonl"] = [json.dumps(pair) for pair in group]
  for name, lines in files.items():
    _write_lines(Path(folder) / name, lines)


def _text(seed: str, count: int, exclude: Collection[str]) -> list[str]:
  """`sentences`, for `write`, whose parameter hides that name."""
  return list(sentences(seed, count, exclude))


def _write_lines(path: Path, lines: list[str]) -> None:
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
  except OSError as error:
    raise errors.UserError(f"cannot write {path}: {error.strerror}") from None


# ---------------------------------------------------------------- the command


def main(argv: Sequence[str]) -> None:
  parser = cli.Parser(
    prog="python -m antlm_jax.data.toy_english",
    description="Write the toy English: text/toy.train, text/toy.dev, "
    "pairs/*.jsonl.",
  )
  parser.add_argument(
    "--output", type=cli.here, required=True, help="folder to write to"
  )
  for option, default, meaning in (
    ("--sentences", SENTENCES, "how many sentences of training text"),
    ("--pairs", PAIRS, "how many minimal pairs of each phenomenon"),
    ("--seed", 0, "what the random choices start from"),
  ):
    parser.add_argument(option, type=int, default=default, help=meaning)
  args = parser.parse_args(argv)
  write(args.output, args.seed, args.sentences, args.pairs)
  print(_summary(Path(args.output)))


def _summary(folder: Path) -> str:
  """What `write` left in a folder, in a paragraph and a sample."""
  train, dev = (
    (folder / f"text/toy.{split}").read_text("utf-8").splitlines()
    for split in ("train", "dev")
  )
  words = [word for line in train for word in line.split()]
  pairs = [
    [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for path in (folder / f"pairs/{uid}.jsonl" for uid in PHENOMENA)
  ]
  paragraph = (
    f"Wrote {len(train)} sentences of training text ({len(words)} words of "
    f"{len(set(words))} forms) and {len(dev)} of held-out text to "
    f"{folder / 'text'}, and {len(pairs[0])} minimal pairs of each of "
    f"{len(pairs)} phenomena to {folder / 'pairs'}. No sentence is in two of "
    "the three. A sample, its bad sentences starred:"
  )
  sample = [f"  {line}" for line in train[:3]]
  for first, *_ in pairs:
    sample += ["", f"  {first['sentence_good']}", f"* {first['sentence_bad']}"]
  return "\n".join([textwrap.fill(paragraph, 80), "", *sample])


if __name__ == "__main__":
  cli.run(main)
