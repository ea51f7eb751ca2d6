"""CLM, MLM or both: the study of arXiv 2507.00994, at full size or tiny.

To train, evaluate and report all rows, run

    ./launch/study.sh --text=TEXT_FOLDER --data=EVALUATION_FOLDER

To train one row, run

    antlm train --workdir=DIR --config.data.path=PREPARED \\
      --config=clm_or_mlm:row=tiny_clm10_mlm40_42,scale=tiny

A row's name has its encoder and its objectives, in thousands of steps of the
paper: `610m_clm10_mlm40_42` trains CLM for 10,000 steps, then MLM with 40 %
masked up to step 42,000. There are three kinds of rows:

- one objective for 42,000 steps: CLM, or MLM with 20, 30, 40 or 50 % masked;
- CLM, then MLM, with 12,000, 22,000 and 42,000 steps in all, and with MLM only
  in the decay, for each ratio;
- continued pretraining: MLM for 2,000, 12,000 and 22,000 more steps, after the
  end of CLM or MLM.

The scales:

- `paper`: the 38 models on 210M, 610M and 1B (configs/encoders.py), 100B
  tokens each;
- `tiny`: nine of them at 1.1M parameters, with 20 steps for each thousand, on a
  CPU. Its settings are our own.

Each row is pretrained once, as in the paper, so verdicts hold for these models
alone. `--seeds=8` pretrains, fine-tunes and reports each with eight seeds, so
that verdicts hold for the recipe. Three seeds decide little: see
docs/how_to/studies.md.

The paper does not say at which rate, with which warm-up and optimizer state
pretraining continues. Here it continues at the peak rate from the first step,
with the optimizer state of the run before, as its code resumes a run. A step of
`paper` has 2,359,296 tokens (Table 1), where the paper's text says 2,373,120.
`tiny` fine-tunes for 60 steps, at higher rates than those of figure 5. So its
report leaves out the claim about learning rates.
"""

from collections.abc import Iterator

from antlm_jax import config as config_lib
from antlm_jax.evals.studies.study import (
  Evaluation,
  ExpectedText,
  Row,
  Scale,
  row_of,
)

REPORT = "encoders"
STEPS = {"tiny": 20, "paper": 1000}  # for a thousand steps of the paper
WARMUP, DECAY = 2, 2  # thousands of steps


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


def _base(scale: str, size: str, looks) -> Iterator[tuple[str, Row]]:
  """Yields the rows of one objective; CLM and 40 % have looks."""
  kinds = [("clm", "CLM", "C", 40)]
  kinds += [(f"mlm{r}", f"MLM {r} %", "M", r) for r in RATIOS[scale]]
  for name, title, objective, ratio in kinds:
    row = _row(
      *(scale, size, title, (objective, 42)),
      settings=_masked(ratio),
      looks=looks if ratio == 40 else (),
    )
    yield f"{size.lower()}_{name}_42", row


def _split(scale: str, size: str, clm: int, total: int, ratio: int = 40):
  """Returns a row of CLM, then MLM; an objective without steps is left out."""
  mlm = total - clm
  steps = {"CLM": clm, "MLM": mlm}
  title = ", ".join(f"{name} {n}k" for name, n in steps.items() if n)
  parts = [f"clm{clm}" if mlm else "clm"] * bool(clm)
  parts += [f"mlm{ratio}"] * bool(mlm)
  title += f" at {ratio} %" if ratio != 40 else ""
  row = _row(
    *(scale, size, title, ("C", clm), ("M", mlm)), settings=_masked(ratio)
  )
  return f"{size.lower()}_{'_'.join(parts)}_{total}", row


def _continued(scale: str, size: str, base: str, title: str, more: int):
  """Returns a row that continues with MLM after the end of another."""
  name = f"{size.lower()}_{base}"
  begin = {"init.step": "reset", "schedule.warmup_steps": 0}
  row = _row(
    *(scale, size, f"{title} 42k, then MLM {more}k more", ("M", more)),
    settings=_masked(40) | begin,
    after=name,
  )
  return f"{name}_more_{more}", row


# Of the CLM, then MLM: the thousands of CLM, by those in all.
SPLITS = {
  "tiny": {12: (0, 3), 42: (10,)},
  "paper": {12: (0, 3, 6, 9, 12), 22: (0, 5, 11, 17, 22), 42: (10, 21, 32)},
}
RATIOS = {"tiny": (20, 40), "paper": (20, 30, 40, 50)}
DECAYED = {"tiny": (40,), "paper": RATIOS["paper"]}  # MLM in the decay alone
MORE = {"tiny": (12,), "paper": (2, 12, 22)}
# Steps of looks, in thousands, before the decay.
LOOKS = {"tiny": (2, 10), "paper": (1, 2, 5, 10, 20, 40)}
SIZES = {"tiny": ("tiny",), "paper": ("210M", "610M", "1B")}
MIDDLE = {"tiny": "tiny", "paper": "610M"}  # the encoder with all kinds


def _rows(scale: str) -> Iterator[tuple[str, Row]]:
  """Yields all rows of a scale, those that others need first."""
  for size in SIZES[scale]:
    looks = LOOKS[scale] if size == MIDDLE[scale] else ()
    yield from _base(scale, size, looks)
  size = MIDDLE[scale]
  for total, those in SPLITS[scale].items():
    for clm in those:
      yield _split(scale, size, clm, total)
  for ratio in DECAYED[scale]:
    yield _split(scale, size, 40, 42, ratio)
  for base, title in (("clm_42", "CLM"), ("mlm40_42", "MLM")):
    for more in MORE[scale]:
      yield _continued(scale, size, base, title, more)


ROWS = {name: row for scale in STEPS for name, row in _rows(scale)}


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(
    arg, row="tiny_clm10_mlm40_42", scale=tuple(STEPS), seed=0
  )
  row = row_of(arg, ROWS)
  config = {"tiny": _tiny, "paper": _paper}[arg.scale](row.family)
  config.seed = arg.seed
  config.curriculum = row.curriculum[arg.scale]
  unit = STEPS[arg.scale]
  config.schedule.update(warmup_steps=WARMUP * unit, decay_steps=DECAY * unit)
  config.objectives.M.update(mask_token=1.0, random_token=0.0)
  config.update(row.changes)
  return config


def _paper(size: str):
  return config_lib.config_module("encoders").get_config(f"size={size}")


def _tiny(size: str):
  del size
  config = config_lib.changes("llama")
  config.model.update(
    layers=3, width=128, heads=4, kv_heads=4, mlp_width=352, max_seq_len=256
  )
  config.model.init_std = 0.08
  config.train.batch_size = 16
  config.optimizer.update(b1=0.9, b2=0.95, eps=1e-5, decay_scope="all")
  config.schedule.peak_lr = 3e-3
  config.eval.update(every=0.25, rows=64)
  config.checkpoint.every = 0
  config.log.update(every=50, writers=())
  return config


# ------------------------------------------------------------------ evaluations

_PROTOCOL = ("--preset=study", "--data={data}", "--attention={attention}")
# The protocol with less of everything, for a CPU.
_FEW = ("--limit=3000", "--batch_size=16", "--steps=60", "--epochs=1")
_LESS = (*_PROTOCOL, *_FEW, "--seeds=0,1,2")
_SHORT = ("--task=sst2,conll", "--max_length=64")
_TEXT = ("--packing=chunks", "--boundary=eos")
_SQUAD = ("train-v1.1.json", "dev-v1.1.json")


def _tuning(*options: str, looks: bool = False) -> Evaluation:
  return Evaluation("fine-tuning", "eval finetune", options, looks=looks)


SCALES = {
  "tiny": Scale(
    prepare={
      "tiny": ("--share=0.05", "--vocab_size=4096", "--seq_len=128", *_TEXT)
    },
    text=ExpectedText(4096, 128, 2),
    evaluations=(
      _tuning(*_LESS, *_SHORT, "--lrs=5e-4,1e-3"),
      _tuning(*_LESS, "--task=squad", "--max_length=192", "--lrs=1e-3"),
      _tuning(*_LESS, "--task=nfcorpus", "--max_length=64", "--lrs=1e-3"),
      _tuning(*_LESS, *_SHORT, "--lrs=1e-3", looks=True),
    ),
    needs=("sst2", "conll2003", *_SQUAD, "retrieval/nfcorpus"),
  ),
  "paper": Scale(
    prepare={
      size: ("--tokenizer=tokenizer.json", "--seq_len=2048", *_TEXT)
      for size in SIZES["paper"]
    },
    text=ExpectedText(128_256, 2048, 2),
    evaluations=(
      _tuning(*_PROTOCOL, "--task=all"),
      _tuning(*_PROTOCOL, "--task=all", looks=True),
    ),
    needs=(),
  ),
}
