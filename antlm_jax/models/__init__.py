"""The encoders, behind one functional interface."""

from antlm_jax.models.encoder import Encoder, EncoderConfig
from antlm_jax.models.layers import At
from antlm_jax.models.model import (
  ENCODERS,
  Model,
  Params,
  Tensor,
  build,
  config_type,
  defaults,
  from_config,
)

__all__ = [
  "ENCODERS",
  "At",
  "Encoder",
  "EncoderConfig",
  "Model",
  "Params",
  "Tensor",
  "build",
  "config_type",
  "defaults",
  "from_config",
]
