"""Answering: windows, both heads, SQuAD's rules, files, and training."""

import dataclasses
import functools
import itertools
import json
import re
import shutil
import string
import unicodedata

import jax
import numpy as np
import pytest

from antlm_jax.errors import UserError
from antlm_jax.evals import finetune
from antlm_jax.evals.finetuning import answering, loop
from antlm_jax.evals.finetuning.answering import Inside, Spans
from antlm_jax.evals.finetuning.batching import Example, ExampleRows
from antlm_jax.evals.finetuning.loop import TrialRun
from antlm_jax.evals.predict import predict
from antlm_jax.inference.model import load
from tests import random_models, runs, tuned

TEXT = "Tom sat near the hills. Ann wandered often near the dogs and the hills."
ASKED = Example(("Who wandered?", TEXT), [["Ann", TEXT.index("Ann")]], "q")
run = random_models.run(layers=1)


@pytest.mark.parametrize("stride", [4, 128])
@pytest.mark.parametrize("question", ["Who wandered?", "who wandered " * 50])
@pytest.mark.parametrize("longest", [8, 24])
def test_every_token_of_a_long_text_is_in_a_window(
  loaded, longest, question, stride
):
  ids, spans = loaded.tokenizer.encode_offsets(TEXT)
  example = ASKED._replace(texts=(question, TEXT))
  rows = Spans(stride=stride).encode(loaded, [example], longest)
  assert len(rows) > 2 and rows.tokens.shape[1] <= longest
  seen = set()
  found = zip(rows.tokens, rows.lengths, rows.origins, strict=True)
  for row, length, window in found:
    text = row[window.offset : window.offset + len(window.spans)]
    begin = spans.index(window.spans[0])
    assert text.tolist() == ids[begin : begin + len(text)].tolist()
    assert row[length - 1] == loaded.tokenizer.eos_id
    seen.update(window.spans)
  assert seen == set(spans)


def test_the_answer_is_marked_where_it_is_whole_and_else_the_first_token(
  loaded,
):
  rows = Spans(stride=4).encode(loaded, [ASKED], 24)
  marked = []
  for label, window in zip(rows.labels, rows.origins, strict=True):
    (first,), (last,) = (np.flatnonzero(label & bit) for bit in (2, 4))
    inside = any(TEXT[a:b].startswith("Ann") for a, b in window.spans)
    if first:
      begin = window.spans[first - window.offset][0]
      end = window.spans[last - window.offset][1]
      marked.append(TEXT[begin:end])
    else:
      assert last == 0 and not inside
    may = np.flatnonzero(label & 1)
    assert may[0] == 0 and may[1] == window.offset
  assert set(marked) == {"Ann"}
  rows = Spans().encode(loaded, [ASKED._replace(label=[])], 64)
  assert rows.labels[0, 0] == 7 and (rows.labels[0, 1:] < 2).all()


def test_inside_marks_the_answers_tokens_alone(loaded):
  rows = Inside().encode(loaded, [ASKED], 128)
  at = np.flatnonzero(rows.labels[0] == 1)
  assert loaded.tokenizer.decode(rows.tokens[0, at]).strip() == "Ann"
  assert (rows.labels[0, : rows.lengths[0]] >= 0).all()
  begin = loaded.tokenizer.encode("Question: Who wandered?\nContext: ")
  assert rows.tokens[0, 1 : 1 + len(begin)].tolist() == begin.tolist()


def test_the_loss_is_over_where_an_answer_may_be(loaded):
  rows = Spans().encode(loaded, [ASKED, ASKED._replace(label=[])], 64)
  draw = np.random.default_rng(0)
  scores = draw.normal(size=(2, rows.tokens.shape[1], 2))
  expected = []
  for label, row in zip(rows.labels, scores, strict=True):
    may = np.flatnonzero(label & 1)
    for end, bit in enumerate((2, 4)):
      (at,) = np.flatnonzero(label & bit)
      each = np.exp(row[may, end])
      expected.append(-np.log(np.exp(row[at, end]) / each.sum()))
  scores = scores.astype(np.float32)
  loss = Spans().loss(scores, rows.labels, np.ones(2, np.float32))
  assert float(loss) == pytest.approx(np.mean(expected), rel=1e-5)
  grad = jax.grad(lambda s: Spans().loss(s, rows.labels, np.ones(2)))
  found = np.asarray(grad(scores))
  assert np.isfinite(found).all() and not found[rows.labels & 1 == 0].any()


@pytest.mark.parametrize("longest", [1, 3, 30])
def test_the_best_answer_is_the_best_of_all(loaded, longest):
  head = Spans(stride=4, longest=longest, may_be_none=False)
  rows = head.encode(loaded, [ASKED], 24)
  draw = np.random.default_rng(longest)
  scores = draw.normal(size=(*rows.tokens.shape, 2))
  best = (-np.inf, "")
  for row, window in zip(scores, rows.origins, strict=True):
    for i, j in itertools.product(range(len(window.spans)), repeat=2):
      if i <= j < i + longest:
        begin, end = window.spans[i][0], window.spans[j][1]
        total = row[window.offset + i, 0] + row[window.offset + j, 1]
        if begin < end:  # not the space before the first word
          best = max(best, (total, TEXT[begin:end]))
  assert head.decode(scores, rows) == [best[1]]


def test_no_answer_wins_by_its_score(loaded):
  rows = Spans().encode(loaded, [ASKED], 64)
  scores = np.zeros((*rows.tokens.shape, 2))
  scores[0, 0] = 1.0
  scores[0, rows.origins[0].offset + 3] = 0.1
  assert Spans().decode(scores, rows) == [""]
  assert Spans(null_score=2.5).decode(scores, rows) != [""]
  assert Spans(may_be_none=False).decode(scores, rows) != [""]


def test_how_answers_are_read_may_change_after_training():
  """Catches `--null_score` and the like that do nothing with `--epochs=0`."""
  wanted = Spans(stride=5, longest=1, null_score=3.0, may_be_none=False)
  found = Spans(may_be_none=True).evaluated_as(wanted)
  assert found == dataclasses.replace(wanted, may_be_none=True)


def test_what_must_have_an_answer_says_something(loaded):
  head = Spans(may_be_none=False)
  rows = head.encode(loaded, [ASKED], 64)
  window = rows.origins[0]
  assert window.spans[0] == (0, 0)  # the space before the first word
  scores = np.zeros((*rows.tokens.shape, 2))
  scores[0, window.offset] = 2.0
  scores[0, window.offset + 5] = 1.0
  assert head.decode(scores, rows) == [TEXT[: window.spans[5][1]]]
  rows = head.encode(loaded, [Example(("Who?", ""))], 64)
  assert head.decode(np.zeros((*rows.tokens.shape, 2)), rows) == [""]


# SQuAD's rules, reimplemented


def official(found: str, answers: list[str]) -> tuple[float, float]:
  def words(text):
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()

  def f1(x, y):
    common = sum(min(x.count(w), y.count(w)) for w in set(x))
    if not common:
      return float(x == y)
    precision, recall = common / len(x), common / len(y)
    return 2 * precision * recall / (precision + recall)

  x, sides = words(found), [words(answer) for answer in answers or [""]]
  return float(x in sides), max(f1(x, y) for y in sides)


def test_scores_are_squads(tmp_path):
  draw = np.random.default_rng(0)
  words = ["the", "a", "Tom", "tom.", "hills", "near", "The", "dog's", "an,"]

  def text():
    return " ".join(draw.choice([*words, ""], draw.integers(0, 5)))

  found = [text() for _ in range(1000)]
  labels = [[[text(), 0] for _ in range(draw.integers(0, 4))] for _ in found]
  texts = [[t for t, _ in label] for label in labels]
  exact, f1 = np.mean([*map(official, found, texts)], axis=0)
  metrics = squad_task(tmp_path, 1, 1).metrics
  assert metrics["exact_match"](found, labels) == exact
  assert metrics["f1"](found, labels) == pytest.approx(f1, abs=1e-12)
  assert 0 < exact < f1 < 1


def test_a_question_without_its_text_is_told(loaded):
  for head in (Spans(), Inside()):
    with pytest.raises(UserError, match="not a question and its text"):
      head.encode(loaded, [head.example("Who?")], 64)


def test_an_answer_that_is_cut_off_is_not_found_by_finding_nothing():
  asked = Example(("Who?", "Tom"), [["Tom", 0]])
  labels = np.zeros((2, 4), np.int32)  # the cut text has no answer token
  about = [asked, asked._replace(label=[])]
  places = [(1, [(0, 3)])] * 2  # the text's only token in each row
  rows = ExampleRows(labels, np.array([4, 4]), labels, True, about, places)
  found = Inside().decode(np.zeros((2, 4), np.int32), rows)
  found.append({"found": [1, 2, 5], "there": [2]})
  assert [answering.index_f1(one, None) for one in found] == [0, 1, 0.5]


def squad_task(folder, train, dev, **options):
  """Returns the task of files with `train` and `dev` questions."""
  for name, count in (("train", train), ("dev", dev)):
    draw, paragraphs = np.random.default_rng(count), []
    for i in range(count):
      who, what = draw.choice(["Tom", "Ann"]), draw.choice(["sat", "wandered"])
      text = f"{what} often near the hills {who}"
      answers = [{"text": str(who), "answer_start": text.index(str(who))}]
      asked = [{"id": f"{i}", "question": "Who?", "answers": answers}]
      paragraphs.append({"context": text, "qas": asked})
    data = json.dumps({"data": [{"paragraphs": paragraphs}]})
    (folder / f"{name}-v1.1.json").write_text(data)
  options = answering.AnsweringOptions(**options)
  return answering.make_answering_task(
    folder, "squad", "bidirectional", options
  )


def test_the_training_set_is_divided_and_their_own_is_the_test(tmp_path):
  task = squad_task(tmp_path, 45, 7)
  train, dev, test = map(task.load, ("train", *task.evaluations))
  # 95 %, rounded down, in the order of NumPy's generator with seed 42.
  order = np.random.default_rng(42).permutation(45)
  assert [e.id for e in dev] == [str(i) for i in order[:3]]
  assert [e.id for e in train] == [str(i) for i in order[3:]]
  assert len(test) == 7 and not task.head.may_be_none


def paragraph(question):
  """Returns the text of a file with one question."""
  one = {"context": "Tom sat", "qas": [question]}
  return json.dumps({"data": [{"paragraphs": [one]}]})


LOST = {"id": 0, "question": "Who?"}  # with an answer_start off by one
LOST["answers"] = [{"text": "sat", "answer_start": 5}]
SAT = LOST | {"answers": [{"text": "sat", "answer_start": 4}]}


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ('{"data": [{"paragraphs": [{}]}]}', "question 1: KeyError"),
    (
      paragraph({"id": 5, "question": None, "answers": []}),
      "question 5: it, or its text, is",
    ),
    (paragraph("who"), "question 1: TypeError"),
    (paragraph(LOST), "question 0: the answer .* is not in its"),
    ("[]", "cannot read"),
    (paragraph(SAT | {"is_impossible": "no"}), "is_impossible is 'no': give"),
    (paragraph(SAT | {"is_impossible": True}), "true, but the question has an"),
    (
      paragraph(LOST | {"is_impossible": False, "answers": []}),
      "false, but the question has no answer",
    ),
  ],
)
def test_bad_files_are_told(tmp_path, text, words):
  (tmp_path / "a").write_text(text)
  with pytest.raises(UserError, match=words):
    answering.read_squad(tmp_path / "a")


def test_tokens_inside_become_the_texts_words(loaded):
  """Decoding takes the longest run of tokens and returns the text itself."""
  text = "Tom sat near the hills"
  label = [["near the", text.index("near")]]
  for question in ("who", "who sat near the dogs"):
    rows = Inside().encode(loaded, [Example((question, text), label)], 48)
    marks = rows.labels.copy()
    marks[0, np.flatnonzero(marks[0] == 1)[0] - 2] = 1  # a lone token
    outputs = np.eye(2)[np.maximum(marks, 0)]
    (found,) = Inside().predictions(outputs, rows)
    assert found.answer == "near the"
    (found,) = Inside().predictions(np.eye(2)[0 * marks], rows)
    assert found.answer == ""


def test_own_files_and_records(tmp_path):
  """Catches a text that is in train and dev, and lost empty answers."""
  squad_task(tmp_path, 45, 7)
  (tmp_path / "train-v1.1.json").rename(tmp_path / "my.json")
  path, options = str(tmp_path / "my.json"), answering.AnsweringOptions()
  task = answering.make_answering_task(path, "own", "bidirectional", options)
  train, dev = map(task.load, ("train", "my-dev"))
  assert len(train) + len(dev) == 45 and not task.head.may_be_none
  assert not {e.texts[1] for e in train} & {e.texts[1] for e in dev}
  both = {"text": ["sat"], "answer_start": [4]}
  rows = [{"question": "Who?", "context": "Tom sat", "answers": both}]
  rows += [("Who?", "Ann", [])]
  made = {"train": rows, "test": rows}
  task = answering.make_answering_task(made, "own", "bidirectional", options)
  assert task.load("own-test")[0].label == [["sat", 4]]
  assert task.head.may_be_none
  for text, words in (
    ('{"data": []}', "my.json holds no questions"),
    ("", "my.json holds no questions"),
    ('{"data": [', "my.json: it is not JSON"),
  ):
    (tmp_path / "my.json").write_text(text)
    with pytest.raises(UserError, match=words):
      answering.make_answering_task(path, "own", "bidirectional", options)


CONTEXT = "Tom sat. Ann sat near the hills"


@pytest.mark.parametrize(
  "answers",
  [
    "near",
    ["near"],
    {"text": "near"},
    {"text": "near", "answer_start": 17},
    {"text": ["near"], "answer_start": [17.0]},
    {"text": ["near"], "answer_start": [None]},
    [{"text": "near", "answer_start": np.int64(17)}],
    {"text": np.array(["near"]), "answer_start": np.array([17])},
  ],
)
def test_forms_of_answers(answers):
  """Catches an answer that is not found, or found at another place."""
  rows = [("Who?", CONTEXT, answers), ("What?", CONTEXT, [])]
  task = answering.make_answering_task(
    {"test": rows}, "own", "causal", answering.AnsweringOptions()
  )
  labels = [example.label for example in task.load("own-test")]
  assert labels == [[["near", 17]], []]


@pytest.mark.parametrize(
  ("answers", "message"),
  [
    ("far", "the answer 'far' is not in its text"),
    ("sat", "the answer 'sat' is in its text more than once: give the char"),
    ({"text": ["sat"], "answer_start": [None]}, "is in its text more than"),
    (None, "the answer None is no text; a question without an answer has"),
    (float("nan"), "the answer nan is no text"),
    ("", "the answer '' is no text"),
    ([None], "the answer None is no text"),
    ([4], "the answer 4 is no text"),
    ({"text": ["near"], "answer_start": ["17"]}, "starts at '17': give a w"),
    ({"text": ["near"], "answer_start": [17.5]}, "starts at 17.5: give a w"),
    ({"text": ["near"], "answer_start": [True]}, "starts at True: give a w"),
    ({"text": ["near"], "answer_start": [-1]}, "not in its text at charac"),
    ({"text": ["near"], "answer_start": []}, r"1 answers, but starts \[\]"),
    ({"text": ["near"], "answer_start": 17}, "1 answers, but starts 17"),
    ("\ud800", "has half of a surrogate pair"),
  ],
)
def test_answers_that_have_no_place_are_told(tmp_path, answers, message):
  """Catches tracebacks, and a place that is guessed; in memory and files."""
  rows = [("Who?", CONTEXT, []), ("Who?", CONTEXT, answers)]
  options = answering.AnsweringOptions()
  with pytest.raises(UserError, match=f"data, record 2: .*{message}"):
    answering.make_answering_task(rows, "own", "causal", options)
  rows = [
    dict(zip(("question", "context", "answers"), r, strict=True)) for r in rows
  ]
  path = runs.write_lines(tmp_path / "own.jsonl", rows)
  with pytest.raises(UserError, match=r"own\.jsonl.*line 2"):
    answering.make_answering_task(str(path), "own", "causal", options)


@pytest.mark.parametrize("file", [False, True])
def test_records_keep_the_rules_of_squads_form(tmp_path, file):
  """Catches `is_impossible` that only one form of a file reads."""
  row = {"question": "Who?", "context": CONTEXT, "answers": ["near"]}
  for changes, message in (
    ({"is_impossible": True}, "true, but the question has answers"),
    ({"is_impossible": "True"}, "true, but the question has answers"),
    ({"is_impossible": 0, "answers": []}, "false, but the question has no an"),
    ({"context": " "}, "the context is blank"),
    ({"is_impossible": True, "answers": None}, ""),
    # Hugging Face's form, in which empty lists are no answers.
    ({"is_impossible": True, "answers": {"text": [], "answer_start": []}}, ""),
    ({"is_impossible": 0}, ""),
  ):
    rows = [row, row | changes]
    if file:
      rows = str(runs.write_lines(tmp_path / "own.jsonl", rows))
    make = functools.partial(
      answering.make_answering_task, {"test": rows}, "own", "causal"
    )
    if message:
      assert message in runs.told(make, answering.AnsweringOptions())
    else:
      (name,) = make(answering.AnsweringOptions()).evaluations
      answers = make(answering.AnsweringOptions()).load(name)[1].label
      assert bool(answers) == ("answers" not in changes)


def test_the_key_data_may_have_records(tmp_path):
  """Catches records of transformers' run_qa.py that are read as SQuAD's."""
  row = {"id": "a", "question": "Who?", "context": CONTEXT, "answers": ["near"]}
  path = tmp_path / "own.json"
  path.write_text(json.dumps({"version": 1, "data": [row, row]}))
  make = functools.partial(
    answering.make_answering_task, {"test": str(path)}, "own", "causal"
  )
  examples = make(answering.AnsweringOptions()).load("own-test")
  assert [example.label for example in examples] == [[["near", 17]]] * 2
  path.write_text(json.dumps({"data": [row, row | {"answers": ["far"]}]}))
  said = runs.told(make, answering.AnsweringOptions())
  assert "own.json, record 2: the answer 'far' is not in its text" in said


def test_a_start_has_a_column_of_its_own(tmp_path):
  """Catches an error that asks for the start that is there."""
  lines = "question,context,answers,answer_start", "Who?,Tom sat sat,sat,8"
  lines += "What?,Tom sat,Tom,", "Why?,Tom sat,sat,4.0"
  (tmp_path / "own.csv").write_text("\n".join(lines))
  task = answering.make_answering_task(
    {"test": str(tmp_path / "own.csv")},
    "own",
    "causal",
    answering.AnsweringOptions(),
  )
  labels = [example.label for example in task.load("own-test")]
  assert labels == [[["sat", 8]], [["Tom", 0]], [["sat", 4]]]
  (tmp_path / "own.csv").write_text("\n".join([*lines, "Why?,a b,b,[2]"]))
  with pytest.raises(UserError, match=r"'b' starts at '\[2\]': give"):
    answering.make_answering_task(
      {"test": str(tmp_path / "own.csv")},
      "own",
      "causal",
      answering.AnsweringOptions(),
    )
  rows = [{"question": "Who?", "context": CONTEXT, "answers": ["sat", "Ann"]}]
  rows = [row | {"answer_start": [13, 9]} for row in rows]
  task = answering.make_answering_task(
    {"test": rows}, "own", "causal", answering.AnsweringOptions()
  )
  assert task.load("own-test")[0].label == [["sat", 13], ["Ann", 9]]


def test_questions_without_an_answer_have_scores_and_a_best_threshold():
  """Compares with the definitions of SQuAD 2.0's evaluation, by search."""
  labels = [[["x", 0]] * (i % 3 > 0) for i in range(9)]
  examples = [Example(("Who?", "x y"), label) for label in labels]
  task = answering.make_answering_task(
    {"test": [("Who?", "x y", ["x"] * bool(label)) for label in labels]},
    *("own", "causal", answering.AnsweringOptions()),
  )
  windows = [answering._Window(i, 1, [(0, 1), (2, 3)]) for i in range(9)]
  rows = ExampleRows(None, None, None, True, examples, windows)
  outputs = np.random.default_rng(1).normal(size=(9, 3, 2)).astype(np.float32)
  predictions = task.head.decode(outputs, rows)
  scores = task.measure(predictions, examples)
  right = [
    prediction == (example.label[0][0] if example.label else "")
    for prediction, example in zip(predictions, examples, strict=True)
  ]
  assert scores["no_answer_exact_match"] == np.mean(right[::3])
  answered = [right[i] for i in range(9) if i % 3]
  assert scores["has_answer_exact_match"] == np.mean(answered)

  def f1(null_score):
    head = dataclasses.replace(task.head, null_score=null_score)
    return task.measure(head.decode(outputs, rows), examples)["f1"]

  best = task.head.further_scores(outputs, rows)
  assert best["best_f1"] == pytest.approx(f1(best["best_null_score"]))
  assert best["best_f1"] == pytest.approx(max(map(f1, np.linspace(-9, 9, 999))))


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_answers_keep_their_combining_marks(loaded, form):
  """Catches an answer that ends in a mark and loses it in its last token."""
  text = unicodedata.normalize(form, "Tom sat by the café near Zoë .")
  for word in ("café", "Zoë", "by the café near Zoë"):
    answer = unicodedata.normalize(form, word)
    label = [[answer, text.index(answer)]]
    for head in (Spans(), Inside()):
      rows = head.encode(loaded, [Example(("where ?", text), label)], 48)
      if isinstance(head, Spans):
        ends = [(rows.labels & bit) > 0 for bit in (2, 4)]
        outputs = np.stack(ends, axis=-1).astype(np.float32)
      else:
        outputs = np.eye(2)[np.maximum(rows.labels, 0)]
      (found,) = head.predictions(outputs, rows)
      assert found.answer == answer


@pytest.mark.slow
@pytest.mark.parametrize("answers_by", ["spans", "inside"])
def test_it_trains_and_is_saved(loaded, tmp_path, answers_by):
  task = squad_task(tmp_path, 200, 24, answers=answers_by)
  assert loop.read_rows(loaded, task, 48)["train"].cut[0] == 0
  how = {"batch_size": 16, "epochs": 6, "max_length": 48}
  (outcome,) = tuned.trained(loaded, task, [TrialRun(1e-2, 0)], tmp_path, **how)
  assert outcome.best["squad-test"][task.main_metric] > 0.9
  model, examples = load(tmp_path / "model"), task.load("squad-test")
  found = predict(model, [e.texts for e in examples], max_length=48)
  # Evaluate the saved model on a file with a test set only, as XQuAD is.
  path = shutil.copy(tmp_path / "dev-v1.1.json", tmp_path / "xquad.en.json")
  how = {"preset": "answering", "epochs": 0, "max_length": 48, "quiet": True}
  again = finetune.finetune(model, path, answers=answers_by, **how)["xquad_en"]
  expected = outcome.best["squad-test"][task.main_metric]
  assert list(again.scores) == ["xquad_en-test"]
  assert again.score == pytest.approx(expected, abs=1e-12)
  assert "evals/untrained/xquad_en" in str(again.folder)
  pairs = zip(found, examples, strict=True)
  right = [answering.same_answer(one.answer, e.label[0][0]) for one, e in pairs]
  assert np.mean(right) > 0.8
