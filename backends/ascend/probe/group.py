"""Points 11 and 12: collectives of a group of processes, of bits and of sums."""

import hashlib
import os
from typing import Any

import torch
import torch.distributed as dist

from mla_fx.backends.ascend.probe.compare import BF16, drawn, near, same
from mla_fx.backends.ascend.probe.point import Cann, Case, Outcome, Point, Site, Verdicts, failing, ran

#: What decides how HCCL adds.
SETTINGS = ("HCCL_OP_EXPANSION_MODE", "HCCL_DETERMINISTIC")


def _patterns(rank: int) -> torch.Tensor:
    """Every pattern of 16 bits, NaN with any payload and subnormals among them, in an order of the rank's own."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).roll(rank)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(-1)


def _gather(site: Site) -> Outcome:
    sent = _bytes(_patterns(site.rank)).npu()  # type: ignore[attr-defined]
    found = sent.new_empty(site.ranks * sent.numel())
    dist.all_gather_single(found, sent, group=site.group)
    return same(bits=(found, torch.cat([_bytes(_patterns(rank)) for rank in range(site.ranks)])))


def _exchange(site: Site) -> Outcome:
    """Rank r sends part q of its patterns to rank q."""

    def of(sender: int) -> torch.Tensor:
        return torch.stack([_patterns(sender + receiver) for receiver in range(site.ranks)])

    sent = _bytes(of(site.rank)).npu()  # type: ignore[attr-defined]
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=site.group)
    return same(bits=(found, _bytes(torch.stack([of(sender)[site.rank] for sender in range(site.ranks)]))))


def everywhere(site: Site, value: Any) -> list[Any]:
    """What every rank says, moved between the hosts."""
    if site.host is None:
        return [value]
    found: list[Any] = [None] * site.ranks
    dist.all_gather_object(found, value, group=site.host)
    return found


def _sum(site: Site, size: int) -> Outcome:
    """A bf16 sum of `size` bytes: near that in float64, and the same bits on all ranks, again and again."""
    try:
        digests, near_enough = _added(site, size)
    except Exception:
        everywhere(site, None)  # the others come to this too
        raise
    of_ranks = everywhere(site, digests)
    if near_enough.verdict != "holds":
        return near_enough
    if None in of_ranks:
        return Outcome("differs", f"rank {of_ranks.index(None)} did not get as far")
    settings = ", ".join(f"{name}={os.environ.get(name, 'not set')}" for name in SETTINGS)
    if any(len(set(at_once)) > 1 for at_once in zip(*of_ranks, strict=True)):
        return Outcome("differs", f"ranks have different bits, with {settings}", near_enough.figures)
    if len(set(digests)) > 1:
        return Outcome("differs", f"the same sum has different bits from one call to the next, with {settings}")
    return Outcome("holds", f"with {settings}", near_enough.figures)


def _added(site: Site, size: int) -> tuple[list[str], Outcome]:
    """Digests of three sums in a row, and whether they are near."""
    sent = [drawn(size // 2, seed=20 + rank) for rank in range(site.ranks)]
    digests, worst = [], Outcome("holds")
    for _ in range(3):
        total = sent[site.rank].npu()  # type: ignore[attr-defined]
        dist.all_reduce(total, group=site.group)
        found = total.cpu()
        digests.append(hashlib.sha256(found.view(torch.uint8).numpy().tobytes()).hexdigest())
        worst = near(BF16, sum=(found, torch.stack(sent).double().sum(0))) if worst.verdict == "holds" else worst
    return digests, worst


def _bits_mean(found: Verdicts, cann: Cann) -> str:
    if not ran(found):
        return "Run it under torchrun, with a process for each device, before several processes are relied on."
    if failing(found):
        return "backends/world.py: payloads must not be sent as bytes here; LSEs and outputs need another way."
    return "What ranks send each other arrives bit by bit: payloads stay as they are."


def _sums_mean(found: Verdicts, cann: Cann) -> str:
    if not ran(found):
        return (
            "Run it under torchrun, with HCCL_OP_EXPANSION_MODE=AIV and without, HCCL_DETERMINISTIC=true and without."
        )
    if failing(found):
        return (
            "Ranks that leave sums to the transport may choose different experts at a near tie, and drift apart: keep "
            'sums="rank order", or ask for HCCL_DETERMINISTIC=true. Run it again with each setting that is told above.'
        )
    return 'Ranks have the same bits with these settings, with sums="transport" too; run it again with the others.'


def _sum_case(size: int) -> Case:
    return Case(f"{size >> 10} KB" if size < 1 << 20 else f"{size >> 20} MB", lambda site: _sum(site, size))


POINTS = (
    Point(
        11,
        "collectives of bits",
        "every 16-bit pattern as bytes, all NaN and subnormals among them, over the group",
        (Case("all_gather", _gather), Case("all_to_all", _exchange)),
        _bits_mean,
        group=True,
    ),
    Point(
        12,
        "sums over ranks",
        "bf16 all_reduce against float64, three times: whether all ranks get the same bits",
        tuple(map(_sum_case, (4 << 10, 64 << 10, 1 << 20))),
        _sums_mean,
        group=True,
    ),
)
