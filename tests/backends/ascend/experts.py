"""The feed-forward half of a layer with experts, of sizes that every operator takes, ready to run."""

from typing import Any

import torch
from attrs import evolve, frozen
from torch.utils import _pytree as pytree

from mla_fx import MoeConfig, orchestrations
from mla_fx.backends import Backend
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval, Group, Program, Step, parameters, schedule, trace
from mla_fx.feed_forward import moe
from mla_fx.parameters import MoeParams
from mla_fx.weights import avals, moe_weights, shares

#: The gate of DeepSeek-V3; the width of an expert is what `npu_dequant_swiglu_quant` takes in groups.
CONFIG = MoeConfig(
    n_routed_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=64,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
)
HIDDEN = 32


@frozen
class Experts:
    """`width`: of an expert; `shared`: how many shared ones there are."""

    ranks: int = 2
    tokens: int = 5
    dtype: str = "bf16"
    quantization: str | None = None
    shared: int = 0
    width: int = 64

    @property
    def config(self) -> MoeConfig:
        return evolve(CONFIG, n_shared_experts=self.shared, moe_intermediate_size=self.width)

    @property
    def weights(self) -> MoeParams[Any]:
        """What a rank has, as avals."""
        weights = moe_weights(self.config, HIDDEN)
        found: MoeParams[Any] = avals(weights, shares(0, self.ranks), dtype=self.dtype, quantization=self.quantization)
        return found

    @property
    def step(self) -> Step:
        group = Group("ep", self.ranks)
        return trace(
            lambda x, params: moe(x, params, config=self.config, group=group, among=Group("tp", self.ranks)),
            "experts",
            x=Aval((self.tokens, HIDDEN), self.dtype),
            params=parameters(self.weights),
        )

    def params(self) -> list[MoeParams[torch.Tensor]]:
        """Per rank; the gate is the same on all."""
        each = [pytree.tree_map(self._filled(1 + rank), self.weights) for rank in range(self.ranks)]
        gate = {name: getattr(each[0], name) for name in ("gate", "e_score_correction_bias")}
        return [of_rank._replace(**gate) for of_rank in each]

    def _filled(self, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)

        def filled(aval: Aval) -> torch.Tensor:
            if aval.dtype == "int8":
                return torch.randint(-127, 128, aval.shape, generator=generator).to(torch.int8)
            values = torch.randn(aval.shape, generator=generator) / 4
            steps = self.quantization and aval.dtype == "fp32" and aval.shape != (CONFIG.n_routed_experts,)
            return (values.abs() / 127 if steps else values).to(DTYPES[aval.dtype])

        return filled

    def hidden(self, seed: int = 2) -> torch.Tensor:
        x = torch.randn(self.tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
        return x.to(DTYPES[self.dtype])

    def run(self, backend: Backend, step: Step | None = None) -> list[torch.Tensor]:
        """Each rank's part of the sum."""
        return Run(self, backend, step or self.step)()


def permuted_back(rows: torch.Tensor, source: torch.Tensor, weights: torch.Tensor, *, run: Any) -> tuple[torch.Tensor]:
    """A rule of `ops.UnpermuteTokens` by `npu_moe_token_unpermute`, which wants a permutation of all rows.

    Pairs of other ranks take the rows that no pair of this one has, with weight 0, and these must be zeros, not NaN.
    """
    pairs, elsewhere = source.numel(), source < 0
    behind = elsewhere.reshape(-1).to(torch.int32).cumsum(0, dtype=torch.int32)
    index = torch.where(elsewhere.reshape(-1), pairs - behind, source.reshape(-1))
    from_the_end = torch.arange(pairs, 0, -1, dtype=torch.int32, device=rows.device)
    rows = rows.masked_fill((from_the_end <= behind[-1:]).unsqueeze(1), 0)
    return (torch.ops.npu.npu_moe_token_unpermute(rows, index, weights.masked_fill(elsewhere, 0)),)


class Run:
    """A step of experts compiled once, to be run again and again."""

    def __init__(self, given: Experts, backend: Backend, step: Step) -> None:
        program: Program = schedule(step, orchestrations.serial)
        params = [given.params()[rank] for rank in backend.here]
        self.program = backend.compile(program, backend.prepare(program, params))
        self.x = backend.put([given.hidden()] * len(backend.here))

    def __call__(self) -> list[torch.Tensor]:
        return [out.cpu() for out in self.program(self.x)[0]]
