"""Experts in fewer launches: found where the operators take it, left alone elsewhere, and the same results."""

import pytest
import torch
from attrs import evolve

from mla_fx import backends, orchestrations
from mla_fx.backends.ascend.fused import quant_experts, quant_mlp, unpermute_add
from mla_fx.backends.ascend.fused.quant_experts import QuantExperts
from mla_fx.backends.ascend.fused.quant_mlp import QuantMlp
from mla_fx.backends.ascend.fused.unpermute_add import UnpermuteAdd
from mla_fx.effects import Aval, Group, Step, bind, check, ops, schedule, trace
from tests.backends.ascend.conftest import ask, close, given_to, on_device, random, refused
from tests.backends.ascend.experts import Experts, Run
from tests.backends.ascend.steps import equal
from tests.backends.ascend.test_rules import each_dtype, right, sixteen_bits

EIGHT = Experts(quantization="w8a8", shared=1)
GIVEN = {"bf16": Experts(shared=1), "W8A8": EIGHT}
each_kind = pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)


def names(step: Step) -> list[str]:
    return [equation.op.name for equation in step.equations]


def lowered(given: Experts) -> Step:
    """As the ascend backend's own passes have it."""
    step = given.step
    for fusion in (quant_experts.FUSION, quant_mlp.FUSION, unpermute_add.FUSION):
        step = fusion.find(step)
    return step


# --- where they are found -------------------------------------------------------------


def test_what_is_found():
    routed = ["gate_logits", "gating_top_k"]
    shared = ["linear", "swiglu", "linear"]
    apart = ["permute_tokens", "grouped_linear", "swiglu", "grouped_linear"]
    assert names(lowered(GIVEN["bf16"])) == [*routed, *apart, *shared, "unpermute_add"]
    assert names(lowered(EIGHT)) == [*routed, "quant_experts", "quant_mlp", "unpermute_add"]
    alone = evolve(EIGHT, shared=0)
    assert names(lowered(alone)) == [*routed, "quant_experts", "unpermute_tokens"]
    for given in (*GIVEN.values(), alone):
        step = lowered(given)
        assert (step.inputs, step.outputs) == (given.step.inputs, given.step.outputs)
        assert quant_experts.find(step) == quant_mlp.find(step) == unpermute_add.find(step) == step
        check(schedule(step, orchestrations.serial))


@pytest.mark.usefixtures("machine")
@each_kind
def test_the_backend_applies_them(given):
    assert names(backends.get("ascend", ranks=2).lower(given.step)) == names(lowered(given))


@pytest.mark.parametrize("changed", [{"dtype": "fp16"}, {"dtype": "fp32"}, {"width": 80}], ids=str)
def test_what_the_operators_do_not_take_stays_apart(changed):
    given = evolve(EIGHT, **changed)
    assert quant_experts.find(given.step) == given.step
    assert (quant_mlp.find(given.step) == given.step) == (changed != {"dtype": "fp16"})


SIZES = {
    "x": Aval((3, 8), "bf16"),
    "experts": Aval((3, 2), "int32"),
    "gate_up": Aval((4, 128, 8), "int8"),
    "steps": Aval((4, 128), "fp32"),
    "down": Aval((4, 8, 64), "int8"),
    "scale": Aval((4, 8), "fp32"),
    "others": Aval((4,), "int64"),
}


def chain(twist: str = "") -> Step:
    """Experts in 8 bits, with something that keeps them apart."""

    def experts(x, experts, gate_up, steps, down, scale, others):
        rows, counts, source = bind(ops.PermuteTokens(4, Group("ep", 1)), x, experts)
        first = others if twist == "other counts first" else counts
        last = others if twist == "other counts last" else counts
        if twist == "other rows":
            (rows,) = bind(ops.Add(), rows, rows)
        (wide,) = bind(ops.QuantGroupedLinear(), rows, gate_up, steps, first)
        (act,) = bind(ops.Swiglu(), wide)
        if twist == "another activation":
            (act,) = bind(ops.Add(), act, act)
        out = bind(ops.QuantGroupedLinear(), act, down, scale, last)
        seen = {"the rows": rows, "the sums": wide, "the activation": act, "the counts": counts}
        return (*out, source, *([seen[twist]] if twist in seen else []))

    return trace(experts, "experts", **SIZES)


def test_a_chain_is_one():
    assert names(quant_experts.find(chain())) == ["quant_experts"]


@pytest.mark.parametrize(
    "twist",
    [
        "other counts first",
        "other counts last",
        "other rows",
        "another activation",
        "the rows",
        "the sums",
        "the activation",
        "the counts",
    ],
)
def test_a_chain_whose_parts_are_needed_stays_apart(twist):
    step = chain(twist)
    assert quant_experts.find(step) == step


def network(twist: str = "") -> Step:
    def mlp(x, gate_up, steps, down, scale):
        (wide,) = bind(ops.QuantLinear(), x, gate_up, steps)
        (act,) = bind(ops.Swiglu(), wide)
        if twist == "another activation":
            (act,) = bind(ops.Add(), act, act)
        seen = {"the sums": wide, "the activation": act}
        return (*bind(ops.QuantLinear(), act, down, scale), *([seen[twist]] if twist in seen else []))

    weights = {name: Aval(SIZES[name].shape[1:], SIZES[name].dtype) for name in ("gate_up", "steps", "down", "scale")}
    return trace(mlp, "mlp", x=SIZES["x"], **weights)


def test_a_network_is_one():
    assert names(quant_mlp.find(network())) == ["quant_mlp"]


@pytest.mark.parametrize("twist", ["another activation", "the sums", "the activation"])
def test_a_network_whose_parts_are_needed_stays_apart(twist):
    step = network(twist)
    assert quant_mlp.find(step) == step


def sums(twist: str = "") -> Step:
    def add(rows, source, weights, other):
        (out,) = bind(ops.UnpermuteTokens(), rows, source, weights)
        pair = (other, out) if twist == "the other way round" else (out, out) if twist == "itself" else (out, other)
        (total,) = bind(ops.Add(), *pair)
        return (total, out) if twist == "needed" else total

    rows, pairs = Aval((6, 8), "bf16"), (3, 2)
    source, weights = Aval(pairs, "int32"), Aval(pairs, "fp32")
    return trace(add, "sum", rows=rows, source=source, weights=weights, other=Aval((3, 8), "bf16"))


@pytest.mark.parametrize("twist", ["", "the other way round"])
def test_a_sum_is_one(twist):
    assert names(unpermute_add.find(sums(twist))) == ["unpermute_add"]


@pytest.mark.parametrize("twist", ["needed", "itself"])
def test_a_sum_stays_apart(twist):
    step = sums(twist)
    assert unpermute_add.find(step) == step


# --- what they compute ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["reference", "cpu"])
@each_kind
def test_other_backends_run_them_by_their_definitions(name, given):
    """Bit for bit, on the hostile machine too."""
    expected = given.run(backends.get(name, ranks=2))
    for seed in (None, *range(4)):
        backend = backends.get(name, ranks=2, adversary=seed)
        assert not {QuantExperts, QuantMlp, UnpermuteAdd} & backend.table.rules.keys()
        assert equal(given.run(backend, lowered(given)), expected), f"seed {seed}"


@each_kind
def test_fused_apart_and_reference(emulator, release, given):
    """What a rank gives is what its experts and columns give.

    In 8 bits a number between two steps may fall to either, which is 1/127 of the largest in its row.
    """
    for ranks, tokens in ((1, 1), (2, 0), (4, 5)):
        sized = evolve(given, ranks=ranks, tokens=tokens)
        backend, exact = backends.get("ascend", ranks=ranks), backends.get("reference", ranks=ranks)
        found = sized.run(backend), sized.run(backend, backend.lower(sized.step))
        for want, apart, fused in zip(sized.run(exact), *found, strict=True):
            assert fused.dtype == torch.bfloat16 and fused.shape == want.shape
            allowed = want.abs().max().item() / (127 if given.quantization is None else 32) if tokens else 0
            for got in (apart, fused):
                torch.testing.assert_close(got.double(), want, rtol=0, atol=allowed)


@each_kind
def test_every_seed_gives_the_same_bits(emulator, given):
    """Whatever unwritten rows held: NaN, or what was there before."""
    backend = backends.get("ascend", ranks=2)
    run = Run(given, backend, backend.lower(given.step))
    expected = run()
    for seed in range(5):
        emulator.seed(seed)
        assert equal(run(), expected), f"seed {seed}"


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0]], ids=str)
def test_rows_of_other_ranks_are_nobodys(rng, emulator, counts):
    """Experts of another rank among the pairs: their rows stay unwritten all the way, and nothing of them shows."""
    op, (tokens, top_k) = QuantExperts(3, Group("ep", 2)), (3, 2)
    chosen = [expert for expert, count in enumerate(counts) for _ in range(count)]
    experts = torch.tensor((chosen + [5] * 6)[:6], dtype=torch.int32).view(tokens, top_k)
    gate_up = torch.as_tensor(rng.integers(-127, 128, (3, 128, 16))).to(torch.int8)
    down = torch.as_tensor(rng.integers(-127, 128, (3, 16, 64))).to(torch.int8)
    steps, scale = (torch.as_tensor(rng.uniform(0.5, 2, shape)).float() / 500 for shape in ((3, 128), (3, 16)))
    x = random(rng, tokens, 16, dtype=torch.bfloat16)
    x[1] = 0  # a token of zeros gives zeros
    rows, source = on_device(op, x, experts, gate_up, steps, down, scale)
    mine = sum(counts)
    there, _, index = right(ops.PermuteTokens(3, Group("ep", 2)), x, experts)
    assert torch.equal(source, index) and rows[mine:].isnan().all()
    numbers = torch.tensor(counts)
    (want,) = right(ops.QuantGroupedLinear(), there, gate_up, steps, numbers)
    (want,) = right(ops.QuantGroupedLinear(), *right(ops.Swiglu(), want), down, scale.bfloat16().float(), numbers)
    difference = (rows[:mine].double() - want[:mine]).abs()
    assert not mine or difference.max() <= 2**-7 * want[:mine].abs().max()


@sixteen_bits
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_a_network(rng, emulator, dtype, tokens):
    """Its numbers are exact up to the steps of the activation, which are finer than those of two roundings more."""
    given = [torch.as_tensor(rng.integers(-127, 128, shape)).to(torch.int8) for shape in ((128, 16), (24, 64))]
    scales = [torch.as_tensor(rng.uniform(0.5, 2, size)).float() / 500 for size in (128, 24)]
    x = random(rng, tokens, 16, dtype=dtype)
    x[1:2] = 0
    operands = x, given[0], scales[0], given[1], scales[1]
    (got,) = on_device(QuantMlp(), *operands)
    (wide,) = right(ops.QuantLinear(), x, given[0], scales[0])
    (want,) = right(ops.QuantLinear(), *right(ops.Swiglu(), wide), given[1], scales[1])
    assert (got.dtype, got.shape) == (dtype, want.shape) and not got[1:2].any()
    assert not tokens or (got.double() - want).abs().max() <= 2**-7 * want.abs().max()


@each_dtype
def test_a_sum_is_rounded_once(rng, emulator, dtype):
    """As the sum in float64 is, whatever the parts come to apart."""
    source = torch.tensor([[0, -1], [2, 1], [-1, -1]], dtype=torch.int32)
    rows, other = random(rng, 6, 8, dtype=dtype), random(rng, 3, 8, dtype=dtype)
    rows[3:] = torch.nan
    weights = random(rng, 3, 2, dtype=torch.float32)
    (got,) = on_device(UnpermuteAdd(), rows, source, weights, other)
    (want,) = right(ops.Add(), *right(ops.UnpermuteTokens(), rows, source, weights), other)
    close(got, want)
    assert torch.equal(got[2], other[2])


def test_scales_are_brought_into_form_once(emulator):
    """In a second run nothing is cast but the hidden states, for the gate."""
    given = evolve(EIGHT, shared=0)
    backend = backends.get("ascend", ranks=2)
    op = QuantExperts(8, Group("ep", 2))
    assert backend.form(op, 5) is quant_experts.narrowed and backend.form(op, 3) is None
    assert given.run(backend, backend.lower(given.step))


# --- refusals -------------------------------------------------------------------------


def eight(**changed):
    sizes = SIZES | changed
    return [torch.zeros(aval.shape).to(_DTYPES[aval.dtype]) for aval in list(sizes.values())[:6]]


_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp32": torch.float32,
    "int32": torch.int32,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": Aval((3, 8), "fp16")}, "x: 8-bit experts in one launch on ascend must be bf16: got fp16"),
        (
            {"gate_up": Aval((4, 96, 8), "int8"), "steps": Aval((4, 96), "fp32"), "down": Aval((4, 8, 48), "int8")},
            "E: an 8-bit activation on ascend needs a multiple of 64 up to 7232: got 96",
        ),
    ],
    ids=["dtype", "width"],
)
def test_what_is_refused(emulator, changed, message):
    assert refused(QuantExperts(4, Group("ep", 1)), *eight(**changed)) == f"quant_experts: {message}"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": Aval((3, 8), "fp32")}, "x: an 8-bit network in one launch on ascend must be bf16 or fp16: got fp32"),
        (
            {"gate_up": Aval((4, 96, 8), "int8"), "steps": Aval((4, 96), "fp32"), "down": Aval((4, 8, 48), "int8")},
            "E: an 8-bit activation on ascend needs a multiple of 64 up to 7232: got 96",
        ),
    ],
    ids=["dtype", "width"],
)
def test_a_network_that_is_refused(emulator, changed, message):
    x, _, *weights = eight(**changed)
    assert refused(QuantMlp(), x, *(weight[0] for weight in weights)) == f"quant_mlp: {message}"


def test_nothing_waits(emulator):
    """No operator has run when the rule returns."""
    given = given_to(QuantExperts(4, Group("ep", 1)), eight())
    emulator.synchronize()
    with emulator.tracing() as traced:
        ask(QuantExperts(4, Group("ep", 1)), *given)
        assert emulator.ran() == 0
    assert [task.name for task in traced if task.kind == "operator"] == [
        "aclnnMoeInitRoutingV3",
        "aclnnGroupedMatmulV5",
        "aclnnDequantSwigluQuantV2",
        "aclnnGroupedMatmulV5",
    ]
