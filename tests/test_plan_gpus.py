"""Plans of runs on absent GPUs."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from antlm_jax import mesh as mesh_lib
from antlm_jax.commands import plan
from antlm_jax.planning import (
  compilers,
  estimate,
  forecast,
  gpus,
  hlo,
  places,
  search,
  topology,
)
from antlm_jax.planning.hlo import Collective
from antlm_jax.planning.network import Network
from antlm_jax.runtime import chips
from tests import runs
from tests.test_plan import SMALL

needs_compiler = pytest.mark.skipif(
  compilers.cuda() is None,
  reason="XLA's compiler for GPUs is not installed: launch/setup.sh"
  " cuda-compiler (400 MB)",
)


@pytest.fixture
def small(tmp_path):
  """A config file of a small encoder without evaluations."""
  path = tmp_path / "small.py"
  path.write_text(SMALL)
  return str(path)


def described(name: str, nodes: int, each: int):
  """Returns a stand-in for a mesh of GPUs with nodes along `data`."""
  kind = gpus.GPUS[name].kind
  devices = [
    types.SimpleNamespace(device_kind=kind, platform="gpu", process_index=node)
    for node in range(nodes)
    for _ in range(each)
  ]
  grid = np.array(devices).reshape(nodes, each, 1)
  names = "data", "fsdp", "tensor"
  return types.SimpleNamespace(devices=grid, axis_names=names, size=grid.size)


@pytest.mark.parametrize(
  "name, group, rate, axes",
  [
    # NVLink's 900 and 1,800 GB/s are the sums of both directions.
    ("h100", range(8), 450e9, ("fsdp",)),
    ("h200", range(4), 450e9, ("fsdp",)),
    ("b200", range(8), 900e9, ("fsdp",)),
    # Between nodes, each GPU of the ring has a network card of 400 Gb/s.
    ("h100", range(32), 400e9, ("data", "fsdp", "nodes")),
    ("b200", range(32), 400e9, ("data", "fsdp", "nodes")),
    ("h100", (0, 1, 8, 9), 100e9, ("data", "fsdp", "nodes")),
    ("h100", range(0, 32, 8), 50e9, ("data", "nodes")),
    # NVIDIA A100: 600 GB/s both ways, and eight cards of 200 Gb/s.
    ("a100-80", range(8), 300e9, ("fsdp",)),
    ("a100-40", range(0, 32, 8), 25e9, ("data", "nodes")),
    # Without NVLink, 16 lanes of PCI Express 4.0 or 5.0.
    ("rtx4090", range(8), 31.5e9, ("fsdp",)),
    ("rtx5090", range(8), 63e9, ("fsdp",)),
  ],
)
def test_a_ring_goes_through_nvlink_and_the_cards(name, group, rate, axes):
  network, group = Network(described(name, 4, 8)), tuple(group)
  n = len(group)
  gather = Collective("all-gather", 10**9, group)
  assert np.isclose(network.seconds(gather), 1e9 * (n - 1) / n / rate)
  permute = Collective("collective-permute", 10**9, group[:2])
  near = group[1] < 8
  cards = {"a100-40": 25e9}.get(name, 50e9)
  links = {"b200": 900e9, "h100": 450e9, "h200": 450e9}.get(name, rate)
  assert np.isclose(network.seconds(permute), 1e9 / (links if near else cards))
  assert network.axes(group) == axes


def test_of_a_gpus_memory_there_is_what_jax_takes(monkeypatch):
  device = described("h100", 1, 1).devices.flat[0]
  whole = chips.CHIPS["NVIDIA H100"].memory
  monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
  assert chips.chip_of(device).memory == int(0.92 * whole)
  chips.take_memory()
  assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.92"
  monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
  chips.take_memory()
  assert chips.chip_of(device).memory == int(0.9 * whole)
  # JAX refuses both the variable and its older name.
  monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
  monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
  chips.take_memory()
  assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
  assert chips.chip_of(device).memory == int(0.5 * whole)


@pytest.mark.parametrize(
  "kind, flops, capability",
  [
    ("NVIDIA GeForce RTX 3090", 71e12, 8.6),
    ("NVIDIA GeForce RTX 3090 Ti", None, 8.6),
    ("NVIDIA GeForce RTX 4090", 165.2e12, 8.9),
    ("NVIDIA GeForce RTX 4090 D", None, 8.9),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None, 8.9),
    ("NVIDIA A10", 125e12, 8.6),
    ("NVIDIA A10G", 70e12, 8.6),
    ("NVIDIA H100 80GB HBM3", 989e12, 9.0),
    ("NVIDIA H100 PCIe", 756e12, 9.0),
  ],
)
def test_a_card_has_its_own_peaks(kind, flops, capability):
  """A name that begins with another card's does not get its peaks."""
  device = types.SimpleNamespace(device_kind=kind, platform="gpu")
  chip = chips.chip_of(device)
  assert (chip and chip.flops) == flops
  assert mesh_lib.capability(kind) == capability


def test_every_gpu_of_the_compiler_is_a_topology():
  """A GPU in one of the two lists alone could be planned, but not costed."""
  for name, gpu in gpus.GPUS.items():
    place = places.parse_topology(f"{name}:2")
    assert place.devices == 2 and not place.is_tpu
    assert place.chip == chips.usable(chips.chip_kind(gpu.kind))
    assert place.chip.watts and place.chip.bandwidth and place.chip.links


@pytest.mark.parametrize(
  "words, said",
  [
    ("h100:", "'h100:': write h100:8 (one node of at most 8)"),
    ("h100", "'h100': write h100:8"),
    ("h200:0", "'h200:0': write h200:8"),
    ("b200:16", "'b200:16': write b200:8"),
    ("h100:4x", "or h100:4x8 (at most 1,024 nodes)"),
    ("h100:2000x8", "'h100:2000x8': write"),
    ("h100:2x2x2", "'h100:2x2x2': write"),
    ("h100:8 --slices=2", "h100:8 includes its nodes"),
    ("rtx4090:2x8", "network between nodes of rtx4090 is not published"),
    ("a100:8", "'a100:8': write TPUs (v4:4x4x4, v5e:16x16, "),
  ],
)
def test_an_unknown_topology_is_refused(small, words, said, monkeypatch):
  """The error needs no compiler."""
  monkeypatch.setattr(compilers, "cuda", lambda: None)
  monkeypatch.setattr(compilers, "libtpu", lambda: None)
  words = f"--config={small} --topology={words}".split()
  assert said in runs.told(plan.main, words)


@pytest.mark.parametrize("package", ["libtpu", "cuda-compiler"])
def test_a_compiler_among_the_packages_finds_no_device(package, tmp_path):
  """Plans use the compiler, and no command looks for its devices."""
  folder = pathlib.Path(sys.prefix) / package
  if not folder.exists():
    pytest.skip(f"{package} is not installed: launch/setup.sh {package}")
  code = (
    "from antlm_jax import __main__\n"
    "from antlm_jax.planning import compilers\n"
    "compilers.ignore_absent_devices()\n"
    "import jax; from antlm_jax.planning import topology\n"
    "print(compilers.libtpu() if LIBTPU else compilers.cuda())\n"
    "print(jax.devices(), len(topology.topology_devices('v5e:2x2' if LIBTPU"
    " else 'h100:4')))"
  ).replace("LIBTPU", str(package == "libtpu"))
  env = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
  env["PYTHONPATH"] = f"{folder}:{env.get('PYTHONPATH', '')}"
  # Another prefix hides the packages' own folder.
  code = f"import sys; sys.prefix = {str(tmp_path)!r}\n{code}"
  done = subprocess.run(
    [sys.executable, "-c", code], env=env, capture_output=True, text=True
  )
  found, devices = done.stdout.splitlines()
  assert found.startswith(str(folder))
  assert devices == "[CpuDevice(id=0)] 4"
  assert "Traceback" not in done.stderr and "ERROR" not in done.stderr


def test_without_the_compiler_it_is_said_how_to_get_it(small, monkeypatch):
  monkeypatch.setattr(compilers, "cuda", lambda: None)
  assert "setup.sh cuda-compiler" in runs.told(
    plan.main, [f"--config={small}", "--topology=h100:8"]
  )


def test_a_kernel_takes_its_launch_and_its_share_of_the_bandwidth():
  """Computes by hand the seconds of three products and a norm."""
  chip = chips.CHIPS["NVIDIA H100"]
  measured = chips.Measured(0.5, bandwidth=0.8, launch=2e-6)
  work = {
    hlo.Instruction("jit(update)/mlp/dot", "fusion", chip.flops / 1e3, 9, 0): 3,
    hlo.Instruction("norm/mul", "fusion", 0.0, int(chip.bandwidth), 0): 1,
    hlo.Instruction("", "custom-call", 0.0, 0, 0): 5,
  }
  found = forecast.instruction_times(work, chip, measured)
  assert np.isclose(found["MLP"].seconds, 3 * (2e-3 + 2e-6))
  assert np.isclose(found["MLP"].products, 3 * 2e-3)
  assert np.isclose(found["norms"].seconds, 1.25 + 2e-6)
  assert found["rest"].seconds == 0


def estimates(small, shape, *settings, pieces=1):
  pod = search.Pod(
    small, {}, topology.topology_devices(shape), vocab_size=1024, pieces=pieces
  )
  run = pod.build_run(settings)
  return run, list(estimate.estimate_all(run, run.batch_kinds()))


@pytest.mark.sample(0, 1)
@needs_compiler
@pytest.mark.parametrize(
  "shape, kernel",
  [
    *(("h100:8", "mosaic"), ("h200:8", "mosaic"), ("b200:8", "tokamax")),
    *((f"{name}:1", "") for name in ("a100-40", "l4", "rtx3090", "rtx5090")),
  ],
)
def test_each_gpu_is_compiled_for(small, shape, kernel):
  """Packed rows and a stand-in for attention; also cards that are no Hopper."""
  run, (e,) = estimates(small, shape, "curriculum=10C steps", pieces=2)
  assert not kernel or e.attention == kernel
  kind = run.mesh.devices.flat[0].device_kind
  assert e.memory.limit == chips.usable(chips.chip_kind(kind)).memory
  # Each GPU has all parameters, two moments in float32, and the batch.
  state = 12 * run.model.size
  assert state < e.memory.arguments < 1.01 * state + 2**17
  assert e.memory.fits and 0 < e.mfu() < 1
  if run.mesh.size > 1:
    # Gradients are summed in their weights' dtype, bfloat16 or float32.
    (sums,) = e.collectives
    assert (sums["kind"], sums["axes"]) == ("all-reduce", "data")
    assert 2 * run.model.size < sums["bytes"] < 4.01 * run.model.size


@pytest.mark.slow
@needs_compiler
def test_a_run_has_hours_energy_and_a_price(small, tmp_path, capsys):
  """On a card without measurements, the forecast names its assumption."""
  path = tmp_path / "plan.json"
  words = "--topology=rtx4090:2", "--vocab_size=1024", f"--output={path}"
  curriculum = "--config.curriculum=30000M steps"
  plan.main([f"--config={small}", *words, curriculum, "--price_per_hour=0.5"])
  written = json.loads(path.read_text())
  seconds = sum(
    p["steps"] * p["forecast"]["seconds"] for p in written["programs"]
  )
  cost, hours = written["cost"], seconds / 3600
  assert cost["steps"] == 30_000
  # Two cards of 450 W, each at 0.5 an hour.
  for name, value in ("energy", 2 * 0.45), ("price", 2 * 0.5):
    assert np.isclose(cost[name], hours * value)
  printed = capsys.readouterr().out
  assert f"price: {2 * 0.5 * hours:,.2f} for" in printed
  assert f"energy: {0.9 * hours:,.2f} kWh at 450 W" in printed
  assert "an H100 reaches" in printed


@pytest.mark.sample(0, 1)
@needs_compiler
@pytest.mark.parametrize("kernel", ["mosaic", "tokamax", "auto"])
def test_operations_are_those_that_the_model_needs(small, kernel):
  """Catches a plan that needs the kernel here, or counts hidden pairs."""
  settings = "curriculum=10C steps", f"model.attention={kernel}"
  _, (e,) = estimates(small, "h100:8", *settings, "model.remat=none")
  # Also the backward pass computes the scores, one of six products.
  products = e.work.causal * 7 / 6
  if kernel == "auto":
    assert e.attention == "cudnn"
  else:
    assert e.attention == kernel
    # Kernels visit three of 2 x 2 blocks; 257 of 512 pairs are visible.
    products *= (3 / 4) / (257 / 512)
  needed = e.work.blocks + e.work.head + products
  assert np.isclose(8 * e.executed, needed, rtol=0.01)


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2), reason="our kernel needs jax 0.11.2"
)
def test_our_kernel_is_split_over_gpus(small, monkeypatch):
  """Lowers a step with the kernel itself, each GPU with its rows and heads."""
  monkeypatch.setattr(gpus, "without_kernels", contextlib.nullcontext)
  devices = topology.topology_devices("h100:4")
  changes = "mesh.tensor=2", "curriculum=10C steps"
  pod = search.Pod(small, {}, devices, vocab_size=1024, pieces=2)
  run = pod.build_run(changes)
  batch = run.batch_kinds()[0].batch
  text = topology.lower(run.step, run.mesh, batch).as_text()
  calls = [line for line in text.splitlines() if "@mosaic_gpu" in line]
  assert calls
  # 8 of 16 rows, 256 tokens, 2 of 4 query heads of 64.
  assert all("tensor<8x256x2x64xbf16>" in line for line in calls)


@pytest.mark.nightly
@needs_compiler
def test_between_nodes_sums_take_the_network(small):
  settings = "mesh.fsdp=4", "curriculum=10C steps"
  _, (e,) = estimates(small, "h100:2x4", *settings, pieces=2)
  over = {c["axes"]: c for c in e.collectives}
  assert set(over) == {"fsdp", "data, nodes", "data, fsdp, nodes"}
  # Each GPU sums its part of the weights with its peer in the other node over
  # one card of 400 Gb/s. Norms, which all GPUs have, use a node's four cards.
  for axes, speed in ("data, nodes", 50e9), ("data, fsdp, nodes", 200e9):
    assert np.isclose(over[axes]["seconds"], over[axes]["sent"] / speed)


@pytest.mark.nightly
@needs_compiler
def test_what_a_gpu_has_no_room_for_does_not_fit(small):
  settings = "model.mlp_width=1048576", "curriculum=10C steps"
  _, (e,) = estimates(small, "h100:1", *settings)
  assert not e.memory.fits
  table = plan.estimates_table([e])
  assert "too much by" in table and "best MFU" in table


@pytest.mark.parametrize(
  "name, each",
  [
    *(("a100-40", 2048), ("a100-80", 2048), ("a10", 1024), ("l4", 1024)),
    *(("rtx3090", 512), ("rtx4060", 512)),
    *(("rtx4090", 512), ("rtx5090", 512)),
  ],
)
def test_a_peak_is_that_of_its_cores(name, each):
  """A peak with sparsity, or with sums in float16, is twice as high.

  `each` is the number of dense bfloat16 operations of a core in a cycle.
  """
  gpu = gpus.GPUS[name]
  peak = gpu.cores * gpu.clock * 1e9 * each
  assert np.isclose(chips.CHIPS[gpu.kind].flops, peak, rtol=0.005)
