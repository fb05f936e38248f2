"""What tests of captured graphs share: an attention call with lengths on the host, and its updates."""

from collections.abc import Sequence
from typing import Any

import torch

from mla_fx.backends.ascend.emulator import Traced

Lengths = Sequence[int]


def issued(trace: Sequence[Traced]) -> list[str]:
    """What the host put on the device, apart from what replays run."""
    return [task.kind for task in trace if not task.graph]


def inner(trace: Sequence[Traced]) -> list[str]:
    """The operators that replays ran."""
    return [task.name for task in trace if task.graph and task.kind == "operator"]


class Attention:
    """Fused infer attention of two requests with one query each over keys of its own; lengths come from the host."""

    requests, heads, width, rope, keys = 2, 2, 512, 64, 32

    def __init__(self, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(seed)
        b, n, d, r, s = self.requests, self.heads, self.width, self.rope, self.keys
        shapes = [(b, n, 1, d), (b, n, 1, r), (b, 1, s, d), (b, 1, s, r)]
        self.given = [torch.randn(*shape, generator=made).bfloat16().npu() for shape in shapes]
        self.out = [torch.zeros(b, n, 1, d, dtype=torch.bfloat16, device="npu"), torch.zeros(b, n, 1, 1, device="npu")]
        ask = torch.ops.npu._npu_fused_infer_attention_score_v2_get_max_workspace
        self.workspace = ask(*self.operands(), **self.options([s] * b))

    def operands(self) -> tuple[torch.Tensor, ...]:
        q, _, kv, _ = self.given
        return q, kv, kv

    def options(self, lengths: Lengths) -> dict[str, Any]:
        ropes = {"query_rope": self.given[1], "key_rope": self.given[3], "return_softmax_lse": True}
        heads = {"num_query_heads": self.heads, "num_key_value_heads": 1, "input_layout": "BNSD", "softmax_scale": 0.1}
        return ropes | heads | {"actual_seq_kvlen": list(lengths)}

    def call(self, lengths: Lengths, **other: Any) -> None:
        """Into `out`, with scratch in `workspace`; `other` options than its own, for what is refused."""
        ask = torch.ops.npu.npu_fused_infer_attention_score_v2.out
        ask(*self.operands(), **self.options(lengths) | {"workspace": self.workspace, "out": self.out} | other)

    def fresh(self, lengths: Lengths) -> list[torch.Tensor]:
        """What eager calls get."""
        ask = torch.ops.npu.npu_fused_infer_attention_score_v2
        return [result.cpu() for result in ask(*self.operands(), **self.options(lengths))]

    def capture(self, lengths: Lengths) -> Any:
        """Inside a capture: the call as a task group behind an external event; the handle and the event."""
        stream, event = torch.npu.current_stream(), torch.npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        self.call(lengths)
        return torch.npu.graph_task_group_end(stream), event

    def update(self, held: Any, lengths: Lengths, stream: Any, **other: Any) -> None:
        """On an update stream: new lengths, and then it is let go."""
        handle, event = held
        with torch.npu.stream(stream):
            torch.npu.graph_task_update_begin(stream, handle)
            self.call(lengths, **other)
            torch.npu.graph_task_update_end(stream)
            event.record(stream)
