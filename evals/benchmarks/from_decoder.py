"""Compares ways to turn a small pretrained decoder into an encoder.

    python -m antlm_jax.evals.benchmarks.from_decoder --model=FOLDER \\
      --text=PREPARED --data=DATA --work=FOLDER --output=FOLDER

FOLDER of --model is SmolLM2-135M-Instruct in transformers' form. DATA holds
nfcorpus and scifact in BEIR's form, sst2 and conll2003. PREPARED is made with
the model's tokenizer. The same command resumes a run that was stopped.

Declared before the first run:

Model. The weights are read from a file with 4 bits a number (GGUF, Q4_1), as
floats. To carry them, the embedding was rounded from 8 to 4 bits, too, which
adds 0.10 nats to the causal loss on 12 texts. The token <empty_output> becomes
<mask>, with the mean of all other embeddings.

Rows. `causal` is the decoder as it is, and `bidirectional` is the same model
without the causal mask. Five rows train on the same 1.05M tokens, in 128 steps
of 32 x 256: `mntp`, `mlm`, `clm_mlm`, `clm` and `scratch`. The first three are
configs/from_decoder.py with a causal share of 0, 0 and 0.25. `scratch` is MLM
from random parameters. All but `causal` are evaluated bidirectionally. Three
seeds draw the order, the masks and the heads. `causal` and `bidirectional` have
one model, and three seeds of fine-tuning.

Measures. Texts are cut at 96 tokens, and a vector is the mean of the states:
- `loss`: held-out loss of the row's objectives, in nats.
- `zero_shot`: NDCG@10 on NFCorpus and SciFact without training.
- `simcse`: the same after 48 steps of SimCSE on NFCorpus's documents.
- `pairs`: the same after 96 steps on NFCorpus's training pairs.
- `sst2_probe`, `conll_probe`: accuracy, and F1 of entities, of a linear layer
  on the frozen model, at the rates 1e-3 and 1e-2.
- `sst2_tuned`, `conll_tuned`: the same of all weights, at 3e-5 and 1e-4.

Two outcomes count. R is the mean NDCG@10 of both sets after `pairs`. T is the
mean of `sst2_tuned` and `conll_tuned` over both rates, so no rate is chosen on
the test set. All other measures only describe.

Claims, with the effects that we expect in points:
1. `mlm` above `bidirectional`: MLM pays within 1M tokens. R +2 to +8, T +2 to
   +8.
2. `mlm` above `scratch`: CLM, then MLM, is better than MLM of equal compute, as
   in arXiv 2507.00994. R +5 to +15, T +5 to +20.
3. `mlm` above `clm`: MLM is better than CLM alone on the same tokens. R +1 to
   +6, T +1 to +6.
4. `clm_mlm` differs from `mlm`: R and T -1 to +1, which three seeds cannot
   decide.
5. `mntp` differs from `mlm`: R and T -1 to +2. Its loss is lower by 0.1 to 0.5
   nats, since the output layer keeps its task.

Noise and size. Fine-tuning seeds of BERT-sized models differ by about 0.5
points here, and test queries by more, but these are paired. With three seeds, a
difference of 0.5 points a seed is decided from 1.2 points for one claim (t of
4.3) and from 4.1 points for the strictest of ten (t of 14). So claims 1 to 3
can be decided, and 4 and 5 only if they surprise. The size is the largest that
takes 10 minutes of one GPU.

Correction: five claims times two outcomes, by Holm at 5 %. Intervals are those
of `antlm report`, paired by seed, and by query or example.

Jobs run in an order of priority. A job trains a row with a seed, and takes the
measures that the claims need. Seed 0 of all rows is first, then the other
seeds, with those of `causal` last. The jobs of the other measures follow.
"""

import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import antlm_jax as ax
from antlm_jax import cli, models
from antlm_jax.data.prepared_folder import PreparedData
from antlm_jax.evals.benchmarks import common
from antlm_jax.evals.finetuning import (
  batching,
  classification,
  embedding,
  labelled,
  loop,
  retrieval,
  sets,
  tagging,
  trial,
)
from antlm_jax.evals.finetuning.task import Task
from antlm_jax.inference.model import Loaded, load
from antlm_jax.runtime import files, progress
from antlm_jax.settings import setting

SETS = "nfcorpus", "scifact"
RESULTS = "from_decoder.jsonl"


class EncoderRow(NamedTuple):
  """A way to make an encoder."""

  objective: str = ""  # at the end of the training; "" for no training
  causal: float = 0  # share of the steps that train CLM before
  attention: str = "bidirectional"
  scratch: bool = False  # from random parameters


ROWS = {  # by priority
  "mlm": EncoderRow("M"),
  "mntp": EncoderRow("N"),
  "scratch": EncoderRow("M", scratch=True),
  "clm": EncoderRow("C"),
  "clm_mlm": EncoderRow("M", causal=0.25),
  "bidirectional": EncoderRow(),
  "causal": EncoderRow(attention="causal"),
}
# The measures that claims need, and the others.
PARTS = (
  ("loss", "zero_shot", "pairs", "sst2_tuned", "conll_tuned"),
  ("simcse", "sst2_probe", "conll_probe"),
)
MEASURES = tuple(measure for part in PARTS for measure in part)
METRICS = {"sst2": "accuracy", "conll": "entity_f1"}  # main score of a task
RATES = {"probe": (1e-3, 1e-2), "tuned": (3e-5, 1e-4)}


@dataclasses.dataclass(frozen=True)
class Amounts:
  """Numbers of steps, rows and tokens, and how models compute."""

  steps: int = 128  # of pretraining
  batch: int = 32
  microbatches: int = 2
  held_out: int = 128  # rows
  documents: int = 96  # tokens of a text in retrieval
  encoded: int = 1024  # texts that are encoded at once
  simcse: tuple[int, int, int] = 48, 64, 48  # steps, batch size, tokens
  pairs: tuple[int, int, int] = 96, 32, 64
  sentences: int = 1280  # to train on
  words: int = 48  # tokens of a sentence
  # The model's settings. A loop over the blocks compiles in less time.
  model: tuple[tuple[str, str], ...] = (
    ("dtype", "bfloat16"),
    ("scan_layers", "yes"),
    ("attention", "reference"),
  )


AMOUNTS = {
  "full": Amounts(),
  "tiny": Amounts(
    steps=4,
    batch=4,
    microbatches=1,
    held_out=4,
    documents=16,
    encoded=64,
    simcse=(2, 8, 16),
    pairs=(2, 8, 16),
    sentences=64,
    words=16,
    model=(("scan_layers", "yes"),),
  ),
}


@dataclasses.dataclass(frozen=True)
class FromDecoderArguments:
  """The command's arguments."""

  model: str = setting("", "Path to the decoder", read=cli.here)
  text: str = setting("", "Path to the prepared text", read=cli.here)
  data: str = setting("", "Path to the folder of all sets", read=cli.here)
  work: str = setting("", "Path to a folder for the models", read=cli.here)
  output: str = setting("", "Folder of the results", read=cli.here)
  size: str = setting(
    "full", "Amounts of training and evaluation", choices=tuple(AMOUNTS)
  )
  rows: tuple[str, ...] = setting(tuple(ROWS), "Rows", choices=tuple(ROWS))
  seeds: tuple[int, ...] = setting((0, 1, 2), "Random seeds", least=0)
  workers: int = setting(5, "Number of processes", least=1)
  minutes: float = setting(600.0, "Time after which to stop", over=0)


@dataclasses.dataclass(frozen=True)
class PaddedRows(batching.ExampleRows):
  """Rows of one padded length, so that few programs are compiled."""

  @property
  def groups(self) -> dict[int, np.ndarray]:
    """All rows, as long as the longest."""
    return {self.tokens.shape[-1]: np.arange(len(self))}


def _one_length(rows: batching.ExampleRows) -> PaddedRows:
  return PaddedRows(
    **{f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)}
  )


def _measure_settings(
  size: Amounts, measure: str, attention: str
) -> tuple[trial.Hyperparameters, int]:
  """Returns how a measure trains, and the tokens of a text."""
  how = {"attention": attention, "patience": 0, "warmup": 0.1}
  if measure in ("simcse", "pairs"):
    steps, batch, length = getattr(size, measure)
    how |= {"steps": steps, "batch_size": batch, "epochs": 1}
    dropout = 0.1 if measure == "simcse" else None
    return trial.Hyperparameters(encoder_dropout=dropout, **how), length
  probe = measure.endswith("probe")
  how |= {"batch_size": 32, "epochs": 2, "freeze": probe}
  how["steps"] = 10**6  # all of the epochs, and an evaluation at the end
  return trial.Hyperparameters(**how), size.words


@functools.cache
def _measured_task(data: str, measure: str) -> Task:
  """Makes the task that a measure trains on, or evaluates."""
  towers = retrieval.RetrievalOptions()
  name = measure.partition("_")[0]
  if name in SETS:
    made = retrieval.make_retrieval_task(data, name, "bidirectional", towers)
    return dataclasses.replace(made, head=retrieval.Towers(towers.temperature))
  if name == "pairs":
    return _measured_task(data, SETS[0])
  if name == "simcse":
    path = pathlib.Path(data, SETS[0], "corpus.jsonl")
    texts = [line["text"] for _, line in sets.record_fields(path, ("text",))]
    options = embedding.EmbedderOptions(), labelled.Columns()
    where = {"train": texts, "dev": texts[:2]}
    return embedding.simcse(where, "own", "bidirectional", towers, *options)
  if name == "sst2":
    files = {"train": "train_full.tsv", "dev": "dev.tsv"}
    where = {of: f"{data}/sst2/{file}" for of, file in files.items()}
    head = classification.ClassifierOptions("mean", "linear")
    columns = labelled.Columns(("sentence",))
    return labelled.classify(where, "own", "bidirectional", head, columns)
  return tagging.make_tagging_task(data, name, "bidirectional")


class Encoded:
  """Rows of all sets, which are the same for all models of a process."""

  def __init__(self, args: FromDecoderArguments, loaded: Loaded):
    self._args, self._loaded = args, loaded
    self.size = AMOUNTS[args.size]
    self.rows = functools.cache(self._rows)

  def task(self, measure: str) -> Task:
    """Returns the task of a measure."""
    return _measured_task(self._args.data, measure)

  def _rows(self, measure: str, split: str, length: int) -> PaddedRows:
    """Returns a split's rows of at most `length` tokens."""
    task = self.task(measure)
    examples = task.examples(split)
    if split == "train" and measure in ("simcse", "pairs"):
      steps, batch, _ = getattr(self.size, measure)
      drawn = np.random.default_rng(0).permutation(len(examples))
      examples = [examples[i] for i in drawn[: steps * batch]]
    elif split == "train":
      examples = examples[: self.size.sentences]
    return _one_length(task.head.encode(self._loaded, examples, length))


def _ndcg_of_sets(
  found: trial.Trial, encoded: Encoded, task_head: retrieval.Towers
) -> dict[str, Any]:
  """Returns each query's NDCG@10 on both sets, and the means."""
  out = {}
  for name in SETS:
    test = encoded.task(name).evaluations[-1]
    rows = encoded.rows(name, test, encoded.size.documents)
    ((vectors,), _) = found.predict(rows, encoded.size.encoded)
    ranked = task_head.decode(vectors, rows)
    labels = [e.label for e in rows.examples]
    each = [
      retrieval.ndcg(one["all"], label)
      for one, label in zip(ranked, labels, strict=True)
    ]
    out[name] = float(np.mean(each))
    out[f"{name}_queries"] = [round(x, 4) for x in each]
  return out


def _retrieval_scores(
  loaded: Loaded, encoded: Encoded, measure: str, attention: str, seed: int
) -> dict[str, Any]:
  """Returns NDCG@10 without training, or after SimCSE or pairs."""
  size, head = encoded.size, encoded.task(SETS[0]).head
  trains = measure != "zero_shot"
  how, length = _measure_settings(
    size, measure if trains else "pairs", attention
  )
  rate = 1e-4 if measure == "pairs" else 3e-5
  runs = [trial.TrialRun(rate, seed)]
  made = trial.Trial(loaded, head, how, runs, how.steps)
  losses = {}
  if trains:
    rows = encoded.rows(measure, "train", length)
    slots = batching.batches_by_length(rows, how.batch_size, seed, 0, True)
    batches = (batching.gather(rows, [s]) for s in slots[: how.steps])
    losses["train_loss"] = float(made.train(batches)[0])
  return losses | _ndcg_of_sets(made, encoded, head)


def _label_scores(
  loaded: Loaded, encoded: Encoded, measure: str, attention: str, seed: int
) -> dict[str, Any]:
  """Returns the scores at each rate of a probe, or of fine-tuning."""
  task, (name, kind) = encoded.task(measure), measure.split("_")
  test = task.evaluations[-1]
  how, length = _measure_settings(encoded.size, measure, attention)
  task = dataclasses.replace(task, evaluations=(test,))
  data = loop.TaskData(
    encoded.rows(name, "train", length),
    {test: encoded.rows(name, test, length)},
  )
  runs = [trial.TrialRun(rate, seed) for rate in RATES[kind]]
  out = {}
  for outcome in loop.fit(loaded, task, data, how, runs):
    last = outcome.epochs[-1]  # no epoch is chosen
    right = [
      task.right(found, example.label)
      for found, example in zip(
        outcome.predictions[test], data.evaluations[test].examples, strict=True
      )
    ]
    out[f"{outcome.run.lr:g}"] = {
      "train_loss": last["train_loss"],
      **last[test],
      "right": "".join(str(int(x)) for x in right),
    }
  return out


def _run_settings(
  args: FromDecoderArguments, row: EncoderRow, seed: int
) -> dict[str, Any]:
  size = AMOUNTS[args.size]
  objectives = {"N": ("N",), "C": ("C", "M")}.get(row.objective, ("M",))
  out = {
    "seed": seed,
    **{f"model.{name}": value for name, value in size.model},
    "train.batch_size": size.batch,
    "train.microbatches": size.microbatches,
    "schedule.warmup_steps": 0.06,  # as in configs/from_decoder.py
    "schedule.decay_steps": 0.2,
    "eval.every": 0,
    "eval.rows": size.held_out,
    "eval.objectives": objectives,
    "checkpoint.every": 0,
    "log.writers": (),
  }
  if row.scratch:
    out |= {"init.checkpoint": "", "schedule.peak_lr": 1e-3}
  return out


def _train_model(job: "ModelJob") -> ax.Trained:
  """Trains a row with a seed; a finished run is only read."""
  args, row = job.args, ROWS[job.row]
  start, steps = pathlib.Path(args.work, "start"), AMOUNTS[args.size].steps
  config = f"continued:model={start},curriculum={steps}C steps"
  if row.objective != "C":
    config = f"from_decoder:model={start},steps={steps},causal={row.causal}"
    config += f",objective={row.objective}"
  settings = _run_settings(args, row, job.seed)
  return ax.train(config, job.run, args.text, quiet=True, **settings)


def read_results(folder: str | os.PathLike[str]) -> list[dict]:
  """Reads all results that are there."""
  path = pathlib.Path(folder, RESULTS)
  if not path.exists():
    return []
  # A stopped run may have left half a line.
  return [one for _, one in files.read_jsonl(path, "the results", lenient=True)]


class ModelJob(NamedTuple):
  """Measures of a row with a seed."""

  args: FromDecoderArguments
  row: str
  seed: int
  measures: Sequence[str]
  deadline: float  # seconds since the epoch

  @property
  def run(self) -> pathlib.Path:
    """Path to the run of its model."""
    if ROWS[self.row].objective:
      return pathlib.Path(self.args.work, f"{self.row}-{self.seed}")
    return pathlib.Path(self.args.work, "start")

  def add(self, measure: str, begun: float, **found) -> None:
    """Appends a result in one write, so that processes do not mix lines."""
    seconds = round(time.monotonic() - begun, 2)
    about = {"row": self.row, "seed": self.seed, "measure": measure}
    line = json.dumps({**about, **found, "seconds": seconds}) + "\n"
    with open(pathlib.Path(self.args.output, RESULTS), "ab", 0) as file:
      file.write(line.encode())


def _jobs_left(
  args: FromDecoderArguments, deadline: float = 0
) -> list[ModelJob]:
  """Returns the jobs that are left, by priority."""
  done = {
    (one["row"], one["seed"], one["measure"])
    for one in read_results(args.output)
    if "error" not in one
  }
  # A row without training has one model, without a loss.
  for name, seed in itertools.product(args.rows, args.seeds):
    if not ROWS[name].objective:
      done |= {
        (name, seed, of) for of in ("loss", "zero_shot")[: 1 + (seed > 0)]
      }
  order = [(name, seed) for seed in args.seeds for name in args.rows]
  order.sort(key=lambda key: key[0] == "causal" and key[1] > 0)
  out = []
  for part, key in itertools.product(PARTS, order):
    if wanted := [measure for measure in part if (*key, measure) not in done]:
      out.append(ModelJob(args, *key, wanted, deadline))
  return out


_encoded: dict[FromDecoderArguments, Encoded] = {}  # of this process


def _take_measure(
  job: ModelJob, measure: str, loaded: Loaded
) -> dict[str, Any]:
  alike = dataclasses.replace(loaded, params={})  # keeps no model in memory
  encoded = _encoded.setdefault(job.args, Encoded(job.args, alike))
  take = (
    _label_scores if measure.partition("_")[2] in RATES else _retrieval_scores
  )
  return take(loaded, encoded, measure, ROWS[job.row].attention, job.seed)


def _job_model(job: ModelJob) -> Loaded:
  """Trains the model of a job, unless it is there, and loads it."""
  if not ROWS[job.row].objective:
    config = dict(AMOUNTS[job.args.size].model)
    loaded = load(job.run)
    config = dataclasses.replace(loaded.model.config, **config)
    return dataclasses.replace(loaded, model=models.from_config(config))
  begun = time.monotonic()
  if "loss" in job.measures or not (job.run / "checkpoints").is_dir():
    trained = _train_model(job)
    held_out = [
      {name: x for name, x in at.items() if name.endswith(("step", "loss"))}
      for at in trained.held_out
    ]
    if "loss" in job.measures:
      job.add("loss", begun, held_out=held_out, parts={**trained.seconds})
  return load(job.run)


def _perform_job(job: ModelJob) -> str:
  """Trains a row with a seed, and takes the measures that it lacks."""
  failed, loaded = [], None
  lock = pathlib.Path(job.args.work, f"{job.row}-{job.seed}.lock")
  with files.file_lock(lock, wait=True):  # two jobs may have the same model
    for measure in job.measures:
      begun = time.monotonic()
      if time.time() > job.deadline:
        break
      try:
        loaded = loaded or _job_model(job)
        if measure != "loss":
          with progress.quietly(True):
            found = _take_measure(job, measure, loaded)
          job.add(measure, begun, **found)
      except Exception as error:  # others may succeed
        failed.append(f"{measure}: {error!r:.300}")
        job.add(measure, begun, error=f"{error!r:.1000}")
    rest = [(one.row, one.seed) for one in _jobs_left(job.args)]
    if ROWS[job.row].objective and (job.row, job.seed) not in rest:
      shutil.rmtree(job.run, ignore_errors=True)  # 1.6 GB
  return "; ".join([f"{job.row} {job.seed} {len(job.measures)}", *failed])


def _import_start(args: FromDecoderArguments) -> None:
  """Makes a run of the decoder, once."""
  start = pathlib.Path(args.work, "start")
  if not (start / "checkpoints").is_dir():
    shutil.rmtree(start, ignore_errors=True)
    # As in training, so that all models read the same rows.
    boundary = PreparedData.open(args.text).manifest.settings["boundary"]
    ax.import_model(args.model, start, boundary=boundary, quiet=True)


def _prepare_process() -> None:
  """Keeps a worker's lines off the summary."""
  sys.stdout = sys.stderr


def summary_lines(found: Sequence[Mapping[str, Any]]) -> str:
  """Returns a line for each row and seed, with its main scores."""
  lines = []
  for seed in sorted({one["seed"] for one in found}):
    for name in ROWS:
      cells = [f"{name:14} {seed}"]
      for one in found:
        if (one["row"], one["seed"]) != (name, seed):
          continue
        measure = one["measure"]
        if "error" in one:
          cells.append(f"{measure} failed")
        elif measure == "loss":
          last = one["held_out"][-1]
          losses = (f"{x:.3f}" for name, x in last.items() if name != "step")
          cells.append(f"loss {'/'.join(losses)}")
        elif SETS[0] in one:
          both = "/".join(f"{100 * one[of]:.1f}" for of in SETS)
          cells.append(f"{measure} {both}")
        else:
          scores = _scores_by_rate(one)
          cells.append(f"{measure} {'/'.join(f'{x:.1f}' for x in scores)}")
      if len(cells) > 1:
        lines.append("  ".join(cells))
  return "\n".join(lines)


def _scores_by_rate(one: Mapping[str, Any]) -> list[float]:
  """Returns a task's main score at each rate, in percent."""
  name, kind = one["measure"].split("_")
  metric = METRICS[name]
  rates = (one[f"{rate:g}"] for rate in RATES[kind])
  return [100 * scores[metric] for scores in rates]


def main(argv: Sequence[str]) -> None:
  """Runs the experiment, or the rest of it."""
  args = common.benchmark_arguments(__doc__, FromDecoderArguments, argv)
  deadline = time.time() + 60 * args.minutes
  for folder in (args.work, args.output):
    os.makedirs(folder, exist_ok=True)
  # A stopped run may have left half a line, which the next would join.
  kept = "".join(json.dumps(one) + "\n" for one in read_results(args.output))
  files.write_text(pathlib.Path(args.output, RESULTS), kept)
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(args.work, "programs"))
  )
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
  context = multiprocessing.get_context("spawn")
  jobs = _jobs_left(args, deadline)
  with context.Pool(args.workers, _prepare_process) as pool:
    pool.apply(_import_start, (args,))
    found = pool.imap_unordered(_perform_job, jobs)
    for _ in jobs:
      try:
        print(found.next(max(1.0, deadline - time.time())), flush=True)
      except multiprocessing.TimeoutError:
        print("stopped: the same command resumes", flush=True)
        break
    pool.terminate()
  left = sum(len(job.measures) for job in _jobs_left(args))
  print(f"{summary_lines(read_results(args.output))}\n{left} measures are left")


if __name__ == "__main__":
  cli.run_command(main)
