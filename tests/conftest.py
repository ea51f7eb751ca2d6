"""Fixtures that several test files share."""

import collections
import functools
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

import hypothesis
import jax
import pytest

from antlm_jax.commands.prepare import prepare
from antlm_jax.data import toy_english
from antlm_jax.inference.model import load
from antlm_jax.runtime import compilation, files


def pytest_configure(config):
  """Gives each worker a folder for the remote code of exported models.

  transformers otherwise shares and caches one folder for all processes of a
  user. It reads the variable once, when it is imported. Programs are kept on
  disk as by any command of antlm.
  """
  compilation.keep_programs()
  modules = tempfile.TemporaryDirectory(prefix="antlm_modules_")
  config.add_cleanup(modules.cleanup)
  os.environ["HF_MODULES_CACHE"] = modules.name
  # A background job ignores SIGINT, and so would the processes of the tests.
  if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The first example of a test may compile programs.
hypothesis.settings.register_profile("tests", max_examples=60, deadline=None)
hypothesis.settings.load_profile("tests")

# Test files that need programs compiled as for users, or for TPUs and GPUs.
OPTIMIZED = "aot docs fused gpu peers plan plan_gpus quickstart slurm"


@pytest.fixture(autouse=True, scope="module")
def optimizations(request):
  """Disables most of XLA's optimizations, here and in processes of tests.

  Compiling tiny models takes longer than running them.
  """
  of = request.path.stem.removeprefix("test_")
  spared, name = of not in OPTIMIZED.split(), "JAX_DISABLE_MOST_OPTIMIZATIONS"
  os.environ[name] = str(int(spared))
  jax.config.update(name.lower(), spared)


# Linux allows a process 65,530 memory maps, and a compiled program needs some.
# Beyond that, the compiler aborts the process.
MOST_MAPS = 20_000


@pytest.fixture(autouse=True, scope="module")
def few_programs():
  """Drops compiled programs after a test file if the process has very many."""
  yield
  maps = pathlib.Path("/proc/self/maps").read_text()
  if maps.count("\n") > MOST_MAPS:
    jax.clear_caches()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Marks the cases of a test with `sample(fast, slow)` beyond these numbers.

  After the fast cases, `slow` cases are slow, by default all; the others are
  nightly. The chosen cases are spread so that each parameter takes several
  values.
  """
  groups = collections.defaultdict(list)
  for item in items:
    if marker := item.get_closest_marker("sample"):
      groups[item.path, item.originalname].append((item, marker.args))
  for cases in groups.values():
    size = len(cases)
    for i, (item, (fast, *slow)) in enumerate(cases):
      rank = _spread(size).index(i)
      if rank >= fast + sum(slow) and slow:
        item.add_marker(pytest.mark.nightly)
      elif rank >= fast:
        item.add_marker(pytest.mark.slow)


@functools.cache
def _spread(size):
  """Returns the numbers below a size, each as far from those before as can be.

  They are multiples of the golden section, modulo 1.
  """
  numbers = (int(i * 0.618034 * size) % size for i in itertools.count())
  order = dict.fromkeys(itertools.islice(numbers, 20 * size))
  return [*order, *(i for i in range(size) if i not in order)]


@pytest.fixture(scope="session")
def shared(tmp_path_factory, worker_id):
  """Makes a folder once for all workers: `shared(name, make)`.

  `make(folder)` fills it; tests read it and never write into it.
  """
  base = tmp_path_factory.getbasetemp()
  root = base if worker_id == "master" else base.parent

  def folder_of(name, make):
    folder = root / f"shared_{name}"
    with files.file_lock(root / f"{name}.lock", wait=True):
      if not folder.exists():
        with files.replacing(folder) as aside:
          make(aside)
    return folder

  return folder_of


@pytest.fixture(scope="session")
def english(shared):
  """A folder of generated English: text/ and pairs/."""
  return shared(
    "english",
    lambda folder: toy_english.write_toy_english(
      folder, sentences=3000, pairs=20
    ),
  )


@pytest.fixture(scope="session")
def prepared(english, shared):
  """The generated English, packed by documents to rows of 32."""

  def make(folder):
    prepare(
      english / "text",
      folder,
      vocab_size=400,
      seq_len=32,
      packing="documents",
      documents="line",
    )

  return shared("prepared", make)


@pytest.fixture(scope="module")
def loaded(run):
  """The checkpoint of `run`, a file's own fixture: `random_models.run()`."""
  return load(run)


@pytest.fixture
def small_disk(tmp_path):
  """Makes a file system of some kilobytes: `small_disk(600)`."""
  disk = tmp_path / "disk"

  def mounted(kilobytes):
    disk.mkdir()
    words = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)]
    if subprocess.run(["mount", *words], capture_output=True).returncode:
      pytest.skip("mounting a small tmpfs is not allowed here")
    return disk

  yield mounted
  # The libraries may still hold a file.
  subprocess.run(["umount", "--lazy", str(disk)], capture_output=True)


@pytest.fixture
def offline(monkeypatch):
  """Keeps this process and those it starts from using the network."""
  monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
  for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    monkeypatch.setenv(name, "1")


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
  """Makes an empty cache of the Hub, without a network.

  Returns a function that puts a folder into it: `hub_cache(folder, name)`.
  """
  cache = tmp_path / "cache"
  monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
  monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

  def put(folder, name):
    repo = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, repo / "snapshots" / "a1b2")
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("a1b2")

  return put
