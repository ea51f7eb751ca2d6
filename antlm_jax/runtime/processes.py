"""Several processes that train one model: how they start, agree and end."""

import contextlib
import glob
import importlib.util
import os
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from antlm_jax import errors
from antlm_jax.errors import UserError
from antlm_jax.runtime import signals

# Given by launch/local.sh, or by whoever knows the addresses.
EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID")
JOIN = 300  # seconds within which all processes must have begun
_HEARTBEAT = 60  # seconds without a sign after which a process counts as dead
_POLL = 1.0  # seconds between looks at what the others say
_STAY = 3 * _POLL  # how long what is said is there: the first process keeps it
_FAILED = "antlm_jax/failed/"  # where a process says why it ends


def initialize() -> None:
  """Joins the processes of this run, if it has several.

  They are found by explicit addresses (`EXPLICIT`), by Slurm's environment
  (a task for each process), or on TPU hosts by what the pod says of itself.
  A process that the others do not join within `JOIN` seconds ends with status
  1: a crash, to be run again, as they may be on their way.

  Raises:
    UserError: if the addresses are not whole, or taken.
  """
  options = _found()
  if options is None:
    return
  # Its handler would take SIGTERM from ours, which ends all alike.
  jax.config.update("jax_enable_preemption_service", False)
  options |= {
    "heartbeat_timeout_seconds": _HEARTBEAT,
    "initialization_timeout": 10 * JOIN,  # after which JAX aborts
  }
  try:
    with signals.listening():
      _join(options)
  except KeyboardInterrupt as error:
    status, line = errors.explain(error)
    print(line, file=sys.stderr)
    _end(status)
  except ValueError as error:
    if "process_id" in options or not _on_tpu():
      raise UserError(f"these processes cannot be joined: {error}") from error
    # A TPU host that is not part of a pod.


def _found() -> dict | None:
  """What is known of where the processes are; None if this is the only one."""
  # JAX_COORDINATOR_ADDRESS alone may be left over from something else.
  if any(name in os.environ for name in EXPLICIT[1:]):
    options = _explicit()
    return options if options["num_processes"] > 1 else None
  if all(name in os.environ for name in _SLURM):
    count = os.environ.get("SLURM_NTASKS", "1")
    if not count.isdecimal():
      raise UserError(f"SLURM_NTASKS={count} is no number of tasks")
    return {} if int(count) > 1 else None
  if _on_tpu():
    return {}
  if EXPLICIT[0] in os.environ:
    _explicit()  # says what is missing
  return None


def _join(options: dict) -> None:
  """Waits for all in a thread, as Python hears no signal while JAX waits."""
  failed = []

  def join():
    try:
      jax.distributed.initialize(**options)
    except BaseException as error:
      failed.append(error)

  thread = threading.Thread(target=join, daemon=True)
  thread.start()
  # In short waits: a signal that reaches another thread, or the moment before
  # a wait, is handled only when that wait ends.
  deadline = time.monotonic() + JOIN
  while thread.is_alive() and time.monotonic() < deadline:
    thread.join(_POLL)
  if thread.is_alive():
    where = options.get("coordinator_address", "the address of the first")
    _say(
      f"the processes of this run did not all come together at {where} within"
      f" {JOIN} s: is each of them running, and given the same address?"
    )
    _end(1)
  for error in failed:
    raise error


def _explicit() -> dict:
  missing = [name for name in EXPLICIT if not os.environ.get(name)]
  if missing:
    raise UserError(f"{', '.join(missing)} must be set with the others of them")
  address, *numbers = (os.environ[name] for name in EXPLICIT)
  try:
    count, process = map(int, numbers)
  except ValueError:
    count, process = 0, 0
  if not 0 <= process < count:
    raise UserError(
      f"{EXPLICIT[2]}={numbers[1]} is not one of {EXPLICIT[1]}={numbers[0]}"
      " processes: they are numbered from 0"
    )
  host, _, port = address.rpartition(":")
  if not (host and port.isdigit() and 0 < int(port) < 2**16):
    raise UserError(f"{EXPLICIT[0]}={address} is not HOST:PORT")
  if process == 0 and count > 1:
    _check_port(address, int(port))
  return {
    "coordinator_address": address,
    "num_processes": count,
    "process_id": process,
  }


def _check_port(address: str, port: int) -> None:
  """Checks what JAX, which listens there next, would crash at."""
  try:
    socket.create_server(("", port)).close()
  except OSError as error:
    raise UserError(
      f"{EXPLICIT[0]}={address}: cannot listen there: {error.strerror}: give"
      " another port"
    ) from error


def _on_tpu() -> bool:
  chips = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")
  return bool(chips) and importlib.util.find_spec("libtpu") is not None


def is_first() -> bool:
  """Whether this process is the one that prints and writes for all."""
  # A single process need not ask the devices, which takes seconds.
  return not jax.distributed.is_initialized() or jax.process_index() == 0


def largest(values: Callable[[], Sequence[int]]) -> Callable[[], np.ndarray]:
  """Begins to find the elementwise largest of all processes' whole numbers.

  Every process must call it, in the same order among its computations. With
  others the values are taken now and compared on the devices, before what is
  computed next; alone they are taken when they are asked for.

  Returns:
    A function that waits for the result, int32.
  """
  if jax.process_count() == 1:
    return lambda: np.asarray(values(), np.int32)
  # On the devices, in the order of all else that they compute: a message
  # beside it would make the host wait for them at every step.
  mesh = jax.sharding.Mesh(jax.devices(), ("all",))
  mine = np.asarray(values(), np.int32)[None]
  everyone = jax.make_array_from_callback(
    (mesh.size, mine.shape[1]),
    NamedSharding(mesh, PartitionSpec("all")),
    lambda index: mine,
  )
  with jax.set_mesh(mesh):
    found = _columns_largest(everyone)
  return lambda: jax.device_get(found)


@jax.jit
def _columns_largest(x: jax.Array) -> jax.Array:
  largest = jnp.max(x, axis=0)
  return jax.lax.with_sharding_constraint(largest, PartitionSpec())


def agreed(value: int) -> int:
  """Returns the largest of what the processes say; waits for all of them."""
  return int(largest(lambda: [value])()[0])


def same(text: str) -> bool:
  """Whether all processes say the same; waits for all of them."""
  number = zlib.crc32(text.encode()) >> 1  # an int32
  # The largest and, as the largest of the negated, the smallest.
  high, low = largest(lambda: [number, -number])()
  return bool(high == -low)


def is_of_a_computation(error: BaseException) -> bool:
  """Whether a computation failed, as it does when another process ends."""
  # On CPU it is gloo that says so, in a ValueError.
  return isinstance(error, jax.errors.JaxRuntimeError) or (
    isinstance(error, ValueError) and "Gloo" in str(error)
  )


@contextlib.contextmanager
def together() -> Iterator[None]:
  """Joins the other processes for the time of its block.

  What ends one of them with an error ends all, within a bounded time and with
  a line that says which and why. One that dies without a word is missed by the
  next computation or, where that waits, after `_HEARTBEAT` seconds by JAX.
  """
  initialize()
  if jax.process_count() == 1:
    yield
    return
  peers = _Peers()
  try:
    yield
  except BaseException as error:
    if isinstance(error, errors.Stopped) and error.saved:  # all of them
      peers.leave()
      raise
    peers.fail(error)
  peers.leave()


class _Peers:
  """Tells the other processes of this one's failure, and ends with theirs."""

  def __init__(self):
    # JAX has no public name for its key-value store; orbax takes it here, too.
    from jax._src import distributed

    self._store = distributed.global_state.client
    self._left = threading.Event()
    threading.Thread(target=self._watch, daemon=True).start()

  def leave(self) -> None:
    """Stops looking at the others: they may end."""
    self._left.set()

  def fail(self, error: BaseException) -> None:
    """Says what happened, to the others as well, and ends the process."""
    me = jax.process_index()
    told = errors.explain(error)
    # What is told first counts: the process at fault is to be the one named.
    if is_of_a_computation(error):
      time.sleep(2 * _STAY)  # mostly a peer's end, who may be about to say why
      line = (
        f"error: process {me}: a computation failed, as it does when another"
        f" process ends: {_line(error)}"
      )
      told = errors.CRASHED, line
    elif told is None:
      traceback.print_exception(error)
      told = errors.CRASHED, f"{type(error).__name__}: {_line(error)}"
    self._left.set()
    status, line = told
    print(line, file=sys.stderr)
    with contextlib.suppress(Exception):
      text = f"{status} {line.removeprefix('error: ')}"
      self._store.key_value_set(f"{_FAILED}{me}", text)
    self._end(status)

  def _watch(self) -> None:
    while not self._left.wait(_POLL):
      try:
        said = self._store.key_value_dir_get(_FAILED)
      except jax.errors.JaxRuntimeError as error:
        # The store goes with process 0, which may have ended well just now.
        if self._left.wait(_STAY):
          return
        _say(
          f"process 0, which keeps the others together, is gone: {_line(error)}"
        )
        _end(1)
      for key, text in said:
        status, _, line = text.partition(" ")
        _say(f"process {key.rpartition('/')[2]} ended: {line}")
        self._end(int(status))

  def _end(self, status: int) -> None:
    """Ends, the first process after all others have heard why."""
    if is_first():
      time.sleep(_STAY)
    _end(status)


def _say(line: str) -> None:
  print(f"error: {line}", file=sys.stderr, flush=True)


def _end(status: int) -> None:
  """Ends at once: JAX's own end would wait for the others."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def _line(error: Exception) -> str:
  return (str(error) or type(error).__name__).splitlines()[0][:200]
