"""Points 6 to 10: cache writes, routing there and back, grouped products, quantisation."""

import math

import torch

from mla_fx.backends.ascend.calls.grouped import grouped
from mla_fx.backends.ascend.probe.compare import BF16, WIDE, all_of, drawn, near, poison, same
from mla_fx.backends.ascend.probe.point import Cann, Case, Outcome, Point, Site, Verdicts, failing, never


def _scatter(dtype: torch.dtype, blocks: int, slots: list[int], *, pairs: bool = False) -> Outcome:
    """Rows into two caches of `blocks` of 16; `pairs`: float32 passed as twice as many bfloat16."""
    caches = [drawn(blocks, 16, 1, width, seed=8, dtype=dtype) for width in (512, 64)]
    rows = [drawn(len(slots), 1, width, seed=9, dtype=dtype) for width in (512, 64)]
    right = [cache.clone() for cache in caches]
    for row, slot in enumerate(slots):
        if slot >= 0:
            for cache, new in zip(right, rows, strict=True):
                cache[slot // 16, slot % 16] = new[row]
    stored = [cache.npu() for cache in caches]  # type: ignore[attr-defined]
    given = [part.npu() for part in rows]  # type: ignore[attr-defined]
    as_passed = [part.view(torch.bfloat16) if pairs else part for part in (*given, *stored)]
    on_device = torch.tensor(slots, dtype=torch.int32).npu()  # type: ignore[attr-defined]
    torch.ops.npu.npu_scatter_pa_kv_cache(*as_passed, on_device, cache_mode="Norm")
    return same(latent=(stored[0], right[0]), rope=(stored[1], right[1]))


def _scatter_means(found: Verdicts, cann: Cann) -> str:
    said = []
    if "bf16, slots of -1" in failing(found):
        said.append("calls/scatter.py: rows of slot -1 must be selected away on the host before the call.")
    if "float32 as pairs of bf16" in failing(found):
        said.append("calls/scatter.py: float32 rows need plain torch (index_put), not the operator.")
    if found["float32"] == "holds":
        said.append("calls/scatter.py: float32 may be passed as it is.")
    if found["more rows than slots"] == "holds":
        said.append("calls/scatter.py: no need to cut rows to the size of the cache.")
    return " ".join(said) or "Cache writes stay as they are: float32 as pairs of bf16, no more rows than slots."


def _route(whole: bool) -> Outcome:
    """Two of four experts are this rank's; rows of theirs in front, stably; the rest is nobody's."""
    x, experts = drawn(3, 64, seed=10), torch.tensor([[0, 3], [1, 0], [2, 1]], dtype=torch.int32)
    pairs = [(expert, pair) for pair, expert in enumerate(experts.flatten().tolist()) if expert < 2]
    order = [pair for _, pair in sorted(pairs)]
    source = torch.full((6,), -1, dtype=torch.int32)
    source[order] = torch.arange(len(order), dtype=torch.int32)
    given = (x.npu(), experts.npu())  # type: ignore[attr-defined]
    poison(6, 64)
    rows, index, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        *given,
        active_num=6 if whole else -1,
        expert_num=4,
        active_expert_range=[0, 2],
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        row_idx_type=0,
    )
    looks = same(index=(index, source), counts=(counts, torch.tensor([2, 2])))
    copied = same(rows=(rows[: len(order)], x[[pair // 2 for pair in order]]))
    if looks.verdict == "holds" and copied.verdict == "differs":
        return Outcome("differs", f"rows not copied, though index and counts are right: {copied.detail}")
    return all_of([looks, copied])


def _route_means(found: Verdicts, cann: Cann) -> str:
    if "active_num T * K" in failing(found):
        return "permute_tokens.py: routing must not go through the operator here."
    if "active_num -1" in failing(found):
        return "permute_tokens.py: active_num must stay T * K; -1 does not copy rows in this release."
    return "Routing stays as it is, with active_num T * K."


def _grouped(counts: list[int], rows: int) -> Outcome:
    """A matrix for each of the counts; rows behind them may be left unwritten."""
    x, weight = drawn(rows, 64, seed=11), drawn(len(counts), 32, 64, seed=12)
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    right = torch.stack([weight[e].double() @ x[row].double() for row, e in enumerate(owners)])
    given = (x.npu(), weight.npu(), torch.tensor(counts).npu())  # type: ignore[attr-defined]
    poison(rows, 32)
    out = grouped(*given)
    found = near(BF16, out=(out[: len(owners)], right))
    if rows == len(owners):
        return found
    behind = out[len(owners) :].cpu()
    what = "left as they were" if behind.isnan().all() else "0" if not behind.any() else "written"
    return Outcome(found.verdict, found.detail or f"rows behind the counts: {what}", found.figures)


def _grouped_means(found: Verdicts, cann: Cann) -> str:
    said = []
    if "counts short of the rows" in failing(found):
        said.append("calls/grouped.py: the last count must take the rows that are left over.")
    if "one expert" in failing(found):
        said.append("calls/grouped.py: a single expert needs a plain product.")
    return " ".join(said) or "Grouped products stay as they are; nobody reads rows behind the counts."


def _unpermute(behind: float) -> Outcome:
    """Tokens of two pairs each; one pair has weight 0 and a row that is all `behind`."""
    rows = drawn(6, 64, seed=13)
    weights = torch.tensor([[0.5, 0.25], [0.75, 0.0], [0.5, 1.0]])
    index = torch.tensor([4, 0, 2, 5, 1, 3], dtype=torch.int32)
    rows[5] = behind
    wide = rows.double()
    wide[5] = 0
    right = (wide[index.long()].view(3, 2, 64) * weights.double().unsqueeze(-1)).sum(1)
    out = torch.ops.npu.npu_moe_token_unpermute(rows.npu(), index.npu(), weights.npu())  # type: ignore[attr-defined]
    return near(BF16, out=(out, right))


def _unpermute_means(found: Verdicts, cann: Cann) -> str:
    if "rows at weight 0" in failing(found):
        return "unpermute_tokens.py: the weighted sum must be plain torch here."
    if "NaN rows at weight 0" in failing(found):
        return "unpermute_tokens.py: rows of other ranks' pairs must be zeroed first, as they are."
    return "unpermute_tokens.py: rows at weight 0 are skipped; zeroing them in a copy may go."


def _zero_row(site: Site) -> Outcome:
    """Of a row of zeros nothing may come but zeros once it is scaled back; other rows are as always."""
    x = drawn(3, 64, seed=14)
    x[1] = 0
    q, scale = (part.cpu() for part in torch.ops.npu.npu_dynamic_quant(x.npu()))  # type: ignore[attr-defined]
    back = q.double() * scale.double().view(3, 1)
    steps = x.double().abs().amax(1) / 127
    others = [0, 2]
    found = all_of(
        [
            near(WIDE, scale=(scale.view(3)[others], steps[others])),
            near(0.5 / 127 + WIDE, rows=(back[others], x[others].double())),
            near(0, **{"zero row": (back[1], torch.zeros(64))}),
        ]
    )
    said = f"scale {scale.view(3)[1].item():g}, integers {sorted(set(q[1].tolist()))[:4]}"
    return Outcome(found.verdict, found.detail or said, found.figures)


def _zero_row_means(found: Verdicts, cann: Cann) -> str:
    if failing(found):
        return "quant_linear.py, quant_grouped_linear.py: scales of rows of zeros must be replaced before the product."
    return "8-bit products stay as they are: a row of zeros gives zeros."


POINTS = (
    Point(
        6,
        "cache writes",
        "npu_scatter_pa_kv_cache into two caches at once, by bits; by its sources 8 and 16 bits only",
        (
            Case("bf16, slots of -1", lambda site: _scatter(torch.bfloat16, 2, [3, -1, 17, -1, 31])),
            Case("float32", lambda site: _scatter(torch.float32, 2, [3, 17, 31]), never),
            Case("float32 as pairs of bf16", lambda site: _scatter(torch.float32, 2, [3, -1, 17, -1, 31], pairs=True)),
            Case("more rows than slots", lambda site: _scatter(torch.bfloat16, 1, [-1, *range(16)]), never),
        ),
        _scatter_means,
    ),
    Point(
        7,
        "routing",
        "npu_moe_init_routing_v2 of a small batch, which rows it copies; 8.5 takes -1 at its word, by its sources",
        (Case("active_num -1", lambda site: _route(False), never), Case("active_num T * K", lambda site: _route(True))),
        _route_means,
    ),
    Point(
        8,
        "grouped products",
        "npu_grouped_matmul with counts on the device",
        (
            Case("counts short of the rows", lambda site: _grouped([2, 0, 1], 6)),
            Case("one expert", lambda site: _grouped([4], 4)),
        ),
        _grouped_means,
    ),
    Point(
        9,
        "routing back",
        "npu_moe_token_unpermute: whether a row at weight 0 counts, which no page says",
        (
            Case("rows at weight 0", lambda site: _unpermute(1.0)),
            Case("NaN rows at weight 0", lambda site: _unpermute(math.nan), never),
        ),
        _unpermute_means,
    ),
    Point(
        10,
        "quantisation",
        "npu_dynamic_quant of a row of zeros between others",
        (Case("zero row", _zero_row),),
        _zero_row_means,
    ),
)
