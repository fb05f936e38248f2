"""Updates of operators in graphs, over the wheel: lengths from the host, events in front of them, what is too late."""

import random

import pytest
import torch

from tests.backends.ascend.graphs import Attention, inner, issued

pytestmark = pytest.mark.usefixtures("emulator")
SEEDS = range(16)


def same(attention, lengths) -> bool:
    return all(
        torch.equal(out.cpu(), fresh) for out, fresh in zip(attention.out, attention.fresh(lengths), strict=True)
    )


def captured(attention, lengths=(3, 9)):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        held = attention.capture(lengths)
    return graph, held


def test_each_step_has_lengths_of_its_own(emulator):
    """Empty, full and changing, issued before the replay or behind it, under all kinds of seeds."""
    attention, side, draw = Attention(), torch.npu.Stream(), random.Random(3)
    graph, held = captured(attention)
    for seed in SEEDS:
        emulator.seed(seed)
        lengths = [draw.choice([0, 1, 17, attention.keys]) for _ in range(attention.requests)]
        first = seed % 2
        if first:
            attention.update(held, lengths, side)
        graph.replay()
        if not first:
            attention.update(held, lengths, side)
        assert same(attention, lengths), (seed, lengths)


def test_what_the_host_issues_for_a_step(emulator):
    attention, side = Attention(), torch.npu.Stream()
    graph, held = captured(attention)
    with emulator.tracing() as trace:
        graph.replay()
        attention.update(held, [1, 2], side)
    assert sorted(issued(trace)) == ["replay", "update", "value_write"]
    assert inner(trace) == ["aclnnFusedInferAttentionScoreV4"]
    (update,) = (task for task in trace if task.kind == "update")
    assert update.name == "aclnnFusedInferAttentionScoreV4" and update.stream == side.npu_stream
    assert update.operands[0] == (torch.bfloat16, (2, 2, 1, 512))


def test_only_the_group_that_is_updated_changes(emulator):
    left, right, side = Attention(0), Attention(1), torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        of_left, of_right = left.capture([3, 9]), right.capture([4, 8])
    for seed in SEEDS[:6]:
        emulator.seed(seed)
        graph.replay()
        left.update(of_left, [seed, 7], side)
        of_right[1].record(side)
        assert same(left, [seed, 7]) and same(right, [4, 8])


def test_a_missed_update_names_the_operator(emulator):
    attention, side = Attention(), torch.npu.Stream()
    graph, held = captured(attention)
    graph.replay()
    with pytest.raises(
        RuntimeError, match=r"507011[\s\S]*aclnnFusedInferAttentionScoreV4 of a graph .* waits for ever"
    ):
        torch.npu.synchronize()
    emulator.recover()
    graph.replay()
    attention.update(held, [5, 6], side)
    assert same(attention, [5, 6])


def test_one_record_lets_one_replay_go(emulator):
    """The wait takes it back: the second replay waits for a record of its own."""
    attention, side = Attention(), torch.npu.Stream()
    graph, held = captured(attention)
    attention.update(held, [5, 6], side)
    for _ in range(2):
        graph.replay()
    with pytest.raises(RuntimeError, match="waits for ever"):
        torch.npu.synchronize()
    emulator.recover()


def test_a_record_that_overtakes_the_replay_before_is_lost(emulator):
    """Two steps issued with nothing between them: under some seed both records are there before the first wait."""
    attention, side, lost = Attention(), torch.npu.Stream(), 0
    graph, held = captured(attention)
    for waits in (True, False):
        for seed in SEEDS:
            emulator.seed(seed)
            try:
                for lengths in ([1, 2], [3, 4]):
                    if waits:
                        torch.npu.current_stream().synchronize()
                    graph.replay()
                    attention.update(held, lengths, side)
                torch.npu.synchronize()
                assert same(attention, [3, 4]) or not waits
            except RuntimeError as error:
                assert "waits for ever" in str(error)
                lost += 1
                emulator.recover()
                torch.npu.synchronize()
        assert bool(lost) is not waits


def test_an_update_that_nothing_waits_for_may_come_too_late(emulator):
    """Without an external event: old lengths under some seeds, new ones under others, never a mixture."""
    attention, side, found = Attention(), torch.npu.Stream(), set()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        attention.call([3, 9])
        handle = torch.npu.graph_task_group_end(stream)
    for seed in range(100):  # the wheel's own thread has a say as well: the first few may be alike
        emulator.seed(seed)
        for lengths, event in (([3, 9], torch.npu.ExternalEvent()), ([20, 30], torch.npu.ExternalEvent())):
            torch.npu.synchronize()
            if lengths == [20, 30]:
                graph.replay()
            attention.update((handle, event), lengths, side)
        found.add((same(attention, [3, 9]), same(attention, [20, 30])))
        torch.npu.synchronize()
        graph.replay()
        assert same(attention, [20, 30])  # the next one has them
        if len(found) > 1 and seed >= len(SEEDS):
            break
    assert found == {(True, False), (False, True)}


def test_the_wheels_own_dispatch(emulator):
    """`auto_dispatch_capture`, and `update` by keyword: the functional call, its workspace and outputs by the wheel."""
    attention, graph = Attention(), torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        out, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(*attention.operands(), **attention.options([3, 9]))
        twice = out * 2
    for seed, lengths in enumerate(([1, 2], [0, 32], [9, 0])):
        emulator.seed(seed)
        graph.replay()
        graph.update(cpu_update_input=[{"actual_seq_kvlen": lengths}])
        assert torch.equal(twice.cpu(), attention.fresh(lengths)[0] * 2)
    with pytest.raises(RuntimeError, match="1 operators that need to be updated"):
        graph.update(cpu_update_input=[{}, {}])


# --- refused ---------------------------------------------------------------------------


def test_another_call_is_no_update(emulator):
    """All but lists of integers must be what was captured, down to the addresses; nothing has changed then."""
    attention, side = Attention(), torch.npu.Stream()
    graph, held = captured(attention)
    elsewhere = [torch.empty_like(out) for out in attention.out]
    for other, message in (({"softmax_scale": 0.2}, "must be as captured, 0.1"), ({"out": elsewhere}, "with strides")):
        with pytest.raises(RuntimeError, match=rf"207019[\s\S]*ScoreV4: update: argument \d+ [\s\S]*{message}"):
            attention.update(held, [1, 2], side, **other)
    with torch.npu.stream(side):
        torch.npu.graph_task_update_begin(side, held[0])
        attention.out[0] + 1
        with pytest.raises(RuntimeError, match=r"207019[\s\S]*aclnnAdds: update: the operator must be aclnnFused"):
            torch.npu.graph_task_update_end(side)
    graph.replay()
    held[1].record(side)
    assert same(attention, [3, 9])


@pytest.mark.parametrize("calls", [0, 2])
def test_an_update_has_as_many_operators_as_its_group(emulator, calls):
    attention, side = Attention(), torch.npu.Stream()
    _graph, held = captured(attention)
    with torch.npu.stream(side):
        torch.npu.graph_task_update_begin(side, held[0])
        for _ in range(calls):
            attention.call([1, 2])
        with pytest.raises(RuntimeError, match=rf"507000[\s\S]*the task group has 1 operators: got {calls}"):
            torch.npu.graph_task_update_end(side)


def test_only_operators_are_updated(emulator):
    attention, side = Attention(), torch.npu.Stream()
    _graph, held = captured(attention)
    with torch.npu.stream(side):
        torch.npu.graph_task_update_begin(side, held[0])
        attention.call([1, 2])
        held[1].record(side)
        with pytest.raises(RuntimeError, match=r"207019[\s\S]*update: only operators can be updated"):
            torch.npu.graph_task_update_end(side)


def test_groups_begin_and_end_where_they_can(emulator):
    attention, side, other = Attention(), torch.npu.Stream(), torch.npu.Stream()
    graph, (handle, _) = captured(attention)
    with pytest.raises(RuntimeError, match=r"107029[\s\S]*is not in the capture stage"):
        torch.npu.graph_task_group_begin(side)
    with pytest.raises(RuntimeError, match=r"107029[\s\S]*is not in the capture stage"):
        torch.npu.graph_task_group_end(side)
    with pytest.raises(RuntimeError, match=r"107033[\s\S]*is not in task update mode"):
        torch.npu.graph_task_update_end(side)
    torch.npu.graph_task_update_begin(side, handle)
    with pytest.raises(RuntimeError, match=r"107033[\s\S]*is already in task update mode"):
        torch.npu.graph_task_update_begin(side, handle)
    with pytest.raises(RuntimeError, match=r"107033[\s\S]*only can be updated by one stream"):
        torch.npu.graph_task_update_begin(other, handle)
    with pytest.raises(RuntimeError, match="507000"):
        torch.npu.graph_task_update_end(side)
    graph.reset()
    with pytest.raises(RuntimeError, match=r"107017[\s\S]*its graph is gone"):
        torch.npu.graph_task_update_begin(side, handle)
    with torch.npu.graph(torch.npu.NPUGraph()):
        stream = torch.npu.current_stream()
        with pytest.raises(RuntimeError, match=r"107033[\s\S]*no task group was started"):
            torch.npu.graph_task_group_end(stream)
        torch.npu.graph_task_group_begin(stream)
        with pytest.raises(RuntimeError, match=r"107033[\s\S]*repeatedly started"):
            torch.npu.graph_task_group_begin(stream)
        torch.npu.graph_task_group_end(stream)
