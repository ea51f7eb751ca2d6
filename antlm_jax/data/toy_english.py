"""Toy English: a small generated language, the quickstart's built-in data.

A probabilistic grammar makes sentences of about 130 word forms. Each rule tests
a dependency over at least three words, and every type of pair occurs in both
directions (singular and plural, he and she). So neither word frequencies nor
trigrams decide a pair, but a small transformer learns all rules within minutes.

A rule is a method of `Grammar` that returns words, in lists. A `Slot` is a pair
of forms: a right form, and a wrong form that makes the sentence bad.

  no | every   king near the hill has   ever | already   rested .

Any one slot of a rule yields a minimal pair. Training text consists of good
sentences and includes near dependencies.
"""

import json
import random
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from antlm_jax import cli, settings
from antlm_jax.runtime import files
from antlm_jax.settings import argument

# Forms of words that agree: singular, plural (of verbs also the bare form) and
# participle.
SINGULAR = 0
PLURAL = 1
PARTICIPLE = 2
BARE = PLURAL

_LEXICON = """
MEN           boy/boys king/kings father/fathers
WOMEN         girl/girls queen/queens mother/mothers
ANIMALS       dog/dogs cat/cats horse/horses bird/birds
PLACES        hill/hills house/houses tree/trees river/rivers
ANIMATE       MEN WOMEN ANIMALS
NOUNS         ANIMATE PLACES
INTRANSITIVE  walks/walk/walked jumps/jump/jumped rests/rest/rested \
waits/wait/waited plays/play/played laughs/laugh/laughed
TRANSITIVE    helps/help/helped pushes/push/pushed follows/follow/followed \
visits/visit/visited greets/greet/greeted watches/watch/watched
KNOWING       knows/know forgets/forget hears/hear
MODALS        can will
ADJECTIVES    big small young red kind good wild sad
ADVERBS       often really soon still now again
PREPOSITIONS  near behind beside below
WEAK          one/two a/many
STRONG        every/most each/all
DETERMINERS   WEAK STRONG this/these
SUBJECTS      no/every nobody/everybody
MAN_NAMES     Tom Ben Max Sam
WOMAN_NAMES   Anna Eva Mia Jane
MAN_TITLES    king father
WOMAN_TITLES  queen mother
"""  # WEAK may follow "there will be", STRONG may not; both agree with nouns


def _tables(text: str) -> dict[str, list]:
  """Reads the lexicon; a table may include earlier tables by name."""
  tables = {}
  for name, *words in map(str.split, text.strip().splitlines()):
    tables[name] = []
    for word in words:
      forms = tuple(word.split("/")) if "/" in word else word
      tables[name] += tables.get(word, [forms])
  return tables


LEXICON = _tables(_LEXICON)
# By gender: male, female.
PEOPLE = ("MEN", "WOMEN")
NAMES = ("MAN_NAMES", "WOMAN_NAMES")
TITLES = ("MAN_TITLES", "WOMAN_TITLES")
REFLEXIVES = ("himself", "herself")
HAVE = ("has", "have")


class Slot(NamedTuple):
  """A place for one of two words."""

  right: str
  wrong: str


def word_slot(forms: Sequence[str], right: int) -> Slot:
  """Returns a slot for the form of index `right`."""
  return Slot(forms[right], forms[1 - right])


Words = list  # of str, Slot, and Words


class Grammar:
  """The phrases and rules of the language, with random choices.

  With `far`, every dependency is long.
  """

  def __init__(self, seed: str, far: bool = False):
    self._random = random.Random(seed).random
    self._far = far

  def say(self, rule: str) -> list[str | Slot]:
    """Returns a sentence of the rule of that name."""
    return _flat_words(getattr(self, rule)())

  def choose(self, options: Sequence):
    return options[int(self._random() * len(options))]

  def pick(self, table: str):
    """Returns a word of the lexicon: its forms, if it has several."""
    return self.choose(LEXICON[table])

  def coin(self) -> int:
    """Returns 0 or 1 with equal probability."""
    return int(self._random() < 0.5)

  def between(self, phrase: Callable[[], Words]) -> Words:
    """Returns a phrase that lengthens the dependency around it, or nothing."""
    return phrase() if self._far or self.coin() else []

  def optional(self, phrase: Callable[[], Words]) -> Words:
    return phrase() if self.coin() else []

  def adjective(self) -> Words:
    return [self.pick("ADJECTIVES")]

  def adverb(self) -> Words:
    return [self.pick("ADVERBS")]

  def the(self, table: str, number: int | None = None) -> Words:
    """The red dogs; by default in either number."""
    noun = self.pick(table)
    number = self.coin() if number is None else number
    return ["the", self.optional(self.adjective), noun[number]]

  def name(self, gender: int) -> Words:
    """Tom or king Tom; the titles show the names' genders."""
    title = self.optional(lambda: [self.pick(TITLES[gender])])
    return [title, self.pick(NAMES[gender])]

  def someone(self, number: int) -> Words:
    """An animate noun phrase; names are singular."""
    if number == SINGULAR and self.coin():
      return self.name(self.coin())
    return self.the("ANIMATE", number)

  def anyone(self) -> Words:
    return self.someone(self.coin())

  def person(self, gender: int) -> Words:
    """A person of a gender."""
    if self.coin():
      return self.name(gender)
    return self.the(PEOPLE[gender], SINGULAR)

  def where(self) -> Words:
    """A prepositional phrase; its noun is an attractor of agreement."""
    preposition = self.pick("PREPOSITIONS")
    return [preposition, self.anyone() if self.coin() else self.the("PLACES")]

  def action(self) -> tuple[Sequence[str], Words]:
    """A verb's forms, and the object of a transitive verb."""
    if self.coin():
      return self.pick("INTRANSITIVE"), []
    return self.pick("TRANSITIVE"), self.anyone()

  def predicate(self, number: int) -> Words:
    """A finite verb phrase with a slot for the verb that agrees."""
    verb, complements = self.action()
    if self.coin():
      return [word_slot(verb, number), complements]
    return [word_slot(HAVE, number), verb[PARTICIPLE], complements]

  def auxiliary(self, number: int) -> tuple[str, int]:
    """An auxiliary, and the form of its verb."""
    if self.coin():
      return HAVE[number], PARTICIPLE
    return self.pick("MODALS"), BARE

  # The rules, each with an example: right | wrong. The order of the lines is
  # that of the random draws: another order makes another text.

  def agreement_across_phrase(self) -> Words:
    """The dogs near the red house often rest | rests."""
    n = self.coin()
    subject = [self.someone(n), self.between(self.where)]
    return [subject, self.optional(self.adverb), self.predicate(n)]

  def agreement_across_clause(self) -> Words:
    """The boy that the girls help rests | rest."""
    n = self.coin()
    other = self.coin()
    verb = self.pick("TRANSITIVE")
    if self.coin():
      clause = [verb[n], self.someone(other)]
    else:
      clause = [self.someone(other), verb[other]]
    return [self.the("ANIMATE", n), "that", clause, self.predicate(n)]

  def agreement_coordination(self) -> Words:
    """`Tom and | beside the boy near the hills wait | waits.`"""
    n = self.coin()
    first = self.someone(SINGULAR)
    joint = word_slot((self.pick("PREPOSITIONS"), "and"), n)
    second = [self.someone(SINGULAR), self.between(self.where)]
    return [first, joint, second, self.predicate(n)]

  def determiner_noun(self) -> Words:
    """Anna helps this | these big red dog | dogs."""
    n = self.coin()
    subject = self.coin()
    auxiliary, form = self.auxiliary(subject)
    verb = [self.someone(subject), auxiliary, self.pick("TRANSITIVE")[form]]
    determiner = word_slot(self.pick("DETERMINERS"), n)
    adjectives = [self.between(self.adjective), self.between(self.adjective)]
    return [verb, determiner, adjectives, word_slot(self.pick("NOUNS"), n)]

  def anaphor_gender(self) -> Words:
    """The queen near Tom has often helped herself | himself."""
    gender = self.coin()
    auxiliary, form = self.auxiliary(SINGULAR)
    verb = self.pick("TRANSITIVE")
    # The auxiliary, without a gender, separates the two.
    distant = self.between(lambda: [auxiliary, self.adverb(), verb[form]])
    subject = [self.person(gender), self.between(self.where)]
    return [subject, distant or verb[SINGULAR], word_slot(REFLEXIVES, gender)]

  def anaphor_number(self) -> Words:
    """The queens near Tom will often help themselves | herself."""
    gender = self.coin()
    n = self.coin()
    auxiliary, form = self.auxiliary(n)
    subject = [self.the(PEOPLE[gender], n), self.between(self.where), auxiliary]
    verb = [self.between(self.adverb), self.pick("TRANSITIVE")[form]]
    return [subject, verb, word_slot((REFLEXIVES[gender], "themselves"), n)]

  def npi_subject(self) -> Words:
    """No | every king near the hill has ever | already rested."""
    polarity = self.coin()
    subject = self.pick("SUBJECTS")
    # "Nobody" is a subject; "no" needs a noun.
    noun = [] if "nobody" in subject else self.pick("ANIMATE")[SINGULAR]
    verb, complements = self.action()
    noun = [word_slot(subject, polarity), noun, self.between(self.where), "has"]
    return [
      noun,
      word_slot(("ever", "already"), polarity),
      verb[PARTICIPLE],
      complements,
    ]

  def npi_adverb(self) -> Words:
    """The girl has never | always really helped any | some dogs."""
    polarity = self.coin()
    n = self.coin()
    subject = [
      self.someone(n),
      HAVE[n],
      word_slot(("never", "always"), polarity),
    ]
    verb = [self.between(self.adverb), self.pick("TRANSITIVE")[PARTICIPLE]]
    amount = [
      word_slot(("any", "some"), polarity),
      self.optional(self.adjective),
    ]
    return [subject, verb, amount, self.pick("NOUNS")[PLURAL]]

  def filler_gap(self) -> Words:
    """Tom knows who | that the dogs near Eva help; that they help Ben."""
    n = self.coin()
    gap = self.coin()
    subject = self.coin()
    auxiliary, form = self.auxiliary(subject)
    knows = [self.someone(n), self.pick("KNOWING")[n]]
    knows.append(word_slot(("that", "who"), gap))
    inner = [self.the("ANIMATE", subject), self.optional(self.where), auxiliary]
    verb = self.pick("TRANSITIVE")[form]
    return [knows, inner, verb, [] if gap else self.anyone()]

  def argument_structure(self) -> Words:
    """Tom knows who the dog can now help | walk near the hill."""
    n = self.coin()
    gap = self.coin()
    subject = self.coin()
    auxiliary, form = self.auxiliary(subject)
    verbs = self.pick("INTRANSITIVE")[form], self.pick("TRANSITIVE")[form]
    knows = [self.someone(n), self.pick("KNOWING")[n], ("that", "who")[gap]]
    inner = [self.the("ANIMATE", subject), auxiliary, self.between(self.adverb)]
    return [knows, inner, word_slot(verbs, gap), self.where()]

  def auxiliary_form(self) -> Words:
    """The girls have often really helped | help the boys."""
    n = self.coin()
    auxiliary, form = self.auxiliary(n)
    verb, complements = self.action()
    subject = [self.someone(n), auxiliary]
    adverbs = [self.between(self.adverb), self.between(self.adverb)]
    return [
      subject,
      adverbs,
      Slot(verb[form], verb[BARE + PARTICIPLE - form]),
      complements,
    ]

  def existential_quantifier(self) -> Words:
    """There will soon be many | all dogs; here | there will be all dogs."""
    n = self.coin()
    # Tests the opening or the quantifier; the other is right in both.
    opening = Slot("here", "there")
    quantifier = self.pick("STRONG")[n]
    if self.coin():
      opening = "there"
      quantifier = Slot(self.pick("WEAK")[n], quantifier)
    verb = [opening, self.pick("MODALS"), self.between(self.adverb), "be"]
    noun = [quantifier, self.optional(self.adjective), self.pick("ANIMATE")[n]]
    return [verb, noun, self.optional(self.where)]


# By UID, a rule's name: BLiMP's field and term, and its share of the text.
PHENOMENA = {
  "agreement_across_phrase": ("morphology", "subject_verb_agreement", 2),
  "agreement_across_clause": ("morphology", "subject_verb_agreement", 2),
  "agreement_coordination": ("morphology", "subject_verb_agreement", 2),
  "determiner_noun": ("morphology", "determiner_noun_agreement", 2),
  "anaphor_gender": ("morphology", "anaphor_agreement", 3),
  "anaphor_number": ("morphology", "anaphor_agreement", 2),
  "npi_subject": ("semantics", "npi_licensing", 2),
  "npi_adverb": ("semantics", "npi_licensing", 1),
  "filler_gap": ("syntax", "filler_gap_dependency", 2),
  "argument_structure": ("syntax", "argument_structure", 2),
  "auxiliary_form": ("morphology", "auxiliary_selection", 1),
  "existential_quantifier": ("semantics", "quantifiers", 2),
}
RULES = [uid for uid, (*_, share) in PHENOMENA.items() for _ in range(share)]
# Every rule can make more, so the search for new pairs ends.
MOST_PAIRS = 2000


def make_sentences(
  seed: int | str, count: int, exclude: Collection[str] = frozenset()
) -> Iterator[str]:
  """Yields `count` good sentences that are not in `exclude`; some recur."""
  grammar = Grammar(f"sentences {seed}")
  while count > 0:
    line = _sentence_text(grammar.say(grammar.choose(RULES)))
    if line not in exclude:
      yield line
      count -= 1


def make_minimal_pairs(
  seed: int | str, per_phenomenon: int, exclude: Collection[str] = frozenset()
) -> dict[str, list[dict]]:
  """Makes distinct minimal pairs in BLiMP's form, the same number for each UID.

  The number is at most `MOST_PAIRS`. Equal seeds make equal pairs, and no pair
  contains a sentence of `exclude`.
  """
  pairs_of = {}
  for uid, (field, term, _) in PHENOMENA.items():
    labels = {"field": field, "linguistics_term": term, "UID": uid}
    grammar = Grammar(f"pairs {uid} {seed}", far=True)
    used = set(exclude)
    pairs = pairs_of[uid] = []
    while len(pairs) < per_phenomenon:
      words = grammar.say(uid)
      slots = [i for i, word in enumerate(words) if isinstance(word, Slot)]
      tested = grammar.choose(slots)
      good = _sentence_text(words)
      words[tested] = words[tested].wrong
      bad = _sentence_text(words)
      # A bad sentence must not be good in another pair.
      if used.isdisjoint((good, bad)):
        sides = {"sentence_good": good, "sentence_bad": bad}
        pairs.append({**sides, **labels, "pair_id": str(len(pairs))})
        used.update((good, bad))
  return pairs_of


def _sentence_text(words: list) -> str:
  """Returns the sentence as text, with all slots right."""
  right = (word if isinstance(word, str) else word.right for word in words)
  return " ".join([*right, "."])


def _flat_words(words: Words) -> list[str | Slot]:
  flat = []
  for word in words:
    flat += _flat_words(word) if isinstance(word, list) else [word]
  return flat


@settings.checked
def write_toy_english(
  output: files.LocalPath,
  *,
  sentences: Annotated[int, argument(least=1, most=10**7)] = 160_000,
  pairs: Annotated[int, argument(least=1, most=MOST_PAIRS)] = 150,
  seed: int = 0,
) -> str:
  """Writes text/toy.train, text/toy.dev and pairs/UID.jsonl to a folder.

  A line of text is a sentence, and a line of pairs is a minimal pair in BLiMP's
  form. The three share no sentence. The held-out text has a twentieth of the
  training text's sentences. Equal settings write equal files, which replace
  older files. The defaults are the quickstart's.

  Args:
    output: Path to the output folder.
    sentences: Number of training sentences.
    pairs: Number of pairs of each phenomenon.
    seed: Random seed.

  Returns:
    A summary with a sample.
  """
  train, dev, groups = _distinct(seed, sentences, pairs)
  lines_of = {"text/toy.train": train, "text/toy.dev": dev}
  for uid, group in groups.items():
    lines_of[f"pairs/{uid}.jsonl"] = map(json.dumps, group)
  for name, lines in lines_of.items():
    files.write_text(Path(output, name), "".join(f"{x}\n" for x in lines))
  paragraph = (
    f"Wrote {len(train):,} sentences of training text and {len(dev):,} of"
    f" held-out text to {output}/text, and {pairs} minimal pairs of each of"
    f" {len(groups)} phenomena to {output}/pairs. The three share no sentence."
    " An asterisk marks the wrong sentence of a pair. A sample:"
  )
  sample = [f"  {line}" for line in train[:3]]
  for first, *_ in groups.values():
    sample += ["", f"  {first['sentence_good']}", f"* {first['sentence_bad']}"]
  return "\n".join([textwrap.fill(paragraph, 80), "", *sample])


def _distinct(
  seed: int, count: int, pairs: int
) -> tuple[list[str], list[str], dict[str, list[dict]]]:
  """Returns training text, held-out text and minimal pairs."""
  # Each part excludes the sentences of the parts before it.
  groups = make_minimal_pairs(seed, pairs)
  tested = [pair for group in groups.values() for pair in group]
  taken = {p[f"sentence_{side}"] for p in tested for side in ("good", "bad")}
  dev = list(make_sentences(f"dev {seed}", -(-count // 20), taken))
  taken.update(dev)
  return list(make_sentences(f"train {seed}", count, taken)), dev, groups


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  summary = "Write toy English: text/toy.{train,dev} and pairs/*.jsonl."
  print(cli.call_with_arguments(write_toy_english, argv, summary))
