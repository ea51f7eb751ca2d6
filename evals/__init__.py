"""Evaluation: zero-shot minimal pairs, fine-tuning, reports.

The link antlm_jax/evals makes this a part of the library. Under another name,
its modules and the parts of plugins would exist twice.
"""

if __name__ != "antlm_jax.evals":
  raise ImportError(
    f"import antlm_jax.evals instead of {__name__}: it is a part of antlm_jax"
  )
