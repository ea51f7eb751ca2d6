"""Filter and deduplicate text with datatrove, then prepare the rest.

python launch/prepare_datatrove.py --text raw/ --output=data/crawl \\
  --work=work --tasks=100 --vocab_size=32000 --seq_len=512

It reads the jsonl or parquet files of a folder. To use other filters, copy the
script and change FILTERS. The same command resumes an interrupted run.
"""

import dataclasses
import functools
import sys
from pathlib import Path

try:
  from datatrove import executor
  from datatrove.pipeline import dedup, filters
  from datatrove.pipeline.readers import JsonlReader, ParquetReader
  from datatrove.pipeline.writers import JsonlWriter
except ModuleNotFoundError as missing:
  if {"-h", "--help"} & {*sys.argv}:
    print(__doc__)
    sys.exit()
  install = "run launch/setup.sh datatrove, then use .venv/bin/python"
  print(f"error: {missing.name} is missing: {install}", file=sys.stderr)
  sys.exit(2)

from antlm_jax import cli
from antlm_jax.arguments import add_arguments, read_arguments, read_section
from antlm_jax.commands.prepare import prepare
from antlm_jax.errors import UserError
from antlm_jax.runtime import cores
from antlm_jax.settings import Section, setting

FILTERS = (
  filters.GopherRepetitionFilter,
  filters.GopherQualityFilter,
  filters.FineWebQualityFilter,
)
EXECUTORS = "local", "slurm", "ray"


@dataclasses.dataclass(frozen=True)
class Where(Section):
  """Settings of datatrove."""

  work: str = setting("work", "Path to a folder for datatrove's own results")
  executor: str = setting("local", "Executor of datatrove", choices=EXECUTORS)
  option: tuple[str, ...] = setting(
    (), "Arguments of the executor, e.g. workers=8,partition=cpu"
  )


def pack(asked: dict, data, rank: int, world_size: int) -> None:
  """Runs a task of `antlm prepare` as a step of a pipeline."""
  # datatrove sends this function to nodes without the file's imports.
  from antlm_jax.commands import prepare

  prepare.prepare(**asked | {"tasks": world_size, "task": rank})


def run(asked: dict, where: Where) -> None:
  """Runs all stages in order; `asked` has the arguments of `prepare`."""
  if len(asked["text"] or ()) != 1:
    raise UserError("give --text one folder of jsonl or parquet files")
  (text,), tasks = asked["text"], asked["tasks"] or cores.count_cores()
  # Results depend on the number of tasks, which assigns documents to tasks.
  work = Path(where.work, f"{tasks}-tasks")
  names = "kept", "signatures", "pairs", "removed", "clean"
  kept, signatures, pairs, removed, clean = (str(work / n) for n in names)
  reader = ParquetReader if [*Path(text).rglob("*.parquet")] else JsonlReader
  read = reader(text, text_key=asked["column"])
  # Several tasks can read parts of an uncompressed file.
  write = JsonlWriter(clean, compression=None)
  changes = {"text": clean, "column": "text", "dev": [*map(Path, asked["dev"])]}
  stages = {
    "filter": [read, *(one() for one in FILTERS), JsonlWriter(kept)],
    "sign": [JsonlReader(kept), dedup.MinhashDedupSignature(signatures)],
    "match": [dedup.MinhashDedupBuckets(signatures, pairs)],
    "cluster": [dedup.MinhashDedupCluster(pairs, removed)],
    "remove": [JsonlReader(kept), dedup.MinhashDedupFilter(removed), write],
    "pack": [functools.partial(pack, asked | changes)],
  }
  counts = {"match": dedup.MinhashConfig().num_buckets, "cluster": 1}
  options = dict(option.split("=", 1) for option in where.option)
  options |= {k: int(v) for k, v in options.items() if v.isdecimal()}
  stage = None
  for name, steps in stages.items():
    stage = getattr(executor, f"{where.executor.title()}PipelineExecutor")(
      steps,
      tasks=counts.get(name, tasks),
      depends=stage,
      logging_dir=str(work / "logs" / name),
      **options,
    )
  stage.run()


def main(argv) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__)
  for source in prepare, Where:
    add_arguments(parser, source)
  args = parser.parse_args(argv)
  asked = read_arguments(prepare, args)
  run(asked, read_section(Where, args))


if __name__ == "__main__":
  cli.run_command(main)
