"""The runner: what a step computes however its context came to be cached, and which programs it compiles for that."""

import pytest
import torch
import torch.utils._pytree as pytree
from attrs import define, evolve, field

from mla_fx import MlaConfig, StepShape, backends, orchestrations
from mla_fx.backends.cpu import fused
from mla_fx.effects import InputError, Keep, ops
from mla_fx.models import Checkpoint, Engine, Loader, MtpDrafter, Runner
from mla_fx.models.runner import Piece
from tests.models.served import finish, make_runner, oracle, random_prompts, run, small

TEXT = [token for prompt in random_prompts(6, seed=1) for token in prompt][:41]
#: Blocks of the text, deliberately out of order.
TABLE = [7, 2, 30, 11, 5, 19, 0, 23, 3, 60, 41, 8]


def close(found, right):
    torch.testing.assert_close(found, right, rtol=1e-5, atol=3e-5)


@define
class Counting:
    """A backend that keeps the programs it compiles."""

    backend: backends.Backend
    programs: list = field(factory=list)

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def compile(self, program, prepared):
        self.programs.append(program)
        return self.backend.compile(program, prepared)


def counting(ranks=1, requests=2, mtp=False, backend=None, **options):
    machine = Counting(backend or backends.get("cpu", ranks=ranks))
    shape = StepShape(ranks=ranks, requests=requests, blocks=64, block_size=4, table_width=32, dtype="fp32")
    return machine, Runner.load(Checkpoint.open(small()), machine, shape=shape, mtp=mtp, **options)


# --- what is computed -------------------------------------------------------


@pytest.mark.parametrize("cuts", [[41], [1, 40], [16, 16, 9], [3] * 13 + [2], [32, 1, 1, 1, 6]], ids=str)
@pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 4), (4, 2)])
def test_a_cached_context_is_continued(cuts, ranks, interleave):
    """Logits and hidden states of every token, in chunks of any size, against the dense model at once."""
    runner = make_runner(small(), ranks=ranks, interleave=interleave)
    logits, hidden = oracle(small())(TEXT)
    start = 0
    for cut in cuts:
        piece = Piece(tokens=TEXT[start : start + cut], start=start, table=TABLE)
        (found,), states = runner.forward([[piece]], [range(cut)], filling=cut > 1)
        assert found.is_inference()  # which spares a small step's operators time
        close(found, logits[start : start + cut])
        assert len(states) == ranks
        for state in states:
            close(state[:cut], hidden[start : start + cut])
        start += cut
    assert start == len(TEXT)


def test_rows_are_chosen_in_their_order():
    runner = make_runner(small())
    logits, _ = oracle(small())(TEXT)
    for rows in ([40], [3, 0, 40, 3, 17], []):
        (found,), _ = runner.forward([[Piece(tokens=TEXT, start=0, table=TABLE)]], [rows], filling=True)
        assert found.shape == (len(rows), 64)
        close(found, logits[rows])


def test_requests_do_not_see_each_other():
    """Three texts of different lengths in one step, two of which continue a context."""
    runner = make_runner(small(), ranks=2, requests=3)
    texts, tables, starts = [TEXT[:9], TEXT[9:30], TEXT[30:]], [[4, 1], [9, 0, 17], [2, 3]], [4, 20, 0]
    for text, table, start in zip(texts, tables, starts, strict=True):
        if start:
            runner.forward([[Piece(tokens=text[:start], start=0, table=table)]], [[]], filling=True)
    pieces = [
        Piece(tokens=text[start:], start=start, table=table)
        for text, table, start in zip(texts, tables, starts, strict=True)
    ]
    (found,), _ = runner.forward([pieces], [range(5 + 1 + 11)], filling=True)
    right = [oracle(small())(text)[0][start:] for text, start in zip(texts, starts, strict=True)]
    close(found, torch.cat(right))


def test_prediction_module_against_the_dense_one():
    """Its logits of every position, in chunks, each with the hidden states of the chunk's own step."""
    runner = make_runner(small(), ranks=2, mtp=True)
    right, start = oracle(small()).draft_logits(TEXT), 0
    for cut in (16, 1, 3, 20):
        forward = Piece(tokens=TEXT[start : start + cut], start=start, table=TABLE)
        _, hidden = runner.forward([[forward]], [[]], filling=True)
        following = TEXT[start + 1 : start + cut + 1]
        piece = Piece(tokens=[-1, *following[1:]] if start == 0 else following, start=start, table=TABLE)
        (found,), _ = runner.predict([[piece]], hidden, [range(cut)], [range(cut)], filling=True)
        close(found, right[start : start + cut])
        start += cut


# --- programs ---------------------------------------------------------------


def test_programs_are_compiled_once_for_their_sizes():
    """Many steps of all lengths; a program for each power of two of tokens and of rows, and no more."""
    machine, runner = counting()
    engine = Engine(runner=runner, chunk=16, prefix_cache=False)  # or the second round would have other lengths
    finish(engine, random_prompts(6), 12)
    first = len(machine.programs)
    assert first == len(runner.programs) <= 14
    assert all(program.inputs for program in machine.programs)
    finish(engine, random_prompts(6), 12)
    assert len(machine.programs) == first
    assert len({str(program.inputs) + str(program) for program in machine.programs}) == first


def test_long_decoding_needs_one_program():
    machine, runner = counting(requests=1)
    engine = Engine(runner=runner, chunk=16)
    finish(engine, [[5]], 60)
    assert len(machine.programs) == 1


@pytest.mark.parametrize(
    ("options", "decode", "prefill"),
    [
        ({}, {"main", "side"}, {"main"}),
        ({"orchestration": orchestrations.exchange_aside}, {"main", "comm"}, {"main"}),
        ({"orchestration": orchestrations.serial}, {"main"}, {"main"}),
        ({"prefill_orchestration": orchestrations.exchange_aside}, {"main", "side"}, {"main", "comm"}),
    ],
)
def test_orchestrations_of_decoding_and_of_prompts(options, decode, prefill):
    """A step in which a prompt is filled in is serial unless somebody asks; so are those of the prediction module."""
    machine, runner = counting(ranks=2, mtp=True, **options)
    engine = Engine(runner=runner, chunk=16, drafter=MtpDrafter(runner, 2))
    engine.add(TEXT[:13], max_new_tokens=10)
    engine.step()
    filling, machine.programs[:] = machine.programs[:2], []
    assert [set(program.streams) for program in filling] == [prefill, prefill]
    for _ in run(engine):
        pass
    assert machine.programs
    assert all(set(program.streams) == decode for program in machine.programs)


def test_a_prompt_and_drafts_of_its_size_have_programs_of_their_own():
    machine, runner = counting(ranks=2, mtp=True)
    piece = Piece(tokens=TEXT[:4], start=0, table=TABLE)
    for filling in (False, True, False):
        _, hidden = runner.forward([[piece]], [[3]], filling=filling)
        runner.predict([[piece]], hidden, [range(4)], [[3]], filling=filling)
    assert [set(program.streams) for program in machine.programs] == [{"main", "side"}] * 2 + [{"main"}] * 2


def test_three_requests_that_decode_are_no_prompt():
    """Sizes are rounded up to powers of two; the prediction module must not take the padding for a prompt."""
    machine, runner = counting(requests=3, mtp=True)
    engine = Engine(runner=runner, chunk=16, drafter=MtpDrafter(runner))
    for _ in range(3):
        engine.add([5], max_new_tokens=10)
    for _ in run(engine):
        pass
    assert all(set(program.streams) == {"main", "side"} for program in machine.programs)


def test_conservative_programs():
    """What is kept alive by hand is what the scheduler's minimum does not need."""
    kept = []
    for mode in ("minimal", "conservative"):
        machine, runner = counting(ranks=2, mode=mode)
        finish(Engine(runner=runner, chunk=16), [[5]], 3)
        kept.append(sum(program.count(Keep) for program in machine.programs))
    assert kept[0] == 0 < kept[1]


def expanded(program):
    return any(isinstance(launch.op, ops.ExpandedAttention) for launch in program.launches)


def test_prompts_that_are_long_enough_are_expanded():
    """By the count: 32 new tokens of a request here, L = 16 and P = V = 8; steps that decode never are.

    On a backend that leaves the history in the latent, and so brings all tokens there.
    """
    machine, runner = counting(mtp=True, backend=backends.get("cpu").without_fusions(*fused.ALL))
    for count in (31, 32, 1):
        piece = Piece(tokens=TEXT[:count], start=0, table=TABLE)
        _, hidden = runner.forward([[piece]], [[0]], filling=count > 1)
        runner.predict([[piece]], hidden, [range(count)], [[0]], filling=count > 1)
    runner.forward([[Piece(tokens=TEXT[:16], start=0, table=TABLE[k * 4 :]) for k in range(2)]], [[0]], filling=True)
    runner.forward([[Piece(tokens=TEXT[:32], start=0, table=TABLE)]], [[0]], filling=False)
    assert [expanded(program) for program in machine.programs] == [False, False, True, True, *[False] * 3]


def test_prompts_without_a_history_are_expanded_where_it_is_left_out_for_them():
    """By the count, a request of 8: 36 pairs * 16 saved; behind m keys m (256 - 8 * 16) more, less than that up to 4.

    A second request that has none changes nothing; steps that decode never are.
    """
    machine, runner = counting()
    for start, others in ((0, 0), (4, 0), (5, 0), (4, 8), (0, 1)):
        pieces = [
            Piece(tokens=TEXT[:8], start=start, table=TABLE),
            Piece(tokens=TEXT[:others], start=0, table=[50, 51]),
        ]
        runner.programs.clear()
        runner.forward([[piece for piece in pieces if piece.tokens]], [[0]], filling=others != 1)
    assert [expanded(program) for program in machine.programs] == [True, True, False, True, False]


@pytest.mark.parametrize(
    ("ranks", "form", "options", "taken"),
    [
        (1, {}, {}, True),
        (1, {"replicate_query": True}, {}, True),
        (2, {"project_before_merge": True}, {}, True),
        (2, {"project_before_merge": True, "replicate_query": True}, {}, True),
        (1, {}, {"expand": False}, False),
        (2, {}, {}, False),
    ],
)
def test_an_expanded_prompt_says_what_it_would_have_said(ranks, form, options, taken):
    """Two chunks, the second with a history, and the text behind them; where the parameters are in the form for it."""
    machine = Counting(backends.get("cpu", ranks=ranks))
    shape = StepShape(ranks=ranks, blocks=64, block_size=4, table_width=32, dtype="fp32", **form)
    runner = Runner.load(Checkpoint.open(small()), machine, shape=shape, **options)
    prompt = (TEXT * 2)[:70]
    assert finish(Engine(runner=runner, chunk=36), [prompt], 8) == [oracle(small()).greedy(prompt, 8)]
    assert any(map(expanded, machine.programs)) == taken


@pytest.mark.parametrize(
    ("chunk", "ranks", "form", "options"),
    [
        (512, 1, {}, {}),
        (512, 1, {"table_width": 511}, {}),
        (1024, 1, {"table_width": 512}, {}),  # tables of 2048 tokens: two steps
        (1024, 1, {"table_width": 2048}, {}),  # 1024 x 320 is more than twice 512 x 256, 512 x 320 less
        (512, 2, {"table_width": 255, "project_before_merge": True}, {}),  # of which each rank has half
        (256, 1, {"table_width": 255, "project_before_merge": True}, {}),
        (256, 2, {"table_width": 100, "project_before_merge": True}, {}),
        (256, 2, {}, {}),
        (256, 1, {}, {"expand": False}),
        (512, 2, {"requests": 300}, {}),
        (512, 1, {"table_width": 128}, {}),  # tables of 512 tokens
        (256, 1, {"table_width": 127}, {}),
    ],
)
def test_an_engine_fills_in_as_much_as_expanding_wants(ranks, form, options, chunk):
    """With the head of DeepSeek-V3: 170 tokens, and on a rank alone 341, rounded up as steps are; all by hand."""
    sizes = {"ranks": ranks, "blocks": 2048, "block_size": 4, "table_width": 300, "dtype": "fp32"} | form
    backend = backends.get("cpu", ranks=ranks)
    runner = Runner.load(Checkpoint.open(small()), backend, shape=StepShape(**sizes), **options)
    runner.config = evolve(runner.config, attention=MlaConfig.deepseek_v3())
    assert Engine(runner=runner).chunk == chunk
    assert Engine(runner=runner, chunk=320).chunk == 320


# --- trees and refusals -----------------------------------------------------


def params_of(runner):
    """The parameters of every rank, as they are loaded."""
    made = [Loader(checkpoint=Checkpoint.open(small()), rank=rank, ranks=2, dtype=torch.float32) for rank in range(2)]
    params = [loader.model() for loader in made]
    return {"params": params, "mtp": [loader.mtp(mine) for loader, mine in zip(made, params, strict=True)]}


def test_params_and_caches_are_trees():
    """A map over them gives the same runner: scaled to nothing, say, and back."""
    runner = make_runner(small(), ranks=2, mtp=True)
    before = finish(Engine(runner=runner), [TEXT[:7]], 8)
    for name in ("caches", "mtp_caches"):
        tree = getattr(runner, name)
        leaves = pytree.tree_leaves(tree)
        assert len(leaves) > 1
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        setattr(runner, name, pytree.tree_map(torch.Tensor.clone, tree))
    assert finish(Engine(runner=runner), [TEXT[:7]], 8) == before
    assert any(leaf.any() for leaf in pytree.tree_leaves(runner.caches))
    trees = params_of(runner)
    options = {"config": runner.config, "backend": runner.backend, "shape": runner.shape}
    copied = Runner(**options, **pytree.tree_map(torch.Tensor.clone, trees))
    assert finish(Engine(runner=copied), [TEXT[:7]], 8) == before
    nothing = Runner(**options, params=pytree.tree_map(torch.zeros_like, trees["params"]))
    (logits,), _ = nothing.forward([[Piece(tokens=[1], start=0, table=[0])]], [[0]], filling=False)
    assert not logits.any()


def test_a_reference_backend_computes_in_float64():
    runner = make_runner(small(), ranks=2, backend="reference", mtp=True)
    prepared = [leaves for params in (runner.params, runner.mtp) for leaves in params.leaves.values()]
    floats = pytree.tree_leaves((prepared, runner.caches, runner.mtp_caches))
    assert {leaf.dtype for leaf in floats} == {torch.float64}
    (found,), _ = runner.forward([[Piece(tokens=TEXT, start=0, table=TABLE)]], [range(41)], filling=True)
    close(found.float(), oracle(small())(TEXT)[0])


def test_ranks_that_differ_are_refused_before_anything_is_read():
    shape = StepShape(ranks=2, requests=1, blocks=4, block_size=4, table_width=4, dtype="fp32")
    message = r"^ranks: must be those of the backend, tp=4,dcp=4,dp=1,ep=4: got tp=2,dcp=2,dp=1,ep=2 in the shape$"
    with pytest.raises(InputError, match=message):
        Runner.load(None, backends.get("cpu", ranks=4), shape=shape)  # type: ignore[arg-type]
    runner = make_runner(small(), ranks=2, mtp=True)
    trees = params_of(runner)
    options = {"config": runner.config, "shape": shape, "params": trees["params"]}
    with pytest.raises(InputError, match=message):
        Runner(**options, backend=backends.get("cpu", ranks=4))
    message = r"params: must be a sequence with one entry for each of 2 ranks: got list of 1$"
    with pytest.raises(InputError, match=message):
        Runner(**options | {"params": trees["params"][:1]}, backend=runner.backend)
    with pytest.raises(InputError, match=message):
        Runner(**options, mtp=trees["mtp"][:1], backend=runner.backend)


def test_layouts_that_are_refused():
    with pytest.raises(InputError, match=r"^interleave: must divide block_size, 4: got 3$"):
        make_runner(small(), interleave=3)


def test_prediction_without_a_module_is_refused():
    runner = make_runner(small())
    message = r"^mtp: the runner must have the parameters of a prediction module: got None$"
    with pytest.raises(InputError, match=message):
        MtpDrafter(runner)
    with pytest.raises(InputError, match=message):
        runner.predict([[Piece(tokens=[1], start=0, table=[0])]], [None], [[0]], [[0]], filling=False)


def test_tokens_beyond_the_vocabulary_are_refused():
    runner = make_runner(small())
    with pytest.raises(InputError):
        runner.forward([[Piece(tokens=[64], start=0, table=[0])]], [[0]], filling=False)


def test_a_shape_of_another_width_is_another_program():
    """What a compiled program does not fit is refused by it, not truncated."""
    runner = make_runner(small(), table_width=2)
    runner.shape = evolve(runner.shape, table_width=3)
    with pytest.raises(InputError, match=r"block_table\[0\]: must have 4 blocks"):
        runner.forward([[Piece(tokens=TEXT[:16], start=0, table=[0, 1, 2])]], [[0]], filling=True)
