"""Hours, energy, price and reads of a run, from its steps' forecasts."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from antlm_jax.data.rows import token_dtype
from antlm_jax.planning import places
from antlm_jax.planning.estimate import Estimate
from antlm_jax.planning.forecast import Forecast
from antlm_jax.training.run import Run
from antlm_jax.units import duration, quantity

# https://cloud.google.com/storage/docs/request-rate
BUCKET_RATE = 5000  # reads a second that a bucket serves without a slow start


@dataclasses.dataclass(frozen=True)
class Cost:
  """Costs of a run, without compilation, evaluations and checkpoints."""

  steps: int  # number of training steps
  bound: float  # seconds at the published peaks, a lower bound
  forecast: float | None  # seconds by the forecast, or None if there is none
  chips: int  # number of chips
  watts: float  # most power that a chip draws; 0 if it is not published
  rate: float | None = None  # price of a chip for an hour

  @classmethod
  def of(
    cls,
    estimates: Sequence[Estimate],
    topology: str,
    slices: int = 1,
    rate: float | None = None,
  ) -> "Cost":
    """Adds up the steps of estimates that fit into memory.

    The time of a batch that grows is a share of a whole batch's, that of its
    microbatches. So the optimizer's part is too small.
    """
    place = places.parse_topology(topology)
    forecast = None
    trained = [e for e in estimates if e.steps]
    if all(isinstance(e.forecast, Forecast) for e in trained):
      forecast = sum(e.batches * e.forecast.seconds for e in trained)
    return cls(
      steps=sum(e.steps for e in trained),
      bound=sum(e.batches * e.step_seconds for e in trained),
      forecast=forecast,
      chips=place.chips * slices,
      watts=place.chip.watts,
      rate=rate,
    )

  @property
  def seconds(self) -> float:
    """Seconds by the forecast, or the lower bound if there is none."""
    return self.bound if self.forecast is None else self.forecast

  @property
  def chip_hours(self) -> float:
    """Hours of all chips together."""
    return self.chips * self.seconds / 3600

  @property
  def energy(self) -> float | None:
    """Kilowatt-hours if chips always draw the most power; None if unknown."""
    return self.chip_hours * self.watts / 1e3 if self.watts else None

  @property
  def price(self) -> float | None:
    """Price of the chips, in the unit of `rate`."""
    return None if self.rate is None else self.chip_hours * self.rate

  def __str__(self) -> str:
    time = f"{duration(self.bound)} at the published peaks, a bound"
    if self.forecast is None:
      time += ", and no forecast"
    else:
      time = f"{duration(self.forecast)} by the forecast, {time}"
    energy = "unknown, because the power of these chips is not published"
    if self.watts:
      energy = f"{self.energy:,.2f} kWh at {self.watts:,.0f} W for each chip"
    price = f"{self.chip_hours:,.2f} chip-hours"
    if self.rate is None:
      price += "; --price_per_hour=RATE multiplies them"
    else:
      price = f"{self.price:,.2f} for {price} at {self.rate:g} each"
    return f"{self.steps:,} steps: {time}\nenergy: {energy}\nprice: {price}"

  def to_json(self) -> dict:
    """Returns it as plain values."""
    properties = "seconds", "chip_hours", "energy", "price"
    return dataclasses.asdict(self) | {k: getattr(self, k) for k in properties}


@dataclasses.dataclass(frozen=True)
class Reads:
  """Reads of rows of all hosts, during the run's fastest steps."""

  rows: float  # number of prepared rows a second
  block: int  # number of rows in a request: data.shuffle_block
  bytes: float  # bytes a second
  bucket: bool  # whether the rows may be in a bucket

  @classmethod
  def of(cls, run: Run, estimates: Sequence[Estimate]) -> "Reads":
    """Divides the rows of a step by its forecast, or by its lower bound."""
    rows = run.sources.rows
    rate = 0.0
    for e in estimates:
      has_forecast = isinstance(e.forecast, Forecast)
      seconds = e.forecast.seconds if has_forecast else e.step_seconds
      if e.steps and seconds:
        rate = max(rate, e.rows * e.seq_len / rows.seq_len / seconds)
    bits = 8 * np.dtype(token_dtype(run.tokenizer.vocab_size)).itemsize
    width = rows.seq_len * (bits + rows.segmented) / 8
    path = run.config.data.path
    bucket = not path or "gs://" in path
    return cls(rate, run.config.data.shuffle_block, rate * width, bucket)

  @property
  def requests(self) -> float:
    """Requests a second, if the rows are in a bucket."""
    return self.rows / self.block

  def __str__(self) -> str:
    line = (
      f"data: {quantity(self.rows)} rows/s, which are {quantity(self.requests)}"
      f" requests/s to a bucket, {quantity(self.bytes, 'B')}/s"
    )
    if not self.bucket or self.requests <= BUCKET_RATE:
      return line
    block = max(64, 2 ** math.ceil(math.log2(self.rows / BUCKET_RATE)))
    return (
      f"{line}\nwarning: a bucket begins with about {BUCKET_RATE:,} requests/s:"
      f" --config.data.shuffle_block={block} asks for"
      f" {quantity(self.rows / block)}"
    )
