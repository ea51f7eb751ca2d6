"""What tests share that open folders in transformers."""

import pytest

MARKS = [
  pytest.mark.slow,
  pytest.mark.usefixtures("offline"),
  # Theirs, about their own parts.
  pytest.mark.filterwarnings("ignore::DeprecationWarning"),
  pytest.mark.filterwarnings("ignore::FutureWarning"),
  pytest.mark.filterwarnings("ignore::UserWarning"),
]
