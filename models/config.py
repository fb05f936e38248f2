"""What a model is: its layers, and what the names and shapes of its checkpoint follow from.

`mla_fx.models.config_file` reads one from the `config.json` of a checkpoint.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import asdict, field, frozen

from mla_fx.config import MlaConfig, MoeConfig, Yarn

#: Side of the square blocks that FP8 weights have a scale for.
FP8_BLOCK: Final = 128
#: What a `config.json` says of weights in 8 bits: FP8 in blocks, int8 by output feature (compressed-tensors' W8A8).
STORAGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    },
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
        "ignore": ["lm_head"],
    },
}


@frozen(kw_only=True)
class ModelConfig:
    """What a model's layers are, and what names and shapes of its checkpoint follow from."""

    model_type: str = "deepseek_v3"
    attention: MlaConfig
    moe: MoeConfig | None = None
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    max_position_embeddings: int | None = None
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    #: How the checkpoint stores projections: None as they are, "fp8" or "int8" as in `STORAGES`, "modelslim" as its
    #: `quant_model_description.json` says; anything else is the name of a format that is not read.
    storage: str | None = None
    #: What the names of the checkpoint's tensors begin with, where it holds other parts beside this model.
    prefix: str = field(default="", eq=False)
    #: Everything else that the file says, as it says it.
    rest: Mapping[str, Any] = field(factory=dict, eq=False, repr=False)

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts in place of one feed-forward network; prediction layers have."""
        if self.moe is None:
            return False
        if layer >= self.num_hidden_layers:
            return True
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def to_json(self) -> dict[str, Any]:
        """The fields of a `config.json` that gives this configuration again."""
        attention = asdict(self.attention, filter=lambda a, _: a.name not in ("yarn", "rope_theta", "latent_norm_eps"))
        own = asdict(self, filter=lambda a, _: a.name not in ("attention", "moe", "storage", "prefix", "rest"))
        moe = asdict(self.moe) if self.moe else {}
        rope: dict[str, Any] = {"rope_theta": self.attention.rope_theta, "rope_type": "default"}
        if self.attention.yarn:
            rope |= {"rope_type": "yarn", **asdict(self.attention.yarn, filter=lambda _, value: value is not None)}
        own["eos_token_id"] = list(self.eos_token_id) or None
        own = {name: value for name, value in own.items() if value is not None}
        own["num_key_value_heads"] = self.attention.num_attention_heads
        if self.storage is not None and self.storage in STORAGES:
            own["quantization_config"] = dict(STORAGES[self.storage])
        return {**self.rest, **own, **moe, **attention, "rope_parameters": rope}


def small_config() -> ModelConfig:
    """A small model of DeepSeek-V3's form, for tests and demonstrations: 4 layers, 16 heads, 8 experts, YaRN."""
    attention = MlaConfig(
        hidden_size=256,
        num_attention_heads=16,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        yarn=Yarn(factor=8.0, original_max_position_embeddings=256),
    )
    return ModelConfig(
        attention=attention,
        moe=MoeConfig(
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
        ),
        num_hidden_layers=4,
        vocab_size=512,
        intermediate_size=512,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
    )


def deepseek_v3_config() -> ModelConfig:
    """DeepSeek-V3, 671B, as published."""
    return ModelConfig(
        attention=MlaConfig.deepseek_v3(),
        moe=MoeConfig(
            n_routed_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=2048,
            n_shared_experts=1,
            n_group=8,
            topk_group=4,
            routed_scaling_factor=2.5,
        ),
        num_hidden_layers=61,
        vocab_size=129280,
        intermediate_size=18432,
        first_k_dense_replace=3,
        num_nextn_predict_layers=1,
        max_position_embeddings=163840,
        bos_token_id=0,
        eos_token_id=(1,),
        storage="fp8",
    )
