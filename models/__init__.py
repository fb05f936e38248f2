"""DeepSeek models: configuration, checkpoints, the stack of layers, generation."""

if __name__ != "mla_fx.models":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.models', not {__name__!r}")

from mla_fx.models.blocks import BlockManager as BlockManager
from mla_fx.models.blocks import OutOfBlocksError as OutOfBlocksError
from mla_fx.models.checkpoint import Checkpoint as Checkpoint
from mla_fx.models.checkpoint import CheckpointError as CheckpointError
from mla_fx.models.config import ModelConfig as ModelConfig
from mla_fx.models.config import deepseek_v3_config as deepseek_v3_config
from mla_fx.models.config import small_config as small_config
from mla_fx.models.config_file import load_config as load_config
from mla_fx.models.engine import Engine as Engine
from mla_fx.models.generation import GenerationConfig as GenerationConfig
from mla_fx.models.generation import load_generation_config as load_generation_config
from mla_fx.models.load import Loader as Loader
from mla_fx.models.parameters import ModelParams as ModelParams
from mla_fx.models.parameters import MtpParams as MtpParams
from mla_fx.models.prediction import MtpDrafter as MtpDrafter
from mla_fx.models.request import Output as Output
from mla_fx.models.request import Request as Request
from mla_fx.models.runner import Runner as Runner
from mla_fx.models.sampling import Logprobs as Logprobs
from mla_fx.models.sampling import Sampling as Sampling
from mla_fx.models.stack import decoder_layer as decoder_layer
from mla_fx.models.stack import model_step as model_step
from mla_fx.models.stack import mtp_step as mtp_step
from mla_fx.models.write import write_checkpoint as write_checkpoint
