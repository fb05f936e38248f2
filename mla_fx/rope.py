"""Rotary frequencies, with YaRN.

    f[i] = theta^(-2 i / R)                                   i = 0 .. R/2 - 1

YaRN slows the low frequencies by `factor` and leaves the high ones alone.  The
pair that turns `beta` times within the original context has index

    pair(beta) = R ln(original / (2 pi beta)) / (2 ln theta)

and between low = floor(pair(beta_fast)) and high = ceil(pair(beta_slow)) a ramp
blends the two:  f[i] / factor * ramp[i] + f[i] * (1 - ramp[i]).

Source: YaRN (arXiv 2309.00071), section 3.2, as in DeepSeek-V3.
"""

import math

from mla_fx.config import MlaConfig, Yarn


def frequencies(config: MlaConfig) -> tuple[float, ...]:
    """The R / 2 angular frequencies, radians per token.

    >>> f = frequencies(MlaConfig.deepseek_v3())
    >>> f[0], round(f[11], 7), round(f[31], 10)
    (1.0, 0.0390069, 3.3338e-06)
    """
    pairs = config.qk_rope_head_dim // 2
    plain = [config.rope_theta ** (-i / pairs) for i in range(pairs)]
    if config.yarn is None:
        return tuple(plain)
    ramp = _ramp(config.yarn, config.rope_theta, config.qk_rope_head_dim)
    return tuple(f / config.yarn.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True))


def _ramp(yarn: Yarn, theta: float, dim: int) -> list[float]:
    def pair(beta: float) -> float:
        turns = yarn.original_max_position_embeddings / (2 * math.pi * beta)
        return dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair(yarn.beta_fast)), 0)
    high = min(math.ceil(pair(yarn.beta_slow)), dim - 1)
    width = (high - low) or 0.001  # a step, where both betas fall on one pair
    return [min(max((i - low) / width, 0.0), 1.0) for i in range(dim // 2)]
