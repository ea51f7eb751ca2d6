"""Attention compared with its peers: forward and backward, mask by mask.

    python -m antlm_jax.evals.benchmarks.attention [--topology=v5e:2x2]

On a GPU or TPU it times them by turns. Anywhere else it compiles them for a TPU
that is not there (libtpu: `launch/setup.sh libtpu`) and prints:

- temp: memory of a layer in addition to its arguments and results;
- moved: bytes that a layer moves, by XLA's cost analysis.

A layer is its projections, RoPE and attention, with all gradients.

The peers: splash attention in blocks of 512, its backward pass in two kernels
or fused to one, for static masks and segment ids. cuDNN, for causal and full
masks. tokamax's kernels for GPUs, if installed. XLA with a dense mask.
`chunked` is our own attention without a kernel. Only XLA and ours have
LTG-BERT's position terms (`--shapes="ltg 128,ltg 512,no terms"`).
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import attention, cli
from antlm_jax.evals.benchmarks import common, turns
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from antlm_jax.models import layers
from antlm_jax.objectives.corruption import Segments
from antlm_jax.planning import topology
from antlm_jax.settings import Section, setting


@dataclasses.dataclass(frozen=True)
class Shape:
  """Rows B of T tokens, N query and K key heads of width H, in bfloat16.

  If there are buckets, LTG-BERT's position terms are added to the scores.
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
  "150M": Shape(32, 1024, 12, 12, 64),
  "610M": Shape(8, 2048, 18, 6, 64),
  "wide": Shape(8, 2048, 16, 4, 128),
  "ltg 128": Shape(128, 128, 12, 12, 64, 63),
  "ltg 512": Shape(32, 512, 12, 12, 64, 63),
  "no terms": Shape(32, 512, 12, 12, 64),  # to compare with the one before
}
MASKS = ("causal", "full", "packed", "packed causal", "mixed", "window")


def make_mask(name: str, rows: int, length: int) -> AttentionMask:
  """Returns a mask of `MASKS`, its bounds NumPy arrays."""
  draw = np.random.default_rng(0)
  starts = np.zeros((rows, length), bool)
  for row in starts:
    start = 0
    while start < length:
      row[start] = True
      # Long-tailed, as web text is; some documents fill the row.
      start += int(draw.lognormal(np.log(length / 4), 1)) + 1
  documents = Segments.of(starts)
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), starts.shape)
  odd = (np.arange(rows) % 2 == 1)[:, None]
  return {
    "causal": CAUSAL,
    "full": BIDIRECTIONAL,
    "packed": AttentionMask(False, documents.start, documents.end),
    "packed causal": AttentionMask(True, documents.start, None),
    # Half the rows causal, half not: one batch of CLM and MLM.
    "mixed": AttentionMask(False, None, np.where(odd, positions + 1, length)),
    # 64 keys on both sides, as in ModernBERT's local layers.
    "window": BIDIRECTIONAL.within(65, (rows, length), np),
  }[name]


# The peers compared: functions of (shape, mask name) that return
# `attend(q, k, v, mask)`, or None if they cannot do this mask.


def our_attention(shape: Shape, name: str, implementation: str):
  """Our attention; its position terms are of one table for both q and k."""
  if implementation == "cudnn" and name not in ("causal", "full"):
    return None
  attend = functools.partial(attention.attend, implementation=implementation)
  if not shape.buckets:
    return attend
  draw = np.random.default_rng(0)
  table = draw.normal(size=(shape.buckets, shape.heads, shape.width))
  edges = attention.log_edges((shape.buckets + 1) // 2, 512)

  def with_terms(q, k, v, mask):
    terms = (
      jnp.einsum("btnh,cnh->btnc", x, jnp.asarray(table, x.dtype))
      for x in (q, k)
    )
    return attend(q, k, v, mask, relative=attention.Relative(*terms, edges))

  return with_terms


def splash_attention(shape: Shape, name: str, fused: bool = False):
  """Splash attention, as its users call it."""
  from jax.experimental.pallas.ops.tpu import splash_attention as peer

  if name in ("mixed", "window") or shape.buckets:
    return None
  static = peer.CausalMask if "causal" in name else peer.FullMask
  names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
  names += () if fused else ("q_dq", "kv_dq")
  size = min(512, shape.length)
  with jax.ensure_compile_time_eval():
    mask = static((shape.length, shape.length))
    run = peer.make_splash_mha(
      mask=peer.MultiHeadMask([mask] * shape.heads),
      block_sizes=peer.BlockSizes(
        **{f"block_{name}": size for name in names}, use_fused_bwd_kernel=fused
      ),
      head_shards=1,
      q_seq_shards=1,
    )

  def attend(q, k, v, mask):
    args = [x.transpose(0, 2, 1, 3) for x in (q * shape.width**-0.5, k, v)]
    if name.startswith("packed"):  # a document is known by where it begins
      args.append(peer.SegmentIds(mask.k_start, mask.k_start))
    return jax.vmap(run)(*args).transpose(0, 2, 1, 3)

  return attend


def dense(shape: Shape, name: str):
  """JAX's own attention with a dense mask; with terms, our reference."""
  if shape.buckets:
    return our_attention(shape, name, "reference")

  def attend(q, k, v, mask):
    square = mask.dense(shape.length, shape.length)
    square = None if square is None else square[:, None]
    return jax.nn.dot_product_attention(
      q, k, v, mask=square, implementation="xla"
    )

  return attend


_OURS = {
  name: functools.partial(our_attention, implementation=name)
  for name in ("pallas", "mosaic", "tokamax", "cudnn", "chunked")
}
_ANYWHERE = {"chunked": _OURS["chunked"], "XLA, dense": dense}
_GPU = {
  "mosaic": _OURS["mosaic"],
  "tokamax": _OURS["tokamax"],
  "cuDNN": _OURS["cudnn"],
}
_FUSED = functools.partial(splash_attention, fused=True)
_TPU = {
  "pallas": _OURS["pallas"],
  "splash": splash_attention,
  "splash, fused": _FUSED,
}
PEERS = {"tpu": _TPU | _ANYWHERE, "gpu": _GPU | _ANYWHERE}


def with_gradients(attend):
  """Returns a function of (q, k, v, g, mask) to output and gradients."""

  def run(q, k, v, g, mask):
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
    return out, *pull(g)

  return run


def compile_attention(device, attend, shape: Shape, mask: AttentionMask):
  """Compiles forward and backward for a device that may be absent."""
  args = shape.arrays(lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16))
  return common.compile_for(device, with_gradients(attend), *args, mask)


def compile_layer(device, attend, shape: Shape, mask: AttentionMask):
  """Likewise, with the projections and RoPE: no layout is free."""

  def run(x, kernels, g, positions, mask):
    def layer(x, kernels):
      rope = attention.Rope.of(positions, shape.width, 1e4)
      q, k, v = (
        layers.matmul(x, kernel).reshape(*x.shape[:2], -1, shape.width)
        for kernel in kernels[:3]
      )
      out = attend(rope.rotate(q), rope.rotate(k), v, mask)
      return layers.matmul(out.reshape(x.shape), kernels[3])

    out, pull = jax.vjp(layer, x, kernels)
    return out, *pull(g)

  def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)

  width, kv_width = (n * shape.width for n in (shape.heads, shape.kv_heads))
  x = like(shape.rows, shape.length, width)
  kernels = [like(width, n) for n in (width, kv_width, kv_width, width)]
  positions = like(*x.shape[:2], dtype=jnp.int32)
  return common.compile_for(device, run, x, kernels, x, positions, mask)


def compile_cases(name: str, shapes, masks) -> Iterator[dict]:
  """Compiles every case for a TPU; yields a row for each."""
  device = topology.topology_devices(name)[0]
  for shape, mask_name in itertools.product(shapes, masks):
    mask = make_mask(mask_name, shape.rows, shape.length)
    for peer, make in PEERS["tpu"].items():
      attend = make(shape, mask_name)
      if attend is None:
        continue
      row = {"shape": str(shape), "mask": mask_name, "peer": peer}
      begun = time.monotonic()
      try:
        done = compile_layer(device, attend, shape, mask)
        temp = done.memory_analysis().temp_size_in_bytes
        row["temp_MB"] = round(temp / 1e6, 1)
        row["moved_MB"] = round(done.cost_analysis()["bytes accessed"] / 1e6)
        row["compile_s"] = round(time.monotonic() - begun, 1)
      except jax.errors.JaxRuntimeError as error:
        if "memory" not in str(error).lower():
          raise
        row["temp_MB"] = "out of memory"
      yield row


def time_cases(shapes, masks, without, rounds: int) -> Iterator[dict]:
  """Times every case by turns; yields a row for each.

  All are compiled first, side by side.
  """
  peers = {
    peer: make
    for peer, make in PEERS[jax.default_backend()].items()
    if peer not in without
  }
  cases = list(itertools.product(shapes, masks))
  with concurrent.futures.ThreadPoolExecutor() as pool:
    compiling = [
      {p: pool.submit(_compiled_peer, make, *case) for p, make in peers.items()}
      for case in cases
    ]
  first = next(iter(peers))
  for (shape, name), futures in zip(cases, compiling, strict=True):
    mask = make_mask(name, shape.rows, shape.length)
    args = *shape.arrays(_draw), jax.tree.map(jnp.asarray, mask)
    programs = {
      peer: _tried(future.result, args) for peer, future in futures.items()
    }
    calls = {
      peer: functools.partial(
        turns.time_call, functools.partial(_run_calls, run, args)
      )
      for peer, run in programs.items()
      if callable(run)
    }
    seconds = turns.by_turns([*calls.values()], rounds)
    medians = 1e3 * np.median(seconds, axis=0) / _CALLS
    spent = dict(zip(calls, medians.tolist(), strict=True))
    for peer, run in programs.items():
      if run is not None:
        row = {"shape": str(shape), "mask": name, "peer": peer}
        row["ms"] = spent.get(peer, run)
        if {first, peer} <= spent.keys():
          row["to ours"] = round(spent[peer] / spent[first], 2)
        yield row


_CALLS = 5  # at a time: one alone is mostly its launch


def _draw(shape) -> jax.Array:
  return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)


def _run_calls(run, args) -> None:
  jax.block_until_ready([run(*args) for _ in range(_CALLS)])


def _compiled_peer(make, shape: Shape, name: str):
  """Returns a peer's compiled function, or None if it cannot do this mask."""
  args = shape.arrays(lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16))
  mask = make_mask(name, shape.rows, shape.length)
  mask = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), mask)
  if not (attend := make(shape, name)):
    return None
  return jax.jit(with_gradients(attend)).lower(*args, mask).compile()


def _tried(compiled, args):
  """Returns the function of `_compiled_peer`, or why it cannot run."""
  try:
    run = compiled()
    if run is not None:
      _run_calls(run, args)
  except Exception as error:  # after any error, the other peers are timed
    return f"{type(error).__name__}: {error}".splitlines()[0][:60]
  return run


@dataclasses.dataclass(frozen=True)
class AttentionTimings(Section):
  """The command's arguments."""

  shapes: tuple[str, ...] = setting(
    ("97M", "610M"), f"Model shapes: {', '.join(SHAPES)}", choices=SHAPES
  )
  masks: tuple[str, ...] = setting(MASKS, "Attention masks", choices=MASKS)
  without: tuple[str, ...] = setting((), "Peers to leave out")
  topology: str = setting(
    "v5e:2x2", "TPU topology to compile for if no device is present"
  )
  rounds: int = setting(
    20, "Number of timed turns of each case, on a device", least=1
  )
  output: str = common.output()


def main(argv) -> None:
  """Prints a line per case, and writes them to a file."""
  args = common.benchmark_arguments(__doc__, AttentionTimings, argv)
  shapes = [SHAPES[name] for name in args.shapes]
  columns = {"shape": 18, "mask": 13, "peer": 13}
  if jax.default_backend() == "cpu":
    machine = args.topology.partition(":")[0] + "-compiled"
    columns |= {"temp_MB": 13, "moved_MB": 8, "compile_s": 9}
    rows = compile_cases(args.topology, shapes, args.masks)
  else:
    machine = jax.devices()[0].device_kind
    columns |= {"ms": 9, "to ours": 7}
    rows = time_cases(shapes, args.masks, args.without, args.rounds)
  name = f"attention {machine}"
  common.report_rows(rows, args.output, name, columns, machine=machine)


if __name__ == "__main__":
  cli.run_command(main)
