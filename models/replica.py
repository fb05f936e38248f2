"""What a replica holds: its blocks, the requests that run there, and what they do in the next step.

Replicas are data-parallel: each has caches of its own and serves requests of its own, and a step is one of all.  Every
process keeps the books of all replicas, which costs nothing, so that all know the step that each is to take.
"""

import contextlib

from attrs import define, field, frozen

from mla_fx.decode import StepShape
from mla_fx.models.blocks import BlockManager, OutOfBlocksError
from mla_fx.models.chunks import taken
from mla_fx.models.request import Request, Served
from mla_fx.models.runner import Piece


@frozen
class Part:
    """A step's piece of a request, from row `row` on; `last`: with its last known token, so that it says the next."""

    request: Request
    piece: Piece
    row: int
    last: bool

    @property
    def wanted(self) -> range:
        """The rows whose logits count: those of the last known token and of the drafts behind it."""
        end = self.row + len(self.piece.tokens)
        return range(end - 1 - len(self.request.drafts) if self.last else end, end)

    @property
    def filling(self) -> bool:
        """Whether it fills in a prompt."""
        return len(self.piece.tokens) > 1 + len(self.request.drafts)


@define(eq=False)
class Replica:
    """Requests that run, at most `shape.requests` with at most `chunk` tokens a step, in the order of their numbers."""

    number: int
    shape: StepShape
    chunk: int
    blocks: BlockManager
    prefix_cache: bool = True
    running: list[Request] = field(factory=list, init=False)

    def admit(self, request: Request) -> bool:
        """Let a request run if there is room and there are blocks for the tokens it has; whether it does."""
        if len(self.running) == self.shape.requests:
            return False
        try:
            self.blocks.allocate(request.number, len(request.tokens), request.tokens if self.prefix_cache else ())
        except OutOfBlocksError:
            return False
        request.cached = self.blocks.shared(request.number)
        request.reused += request.cached
        self.running.append(request)
        return True

    def grow(self) -> list[Request]:
        """Blocks for the last token of all that decode, if need be those of the youngest; who had to give theirs back.

        The youngest may be the request itself.  It starts over from the tokens it has.
        """
        stopped: list[Request] = []
        for request in list(self.running):
            while request.pending == 1 and request in self.running:
                try:
                    self.blocks.append(request.number, len(request.tokens))
                    break
                except OutOfBlocksError:
                    last = self.running[-1]
                    self.drop(last)
                    last.cached, last.drafts = 0, []
                    stopped.append(last)
        return stopped

    def parts(self) -> list[Part]:
        """What each request does in this step.

        Every request that decodes gets its last token, and the first prompt at least one; then drafts and the rest of
        prompts share what the step has left, of which prompts leave some where else much of it were padding (`taken`).
        """
        decoding = [request for request in self.running if request.pending == 1]
        prompts = [request for request in self.running if request.pending > 1]
        spare = self.chunk - len(decoding) - bool(prompts)
        parts: list[Part] = []
        row = 0
        for request in decoding:
            request.drafts = self._fitting(request, request.drafts[:spare])
            spare -= len(request.drafts)
            parts.append(self._part(request, 1, row))
            row += 1 + len(request.drafts)
        total = min(self.chunk, row + sum(request.pending for request in prompts))
        end = taken(total) if taken(total) > row else total
        for request in prompts:
            count = min(request.pending, end - row)
            if count:
                parts.append(self._part(request, count, row))
                row += count
        return parts

    def served(self, part: Part, count: int, ahead: int) -> Served:
        """What a part settled; with blocks for the positions of `ahead` drafts, where there are any free."""
        request = part.request
        room = self._room(request, request.cached + min(ahead, request.left))
        table = self.blocks.table(request.number)
        return Served(request, part.piece.start, count, part.row, table, room, self.number)

    def keep(self, request: Request) -> None:
        """What a request has in the caches is there for good: its full blocks can be shared."""
        if self.prefix_cache:
            self.blocks.fill(request.number, request.tokens, request.cached)

    def drop(self, request: Request) -> None:
        """A request runs no more: take back its blocks."""
        self.running.remove(request)
        self.blocks.free(request.number)

    def _fitting(self, request: Request, drafts: list[int]) -> list[int]:
        """The drafts there are blocks for; they are worth nobody's preemption."""
        known = len(request.tokens)
        return drafts[: self._room(request, known + len(drafts)) - known] if drafts else []

    def _room(self, request: Request, length: int) -> int:
        """How many positions a request's blocks are, once they are `length` if enough are free."""
        with contextlib.suppress(OutOfBlocksError):
            self.blocks.append(request.number, length)
        return len(self.blocks.table(request.number)) * self.blocks.unit

    def _part(self, request: Request, count: int, row: int) -> Part:
        """The next `count` tokens of a request and all its drafts."""
        tokens = [*request.tokens[request.cached : request.cached + count], *request.drafts]
        piece = Piece(tokens=tokens, start=request.cached, table=self.blocks.table(request.number))
        return Part(request, piece, row, last=count == request.pending)
