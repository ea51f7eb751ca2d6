"""A writer that stores all values in one SQLite table, metrics.db."""

import sqlite3

from antlm_jax.training.writers import WRITERS, Writer


@WRITERS.register("sqlite")
class SQLite(Writer):
  """Writes metrics.db."""

  def __init__(self, folder, rows, name, config):
    (folder / "metrics.db").unlink(missing_ok=True)
    self._db = sqlite3.connect(folder / "metrics.db")
    self._db.execute("CREATE TABLE metrics (step INT, name TEXT, value REAL)")
    for step, values in rows.items():
      self.write(step, values)

  def write(self, step, values):
    """Writes a row for each value."""
    rows = [(step, name, value) for name, value in values.items()]
    with self._db:
      self._db.executemany("INSERT INTO metrics VALUES (?, ?, ?)", rows)

  def close(self):
    """Closes the file."""
    self._db.close()
