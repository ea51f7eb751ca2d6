"""The tasks of BabyLM's pipelines, each beside its rule written anew."""

import csv
import json
import math
import re

import numpy as np
import pytest

from antlm_jax.errors import UserError
from antlm_jax.evals import score as score_command
from antlm_jax.evals.zero_shot import age_of_acquisition, metrics
from antlm_jax.evals.zero_shot.age_of_acquisition import Word
from antlm_jax.evals.zero_shot.choices import Results, Rules
from antlm_jax.evals.zero_shot.command import TASKS, evaluate
from antlm_jax.inference.model import load
from antlm_jax.inference.pairs import Choice, Item
from antlm_jax.masks import AttentionMask
from tests import helpers, random_models, runs

run = random_models.run(max_seq_len=128)


def write(folder, **files):
  """Writes lists of objects as *.jsonl."""
  for name, rows in files.items():
    runs.write_lines(folder / f"{name.replace('__', '-')}.jsonl", rows)
  return folder


def score(run, data, task, *options, mode="causal"):
  """Scores as the 2025 pipeline; returns summary, predictions and report."""
  output = data.parent / f"out{len(list(data.parent.iterdir()))}"
  how = f"--mode={mode}", "--pipeline=2025", *options
  summary = runs.score(run, data, output, *how, task=task)
  predictions = output / "predictions.json"
  predictions = predictions.exists() and json.loads(predictions.read_text())
  report = "".join(path.read_text() for path in output.glob("*report.txt"))
  return summary, predictions, report


def chosen(predictions):
  """What was predicted, by UID."""
  return {
    uid: [one["pred"] for one in found["predictions"]]
    for uid, found in predictions.items()
  }


def log_probability(loaded, context, text, mode="causal"):
  """Sums the scores of the tokens that end after a context, as 2025 does."""
  t = loaded.tokenizer
  ids, spans = t.encode_offsets(context + text)
  tokens, total = [t.bos_id, *ids, t.eos_id], 0.0
  for place, (_, end) in enumerate(spans, start=1):
    if end > len(context):
      seen = list(tokens)
      seen[place] = tokens[place] if mode == "causal" else t.mask_id
      logits = helpers.logits(loaded, seen, AttentionMask(mode == "causal"))
      found = helpers.log_softmax(logits[place - (mode != "mlm")])
      total += found[tokens[place]]
  return total


def judged(loaded, items, mode="causal"):
  """Judges items (UID, [(context, text, prediction)]), the first text right.

  Returns the predictions, and the share that is right, by UID.
  """
  best, right = {}, {}
  for uid, choices in items:
    found = [log_probability(loaded, c, t, mode) for c, t, _ in choices]
    index = int(np.argmax(found))
    best.setdefault(uid, []).append(choices[index][2])
    right.setdefault(uid, []).append(index == 0)
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
    ("A xyzzy", "A dog", "runs ."),
  )
]


def entities(count, seed, operations):
  draw = np.random.default_rng(seed)
  names = ["the dog", "the cat", "the tree", "nothing", "Tom and the hill"]
  for n in range(count):
    prefix = f"Box {n} contains {draw.choice(names)} . Box {n} has"
    options = [f" {o} ." for o in draw.permutation(names)[: 3 + n % 3]]
    row = {"input_prefix": prefix, "options": options}
    yield row | {"numops": n % operations}


def ewok_item(_, row):
  texts = " " + row["Target1"], " " + row["Target2"]
  return row["Domain"], [(row["Context1"], text, text) for text in texts]


def comps_item(file, row):
  good, bad, said = row.values()
  choices = [(prefix + " ", said, f"{prefix} {said}") for prefix in (good, bad)]
  return file.removeprefix("comps_").replace("__", "_"), choices


def box_item(file, row):
  choices = [(row["input_prefix"], text, text) for text in row["options"]]
  return f"{file}_{row['numops']}_ops", choices


BOXES = {"ambiref": [*entities(5, 0, 1)], "regular": [*entities(6, 1, 2)]}
CHOICES = {
  "ewok": (ewok_item, {"a__b": EWOK[:2], "c__d": EWOK[2:]}),
  "comps": (
    comps_item,
    {"comps_base": COMPS, "comps_wugs_dist__before": COMPS[1:]},
  ),
  "entity_tracking": (box_item, BOXES),
}
WHOLE = "--full_sentence_scores"


@pytest.mark.parametrize(
  ("task", "mode", "options"),
  [
    ("ewok", "causal", ()),
    ("ewok", "causal", (WHOLE,)),
    ("comps", "causal", ()),
    ("comps", "mlm", ()),
    ("entity_tracking", "causal", ()),
  ],
)
def test_choices_are_the_pipelines(run, loaded, tmp_path, task, mode, options):
  item, rows = CHOICES[task]
  data = write(tmp_path / "data", **rows)
  summary, predictions, report = score(run, data, task, *options, mode=mode)
  items = [item(file, row) for file in rows for row in rows[file]]
  if options:
    items = [(u, [("", c + t, c + t) for c, t, _ in of]) for u, of in items]
  best, right = judged(loaded, items, mode)
  assert chosen(predictions) == best and summary["pairs"] == len(items)
  splits = {}
  if task == "entity_tracking":
    regular = np.mean([right[f"regular_{n}_ops"] for n in (0, 1)])
    splits = {"regular": regular, "ambiref": right["ambiref_0_ops"]}
  for split, share in splits.items():
    assert summary[f"{split}_accuracy"] == pytest.approx(share)
  macro = np.mean([*(splits or right).values()])
  assert summary["macro_accuracy"] == pytest.approx(macro)
  lines = [f"{name}: {100 * x:.2f}" for name, x in (right | splits).items()]
  assert report.startswith("TEMPERATURE: 1.00\n\n### UID ACCURACY\n")
  assert "\n".join(["### UID ACCURACY", *lines, "", "###"]) in report
  assert report.endswith(f"### AVERAGE ACCURACY\n{100 * macro:.2f}\n\n")
  by_context = "### CONTEXT_TYPE ACCURACY\ndirect: " in report
  assert by_context == (task == "ewok")


def rank(values):
  """Ranks from 1 on; equal values have the mean of the ranks they take."""
  values = np.array(values)
  return [(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values]


@pytest.mark.parametrize("task", ["wug_adj", "wug_past"])
def test_made_up_words_are_beside_what_people_say(run, loaded, tmp_path, task):
  asked = [("wugged", "wug", 0.9), ("dogged", "doggeded", "0.5")]
  asked += [("catted", "cat", 0.5), ("runned", "ran", 0.1)]
  asked += [("hilled", "hall", 0.7)]
  texts = [(f"Tom {good} .\tTom {bad} .", x) for good, bad, x in asked]
  rows = [{"sentences": text, "ratio": ratio} for text, ratio in texts]
  data = write(tmp_path / "wug", wug=rows)
  summary, predictions, report = score(run, data, task, "--temperature=1,3")
  shares, best = [], []
  for row in rows:
    forms = row["sentences"].split("\t")
    found = np.array([log_probability(loaded, "", form) for form in forms])
    shares.append(np.exp(found[0]) / np.exp(found).sum())
    best.append(forms[int(np.argmax(found))])
  ratings = [float(row["ratio"]) for row in rows]
  rho = np.corrcoef(rank(shares), rank(ratings))[0, 1]
  first, second = (row["macro_spearman"] for row in summary["by_temperature"])
  assert first == summary["macro_spearman"] == pytest.approx(rho)
  top = max(first, second)
  rho = "SPEARMAN'S RHO\n"
  end = f"\n### UID {rho}avg: {top:.2f}\n\n### AVERAGE {rho}{top:.2f}\n\n"
  assert report.endswith(end)
  found = predictions[task]["predictions"]
  assert [one["id"] for one in found] == [f"{task}_{i}" for i in range(5)]
  assert [one["pred"] for one in found] == best
  if first >= second:
    found = [one["prob"] for one in found]
    np.testing.assert_allclose(found, shares, rtol=1e-4)


def test_a_temperature_without_a_correlation_is_not_the_best():
  groups = {"UID": "wug"}
  items = [
    Item((Choice("", "a"), Choice("", "b")), str(i), groups, rating)
    for i, rating in enumerate((0.2, 0.4, 0.9))
  ]
  # At the first of three temperatures all shares are equal.
  first = np.array([[0, 0, 1], [0, 1, 2], [0, 2, 3]], float)
  scores = np.stack([first, np.zeros((3, 3))])
  found = Results(
    items, scores, (0.1, 1.0, 2.0), Rules(metric=metrics.SPEARMAN)
  )
  assert np.isnan(found.macro).tolist() == [True, False, False]
  assert found.summary()["best_temperature"] == 1.0


@pytest.mark.parametrize("task", [*TASKS, None])
def test_help_describes_each_task(task, capsys):
  with pytest.raises(SystemExit):
    runs.main("evals.score", *[f"--task={task}"] * bool(task), "--help")
  said = capsys.readouterr().out
  about = (TASKS[task].about if task else score_command.__doc__).strip()
  assert about in said
  assert not any(
    x in said for x in ("command.Task", "see above", "{pipelines}")
  )
  assert len(about) > 100 and max(map(len, about.splitlines())) <= 80
  assert all(f" {name} " in said for name in TASKS if not task)


def test_results_of_another_task_are_told(run, tmp_path):
  row = {"sentences": "Tom wugged .\tTom wug .", "ratio": 0.5}
  data = write(tmp_path / "wug", wug=[row, row])
  asked = run, data, tmp_path / "out", "--mode=causal"
  runs.score(*asked, task="wug_adj")
  with pytest.raises(UserError, match=r"another request \(task differ\)"):
    runs.score(*asked, task="wug_past")


def test_from_python_a_task_writes_where_it_is_told(run, tmp_path, capsys):
  """Python's settings and figures are the command's, and nothing is hidden."""
  data = write(tmp_path / "data", comps_base=COMPS[:1], comps_wugs=COMPS[:1])
  before = sorted(run.rglob("*"))
  how = {"mode": "clm", "temperature": [1.0, 2.0], "limit": 1, "quiet": True}
  found = evaluate(load(run), "comps", data, **how)
  assert found.folder is None and sorted(run.rglob("*")) == before
  assert capsys.readouterr().out == ""
  words = "--mode=causal", "--temperature=1,2", "--limit=1"
  written = runs.score(run, data, tmp_path / "out", *words, task="comps")
  apart = {"seconds", "peak_memory_mib"}
  assert {k: v for k, v in written.items() if k not in apart} == {
    k: v for k, v in found.summary.items() if k not in apart
  } | {"request": json.loads(json.dumps(found.summary["request"]))}
  again = evaluate(run, "comps", data, output=tmp_path / "out", **how)
  assert again.reused and again.items == found.items != []
  assert found.table in capsys.readouterr().out
  assert found.score == again.score == written["macro_accuracy"]
  assert repr(found) == f"<comps, causal: macro_accuracy {found.score:.4g}>"
  for task, more, message in (
    ("comp", {}, "task 'comp' is not one of aoa, blimp, comps, "),
    ("comps", {"mode": "both"}, "--mode='both' is not one of causal, mlm"),
    ("comps", {"temperatur": 2.0}, "task comps; did you mean 'temperature'?"),
    ("comps", {"limit": -1}, "--limit=-1 is not at least 0"),
    ("aoa", {}, "--revisions is missing"),
  ):
    asked = {"mode": "mlm"} | more
    with pytest.raises(UserError, match=re.escape(message)):
      evaluate(run, task, data, **asked)


BOX = {"input_prefix": "A", "options": ["a", "b"]}


@pytest.mark.parametrize(
  ("task", "name", "row", "message"),
  [
    ("comps", "comps", COMPS[0], "name is none of comps_base, comps_wugs"),
    ("comps", "comps_base", {}, "line 1: no text 'property_phrase'"),
    ("entity_tracking", "x", BOXES["regular"][0], "name is none of regular"),
    ("entity_tracking", "regular", {"input_prefix": "A"}, "no texts 'options'"),
    ("entity_tracking", "regular", BOX, "line 1: no number 'numops'"),
    ("wug_adj", "x", {"sentences": "a", "ratio": 1}, "line 1: no tab"),
    ("wug_adj", "x", {"sentences": "a\tb", "ratio": "x"}, "no number 'ratio'"),
    ("ewok", "x", {"Domain": "a"}, "line 1: no text 'ContextType'"),
  ],
)
def test_data_of_another_form_is_told(run, tmp_path, task, name, row, message):
  data = write(tmp_path / "data", **{name: [row]})
  options = f"--checkpoint={run}", f"--data={data}", "--mode=causal"
  line = runs.refused("evals.score", f"--task={task}", *options)
  assert message in line and "data/" in line


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (("--task=comps", "--unfiltered"), "unrecognized arguments: --unfiltered"),
    (("--task=comps", "--pipeline=2024"), "2024 pipeline has no task comps"),
    (("--task=other",), "invalid choice: 'other'"),
    ((), "required: --task"),
    (("--task=aoa", "--revisions=a=1,b=2"), "3 or more are needed"),
    (("--task=aoa", "--revisions=chck_1M=1,chck_2M,chck_3M=3"), "3 or more"),
    (("--task=aoa", "--revisions=1M=1,chck=2,3M=3"), "of words in 'chck'"),
  ],
)
def test_what_a_task_has_not_is_told(run, options, message):
  words = f"--checkpoint={run}", "--data=nowhere", "--mode=causal"
  assert message in runs.refused("evals.score", *words, *options)


TIMES = ("RTfirstfix", "RTfirstpass", "RTgopast", "RTrightbound")
PACED = "self_paced_reading_time"


def reading_data(folder, count=60):
  """Writes words of sentences, with numbers that were drawn; returns them."""
  draw = np.random.default_rng(0)
  rows = []
  for number in range(count):
    words = ["Tom", "sat", "near", "unhilled", "dogs", ".", "Therefore"]
    draw.shuffle(words)
    at = number % 4  # the first words of a sentence have nothing before them
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
  """The pipeline's get_p2, get_p2_mlm and get_p2_mntp."""
  t = loaded.tokenizer
  decode = t._backend.decode
  total = 0.0
  for number, token in enumerate(t.encode(word).tolist()):
    piece = decode([token], skip_special_tokens=False)
    target = token if number == 0 else t.encode(piece)[0]
    # A mask takes the space before it.
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
  """R^2 of least squares, by the normal equations of centred columns."""
  x = np.stack([c - c.mean() for c in columns], axis=1)
  x /= np.linalg.norm(x, axis=0)
  y = target - target.mean()
  left = y - x @ np.linalg.solve(x.T @ x, x.T @ y)
  return 1 - (left @ left) / (y @ y)


def gain(rows, time, names):
  """What `pred` adds to main effects and products, over what is left."""
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
  summary, predictions, report = score(run, folder, "reading", mode=mode)
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
  assert report == (
    f"EYE TRACKING SCORE: {100 * summary['eye_tracking']:.2f}\n"
    f"SELF-PACED READING SCORE: {100 * summary['self_paced_reading']:.2f}\n"
  )


def test_ages_of_curves_that_are_known():
  """Of sigmoids that words and children follow exactly."""
  names = [f"chck_{n}M" for n in (1, 2, 3, 5, 7, 10, 20, 40, 60, 80, 100)]
  seen = np.array([age_of_acquisition.words_seen(name) for name in names])
  assert seen[0] == 1e6 and seen[-1] == 1e8
  x = np.log10(seen + 1)
  months = np.arange(16, 31)
  words, curves, ages = [], [], []
  for middle, born in ((6.7, 24.0), (7.0, 19.5), (7.3, 22.5), (6.9, 27.0)):
    curve = 14 - 11 / (1 + np.exp(-4 * (x - middle)))
    level = (np.log2(300_000) + curve.min()) / 2
    ages.append(middle - np.log(11 / (14 - level) - 1) / 4)
    shares = 1 / (1 + np.exp(-0.6 * (months - born)))
    child = age_of_acquisition.child_age(months, shares)
    assert child == pytest.approx(born, abs=1e-3)
    words.append(Word("dog", ("a ", "b "), child))
    curves.append(np.stack([curve, curve], axis=1))
  # One that is never learned, and one that children are not known to say.
  words += [Word("never", ("a ",), 20.0), Word("unknown", ("a ",), None)]
  curves += [np.full((len(x), 1), 19.0), curves[0]]

  def learned(found):
    return [line["model_log10_words"] for line in found.lines]

  found = age_of_acquisition.outcome(words, names, curves)
  np.testing.assert_allclose(learned(found)[:4], ages, atol=1e-3)
  assert learned(found)[4] is None
  children = [word.child for word in words[:4]]
  summary = found.summary
  assert summary["compared"] == 4 and summary["words"] == 6
  expected = np.corrcoef(ages, children)[0, 1]
  assert summary["correlation"] == pytest.approx(expected, abs=1e-3)
  few = age_of_acquisition.outcome(words[2:], names, curves[2:]).summary
  assert few["correlation"] == 0.0 and few["compared"] == 2
  down = [curve[::-1] for curve in curves]
  falling = age_of_acquisition.outcome(words, names[::-1], down)
  np.testing.assert_allclose(learned(falling)[:4], ages, atol=1e-3)
  late = 1 / (1 + np.exp(-0.6 * (months - 40.0)))
  assert age_of_acquisition.child_age(months, late) is None
  assert age_of_acquisition.child_age(months[:2], late[:2]) is None


def test_age_of_acquisition(run, loaded, tmp_path, monkeypatch):
  contexts = {
    "dog": [{"context": "Tom sat near the "}, {"context": "A"}],
    "sits": [{"context": "the cat"}],
    "x": [{"context": "of one letter"}],
  }
  data = tmp_path / "aoa"
  data.mkdir()
  (data / "cdi_childes.json").write_text(json.dumps(contexts))
  (data / "cdi_human.csv").write_text("word,16,17,18\ndog,0.1,NA,0.9\n")
  tokenizer = loaded.tokenizer
  models = {"chck_1M": loaded}
  revisions = f"--revisions=chck_1M={random_models.STEP}"
  for i in (2, 3):
    path = random_models.save(tmp_path / str(i), tokenizer, init_std=0.1 * i)
    models[f"chck_{i}M"] = load(path)
    revisions += f",chck_{i}M={path}"
  loads, read = [], lambda path: loads.append(path) or load(path)
  monkeypatch.setattr(age_of_acquisition, "load", read)
  summary, _, _ = score(run, data, "aoa", revisions)
  (path,) = tmp_path.glob("out*/surprisal.json")
  how = "--mode=causal", "--pipeline=2025", revisions
  runs.score(run, data, path.parent, *how, task="aoa")  # is there already
  # The first revision is the run's own step, which is there already.
  assert loads == [models[name].path for name in ("chck_2M", "chck_3M")]
  assert summary["words"] == 2 and summary["correlation"] == 0.0
  assert summary["request"]["revisions"] == {
    name: {"step": model.step, "params_digest": model.digest}
    for name, model in models.items()
  }
  expected = []
  for step, (name, model) in enumerate(models.items(), start=1):
    for word in ("dog", "sits"):
      for i, row in enumerate(contexts[word]):
        context = row["context"].strip() + " "
        one = {"step": name, "word_count": step * 10**6, "target_word": word}
        one |= {"context_id": i, "context": row["context"]}
        one |= {"surprisal": -log_probability(model, context, word)}
        expected.append(one)
  found = json.loads(path.read_text())["results"]
  for one, wanted in zip(found, expected, strict=True):
    assert one.pop("surprisal") == pytest.approx(wanted.pop("surprisal"), 1e-4)
    assert one == wanted
