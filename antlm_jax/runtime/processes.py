"""Several processes that train one model: how they start, agree and end."""

import concurrent.futures
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

from antlm_jax import errors, private
from antlm_jax.errors import UserError

# launch/local.sh sets these, as may a user who knows the addresses.
EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID")
JOIN = 300  # seconds within which all processes must have started
_HEARTBEAT = 60  # seconds without a heartbeat after which JAX ends the others
_POLL = 1.0  # seconds between two looks at why others have ended
_STAY = 3 * _POLL  # seconds that process 0, which holds the reasons, stays
_FAILED = "antlm_jax/failed/"  # key under which a process says why it ends


def initialize() -> None:
  """Connects this process to the other processes of this run, if it has any.

  Addresses come from the environment (`EXPLICIT`), from Slurm (one process per
  task), or from a TPU pod. If the other processes do not join within `JOIN`
  seconds, this process exits with status 1, so that a supervisor restarts it.

  Raises:
    UserError: The addresses are incomplete or wrong.
  """
  options = _join_options()
  if options is None:
    return
  # JAX's preemption service would replace the handler of SIGTERM with which
  # this package ends all processes.
  jax.config.update("jax_enable_preemption_service", False)
  options |= {
    "heartbeat_timeout_seconds": _HEARTBEAT,
    # JAX aborts the process then, so `_join_processes` gives up earlier.
    "initialization_timeout": 10 * JOIN,
  }
  try:
    _join_processes(options)
  except KeyboardInterrupt as error:
    # A plain exit would wait for the thread that still joins.
    _end(*errors.explain(error))
  except ValueError as error:
    # JAX found no addresses. A TPU host may be alone, not part of a pod.
    if "process_id" in options or not _on_tpu():
      raise UserError(f"cannot join the processes: {error}") from error


def _join_options() -> dict | None:
  """Returns the options of JAX's initialization; None for a single process.

  JAX itself finds the addresses of Slurm and of a TPU pod.
  """
  if any(name in os.environ for name in EXPLICIT):
    options = _explicit_options()
    return options if options["num_processes"] > 1 else None
  if all(name in os.environ for name in _SLURM):
    return {} if int(os.environ.get("SLURM_NTASKS", "1")) > 1 else None
  return {} if _on_tpu() else None


def _explicit_options() -> dict:
  """Returns the options that the variables `EXPLICIT` contain."""
  missing = [name for name in EXPLICIT if not os.environ.get(name)]
  if missing:
    raise UserError(f"{', '.join(missing)} must be set, too")
  address, count, process = (os.environ[name] for name in EXPLICIT)
  numbers = count.isdecimal() and process.isdecimal()
  if not (numbers and int(process) < int(count)):
    raise UserError(
      f"{EXPLICIT[2]}={process} is not one of {EXPLICIT[1]}={count} processes:"
      " they are numbered from 0"
    )
  host, _, port = address.rpartition(":")
  if not (host and port.isdecimal() and 0 < int(port) < 2**16):
    raise UserError(f"{EXPLICIT[0]}={address} is not HOST:PORT")
  try:
    if int(process) == 0 and int(count) > 1:
      # JAX, which listens there next, may crash without a message.
      socket.create_server(("", int(port))).close()
  except OSError as error:
    raise UserError(
      f"{EXPLICIT[0]}={address}: cannot listen there: {error.strerror}: give"
      " another port"
    ) from error
  return {
    "coordinator_address": address,
    "num_processes": int(count),
    "process_id": int(process),
  }


def _on_tpu() -> bool:
  chips = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")
  return bool(chips) and importlib.util.find_spec("libtpu") is not None


def _join_processes(options: dict) -> None:
  """Joins in a thread, since Python handles no signal while JAX waits."""
  pool = concurrent.futures.ThreadPoolExecutor(1)
  joining = pool.submit(jax.distributed.initialize, **options)
  deadline = time.monotonic() + JOIN
  # In short waits, after each of which Python handles signals.
  while not joining.done() and time.monotonic() < deadline:
    concurrent.futures.wait([joining], timeout=_POLL)
  if not joining.done():
    address = options.get("coordinator_address", "the address of the first")
    _end(
      errors.CRASHED,
      f"error: the processes of this run did not all join at {address} within"
      f" {JOIN} s: check that each is running with this address",
    )
  joining.result()


def is_first() -> bool:
  """Whether this is the first process, which prints and writes for all."""
  # A single process need not ask the devices, which takes seconds.
  return not jax.distributed.is_initialized() or jax.process_index() == 0


def largest(values: Callable[[], Sequence[int]]) -> Callable[[], np.ndarray]:
  """Starts to find the elementwise largest of all processes' integers.

  Every process must call it, in the same order among its computations. One
  process alone calls `values` when it asks for the result. Returns a function
  that waits for the result, int32.
  """
  if jax.process_count() == 1:
    return lambda: np.asarray(values(), np.int32)
  # On the devices, in the order of their other computations: a message between
  # hosts would make the host wait for the devices at every step.
  mesh = jax.sharding.Mesh(jax.devices(), ("all",))
  mine = np.asarray(values(), np.int32)[None]
  split = NamedSharding(mesh, PartitionSpec("all"))
  shape = mesh.size, mine.shape[1]
  everyone = jax.make_array_from_callback(shape, split, lambda index: mine)
  with jax.set_mesh(mesh):
    maxima = _columns_largest(everyone)
  return lambda: jax.device_get(maxima)


@jax.jit
def _columns_largest(x: jax.Array) -> jax.Array:
  largest = jnp.max(x, axis=0)
  return jax.lax.with_sharding_constraint(largest, PartitionSpec())


def largest_of_all(value: int) -> int:
  """Returns the largest value of all processes, and waits for all of them."""
  return int(largest(lambda: [value])()[0])


def wait_for_all() -> None:
  """Waits until all processes have called this."""
  largest_of_all(0)


def same_on_all(text: str) -> bool:
  """Whether all processes have the same text; waits for all of them."""
  number = zlib.crc32(text.encode()) >> 1  # an int32
  # The largest and, as the largest of the negated, the smallest.
  high, low = largest(lambda: [number, -number])()
  return bool(high == -low)


@contextlib.contextmanager
def joined() -> Iterator[None]:
  """Joins the other processes of this run for the time of its block.

  An error that ends one process ends all of them within seconds. Each prints
  the reason. If a process is killed, the next computation of the others fails,
  or JAX ends them after `_HEARTBEAT` seconds.
  """
  initialize()
  if jax.process_count() == 1:
    yield
    return
  has_left = threading.Event()
  threading.Thread(target=_watch, args=[has_left], daemon=True).start()
  try:
    yield
  except BaseException as error:
    saved = isinstance(error, errors.Stopped) and error.saved  # as all others
    if not saved:
      _fail(error, has_left)
    raise
  finally:
    has_left.set()


def _watch(has_left: threading.Event) -> None:
  """Ends this process if another process fails before this has left."""
  while not has_left.wait(_POLL):
    try:
      messages = private.key_value_store().key_value_dir_get(_FAILED)
    except jax.errors.JaxRuntimeError as error:
      # Process 0 may have succeeded a moment ago, as this one will.
      if has_left.wait(_STAY):
        return
      _end(errors.CRASHED, f"error: process 0 has ended: {_error_line(error)}")
    for key, text in messages:
      status, _, line = text.partition(" ")
      number = key.removeprefix(_FAILED)
      stay = _STAY if is_first() else 0
      _end(int(status), f"error: process {number} ended: {line}", stay)


def _fail(error: BaseException, has_left: threading.Event) -> None:
  """Tells the other processes about an error, and ends this process."""
  number = jax.process_index()
  explained = errors.explain(error)
  gloo = isinstance(error, ValueError) and "Gloo" in str(error)  # on CPU
  if gloo or isinstance(error, jax.errors.JaxRuntimeError):
    # Another process has probably ended. If it says why, `_watch` repeats that.
    time.sleep(2 * _STAY)
    line = (
      f"error: process {number}: a computation failed, as happens when another"
      f" process ends: {_error_line(error)}"
    )
    explained = errors.CRASHED, line
  elif explained is None:
    traceback.print_exception(error)
    line = f"error: {type(error).__name__}: {_error_line(error)}"
    explained = errors.CRASHED, line
  has_left.set()
  status, line = explained
  with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 has ended
    text = f"{status} {line.removeprefix('error: ')}"
    private.key_value_store().key_value_set(f"{_FAILED}{number}", text)
  _end(status, line, _STAY if is_first() else 0)


def _end(status: int, line: str, stay: float = 0.0) -> None:
  """Ends without JAX's own end, which would wait for the other processes."""
  print(line, file=sys.stderr)
  sys.stdout.flush()
  sys.stderr.flush()
  time.sleep(stay)
  os._exit(status)


def _error_line(error: BaseException) -> str:
  return (str(error) or type(error).__name__).splitlines()[0][:200]
