"""Fine-tuning, from examples to a score.

Steps of `antlm_jax.finetune`, in their order:

  step        where                   result
  plan        `evals/finetune.py`     a `TaskJob` for each task of a `Preset`
  read        `sets`, `record_values` the `Example`s of train, dev and test
  define      `labelled`, `tagging`,  a `Task`: examples, head and metrics;
              `answering`, `glue`,    a `TaskHead`: rows, loss, predictions
              `retrieval`, ...
  encode      `TaskHead.encode`       the `ExampleRows` of each set
  train       `loop`, `trial`         for each learning rate and seed, which are
                                      a `TrialRun`, a `TuningOutcome`; the runs
                                      that train together are a `Trial`
  summarise   `summary`               a `Summary` (summary.json) of a task
  save        `saved`                 the best run's model, with its head
  return      `summary`               a `FineTuning`: a `TunedTask` by name

`task` has the interfaces of tasks, heads and presets. `presets` lists them.
"""
