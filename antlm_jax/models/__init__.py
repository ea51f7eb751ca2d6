"""The encoders, behind one functional interface."""

from antlm_jax.models.model import (
  ENCODERS,
  Model,
  Params,
  build,
  defaults,
  from_config,
)

__all__ = ["ENCODERS", "Model", "Params", "build", "defaults", "from_config"]
