"""The commands and code of README and docs/ run as written, and links hold.

The output on a page is compared with the output of its block, line by line. A
page's author needs no markup:

- Words and whole numbers are equal: counts, steps, settings, chosen words.
- A number with a decimal point may differ by 1 in the last digit of the page,
  since versions of jax round differently. After a long training, more digits
  depend on the version. Leave them out: `clm 1.78...` allows 1.77 to 1.79.
- Numbers before a unit of time, memory or speed may be any number: `8 s`,
  `1.5 GiB`, `900 words/s`.
- `...` is any text. Write it for all else that varies, such as a version, a
  hash, a port or the size of this repository.
"""

import ast
import collections
import importlib.util
import itertools
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import antlm_jax
from antlm_jax import config, settings
from antlm_jax.commands import COMMANDS
from antlm_jax.objectives import curriculum
from tests import runs
from tests.test_launch import GUIDES

README, DOCS = runs.ROOT / "README.md", runs.ROOT / "docs"
FIRST = DOCS / "index.md"  # its commands make the data and the run of others
QUICKSTART = DOCS / "tutorials/quickstart.md"  # makes its own
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
URL = re.search('URL = "(.*)"', (runs.ROOT / "setup.py").read_text())[1]
SITE = "https://{}.github.io/{}/".format(*URL.split("/")[-2:])
RAW = URL.replace("github.com", "raw.githubusercontent.com")
COLAB = URL.replace("github.com", "colab.research.google.com/github")


def _name(page: pathlib.Path) -> str:
  return str(page.relative_to(runs.ROOT))


def blocks(page: pathlib.Path, *languages: str) -> list[tuple[str, str]]:
  """A page's fenced blocks of these languages, with their language."""
  found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S)
  return [block for block in found if block[0] in languages]


RUN = [
  page
  for page in PAGES
  if blocks(page, "bash", "python") and page.stem not in GUIDES
]


@pytest.fixture(scope="module")
def first(shared):
  """A folder with the results of the home page's commands."""

  def make(folder):
    printed = in_folder(FIRST, _clone(folder))
    assert "the dogs near" in printed and "mean over UIDs" in printed

  return shared("docs", make)


def _clone(folder: pathlib.Path) -> pathlib.Path:
  folder.mkdir()
  for name in ("configs", "docs", "launch", ".venv"):
    (folder / name).symlink_to(runs.ROOT / name)
  return folder


def in_folder(page: pathlib.Path, folder: pathlib.Path) -> str:
  """Runs a page's blocks in turn; returns all that they print.

  Blocks without a language that directly follow are expected in the output.
  """
  path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
  printed = ""
  pattern = r"^```(bash|python)\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?"
  found = re.findall(pattern, page.read_text(), re.M | re.S)
  # Python blocks that follow each other are one program.
  numbered = [(-1 if b[0] == "python" else i, b) for i, b in enumerate(found)]
  for first, group in itertools.groupby(numbered, lambda x: x[0]):
    _, texts, expected = zip(*(block for _, block in group), strict=True)
    code = folder / "snippet.py"
    code.write_text("\n".join(texts))
    script = f"python {code}" if first < 0 else texts[0]
    done = subprocess.run(
      ["bash", "-euo", "pipefail", "-c", script],
      cwd=folder,
      env=os.environ | {"PATH": path, "PYTHONPATH": str(runs.ROOT)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=600,
    )
    assert done.returncode == 0, (page.name, texts, done.stdout)
    output = output_pattern("".join(expected), done.stdout)
    assert re.search(output, done.stdout, re.M | re.S), (done.stdout, output)
    printed += done.stdout
  return printed


# The parts of an output that a page shows.
_PARTS = re.compile(
  r"(?P<any>\.\.\.)"
  r"|(?P<varying>\d[\d,.]*(?= ?(?:[mµ]?s|min|minutes?|h|[kMGT]i?B|\S+/s)\b))"
  r"|(?P<decimal>\d[\d,]*\.\d+)"
  r"|(?P<whole>\d[\d,]*)"
  r"|(?P<blanks> +)"
  r"|(?P<other>.)"
)


def output_pattern(expected: str, printed: str) -> str:
  """Returns a pattern of a page's output, to search for in a printed text.

  In it, a decimal number is a choice of those printed numbers that are near it.
  """
  decimals = set(re.findall(r"\d[\d,]*\.\d+", printed))

  def part_pattern(part: re.Match) -> str:
    text = part[0]
    if part["decimal"]:
      near = [x for x in decimals if _is_near(x, text)] or [text]
      # NumPy fills numbers up with blanks.
      return rf"(?<![\d.])(?:{'|'.join(map(re.escape, near))})(?!\d) *"
    if part["whole"]:
      return rf"(?<![\d.,]){text}(?!\d|[.,]\d)"
    patterns = {"any": ".*?", "varying": r"\d[\d,.]*", "blanks": " +"}
    return patterns.get(part.lastgroup, re.escape(text))

  lines = (_PARTS.sub(part_pattern, x.strip()) for x in expected.splitlines())
  # A line of `...` alone is any number of lines.
  return "".join(
    r"(?:^.*?$\s*?)?" if line == ".*?" else rf"^\s*{line}\s*?$\s*?"
    for line in lines
  )


def _is_near(printed: str, shown: str) -> bool:
  """Tells whether two numbers differ by at most 1 in the last digit shown."""
  decimals = len(shown.partition(".")[2])
  values = (float(text.replace(",", "")) for text in (printed, shown))
  return math.isclose(*values, rel_tol=0, abs_tol=1.01 * 10**-decimals)


@pytest.mark.parametrize(
  ("shown", "printed", "other"),
  [
    ("core  107  18,042", "core   107   18,042", "core   107   22,008"),
    ("12 steps", "12 steps", "112 steps"),
    ("first  40  4.442", "first  40  4.443", "first  40  4.444"),
    ("mean  1,800  99.78", "mean  1,800  99.78", "mean  1,801  99.78"),
    ("clm 1.78..., mlm", "clm 1.7761, mlm", "clm 1.7661, mlm"),
    ("ready in 8 s", "ready in 12.5 s", "ready in 8 steps"),
    ("1.5 GiB, 900 words/s", "2 GiB, 1,100 words/s", "2 GiB, 1,100 words"),
    ("[-8.338 -9.25]", "[-8.3375 -9.25  ]", "[-8.3375 -9.27  ]"),
    ("jax ... on 2 cpu", "jax 0.12.0 on 2 cpu", "jax 0.12.0 on 4 cpu"),
    ("line 1\n...\n4 steps", "4 steps", "5 steps"),
    ("line 1\n...\n4 steps", "2 rows\n3 rows\n4 steps", "2 rows\n4 rows"),
  ],
)
def test_the_numbers_of_an_output_are_compared(shown, printed, other):
  """Catches a figure of a page that stays when the printed figure changes."""
  for text, equal in ((printed, True), (other, False)):
    output = f"line 1\n{text}\nline 3\n"
    pattern = output_pattern(f"{shown}\n", output)
    assert bool(re.search(pattern, output, re.M | re.S)) == equal, text


# The README's commands are a whole quickstart. Another page runs each command
# of the other nightly pages, with other settings.
NIGHTLY = [
  README,
  QUICKSTART,  # index.md
  DOCS / "tutorials/own_text.md",  # babylm.md, score_text.md
  DOCS / "tutorials/continue.md",  # decoder_to_encoder.md, resume.md
  DOCS / "tutorials/diffusion.md",  # objective.md, score_text.md
  DOCS / "how_to/one_gpu.md",  # objective.md
  DOCS / "how_to/optimizer.md",  # objective.md, score_text.md
  DOCS / "how_to/prepare_large_text.md",  # prepare_text.md
]


@pytest.mark.slow
@pytest.mark.parametrize(
  "page",
  [
    pytest.param(page, marks=pytest.mark.nightly) if page in NIGHTLY else page
    for page in RUN
  ],
  ids=_name,
)
def test_the_commands_and_code_of_a_page(page, first, tmp_path):
  """Catches a page whose blocks fail, or need another page than the first."""
  if page == QUICKSTART:
    assert in_folder(page, _clone(tmp_path / "page"))
  elif page != FIRST:
    folder = shutil.copytree(first, tmp_path / "page", symlinks=True)
    assert in_folder(page, folder)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_file_and_command_that_a_page_names_exists(page):
  text = page.read_text()
  ours = "configs|antlm_jax|launch|tests"
  for name in re.findall(rf"`((?:{ours})/[\w/.]+)", text):
    assert (runs.ROOT / name).exists(), name
  for link in re.findall(r"\]\(([^)#\s]+)", text):
    target = _target(page, link)
    assert target.exists(), link
    # The site has only files of docs/. Others need their address.
    inside = page == README or target.resolve().is_relative_to(DOCS)
    assert "://" in link or inside, link
  for module in re.findall(r"python -m ([\w.]+)", text):
    path = runs.ROOT / module.replace(".", "/")
    known = path.with_suffix(".py"), path / "__main__.py"
    assert any(file.exists() for file in known), module
  for name, second in re.findall(r"(?:`|^)antlm (\w+)(?: (\w+))?", text, re.M):
    assert {name, f"{name} {second}"} & {*COMMANDS, "COMMAND"}, (name, second)


def _target(page: pathlib.Path, link: str) -> pathlib.Path:
  """Returns the file of a link; the page itself for links to elsewhere."""
  if link.startswith(SITE):
    name = link.removeprefix(SITE).rstrip("/")
    return DOCS / (f"{name}.md" if name else "index.md")
  for prefix in (f"{URL}/blob/main/", f"{RAW}/main/"):
    if link.startswith(prefix):
      return runs.ROOT / link.removeprefix(prefix)
  return page if "://" in link else page.parent / link


def test_the_readme_leads_into_the_clone_and_on_an_index_to_the_forge():
  """Catches a link to an unpublished page, another address, an old version."""
  text = README.read_text()
  assert len(text.splitlines()) <= 150
  links = re.findall(r"\]\(([^)]+)\)", text)
  ours = [link for link in links if "antlm-jax" in link]
  assert all(link.startswith(COLAB) for link in ours)
  command = [sys.executable, "setup.py", "--quiet", "--long-description"]
  built = subprocess.check_output(command, cwd=runs.ROOT, text=True)
  assert f"]({URL}/raw/main/docs/images/start.png)" in built
  assert "](docs" not in built
  assert f"version = {{{antlm_jax.__version__}}}" in text
  site = (runs.ROOT / "mkdocs.yml").read_text()
  assert f"site_url: {SITE}\nrepo_url: {URL}\n" in site


def test_the_settings_page_lists_every_config_once():
  text = (DOCS / "reference/settings.md").read_text()
  listed = re.findall(r"^\| `(configs/[\w/]+\.py)`", text, re.M)
  named = config.named_configs().values()
  places = [f"configs/{path.relative_to(config.CONFIGS)}" for path in named]
  assert sorted(listed) == sorted(places)


def test_every_curriculum_of_the_reference_parses():
  page = DOCS / "reference/curriculum.md"
  table = page.read_text().split("| curriculum |")[1].split("\n\n")[0]
  strings = re.findall(r"`([^`]*[A-Z][^`]*)`", table.split("|---|---|")[1])
  assert len(strings) >= 10
  for text in strings:
    known = config.Config(curriculum=text).known_objectives
    assert curriculum.parse_curriculum(text, known, 100, 5000).steps > 0


@pytest.fixture(scope="module")
def reference():
  """The script that writes the reference."""
  path = DOCS / "write_reference.py"
  spec = importlib.util.spec_from_file_location("write_reference", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.slow
def test_the_generated_parts_are_those_of_the_code():
  """Catches a change of help, settings or pages without the script's run."""
  # In a process of its own, without the parts that other tests register.
  done = subprocess.run(
    [sys.executable, DOCS / "write_reference.py", "--check"],
    env=os.environ | {"PYTHONPATH": str(runs.ROOT)},
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert (done.returncode, done.stdout) == (0, ""), done


def test_the_reference_is_written_anew(reference):
  """Catches a block that the script does not find, and so never replaces."""
  old = "# Page\n\n<!-- objective: C -->\nold\n<!-- end -->\n\nText\n"
  page = reference.fill_page(old)
  assert "old" not in page and "| `objectives.C.name` |" in page
  assert page.startswith("# Page\n") and page.endswith("\n\nText\n")
  table = reference.fill_page("<!-- functions -->\n<!-- end -->\n")
  for row in (
    "| `ax.train(config, workdir, data)` | `Trained` | `workdir`, `data` |",
    "| `ax.export(model, output)` | `list[Exported]` | `model` |",
    "| `ax.load(path, step)` | `Loaded` | `path` |",
  ):
    assert row in table
  site = "nav:\n  - Guides: # how_to/index.md\n      - old.md\n  - faq.md\n"
  lines = reference.fill_navigation(site).splitlines()
  assert lines[2] == "      - how_to/index.md" and lines[-1] == "  - faq.md"
  listed = {f"how_to/{path.name}" for path in (DOCS / "how_to").glob("*.md")}
  named = re.findall(r"how_to/\w+\.md", "\n".join(lines[2:]))
  assert sorted(named) == sorted(listed)


def test_every_setting_has_a_help_text_and_is_in_the_reference(reference):
  """Catches a setting without help or default, and a group without a place."""
  page = (DOCS / "reference/settings.md").read_text()
  for group, sections in reference.groups().items():
    assert f"\n## {group or 'Run'}\n" in page
    for section in sections.values():
      for name, field in settings.fields_of(section).items():
        key = ".".join(filter(None, (group, name)))
        if key == "objectives.name":
          continue  # the name of an objective
        key = key.replace("objectives.", "objectives.NAME.")
        assert field.help and hasattr(section, name), key
        assert page.count(f'<a id="{key}"></a>') == 1, key


def test_the_reference_has_every_command_objective_and_name():
  """Catches a part that is added to the package and not to its page."""
  pages = {
    name: (DOCS / f"reference/{name}.md").read_text()
    for name in ("commands", "objectives", "python")
  }
  for command in COMMANDS:
    assert f"\n## antlm {command}\n" in pages["commands"]
  for name, made in config.OBJECTIVES.items():
    assert (
      f"| `objectives.{name}.name` | `{made.name}` |" in pages["objectives"]
    )
  for name in {*dir(antlm_jax)} - {"__version__"}:
    assert re.search(rf"\bax\.{name}\b", pages["python"]), name


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_setting_that_a_page_changes_exists(page, reference):
  """Catches a renamed setting, and an example with a value that is refused."""
  known = {
    f"{group}.{name}".removeprefix(".")
    for group, sections in reference.groups().items()
    for section in sections.values()
    for name in settings.fields_of(section)
  } | {"model.name", "optimizer.name", "schedule.name", "KEY"}
  # A setting's last name is a key if no other setting has it.
  last_names = collections.Counter(key.rpartition(".")[2] for key in known)
  known |= {name for name, number in last_names.items() if number == 1}
  for key in re.findall(r"--config\.([\w.]+)[=`]", page.read_text()):
    key = re.sub(r"^objectives\.\w+\.(KEY$)?", r"objectives.", key)
    assert key in {*known, "objectives."}, key
  for _, text in blocks(page, "text"):
    if text.startswith("--config."):
      config.load_config("quickstart", text.split())


def test_the_messages_of_the_faq_exist():
  """Catches a message that is worded differently than its question."""
  strings = []
  for path in (runs.ROOT / "antlm_jax").rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        strings.append(node.value)
  titles = re.findall(
    r"^### `([a-z][^`]+)`", (DOCS / "faq.md").read_text(), re.M
  )
  assert len(titles) >= 10
  for title in titles:
    assert any(title in text for text in strings), title
