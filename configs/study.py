"""CLM, MLM or both: the study of arXiv 2507.00994, at a size of one's own.

    ./launch/study.sh --text=TEXT_FOLDER --data=EVALUATION_FOLDER

trains, evaluates and reports all of it (`evals.study`); one row is

    python -m antlm_jax.train --workdir=DIR --config.data.path=PREPARED \\
      --config=configs/study.py:row=tiny_clm10_mlm40_42,scale=tiny

A row's name is its encoder and what it is trained with, in thousands of steps
of the paper: `610m_clm10_mlm40_42` is CLM for 10,000 steps, then MLM with 40 %
masked up to 42,000. There are four kinds:

- one objective for 42,000 steps: CLM, and MLM with 20, 30, 40, 50 % masked;
- CLM, then MLM, with 12,000, 22,000 and 42,000 steps in all, and with an MLM
  of the decay alone for each ratio;
- continued pretraining: MLM for 2,000, 12,000 and 22,000 steps more, after the
  end of CLM or MLM.

The scales:

- `paper`: the 38 models on 210M, 610M and 1B (configs/encoders.py), 100B
  tokens each;
- `tiny`: a part of them on 0.9M parameters and 10 steps for each thousand, on a
  CPU. All of its settings are ours.

The paper does not say at which rate, with which warm-up and optimizer state
pretraining is continued: here at the peak rate from the first step on, with the
state of its beginning, as in its code a run that goes on has it.
"""

import pathlib
from collections.abc import Iterator

from antlm_jax import config as config_lib
from antlm_jax.errors import UserError
from evals.rows import Evaluation, Row, Scale, Text

REPORT = "encoders"
_HERE = pathlib.Path(__file__).parent
STEPS = {"tiny": 10, "paper": 1000}  # for a thousand steps of the paper
WARMUP, DECAY = 2, 2  # thousands of steps
RATIOS = (20, 30, 40, 50)
LOOKS = (1, 2, 5, 10, 20, 40)  # what is measured on the way, undecayed


def _row(scale: str, size: str, title: str, *phases, **more) -> Row:
  """Makes a row of phases, each an objective and its thousands of steps."""
  parts = (f"{STEPS[scale] * count}{name}" for name, count in phases if count)
  looks = tuple(STEPS[scale] * at for at in more.pop("looks", ()))
  return Row(
    family=size,
    title=title,
    curriculum={scale: "+".join(parts) + " steps"},
    seeds={scale: 1},
    looks={scale: looks},
    **more,
  )


def _masked(ratio: int) -> dict[str, float]:
  return {"objectives.M.mask_ratio": ratio / 100}


def _base(scale: str, size: str, ratios, looks=()) -> Iterator[Row]:
  looked = {"looks": looks}
  yield "clm_42", _row(scale, size, "CLM", ("C", 42), **looked)
  for ratio in ratios:
    yield (
      f"mlm{ratio}_42",
      _row(
        *(scale, size, f"MLM {ratio} %", ("M", 42)),
        settings=_masked(ratio),
        **(looked if ratio == 40 else {}),
      ),
    )


def _split(scale: str, size: str, clm: int, total: int, ratio=40):
  """A row of CLM, then MLM; one of them alone where it has all the steps."""
  mlm = total - clm
  title = f"CLM {clm}k, MLM {mlm}k" if clm and mlm else "CLM" if clm else "MLM"
  name = f"clm{clm}_" * bool(clm and mlm) + (
    "clm" if not mlm else f"mlm{ratio}"
  )
  if ratio != 40:
    title += f" at {ratio} %"
  yield (
    f"{name}_{total}",
    _row(
      *(scale, size, f"{title}, of {total}k", ("C", clm), ("M", mlm)),
      settings=_masked(ratio),
    ),
  )


def _continued(scale: str, size: str, base: str, title: str, more: int):
  yield (
    f"{base}_more_{more}",
    _row(
      *(scale, size, f"{title}, then MLM {more}k", ("M", more)),
      settings=_masked(40) | {"init.step": "reset", "schedule.warmup_steps": 0},
      after=f"{size.lower()}_{base}",
    ),
  )


def _rows(scale: str) -> Iterator[tuple[str, Row]]:
  """Yields all rows of a scale, those that others need first."""
  paper = scale == "paper"
  for size in ("210M", "610M", "1B") if paper else (scale,):
    middle = size in ("610M", scale)
    looks = LOOKS if middle else ()
    for name, row in _base(
      scale, size, RATIOS if paper else (20, 40, 50), looks
    ):
      yield f"{size.lower()}_{name}", row
  size = "610M" if paper else scale
  splits = {12: (0, 3, 6, 9, 12), 22: (0, 5, 11, 17, 22), 42: (10, 21, 32)}
  if not paper:
    splits = {12: (0, 3, 6, 12), 42: (10, 21)}
  rows = [
    _split(scale, size, c, t) for t, those in splits.items() for c in those
  ]
  if paper:
    rows += [_split(scale, size, 40, 42, ratio) for ratio in RATIOS]
  else:
    rows += [_split(scale, size, 40, 42)]
  for base, title in (("clm_42", "CLM"), ("mlm40_42", "MLM")):
    for more in (2, 12, 22) if paper else (12,):
      rows.append(_continued(scale, size, base, title, more))
  for found in rows:
    for name, row in found:
      yield f"{size.lower()}_{name}", row


ROWS = {name: row for scale in STEPS for name, row in _rows(scale)}


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(
    arg, shrink=False, row="tiny_clm10_mlm40_42", scale=tuple(STEPS), seed=0
  )
  if arg.row not in ROWS:
    raise UserError(f"row={arg.row!r} is not one of {', '.join(ROWS)}")
  row = ROWS[arg.row]
  if arg.scale not in row.curriculum:
    raise UserError(f"scale={arg.scale} has no row {arg.row}")
  config = {"tiny": _tiny, "paper": _paper}[arg.scale](row.family)
  config.seed = arg.seed
  config.curriculum = row.curriculum[arg.scale]
  unit = STEPS[arg.scale]
  config.schedule.update(warmup_steps=WARMUP * unit, decay_steps=DECAY * unit)
  config.objectives.M.update(mask_token=1.0, random_token=0.0)
  config.update_from_flattened_dict(row.settings)
  if arg.shrink:
    config_lib.shrink(config)
  return config


def _paper(size: str):
  config = config_lib.load(f"{_HERE / 'encoders.py'}:size={size}")
  config.unlock()
  return config


def _tiny(size: str):
  del size
  config = config_lib.default("llama")
  config.model.update(
    layers=3, width=128, heads=4, kv_heads=4, mlp_width=352, max_seq_len=256
  )
  config.model.init_std = 0.08
  config.train.batch_size = 16
  config.optimizer.update(b1=0.9, b2=0.95, eps=1e-5, decay_scope="all")
  config.schedule.peak_lr = 3e-3
  config.eval.update(every=0.25, rows=64)
  config.checkpoint.every = 0
  config.log.update(every=50, tensorboard=False)
  return config


# The four kinds of task: sentences, words, answers, retrieval.
_ALL = "sst2,qqp,mnli,ontonotes,conll,uner,squad,squad2,record,msmarco,nq,mldr"
_LITTLE = (
  "--preset=study",
  "--data={data}",
  "--attention=bidirectional",
  "--max_length=128",
  "--limit=3000",
  "--batch_size=16",
  "--steps=100",
  "--epochs=1",
)
_STREAM = ("--packing=chunks", "--boundary=eos")
SCALES = {
  "tiny": Scale(
    prepare={
      "tiny": (
        *("--share=0.05", "--vocab_size=4096", "--seq_len=128"),
        *_STREAM,
      )
    },
    text=Text(4096, 128, 2),
    evaluations=(
      Evaluation(
        "fine-tuning",
        "evals.finetune",
        (
          *_LITTLE,
          *("--task=sst2,conll,squad,nfcorpus", "--lrs=5e-4,2e-3"),
          "--seeds=0,1",
        ),
      ),
    ),
    needs=(),
  ),
  "paper": Scale(
    prepare={
      size: ("--tokenizer=tokenizer.json", "--seq_len=2048", *_STREAM)
      for size in ("210M", "610M", "1B")
    },
    text=Text(128_256, 2048, 2),
    evaluations=(
      Evaluation(
        "fine-tuning",
        "evals.finetune",
        ("--preset=study", "--data={data}", f"--task={_ALL}"),
      ),
      Evaluation(
        "fine-tuning",
        "evals.finetune",
        ("--preset=study", "--data={data}", f"--task={_ALL}"),
        looks=True,
      ),
    ),
    needs=(),
  ),
}
