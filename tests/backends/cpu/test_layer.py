"""A whole layer on the CPU: weights are kept once, in the form of their products, and a token's bits are its own."""

import pytest
import torch
from torch.utils import _pytree as pytree

from mla_fx import backends, orchestrations
from mla_fx.backends.cpu import products
from mla_fx.backends.table import tensors
from mla_fx.decode import weight_avals
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval, Value, parameters, schedule, trace
from mla_fx.feed_forward import moe
from mla_fx.models.weights import layer_weights
from mla_fx.parameters import LayerParams
from mla_fx.projections import rms_norm
from tests.benchmarks.layers import Case, ours, step_of
from tests.benchmarks.test_layer import SMALL
from tests.cases import each

kernel = pytest.mark.skipif(not products.compiled(torch.float32), reason="no kernel here")


@pytest.fixture(params=["panels", "oneDNN", "as they are"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How float32 weights are kept: as some processor wants those of some dtype."""
    chosen: str = request.param
    if chosen == "panels" and not products.compiled(torch.float32):
        pytest.skip("no kernel here")
    monkeypatch.setattr(products, "compiled", lambda dtype: chosen == "panels")
    monkeypatch.setattr(products, "packs", lambda dtype: chosen == "oneDNN")
    return chosen


def test_it_is_the_layer_in_each_form(form: str) -> None:
    """That of float64, and on the hostile machine the same bits."""
    case = Case(SMALL, 3, 70, "fp32")
    found, exact = ours(case)(), ours(case, backends.get("reference"))()
    assert (found.double() - exact).abs().max() <= 2e-5 * exact.abs().max()
    assert torch.equal(ours(case, backends.get("cpu", adversary=3))(), found)


def test_weights_are_there_once(form: str) -> None:
    """In the form of their products alone: as many bytes as they have, but for the gate's, where it is widened."""
    for dtype in ("fp32", "bf16") if form != "oneDNN" else ("fp32",):  # it packs bf16 on some processors only
        case = Case(SMALL, 1, 5, dtype)
        backend = backends.get("cpu")
        prepared = backend.prepare(schedule(step_of(case), orchestrations.serial), [case.params])
        gate = case.params.feed_forward.gate
        widened = gate.numel() * 4 - gate.nbytes
        assert prepared.held(0) == (sum(leaf.nbytes for leaf in pytree.tree_leaves(case.params)) + widened, 0)
        # 4 of attention, 2 of experts, 2 of the shared one, the gate
        assert len(prepared.kept) == 9
        leaves = [tensors(leaf) for (leaf,) in prepared.leaves.values()]
        packed = [len(of) for of in leaves if all(leaf.layout is not torch.strided or leaf.dim() > 3 for leaf in of)]
        experts = SMALL.moe.n_routed_experts
        # An expert's is packed by itself; of panels only those of experts have an axis more than a weight.
        assert sorted(packed) == {"panels": [1, 1], "oneDNN": [*[1] * 7, experts, experts], "as they are": []}[form]


@kernel
@each("dtype", ["bf16", "fp16", "fp32"])
def test_a_token_has_the_same_experts_and_bits_alone_and_in_any_batch(dtype: str) -> None:
    """From the norm on to the sum of its experts, bit for bit: all widths are multiples of 16, as panels are."""
    if not products.compiled(DTYPES[dtype]):
        return  # its products are the library's
    case = Case(SMALL, 9, 1, dtype)

    def experts(x: torch.Tensor) -> torch.Tensor:
        def function(hidden: Value, params: LayerParams[Value]) -> Value:
            x = rms_norm(hidden, params.post_attention_layernorm, epsilon=1e-6)
            return moe(x, params.feed_forward, config=SMALL.moe, group=case.shape.ep, among=case.shape.tp)

        shapes = weight_avals(layer_weights(SMALL, 0), case.shape)
        step = trace(function, "experts", hidden=Aval(tuple(x.shape), dtype), params=parameters(shapes))
        backend, program = backends.get("cpu"), schedule(step, orchestrations.serial)
        (out,) = backend.compile(program, backend.prepare(program, [case.params]))([x])
        return out

    together = experts(case.hidden)
    for some in (slice(0, 1), slice(4, 5), slice(2, 9)):
        assert torch.equal(experts(case.hidden[some]), together[some])
