"""Write the latent and the rotated key of the new tokens into this rank's cache.

    latent_cache[slot // S, slot % S] = latent[t]        slot = slots[t]
    rope_cache[slot // S, slot % S]   = k_rope[t]        nothing where slot = -1

A token's slot is -1 on all ranks but its owner's, and for padding.  Slots that
are not -1 are distinct.  Both caches are states: the results are their next
versions, in the same memory.  Source: vLLM's slot mapping.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval, match, require_dtype, same_dtype
from mla_fx.effects.op import InputError, Op


@frozen
class WriteCache(Op):
    """`latent_cache` [C, S, L], `rope_cache` [C, S, R], `latent` [T, L], `k_rope` [T, R], `slots` int64 [T]."""

    operands: ClassVar = ("latent_cache", "rope_cache", "latent", "k_rope", "slots")
    results: ClassVar = ("latent_cache", "rope_cache")
    writes: ClassVar[Mapping[int, int]] = MappingProxyType({0: 0, 1: 1})

    def shape_rule(
        self, latent_cache: Aval, rope_cache: Aval, latent: Aval, k_rope: Aval, slots: Aval
    ) -> tuple[Aval, ...]:
        """Cache and new rows have one dtype."""
        match(
            self.name,
            latent_cache=(latent_cache, "C S L"),
            rope_cache=(rope_cache, "C S R"),
            latent=(latent, "T L"),
            k_rope=(k_rope, "T R"),
            slots=(slots, "T"),
        )
        same_dtype(self.name, latent_cache=latent_cache, rope_cache=rope_cache, latent=latent, k_rope=k_rope)
        require_dtype(self.name, "slots", slots, "int64")
        return latent_cache, rope_cache

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """Every slot is -1 or a row of the cache, and no row is written twice."""
        blocks, size, _ = avals["latent_cache"].shape
        slots = values["slots"].tolist()
        if min(slots, default=0) < -1 or max(slots, default=0) >= blocks * size:
            wrong = next(slot for slot in slots if not -1 <= slot < blocks * size)
            raise InputError(
                f"slots: each must be -1 or in 0..{blocks * size - 1} ({blocks} blocks of {size}): got {wrong}"
            )
        written = [slot for slot in slots if slot >= 0]
        if len(set(written)) < len(written):
            raise InputError(f"slots: no two tokens may have one slot: got {sorted(written)}")
