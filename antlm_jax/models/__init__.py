"""The encoders, behind one functional interface."""

from antlm_jax.models import gemma, llama, ltg_bert, modernbert
from antlm_jax.models.encoder import ENCODERS, Encoder, EncoderConfig
from antlm_jax.models.layers import At
from antlm_jax.models.model import Model, Params, Tensor, build, from_config

__all__ = [
  "ENCODERS",
  "At",
  "Encoder",
  "EncoderConfig",
  "Model",
  "Params",
  "Tensor",
  "build",
  "from_config",
  # Imported here, so that they are registered:
  "gemma",
  "llama",
  "ltg_bert",
  "modernbert",
]
