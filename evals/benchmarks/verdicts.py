"""Tables, intervals and verdicts of the results pages, from stored JSON.

    python -m antlm_jax.evals.benchmarks.verdicts          # prints them all
    python -m antlm_jax.evals.benchmarks.verdicts --write  # writes the pages
    python -m antlm_jax.evals.benchmarks.verdicts --draw   # draws the pictures

The JSON is in evals/benchmarks/results/, and the statistics are those of
`antlm report`. A page has each table between `<!-- table NAME -->` and
`<!-- end -->`. To add a study's runs, store the losses.json of its report.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from antlm_jax import cli
from antlm_jax.errors import UserError
from antlm_jax.evals.benchmarks import common
from antlm_jax.evals.benchmarks.pages import (
  antlm_table,
  attention,
  forecasts,
  from_decoder,
  matryoshka,
  mixing,
  one_gpu,
  optimizers,
  pictures,
  regularised,
  simulated,
)
from antlm_jax.evals.benchmarks.structure import ROOT
from antlm_jax.runtime import files
from antlm_jax.settings import setting

_BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Makers of the tables, by page and name.
PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
  "README.md": {"short": mixing.readme_table},
  "docs/results.md": regularised.TABLES
  | mixing.TABLES
  | antlm_table.TABLES
  | from_decoder.TABLES
  | simulated.SIZES,
  "docs/reference/curriculum.md": regularised.ADVICE,
  "docs/appendix/archive.md": matryoshka.TABLES,
  "docs/index.md": one_gpu.HOURS,
  "docs/how_to/one_gpu.md": one_gpu.FITTING,
  "docs/explanation/attention.md": attention.TABLES,
  "docs/appendix/optimizers.md": optimizers.TABLES,
  "docs/appendix/forecast.md": forecasts.TABLES,
  "docs/explanation/cost.md": forecasts.COSTS,
  "docs/explanation/when_to_mix.md": regularised.REPORT,
  "docs/appendix/intervals.md": simulated.INTERVALS,
}
# Makers of further figures that the text of a page quotes.
FIGURES: Mapping[str, Sequence[Callable[[], Iterable[float]]]] = {
  "docs/results.md": (
    regularised.claim_figures,
    regularised.larger_figures,
    regularised.curve_figures,
    mixing.mixing_figures,
    antlm_table.antlm_table_figures,
    from_decoder.from_decoder_figures,
    simulated.interval_figures,
  ),
  "docs/explanation/when_to_mix.md": (
    regularised.claim_figures,
    regularised.larger_figures,
    regularised.curve_figures,
  ),
  "docs/appendix/optimizers.md": (optimizers.optimizer_figures,),
}


def fill_page(page: str, text: str) -> str:
  """Returns a page's text with its tables made anew.

  Args:
    page: Path to the page, a key of `PAGES`.
    text: The page's present text.

  Raises:
    UserError: A table is missing in the text, or is unknown.
  """
  makers = PAGES[page]
  there = [name for _, name, _ in _BLOCK.findall(text)]
  if sorted(there) != sorted(makers):
    raise UserError(
      f"{page} has the tables {', '.join(there) or 'none'}, not"
      f" {', '.join(makers)}: mark each with <!-- table NAME --> and"
      " <!-- end -->"
    )
  return _BLOCK.sub(lambda of: f"{of[1]}\n{makers[of[2]]()}\n\n{of[3]}", text)


@dataclasses.dataclass(frozen=True)
class Arguments:
  """The command's arguments."""

  write: bool = setting(False, "Replace the tables in the pages")
  draw: bool = setting(False, "Draw the pictures in docs/images instead")


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = common.benchmark_arguments(__doc__, Arguments, argv)
  if args.draw:
    for name, draw in pictures.PICTURES.items():
      draw(pathlib.Path(ROOT, "docs/images", name))
      print(f"drew docs/images/{name}")
    return
  for page, makers in PAGES.items():
    if args.write:
      path = pathlib.Path(ROOT / page)
      files.write_text(path, fill_page(page, path.read_text("utf-8")))
      print(f"wrote {page}")
      continue
    for name, make in makers.items():
      print(f"## {page}: {name}\n\n{make()}\n")
    found = [x for make in FIGURES.get(page, ()) for x in make()]
    if found:
      figures = ", ".join(f"{x:.4g}" for x in found)
      print(f"Further figures of {page}: {figures}\n")


if __name__ == "__main__":
  cli.run_command(main)
