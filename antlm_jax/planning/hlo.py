"""What a compiled program does, counted from its text.

XLA's cost analysis counts the body of a loop once. Here the text of a
compiled and scheduled program (`jax.stages.Compiled.as_text`) is read, and
what is in a body counts as often as it runs.
"""

import collections
import dataclasses
import functools
import math
import re

import numpy as np

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%(\S+) = ")
_CALLED = re.compile(
  r"(?:calls|to_apply|body|true_computation|false_computation)=%([\w.\-]+)"
)
# What moves nothing, or whose parts are counted by themselves.
_FREE = {
  "after-all", "bitcast", "call", "conditional", "constant",
  "get-tuple-element", "opt-barrier", "parameter", "partition-id",
  "replica-id", "tuple", "while",
}  # fmt: skip
_COLLECTIVES = (
  "all-gather", "all-reduce", "all-to-all", "collective-broadcast",
  "collective-permute", "ragged-all-to-all", "reduce-scatter",
)  # fmt: skip
_SLICES = ("dynamic-slice", "gather", "slice")
# Which operand holds what is written in place of a part of the first.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective operation, seen from one device.

  Attributes:
    kind: What it is, such as all-gather.
    bytes: Size of the array that is gathered, reduced or sent.
    group: The devices that take part, by their place in the mesh; the first
      of the groups. Without any, it is between slices.
    slices: The number of slices that it is between.
  """

  kind: str
  bytes: int
  group: tuple[int, ...] = ()
  slices: int = 0

  @property
  def sent(self) -> float:
    """Bytes that a device sends, if the group is a ring."""
    n = len(self.group) or self.slices
    if self.kind in ("collective-permute", "collective-broadcast"):
      return self.bytes
    return self.bytes * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)


@dataclasses.dataclass
class Counts:
  """What one device does in a run of a program.

  Attributes:
    flops: Operations of matrix products, two per multiplication and addition.
    kernel_flops: Those that the kernels say they do, by their names.
    bytes: Bytes read from and written to the main memory, each operand of an
      instruction once: what a kernel or a product loads again is not in it.
    collectives: How often each collective happens.
    unknown_loops: Loops whose number of passes was not found; their bodies
      count once.
  """

  flops: float = 0.0
  kernel_flops: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  bytes: float = 0.0
  collectives: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  unknown_loops: int = 0

  def add(self, other: "Counts", times: int = 1) -> None:
    """Adds what happens `times` times."""
    self.flops += times * other.flops
    self.bytes += times * other.bytes
    self.unknown_loops += other.unknown_loops
    for name in ("kernel_flops", "collectives"):
      for key, count in getattr(other, name).items():
        getattr(self, name)[key] += times * count


def count(text: str) -> Counts:
  """Counts what a compiled program does.

  Args:
    text: The program after all of XLA's optimizations.
  """
  return _Program(text).count()


@dataclasses.dataclass(frozen=True)
class _Array:
  """An array's type, size and place; `near` if not in the main memory."""

  dims: tuple[int, ...]
  bytes: int
  near: bool


@dataclasses.dataclass(frozen=True)
class _Op:
  """An instruction.

  Attributes:
    name: Its name.
    code: What it does, such as fusion.
    shape: Text of its result's shape.
    inside: Text between the parentheses: operands, or a constant's value.
    attributes: Text after them.
  """

  name: str
  code: str
  shape: str
  inside: str
  attributes: str

  @classmethod
  def parse(cls, line: str, begin: re.Match) -> "_Op":
    shape_end = _closing(line, begin.end())
    opening = line.index("(", shape_end)
    end = _closing(line, opening)
    return cls(
      name=begin[2],
      code=line[shape_end:opening].strip(),
      shape=line[begin.end() : shape_end],
      inside=line[opening + 1 : end - 1],
      attributes=line[end:],
    )

  @functools.cached_property
  def operands(self) -> list[str]:
    return re.findall(r"%([\w.\-]+)", self.inside)

  @functools.cached_property
  def arrays(self) -> list[_Array]:
    return [_array(*found) for found in _ARRAY.findall(self.shape)]

  @property
  def bytes(self) -> int:
    return sum(array.bytes for array in self.arrays)

  def called(self) -> list[str]:
    """Names of the computations that it runs, but for a loop's condition."""
    branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
    if branches:
      return re.findall(r"%([\w.\-]+)", branches[1])
    return _CALLED.findall(self.attributes)

  def get(self, pattern: str) -> str:
    """The first group of a pattern in the attributes; empty if not there."""
    found = re.search(pattern, self.attributes)
    return found[1] if found else ""


def _closing(line: str, start: int) -> int:
  """Where what begins at `start` ends: its parentheses, or its word."""
  if line[start] != "(":
    return line.index(" ", start)
  depth = 0
  for found in re.compile(r"[()]").finditer(line, start):
    depth += 1 if found[0] == "(" else -1
    if not depth:
      return found.end()
  raise ValueError(f"parentheses do not close: {line[:80]}")


def _array(kind: str, dims: str, layout: str) -> _Array:
  sizes = tuple(int(d) for d in dims.split(",") if d)
  bits = re.search(r"\d+", kind)
  bits = int(bits[0]) if bits else 8 * (kind == "pred")
  near = "S(" in layout
  return _Array(sizes, math.prod(sizes) * bits // 8, near)


class _Computation:
  """A list of instructions, and who uses each of them."""

  def __init__(self):
    self.ops: dict[str, _Op] = {}
    self.root = ""
    self._users: dict[str, list[tuple[_Op, int]]] | None = None

  def users(self, name: str) -> list[tuple[_Op, int]]:
    """The instructions that use one, and which operand of theirs it is."""
    if self._users is None:
      self._users = collections.defaultdict(list)
      for op in self.ops.values():
        for index, operand in enumerate(op.operands):
          self._users[operand].append((op, index))
    return self._users[name]

  def parameter(self, index: int) -> str:
    """The name of a parameter."""
    return next(
      op.name
      for op in self.ops.values()
      if op.code == "parameter" and op.inside == str(index)
    )

  def origin(self, name: str) -> _Op:
    """The instruction that made a value, before it was only passed on."""
    op = self.ops[name]
    while op.code in ("bitcast", "copy", "reshape"):
      op = self.ops[op.operands[0]]
    return op


class _Program:
  """A program's computations, and the counting of them."""

  def __init__(self, text: str):
    self.computations: dict[str, _Computation] = {}
    self.entry = ""
    self._done: dict[str, Counts] = {}
    current = None
    for line in text.splitlines():
      if begin := _LINE.match(line):
        op = _Op.parse(line, begin)
        current.ops[op.name] = op
        if begin[1]:
          current.root = op.name
      elif head := _HEAD.match(line):
        current = self.computations[head[2]] = _Computation()
        if head[1]:
          self.entry = head[2]

  def count(self) -> Counts:
    return self._scheduled(self.entry)

  def _scheduled(self, name: str) -> Counts:
    """Counts a computation whose instructions run one after another."""
    if name not in self._done:
      out, computation = Counts(), self.computations[name]
      for op in computation.ops.values():
        self._add(out, computation, op)
      self._done[name] = out
    return self._done[name]

  def _add(self, out: Counts, computation: _Computation, op: _Op) -> None:
    out.bytes += self._moved(computation, op)
    if op.code == "while":
      passes = self._passes(computation, op)
      out.unknown_loops += passes is None
      (body,) = op.called()
      out.add(self._scheduled(body), 1 if passes is None else passes)
    elif op.code == "conditional":
      branches = [self._scheduled(branch) for branch in op.called()]
      out.add(max(branches, key=lambda b: (b.flops, b.bytes)))
    elif op.code in ("call", "async-start"):
      for callee in op.called():
        out.add(self._scheduled(callee))
    else:
      self._work(out, computation, op)

  # What is computed and sent.

  def _work(self, out: Counts, computation: _Computation, op: _Op) -> None:
    """Adds an instruction's products and collectives, also inside fusions."""
    kind = op.code.removesuffix("-start")
    if op.code == "fusion":
      inner = self.computations[op.called()[0]]
      for part in inner.ops.values():
        self._work(out, inner, part)
    elif op.code == "dot":
      out.flops += _dot_flops(op, computation)
    elif op.code == "convolution":
      out.flops += _convolution_flops(op, computation)
    elif kind in _COLLECTIVES and self._begins(computation, op):
      out.collectives[self._collective(computation, op, kind)] += 1
    elif op.code == "send" and "_xla_megascale_target" in op.attributes:
      out.collectives[_between_slices(op)] += 1
    elif 'custom_call_target="tpu_custom_call"' in op.attributes:
      said = op.get(r'"cost_estimate":\{"flops":"(\d+)"')
      name = re.sub(r"[.\d]+$", "", op.name)
      out.kernel_flops[name] += float(said or 0)

  def _begins(self, computation: _Computation, op: _Op) -> bool:
    """Whether a collective begins here.

    TPUs spread one over several fusions, each of which names it again.
    """
    if '"async_collective_fusion_config"' not in op.attributes:
      return True
    return any(
      "AsyncCollectiveStart" in o.attributes for o in computation.ops.values()
    )

  def _collective(self, computation, op: _Op, kind: str) -> Collective:
    given = sum(computation.ops[o].bytes for o in op.operands)
    group = _group(op.attributes, kind)
    if kind == "all-gather":
      return Collective(kind, given * len(group), group)
    if kind == "all-reduce" and _is_cut(computation, op):
      kind = "reduce-scatter"
    return Collective(kind, given, group)

  # How often a loop runs.

  def _passes(self, computation: _Computation, op: _Op) -> int | None:
    known = op.get(r'"known_trip_count":\{"n":"(\d+)"')
    if known:
      return int(known)
    test = self.computations[op.get(r"condition=%([\w.\-]+)")]
    body = self.computations[op.get(r"body=%([\w.\-]+)")]
    root = test.ops[test.root]
    if root.code != "compare" or "direction=LT" not in root.attributes:
      return None
    first = computation.ops[op.operands[0]]

    def at_first(name: str) -> int | None:  # a value of the test, on entry
      value = test.origin(name)
      index = value.get(r"index=(\d+)")
      if value.code == "get-tuple-element" and first.code == "tuple":
        return _constant(computation, first.operands[int(index)])
      return _constant(test, name)

    counter = test.origin(root.operands[0]).get(r"index=(\d+)")
    begin, end = map(at_first, root.operands)
    step = _step(body, int(counter)) if counter else None
    if None in (begin, end, step) or step <= 0:
      return None
    return max(0, -(-(end - begin) // step))

  # What goes through the main memory.

  def _moved(self, computation: _Computation, op: _Op) -> int:
    """Bytes that an instruction reads from and writes to the main memory."""
    if op.code in _FREE or op.code.endswith(("-start", "-update")):
      return 0
    if "AllocateBuffer" in op.attributes:
      return 0
    if op.code.endswith("-done"):  # where all is known of a copy
      return self._copied(computation, op)
    reads = 0
    for index, name in enumerate(op.operands):
      operand = computation.ops[name]
      far = sum(a.bytes for a in operand.arrays if not a.near)
      reads += min(far, self._read(op, index, operand.bytes))
    return reads + self._written(computation, op)

  def _copied(self, computation: _Computation, op: _Op) -> int:
    start = computation.ops[op.operands[0]]
    sources = [computation.ops[name] for name in start.operands]
    far = sum(a.bytes for o in sources for a in o.arrays if not a.near)
    written = sum(a.bytes for a in op.arrays if not a.near)
    return min(far, op.bytes) + written

  def _read(self, op: _Op, index: int, whole: int) -> int:
    """How much of an operand an instruction reads."""
    if op.code == "fusion":
      inner = self.computations[op.called()[0]]
      return min(whole, self._used(inner, inner.parameter(index), whole))
    if op.code in _SLICES and index == 0:
      return op.bytes
    if op.code in _UPDATES and index == 0:
      return 0
    return whole

  def _used(self, inner: _Computation, name: str, whole: int) -> int:
    """How much of a value is read by those that use it."""
    total = 0
    for user, index in inner.users(name):
      if user.code == "bitcast":
        total += self._used(inner, user.name, whole)
      elif "AsyncCollective" in user.attributes:
        pass  # what begins, goes on or ends here is the collective's to read
      elif user.code in _COLLECTIVES:
        total += whole if self._begins(inner, user) else 0
      elif user.code != "tuple":
        total += self._read(user, index, whole)
    return total

  def _written(self, computation: _Computation, op: _Op) -> int:
    """Bytes of its result that an instruction writes."""
    if op.code in _UPDATES:
      return computation.ops[op.operands[_UPDATES[op.code]]].bytes
    if op.code != "fusion":
      return sum(a.bytes for a in op.arrays if not a.near)
    inner = self.computations[op.called()[0]]
    root = inner.ops[inner.root]
    parts = root.operands if root.code == "tuple" else [root.name]
    if len(parts) != len(op.arrays):
      parts = [root.name] * len(op.arrays)
    kept = _in_place(op)
    return sum(
      min(array.bytes, self._made(inner, part, i in kept))
      for i, (array, part) in enumerate(zip(op.arrays, parts, strict=True))
      if not array.near
    )

  def _made(self, inner: _Computation, name: str, in_place: bool) -> int:
    """How much of one of a fusion's results is new."""
    op = inner.origin(name)
    if op.code in _UPDATES:
      return inner.ops[op.operands[_UPDATES[op.code]]].bytes
    return 0 if in_place else op.bytes


def _in_place(op: _Op) -> set[int]:
  """Which of a fusion's results lie where an operand did."""
  said = op.get(r"output_to_operand_aliasing=\{(.*?)\)\}")
  return {int(i or 0) for i in re.findall(r"\{(\d*)\}: \(", said)}


# Loops.


def _constant(computation: _Computation, name: str) -> int | None:
  """The value of an integer constant; None if it is not one."""
  op = computation.origin(name)
  found = op.code == "constant" and re.fullmatch(r"-?\d+", op.inside)
  return int(op.inside) if found else None


def _step(body: _Computation, index: int) -> int | None:
  """By how much a loop's body raises an element of what it carries."""
  root = body.ops[body.root]
  if root.code != "tuple":
    return None
  op = body.origin(root.operands[index])
  if op.code != "add":
    return None
  before = [body.origin(name).get(r"index=(\d+)") for name in op.operands]
  values = [_constant(body, name) for name in op.operands]
  return values[1 - before.index(str(index))] if str(index) in before else None


# Matrix products, as XLA's cost analysis counts them.


def _dot_flops(op: _Op, computation: _Computation) -> float:
  (out,), left = op.arrays, computation.ops[op.operands[0]].arrays[0]
  contracted = op.get(r"lhs_contracting_dims=\{([\d,]*)\}")
  ways = math.prod(left.dims[int(d)] for d in contracted.split(",") if d)
  return 2.0 * math.prod(out.dims) * ways


def _convolution_flops(op: _Op, computation: _Computation) -> float:
  """On a TPU every product is a convolution, at times with a padded window.

  What falls on padding is not computed.
  """
  left, right = (computation.ops[name].arrays[0].dims for name in op.operands)
  out = op.arrays[0].dims
  labels = op.get(r"dim_labels=([\w>-]+)")
  of_left, of_right, of_out = re.split("_|->", labels)
  window = op.get(r"window=\{([^}]*)\}")
  flops = 2.0 * right[of_right.index("i")]
  flops *= out[of_out.index("b")] * out[of_out.index("f")]
  for axis in range(len(of_out) - 2):
    flops *= _pairs(
      left[of_left.index(str(axis))],
      right[of_right.index(str(axis))],
      out[of_out.index(str(axis))],
      lambda name, axis=axis: _window(window, name, axis),
    )
  return flops


def _window(window: str, name: str, axis: int) -> int:
  """A window's setting along an axis; of a padding, the part in front."""
  found = re.search(rf"\b{name}=(\S+)", window)
  if not found:
    return 0 if name == "pad" else 1
  return int(found[1].split("x")[axis].split("_")[0])


def _pairs(left: int, right: int, out: int, setting) -> int:
  """How many places of the window meet a place of the input, on one axis."""
  first = np.arange(out)[:, None] * setting("stride") - setting("pad")
  place = first + np.arange(right) * setting("rhs_dilate")
  apart = setting("lhs_dilate")
  inside = (place >= 0) & (place < left * apart) & (place % apart == 0)
  return int(inside.sum())


# Which devices take part.


def _between_slices(op: _Op) -> Collective:
  """What is handed to the host, to be exchanged between slices."""
  kind = op.get(r'_xla_megascale_transfer_type="(\w+)"')
  target = op.get(r'_xla_megascale_target="\{([\d,:]+)\}')
  slices = 0
  for part in target.split(","):  # 1,2 or 1:2
    first, _, last = part.partition(":")
    slices += int(last or first) - int(first) + 1
  kind = kind.lower().replace("_", "-")
  return Collective(kind, op.arrays[0].bytes, slices=slices)


def _group(attributes: str, kind: str) -> tuple[int, ...]:
  """The first group of devices, however it is written."""
  if kind == "collective-permute":
    pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes)
    return tuple(map(int, pairs.groups())) if pairs else (0,)
  text = attributes.partition("replica_groups=")[2]
  if listed := re.match(r"\{\{([\d,]+)\}", text):
    return tuple(map(int, listed[1].split(",")))
  if spread := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
    ids = _iota(spread[2]).reshape(_numbers(spread[1]))
    return tuple(map(int, ids[0]))
  return _group_of_axes(text)


def _group_of_axes(text: str) -> tuple[int, ...]:
  """The group as axes of a grid of devices.

  Written as `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}`; of an axis,
  `'b':(2)2` is a part: of size 2, within it one of size 4 / (2 * 2).
  """
  found = re.match(
    r"mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? *\{([^}]*)\}", text
  )
  if not found:
    raise ValueError(f"which devices take part cannot be read: {text[:80]}")
  axes = re.findall(r"'(\w+)'=(\d+)", found[1])
  ids = np.arange(math.prod(int(size) for _, size in axes))
  if found[2]:
    ids = _iota(found[2])
  sizes, mine = [], []
  for name, size in axes:
    part = re.search(rf"'{name}'(?::\((\d+)\)(\d+))?", found[3])
    before, taken = 1, int(size) if part else 1
    if part and part[1]:
      before, taken = int(part[1]), int(part[2])
    sizes += [before, taken, int(size) // (before * taken)]
    mine += [0, slice(None), 0]
  return tuple(map(int, ids.reshape(sizes)[tuple(mine)].reshape(-1)))


def _iota(text: str) -> np.ndarray:
  """Numbers from 0 on in the order of `[4,2]T(1,0)`, or those listed."""
  found = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
  if not found:
    return np.array(_numbers(text))
  ids = np.arange(math.prod(_numbers(found[1]))).reshape(_numbers(found[1]))
  return (ids.transpose(_numbers(found[2])) if found[2] else ids).reshape(-1)


def _numbers(text: str) -> list[int]:
  return [int(n) for n in text.split(",")]


def _is_cut(computation: _Computation, op: _Op) -> bool:
  """Whether each device keeps but a part of a sum: TPUs fuse the two."""
  users = [user for user, _ in computation.users(op.name)]
  while users and all(
    u.code in ("get-tuple-element", "bitcast") for u in users
  ):
    users = [v for u in users for v, _ in computation.users(u.name)]
  return bool(users) and all(u.code == "dynamic-slice" for u in users)
