"""Where the ranks are, and how what they send each other moves.

    InProcess(ranks)            all ranks in this process, one after the other
    Processes(group, ranks)     one rank in each process of a group of `torch.distributed`

Both are asked the same: which ranks there are, as a `Layout`, which of them run
`here`, and to `move` what these have sent in a group of the layout.  What only
moves goes as bits, never as numbers: no transport may take a NaN or a subnormal
for something to tidy.
"""

import pickle
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Literal, Protocol, assert_never, get_args

import torch
import torch.distributed as dist
from attrs import field, frozen

from mla_fx.backends.peers import Peers
from mla_fx.dtypes import wide
from mla_fx.effects import InputError
from mla_fx.effects.op import Meeting
from mla_fx.effects.validate import one_of
from mla_fx.layout import Layout, layout_of

#: Bytes of what is shared that go in one message; what is longer takes a second one.
_SHORT: Final = 1016
#: Who adds over the ranks of a group of processes: see `Processes`.
Sums = Literal["rank order", "transport"]
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class World(Protocol):
    """The ranks of a program, and those of them that this process runs."""

    @property
    def layout(self) -> Layout:
        """The ranks, and the groups that they form."""

    @property
    def here(self) -> range:
        """The ranks that this process runs."""

    @property
    def peers(self) -> Peers | None:
        """What is known of the other processes; None where there are none."""

    def move(self, how: Meeting, sent: Sequence[Any], *, group: str, spent: bool = False) -> list[Any]:
        """For every rank that has sent, what it is brought in its group of this name, of W ranks.

        Those of a group are here together or one in each process, and send all or none.

        "all_gather": [W, ...] of what rank r sent.  "all_to_all": [W, ...] of the part for it, number `rank` of the
        first axis, of what rank r sent.  "all_to_all_v": of rows [n, E], and how many there are for each rank, rank
        after rank, the same of what is for it; the host waits to know how many.  "all_reduce": the sum, in rank order,
        accumulated wide and rounded once.  Each rank gets memory of its own.  `spent`: nobody reads what was sent any
        more, so the sum may be made in it.
        """

    def messages(self, how: Meeting, group: str) -> int:
        """How many messages to the transport `move` is in a group of this name; one where there is no transport."""

    def share(self, value: Any) -> list[Any]:
        """What every rank says, told to all, by rank: small values on the host, that can be pickled."""


@frozen
class InProcess:
    """All ranks in this process and on one device; they run one after the other, launch by launch."""

    layout: Layout = field(default=Layout(), converter=layout_of)

    @property
    def here(self) -> range:
        """All of them."""
        return range(self.layout.size)

    @property
    def peers(self) -> None:
        """There are none."""

    def move(self, how: Meeting, sent: Sequence[Any], *, group: str, spent: bool = False) -> list[Any]:
        """See `World.move`."""
        size = self.layout.group(group).size
        each = (_together(how, sent[first : first + size]) for first in range(0, len(sent), size))
        return [moved for group_of in each for moved in group_of]

    def messages(self, how: Meeting, group: str) -> int:
        """See `World.messages`."""
        return 1

    def share(self, value: Any) -> list[Any]:
        """See `World.share`; all say the same."""
        return [value] * self.layout.size


def _together(how: Meeting, sent: Sequence[Any]) -> list[Any]:
    """What the ranks of one group are brought."""
    if how == "all_to_all_v":
        rows = [torch.split(bits_of(one), counts) for one, counts in sent]
        found = [torch.cat(of_rank).view(sent[0][0].dtype) for of_rank in zip(*rows, strict=True)]
        return list(zip(found, zip(*(counts for _, counts in sent), strict=True), strict=True))
    dtype = sent[0].dtype
    if how == "all_reduce":
        total = added(sent)
        return [total, *(total.clone() for _ in sent[1:])]
    bits = [bits_of(tensor) for tensor in sent]
    if how == "all_gather":
        return [torch.stack(bits).view(dtype) for _ in bits]
    if how == "all_to_all":
        return [torch.stack([one[rank] for one in bits]).view(dtype) for rank in range(len(bits))]
    assert_never(how)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as integers, in the same memory."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of what ranks have, in their order, accumulated wide and rounded once, in memory of its own."""
    total = parts[0].to(wide(parts[0].dtype), copy=True, memory_format=torch.contiguous_format)
    for other in parts[1:]:
        total.add_(other)
    return total.to(parts[0].dtype)


@frozen(eq=False)
class Processes:
    """One rank of a group of processes, which form the groups of a layout.

    A group of the layout that is smaller is made when this is, in one order on all ranks; one of a single rank moves
    nothing.  Raises `InputError` for what is no group or one of others, and for a layout of another size, before any
    group is made.

    On a device a collective is issued on the stream that is current.  The group's own stream waits for that one and
    is waited for by it before it goes on, and the group keeps operands and results for it: so to a program a
    collective is a launch on the stream that the program says.  The host waits for nothing.  A step without tokens
    moves nothing, on no rank, so nothing is called.

    `sums` says who adds.  In "rank order" each rank adds its part of all elements as one process would, wide and in the
    order of the ranks, and the parts are gathered: an element is summed once and then copied, so all ranks have the
    same bits, and those of all ranks in one process, whatever the transport.  That is an all-to-all and an all-gather,
    2 (W - 1) / W of the bytes from each rank, as many as a ring's all-reduce, in two messages, with W - 1 additions of
    a W-th between them; a W-th is rounded up.  "transport" leaves it to the all-reduce of the transport, which adds in
    its own order and precision: then it is for the transport that ranks do not go apart.  gloo gives to all what one
    rank added; a real HCCL is asked for that with HCCL_DETERMINISTIC=true, which has not been tried.
    """

    group: Any = field()
    layout: Layout = field(converter=layout_of, alias="ranks")
    sums: Sums = field(default="rank order", validator=one_of(*get_args(Sums)))
    _of: Mapping[str, Any] = field(init=False, repr=False)  # the group of each name; None for this rank alone
    peers: Peers = field(init=False, repr=False)
    _beside: list[Any] = field(factory=list, init=False)  # the group of hosts, once there is one

    @group.validator
    def _member(self, attribute: Any, value: Any) -> None:
        outside = dist.is_available() and value == dist.GroupMember.NON_GROUP_MEMBER
        if not outside and not (dist.is_available() and isinstance(value, dist.ProcessGroup)):
            raise InputError(
                "group: must be a group of torch.distributed, as dist.group.WORLD is after init_process_group: got "
                f"{value!r}"
            )
        if outside or dist.get_rank(value) < 0:
            raise InputError("group: this process must be a rank of it: got one of others")

    def __attrs_post_init__(self) -> None:
        if self.layout.size != dist.get_world_size(self.group):
            size = dist.get_world_size(self.group)
            raise InputError(f"ranks: must be the size of the group, {size}: got {self.layout.size}, {self.layout}")
        object.__setattr__(self, "peers", Peers.of(self.group))
        made: dict[tuple[int, ...], Any] = {}
        with self.peers.making("groups of the layout"):
            for name in ("ep", "tp", "dcp"):
                members = self.layout.members(name, self.here.start)
                if members not in made:
                    made[members] = self._made(members)
        of = {name: made[self.layout.members(name, self.here.start)] for name in ("ep", "tp", "dcp")}
        object.__setattr__(self, "_of", of)

    def _made(self, members: tuple[int, ...]) -> Any:
        """The group of these ranks, all of which come here for their groups in one order."""
        if len(members) == 1:
            return None
        if len(members) == self.layout.size:
            return self.group
        ranks = [dist.get_global_rank(self.group, rank) for rank in members]
        return self._made_of(ranks, dist.get_backend(self.group))

    def _made_of(self, ranks: list[int], kind: str) -> Any:
        limit = timedelta(seconds=self.peers.board.timeout)
        return dist.new_group(ranks, backend=kind, timeout=limit, use_local_synchronization=True)

    @property
    def here(self) -> range:
        """This process's rank."""
        rank = dist.get_rank(self.group)
        return range(rank, rank + 1)

    def move(self, how: Meeting, sent: Sequence[Any], *, group: str, spent: bool = False) -> list[Any]:
        """See `World.move`; the sum is as `sums` says."""
        self.peers.board.collective += 1
        (mine,), among = sent, self._of[group]
        if among is None:
            return _together(how, sent)
        size = self.layout.group(group).size
        if how == "all_to_all_v":
            return [self._exchange_rows(mine[0], mine[1], among)]
        if how == "all_gather":
            return [self._gather(mine, mine.new_empty((size, *mine.shape)), among)]
        if how == "all_to_all":
            return [self._exchange(mine, among)]
        if not mine.numel() or self.sums == "rank order":
            return [self._add(mine, size, among, spent=spent)]
        total = mine if spent else mine.clone(memory_format=torch.contiguous_format)
        self._meet(dist.all_reduce(total, group=among, async_op=True), mine)
        return [total]

    def _gather(self, mine: torch.Tensor, found: torch.Tensor, among: Any) -> torch.Tensor:
        """What each rank has, rank after rank in `found`."""
        if mine.numel():
            work = dist.all_gather_single(self._bytes(found), self._bytes(mine), group=among, async_op=True)
            self._meet(work, mine)
        return found

    def _exchange(self, mine: torch.Tensor, among: Any) -> torch.Tensor:
        """The part for this rank, by the first axis, of what each rank has."""
        found = torch.empty_like(mine)
        if mine.numel():
            work = dist.all_to_all_single(self._bytes(found), self._bytes(mine), group=among, async_op=True)
            self._meet(work, mine)
        return found

    def _exchange_rows(self, mine: torch.Tensor, counts: list[int], among: Any) -> tuple[torch.Tensor, list[int]]:
        """The rows for this rank and their numbers, which go first, since the host has to know them."""
        told: list[int] = self._exchange(torch.tensor(counts).to(mine.device), among).tolist()
        found, row = mine.new_empty((sum(told), mine.shape[1])), mine.shape[1] * mine.element_size()
        sizes = ([count * row for count in told], [count * row for count in counts])
        work = dist.all_to_all_single(self._bytes(found), self._bytes(mine), *sizes, group=among, async_op=True)
        self._meet(work, mine)
        return found, told

    def _add(self, mine: torch.Tensor, size: int, among: Any, *, spent: bool) -> torch.Tensor:
        """The sum in rank order: this rank adds its part, and all are gathered."""
        count, own = mine.numel(), -(-mine.numel() // size)
        whole = count == own * size
        flat = mine.view(-1) if whole else mine.new_zeros(own * size)
        if not whole:
            flat[:count] = mine.view(-1)
        part = added(self._exchange(flat.view(size, own), among).unbind())
        every = self._gather(part, flat if spent or not whole else torch.empty_like(flat), among)
        return every[:count].view(mine.shape)

    def messages(self, how: Meeting, group: str) -> int:
        """See `World.messages`; none in a group of one.  A sum in rank order is two, and so are rows behind their
        numbers.
        """
        if self._of[group] is None:
            return 0
        return 2 if how == "all_to_all_v" or (how == "all_reduce" and self.sums == "rank order") else 1

    def _meet(self, work: Any, sent: torch.Tensor) -> None:
        """Behind here, the host or the stream that is current has what a collective brings."""
        if sent.is_cpu:
            self.peers.meet(work)
        else:
            work.wait()

    def share(self, value: Any) -> list[Any]:
        """See `World.share`; on the host, beside what moves on a device."""
        data = pickle.dumps(value)
        said = self._gathered(data, _SHORT)
        longest = max(length for length, _ in said)
        if longest > _SHORT:
            said = self._gathered(data, longest)
        return [pickle.loads(one[:length]) for length, one in said]

    def _gathered(self, data: bytes, size: int) -> list[tuple[int, bytes]]:
        """How many bytes each rank has, and the first `size` of them, in one message each."""
        head = len(data).to_bytes(8, "little") + data[:size]
        mine = torch.frombuffer(bytearray(head.ljust(8 + size, b"\0")), dtype=torch.uint8)
        every = mine.new_empty((self.layout.size, len(mine)))
        work = dist.all_gather_single(every.view(-1), mine, group=self._host(), async_op=True)
        self.peers.board.collective += 1
        self.peers.meet(work, "share")
        told = [bytes(row.numpy()) for row in every]
        return [(int.from_bytes(one[:8], "little"), one[8:]) for one in told]

    def _host(self) -> Any:
        """The same processes over gloo: the group itself where it has that, or one made when it is first asked for."""
        if not self._beside:
            own = any("gloo" in kind for kind in dist.get_backend_config(self.group).split(","))
            members = dist.get_process_group_ranks(self.group)
            with self.peers.making("group of hosts"):
                self._beside.append(self.group if own else self._made_of(members, "gloo"))
        return self._beside[0]

    @staticmethod
    def _bytes(tensor: torch.Tensor) -> torch.Tensor:
        """As bytes in one row, whose split over the ranks is that of the first axis."""
        return tensor.view(torch.uint8).view(-1)
