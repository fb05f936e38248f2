"""Points 13, 14 and 17: an event recorded again and again, what programs take of the device, and captured ones."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from mla_fx import MlaConfig, Sharding, StepShape, attention_step, backends, orchestrations, plan_batch
from mla_fx.backends.ascend.probe.compare import drawn, same
from mla_fx.backends.ascend.probe.point import Cann, Case, Outcome, Point, Site, Verdicts, failing, never
from mla_fx.decode import attention_avals
from mla_fx.dtypes import DTYPES
from mla_fx.effects import schedule
from mla_fx.parameters import empty_cache

RECORDS, PROGRAMS = 10_000, 10
#: What a program may leave allocated beside the shared workspace: its results, staged integers, constants.
_EACH = 1 << 16


def _records(site: Site) -> Outcome:
    """Two streams take turns by one event; every hundredth turn writes on the first and reads on the second."""
    npu = torch.get_device_module("npu")
    main, side, event, back = npu.current_stream(), npu.Stream(), npu.Event(), npu.Event()
    count, seen = (torch.zeros(RECORDS // 100, dtype=torch.int32, device="npu") for _ in range(2))
    npu.synchronize()
    before = npu.memory_allocated()
    for turn in range(RECORDS):
        row = turn // 100
        if turn % 100 == 0:
            count[row : row + 1].fill_(row + 1)
        event.record(main)
        side.wait_event(event)
        if turn % 100 == 0:
            with npu.stream(side):
                seen[row : row + 1].copy_(count[row : row + 1])
    back.record(side)
    main.wait_event(back)
    npu.synchronize()
    grown = npu.memory_allocated() - before
    found = same(seen=(seen, torch.arange(1, RECORDS // 100 + 1, dtype=torch.int32)))
    return Outcome(found.verdict, found.detail, {"records": RECORDS, "bytes grown": grown})


def _records_mean(found: Verdicts, cann: Cann) -> str:
    if failing(found):
        return "backends/device.py: events must be made anew for each record, not kept by name."
    return "Events are kept by name and recorded again at every step, as they are."


#: DeepSeek-V3's heads on one of 8 ranks, with few features between layers: what is measured does not depend on these.
_CONFIG = MlaConfig(
    hidden_size=256,
    num_attention_heads=16,
    q_lora_rank=64,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)


class _Layer:
    """A layer's attention on one rank, compiled for so many tokens, with one cache and one set of weights."""

    def __init__(self, site: Site) -> None:
        self.backend = backends.get("ascend")
        generator = torch.Generator().manual_seed(15)
        avals = attention_avals(_CONFIG, self._shape(PROGRAMS))
        weights = pytree.tree_map(
            lambda aval: torch.randn(aval.shape, generator=generator).to(DTYPES[aval.dtype]) / aval.shape[-1] ** 0.5,
            avals,
        )
        step = self.backend.lower(attention_step(_CONFIG, self._shape(PROGRAMS)))
        self.params = self.backend.prepare(step, [weights])
        cache = empty_cache(_CONFIG, blocks=2 * PROGRAMS, block_size=128, dtype=torch.bfloat16)[0]
        self.cache = self.backend.put([cache])

    @staticmethod
    def _shape(tokens: int) -> StepShape:
        sizes: dict[str, Any] = {"tokens": tokens, "requests": tokens, "blocks": 2 * PROGRAMS, "table_width": 2}
        return StepShape(ranks=1, block_size=128, dtype="bf16", **sizes)

    def compiled(self, tokens: int, *, capture: bool = False) -> tuple[Any, Any, Any]:
        """An executable, and its arguments beside the cache: half a block of history for each token's request."""
        step = self.backend.lower(attention_step(_CONFIG, self._shape(tokens)))
        run = self.backend.compile(schedule(step, orchestrations.attention_aside), self.params, capture=capture)
        hidden = torch.ones(tokens, _CONFIG.hidden_size, dtype=torch.bfloat16)
        return run, [self.backend.put(hidden)], self.batches([64] * tokens)

    @staticmethod
    def batches(history: list[int]) -> Any:
        """A request for each of these lengths of history, with a new token each."""
        tokens = len(history)
        return plan_batch(
            Sharding(ranks=1, block_size=128),
            history=history,
            query=[1] * tokens,
            block_table=[[2 * b, 2 * b + 1] for b in range(tokens)],
            blocks=2 * PROGRAMS,
            tokens=tokens,
            requests=tokens,
            table_width=2,
        )


def _memory(site: Site) -> Outcome:
    """Ten programs, the largest first: those behind it should find a workspace that is large enough."""
    npu, layer = torch.get_device_module("npu"), _Layer(site)
    npu.synchronize()
    kept, taken = [], [npu.memory_allocated()]
    for tokens in range(PROGRAMS, 0, -1):
        run, hidden, batches = layer.compiled(tokens)
        run(layer.cache, hidden, batches)
        npu.synchronize()
        kept.append(run)
        taken.append(npu.memory_allocated())
    first, rest = taken[1] - taken[0], taken[-1] - taken[1]
    figures = {
        "bytes of the first": first,
        f"bytes of {PROGRAMS - 1} more": rest,
        "bytes at most": npu.max_memory_allocated(),
    }
    return Outcome("holds" if rest <= (PROGRAMS - 1) * _EACH else "differs", "", figures)


def _kernels(site: Site) -> Outcome:
    """What one layer's attention launches; counted where a trace can be had without writing files."""
    if site.emulator is None:
        return Outcome("not run", "not counted: take a profile of `mla-fx decode --backend ascend` with msprof")
    run, hidden, batches = (layer := _Layer(site)).compiled(PROGRAMS)
    run(layer.cache, hidden, batches)
    with site.emulator.tracing() as trace:
        run(layer.cache, hidden, batches)
    operators = [task for task in trace if task.kind == "operator"]
    events = sum(task.kind in ("record", "wait") for task in trace)
    kernels = sum(task.kernels for task in operators)
    return Outcome("measured", "", {"operators": len(operators), "kernels": kernels, "records and waits": events})


def _programs_mean(found: Verdicts, cann: Cann) -> str:
    if "memory of ten programs" in failing(found):
        return "backends/device.py: programs do not share their workspace here; keep the number of compiled sizes low."
    return "Programs share one workspace: a further size costs its staged integers and results."


def _captured(site: Site, histories: list[list[int]]) -> Outcome:
    """Steps of a captured program beside the same launch by launch, each on a cache of its own: the same bits."""
    layer, tokens = _Layer(site), len(histories[0])
    runs = [layer.compiled(tokens, capture=capture)[0] for capture in (False, True)]
    caches = [layer.backend.put(layer.cache, copy=True) for _ in runs]
    for step, history in enumerate(histories):
        hidden = layer.backend.put(drawn(tokens, _CONFIG.hidden_size, seed=33 + step))
        (right,), (got,) = (
            run(cache, [hidden], layer.batches(history))[0] for run, cache in zip(runs, caches, strict=True)
        )
        found = same(**{f"step {step}": (got, right.cpu())})
        if found.verdict != "holds":
            return found
    return Outcome("holds", f"{len(histories) - 1} replays")


def _captured_mean(found: Verdicts, cann: Cann) -> str:
    if "other activations" in failing(found):
        return "captured.py: programs must not be captured here: compile without capture=True."
    if "other lengths" in failing(found):
        return "captured.py: launches are not updated as they must be: capture only programs whose lengths stay."
    return "Programs may be captured; their attention is updated from step to step."


POINTS = (
    Point(
        13,
        "events",
        f"{RECORDS:,} records of one event, each waited for by another stream",
        (Case("one event again and again", _records),),
        _records_mean,
    ),
    Point(
        14,
        "programs",
        "one layer's attention of 16 heads, compiled for ten sizes: what they take of the device",
        (Case("memory of ten programs", _memory), Case("kernels of one layer", _kernels, never)),
        _programs_mean,
    ),
    Point(
        17,
        "captured graphs",
        "one layer's attention as a graph, replayed: the bits of the same program launch by launch",
        (
            Case("other activations", lambda site: _captured(site, [[5, 64, 130]] * 3)),
            Case("other lengths", lambda site: _captured(site, [[5, 64, 130], [6, 200, 131], [0, 7, 255]])),
        ),
        _captured_mean,
    ),
)
