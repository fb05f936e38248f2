"""What is around a call: modes and transforms of torch, pickles and copies, errors inside rules, parameters."""

import copy
import pickle

import pytest
import torch
from attrs import evolve
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from mla_fx import backends, orchestrations
from mla_fx.backends import ContractError, RunError
from mla_fx.effects import Aval, InputError, LawError, Wait, bind, check, ops, schedule, trace
from mla_fx.models import Engine
from tests.models.served import make_runner, small
from tests.setups import ANYWHERE, Setup

SETUP = Setup()
PROGRAM = schedule(SETUP.step, orchestrations.attention_aside)
CPU = backends.get("cpu", ranks=2)


@pytest.fixture(scope="module")
def run():
    return SETUP.compiled(CPU, PROGRAM)


def plain(run):
    return run(*SETUP.arguments())[0][0]


# --- modes and transforms -----------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_numbers_as_they_are(run, dtype):
    wanted = plain(run)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(plain(run), wanted)
        assert torch.is_autocast_enabled("cpu")  # behind the call it is as it was


def test_caches_of_inference_mode(run):
    """Made in it and used outside, and made outside and used in it."""
    wanted = plain(run)
    with torch.inference_mode():
        caches, hidden, batches = SETUP.arguments()
        assert torch.equal(plain(run), wanted)
    out, after = run(caches, hidden, batches)
    assert torch.equal(out[0], wanted) and after[0].latent is caches[0].latent
    assert torch.equal(plain(run), wanted)  # plain ones again


TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "make_fx": lambda f, x: make_fx(f)(x),
    "make_fx of fakes": lambda f, x: make_fx(f, tracing_mode="fake")(x),
    "torch.jit.trace": lambda f, x: torch.jit.trace(f, (x,), check_trace=False),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_transforms_are_refused(run, transform):
    caches, hidden, batches = SETUP.arguments()
    with pytest.raises(InputError, match=r"^an executable must "):
        TRANSFORMS[transform](lambda x: run(caches, [x, x], batches)[0][0], hidden[0])
    for mine, before in zip(caches, SETUP.caches(), strict=True):
        assert torch.equal(mine.latent, before.latent)


def test_fake_tensors_are_refused(run):
    caches, hidden, batches = SETUP.arguments()
    with FakeTensorMode() as mode:
        with pytest.raises(InputError, match=r"must run on real tensors: got a call under FakeTensorMode"):
            run(caches, hidden, batches)
        fake = mode.from_tensor(hidden[0])
    with pytest.raises(InputError, match=r"hidden of rank 0: must be a plain tensor, .*: got FakeTensor"):
        run(caches, [fake, fake], batches)


def test_compiled_code_around_a_call(run):
    """The graph breaks around it, and the result is right."""
    caches, hidden, batches = SETUP.arguments()

    def twice(x):
        return 2 * run(caches, [x + 0, x + 0], batches)[0][0] + 1

    found = torch.compile(twice, backend="eager")(hidden[0])
    torch.testing.assert_close(found, 2 * plain(run) + 1)


# --- pickles and copies ---------------------------------------------------------


def test_what_belongs_to_a_process_says_so(run):
    engine = Engine(runner=make_runner(small()))
    for thing, why in (
        (CPU, "a backend has a device"),
        (run, "an executable has memory and streams"),
        (CPU.device, "a device belongs to its process"),
        (engine, "an engine has caches and executables"),
    ):
        for send in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=why):
                send(thing)


def test_values_can_be_sent():
    broken = PROGRAM.without(next(k for k, effect in enumerate(PROGRAM.effects) if isinstance(effect, Wait)))
    with pytest.raises(LawError) as caught:
        check(broken)
    failed = RunError(PROGRAM.launches[3], 1, ValueError("no"))
    for value in (PROGRAM, SETUP.step, orchestrations.attention_aside):
        assert pickle.loads(pickle.dumps(value)) == value == copy.deepcopy(value)
    for error in (caught.value, failed):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)
    assert pickle.loads(pickle.dumps(caught.value)).violations == caught.value.violations


# --- rules that fail ------------------------------------------------------------


def with_rule(op, rule, seed=None):
    backend = backends.get("cpu", ranks=2, adversary=seed).with_rules({op: rule})
    return SETUP.compiled(backend, PROGRAM)


def test_an_error_inside_a_rule_says_where():
    def broken(q_latent, q_rope, latent, k_rope, query_lengths, *, run, **how):
        if run.rank == 1:
            raise ZeroDivisionError("no")
        return backends.cpu.TABLE.rules[ops.CurrentAttention](
            q_latent, q_rope, latent, k_rope, query_lengths, run=run, **how
        )

    run = with_rule(ops.CurrentAttention, broken)
    where = r"^attention: 'cur, cur_lse = current_attention .*' on stream side, rank 1: ZeroDivisionError: no$"
    with pytest.raises(RunError, match=where) as caught:
        run(*SETUP.arguments())
    error = caught.value
    assert (error.rank, error.launch.tag, error.launch.stream) == (1, "attention", "side")
    assert isinstance(error.__cause__, ZeroDivisionError)


WRONG = {
    "a view of an operand": (lambda x, y, *, run: (x,), r"must have memory of its own: got a view of an operand"),
    "too few results": (lambda x, y, *, run: (), r"a rule must give its 1 results as a tuple: got 0"),
    "no tuple": (lambda x, y, *, run: x + y, r"a rule must give its 1 results as a tuple: got Tensor"),
    "a wrong dtype": (lambda x, y, *, run: ((x + y).double(),), r"out: must be fp32\[3, 24\]: got torch.float64"),
    "a wrong shape": (lambda x, y, *, run: ((x + y)[:2],), r"out: must be fp32\[3, 24\]: got torch.float32\[2, 24\]"),
    "strides": (lambda x, y, *, run: ((x + y).T.contiguous().T,), r"out: must be contiguous: got strides"),
}


@pytest.mark.parametrize("seed", [None, 3], ids=["plain", "hostile"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_rule_that_breaks_its_contract(kind, seed):
    rule, message = WRONG[kind]
    x = Aval((3, 24), "fp32")
    program = schedule(trace(lambda x, y: bind(ops.Add(), x, y)[0], x=x, y=x), orchestrations.serial)
    run = backends.get("cpu", adversary=seed).with_rules({ops.Add: rule}).compile(program)
    with pytest.raises(RunError, match=message) as caught:
        run([torch.ones(3, 24)], [torch.ones(3, 24)])
    assert isinstance(caught.value.error, ContractError)


# --- parameters -----------------------------------------------------------------


def test_parameters_without_data_are_refused():
    params = SETUP.params()
    params[1] = params[1]._replace(o_proj=params[1].o_proj.to("meta"))
    for name in ("cpu", "reference"):
        with pytest.raises(
            InputError, match=r"params.o_proj of rank 1: must have data: got a tensor on the meta device"
        ):
            backends.get(name, ranks=2).prepare(PROGRAM, params)


def test_missing_and_foreign_parameters_are_refused():
    for seed in (None, 2):
        backend = backends.get("cpu", ranks=2, adversary=seed)
        with pytest.raises(InputError, match=r"^parameters: the program has some.*: got none$"):
            backend.compile(PROGRAM)
        other = Setup(config=evolve(SETUP.config, v_head_dim=8))
        foreign = backend.prepare(other.step, other.params())
        with pytest.raises(
            InputError, match=r"^params.w_uv: the parameter prepared must be fp32\[4, 16, 6\]: got fp32"
        ):
            backend.compile(PROGRAM, foreign)
        with pytest.raises(
            InputError, match=r"^params.embed_tokens: the parameter prepared must be .*: got none of this"
        ):
            stack = Setup(layers=1)
            backend.compile(schedule(stack.step, orchestrations.serial), foreign)


def test_prepared_once_for_many_programs(monkeypatch):
    """Programs of three orchestrations share the tensors that were given, and a form is made once."""
    setup = Setup(layers=2, dtype="bf16")
    params, made = setup.params(), []
    table = backends.cpu.TABLE
    ((name, form),) = table.forms[ops.GateLogits].items()

    def counted(tensor):
        made.append(form(tensor))
        return made[-1]

    counting = evolve(CPU, table=evolve(table, forms={ops.GateLogits: {name: counted}}))
    prepared = counting.prepare(setup.step, params)
    given = {leaf.data_ptr() for leaf in pytree.tree_leaves(params)}
    held = [leaf for leaves in prepared.leaves.values() for leaf in leaves]
    assert {leaf.data_ptr() for leaf in held} - given == {leaf.data_ptr() for leaf in made}  # nothing else is copied
    (gate,) = prepared.kept  # all want it in one form: so it is there in that form alone
    assert prepared.leaves[gate] == (*made, *made) and not prepared._forms  # the ranks share it
    for orchestration in map(orchestrations.NAMED.get, ANYWHERE):
        run = counting.compile(schedule(setup.step, orchestration), prepared)
        run(*setup.arguments())
        run(*setup.arguments())
        tail = [x for body in run.body.bodies.values() for x in body.tail]
        mine = {x.data_ptr() for x in tail if isinstance(x, torch.Tensor)}
        assert mine <= {leaf.data_ptr() for leaf in held}
    assert len(made) == 1  # the gate of the layer that has experts
