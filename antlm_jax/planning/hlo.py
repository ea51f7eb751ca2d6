"""Counts operations, bytes and collectives in the text of a compiled program.

XLA's cost analysis counts the body of a loop only once. It does not report the
number and the devices of collectives, or arrays that are not in main memory.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from antlm_jax.planning.bundles import BundleCounts

# First line of a computation, and an instruction: ROOT if it is the result,
# name, shape, code, text in parentheses, attributes.
_HEAD = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_LINE = re.compile(
  r"^\s+(ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(?:$|, (.*))"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
# Computations that an instruction runs, except a loop's condition.
_CALLED = re.compile(
  r"(?:calls|to_apply|body|(?:true|false|branch)_computations?)="
  r"\{?(%[\w.\-]+(?:, %[\w.\-]+)*)"
)
# Instructions that move nothing, or whose parts are counted instead.
_FREE = re.compile(
  "after-all|bitcast|call|conditional|constant|get-tuple-element|opt-barrier"
  "|parameter|partition-id|replica-id|tuple|while|.*-start|.*-update"
)
_COLLECTIVE = re.compile(
  "(all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute"
  "|ragged-all-to-all|reduce-scatter)(-start)?"
)
_SLICES = ("dynamic-slice", "gather", "slice")
# Instructions that a fusion computes only where their result is read.
_ELEMENTWISE = ("add", "bitcast", "convert")
# Index of the operand that replaces a part of the first operand.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective operation of a device."""

  kind: str  # such as all-gather
  bytes: int  # size of the array that is gathered, reduced or sent
  # Places of the first group's devices in the mesh; empty between slices.
  group: tuple[int, ...] = ()
  slices: int = 0  # number of slices, if it connects slices

  @property
  def sent(self) -> float:
    """Bytes that a device sends around a ring of the group."""
    n = len(self.group) or self.slices
    if self.kind in ("collective-permute", "collective-broadcast"):
      return self.bytes
    # Each device passes on the parts of n - 1 other devices. A sum needs two
    # rounds, to add up and to distribute.
    return self.bytes * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)


class Instruction(NamedTuple):
  """Work of an instruction other than a kernel."""

  scope: str  # place in the model's code, such as `jit(update)/jvp(head)/dot`
  code: str  # such as fusion
  flops: float  # FLOPs of matrix products
  bytes: int  # bytes read from and written to main memory
  cycles: int  # cycles of a TPU core
  carries: bool = False  # whether a collective runs meanwhile


@dataclasses.dataclass
class Counts:
  """Work of a device in one execution of a program."""

  flops: float = 0.0  # FLOPs of matrix products
  # Bytes read from and written to main memory. Each operand counts once, so
  # repeated loads in kernels and products are missing.
  bytes: float = 0.0
  # Number of calls by a kernel's name and the FLOPs that it states.
  kernels: collections.Counter[tuple[str, float]] = dataclasses.field(
    default_factory=collections.Counter
  )
  work: collections.Counter[Instruction] = dataclasses.field(
    default_factory=collections.Counter
  )
  unknown_loops: int = 0  # loops of unknown length, whose bodies count once
  collectives: collections.Counter[Collective] = dataclasses.field(
    default_factory=collections.Counter
  )
  # Those of `collectives` that run while instructions that carry them compute.
  carried: collections.Counter[Collective] = dataclasses.field(
    default_factory=collections.Counter
  )

  def stated(self, names: str = "") -> float:
    """Sums the FLOPs that kernels state whose names match a pattern."""
    return sum(
      stated * times
      for (name, stated), times in self.kernels.items()
      if re.search(names, name)
    )

  @property
  def kernel_bytes(self) -> float:
    """Bytes that kernels read from and write to main memory."""
    return self.bytes - sum(
      instruction.bytes * n for instruction, n in self.work.items()
    )

  def add(self, other: "Counts", times: int = 1) -> None:
    """Adds work that is repeated `times` times."""
    self.flops += times * other.flops
    self.bytes += times * other.bytes
    self.unknown_loops += other.unknown_loops  # counts the loops of the text
    for name in ("kernels", "work", "collectives", "carried"):
      totals = getattr(self, name)
      for key, count in getattr(other, name).items():
        totals[key] += times * count


# ------------------------------------------------------------------- the text


@dataclasses.dataclass(frozen=True)
class _Array:
  """An array of the program."""

  dims: tuple[int, ...]
  bytes: int
  near: bool  # whether it is in memory on the chip

  @classmethod
  def parse(cls, kind: str, dims: str, layout: str) -> "_Array":
    sizes = tuple(_parse_integers(dims))
    # Size is the first number in bf16, s32 or f8e4m3fn; tokens have no number.
    bits = _parse_integers(kind) or [8 * (kind == "pred")]
    # {1,0:T(8,128)S(1)} is in memory space 1. Main memory has no S.
    return cls(sizes, math.prod(sizes) * bits[0] // 8, "S(" in layout)


@dataclasses.dataclass(frozen=True, eq=False)
class _Op:
  """An instruction of a computation."""

  home: "_Computation"
  name: str
  shape: str
  code: str  # such as fusion
  inside: str  # operands, or the value of a constant
  attributes: str

  @functools.cached_property
  def operands(self) -> list["_Op"]:
    return [self.home.ops[name] for name in _NAME.findall(self.inside)]

  @functools.cached_property
  def arrays(self) -> list[_Array]:
    return [_Array.parse(*groups) for groups in _ARRAY.findall(self.shape)]

  @property
  def bytes(self) -> int:
    return sum(array.bytes for array in self.arrays)

  @property
  def far(self) -> int:
    """Number of bytes of the result in main memory."""
    return sum(array.bytes for array in self.arrays if not array.near)

  @property
  def called(self) -> list["_Computation"]:
    """Computations that it runs, except a loop's condition."""
    names = " ".join(_CALLED.findall(self.attributes))
    return [self.home.program[name] for name in _NAME.findall(names)]

  @property
  def users(self) -> list[tuple["_Op", int]]:
    """Instructions that use it, and its index among their operands."""
    return self.home.users[self.name]

  @property
  def origin(self) -> "_Op":
    """Instruction that computed the value, before copies and reshapes."""
    passed_on = self.code in ("bitcast", "copy", "reshape")
    return self.operands[0].origin if passed_on else self

  @functools.cached_property
  def scope(self) -> str:
    """Scope of its product, else its own scope, else an operand's scope."""
    parts = self.called[0].ops.values() if self.code == "fusion" else ()
    products = [p for p in parts if p.code in ("dot", "convolution")]
    if products:
      return products[0].scope
    scope = self.get(r'op_name="([^"]*)"')
    return scope or next(filter(None, (o.scope for o in self.operands)), "")

  @property
  def window(self) -> tuple[str, str]:
    """Shape and TPU window; fusions with equal windows have equal bundles."""
    return self.shape, self.get(r'"window_config":(\{.*?\})')

  @property
  def cycles(self) -> int:
    """Cycles of its bundles, or the compiler's estimate if unknown."""
    if listing := self.home.listings.get(self.window):
      bounds = self.get(r'"iteration_bounds":\[(.*?)\]')
      return listing.passes(math.prod(_parse_integers(bounds)))
    return int(self.get(r'"estimated_cycles":"(\d+)"') or 0)

  def get(self, pattern: str) -> str:
    """Returns the first group of a pattern in the attributes, or ""."""
    match = re.search(pattern, self.attributes)
    return match[1] if match else ""


class _Computation:
  """Instructions by name, and the computations of its program."""

  def __init__(self, program: dict[str, "_Computation"], listings: dict):
    self.program = program
    self.listings = listings  # listings of the program by `_Op.window`
    self.ops: dict[str, _Op] = {}
    self.root: _Op | None = None  # instruction that computes the result

  @functools.cached_property
  def users(self) -> dict[str, list[tuple[_Op, int]]]:
    out = collections.defaultdict(list)
    for op in self.ops.values():
      for index, operand in enumerate(op.operands):
        out[operand.name].append((op, index))
    return out

  @functools.cached_property
  def counts(self) -> Counts:
    """Work of all instructions."""
    out = Counts()
    for op in self.ops.values():
      _add(out, op)
    return out

  def parameter(self, index: int) -> _Op:
    parameters = (op for op in self.ops.values() if op.code == "parameter")
    return next(op for op in parameters if op.inside == str(index))


def count(
  text: str, listings: Mapping[str, BundleCounts] | None = None
) -> Counts:
  """Counts the work of a program.

  Args:
    text: The program's text after all optimizations.
    listings: Bundles of its instructions on a TPU, by name.
  """
  program: dict[str, _Computation] = {}
  windows = {}
  current = entry = None
  for line in text.splitlines():
    if match := _LINE.match(line):
      op = _Op(current, *match.groups(default="")[1:])
      if op.code == "fusion-done":  # asynchronous; counts where it ends
        (begun,) = op.operands
        fields = {"inside": begun.inside, "attributes": begun.attributes}
        op = dataclasses.replace(op, code="fusion", **fields)
      current.ops[op.name] = op
      if listings and op.name in listings:
        windows[op.window] = listings[op.name]
      if match[1]:
        current.root = op
    elif head := _HEAD.match(line):
      current = program[head[2]] = _Computation(program, windows)
      entry = current if head[1] else entry
  return entry.counts


def _parse_integers(text: str) -> list[int]:
  return [int(n) for n in re.findall(r"-?\d+", text)]


# ------------------------------------------------------------- work and loops


def _add(out: Counts, op: _Op) -> None:
  """Adds the work of an instruction."""
  if op.code == "while":
    passes = _loop_passes(op)
    out.unknown_loops += passes is None
    (body,) = op.called
    out.add(body.counts, 1 if passes is None else passes)
  elif op.code == "conditional":  # count the branch with most work
    branches = [branch.counts for branch in op.called]
    out.add(max(branches, key=lambda b: (b.flops, b.bytes)))
  elif op.code in ("call", "async-start"):
    for callee in op.called:
      out.add(callee.counts)
  else:
    # A fusion moves bytes as a unit, but computes several instructions.
    counts = Counts(bytes=_moved_bytes(op))
    _work(counts, op)
    if not counts.kernels:
      scope = "collectives" if counts.collectives else op.scope
      carries = counts.flops > 0 and _runs_collective(op)
      work = counts.flops, counts.bytes, op.cycles
      instruction = Instruction(scope, op.code, *work, carries)
      counts.work[instruction] = 1
    out.add(counts)


def _work(out: Counts, op: _Op) -> None:
  """Adds the products and collectives of an instruction or fusion."""
  if op.code == "fusion":
    for part in op.called[0].ops.values():
      _work(out, part)
  elif op.code == "dot":  # equal to XLA's cost analysis
    out.flops += _dot_flops(op, r"lhs_contracting_dims=\{([\d,]*)\}")
  elif 'custom_call_target="__cublas$' in op.attributes:  # such as on a T4
    out.flops += _dot_flops(op, r'"lhs_contracting_dimensions":\[([\d,"]*)\]')
  elif op.code == "convolution":
    out.flops += _convolution_flops(op)
  elif (kind := _COLLECTIVE.fullmatch(op.code)) and _begins_collective(op):
    collective = _collective(op, kind[1])
    out.collectives[collective] += 1
    out.carried[collective] += _is_asynchronous(op)
  elif op.code == "send" and "_xla_megascale_target" in op.attributes:
    # The host sends it to other slices.
    kind = op.get(r'_xla_megascale_transfer_type="(\w+)"')
    slices = 0
    for part in op.get(r'_xla_megascale_target="\{([\d,:]+)\}').split(","):
      first, *last = _parse_integers(part)  # 1 or 1:2
      slices += max(last, default=first) - first + 1
    kind = kind.lower().replace("_", "-")
    collective = Collective(kind, op.arrays[0].bytes, slices=slices)
    out.collectives[collective] += 1
  elif 'custom_call_target="tpu_custom_call"' in op.attributes:
    stated = op.get(r'"cost_estimate":\{"flops":"(\d+)"')
    out.kernels[op.name, float(stated or 0)] += 1
  elif stated := op.get(r"backend_config=\{flops = (\d+) : i64"):
    out.kernels[op.name, float(stated)] += 1  # `gpus.without_kernels`


def _loop_passes(loop: _Op) -> int | None:
  """Returns the number of passes of a loop, or None if it is unknown.

  TPU programs do not state it. Their loops have a counter that begins at a
  constant, grows by a constant and is compared with a constant.
  """
  if count := loop.get(r'"known_trip_count":\{"n":"(\d+)"'):
    return int(count)
  (body,) = loop.called
  (first,) = loop.operands
  test = loop.home.program[loop.get(r"condition=%([\w.\-]+)")].root
  counter = test.operands[0].origin.get(r"index=(\d+)")
  if test.code != "compare" or "direction=LT" not in test.attributes:
    return None
  if not counter or {first.code, body.root.code} != {"tuple"}:
    return None
  # Values at the start of the loop, and of the counter after one pass.
  begin, end = (_value(side, first) for side in test.operands)
  after = _value(body.root.operands[int(counter)], first)
  if None in (begin, end, after) or after <= begin:
    return None
  return max(0, -(-(end - begin) // (after - begin)))


def _value(op: _Op, first: _Op | None = None) -> int | None:
  """Evaluates an integer expression; `first` are the inputs of a loop."""
  op = op.origin
  if op.code == "constant" and re.fullmatch(r"-?\d+", op.inside):
    return int(op.inside)
  if op.code == "get-tuple-element" and first:
    return _value(first.operands[int(op.get(r"index=(\d+)"))])
  if op.code == "add":
    parts = [_value(part, first) for part in op.operands]
    return None if None in parts else sum(parts)
  return None


def _dot_flops(op: _Op, contracted: str) -> float:
  """Returns the FLOPs of a product; a pattern finds its contracted axes."""
  left = op.operands[0].arrays[0].dims
  axes = _parse_integers(op.get(contracted))
  ways = math.prod(left[axis] for axis in axes)
  return 2.0 * math.prod(op.arrays[0].dims) * ways


def _convolution_flops(op: _Op) -> float:
  """Returns the FLOPs of a product on a TPU, except on padding."""
  labels = re.split("_|->", op.get(r"dim_labels=([\w>-]+)"))
  left, right, out = (
    dict(zip(names, value.arrays[0].dims, strict=True))
    for names, value in zip(labels, (*op.operands, op), strict=True)
  )
  window = re.findall(r"(\w+)=(\S+)", op.get(r"window=\{([^}]*)\}"))
  flops = 2.0 * right["i"] * out["b"] * out["f"]
  for axis in sorted(out.keys() - set("bf")):
    along = {n: _parse_integers(v.split("x")[int(axis)])[0] for n, v in window}
    # Count places of the window that overlap the input, not padding.
    first = np.arange(out[axis])[:, None] * along.get("stride", 1)
    place = first - along.get("pad", 0)  # padding in front
    place = place + np.arange(right[axis]) * along.get("rhs_dilate", 1)
    apart = along.get("lhs_dilate", 1)
    inside = (place >= 0) & (place < left[axis] * apart) & (place % apart == 0)
    flops *= int(inside.sum())
  return flops


# ---------------------------------------------------------------- collectives


def _is_asynchronous(op: _Op) -> bool:
  """Whether a collective on a TPU runs during later fusions."""
  return '"async_collective_fusion_config"' in op.attributes


def _runs_collective(op: _Op) -> bool:
  """Whether a fusion has a part of an asynchronous collective."""
  parts = op.called[0].ops.values() if op.code == "fusion" else ()
  return any(map(_is_asynchronous, parts))


def _begins_collective(op: _Op) -> bool:
  """Whether a collective begins here; TPUs split it into several fusions."""
  if not _is_asynchronous(op):
    return True
  beside = op.home.ops.values()
  return any("AsyncCollectiveStart" in other.attributes for other in beside)


def _collective(op: _Op, kind: str) -> Collective:
  # A device sends a part of a gathered array, or a whole array to be summed.
  size = sum(operand.bytes for operand in op.operands)
  group = _device_group(op.attributes, kind)
  if kind == "all-gather":
    return Collective(kind, size * len(group), group)
  if kind == "all-reduce" and _is_cut(op):
    kind = "reduce-scatter"
  return Collective(kind, size, group)


def _is_cut(op: _Op) -> bool:
  """Whether each device keeps only a part of a sum, as fused on TPUs."""
  users = [user for user, _ in op.users]
  passing_on = {"get-tuple-element", "bitcast"}
  while users and {user.code for user in users} <= passing_on:
    users = [further for user in users for further, _ in user.users]
  return {user.code for user in users} == {"dynamic-slice"}


def _device_group(attributes: str, kind: str) -> tuple[int, ...]:
  """Returns the first group of devices, written in one of four notations."""
  if kind == "collective-permute":
    pairs = re.search(r"source_target_pairs=\{\{(\d+,\d+)\}", attributes)
    return tuple(_parse_integers(pairs[1])) if pairs else (0,)
  text = attributes.partition("replica_groups=")[2]
  if listed := re.match(r"\{\{([\d,]+)\}", text):
    return tuple(_parse_integers(listed[1]))
  if spread := re.match(r"\[\d+,(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
    return tuple(_iota(spread[2])[: int(spread[1])].tolist())
  return _group_of_axes(text)


def _group_of_axes(text: str) -> tuple[int, ...]:
  """Returns a group that is written as axes of a grid of devices.

  An example is `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}`. `'b':(2)2`
  is a part of an axis: size 2, inside an outer part of size 2.
  """
  pattern = r"mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? *\{([^}]*)\}"
  match = re.match(pattern, text)
  if not match:
    raise ValueError(f"cannot read this group of devices: {text[:80]}")
  axes = re.findall(r"'(\w+)'=(\d+)", match[1])
  ids = _iota(match[2] or f"[{math.prod(int(size) for _, size in axes)}]")
  # Split each axis into three parts. The group may have the middle part.
  sizes = []
  index = []
  for name, size in axes:
    part = re.search(rf"'{name}'(?::\((\d+)\)(\d+))?", match[3])
    before = 1
    group_size = int(size) if part else 1
    if part and part[1]:
      before = int(part[1])
      group_size = int(part[2])
    sizes += [before, group_size, int(size) // (before * group_size)]
    index += [0, slice(None), 0]
  return tuple(ids.reshape(sizes)[tuple(index)].reshape(-1).tolist())


def _iota(text: str) -> np.ndarray:
  """Returns numbers in an order such as `[4,2]T(1,0)`, or a list."""
  if not text.startswith("["):
    return np.array(_parse_integers(text))
  sizes, _, order = text.partition("T")
  ids = np.arange(math.prod(_parse_integers(sizes))).reshape(
    _parse_integers(sizes)
  )
  return (ids.transpose(_parse_integers(order)) if order else ids).reshape(-1)


# --------------------------------------------------------- bytes of main memory


def _moved_bytes(op: _Op) -> int:
  """Returns the bytes of main memory that an instruction reads and writes."""
  # AllocateBuffer only reserves memory.
  if _FREE.fullmatch(op.code) or "AllocateBuffer" in op.attributes:
    return 0
  # End of an asynchronous copy or slice, whose start is free. A slice reads no
  # more than its result.
  if op.code.endswith("-done"):
    sources = op.operands[0].operands
    return min(sum(o.far for o in sources), op.bytes) + op.far
  # It reads at most the part of an operand that is not on the chip.
  reads = (
    min(operand.far, _operand_bytes(op, index, operand.bytes))
    for index, operand in enumerate(op.operands)
  )
  return sum(reads) + _result_bytes(op)


def _operand_bytes(op: _Op, index: int, size: int) -> int:
  """Returns the bytes of an operand that an instruction reads."""
  if op.code == "fusion":
    return min(size, _bytes_read(op.called[0].parameter(index), size))
  if index == 0 and op.code in _SLICES:
    return op.bytes
  if index == 0 and op.code in _UPDATES:
    return 0
  return size


def _bytes_read(value: _Op, size: int) -> int:
  """Returns the bytes of a fusion's parameter that its users read."""
  total = 0
  for user, index in value.users:
    if user.code == "bitcast" or _only_sliced(user):
      total += _bytes_read(user, size)
    elif "AsyncCollective" in user.attributes:
      pass  # counted for the collective
    elif _COLLECTIVE.fullmatch(user.code):
      total += size if _begins_collective(user) else 0
    elif user.code != "tuple":
      total += _operand_bytes(user, index, size)
  return total


def _only_sliced(value: _Op) -> bool:
  """Whether a fusion computes only slices of an elementwise result."""
  users = [user for user, _ in value.users]
  return bool(users and value.code in _ELEMENTWISE) and all(
    user.code in _SLICES or _only_sliced(user) for user in users
  )


def _result_bytes(op: _Op) -> int:
  """Returns the bytes of the result that an instruction writes."""
  if op.code in _UPDATES:
    return op.operands[_UPDATES[op.code]].bytes
  if op.code != "fusion":
    return op.far
  # Match the results of the fusion with the instructions that compute them.
  root = op.called[0].root
  parts = root.operands if root.code == "tuple" else [root]
  if len(parts) != len(op.arrays):
    parts = [root] * len(op.arrays)
  # Indices of results that replace an operand.
  aliases = op.get(r"output_to_operand_aliasing=\{(.*?)\)\}")
  aliased = {int(i or 0) for i in re.findall(r"\{(\d*)\}: \(", aliases)}
  total = 0
  for i, (array, part) in enumerate(zip(op.arrays, parts, strict=True)):
    origin = part.origin
    if array.near:
      continue
    if origin.code in _UPDATES:
      total += min(array.bytes, origin.operands[_UPDATES[origin.code]].bytes)
    elif i not in aliased:
      total += min(array.bytes, origin.bytes)
  return total
