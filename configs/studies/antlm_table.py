"""AntLM's table (arXiv 2412.03275), and further rows that explain it.

To train, evaluate and report all rows, run

    ./launch/antlm_table.sh --text=BABYLM_FOLDER --data=EVALUATION_FOLDER

To train one row, run

    antlm train --workdir=DIR --config.data.path=PREPARED \\
      --config=antlm_table:row=babyllama_antlm,scale=tiny,seed=1

The argument takes `row` (a key of `ROWS`), `scale` and `seed`. All rows of an
encoder read the same rows of text in the same order, in the same number of
steps of the same shape. Only the hidden and the predicted tokens differ.

- `paper`: configs/antlm_babyllama.py and configs/antlm_ltg_bert.py, with
  24 and 72 epochs. Their docstrings name the source of each setting.
- `8m` and `24m`: CLM, MLM and AntLM on BabyLlama at 8.4M and 24M parameters,
  for one GPU. They have all 24 epochs, on 820,000 and 2.35M words.
- `97m`: the same rows as in `paper`, once, with fewer evaluations.
- `small`: all epochs of the paper, so that the text is repeated as often.
  BabyLlama's rows read 190,000 words with 1.1M parameters, 6 a word (the
  paper's: 10). LTG-BERT's main rows read 67,000 words with 291,000 parameters.
- `tiny`: 1.2M or 1.3M parameters and a quarter or a twelfth of the epochs, on
  a small part of the text, for a CPU.

Only `paper` has published settings. The others are our own.

docs/designs/antlm_table.md has the measures and expectations that were written
before the runs, and docs/results.md the outcome.
"""

from antlm_jax import config as config_lib
from antlm_jax.evals.studies.study import (
  Evaluation,
  ExpectedText,
  Row,
  Scale,
  row_of,
)

SIZES = ("tiny", "small", "8m", "24m", "97m", "paper")
REPORT = "controls"
_WIDTHS = {"8m": (8, 256), "24m": (12, 384)}  # layers and width


def _llama(title, tiny, paper, main=False, **how) -> Row:
  """Makes a row of BabyLlama; `main` rows are those of the paper."""
  curricula, seeds = {"tiny": tiny, "paper": paper}, {"tiny": 1, "paper": 1}
  if "settings" not in how:
    curricula["small"], seeds["small"] = paper, 5
  if main:
    curricula |= dict.fromkeys((*_WIDTHS, "97m"), paper)
    seeds |= {"tiny": 3, "small": 8, "8m": 13, "24m": 4, "97m": 1}
  against = _against(paper, "babyllama_c", "babyllama_m")
  return Row("BabyLlama", title, curricula, seeds, against=against, **how)


def _ltg(title, tiny, paper, main=False, **how) -> Row:
  """Makes a row of LTG-BERT; `main` rows are those of the paper."""
  curricula, seeds = {"tiny": tiny, "paper": paper}, {"tiny": 1, "paper": 1}
  if main:
    curricula["small"], seeds["small"] = paper, 12
  against = _against(paper, "ltg_bert_c", "ltg_bert_m")
  return Row("LTG-BERT", title, curricula, seeds, against=against, **how)


def _against(text: str, *controls: str) -> tuple[str, ...]:
  """Returns the rows that a row of several objectives is compared with."""
  return controls if len(set(text) & set("CMN")) > 1 else ()


ROWS = {
  "babyllama_c": _llama("CLM", "6C", "24C", True, attention="causal"),
  "babyllama_m": _llama("MLM", "6M", "24M", True),
  "babyllama_antlm": _llama("AntLM", "1C+4M+1C", "4C+16M+4C", True),
  "babyllama_mixed_1_1": _llama("mixed 1:1", "6C:M=1:1", "24C:M=1:1"),
  "babyllama_mixed_1_7": _llama("mixed 1:7", "6C:M=1:7", "24C:M=1:7"),
  # AntLM does not say how the optimizer continues at a switch.
  "babyllama_antlm_restart": _llama(
    "AntLM, rate restarts at a switch",
    "1C+4M+1C",
    "4C+16M+4C",
    settings={"schedule.restart_at_switch": True},
  ),
  "babyllama_antlm_reset": _llama(
    "AntLM, optimizer forgets at a switch",
    "1C+4M+1C",
    "4C+16M+4C",
    settings={"optimizer.reset_at_switch": True},
  ),
  "ltg_bert_m": _ltg("MLM", "6M", "72M", True),
  "ltg_bert_c": _ltg("CLM", "6C", "72C", True, attention="causal"),
  "ltg_bert_antlm": _ltg("AntLM", "0.5C+5M+0.5C", "6C+60M+6C", True),
  "ltg_bert_mixed_1_1": _ltg("mixed 1:1", "6C:M=1:1", "72C:M=1:1"),
  "ltg_bert_mntp_1_15": _ltg(
    "mixed MNTP 1:15, as GPT-BERT", "6C:N=1:15", "72C:N=1:15", masked="mntp"
  ),
}
PAPER = {"BabyLlama": "antlm_babyllama", "LTG-BERT": "antlm_ltg_bert"}


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(arg, row="babyllama_antlm", scale=SIZES, seed=0)
  row = row_of(arg, ROWS)
  if arg.scale in _WIDTHS:
    config = _middle(*_WIDTHS[arg.scale])
  else:
    make = {"tiny": _tiny, "small": _small, "97m": _few, "paper": _paper}
    config = make[arg.scale](row.family)
  config.seed = arg.seed
  config.curriculum = row.curriculum[arg.scale]
  # MNTP has the spans and shares of MLM, and predicts them elsewhere.
  spans = ("unit", "choice", "span_length", "span_lengths", "mask_ratio")
  masked = config.objectives.M.items()
  config.objectives.N.update({k: v for k, v in masked if k in spans})
  if row.masked == "mntp":
    config.eval.objectives = ("C", "N")
  config.update(row.changes)
  return config


def _paper(family: str):
  return config_lib.config_module(PAPER[family]).get_config()


def _few(family: str):
  """As `paper`, with fewer evaluations and checkpoints."""
  config = _paper(family)
  config.eval.update(every=1 / 8, rows=256)
  config.checkpoint.every = 0.5
  config.log.writers = ()
  return config


def _tiny(family: str):
  encoder = {"BabyLlama": "llama", "LTG-BERT": "ltg_bert"}[family]
  config = config_lib.changes(encoder)
  config.model.update(
    layers=4, width=128, heads=4, mlp_width=352, max_seq_len=256
  )
  config.train.update(batch_size=16)
  config.eval.update(every=1 / 24, rows=64)
  config.checkpoint.every = 0.25
  config.log.every = 50
  if encoder == "llama":
    config.model.update(kv_heads=4, init_std=0.08)
    config.schedule.update(name="cosine", peak_lr=3e-3, warmup_steps=0.05)
    return config
  # As published, but for dropout: so small a model does not overfit.
  config.objectives.M.update(
    unit="span", span_length=9, span_lengths="geometric"
  )
  config.model.update(dropout=0.0, attention_dropout=0.0)
  # A step as long as the other encoder's, for rows of 128 tokens.
  config.model.update(layers=3, position_buckets=16, longest_distance=128)
  config.optimizer.update(
    name="lamb", b1=0.9, b2=0.98, eps=1e-6, decay_scope="hidden", clip=2.0
  )
  config.schedule.update(
    name="cosine", peak_lr=1e-2, warmup_steps=0.05, min_lr_ratio=0.1
  )
  return config


def _small(family: str):
  """As `tiny`, with three layers, and measured at each 24th of the run."""
  config = _tiny(family)
  config.model.update(layers=3)
  config.eval.update(every=1 / 24, rows=128)
  config.log.every = 100
  if family == "LTG-BERT":  # unlike `tiny`, it reads its text 72 times
    config.model.update(dropout=0.1, attention_dropout=0.1)
    config.model.update(width=64, heads=2, mlp_width=176)
    config.eval.objectives = ("C", "M")
  return config


def _middle(layers: int, width: int):
  """Returns BabyLlama between `small` and `paper`, measured once an epoch."""
  config = _small("BabyLlama")
  config.model.update(
    layers=layers, width=width, heads=width // 64, kv_heads=width // 64
  )
  config.model.update(mlp_width=8 * width // 3, dtype="bfloat16", init_std=0.04)
  config.train.batch_size = 64
  config.schedule.peak_lr = 2e-3
  config.eval.rows = 256
  config.log.writers = ()
  return config


# ------------------------------------------------------------------ evaluations

_SETS = "blimp_filtered", "blimp_supplement_filtered", "ewok"


def _pairs(name: str, *options: str) -> Evaluation:
  """Scores minimal pairs in both modes."""
  words = f"--data={{data}}/{name}", "--mode={mode}", *options
  return Evaluation(name, f"eval {name.partition('_')[0]}", words)


def _evaluations(pairs, tuned) -> tuple[Evaluation, ...]:
  """Minimal pairs in both modes, and fine-tuning of the first seed."""
  options = "--preset=2024", "--data={data}", "--attention={attention}", *tuned
  tuning = Evaluation("fine-tuning", "eval finetune", options, seeds=1)
  return *(_pairs(name, *pairs) for name in _SETS), tuning


def _scale(prepare, evaluations=(), needs=(), **more) -> Scale:
  """Makes a scale; options of `prepare` are by family, or for all."""
  if not isinstance(prepare, dict):
    prepare = {"BabyLlama": prepare, "LTG-BERT": prepare}
  length = ("--seq_len=128",)
  return Scale(
    prepare={family: length + words for family, words in prepare.items()},
    evaluations=evaluations,
    needs=needs,
    **more,
  )


def _whole(prepare, pairs, tuned, **more) -> Scale:
  """Makes a scale with all evaluations."""
  return _scale(prepare, _evaluations(pairs, tuned), _SETS, **more)


def _one_gpu(share: float, rows: int, vocab_size=8192, options=(), **more):
  """Makes a scale that one GPU trains in minutes, with BLiMP alone."""
  words = f"--share={share}", f"--vocab_size={vocab_size}"
  options = "--batch_tokens=65536", *options
  blimp = _SETS[:2]
  scored = tuple(_pairs(name, *options) for name in blimp)
  text = ExpectedText(vocab_size, 128, rows=rows)
  return _scale(words, scored, blimp, text=text, **more)


_FIVE = "--task=cola,mrpc,rte,sst2,mnli"
SCALES = {
  # Every job takes seconds, to try the table out.
  "shrink": _whole(
    ("--share=0.002", "--vocab_size=512"),
    ("--limit=2",),
    ("--task=cola,rte", "--epochs=1", "--limit=64"),
    text=ExpectedText(512, 128),
    config="tiny",
    shrink=True,
  ),
  "tiny": _whole(
    ("--share=0.0075", "--vocab_size=4096"),
    ("--limit=30",),
    (_FIVE, "--lrs=5e-4", "--epochs=2", "--limit=2000", "--max_length=64"),
    text=ExpectedText(4096, 128, rows=1100),
  ),
  "small": _scale(
    {
      "BabyLlama": ("--share=0.0185", "--vocab_size=4096"),
      "LTG-BERT": ("--share=0.008", "--vocab_size=2048"),
    },
    text=ExpectedText(4096, 128, rows=2500),
  ),
  "8m_shrink": _one_gpu(
    0.002, 100, 512, ("--limit=2",), config="8m", shrink=True
  ),
  "8m": _one_gpu(0.0875, 10_100),
  "24m": _one_gpu(0.247, 29_000),
  "97m": _one_gpu(1.0, 107_000, 16_000),
  "paper": _whole(
    {
      "BabyLlama": ("--vocab_size=16000",),
      "LTG-BERT": ("--kind=wordpiece", "--vocab_size=16384"),
    },
    ("--pipeline=2024",),
    ("--task=all", "--lrs=5e-5,1e-4", "--seeds=12,13,14"),
    text=ExpectedText(16_384, 128, rows=115_000),
  ),
}
