"""Shared by the benchmarks: arguments, absent devices, and a report."""

import datetime
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

import jax

from antlm_jax import cli, tables
from antlm_jax import mesh as mesh_lib
from antlm_jax.arguments import add_arguments, read_section
from antlm_jax.planning import topology
from antlm_jax.runtime import files
from antlm_jax.settings import setting

# A width, a function that makes the cell, and the keys of its arguments. A
# width alone shows the value that has the column's name.
Column = int | tuple


def output():
  """Makes the setting that every benchmark has."""
  folder = pathlib.Path(__file__).parent / "results"
  return setting(str(folder), "Folder of the JSON file", read=cli.local_path)


def benchmark_arguments(description: str, section: type, argv: Sequence[str]):
  """Returns a benchmark's arguments as a section of settings."""
  parser = cli.Parser(description=description)
  add_arguments(parser, section)
  return read_section(section, parser.parse_args(argv))


def mesh_of(device) -> jax.sharding.Mesh:
  """Returns a mesh of one device, which may be absent."""
  return mesh_lib.Mesh().build([device])


def compile_for(device, run, *args) -> jax.stages.Compiled:
  """Compiles a function of arrays' shapes for a device that may be absent."""
  mesh = mesh_of(device)
  sharding = mesh_lib.replicated_sharding(mesh)
  args = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
  )
  with jax.set_mesh(mesh):
    return topology.compile_lowered(jax.jit(run).lower(*args))


def report_rows(
  rows: Iterable[dict],
  folder: str,
  name: str,
  columns: Mapping[str, Column],
  align: str = "<",
  **facts,
) -> list[dict]:
  """Prints each row, and writes it to FOLDER/NAME.json, as soon as it is there.

  A cell is a dash if an argument of it is None. `align` is as in
  `tables.text_table`; the file says the `facts` next to the rows. Raises a
  UserError if it cannot be written.
  """
  name = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
  path = pathlib.Path(folder) / f"{name}.json"
  files.check_writable(path)
  date = datetime.date.today().isoformat()
  report = {"date": date, "jax": jax.__version__, **facts, "rows": []}
  shown = [
    (column, _plain_value, name) if isinstance(column, int) else column
    for name, column in columns.items()
  ]
  widths = [width for width, *_ in shown]
  print(tables.table_line(list(columns), widths, align), flush=True)
  for row in rows:
    cells = []
    for _, show, *keys in shown:
      values = [row.get(key) for key in keys]
      cells.append(None if None in values else show(*values))
    print(tables.table_line(cells, widths, align), flush=True)
    report["rows"].append(row)
    files.write_json(path, report, indent=1)
  print(f"wrote {path}")
  return report["rows"]


def _plain_value(value) -> str:
  return f"{value:.6g}" if isinstance(value, float) else str(value)
