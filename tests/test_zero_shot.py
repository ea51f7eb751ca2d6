"""The tasks of BabyLM 2026, compared with reimplementations of their rules."""

import csv
import dataclasses
import json
import math
import re

import numpy as np
import pytest

from antlm_jax.data import toy_english
from antlm_jax.evals import score as score_command
from antlm_jax.evals.zero_shot import age_of_acquisition
from antlm_jax.evals.zero_shot.age_of_acquisition import AcquiredWord
from antlm_jax.evals.zero_shot.task import TASKS, evaluate
from antlm_jax.inference.model import load
from antlm_jax.inference.model import write_checkpoint as write_model
from antlm_jax.masks import AttentionMask
from tests import helpers, random_models, runs

run = random_models.run(max_seq_len=128)


def write(folder, **files):
  """Writes lists of objects as *.jsonl."""
  for name, rows in files.items():
    runs.write_lines(folder / f"{name.replace('__', '-')}.jsonl", rows)
  return folder


def score(run, data, task, *options, mode="causal"):
  """Scores by the 2026 pipeline; returns summary and predictions."""
  output = data.parent / f"out{len(list(data.parent.iterdir()))}"
  how = f"--mode={mode}", "--pipeline=2026", *options
  summary = runs.score(run, data, output, *how, task=task)
  predictions = output / "predictions.json"
  predictions = predictions.exists() and json.loads(predictions.read_text())
  return summary, predictions


def chosen(predictions):
  """Returns the predictions by UID."""
  return {
    uid: [one["pred"] for one in found["predictions"]]
    for uid, found in predictions.items()
  }


def log_probability(loaded, context, text, mode="causal"):
  """Returns the scores of the tokens that end after a context."""
  t = loaded.tokenizer
  ids, spans = t.encode_offsets(context + text)
  tokens, scores = [t.bos_id, *ids, t.eos_id], []
  for place, (_, end) in enumerate(spans, start=1):
    if end > len(context):
      seen = list(tokens)
      seen[place] = tokens[place] if mode == "causal" else t.mask_id
      logits = helpers.logits(loaded, seen, AttentionMask(mode == "causal"))
      found = helpers.log_softmax(logits[place - (mode != "mlm")])
      scores.append(found[tokens[place]])
  return scores


def judged(loaded, items, mode="causal", of=np.sum):
  """Returns predictions and accuracies by UID.

  Items are (UID, label, [(context, text, prediction)]).
  """
  best, right = {}, {}
  for uid, label, choices in items:
    found = [of(log_probability(loaded, c, t, mode)) for c, t, _ in choices]
    index = int(np.argmax(found))
    best.setdefault(uid, []).append(choices[index][2])
    right.setdefault(uid, []).append(index == label)
  return best, {uid: np.mean(values) for uid, values in right.items()}


EWOK = [
  {"Domain": domain, "ContextType": "direct"}
  | {"ContextDiff": "swap", "TargetDiff": "swap"}
  | {"Context1": f"Tom {verb} .", "Context2": "Tom sat ."}
  | {"Target1": "The dogs rest .", "Target2": "The hills rest ."}
  for domain, verb in (("a-b", "rests"), ("a-b", "sits"), ("c-d", "runs"))
]


COMPS = [
  {"prefix_acceptable": good, "prefix_unacceptable": bad, "property_phrase": x}
  for good, bad, x in (
    ("A dog", "A hill", "sat near Tom ."),
    ("A cat", "A tree", "rests ."),
    ("A xyzzy ", "A dog", "runs . "),  # spaces at the ends are no text
  )
]


def entities(count, seed, operations):
  draw = np.random.default_rng(seed)
  names = ["the dog", "the cat", "the tree", "Tom near it", "Tom and the hill"]
  for n in range(count):
    prefix = f"Box {n} contains {draw.choice(names)} . Box {n} has"
    options = [f" {o} ." for o in draw.permutation(names)[: 3 + n % 3]]
    row = {"input_prefix": prefix, "options": options}
    yield row | {"numops": n % operations}
    # The task skips a row with "nothing".
    yield row | {"options": [*options, " nothing ."], "numops": 1}


def ewok_item(_, row):
  contexts, text = (row["Context1"], row["Context2"]), " " + row["Target1"]
  return row["Domain"], 0, [(c, text, c + text) for c in contexts]


def comps_item(file, row):
  good, bad, said = (text.strip() for text in row.values())
  choices = [(prefix + " ", said, f"{prefix} {said}") for prefix in (good, bad)]
  return file.removeprefix("comps_").replace("__", "_"), 0, choices


def box_item(file, row):
  choices = [(row["input_prefix"], text, text) for text in row["options"]]
  return f"{file}_{row['numops']}_ops", 0, choices


def piqa_item(file, row):
  texts = [f" {text}" for name, text in row.items() if "solution" in name]
  choices = [(row["prompt"].strip(), text, text) for text in texts]
  return row["example_id"], row["label"], choices


SOLUTIONS = ["Tom sat near the hills .", "sits", "A dog rests .", "dogs rest"]
PIQA = [
  {"prompt": prompt, "label": label, "example_id": f"x_{i}"}
  | {f"solution{n}": text for n, text in enumerate(SOLUTIONS[:count])}
  for i, (prompt, label, count) in enumerate(
    [("Tom often", 1, 4), ("the cat ", 3, 4), ("A tree", 0, 2), ("Tom", 1, 2)]
  )
]
BOXES = {"ambiref": [*entities(5, 0, 1)], "regular": [*entities(6, 1, 2)]}
CHOICES = {
  "ewok": (ewok_item, {"a__b": EWOK[:2], "c__d": EWOK[2:]}),
  "comps": (
    comps_item,
    {"comps_base": COMPS, "comps_wugs_dist__before": COMPS[1:]},
  ),
  "entity_tracking": (box_item, BOXES),
  "global_piqa": (piqa_item, {"eng_latn": PIQA}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
  ("task", "mode"),
  [
    ("ewok", "causal"),
    ("comps", "causal"),
    ("comps", "mlm"),
    ("entity_tracking", "causal"),
    ("global_piqa", "causal"),
    ("global_piqa", "mntp"),
  ],
)
def test_choices_are_the_pipelines(run, loaded, tmp_path, task, mode):
  item, rows = CHOICES[task]
  data = write(tmp_path / "data", **rows)
  summary, predictions = score(run, data, task, mode=mode)
  items = [item(file, row) for file in rows for row in rows[file]]
  items = [(*i, c) for *i, c in items if " nothing ." not in c[-1]]
  of = np.mean if task == "global_piqa" else np.sum
  best, right = judged(loaded, items, mode, of)
  assert chosen(predictions) == best and summary["pairs"] == len(items)
  assert all(
    [one["id"] for one in found["predictions"]]
    == [f"{uid}_{i}" for i in range(len(found["predictions"]))]
    for uid, found in predictions.items()
  )
  splits = {}
  if task == "entity_tracking":
    regular = np.mean([right[f"regular_{n}_ops"] for n in (0, 1)])
    splits = {"regular": regular, "ambiref": right["ambiref_0_ops"]}
  macro = np.mean([*(splits or right).values()])
  assert summary["macro_accuracy"] == pytest.approx(macro)


@pytest.mark.parametrize("task", [*TASKS, None])
def test_help_describes_each_task(task, capsys):
  with pytest.raises(SystemExit):
    runs.main(
      "antlm_jax.evals.score", *[f"--task={task}"] * bool(task), "--help"
    )
  said = capsys.readouterr().out
  about = (TASKS[task].about if task else score_command.__doc__).strip()
  assert about in said
  assert not any(
    x in said for x in ("task.ZeroShotTask", "see above", "{pipelines}")
  )
  assert len(about) > 100 and max(map(len, about.splitlines())) <= 80
  assert all(f" {name} " in said for name in TASKS if not task)


def test_results_of_another_task_are_told(run, tmp_path):
  data = write(tmp_path / "data", comps_base=[COMPS[0] | PIQA[0]])
  asked = run, data, tmp_path / "out", "--mode=causal"
  runs.score(*asked, task="comps")
  line = runs.told(runs.score, *asked, task="global_piqa")
  assert "another request (task, reduction differ)" in line
  write(data, comps_base=COMPS[1:2])
  line = runs.told(runs.score, *asked, task="comps")
  assert "another request (data differ)" in line


def test_the_mode_is_that_of_training(run, loaded, tmp_path):
  """Catches a default other than the mode of training."""
  data = write(tmp_path / "data", comps_base=COMPS[:1])
  words = f"--checkpoint={run}", f"--data={data}"
  runs.main(
    "antlm_jax.evals.score", "--task=comps", f"--output={tmp_path}/out", *words
  )
  for model in (run, loaded):
    assert evaluate(model, "comps", data, quiet=True).mode == "causal"
  masked = random_models.with_curriculum(loaded, "1M")
  assert evaluate(masked, "comps", data, quiet=True).mode == "mlm"


def test_from_python_a_task_writes_where_it_is_told(run, tmp_path, capsys):
  """Python has the command's settings and scores, and no hidden output."""
  data = write(tmp_path / "data", comps_base=COMPS[:1], comps_wugs=COMPS[:1])
  before = sorted(run.rglob("*"))
  how = {"mode": "clm", "temperature": 2.0, "limit": 1, "quiet": True}
  found = evaluate(load(run), "comps", data, **how)
  assert found.folder is None and sorted(run.rglob("*")) == before
  assert capsys.readouterr().out == ""
  words = "--mode=causal", "--temperature=2", "--limit=1"
  written = runs.score(run, data, tmp_path / "out", *words, task="comps")
  expected = json.loads(json.dumps(found.summary))
  assert written | {"seconds": 0} == expected | {"seconds": 0}
  again = evaluate(run, "comps", data, output=tmp_path / "out", **how)
  assert again.reused and again.items == found.items != []
  assert found.table in capsys.readouterr().out
  assert found.score == again.score == written["macro_accuracy"]
  assert repr(found) == f"<comps, causal: macro_accuracy {found.score:.4g}>"
  for task, more, message in (
    ("comp", {}, "task='comp' is no zero-shot task "),
    ("comps", {"mode": "both"}, "mode='both' is not one of causal, mlm"),
    ("comps", {"temperatur": 2.0}, "task comps; did you mean 'temperature'?"),
    ("comps", {"limit": -1}, "limit=-1 is not at least 0"),
  ):
    asked = {"mode": "mlm"} | more
    assert message in runs.told(evaluate, run, task, data, **asked)


GOOD = '{"sentence_good": "Tom sat .", "sentence_bad": "Tom hills ."}'
BOX = '{"input_prefix": "A", "options": ["a", "b"], "numops": 1}'
COMP = json.dumps(COMPS[0])
ONE = json.dumps(PIQA[0])
DOMAIN = '{"Domain": "a", "Context1": "a b", "Context2": " ", "Target1": "a"}'
UNREADABLE = [
  ("blimp", "x", "", "holds no pairs"),
  ("blimp", "x", f"{GOOD}\n{{", "x.jsonl, line 2: not JSON"),
  ("blimp", "x", f'{GOOD}\n{{"sentence_good": "a"}}', "2: no text 'sentence_b"),
  ("blimp", "x", GOOD.replace('"Tom sat ."', "7"), "1: no text 'sentence_good"),
  ("blimp", "x", GOOD.replace('"Tom sat ."', "null"), "no text 'sentence_good"),
  ("comps", "comps", COMP, "name is none of comps_base, comps_wugs"),
  ("comps", "comps_base", "{}", "line 1: no text 'property_phrase'"),
  ("entity_tracking", "x", BOX, "name is none of regular"),
  ("entity_tracking", "regular", '{"input_prefix": "A"}', "no texts 'options'"),
  (
    "entity_tracking",
    "regular",
    BOX.replace("numops", "n"),
    "no number 'numops'",
  ),
  ("global_piqa", "x", ONE.replace(": 1,", ": 4,"), "or no text 'solution4'"),
  ("global_piqa", "x", ONE.replace("x_0", ""), "no text 'example_id'"),
  ("ewok", "x", '{"Domain": "a"}', "line 1: no text 'Context1'"),
  ("ewok", "x", DOMAIN, "line 1: no text 'Context2'"),
  ("perplexity", "x", '{"text": " "}', "holds no text"),
  (
    "perplexity --column=b",
    "train",
    '{"text": "a"}',
    "no column 'b' but 'text",
  ),
  ("perplexity --window=8 --stride=9", "x", '{"text": "a"}', "over 8, the"),
  ("lambada", "x", '{"text": "word"}', "text 1: no two words in 'word'"),
  *(
    ("lambada", "x", f'{{"prompt": {prompt}, "answer": {answer}}}', words)
    for prompt, answer, words in (
      # Signs of a prompt, or a list, are no text to score.
      ('"a {word} b"', '"c"', "line 1: the prompt has the placeholder {"),
      ('"a {answer} b {answer}"', '"c"', "the prompt has the placeholder {"),
      ('"a b {answer}"', '["c"]', "['c'] is not text"),
      ('"a b {answer}"', "NaN", "nan is not text"),
      ('"a b {answer}"', "null", "None is not text"),
    )
  ),
]


@pytest.mark.parametrize(("task", "name", "text", "words"), UNREADABLE)
def test_data_of_another_form_is_told(run, tmp_path, task, name, text, words):
  """Catches a task that scores other data, or ends in a traceback."""
  data = tmp_path / "data"
  data.mkdir()
  path = data / f"{name}.jsonl"
  path.write_text(text)
  if task.startswith(("perplexity", "lambada")):
    data = path
  line = f"--checkpoint={run} --data={data} --mode=causal --task={task}"
  assert words in runs.refused("antlm_jax.evals.score", *line.split())


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ("--task=comps --unfiltered", "unrecognized arguments: --unfiltered"),
    ("--task=comps --pipeline=2024", "2024 pipeline has no task comps"),
    ("--task=ewok --pipeline=2024 --mode=mntp", "of the 2024 pipeline"),
    ("--task=blimp --temperature=0", "is not over 0"),
    ("--task=blimp", "nowhere holds no pairs: no such folder"),
    (f"--task=blimp --data={'a' * 5000}", "too long for a path"),
    ("--task=other", "task='other' is no zero-shot task"),
    ("", "required: --task"),
  ],
)
def test_what_a_task_has_not_is_told(run, options, words):
  line = f"--checkpoint={run} --data=nowhere --mode=causal {options}"
  assert words in runs.refused("antlm_jax.evals.score", *line.split())


TIMES = ("RTfirstfix", "RTfirstpass", "RTgopast", "RTrightbound")
PACED = "self_paced_reading_time"


def reading_data(folder, count=60):
  """Writes words of sentences with random numbers; returns the rows."""
  draw = np.random.default_rng(0)
  rows = []
  for number in range(count):
    words = ["Tom", "sat", "near", "unhilled", "dogs", ".", "Therefore"]
    draw.shuffle(words)
    at = number % 4
    row = {"item": " ".join(words[:at]), "word": " " + words[at]}
    row["prev_item"] = " ".join(words[: at - 1]) if at > 1 else ""
    row["prev_word"] = " " + words[at - 1] if at else ""
    row["prev_length"] = len(words[at - 1]) if at else ""
    row |= {"Subtlex_log10": draw.normal(3, 1), "length": len(words[at])}
    row |= {"context_length": at + draw.integers(3)}
    row |= {PACED: draw.normal(300, 30)}
    row |= {name: draw.normal(200, 30) for name in TIMES}
    if number == 9:
      row["RTgopast"] = ""
    rows.append(row)
  folder.mkdir()
  with open(folder / "reading_data.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
  return rows


def slow_surprisal(loaded, text, word, mode):
  """Computes the pipeline's get_p2, get_p2_mlm and get_p2_mntp."""
  t = loaded.tokenizer
  decode = t._backend.decode
  total = 0.0
  for number, token in enumerate(t.encode(word).tolist()):
    piece = decode([token], skip_special_tokens=False)
    target = token if number == 0 else t.encode(piece)[0]
    # A mask includes the space before it.
    stands = text if mode == "causal" else text.rstrip()
    tokens = [t.bos_id, *t.encode(stands)]
    place = len(tokens)
    if mode != "causal":
      tokens += [t.mask_id] * 3 + [t.eos_id]
    logits = helpers.logits(loaded, tokens, AttentionMask(mode == "causal"))
    total -= helpers.log_softmax(logits[place - (mode != "mlm")])[target]
    text += piece
  return total


def r_squared(columns, target):
  """Returns the R^2 of least squares with centred columns."""
  x = np.stack([c - c.mean() for c in columns], axis=1)
  x /= np.linalg.norm(x, axis=0)
  y = target - target.mean()
  left = y - x @ np.linalg.solve(x.T @ x, x.T @ y)
  return 1 - (left @ left) / (y @ y)


def gain(rows, time, names):
  """Returns the share of residual variance that `pred` explains."""
  used = (time, *names, "pred")
  rows = [r for r in rows if all(r[n] != "" and r[n] == r[n] for n in used)]
  column = {n: np.array([float(r[n]) for r in rows]) for n in used}
  base = [column[n] for n in names]
  for i, a in enumerate(names):
    base += [column[a] * column[b] for b in names[i + 1 :]]
  before = r_squared(base, column[time])
  after = r_squared([*base, column["pred"]], column[time])
  return (after - before) / (1 - before)


@pytest.mark.parametrize("mode", ["causal", "mlm", "mntp"])
def test_reading_times(run, loaded, tmp_path, mode):
  folder = tmp_path / "reading"
  rows = reading_data(folder)
  summary, predictions = score(run, folder, "reading", mode=mode)
  for row in rows:
    text, before = row["item"] or "None", row["prev_item"]
    words = [(text, row["word"]), (before, row["prev_word"])]
    row["pred"], row["prev_pred"] = (
      slow_surprisal(loaded, *pair, mode) if pair[0] else math.nan
      for pair in words
    )
  found = predictions["reading"]["predictions"]
  assert [one["id"] for one in found] == list(range(len(rows)))
  for name in ("pred", "prev_pred"):
    both = ([one[name] for one in of] for of in (found, rows))
    np.testing.assert_allclose(*both, rtol=1e-4)
  names = ("Subtlex_log10", "length", "context_length")
  eyes = [gain(rows, time, names) for time in TIMES]
  paced = gain(rows, PACED, (*names, "prev_length", "prev_pred"))
  assert summary["eye_tracking"] == pytest.approx(np.mean(eyes), rel=1e-3)
  assert summary["self_paced_reading"] == pytest.approx(paced, rel=1e-3)


def test_ages_of_curves_that_are_known():
  """Words and children follow sigmoids exactly."""
  names = [f"chck_{n}M" for n in (1, 2, 3, 5, 7, 10, 20, 40, 60, 80, 100)]
  seen = np.array([age_of_acquisition.words_seen(name) for name in names])
  assert seen[0] == 1e6 and seen[-1] == 1e8
  x, months, chance = np.log10(seen + 1), np.arange(16, 31), 18.2
  words, curves, ages = [], [], []
  for middle, born in ((6.7, 19.5), (7.0, 22.5), (7.3, 27.0), (6.9, 21.0)):
    curve = 14 - 11 / (1 + np.exp(-4 * (x - middle)))
    level = (chance + curve.min()) / 2
    ages.append(middle - np.log(11 / (14 - level) - 1) / 4)
    shares = 1 / (1 + np.exp(-0.6 * (months - born)))
    child = age_of_acquisition.child_age(months, shares)
    assert child == pytest.approx(born, abs=1e-3)
    words.append(AcquiredWord("dog", ("a ", "b "), child))
    curves.append(np.stack([curve - 0.5, curve + 0.5], axis=1))
  # A word that is never learned, and a word without data of children.
  words += [
    AcquiredWord("never", ("a ",), 20.0),
    AcquiredWord("unknown", ("a ",), None),
  ]
  curves += [np.full((len(x), 1), 19.0), curves[0]]
  chances = np.full(6, chance)
  found = age_of_acquisition.outcome(words, names, curves, chances)
  learned = [line["model_log10_words"] for line in found.lines]
  np.testing.assert_allclose(learned[:4], ages, atol=1e-3)
  assert learned[4] is None
  assert found.summary["compared"] == 4 and found.summary["words"] == 6
  children = [word.child for word in words[:4]]
  expected = np.corrcoef(ages, children)[0, 1]
  assert found.summary["correlation"] == pytest.approx(expected, abs=1e-3)
  assert json.loads(found.files["aoa_score.json"])["aoa"] == pytest.approx(
    expected, abs=1e-3
  )
  # With few words or an insignificant correlation, the score is 0.
  words[0], words[1] = (
    words[i]._replace(child=x) for i, x in ((0, 26), (1, 20))
  )
  for some in (slice(4), slice(2, 6)):
    given = words[some], names, curves[some], chances[some]
    assert age_of_acquisition.outcome(*given).summary["correlation"] == 0.0
  late = 1 / (1 + np.exp(-0.6 * (months - 40.0)))
  assert age_of_acquisition.child_age(months, late) is None
  assert age_of_acquisition.child_age(months[:2], late[:2]) is None


@pytest.fixture(scope="module")
def kept(loaded, tmp_path_factory):
  """A run of three checkpoints, named by the number of words seen."""
  folder = tmp_path_factory.mktemp("kept")
  names = {"chck_1M": 1, "chck_2M": 2, "chck_10M": 10}
  meta = dataclasses.replace(loaded.meta, milestones=names)
  for step in names.values():
    params = {name: x * step**0.25 for name, x in loaded.params.items()}
    write_model(folder / f"checkpoints/{step}", step, params, meta)
  return folder


CONTEXTS = {
  "dog": [{"context": "Tom sat near the "}, {"context": "A"}],
  "sits": [{"context": "the cat"}],
  "x": [{"context": "of one letter"}],
}


def surprisals(kept):
  """Yields the entries of the pipeline's surprisal.json."""
  for name, step in load(kept).meta.milestones.items():
    model = load(kept, step)
    for word in ("dog", "sits"):
      for i, row in enumerate(CONTEXTS[word]):
        context = row["context"].strip() + " "
        found = -np.sum(log_probability(model, context, word))
        one = {"step": name, "word_count": step * 10**6, "target_word": word}
        one |= {"context_id": i, "context": row["context"]}
        yield one | {"surprisal": pytest.approx(found, 1e-4)}


@pytest.mark.slow
def test_a_submission_has_the_files_that_are_collated(kept, tmp_path, capsys):
  """Catches a file in another place or form than collate_preds.py reads."""
  data, output = tmp_path / "data", tmp_path / "results/model"
  pairs = toy_english.make_minimal_pairs("a", 3).values()
  by_uid = {group[0]["UID"]: group for group in pairs}
  for kind, suffix in (("full", "filtered"), ("fast", "fast")):
    folder = data / f"{kind}_eval"
    folder.mkdir(parents=True)
    write(folder / f"blimp_{suffix}", **by_uid)
    write(folder / f"ewok_{suffix}", **CHOICES["ewok"][1])
    for name in ("global_piqa_parallel", "global_piqa_nonparallel"):
      write(folder / name, eng_latn=PIQA)
    reading_data(folder / "reading")
  full = data / "full_eval"
  write(full / "comps", **CHOICES["comps"][1])
  write(full / "entity_tracking", **BOXES)
  write(data / "fast_eval/entity_tracking_fast", regular=BOXES["regular"])
  (full / "aoa").mkdir()
  (full / "aoa/cdi_childes.json").write_text(json.dumps(CONTEXTS))
  human = "word,16,17,18\ndog,0.1,NA,0.9\n"
  (full / "aoa/cdi_human.csv").write_text(human)
  rte = [
    {"sentence1": "a", "sentence2": "b", "label": i % 2} for i in range(40)
  ]
  for split in ("train", "valid"):
    runs.write_lines(full / f"glue_filtered/rte.{split}.jsonl", rte)
  words = f"--checkpoint={kept}", f"--data={data}", f"--output={output}"
  runs.main("antlm_jax.evals.babylm", *words, "--mode=causal")
  said = capsys.readouterr().out
  left_out = re.search("warning: left out, not in .*: (.*)", said)[1].split(
    ", "
  )
  assert left_out == [
    "full_eval/supplement_filtered",
    "fast_eval/supplement_fast",
  ]
  found = {
    path.relative_to(output).as_posix(): json.loads(path.read_text())
    for path in output.rglob("*.json")
    if not path.name.startswith("summary")
  }
  piqa = [f"global_piqa_{kind}" for kind in ("parallel", "nonparallel")]
  both = [f"{name}/{name}" for name in piqa] + ["reading"]
  fast = ["blimp/blimp_fast", "ewok/ewok_fast", *both]
  fast += ["entity_tracking/entity_tracking_fast"]
  whole = ["blimp/blimp_filtered", "ewok/ewok_filtered", "comps/comps", *both]
  whole += ["entity_tracking/entity_tracking"]
  places = {f"main/zero_shot/causal/{p}/predictions.json" for p in whole}
  places |= {
    f"{name}/zero_shot/causal/{place}/predictions.json"
    for name in ("chck_1M", "chck_2M", "chck_10M")
    for place in fast
  }
  aoa = "main/zero_shot/causal/AoA_word"
  places |= {f"{aoa}/surprisal.json", f"{aoa}/aoa_score.json"}
  tuned = "main/finetune/rte/predictions.json"
  own = "main/finetune/rte/10-causal/predictions.json"
  assert found.keys() == {*places, tuned, own}
  assert found[f"{aoa}/surprisal.json"]["results"] == [*surprisals(kept)]
  assert found[f"{aoa}/aoa_score.json"] == {"aoa": 0.0}
  assert found[tuned] == found[own] and [*found[tuned]] == ["rte"]
  assert len(found[tuned]["rte"]["predictions"]) == len(rte)
  pairs = found["main/zero_shot/causal/blimp/blimp_filtered/predictions.json"]
  assert {uid: len(those["predictions"]) for uid, those in pairs.items()} == {
    uid: len(rows) for uid, rows in by_uid.items()
  }
  runs.main("antlm_jax.evals.babylm", *words, "--mode=causal")
  again = capsys.readouterr().out
  assert "items of" not in again
  assert again.splitlines()[-11:] == said.splitlines()[-11:]
  # One of seven tasks is no column, in the table, the file and the mean.
  assert re.search(r"\(Super\)GLUE +[\d.]+  1 of 7 tasks", again)
  summary = json.loads((output / "summary-causal.json").read_text())
  assert summary["partial"] == {"(Super)GLUE": "1 of 7"}
  whole = sum(summary["scores"].values()) - summary["scores"]["(Super)GLUE"]
  assert summary["mean_of_nine"] == pytest.approx(whole / 9)
  # Masked scores would be collated with causal fine-tuning.
  line = runs.refused("antlm_jax.evals.babylm", *words, "--mode=mlm")
  assert "main/finetune/rte/10-causal is fine-tuned with another" in line
  assert not (output / "main/zero_shot/mlm").exists()


def test_a_model_without_checkpoints_by_words_has_full_scores(
  loaded, tmp_path, capsys
):
  """Catches an imported baseline that is refused for want of fast_eval."""
  write_model(tmp_path / "model", 1, loaded.params, loaded.meta)
  pairs = toy_english.make_minimal_pairs("a", 2).values()
  by_uid = {group[0]["UID"]: group for group in pairs}
  for folder in ("full_eval/blimp_filtered", "fast_eval/blimp_fast"):
    path = tmp_path / "data" / folder
    path.parent.mkdir(parents=True)
    write(path, **by_uid)
  (tmp_path / "data/full_eval/aoa").mkdir()
  words = f"--data={tmp_path / 'data'}", f"--output={tmp_path / 'out'}"
  checkpoint = f"--checkpoint={tmp_path / 'model'}"
  runs.main("antlm_jax.evals.babylm", checkpoint, *words, "--mode=mlm")
  said = capsys.readouterr().out
  assert "fast_eval and age of acquisition are left out: " in said
  summary = json.loads((tmp_path / "out/summary-mlm.json").read_text())
  assert [*summary["scores"]] == ["BLiMP"] and not summary["partial"]
