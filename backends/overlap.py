"""No state shares memory with another state or with another input, of whatever rank.

What a launch writes in place must be nobody else's to read: the law orders
accesses by name, so two names for one memory would be a race that it cannot see.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
from weakref import ref

import torch

from mla_fx.backends.table import Formed, tensors
from mla_fx.effects import Input, InputError


class Overlaps:
    """Looks for them among the leaves of a run, and among these and the parameters that a program is compiled with."""

    def __init__(
        self,
        inputs: Sequence[Input],
        states: set[str],
        ranks: range,
        device: str,
        parameters: Mapping[str, Sequence[Formed]],
    ) -> None:
        places = [(put, rank) for put in inputs for rank in ranks]
        self.names = [f"{put.name} of rank {rank}" for put, rank in places]
        self.states = [n for n, (put, _) in enumerate(places) if put.name in states]
        here = ("device", "staged") if device == "cpu" else ("device",)  # addresses of two devices say nothing
        self.others = [n for n, (put, _) in enumerate(places) if put.name not in states and put.place in here]
        self.fixed = [
            (*span(part), len(self.names) + n)
            for n, leaf in enumerate(leaf for leaves in parameters.values() for leaf in leaves)
            for part in tensors(leaf)
            if part.numel() and part.layout is torch.strided  # what a library has packed has no addresses
        ]
        self.names += [f"{name} of rank {rank}" for name in parameters for rank in ranks]
        self.known: list[tuple[int, Any, int]] = []  # of every state in the step before: number, reference, address
        self.inference = False  # whether some of them were made in inference mode, and so can be written in it only
        self.starts: list[int] = []  # of their memory, sorted
        self.spans: list[tuple[int, int, int]] = []  # start, end and number of each, sorted

    def same(self, leaves: Sequence[Any]) -> bool:
        """Whether the states are the tensors of the step before, in the same memory."""
        for n, known, place in self.known:
            leaf = leaves[n]
            if known() is not leaf or leaf.data_ptr() != place:
                return False
        return bool(self.known)

    def check(self, leaves: Sequence[Any], same: bool) -> None:
        """Raise `InputError` where a state lies in memory that something else lies in too."""
        if not self.states:
            return
        if not same:
            self.known = []
            self.spans = sorted((*span(leaves[n]), n) for n in self.states if leaves[n].numel())
            self.starts = [start for start, _, _ in self.spans]
            shared = [
                sorted((first, second)) for (_, end, first), (start, _, second) in pairwise(self.spans) if start < end
            ]
            if shared:
                self.refuse(*min(shared))  # the same pair, wherever the allocator put them
            for fixed in self.fixed:
                self.hold(*fixed)
            self.inference = any([leaves[n].is_inference() for n in self.states])
            self.known = [(n, ref(leaves[n]), leaves[n].data_ptr()) for n in self.states]
        before = None
        for n in self.others:
            leaf = leaves[n]
            if leaf is not before and leaf.numel():
                self.hold(*span(leaf), n)
            before = leaf

    def hold(self, start: int, end: int, other: int) -> None:
        """Hold the memory of another input against all states, which do not overlap among themselves."""
        at = bisect_left(self.starts, end) - 1  # so the last one that starts before the end is the only candidate
        if at >= 0 and self.spans[at][1] > start:
            self.refuse(self.spans[at][2], other)

    def refuse(self, state: int, other: int) -> None:
        """Word the refusal."""
        raise InputError(
            f"{self.names[state]}: is updated in place and must have memory of its own: got memory that "
            f"{self.names[other]} lies in too"
        )


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first element and behind the last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
