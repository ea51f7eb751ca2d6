"""The names that `antlm_jax` offers, for type checkers and `__getattr__`."""

from antlm_jax.attention import attend as attend
from antlm_jax.commands.export import export as export
from antlm_jax.commands.import_ import import_model as import_model
from antlm_jax.commands.plan import plan as plan
from antlm_jax.commands.prepare import prepare as prepare
from antlm_jax.commands.train import Trained as Trained
from antlm_jax.commands.train import train as train
from antlm_jax.config import Config as Config
from antlm_jax.data.prepared_folder import Prepared as Prepared
from antlm_jax.errors import Stopped as Stopped
from antlm_jax.errors import UserError as UserError
from antlm_jax.evals.embed import embed as embed
from antlm_jax.evals.finetune import finetune as finetune
from antlm_jax.evals.predict import predict as predict
from antlm_jax.evals.score import evaluate as evaluate
from antlm_jax.evals.studies.compare import compare as compare
from antlm_jax.evals.studies.sweep import sweep as sweep
from antlm_jax.evals.zero_shot.perplexity import perplexity as perplexity
from antlm_jax.inference.filling import fill as fill
from antlm_jax.inference.generation import generate as generate
from antlm_jax.inference.model import Loaded as Loaded
from antlm_jax.inference.model import load as load
from antlm_jax.inference.scoring import score as score
from antlm_jax.masks import AttentionMask as AttentionMask
from antlm_jax.mesh import Mesh as Mesh
from antlm_jax.models.gemma import GemmaConfig as GemmaConfig
from antlm_jax.models.llama import LlamaConfig as LlamaConfig
from antlm_jax.models.ltg_bert import LtgBertConfig as LtgBertConfig
from antlm_jax.models.modernbert import ModernBertConfig as ModernBertConfig
from antlm_jax.objectives.objective import Objective as Objective
from antlm_jax.optim import WSD as WSD
from antlm_jax.optim import AdamW as AdamW
from antlm_jax.optim import Cosine as Cosine
from antlm_jax.optim import Lamb as Lamb
from antlm_jax.optim import Muon as Muon
from antlm_jax.sections import Data as Data
from antlm_jax.sections import Eval as Eval
from antlm_jax.sections import Init as Init
from antlm_jax.sections import Log as Log
from antlm_jax.sections import Saving as Saving
from antlm_jax.sections import Train as Train
from antlm_jax.training.hooks import Evaluator as Evaluator
from antlm_jax.training.hooks import Hook as Hook

__version__: str
