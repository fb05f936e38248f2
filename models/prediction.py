"""Drafts from the model's own multi-token prediction module.

After a step, the module runs over the positions the step has settled, each
with the token that follows it and the step's hidden state, and so keeps a
cache of its own in the same blocks; its logits at a request's last position
are the first draft.  A further draft takes the module's own hidden state and
the draft before; what that writes to the cache is written again once the model
has seen these positions.  Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen

from mla_fx.effects import InputError
from mla_fx.models.request import Request, Served
from mla_fx.models.runner import Piece, Runner


@frozen
class MtpDrafter:
    """Proposes up to `count` drafts a request; the runner has the parameters of the module."""

    runner: Runner
    count: int = 1

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise InputError(f"count: must be an integer of at least 1: got {self.count!r}")
        if self.runner.mtp is None:
            raise InputError("mtp: the runner must have the parameters of a prediction module: got None")

    def propose(self, served: Sequence[Served], hidden: Any) -> list[list[int]]:
        """Draft for every request whose prompt is filled in; the others' positions only enter the cache.

        A step of the module is one of all replicas: while one of them drafts, the others take part.
        """
        drafts: list[list[int]] = [[] for _ in served]
        own = [[k for k, one in enumerate(served) if one.replica == number] for number in range(self.runner.replicas)]
        sources = [[served[k].row + i for k in mine for i in range(served[k].count)] for mine in own]
        rows: list[list[int]] = []  # of the module's hidden states: each request's last position
        live: list[list[int]] = []
        for mine in own:
            ends = dict(zip(mine, itertools.accumulate(served[k].count for k in mine), strict=True))
            live.append([k for k in mine if served[k].request.cached + 1 == len(served[k].request.tokens)])
            rows.append([ends[k] - 1 for k in live[-1]])
        # A chunk of a prompt that is no longer than what a step that decodes can settle is none, as for the engine.
        filling = any(one.count > 1 + self.count for one in served)
        pieces = [[_settled(served[k]) for k in mine] for mine in own]
        logits, hidden = self.runner.predict(pieces, hidden, sources, rows, filling=filling)
        while any(live):
            with self.runner.reading():
                said = [
                    None if one is None else self._said([(served[k], drafts[k]) for k in mine], one)
                    for mine, one in zip(live, logits, strict=True)
                ]
            for mine, tokens in zip(live, self.runner.decided(said), strict=True):
                for k, token in zip(mine, tokens, strict=True):
                    drafts[k].append(token)
            ahead = [
                [(k, row) for k, row in zip(mine, of_mine, strict=True) if self._further(served[k], len(drafts[k]))]
                for mine, of_mine in zip(live, rows, strict=True)
            ]
            live, sources = [[k for k, _ in one] for one in ahead], [[row for _, row in one] for one in ahead]
            if not any(live):
                break
            rows = [list(range(len(mine))) for mine in live]
            pieces = [[_drafted(served[k], drafts[k]) for k in mine] for mine in live]
            logits, hidden = self.runner.predict(pieces, hidden, sources, rows, filling=False)
        return drafts

    def _said(self, asked: Sequence[tuple[Served, list[int]]], logits: torch.Tensor) -> list[int]:
        """The next draft of each request of a replica, behind those it has."""
        best = logits.argmax(1).tolist()
        return [_draft(one.request, best[row], logits[row], len(drafts)) for row, (one, drafts) in enumerate(asked)]

    def _further(self, one: Served, count: int) -> bool:
        """Whether another draft may still count, and there is room for the position it is made at."""
        return count < min(self.count, one.request.left - 1) and one.request.cached + count <= one.room


def _draft(request: Request, best: int, logits: torch.Tensor, ahead: int) -> int:
    """The likeliest token, or one drawn with the noise that the model's own token at that place is drawn with."""
    if request.sampling.temperature == 0:
        return best
    return request.sampler.draft(logits.cpu(), request.tokens, ahead)


def _settled(one: Served) -> Piece:
    """The positions that a step settled, each with the token behind it; position 0 has none, as in vLLM."""
    following = one.request.tokens[one.start + 1 : one.start + one.count + 1]
    tokens = [-1 if one.start + i == 0 else token for i, token in enumerate(following)]
    return Piece(tokens=tokens, start=one.start, table=one.table)


def _drafted(one: Served, drafts: list[int]) -> Piece:
    """The position behind the last, with the last draft as the token behind it."""
    return Piece(tokens=drafts[-1:], start=one.request.cached - 1 + len(drafts), table=one.table)
