"""Commands: each turns its arguments into one call, and prints the result."""

# Modules that have `main(argv)`, by command, and the first words of argv. Those
# of jobs also have `done(argv)`: whether the results exist.
COMMANDS = {
  "prepare": "antlm_jax.commands.prepare",
  "train": "antlm_jax.commands.train",
  "plan": "antlm_jax.commands.plan",
  "generate": "antlm_jax.commands.generate",
  "fill": "antlm_jax.commands.fill",
  "export": "antlm_jax.commands.export",
  "import": "antlm_jax.commands.import_",
  "configs": "antlm_jax.commands.configs",
  "doctor": "antlm_jax.commands.doctor",
  "toy_english": "antlm_jax.data.toy_english",
  "eval score": "antlm_jax.evals.score",
  "eval blimp": "antlm_jax.evals.score --task=blimp",
  "eval ewok": "antlm_jax.evals.score --task=ewok",
  "eval perplexity": "antlm_jax.evals.score --task=perplexity",
  "eval finetune": "antlm_jax.evals.finetune",
  "eval babylm": "antlm_jax.evals.babylm",
  "predict": "antlm_jax.evals.predict",
  "embed": "antlm_jax.evals.embed",
  "report": "antlm_jax.evals.studies.report",
  "compare": "antlm_jax.evals.studies.compare",
  "sweep": "antlm_jax.evals.studies.sweep",
  "study": "antlm_jax.evals.studies.make",
}
