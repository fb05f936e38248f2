"""In float32 every size runs, on each release: what the operators do not take is padded, sliced, or plain torch."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mla_fx import MlaConfig, backends, orchestrations
from mla_fx.backends.ascend.emulator.releases import RELEASES
from mla_fx.effects import schedule
from tests.backends.ascend.conftest import play
from tests.backends.ascend.steps import ascend, leaves
from tests.setups import Setup

#: Kernels want multiples of 8, 16 and 128, at most 512 features, and powers of two of heads.
SMALL = st.integers(1, 40)
LARGE = {"latent": 520, "rope": 130, "nope": 129, "value": 3, "heads": 6, "hidden": 7, "low": None}


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, int | None]:
    return {
        "latent": draw(SMALL),
        "rope": 2 * draw(st.integers(1, 10)),
        "nope": draw(SMALL),
        "value": draw(SMALL),
        "heads": 2 * draw(st.integers(1, 9)),
        "hidden": draw(SMALL),
        "low": draw(st.none() | SMALL),
    }


def made(of: dict[str, int | None], *, layers: int | None, block_size: int, tokens: int = 3) -> Setup:
    config = MlaConfig(
        hidden_size=of["hidden"],
        num_attention_heads=of["heads"],
        q_lora_rank=of["low"],
        kv_lora_rank=of["latent"],
        qk_nope_head_dim=of["nope"],
        qk_rope_head_dim=of["rope"],
        v_head_dim=of["value"],
    )
    return Setup(layers=layers, config=config, block_size=block_size, table_width=12, tokens=tokens)


def holds(machine, release: str, of: Setup) -> None:
    """Each release takes the program and gives what the reference does."""
    with pytest.MonkeyPatch.context() as patch:
        play(machine, patch, release)
        program = schedule(of.step, orchestrations.attention_aside)
        got = leaves(ascend(of.ranks), program, of)
        want = leaves(backends.get("reference", ranks=of.ranks), program, of)
    for ours, exactly in zip(got, want, strict=True):
        scale = exactly.abs().max().item() if exactly.numel() else 1.0
        torch.testing.assert_close(ours.double(), exactly, rtol=0, atol=2e-5 * max(scale, 1.0))


HOW = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
ANY = (st.sampled_from(list(RELEASES)), sizes(), st.sampled_from([None, 2]), st.integers(1, 9))


@settings(max_examples=3, **HOW)
@given(*ANY)
@example("8.5", LARGE, None, 3)
@example("9.1", {**LARGE, "latent": 12, "rope": 4}, 2, 5)
def test_any_sizes(emulator, release, of, layers, block_size):
    holds(emulator, release, made(of, layers=layers, block_size=block_size))


@pytest.mark.soak
@settings(max_examples=300, **HOW)
@given(*ANY)
def test_many_more_sizes(emulator, release, of, layers, block_size):
    holds(emulator, release, made(of, layers=layers, block_size=block_size))
