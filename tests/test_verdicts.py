"""The results pages hold what their stored data give, and nothing else."""

import pytest

from antlm_jax.evals.benchmarks import verdicts
from tests import runs

PAGES = sorted(verdicts.PAGES)
# Figures of other work or of settings, which no data of ours hold.
_GIVEN = {
  "README.md": None,  # also has figures of other pages
  "docs/results.md": {"0.05", "0.2", "1.1", "1.5", "7.2", "2510.04071"},
}


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_are_those_of_its_data(page):
  """Catches a table, interval or verdict that its JSON does not give."""
  text = (runs.ROOT / page).read_text()
  assert verdicts.filled(page, text) == text
