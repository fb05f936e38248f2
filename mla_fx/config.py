"""What defines the layers of an MLA model, validated where it is born.

Names are those of a Hugging Face `config.json`; reading one is for
`mla_fx.models`.  Fields hold numbers only, so that a config can be a key.
"""

import math

from attrs import field, frozen
from attrs.validators import optional

from mla_fx.effects.validate import InputError, integer, number, one_of


@frozen(kw_only=True)
class Yarn:
    """YaRN scaling of the rotary frequencies, as in `rope_scaling` of a checkpoint.

    An mscale of 0 means that the checkpoint gives none.  `attention_factor`, where a checkpoint gives one,
    replaces the factor on cosine and sine that would follow from the mscales.
    """

    factor: float = field(validator=number(least=1))
    original_max_position_embeddings: int = field(validator=integer(1))
    beta_fast: float = field(default=32.0, validator=number(above=0))
    beta_slow: float = field(default=1.0, validator=number(above=0))
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    attention_factor: float | None = None

    @property
    def angle_magnitude(self) -> float:
        """Factor on cosine and sine: the mscales' ratio (1 for DeepSeek-V3), without them 0.1 ln factor + 1."""
        if self.attention_factor is not None:
            return self.attention_factor
        if not (self.mscale and self.mscale_all_dim):
            return _mscale(self.factor, 1.0)
        return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)


@frozen(kw_only=True)
class MlaConfig:
    """Sizes and constants of one model's attention; the same for all layers.

    >>> round(MlaConfig.deepseek_v3().softmax_scale, 10)
    0.1352337789
    """

    hidden_size: int = field(validator=integer(1))
    num_attention_heads: int = field(validator=integer(1))
    q_lora_rank: int | None = field(default=None, validator=optional(integer(1)))
    kv_lora_rank: int = field(validator=integer(1))
    qk_nope_head_dim: int = field(validator=integer(1))
    qk_rope_head_dim: int = field(validator=integer(1, even=True))
    v_head_dim: int = field(validator=integer(1))
    rope_theta: float = field(default=10000.0, validator=number(above=1))
    yarn: Yarn | None = None
    rms_norm_eps: float = field(default=1e-6, validator=number(above=0))
    #: Epsilon of `q_a_layernorm` and `kv_a_layernorm`; Hugging Face builds them with 1e-6, not with rms_norm_eps.
    latent_norm_eps: float = field(default=1e-6, validator=number(above=0))

    @property
    def qk_head_dim(self) -> int:
        """Features of a query head: without position, then with."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^-0.5, times mscale squared with YaRN (mscale = 0.1 mscale_all_dim ln factor + 1)."""
        mscale = _mscale(self.yarn.factor, self.yarn.mscale_all_dim) if self.yarn else 1.0
        return float(self.qk_head_dim**-0.5 * mscale**2)

    @classmethod
    def deepseek_v3(cls) -> "MlaConfig":
        """The attention of DeepSeek-V3, 671B."""
        yarn = Yarn(factor=40.0, original_max_position_embeddings=4096)
        return cls(
            hidden_size=7168,
            num_attention_heads=128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            yarn=yarn,
        )


@frozen(kw_only=True)
class MoeConfig:
    """Experts of one model's MoE layers and the gate that chooses among them, as in `config.json`.

    `topk_method` is "noaux_tc" (DeepSeek-V3: groups by the sum of their two best, with a correction bias),
    "group_limited_greedy" (DeepSeek-V2: groups by their best) or "greedy" (V2-Lite: no groups).
    """

    n_routed_experts: int = field(validator=integer(1))
    num_experts_per_tok: int = field(validator=integer(1))
    moe_intermediate_size: int = field(validator=integer(1))
    n_shared_experts: int = field(default=0, validator=integer(0))
    n_group: int = field(default=1, validator=integer(1))
    topk_group: int = field(default=1, validator=integer(1))
    topk_method: str = field(default="noaux_tc", validator=one_of("noaux_tc", "group_limited_greedy", "greedy"))
    scoring_func: str = field(default="sigmoid", validator=one_of("sigmoid", "softmax"))
    norm_topk_prob: bool = True
    routed_scaling_factor: float = field(default=1.0, validator=number(above=0))

    def __attrs_post_init__(self) -> None:
        experts, groups = self.n_routed_experts, self.groups
        if experts % groups:
            raise InputError(f"n_group: must divide n_routed_experts, {experts}: got {groups}")
        if self.topk_method == "noaux_tc" and experts // groups < 2:
            raise InputError(
                f"n_group: a group must have two of the {experts} n_routed_experts, for the sum of its two best: "
                f"got {groups}"
            )
        if self.top_groups > groups:
            raise InputError(f"topk_group: must be at most n_group, {groups}: got {self.top_groups}")
        if self.num_experts_per_tok > self.top_groups * (experts // groups):
            raise InputError(
                f"num_experts_per_tok: must be at most {self.top_groups * (experts // groups)}, the experts of "
                f"{self.top_groups} groups: got {self.num_experts_per_tok}"
            )

    @property
    def groups(self) -> int:
        """Groups that the selection looks at: one where it is greedy."""
        return 1 if self.topk_method == "greedy" else self.n_group

    @property
    def top_groups(self) -> int:
        """Groups that stay."""
        return 1 if self.topk_method == "greedy" else self.topk_group


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if mscale and factor > 1 else 1.0
