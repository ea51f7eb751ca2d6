"""The encoders of arXiv 2507.00994: 210M, 610M and 1B parameters.

    antlm prepare --text=FINEWEB_EDU --output=data/fineweb \\
      --tokenizer=EuroBERT/EuroBERT-210m --seq_len=2048 --packing=chunks \\
      --boundary=eos
    antlm train --config=encoders:size=610M,topology=h100:8 \\
      --workdir=runs/610m --config.data.path=data/fineweb

docs/how_to/train_encoders.md has the whole way. The tokenizer is Llama 3's with
a mask token, as EuroBERT ships it: 128,256 tokens, `<|mask|>` among them. The
sizes count the blocks and the embedding. The untied output layer is as large as
the embedding, so 310M, 756M and 1.41B parameters are trained.

The argument takes
- `size`: 210M, 610M or 1B (Table 1);
- `curriculum`: `42000M` (default), `42000C`, `10000C+32000M`, ...;
- `mask_ratio`: 0.2 to 0.5 in the paper, 0.4 by default;
- `topology`: devices, such as v5e:16x16 or h100:8, or a number of TPU chips,
  such as 256. It sets the rows of a batch, the mesh and the microbatches
  so that the run fits, and refuses devices that are too few. The run then
  refuses to start on another number of devices. Without it, the rows are
  1,152, and the mesh takes all devices;
- `slices`: number of TPU slices of this topology, 1 by default.

A batch is 1,152 rows of 2,048, each two chunks: 2,304 samples. These are the
2,359,296 tokens a step of Table 1, where the paper's text says 2,373,120. Its
code draws lengths, so that its steps differ in their tokens. If the devices do
not divide 1,152, it is the nearest multiple: 1,280 on 256 chips.

Differences from the paper or its code:
- The initial weights' deviation is the code's 0.02, not the printed 0.2.
- The loss is the mean over all targets of a batch. The code averages the means
  of the processes.
- The code's learning rate is that of the next step.
- The order of the texts is another shuffle.
"""

from antlm_jax import config as config_lib
from antlm_jax.models import llama
from antlm_jax.planning import places

SIZES = ("210M", "610M", "1B")
VOCAB_SIZE = 128_256
ROWS, LENGTH = 1152, 2048


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(
    arg, size=SIZES, curriculum="42000M", mask_ratio=0.4, topology="", slices=1
  )
  config = config_lib.changes()
  config.curriculum = arg.curriculum
  config.objectives.M.update(
    mask_ratio=arg.mask_ratio, mask_token=1.0, random_token=0.0
  )
  config.model.update(
    **llama.SHAPES[arg.size],
    max_seq_len=LENGTH,
    tied=False,
    dtype="bfloat16",
    remat="dots",
  )
  config.train.update(batch_size=ROWS)
  if arg.topology:
    config.update_from_flattened_dict(
      places.settings_for(
        arg.topology,
        llama.SHAPES[arg.size],
        VOCAB_SIZE,
        ROWS,
        LENGTH,
        arg.slices,
      )
    )
  config.optimizer.update(
    b1=0.9, b2=0.95, eps=1e-5, weight_decay=0.1, decay_scope="all", clip=1.0
  )
  config.schedule.update(peak_lr=5e-4, warmup_steps=2000, decay_steps=2000)
  config.eval.update(every=1000, rows=config.train.batch_size)
  config.checkpoint.update(every=1000, keep_every=2000)
  return config
