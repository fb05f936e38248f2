"""DeepSeek models: configuration and checkpoints in Hugging Face format."""

if __name__ != "mla_fx.models":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.models', not {__name__!r}")

from mla_fx.models.checkpoint import Checkpoint as Checkpoint
from mla_fx.models.checkpoint import CheckpointError as CheckpointError
from mla_fx.models.checkpoint import write_checkpoint as write_checkpoint
from mla_fx.models.config import ModelConfig as ModelConfig
from mla_fx.models.config import load_config as load_config
from mla_fx.models.config import small_config as small_config
