"""The constants of an MLA model's attention: softmax scale, mscale, YaRN frequencies; and what a config refuses."""

import itertools
import math

import attrs
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mla_fx import MlaConfig, Yarn
from mla_fx.backends import Run, cpu, reference
from mla_fx.effects import InputError, ops
from mla_fx.rope import frequencies

V3 = MlaConfig.deepseek_v3()


def yarn(**fields):
    return Yarn(**{"factor": 40.0, "original_max_position_embeddings": 4096} | fields)


def turns(pair, theta, dim, original):
    """How often a pair turns within the original context."""
    return original * theta ** (-2 * pair / dim) / (2 * math.pi)


def corrections(theta, dim, scaling):
    """The last pair that turns at least beta_fast times, and the first that turns at most beta_slow times."""
    original, pairs = scaling.original_max_position_embeddings, range(-2 * dim, 2 * dim)
    low = max(p for p in pairs if turns(p, theta, dim, original) >= scaling.beta_fast)
    high = min(p for p in pairs if turns(p, theta, dim, original) <= scaling.beta_slow)
    return max(low, 0), min(high, dim - 1)


def by_pair(theta, dim, scaling):
    """Fast pairs as they are, slow ones slowed, a line between."""
    low, high = corrections(theta, dim, scaling)
    found = []
    for pair in range(dim // 2):
        plain = theta ** (-2 * pair / dim)
        slowed = 0.0 if pair <= low else 1.0 if pair >= high else (pair - low) / (high - low)
        found.append(plain * (1 - slowed) + plain / scaling.factor * slowed)
    return found


# --- DeepSeek-V3, in numbers -----------------------------------------------


def test_sizes_of_deepseek_v3():
    assert attrs.asdict(V3) == {
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "latent_norm_eps": 1e-6,
        "yarn": {
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "attention_factor": None,
        },
    }
    assert V3.qk_head_dim == 192


def test_softmax_scale_of_deepseek_v3():
    assert V3.softmax_scale == pytest.approx(0.1352337789, abs=5e-11)
    plain = attrs.evolve(V3, yarn=None).softmax_scale
    assert plain == pytest.approx(0.0721687836, abs=5e-11)
    assert V3.softmax_scale / plain == pytest.approx(1.8738542071, abs=5e-10)


@pytest.mark.parametrize(
    ("fields", "mscale"),
    [
        ({"mscale_all_dim": 1.0}, 1.3688879454),
        ({"mscale_all_dim": 0.0}, 1.0),
        ({"mscale_all_dim": 1.0, "mscale": 0.0}, 1.3688879454),  # mscale is for cosine and sine only
        ({"mscale_all_dim": 0.707}, 1.2608037774),
        ({"mscale_all_dim": 1.0, "factor": 1.0}, 1.0),
        ({"mscale_all_dim": 1.0, "attention_factor": 3.0}, 1.3688879454),
    ],
)
def test_mscale_enters_the_softmax_scale_twice(fields, mscale):
    scale = attrs.evolve(V3, yarn=yarn(**fields)).softmax_scale
    assert scale == pytest.approx(mscale * mscale / math.sqrt(192), rel=1e-9)


@pytest.mark.parametrize(
    ("fields", "magnitude"),
    [
        ({}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, 1.2608037774 / 1.3688879454),
        ({"mscale": 1.0, "mscale_all_dim": 0.0}, 1.3688879454),
        ({"mscale": 0.0, "mscale_all_dim": 0.0}, 1.3688879454),
        ({"mscale": 0.0, "mscale_all_dim": 0.0, "factor": 1.0}, 1.0),
        ({"attention_factor": 1.25}, 1.25),
    ],
)
def test_magnitude_of_the_angles(fields, magnitude):
    assert yarn(**fields).angle_magnitude == pytest.approx(magnitude, rel=1e-9)


def test_frequencies_of_deepseek_v3():
    f = frequencies(V3)
    assert len(f) == 32 and f[0] == 1.0
    assert f[11] == pytest.approx(0.0390069, abs=5e-8)
    assert f[31] == pytest.approx(3.3338e-6, abs=5e-11)


def test_corrections_of_deepseek_v3():
    """Pairs up to 10 keep their frequency, those from 23 on turn at a fortieth; between, both take part."""
    slower = [plain / f for plain, f in zip(frequencies(attrs.evolve(V3, yarn=None)), frequencies(V3), strict=True)]
    assert slower[: 10 + 1] == [1.0] * 11
    assert slower[23:] == pytest.approx([40.0] * 9)
    assert all(1.0 < a < b < 40.0 for a, b in itertools.pairwise(slower[11:23]))
    assert corrections(10000.0, 64, V3.yarn) == (10, 23)


# --- frequencies by definition ---------------------------------------------


@pytest.mark.parametrize(("theta", "dim"), [(10000.0, 64), (10000.0, 4), (500000.0, 8), (10.0, 2)])
def test_plain_frequencies(theta, dim):
    """From 1 down by one factor, which would bring the pair after the last to 1 / theta."""
    f = frequencies(attrs.evolve(V3, rope_theta=theta, qk_rope_head_dim=dim, yarn=None))
    assert len(f) == dim // 2 and f[0] == 1.0
    factors = [b / a for a, b in itertools.pairwise([*f, 1 / theta])]
    assert factors == pytest.approx([factors[0]] * len(f), rel=1e-12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    dim=st.integers(1, 64).map(lambda n: 2 * n),
    theta=st.sampled_from([1000.0, 10000.0, 500000.0]),
    factor=st.floats(1, 64),
    original=st.sampled_from([6, 16, 128, 4096, 32768]),
    betas=st.sampled_from([(32.0, 1.0), (16.0, 2.0), (4.0, 3.9)]),
)
def test_yarn_frequencies(dim, theta, factor, original, betas):
    """Also where no pair turns beta_fast times, and where both corrections fall on one pair."""
    fast, slow = betas
    scaling = yarn(factor=factor, original_max_position_embeddings=original, beta_fast=fast, beta_slow=slow)
    low, high = corrections(theta, dim, scaling)
    assume(low <= high)  # else even the first pair turns too rarely, and there is no ramp to speak of
    f = frequencies(attrs.evolve(V3, rope_theta=theta, qk_rope_head_dim=dim, yarn=scaling))
    assert f == pytest.approx(by_pair(theta, dim, scaling), rel=1e-12)


def test_both_corrections_on_one_pair():
    """Six tokens are not one turn of the first pair: a step behind it, instead of a ramp."""
    scaling = yarn(original_max_position_embeddings=6)
    assert corrections(10000.0, 64, scaling) == (0, 0)
    f = frequencies(attrs.evolve(V3, yarn=scaling))
    assert f == pytest.approx([1.0, *(10000.0 ** (-i / 32) / 40 for i in range(1, 32))], rel=1e-12)


# --- from a config to rotated features -------------------------------------

each_backend = pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])


def rotate(backend, config, x, positions):
    """`x` [T, R] float64, through both rotary ops with the config's constants."""
    magnitude = config.yarn.angle_magnitude if config.yarn else 1.0
    positions = torch.tensor(positions)
    rules, run = backend.TABLE.rules, Run()
    angles = {"frequencies": frequencies(config), "magnitude": magnitude, "rounded": False}
    cos, sin = rules[ops.RopeAngles](positions, x, run=run, **angles)
    return rules[ops.Rope](x, cos, sin, run=run, heads=None)[0]


@each_backend
def test_rotation_of_the_contract(backend):
    config = attrs.evolve(V3, qk_rope_head_dim=4, yarn=None)
    (got,) = rotate(backend, config, torch.tensor([[1.0, 2, 3, 4]], dtype=torch.float64), [3]).tolist()
    assert got == pytest.approx([-1.2722, 2.8787, -1.8389, 4.0882], abs=5e-5)


@each_backend
def test_scores_depend_on_the_distance_only(backend):
    q, k = torch.randn(2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    at = [(7, 0), (4102, 4095), (163839, 163832)]
    scores = [(rotate(backend, V3, q[None], [p]) * rotate(backend, V3, k[None], [j])).sum().item() for p, j in at]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-9)
    pairs = torch.view_as_complex(q.view(32, 2)) * torch.view_as_complex(k.view(32, 2)).conj()
    angles = [7 * f for f in by_pair(10000.0, 64, V3.yarn)]
    turned = sum(p * complex(math.cos(a), math.sin(a)) for p, a in zip(pairs.tolist(), angles, strict=True))
    assert scores[0] == pytest.approx(turned.real, abs=1e-11)


@each_backend
def test_magnitude_scales_both_sides_of_a_score(backend):
    x = torch.ones(1, 64, dtype=torch.float64)
    louder = attrs.evolve(V3, yarn=yarn(attention_factor=1.5))
    assert torch.allclose(rotate(backend, louder, x, [9]), 1.5 * rotate(backend, V3, x, [9]), rtol=1e-14)


# --- what is refused -------------------------------------------------------

WHOLE = [
    "hidden_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [0, -4, 2.0, True, None])
def test_sizes_that_are_refused(name, value):
    with pytest.raises(InputError, match=rf"^{name}: must be an integer of at least 1: got {value!r}$"):
        attrs.evolve(V3, **{name: value})


def test_odd_rotation_is_refused():
    with pytest.raises(InputError, match=r"^qk_rope_head_dim: must be even, for pairs to rotate: got 63$"):
        attrs.evolve(V3, qk_rope_head_dim=63)


@pytest.mark.parametrize(("name", "bound"), [("rope_theta", 1), ("rms_norm_eps", 0), ("latent_norm_eps", 0)])
@pytest.mark.parametrize("value", [0, -1.0, "1", float("nan"), float("inf")])
def test_constants_that_are_refused(name, bound, value):
    with pytest.raises(InputError, match=rf"^{name}: must be a number above {bound}: got {value!r}$"):
        attrs.evolve(V3, **{name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 0.5}, r"factor: must be a number of at least 1: got 0\.5"),
        ({"factor": "40"}, r"factor: must be a number of at least 1: got '40'"),
        (
            {"original_max_position_embeddings": 0},
            r"original_max_position_embeddings: must be an integer of at least 1: got 0",
        ),
    ],
)
def test_yarn_that_is_refused(fields, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        yarn(**fields)
