"""Table of attention on a GPU, by kernel and mask."""

from antlm_jax import tables
from antlm_jax.evals.benchmarks.pages.studies import RESULTS
from antlm_jax.runtime import files

_PEERS = ("mosaic", "tokamax", "cuDNN", "XLA, dense", "chunked")
_SHAPES = {
  "32x1024x12x12x64": "32 x 1,024, 12 heads of 64",
  "8x2048x18x6x64": "8 x 2,048, 18 heads of 64, 6 of keys",
  "8x2048x16x4x128": "8 x 2,048, 16 heads of 128, 4 of keys",
}
_MASKS = ("window", "packed", "causal", "full")


def _gpu_table() -> str:
  path = RESULTS / "attention-nvidia-h200.json"
  rows = files.read_json(path, "the times")["rows"]
  found = {(row["shape"], row["mask"], row["peer"]): row for row in rows}
  lines = []
  for shape, name in _SHAPES.items():
    for mask in _MASKS:
      line = [name, mask, f"{found[shape, mask, 'mosaic']['ms']:.2f} ms"]
      for peer in _PEERS[1:]:
        row = found.get((shape, mask, peer))
        line.append(f"{row['to ours']:.2f}" if row else "-")
      lines.append(line)
  return tables.markdown(lines, ("", "mask", *_PEERS))


TABLES = {"attention-gpu": _gpu_table}
