"""NDCG@10 of vectors that are cut, with and without Matryoshka training.

    python -m antlm_jax.evals.benchmarks.matryoshka --data=DATA --work=FOLDER

DATA holds nfcorpus in BEIR's form. One small model is trained with MLM on the
texts of its corpus, unless --checkpoint gives a model. Each seed then trains
two embedders from it, on the same batches. `plain` has a loss on the whole
vector, of 256 numbers in the small model. `matryoshka` has one on the first 64
and 128, too. Both are scored at all three sizes.

Declared before the first run:
- Measure: NDCG@10 of the test queries over all documents, `matryoshka` minus
  `plain`, paired by seed and query. The 95 % interval covers other fine-tunings
  of this model and other queries.
- Claim: `matryoshka` is better at 64 numbers. Expected: by 0.3 to 3 points.
- Smaller gains are expected at 128 numbers, and a loss of at most one point at
  256. These two only describe.
"""

import dataclasses
import pathlib
import time
from collections.abc import Iterator, Sequence

from antlm_jax import cli
from antlm_jax.commands.prepare import prepare
from antlm_jax.commands.train import train
from antlm_jax.evals.benchmarks import common
from antlm_jax.evals.finetuning import loop, retrieval, sets, trial
from antlm_jax.inference.model import Loaded, load
from antlm_jax.runtime import files
from antlm_jax.settings import setting

TASK = "nfcorpus"
SIZES = 64, 128  # prefixes of the vector
WIDTH = 256
SEEDS = 0, 1, 2
RATE = 1e-3
STEPS = 150
TUNING = trial.Hyperparameters(
  batch_size=32, steps=STEPS, epochs=1, max_length=48, warmup=0.1
)


class PlainTowers(retrieval.Towers):
  """Has a loss on the whole vector alone, but ranks by prefixes, too."""

  def loss(self, outputs, labels, weights):
    """Returns the loss of the whole vector."""
    whole = retrieval.Towers(self.temperature, self.prompts)
    return whole.loss(outputs, labels, weights)


HEADS = {"plain": PlainTowers, "matryoshka": retrieval.Towers}


@dataclasses.dataclass(frozen=True)
class MatryoshkaArguments:
  """The command's arguments."""

  data: str = setting("", "Path to the folder of nfcorpus", read=cli.here)
  work: str = setting("", "Path to the folder of the model", read=cli.here)
  checkpoint: str = setting(
    "",
    "Path to a model to train from, instead of the small model",
    read=cli.here,
  )
  output: str = common.output()


def _pretrained(corpus: pathlib.Path, work: pathlib.Path) -> Loaded:
  """Trains MLM on a corpus."""
  texts = (
    f"{line.get('title', '')} {line['text']}"
    for _, line in sets.record_fields(corpus, ("text",))
  )
  lines = "\n".join(" ".join(text.split()) for text in texts)
  files.write_text(work / "corpus.txt", lines)
  text = str(work / "corpus.txt")
  data = prepare(text, work / "prepared", vocab_size=8192, documents="line")
  how = {"layers": 1, "width": WIDTH, "mlp_width": 256, "eval.every": 0}
  config = f"babylm_small:curriculum={STEPS}M steps"
  run = train(config, work / "run", data, **how)
  return load(run)


def _rows(args: MatryoshkaArguments) -> Iterator[dict]:
  folder = pathlib.Path(args.data)
  if args.checkpoint:
    loaded = load(args.checkpoint)
  else:
    corpus = folder / TASK / "corpus.jsonl"
    loaded = _pretrained(corpus, pathlib.Path(args.work))
  width = loaded.model.config.width
  options = retrieval.RetrievalOptions(matryoshka=SIZES)
  task = retrieval.make_retrieval_task(folder, TASK, "bidirectional", options)
  test = f"{TASK}-test"
  # All steps are trained, so no set chooses an epoch.
  task = dataclasses.replace(task, evaluations=(test,))
  pairs = STEPS * TUNING.batch_size
  data = loop.read_task_data(loaded, task, TUNING.max_length, limit=pairs)
  labels = [e.label for e in data.evaluations[test].examples]
  names = {str(size): str(size) for size in SIZES} | {str(width): "all"}
  for seed in SEEDS:
    for row, kind in HEADS.items():
      begun = time.process_time()
      head = kind(**dataclasses.asdict(task.head))
      own = dataclasses.replace(task, head=head)
      runs = [trial.TrialRun(RATE, seed)]
      (outcome,) = loop.fit(loaded, own, data, TUNING, runs)
      queries = {
        size: [
          round(retrieval.ndcg(found[name], label), 4)
          for found, label in zip(
            outcome.predictions[test], labels, strict=True
          )
        ]
        for size, name in names.items()
      }
      yield {
        "row": row,
        "seed": seed,
        "cpu_seconds": round(time.process_time() - begun),
        **{size: sum(of) / len(of) for size, of in queries.items()},
        "queries": queries,
      }


def main(argv: Sequence[str]) -> None:
  """Runs the benchmark."""
  args = common.benchmark_arguments(__doc__, MatryoshkaArguments, argv)
  columns = {"row": 12, "seed": 4, "64": 8, "128": 8, "cpu_seconds": 11}
  about = {"rate": RATE, "tuning": dataclasses.asdict(TUNING)}
  common.report_rows(_rows(args), args.output, "matryoshka", columns, **about)


if __name__ == "__main__":
  cli.run_command(main)
