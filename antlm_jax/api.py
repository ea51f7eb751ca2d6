"""The public API: every name that `antlm_jax` offers, loaded at once."""

from antlm_jax.attention import attend as attend
from antlm_jax.commands.export import export as export
from antlm_jax.commands.import_ import import_model as import_model
from antlm_jax.commands.merge import merge as merge
from antlm_jax.commands.plan import plan as plan
from antlm_jax.commands.prepare import prepare as prepare
from antlm_jax.commands.train import train as train
from antlm_jax.config import Config as Config
from antlm_jax.inference.generation import generate as generate
from antlm_jax.inference.model import load as load
from antlm_jax.inference.scoring import score as score
from antlm_jax.masks import AttentionMask as AttentionMask
from antlm_jax.objectives.objective import Objective as Objective
from antlm_jax.training.hooks import Evaluator as Evaluator
from antlm_jax.training.hooks import Hook as Hook
