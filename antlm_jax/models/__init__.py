"""Encoders with one functional interface."""

from antlm_jax.models import gemma, llama, ltg_bert, modernbert, ultrabert
from antlm_jax.models.encoder import ENCODERS, Encoder, EncoderConfig
from antlm_jax.models.model import (
  Model,
  Params,
  Tensor,
  build_model,
  from_config,
)

__all__ = [
  "ENCODERS",
  "Encoder",
  "EncoderConfig",
  "Model",
  "Params",
  "Tensor",
  "build_model",
  "from_config",
  # Importing these modules registers their encoders.
  "gemma",
  "llama",
  "ltg_bert",
  "modernbert",
  "ultrabert",
]
