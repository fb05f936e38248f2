"""The properties of the decode step and of the whole model, on the emulated Ascend.

Those of `tests/test_merged_attention.py` and `tests/models/test_model_agreement.py`,
with the sizes that the attention operator takes where it is the one that runs.
"""

import itertools

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_fx import backends, orchestrations
from mla_fx.backends.ascend.emulator import Machine
from mla_fx.effects import schedule
from tests.cases import mostly_soak
from tests.models.test_model_agreement import CASES, PROMPT, agree, ours, transformers_model
from tests.oracles import dense_causal
from tests.sequences import Case, fill
from tests.setups import ANYWHERE
from tests.test_merged_attention import cases, hold, merge_step, merged, whole


@st.composite
def taken(draw: st.DrawFn) -> Case:
    """Any case of the property, with L, R and blocks as the operator wants them in 16 bits."""
    case = draw(cases())
    if case.dtype in ("fp32", "fp64"):
        return evolve(case, dtype="fp32")
    size = case.interleave * draw(st.sampled_from([16, 32])) if case.interleave < 128 else 128
    return evolve(case, latent=512, rope=64, block_size=size, sharpness=min(case.sharpness, 1.0) / 4)


def any_split_is_the_whole(machine: Machine, case: Case, orchestration: str, seed: int) -> None:
    machine.seed(seed)
    data = fill(case)
    program = schedule(merge_step(case), orchestrations.NAMED[orchestration])
    result = merged(backends.get("ascend", ranks=case.layout), program, data).cpu()
    hold(result, data, whole(data, dense_causal, torch.float64))


ANY = (taken(), st.sampled_from(ANYWHERE), st.integers(0, 10**6))
HOW = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=15, **HOW)
@given(*ANY)
def test_any_split_is_the_whole(emulator, case, orchestration, seed):
    any_split_is_the_whole(emulator, case, orchestration, seed)


@pytest.mark.soak
@settings(max_examples=300, **HOW)
@given(*ANY)
def test_any_of_many_splits_is_the_whole(emulator, case, orchestration, seed):
    any_split_is_the_whole(emulator, case, orchestration, seed)


@pytest.mark.parametrize(
    ("ranks", "dtype"), mostly_soak(itertools.product([1, 8], ["bf16", "fp16", "fp32"]), [(8, "bf16"), (1, "fp32")])
)
def test_real_sizes_and_thousands_of_tokens(emulator, dtype, ranks):
    sizes = {"block_size": 128, "heads": 16, "latent": 512, "rope": 64, "dtype": dtype, "sharpness": 0.1}
    case = Case((3000, 0, 1, 128), (1, 8, 1, 3), ranks, 128, **sizes)
    data, program = fill(case), schedule(merge_step(case), orchestrations.attention_aside)
    result = merged(backends.get("ascend", ranks=ranks), program, data).cpu()
    hold(result, data, whole(data, dense_causal, torch.float64))


@pytest.mark.parametrize("case", mostly_soak(CASES, ["v2", "v3 yarn"]))
def test_model_agrees_with_transformers(emulator, case, tmp_path):
    """Prompt and 6 decoded positions, ranks 1 to 8."""
    model = transformers_model(case, tmp_path)
    prompt = torch.randint(101, (PROMPT,), generator=torch.Generator().manual_seed(4)).tolist()
    agree(model, *ours(tmp_path, prompt, *CASES[case][2:], backend="ascend", decoded=6))
