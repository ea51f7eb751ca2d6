"""Compilers for TPUs and GPUs that this machine may lack.

`pip install 'antlm_jax[plan-tpu]'` and `[plan-gpu]` install them as packages.
`launch/setup.sh` installs them in separate folders next to the packages.
"""

import glob
import importlib.util
import os
import pathlib
import sys

from antlm_jax.errors import UserError

_TPUS = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
_GPUS = ("/dev/nvidia*", "/dev/dxg", "/dev/kfd")


def libtpu() -> pathlib.Path | None:
  """Returns the compiler for TPUs, or None if it is not installed."""
  spec = importlib.util.find_spec("libtpu")
  if spec is not None and spec.origin:
    return pathlib.Path(spec.origin).with_name("libtpu.so")
  apart = pathlib.Path(sys.prefix, "libtpu/libtpu/libtpu.so")
  return apart if apart.exists() else None


def cuda() -> pathlib.Path | None:
  """Returns XLA's compiler for NVIDIA GPUs, or None if it is not installed."""
  spec = importlib.util.find_spec("jax_plugins")
  places = spec.submodule_search_locations if spec else ()
  for place in (*places, f"{sys.prefix}/cuda-compiler/jax_plugins"):
    for path in pathlib.Path(place).glob("xla_cuda*/xla_cuda_plugin.so"):
      return path
  return None


def missing_compiler(devices: str, extra: str, name: str) -> UserError:
  """Returns an error about a compiler that is not installed.

  Args:
    devices: Devices, such as TPUs.
    extra: Extra of the package that installs it.
    name: Its name for launch/setup.sh, which only a checkout has.
  """
  setup = pathlib.Path(__file__).parents[2] / "launch/setup.sh"
  remedy = f"pip install 'antlm_jax[{extra}]'"
  if setup.exists():
    remedy = f"./launch/setup.sh {name}"
  return UserError(f"plans for {devices} need a compiler: {remedy}")


def ignore_absent_devices() -> None:
  """Makes JAX use the CPU on a machine that has compilers but no device.

  Otherwise JAX would search for a TPU or GPU and print long warnings. Call this
  before the import of JAX. JAX_PLATFORMS takes precedence.
  """
  devices = any(glob.glob(pattern) for pattern in _TPUS + _GPUS)
  if not devices and (libtpu() or cuda()):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
