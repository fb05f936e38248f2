"""The properties of the decode step and of the whole model, on the emulated Ascend.

Those of `tests/test_merged_attention.py` and `tests/models/test_model_agreement.py`,
with the sizes that the attention operator takes where it is the one that runs.
"""

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_fx import backends, orchestrations
from mla_fx.effects import schedule
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


@pytest.mark.usefixtures("emulator")
@settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
@given(taken(), st.sampled_from(ANYWHERE), st.integers(0, 10**6))
def test_any_split_is_the_whole(machine, case, orchestration, seed):
    machine.seed(seed)
    data = fill(case)
    program = schedule(merge_step(case), orchestrations.NAMED[orchestration])
    result = merged(backends.get("ascend", ranks=case.ranks), program, data).cpu()
    hold(result, data, whole(data, dense_causal, torch.float64))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("ranks", [1, 8])
def test_real_sizes_and_thousands_of_tokens(emulator, dtype, ranks):
    sizes = {"block_size": 128, "heads": 16, "latent": 512, "rope": 64, "dtype": dtype, "sharpness": 0.1}
    case = Case((3000, 0, 1, 128), (1, 8, 1, 3), ranks, 128, **sizes)
    data, program = fill(case), schedule(merge_step(case), orchestrations.attention_aside)
    result = merged(backends.get("ascend", ranks=ranks), program, data).cpu()
    hold(result, data, whole(data, dense_causal, torch.float64))


@pytest.mark.parametrize("case", CASES)
def test_model_agrees_with_transformers(emulator, case, tmp_path):
    """Prompt and 16 decoded positions, ranks 1 to 8."""
    model = transformers_model(case, tmp_path)
    prompt = torch.randint(101, (PROMPT,), generator=torch.Generator().manual_seed(4)).tolist()
    agree(model, *ours(tmp_path, prompt, *CASES[case][2:], backend="ascend", decoded=16))
