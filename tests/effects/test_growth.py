"""How cost grows: multiply-adds are those that torch counts in a run, bytes and memory those that it moves and holds.

The table in `mla_fx/README.md` is what the command there prints; `python -m tests.effects.test_growth` writes it anew.
Of its rows, those to 8 ranks and 128k tokens are run as a soak, at DeepSeek-V3's widths.
"""

import math
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from mla_fx import MlaConfig, StepShape, backends, orchestrations, plan_batch
from mla_fx.backends.cpu import kernel, products
from mla_fx.backends.meter import Metered
from mla_fx.cli_growth import ROWS, Point
from mla_fx.decode import attention_avals
from mla_fx.dtypes import DTYPES
from mla_fx.effects import cost, ops, schedule
from mla_fx.effects.cost import multiply_adds
from mla_fx.parameters import empty_cache
from mla_fx.sharding import Sharding
from tests.effects.pages import PAGE, printed, shown, write_anew
from tests.setups import CONFIG, Setup


@pytest.fixture(autouse=True)
def by_torch(monkeypatch):
    """The CPU's rules without kernels and packed weights, whose products torch does not see."""
    monkeypatch.setattr(kernel, "engine", lambda: None)
    for name in ("compiled", "packs"):
        monkeypatch.setattr(products, name, lambda dtype: False)


def counter() -> FlopCounterMode:
    """torch counts products in place, and of integers, as nothing, unless it is told."""

    def product(*shapes: tuple[int, ...], **_: Any) -> int:
        left, right = shapes[-2:]
        return 2 * math.prod(left) * right[-1]

    told = (torch.ops.aten.addmm_, torch.ops.aten.baddbmm_, torch.ops.aten._int_mm)
    return FlopCounterMode(display=False, custom_mapping=dict.fromkeys(told, product))


@frozen
class Measured:
    """Of a run: multiply-adds of all ranks, and by rank bytes sent, of weights, of caches and of values."""

    work: int
    sent: list[int]
    weights: list[int]
    cache: list[int]
    values: list[int]


def run(point: Point) -> Measured:
    """The step of a point, on the host, with all ranks of its one replica in this process."""
    config, shape, layout = point.config, point.shape, point.shape.layout
    assert layout.dp == 1 and layout.dcp == layout.tp
    metered = Metered.of(backends.get("cpu", ranks=layout))
    kind = DTYPES[shape.dtype]
    like = attention_avals(config, shape)
    params = [
        pytree.tree_map(lambda aval: torch.full(aval.shape, 0.01, dtype=DTYPES[aval.dtype]), like)
        for _ in range(layout.size)
    ]
    prepared = metered.prepare(point.program, params)
    executable = metered.compile(point.program, prepared)
    sizes = {"blocks": shape.blocks, "block_size": shape.block_size}
    caches = [empty_cache(config, dtype=kind, **sizes)[0] for _ in range(layout.size)]
    count, width = shape.requests, shape.table_width
    batches = plan_batch(
        Sharding(ranks=layout.dcp, block_size=shape.block_size),
        history=[point.history] * count,
        query=[1] * count,
        block_table=[list(range(b * width, (b + 1) * width)) for b in range(count)],
        blocks=shape.blocks,
        table_width=width,
        tokens=shape.tokens,
        requests=count,
    )
    hidden = torch.ones(shape.tokens, config.hidden_size, dtype=kind)
    with counter() as flops:
        executable(caches, [hidden] * layout.size, batches)
    moved = metered.meter.moved.items()
    ranks = range(layout.size)
    return Measured(
        work=flops.get_total_flops() // 2,
        sent=[sum(tally.sent for place, tally in moved if place.rank == rank) for rank in ranks],
        weights=[prepared.held(rank)[0] for rank in ranks],
        cache=[sum(leaf.nbytes for leaf in caches[rank]) for rank in ranks],
        values=[metered.meter.values[rank] for rank in ranks],
    )


def hold(point: Point) -> None:
    """A run of the point is what the point says, on every rank."""
    found, priced, layout = run(point), cost(point.program), point.shape.layout
    lengths = Sharding(ranks=layout.dcp, block_size=point.shape.block_size).local_lengths(point.history)
    # The rule knows the softmax over one key: what it would add up is the latent of the new token.
    known = point.shape.requests * point.config.num_attention_heads * point.config.kv_lora_rank
    assert found.work == sum(point.work(length) for length in lengths) - known
    assert max(lengths) == lengths[0] and point.work() == point.work(lengths[0])
    memory = priced.memory
    assert found.sent == [priced.sent] * layout.size
    assert found.weights == [memory.parameters] * layout.size
    assert found.cache == [memory.states] * layout.size
    assert found.values == [memory.peak] * layout.size


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("history", "requests", "dtype"), [(0, 1, "fp32"), (13, 3, "bf16"), (1000, 2, "fp32")])
def test_a_point_is_what_a_run_does(ranks, history, requests, dtype):
    shape = StepShape(requests=requests, block_size=4, dtype=dtype)
    hold(Point.of(CONFIG, shape, ranks, history, orchestrations.attention_aside))


REACH = [row for row in ROWS if row[0] <= 8 and row[1] <= 2**17]


@pytest.mark.parametrize(
    ("ranks", "history"),
    [row if row == (2, 1024) else pytest.param(*row, marks=pytest.mark.soak) for row in REACH],
)
def test_a_row_of_the_table_is_what_a_run_does(ranks, history):
    shape = StepShape(requests=1, dtype="bf16")
    hold(Point.of(MlaConfig.deepseek_v3(), shape, ranks, history, orchestrations.attention_aside))


# --- multiply-adds ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "setup",
    [
        Setup(layers=2, ranks=1),
        Setup(layers=2, ranks=1, quantization="w8a8"),
        Setup(ranks=2, replicate_query=True, project_before_merge=True),
    ],
    ids=["model", "in 8 bits", "passes"],
)
def test_multiply_adds_of_steps(setup):
    """Experts, networks and head; all rows of the experts are this rank's own where it is alone.

    A rule computes the square of a request's new tokens, of which the formula counts the pairs that are seen.
    """
    program = schedule(setup.step, orchestrations.serial)
    backend = evolve(backends.get("cpu", ranks=setup.ranks), apart=True)
    run_ = setup.compiled(backend, program)
    with counter() as flops:
        run_(*setup.arguments())
    local = Sharding(ranks=setup.ranks, block_size=setup.block_size).local_lengths
    history = [[local(length)[rank] for length in (9, 5)] for rank in range(setup.ranks)]
    found = sum(
        multiply_adds(
            program.inputs,
            program.launches,
            {"batch.query_lengths": (1, 2), "batch.history_lengths": mine},
        )
        for mine in history
    )
    config, layers = setup.config, setup.layers or 1
    own = config.num_attention_heads * layers
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    masked, known = own * (2 * latent + rope), own * latent  # a pair of two tokens; the value of one token alone
    assert flops.get_total_flops() // 2 == found + masked - known


def test_lengths_must_be_there():
    setup = Setup()
    with pytest.raises(KeyError, match="query_lengths"):
        multiply_adds(setup.step.inputs, setup.step.equations)


def test_an_op_made_of_others_takes_what_they_take():
    """Of a fused op, the products of its parts."""
    from mla_fx.backends.ascend.fused import ALL

    setup = Setup(layers=2, ranks=1, quantization="w8a8")
    lengths = {"batch.query_lengths": (1, 2), "batch.history_lengths": (9, 5)}
    plain, fused = setup.step, setup.step
    for one in ALL:
        fused = one.find(fused)
    assert {type(equation.op) for equation in fused.equations} - set(ops.ALL)
    assert multiply_adds(fused.inputs, fused.equations, lengths) == multiply_adds(
        plain.inputs, plain.equations, lengths
    )


# --- the page --------------------------------------------------------------------------


def test_the_table_on_the_page_is_what_the_command_prints():
    (found,) = shown("--growth").finditer(PAGE.read_text())
    assert printed(found[1]) == found[2], "python -m tests.effects.test_growth writes it anew"


def test_the_table_by_hand():
    """DeepSeek-V3 on 8 ranks with 1024 tokens: N = 16, H = 128, L = 512, R = 64; 128 keys and values on each."""
    shape = StepShape(requests=1, dtype="bf16")
    point = Point.of(MlaConfig.deepseek_v3(), shape, 8, 1024, orchestrations.attention_aside)
    assert point.work() - point.work(0) == 128 * 128 * (512 + 64 + 512)
    cells = [*point.row()]
    assert cells[:2] == ["8", "1k"] and cells[6] == f"{2 * 128 * 576 * 2:,}"  # two blocks, for the new token too
    beyond = Point.of(point.config, shape, 256, 2**20, orchestrations.attention_aside)
    assert str(beyond.shape.layout) == "tp=128,dcp=128,dp=2,ep=256" and [*beyond.row()][:2] == ["256", "1M"]
    assert evolve(shape, ranks=8) == evolve(shape, ranks=point.shape.layout)


if __name__ == "__main__":
    write_anew("--growth")
