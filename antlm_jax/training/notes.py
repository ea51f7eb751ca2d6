"""Lines about a run: its model and data, warnings, and tips."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import jax

from antlm_jax import jax_flags, units
from antlm_jax import mesh as mesh_lib
from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.objective import Objective
from antlm_jax.training.run import Run

_BABYLM_EPOCHS = 10  # the most that a submission may have, since 2025
_MANY_EPOCHS = 50  # a longer run may be a slip
_EPOCHS = 10  # that are often enough
_LONG = 10 * 3600.0  # seconds after which a run may be a slip
_WORSE = 0.05  # nats that a loss may end above its best: 5 % of perplexity
_FIRST_WEIGHTS = 0.1  # share in an average that is too long for its run
_FEW_STEPS = 100  # a shorter run is a trial
_SHORT = 60.0  # seconds of a run whose time matters little
_MUCH = 0.2  # share of a run's time, or of a forecast of its speed
# How an activity of a run takes less time.
_FASTER = {
  "data": "try data.threads={more_threads}",
  "evaluation": "try a larger eval.every, or fewer eval.rows",
  "checkpoint": "try a larger checkpoint.every",
  "compile": "the next run on this machine reads the programs from its disk",
  "start": "read the data from a faster disk",
  "hooks": "try fewer, or shorter, hooks",
}


def notes_of_run(run: Run) -> Iterator[str]:
  """Yields lines about a run: model, data, attention, sharding."""
  device = jax.devices()[0]
  text = run.config.curriculum
  yield (
    f"{run.config.model.name} with {units.quantity(run.model.size)} parameters,"
    f" {text if len(text) <= 40 else text[:37] + '...'} ="
    f" {run.curriculum.steps} steps of {run.config.train.batch_size} x"
    f" {run.sources.rows.seq_len} tokens on {jax.device_count()}"
    f" {device.device_kind}"
  )
  if ignored := jax_flags.ignored_flags():
    yield (
      f"warning: antlm_jax ignores {', '.join(ignored)}: it always computes"
      " with JAX's default"
    )
  if "babylm" in run.config.checkpoint.words and run.exceeds(_BABYLM_EPOCHS):
    yield (
      f"warning: the run has {run.most_epochs:.3g} epochs of its data, but"
      f" BabyLM's rules allow {_BABYLM_EPOCHS}: set"
      f" train.max_epochs={_BABYLM_EPOCHS} to refuse more"
    )
  if run.epochs > _MANY_EPOCHS:
    yield (
      f"tip: {run.curriculum.steps:,} steps are {run.epochs:,.4g} epochs of the"
      f" data: did you mean {_fewer(run)}?"
    )
  # Several sources take turns in the slots, so their rows change objectives.
  if not run.config.data.shuffle and len(run.order.sources) == 1:
    mixed = any(len(phase.shares) > 1 for phase in run.curriculum.phases)
    if mixed and run.order.steps_per_epoch.is_integer():
      yield (
        "warning: with data.shuffle=False, most rows have the same objective in"
        " every epoch of mixed batches: shuffle, or alternate, as in 12*(1C+1M)"
      )
  optimizer = run.config.optimizer
  share = optimizer.ema**run.curriculum.steps
  if optimizer.average == "ema" and share > _FIRST_WEIGHTS:
    yield (
      f"warning: optimizer.ema={optimizer.ema:g} is an average over about"
      f" {1 / (1 - optimizer.ema):,.0f} steps, and the run has"
      f" {run.curriculum.steps:,}: {share:.0%} of the weights that it evaluates"
      " are its first weights; lower optimizer.ema"
    )
  if len(run.order.sources) > 1:
    read = run.order.rows_read(run.curriculum.steps)
    sources = (
      f"{name} ({units.quantity(size)} rows, {read[name] / size:.3g} epochs)"
      for name, size in run.order.sources.items()
    )
    yield f"data: {', '.join(sources)}"
  by_name: dict[str, list[str]] = {}
  for batch, name in run.attention.items():
    by_name.setdefault(name, []).append(batch)
  parts = list(by_name)
  if len(by_name) > 1:
    parts = [f"{name} ({', '.join(b)})" for name, b in by_name.items()]
  layers = "as a loop" if run.config.model.loops else "unrolled"
  yield f"model.attention={', '.join(parts)}; the layers run {layers}"
  yield from mesh_lib.undivided(run.mesh, run.model.axes, run.model.shapes)


def _fewer(run: Run) -> str:
  """Returns a length that the user of a very long run may have meant."""
  config = run.config
  if not (config.train.epochs or config.train.steps):
    with contextlib.suppress(UserError):  # it has a unit
      text = f"{config.curriculum} steps"
      objectives = config.known_objectives
      steps = curriculum.parse_curriculum(text, objectives, 1).steps
      if steps != run.curriculum.steps:  # counts of epochs
        return f"{steps:,} steps, --config.curriculum='{text}'"
  if config.train.epochs.is_integer() and config.train.epochs:
    steps = int(config.train.epochs)
    return f"{steps:,} steps, --config.train.steps={steps}"
  few = max(1, round(_EPOCHS * run.order.steps_per_epoch))
  return f"{few:,} steps, {_EPOCHS} epochs"


def time_tip(run: Run, step: int, left: float) -> Iterator[str]:
  """Yields a tip if `left`, the run's seconds after a step, is many hours."""
  if left > _LONG:
    hourly = max(1, round((run.curriculum.steps - step) / left * 3600))
    yield (
      f"tip: {run.curriculum.steps:,} steps, {run.epochs:,.3g} epochs, take"
      f" {units.duration(left)} on this machine: did you mean {hourly:,} steps,"
      " which take an hour?"
    )


def time_shares(seconds: Mapping[str, float]) -> str:
  """Returns the shares of a run's activities, the largest first.

  `seconds` are those of each activity, and their total.
  """
  total = seconds["total"]
  shares = {name: spent / total for name, spent in seconds.items()}
  shares["other"] = 2 - sum(shares.values())  # the total is 1
  del shares["total"]
  return ", ".join(
    f"{name} {shares[name]:.0%}"
    for name in sorted(shares, key=shares.get, reverse=True)
    if shares[name] >= 0.005
  )


def slow_batch(seconds: float, threads: int) -> str:
  """Returns a tip on a batch that took `seconds` to arrive."""
  faster = _FASTER["data"].format(more_threads=2 * threads)
  return f"tip: training waited {units.duration(seconds)} for a batch: {faster}"


def time_advice(seconds: Mapping[str, float], threads: int) -> list[str]:
  """Returns a tip on the slowest activity other than the steps.

  Args:
    seconds: Seconds by activity, and their total.
    threads: Number of threads that build batches.
  """
  line = _suspect(seconds, threads)
  return [f"tip: {line}"] if line and seconds["total"] >= _SHORT else []


def _suspect(seconds: Mapping[str, float], threads: int) -> str:
  """Names the slowest activity other than the steps, with a remedy.

  Empty if it takes less than a fifth of the time.
  """
  slowest = max(_FASTER, key=lambda activity: seconds.get(activity, 0.0))
  share = seconds.get(slowest, 0.0) / seconds["total"]
  remedy = _FASTER[slowest].format(more_threads=2 * threads)
  return (
    f"{slowest} took {share:.0%} of the time: {remedy}"
    if share >= _MUCH
    else ""
  )


def speed_advice(
  mfu: float, forecast: float, seconds: Mapping[str, float], threads: int
) -> list[str]:
  """Compares a run's MFU with the forecast of its chip.

  Returns:
    A line with both and, if the MFU is lower by a fifth, the first suspect.

  Args:
    mfu: MFU of the run's steps and the wait for their data.
    forecast: MFU of the steps by the forecast.
    seconds: Seconds by activity.
    threads: Number of threads that build batches.
  """
  lines = [f"speed: MFU {mfu:.1%}, and {forecast:.1%} by the forecast"]
  if mfu < (1 - _MUCH) * forecast:
    stepping = {name: seconds.get(name, 0.0) for name in ("data", "steps")}
    stepping["total"] = sum(stepping.values())
    suspect = _suspect(stepping, threads) or (
      "the step itself: log.trace=100:105 profiles five of them"
    )
    lines.append(f"first suspect: {suspect}")
  return lines


def lost_targets(share: float, objectives: Sequence[Objective]) -> str:
  """Returns a warning of a loss that leaves out a share of the targets."""
  plugins = [
    objective.name
    for objective in objectives
    if type(objective).corrupt is not Objective.corrupt
  ]
  cause = (
    "words of some rows are too long for the lists of targets; use unit=token"
    " or unit=span for this text"
  )
  if plugins:
    cause = (
      f"corrupt of {' or '.join(plugins)} predicts more than max_target_share"
      " of a row; override that property with the largest share"
    )
  return f"warning: the loss leaves out {share:.2%} of the targets: {cause}"


def advice(
  modes: Mapping[str, Mapping[str, float]], unigram: float, run: Run
) -> list[str]:
  """Returns warnings of losses that ended too high, and a tip.

  Too high is above the unigram entropy, or 0.05 nats above the own best.
  """
  out = []
  fell = []
  for name, mode in modes.items():
    worse = []
    if mode["loss"] > unigram:
      worse.append(f"the held-out text's own token frequencies ({unigram:.3f})")
    if mode["loss"] > mode["best"] + _WORSE:
      step = mode["best_step"]
      worse.append(f"its best ({mode['best']:.3f} after step {step})")
      fell.append(name)
    if worse:
      loss = f"warning: {name} loss {mode['loss']:.3f} is worse than"
      out.append(f"{loss} {' and '.join(worse)}")
  if not out:
    return []
  if run.curriculum.steps < _FEW_STEPS:
    few = f"{run.curriculum.steps} steps are too few to learn much"
    return [f"tip: {few}: train for longer"]
  names = run.curriculum.objectives
  known = run.config.known_objectives
  last_phase = run.curriculum.phases[-1].shares
  if not {known[name].name for name in last_phase}.issuperset(fell):
    mixed = f"{run.curriculum.steps}{':'.join(names)} steps"
    tip = (
      "later phases can undo the learning of earlier phases; train all"
      f" objectives in every batch with --config.curriculum='{mixed}'"
    )
  elif fell and run.config.eval.watch:
    return out  # the run has kept its best step
  elif fell:
    tip = (
      "train for fewer epochs, or end at the best step with"
      f" --config.eval.watch={','.join(fell)} --config.eval.patience=5"
    )
  else:
    tip = "train for longer, or change schedule.peak_lr"
  return [*out, f"tip: {tip}"]
