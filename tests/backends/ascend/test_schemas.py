"""Every call into torch_npu that a rule makes, against the wheel's own schemas and meta kernels.

The rules run on tensors without data, at the sizes of DeepSeek-V3.  torch
parses every call by the operator's schema, and its meta kernel says what comes
back: that must be what our shape rule says.  Limits that CANN sets are not in
a meta kernel; our own checks of them run here, and on the emulator.
"""

import ast
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_fx.backends import Device, ascend
from mla_fx.effects import Op, ops
from mla_fx.effects.op import stem
from tests.backends.bare import Watch, ask
from tests.backends.sizes import RANKS, SIZES, TOKENS, Step, cases
from tests.cases import each, pairwise
from tests.ops.conftest import aval

pytestmark = pytest.mark.usefixtures("machine")
#: Those that wait for the device read there what a tensor without data has not.
each_op = pytest.mark.parametrize("op", [op for op in ascend.TABLE.rules if not op.waits], ids=stem)
DTYPES = ("bf16", "fp16", "fp32")

#: Called with an operator's arguments as torch parsed them; the wheel has no meta kernel for these (nor for their
#: kin of other versions).  Their results are ours: of the first a size, of the second what the functional form says;
#: a cast of format leaves the shape, and what was cast is in that format.
SCHEMA_ONLY = (
    "npu::npu_format_cast.default",
    "npu::get_npu_format.default",
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace.default",
    "npu::npu_fused_infer_attention_score_v2.out",
)


class Calls(Watch):
    """Notes the calls into torch_npu, and answers for the operators that have no meta kernel."""

    def __init__(self) -> None:
        super().__init__(device=None)  # tables are made on the host, once
        self.formats: dict[Any, tuple[int, torch.Tensor]] = {}  # of memory; and who holds it

    def answer(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        cast, form, size, into = SCHEMA_ONLY
        match self.called[-1]:
            case name if name == cast:
                made = torch.empty_like(args[0])
                self.formats[made.untyped_storage()._cdata] = args[1], made
                return made
            case name if name == form:
                return self.formats.get(args[0].untyped_storage()._cdata, (2, None))[0]
            case name if name == size:
                torch.ops.npu.npu_fused_infer_attention_score_v2(*args, **kwargs)
                return args[0].new_empty(4096)
            case name if name == into:
                given = {key: value for key, value in kwargs.items() if key not in ("workspace", "out")}
                results = torch.ops.npu.npu_fused_infer_attention_score_v2(*args, **given)
                assert kwargs["workspace"].dim() == 1
                assert list(map(aval, kwargs["out"])) == list(map(aval, results))
                return kwargs["out"]
        return super().answer(function, *args, **kwargs)


@cache
def run(op: type[Op], step: Step) -> frozenset[str]:
    """The operators of torch_npu that the op's rule calls; what it returns is held against the op's shape rule."""
    called, wanted = set(), ascend.TABLE.forms.get(op)
    for case, forms in product(cases(op, step), (None, wanted) if wanted else (None,)):
        with Calls() as calls:
            results = ask(ascend.TABLE.rules[op], case, ranks=step.ranks, device=Device("meta"), forms=forms)
        for of_rank in results:
            assert tuple(map(aval, of_rank)) == case.op.infer(*case.avals)
        called |= {name for name in calls.called if name.startswith("npu::")}
    return frozenset(called)


#: With the steps whose calls are held against the sources below; the others are of sizes between.
STEPS = [Step(1, 64, "bf16"), Step(8, 64, "fp16"), Step(8, 64, "fp32")]


@each_op
@each("step", [*STEPS, Step(8, 0, "bf16"), Step(1, 0, "fp32"), Step(8, 1, "bf16"), Step(1, 1, "fp16")])
def test_results_are_those_of_the_shape_rule(op, step):
    run(op, step)


@pytest.mark.soak
@each_op
@each(*pairwise(ranks=RANKS, tokens=(0, *TOKENS), dtype=DTYPES))
def test_results_are_those_of_the_shape_rule_in_any_step(op, ranks, tokens, dtype):
    run(op, Step(ranks, tokens, dtype))


def named(tree: ast.AST) -> Iterator[str]:
    """Operators of torch_npu in a piece of code: attributes of `torch.ops.npu`, or of a local name for it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("torch.ops.npu", "npu"):
            yield node.attr


def test_every_operator_in_the_sources_was_called():
    """A call in a branch that no size takes would be checked by nothing."""
    folder = Path(ascend.__file__).parent
    sources = [path for part in (".", "calls", "fused") for path in (folder / part).glob("*.py")]
    wanted = {name for path in sources for name in named(ast.parse(path.read_text()))}
    assert not any(op.waits for op in ascend.TABLE.rules if not op.communicates)
    called = {name for op in ascend.TABLE.rules if not op.waits for step in STEPS for name in run(op, step)}
    assert wanted == {name.split("::")[1].split(".")[0] for name in called}
    assert called >= set(SCHEMA_ONLY)


@pytest.mark.parametrize("name", SCHEMA_ONLY)
def test_there_is_no_meta_kernel(name):
    """Where the wheel gets one, we need not answer for it any more."""
    operator, overload = name.removeprefix("npu::").split(".")
    assert not getattr(getattr(torch.ops.npu, operator), overload).has_kernel_for_dispatch_key("Meta")
    assert torch.ops.npu.npu_rms_norm.default.has_kernel_for_dispatch_key("Meta")


def test_every_op_has_sizes(monkeypatch):
    for op in ascend.TABLE.rules:
        for case in cases(op, Step(2, 3)):
            assert len(case.op.infer(*case.avals)) == len(case.op.results)
    monkeypatch.delitem(SIZES, ops.Rope)
    with pytest.raises(LookupError, match="no sizes for op Rope"):
        cases(ops.Rope, Step(1, 1))


def test_a_call_that_does_not_fit_is_refused():
    """By torch's own parser: a name, an order, a type that the schema has not."""
    x, weight = torch.empty(2, 8, device="meta"), torch.empty(8, device="meta")
    norm = torch.ops.npu.npu_rms_norm
    with Calls() as calls:
        norm(x, weight, 1e-6)
        for wrong in (lambda: norm(x, weight, eps=1e-6), lambda: norm(x, 1e-6, weight), lambda: norm(x)):
            with pytest.raises(RuntimeError, match="npu_rms_norm"):
                wrong()
    assert calls.called == ["npu::npu_rms_norm.default"]
