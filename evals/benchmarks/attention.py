"""Attention beside its peers: forward and backward, mask by mask.

    python -m evals.benchmarks.attention [--topology=v5e:2x2] [--bundles]

On a GPU or TPU it times them in turn, in the same run. Anywhere else it
compiles them for a TPU that is not there (libtpu: `launch/setup.sh libtpu`) and
prints what can be known without one:

- temp, moved: memory beside arguments and results, and bytes by XLA's cost
  analysis, of a layer: projections, RoPE, attention, and all gradients;
- with --bundles, from the compiler's own listing, the instruction bundles for
  512 x 512 scores of which none is hidden (forward/backward): cycles, were
  nothing waited for.

The peers: splash attention, with blocks of 512, and its backward pass in two
kernels or fused to one; it takes a static mask and segment ids, and thus no
batch of both kinds. cuDNN, which takes a causal flag. tokamax's kernel for
GPUs, if it is installed. Plain XLA with a dense mask. `chunked` is our own way
where there is no kernel. Scores with LTG-BERT's
position terms (`--shapes="ltg 128,ltg 512,no terms"`) are for XLA and us alone.
"""

import dataclasses
import functools
import importlib.util
import itertools
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import attention, cli
from antlm_jax.attention.tpu import kernel
from antlm_jax.evals.benchmarks import common
from antlm_jax.evals.benchmarks.common import RESULTS, Report, arguments
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from antlm_jax.models import layers
from antlm_jax.planning import bundles, topology
from antlm_jax.settings import setting


@dataclasses.dataclass(frozen=True)
class Shape:
  """Rows B of T tokens, N query and K key heads of width H, in bfloat16.

  Where there are buckets, LTG-BERT's position terms are added to the scores.
  """

  rows: int
  length: int
  heads: int
  kv_heads: int
  width: int
  buckets: int = 0

  def __str__(self):
    *sizes, buckets = dataclasses.astuple(self)
    text = "x".join(str(x) for x in sizes)
    return f"{text}+{buckets}" if buckets else text

  def arrays(self, make):
    """Makes q, k, v and the gradient of the output by `make(shape)`."""
    q = (self.rows, self.length, self.heads, self.width)
    k = (self.rows, self.length, self.kv_heads, self.width)
    return make(q), make(k), make(k), make(q)


SHAPES = {
  "97M": Shape(128, 128, 12, 12, 64),
  "210M": Shape(8, 2048, 12, 12, 64),
  "610M": Shape(8, 2048, 18, 6, 64),
  "8k": Shape(2, 8192, 12, 12, 64),
  "wide": Shape(8, 2048, 16, 4, 128),
  "ltg 128": Shape(128, 128, 12, 12, 64, 63),
  "ltg 512": Shape(32, 512, 12, 12, 64, 63),
  "no terms": Shape(32, 512, 12, 12, 64),  # beside the one before
}
MASKS = ("causal", "full", "packed", "packed causal", "mixed", "window")
WINDOW = 512


def documents(rows: int, length: int) -> np.ndarray:
  """Random documents' first and one past last position, `[2, B, T]`."""
  draw = np.random.default_rng(0)
  out = np.zeros((2, rows, length), np.int32)
  for row in range(rows):
    start = 0
    while start < length:
      # Long-tailed, as web text is; some fill the row.
      end = min(length, start + int(draw.lognormal(np.log(length / 4), 1)) + 1)
      out[:, row, start:end] = [[start], [end]]
      start = end
  return out


def make_mask(name: str, rows: int, length: int) -> AttentionMask:
  """Returns a mask of `MASKS`, its bounds NumPy arrays."""
  start, end = documents(rows, length)
  at = np.broadcast_to(np.arange(length, dtype=np.int32), start.shape)
  odd = (np.arange(rows) % 2 == 1)[:, None]
  return {
    "causal": CAUSAL,
    "full": BIDIRECTIONAL,
    "packed": AttentionMask(False, start, end),
    "packed causal": AttentionMask(True, start, None),
    # Half the rows causal, half not: one batch of CLM and MLM.
    "mixed": AttentionMask(False, None, np.where(odd, at + 1, length)),
    "window": AttentionMask(True, np.maximum(at - WINDOW + 1, 0), None),
  }[name]


# ----------------------------------------------------------- what is compared
# Each is a function of (shape, mask name) that returns `attend(q, k, v, mask)`,
# or None where it cannot do this mask.


def ours(implementation, masks=MASKS):
  """Returns our attention by one implementation, which has these masks."""

  def make(shape, name):
    if name not in masks:
      return None
    attend = functools.partial(attention.attend, implementation=implementation)
    return with_terms(attend, shape) if shape.buckets else attend

  return make


def with_terms(attend, shape: Shape):
  """Adds position terms, from one table that both q and k meet."""
  draw = np.random.default_rng(0)
  table = draw.normal(size=(shape.buckets, shape.heads, shape.width))
  edges = attention.log_edges((shape.buckets + 1) // 2, 512)

  def run(q, k, v, mask):
    terms = (
      jnp.einsum("btnh,cnh->btnc", x, jnp.asarray(table, x.dtype))
      for x in (q, k)
    )
    return attend(q, k, v, mask, relative=attention.Relative(*terms, edges))

  return run


def splash(shape: Shape, name: str, fused: bool = False):
  """Splash attention, as its users call it."""
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash_kernel,
  )
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
  )

  square = (shape.length, shape.length)
  mask = {
    "causal": masks.CausalMask(square),
    "full": masks.FullMask(square),
    "packed": masks.FullMask(square),
    "packed causal": masks.CausalMask(square),
    "window": masks.LocalMask(square, (WINDOW - 1, 0), 0),
  }.get(name)
  if mask is None or shape.buckets:
    return None
  names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
  names += () if fused else ("q_dq", "kv_dq")
  size = min(512, shape.length)
  with jax.ensure_compile_time_eval():
    run = splash_kernel.make_splash_mha(
      mask=masks.MultiHeadMask([mask] * shape.heads),
      block_sizes=splash_kernel.BlockSizes(
        **{f"block_{name}": size for name in names}, use_fused_bwd_kernel=fused
      ),
      head_shards=1,
      q_seq_shards=1,
    )

  def attend(q, k, v, mask):
    args = [x.transpose(0, 2, 1, 3) for x in (q * shape.width**-0.5, k, v)]
    if name.startswith("packed"):  # a document is known by where it begins
      args.append(splash_kernel.SegmentIds(mask.k_start, mask.k_start))
    return jax.vmap(run)(*args).transpose(0, 2, 1, 3)

  return attend


def dense(implementation: str):
  """Returns JAX's own attention, with a dense mask.

  It takes no position terms: with those, plain XLA is our reference.
  """

  def make(shape: Shape, name: str):
    if shape.buckets:
      plain = implementation == "xla"
      return ours("reference")(shape, name) if plain else None

    def attend(q, k, v, mask):
      square = mask.dense(shape.length, shape.length)
      square = None if square is None else square[:, None]
      return jax.nn.dot_product_attention(
        q, k, v, mask=square, implementation=implementation
      )

    return attend

  return make


def tokamax(shape: Shape, name: str):
  """tokamax's kernel (0.0.17), where installed; its API has no intervals."""
  if shape.buckets or importlib.util.find_spec("tokamax") is None:
    return None
  from tokamax._src.ops.attention import base, pallas_mosaic_gpu

  run = pallas_mosaic_gpu.PallasMosaicGpuFlashAttention()

  def attend(q, k, v, mask):
    bounds = {"k_start": mask.k_start, "k_end": mask.k_end}
    bounds = {n: b[:, None] for n, b in bounds.items() if b is not None}
    return run(q, k, v, mask=base.Mask(is_causal=mask.causal, **bounds))

  return attend


PEERS = {
  "tpu": {
    "pallas": ours("pallas"),
    "splash": splash,
    "splash, fused": functools.partial(splash, fused=True),
    "chunked": ours("chunked"),
    "XLA, dense": dense("xla"),
  },
  "gpu": {
    "mosaic": ours("mosaic"),
    "cuDNN": ours("cudnn", masks=("causal", "full")),
    "tokamax": tokamax,
    "chunked": ours("chunked"),
    "cuDNN, dense": dense("cudnn"),
    "XLA, dense": dense("xla"),
  },
}


def with_gradients(attend):
  """Returns a function of (q, k, v, g, mask) to output and gradients."""

  def run(q, k, v, g, mask):
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
    return out, *pull(g)

  return run


# ------------------------------------------------------------ without a device


def compile_for(device, attend, shape: Shape, mask: AttentionMask):
  """Compiles forward and backward for a device that need not be there."""
  args = shape.arrays(lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16))
  return common.compile_for(device, with_gradients(attend), *args, mask)


def compile_layer(device, attend, shape: Shape, mask: AttentionMask):
  """Likewise, with the projections and RoPE: no layout comes for nothing."""
  width = shape.heads * shape.width
  kv_width = shape.kv_heads * shape.width

  def layer(x, kernels, positions, mask):
    rope = layers.rotary(positions, shape.width, 1e4)
    q, k, v = (
      layers.matmul(x, kernel).reshape(*x.shape[:2], -1, shape.width)
      for kernel in kernels[:3]
    )
    out = attend(layers.rotate(q, *rope), layers.rotate(k, *rope), v, mask)
    return layers.matmul(out.reshape(x.shape), kernels[3])

  def run(x, kernels, g, positions, mask):
    out, pull = jax.vjp(lambda *a: layer(*a, positions, mask), x, kernels)
    return out, *pull(g)

  def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)

  x = like(shape.rows, shape.length, width)
  kernels = [like(width, n) for n in (width, kv_width, kv_width, width)]
  positions = like(*x.shape[:2], dtype=jnp.int32)
  return common.compile_for(device, run, x, kernels, x, positions, mask)


_COMPILED = {
  "shape": 18,
  "mask": 13,
  "peer": 13,
  "temp_MB": 13,
  "moved_MB": 8,
  "compile_s": 9,
  "bundles": 0,
}


def compiled(name: str, shapes, masks, listings: str) -> Iterator[dict]:
  """Compiles every case for a TPU; yields a row for each.

  `listings` is the folder to which the compiler writes what it makes of it; ""
  if it does not.
  """
  device = topology.devices(name)[0]
  for shape, mask_name in itertools.product(shapes, masks):
    mask = make_mask(mask_name, shape.rows, shape.length)
    for peer, make in PEERS["tpu"].items():
      attend = make(shape, mask_name)
      if attend is None:
        continue
      row = {"shape": str(shape), "mask": mask_name, "peer": peer}
      row |= _of_layer(device, attend, shape, mask)
      if listings and peer not in ("chunked", "XLA, dense"):
        bundles.read(listings, "")  # the layer's, in which it is laid out anew
        compile_for(device, attend, shape, mask)
        found = bundles.read(listings, "(attention|splash)_[a-z_]+")
        row["bundles"] = count_bundles(shape, peer, found)
      yield row


def _of_layer(device, attend, shape: Shape, mask: AttentionMask) -> dict:
  begun = time.monotonic()
  try:
    done = compile_layer(device, attend, shape, mask)
  except jax.errors.JaxRuntimeError as error:
    if "memory" not in str(error).lower():
      raise
    return {"temp_MB": "out of memory"}
  temp = done.memory_analysis().temp_size_in_bytes
  return {
    "temp_MB": round(temp / 1e6, 1),
    "moved_MB": round(done.cost_analysis()["bytes accessed"] / 1e6),
    "compile_s": round(time.monotonic() - begun, 1),
  }


def count_bundles(
  shape: Shape, peer: str, found: Mapping[str, bundles.Listing]
) -> str:
  """Returns the bundles for 512 x 512 scores: forward and backward."""
  scores = min(512, shape.length) ** 2
  if peer == "pallas":
    group = shape.heads // shape.kv_heads
    length, what = shape.length, (shape.width, jnp.bfloat16)
    blocks = kernel.cut(length, length, group, *what)
    heads = kernel.heads_of_a_step(
      shape.kv_heads, group, shape.width, blocks, jnp.bfloat16
    )
    scores = heads * group * blocks.q_size * blocks.k_size
  counts = {True: 0, False: 0}
  for name, listing in found.items():
    counts[bool(re.search("_output|_fwd", name))] += listing.whole
  return "/".join(f"{n * 512**2 / scores:.0f}" for n in counts.values())


# --------------------------------------------------------------- with a device

_TIMED = {"shape": 18, "mask": 13, "peer": 12, "ms": 9, "to ours": 7}


def timed(shapes, masks, without, seconds: float) -> Iterator[dict]:
  """Times every case in turn; yields a row for each."""
  ours, *others = PEERS[jax.default_backend()].items()
  peers = {p: make for p, make in (ours, *others) if p not in without}
  for shape, name in itertools.product(shapes, masks):
    times = _time_in_turn(peers, shape, name, seconds)
    first = times.get(ours[0])
    for peer, spent in times.items():
      row = {"shape": str(shape), "mask": name, "peer": peer, "ms": spent}
      if isinstance(spent, float) and isinstance(first, float):
        row["to ours"] = round(spent / first, 2)
      yield row


def _time_in_turn(peers, shape: Shape, name: str, seconds: float) -> dict:
  """Milliseconds of each peer, or why there are none; medians of calls that
  take turns."""
  key = jax.random.key(0)
  args = shape.arrays(lambda s: jax.random.normal(key, s, jnp.bfloat16))
  mask = jax.tree.map(jnp.asarray, make_mask(name, shape.rows, shape.length))
  runs, failed = {}, {}
  for peer, make in peers.items():
    try:
      if attend := make(shape, name):
        run = jax.jit(with_gradients(attend))
        jax.block_until_ready(run(*args, mask))
        runs[peer] = run
    except Exception as error:  # whatever it is, the others are timed
      failed[peer] = f"{type(error).__name__}: {error}".splitlines()[0][:60]
  spent = {peer: [] for peer in runs}
  end = time.monotonic() + seconds
  while time.monotonic() < end:
    for peer, run in runs.items():
      begun = time.perf_counter()
      # Several calls at a time: one alone is mostly its launch.
      out = [run(*args, mask) for _ in range(5)]
      jax.block_until_ready(out)
      spent[peer].append((time.perf_counter() - begun) / 5 * 1e3)
  medians = {peer: float(np.median(x)) for peer, x in spent.items()}
  return {p: (medians | failed)[p] for p in peers if p in medians | failed}


# ----------------------------------------------------------------- the command


@dataclasses.dataclass(frozen=True)
class Settings:
  """The command's arguments."""

  shapes: tuple[str, ...] = setting(
    ("97M", "210M", "610M", "8k"), f"of {', '.join(SHAPES)}", choices=SHAPES
  )
  masks: tuple[str, ...] = setting(MASKS, "which masks", choices=MASKS)
  without: tuple[str, ...] = setting((), "peers that are not timed")
  topology: str = setting("v5e:2x2", "TPU to compile for, without one")
  bundles: bool = setting(False, "count a block's instructions")
  seconds: float = setting(2.0, "per case, with a device", over=0)
  output: str = setting(str(RESULTS), "folder of the JSON file", read=cli.here)


def main(argv) -> None:
  """Prints a line per case, and writes them to a file."""
  args = arguments(__doc__, Settings, argv)
  shapes = [SHAPES[name] for name in args.shapes]
  with tempfile.TemporaryDirectory() as listings:
    if jax.default_backend() == "cpu":
      if args.bundles:
        os.environ |= bundles.environment(listings)  # before libtpu is loaded
      machine = args.topology.partition(":")[0] + "-compiled"
      columns = _COMPILED
      where = listings if args.bundles else ""
      rows = compiled(args.topology, shapes, args.masks, where)
    else:
      machine, columns = jax.devices()[0].device_kind, _TIMED
      rows = timed(shapes, args.masks, args.without, args.seconds)
    name = f"attention {machine}"
    report = Report(args.output, name, columns, machine=machine)
    for row in rows:
      report.add(row)
  report.close()


if __name__ == "__main__":
  cli.run(main)
