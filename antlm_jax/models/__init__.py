"""Encoders with one functional interface."""

# Importing these modules registers their encoders.
from antlm_jax.models import bert, gemma, llama, ltg_bert, modernbert, ultrabert
from antlm_jax.models.encoder import ENCODERS, Encoder, EncoderConfig
from antlm_jax.models.model import (
  Model,
  Params,
  Tensor,
  build_model,
  divided,
  from_config,
  lacks_head,
)

__all__ = [
  "ENCODERS",
  "Encoder",
  "EncoderConfig",
  "Model",
  "Params",
  "Tensor",
  "bert",
  "build_model",
  "divided",
  "from_config",
  "gemma",
  "lacks_head",
  "llama",
  "ltg_bert",
  "modernbert",
  "ultrabert",
]
