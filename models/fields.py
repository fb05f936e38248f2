"""Fields of a `config.json`: those that change nothing, those that may have one value only, a reader of the others."""

import math
import sys
from collections.abc import Mapping
from typing import Any, Final

from attrs import fields_dict, frozen

from mla_fx.config import Yarn
from mla_fx.effects import InputError

#: The largest float64; an integer of a file may be larger.
MAX_FLOAT: Final = sys.float_info.max
#: Fields that may have one value only, that of the published code where they are missing.
ONLY: Final[Mapping[str, Any]] = {
    "attention_bias": False,
    "rope_interleave": True,
    "mlp_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    # Of every configuration of transformers 4, written in full.
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
    "torchscript": False,
    "use_bfloat16": False,
}
#: Fields that do not change what the model computes: of training, of generation, of classes and files.
IGNORED: Final = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout attn_implementation
    auto_map aux_loss_alpha dtype ep_size head_dim initializer_range mla_quantize moe_quantize output_attentions
    output_hidden_states output_router_logits pad_token_id pretraining_tp qk_head_dim quantize return_dict
    router_aux_loss_coef seq_aux torch_dtype transformers_version use_cache

    bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id id2label label2id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix problem_type
    remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tokenizer_class top_k top_p typical_p unk_token_id use_return_dict
    """.split()  # noqa: SIM905
)
#: Fields of a model around a text model that stand for the text model's, where it has none.
INHERITED: Final = (
    "bos_token_id",
    "eos_token_id",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
    "dtype",
)
#: Fields of `rope_parameters` or `rope_scaling`.
ROPE: Final = frozenset({*fields_dict(Yarn), "rope_theta", "rope_type", "type", "partial_rotary_factor", "truncate"})


_REQUIRED: Any = object()


@frozen
class Reader:
    """Fields of an object, checked as they are read.  A null counts as missing."""

    given: Mapping[str, Any]
    prefix: str = ""

    def count(self, name: str, *, default: Any = _REQUIRED, least: int = 1) -> Any:
        """An integer of at least `least`."""
        value = self.present(name, default)
        if value is default:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{self.prefix}{name}: must be an integer of at least {least}: got {value!r}")
        return value

    def number(self, name: str, *, default: Any = _REQUIRED, least: float = -math.inf) -> Any:
        """A finite number of at least `least`, as a float."""
        value = self.present(name, default)
        if value is default:
            return value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InputError(f"{self.prefix}{name}: must be a number: got {value!r}")
        if not least <= value <= MAX_FLOAT or value == -math.inf:
            kind = "a finite number" if least == -math.inf else f"a finite number of at least {least:g}"
            raise InputError(f"{self.prefix}{name}: must be {kind}: got {value!r}")
        return float(value)

    def word(self, name: str, *, default: Any = _REQUIRED) -> str:
        """A string."""
        value = self.present(name, default)
        if not isinstance(value, str):
            raise InputError(f"{self.prefix}{name}: must be a string: got {value!r}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.present(name, default)
        if not isinstance(value, bool):
            raise InputError(f"{self.prefix}{name}: must be true or false: got {value!r}")
        return value

    def present(self, name: str, default: Any) -> Any:
        """The value, `default` where it is missing or null; raises `InputError` where there is no default."""
        value = self.given.get(name)
        if value is None and default is _REQUIRED:
            raise InputError(f"{self.prefix}{name}: must be given: got nothing")
        return default if value is None else value
