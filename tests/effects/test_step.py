"""A step is a value: it prints, compares and pickles as one, and what is none is refused."""

import pickle
from collections import namedtuple
from typing import ClassVar, NamedTuple

import attrs
import pytest
from attrs import evolve, frozen
from hypothesis import given
from torch.utils import _pytree as pytree

from mla_fx import MlaConfig, StepShape, attention_step
from mla_fx.effects import (
    Aval,
    Equation,
    Group,
    Input,
    InputError,
    ShapeError,
    Step,
    StepError,
    bind,
    on_host,
    ops,
    parameters,
    schedule,
    scope,
    staged,
    trace,
)
from tests.effects import toys
from tests.effects.test_schedule import quick, settings
from tests.effects.toys import Fork, One, Toy, Two, Update, X, put, step_of


class Weights(NamedTuple):
    up: object
    down: object


def layer(weights, cache, x, batch):
    with scope("layers.0"):
        with scope("attention"):
            (seen,) = bind(One(1), x)
            (cache,) = bind(Update(3), cache, seen)
        (out,) = bind(Two(5), cache, weights.up)
    (out,) = bind(Lengths(7), bind(Two(9), out, weights.down)[0], batch["lengths"])
    return bind(Two(11), out, batch["slots"])[0], {"cache": cache}


@frozen
class Lengths(Toy):
    operands: ClassVar = {"a": "T", "lengths": "B host"}


def layer_step() -> Step:
    batch = {"slots": staged(X), "lengths": on_host(Aval((3,), "int64"))}
    return trace(layer, weights=parameters(Weights(X, X)), cache=X, x=X, batch=batch)


LISTING = """\
{ layer
    weights.up: fp64[2] parameter
    weights.down: fp64[2] parameter
    cache: fp64[2] state
    x: fp64[2]
    batch['slots']: fp64[2] staged
    batch['lengths']: int64[3] host
  let
    # layers.0.attention
    out: fp64[2] = one x
    state: fp64[2] = update cache out
    # layers.0
    out_1: fp64[2] = two state weights.up
    #
    out_2: fp64[2] = two out_1 weights.down
    out_3: fp64[2] = lengths out_2 batch['lengths']
    out_4: fp64[2] = two out_3 batch['slots']
  in out_4 state }"""


def test_it_prints_like_a_jaxpr():
    assert str(layer_step()) == LISTING
    assert str(Step("nothing", (), (), ())) == "{ nothing\n  let\n  in  }"


def test_inputs_say_where_they_live_and_what_they_are():
    found = {one.name: (one.role, one.place) for one in layer_step().inputs}
    assert found == {
        "weights.up": ("parameter", "device"),
        "weights.down": ("parameter", "device"),
        "cache": ("state", "device"),
        "x": ("data", "device"),
        "batch['slots']": ("data", "staged"),
        "batch['lengths']": ("data", "host"),
    }
    with pytest.raises(InputError, match="place: must be one of device, staged, host: got 'moon'"):
        Input("x", X, place="moon")
    with pytest.raises(InputError, match="role: must be one of parameter, state, data: got 'weight'"):
        Input("x", X, role="weight")


def test_equal_traces_are_equal():
    one, other = layer_step(), layer_step()
    assert one is not other and one == other
    assert hash(one.equations) == hash(other.equations)
    assert schedule(one, toys.placed({3: "side"})) == schedule(other, toys.placed({3: "side"}))
    config, shape = MlaConfig.deepseek_v3(), StepShape(ranks=8, tokens=4, requests=4)
    assert attention_step(config, shape) == attention_step(config, shape)
    assert attention_step(config, shape) != attention_step(config, evolve(shape, ranks=4))


def test_it_pickles():
    step = layer_step()
    again = pickle.loads(pickle.dumps(step))
    assert again == step and str(again) == str(step)
    attention = attention_step(MlaConfig.deepseek_v3(), StepShape(ranks=8))
    assert pickle.loads(pickle.dumps(attention)) == attention


@settings(quick, max_examples=60)
@given(toys.steps())
def test_random_steps_are_values(step):
    assert pickle.loads(pickle.dumps(step)) == step

    def with_(k: int, equation: Equation) -> Step:
        return evolve(step, equations=(*step.equations[:k], equation, *step.equations[k + 1 :]))

    for k, equation in enumerate(step.equations):
        op = equation.op
        again = type(op)(**{one.name: getattr(op, one.name) for one in attrs.fields(type(op))})
        assert with_(k, Equation(again, equation.operands, equation.results, equation.tag)) == step
        assert with_(k, evolve(equation, op=evolve(op, salt=1000))) != step
        assert with_(k, evolve(equation, tag="t")) != step


Spelt = namedtuple("Spelt", ["b", "c"])


def test_two_inputs_are_two_whatever_they_are_called():
    """Keys and attributes that spell alike, keys of other types, an argument called as a path: each is itself."""

    def compute(a, **others):
        return [bind(One(2 * k + 1), value)[0] for k, value in enumerate(pytree.tree_leaves((a, others)))]

    trees = [
        dict(a={"b": X, "c": X}, a_b=X),
        dict(a={1: X, "1": X}),
        dict(a={"['b']": X, "b": {"b": X}}),
        dict(a=Spelt(X, {"d": X}), **{"a.c": X, "a.b": X}),
        dict(a={"b": {"c": X}, "b']['c": X}),
        dict(a=(X, [X, {0: X}]), **{"a[0]": X}),
    ]
    for arguments in trees:
        step = trace(compute, **arguments)
        leaves = len(pytree.tree_leaves(arguments))
        names = [one.name for one in step.inputs]
        assert len({*names}) == len(names) == leaves, names
        assert len({one.path for one in step.inputs}) == leaves
        assert [e.operands[0] for e in step.equations] == names


def test_names_are_what_was_asked_for_and_unique():
    def compute(x, out):
        (one,) = bind(One(1), x)  # "out" is taken by the argument
        (two,) = bind(One(3), x, names=("kv",))
        (three,) = bind(One(5), two, names=("kv",))
        (four,) = bind(One(7), three, names=("out_1",))
        return one, four, bind(Two(9), out, four)[0]

    step = step_of(compute)
    assert [name for e in step.equations for name in e.results] == ["out_1", "kv", "kv_1", "out_1_1", "out_2"]
    with pytest.raises(StepError, match="one: names: must be 1, one for each result: got 2"):
        step_of(lambda x: bind(One(1), x, names=("a", "b")))


def test_what_no_output_needs_is_left_out():
    def compute(x, y):
        (used,) = bind(One(1), x)
        bind(Two(3), bind(One(5), y)[0], used)
        return bind(Fork(7), used)[0]  # its second result is not needed, but comes with the first

    step = step_of(compute)
    assert [e.op.salt for e in step.equations] == [1, 7]
    assert [one.name for one in step.inputs] == ["x", "y"]  # the caller still brings both


def test_scopes_nest_and_end():
    def compute(x):
        with scope("layers"), scope("3"):
            (a,) = bind(One(1), x)
            with pytest.raises(ZeroDivisionError), scope("broken"):
                raise ZeroDivisionError
            (b,) = bind(One(3), a)
        return bind(One(5), b)

    assert [e.tag for e in step_of(compute).equations] == ["layers.3", "layers.3", ""]
    equation = Equation(One(1), ("x",), ("y",), "layers.3.attention")
    assert all(equation.within(name) for name in ("layers", "layers.3", "3.attention", "attention"))
    assert not any(equation.within(name) for name in ("layer", "3.a", "layers.attention"))
    for wrong in ("", "a b", ".a", 3):
        with pytest.raises(InputError, match="scope: must be words joined by dots: got"), scope(wrong):
            pass


def test_a_step_in_a_step_keeps_its_own_scopes():
    """What is traced while a scope is open, as the parts of an op are, is not in that scope."""

    def outer(x):
        with scope("outer"):
            inner = step_of(lambda x: bind(One(1), x))
            assert inner.equations[0].tag == ""
            return bind(One(3), x)

    assert step_of(outer).equations[0].tag == "outer"


def test_a_parameter_is_not_written():
    with pytest.raises(StepError, match="w: a parameter must not be written: it is prepared once for many steps"):
        trace(lambda w, x: bind(Update(1), w, x), w=parameters(X), x=X)

    def later(w, x):  # nor a version of it
        return bind(Update(3), bind(Update(1), w, x)[0], x)

    with pytest.raises(StepError, match="w: a parameter must not be written"):
        trace(later, w=parameters(X), x=X)


def test_what_is_staged_is_not_written():
    """It is the step's own copy, sent anew by every step: its next version would be nobody's."""
    with pytest.raises(StepError, match="s: what is staged must not be written"):
        trace(lambda s, x: bind(Update(1), s, x), s=staged(X), x=X)


def test_values_of_two_traces_are_kept_apart():
    kept = []
    step_of(lambda x: kept.append(x) or bind(One(1), x))
    with pytest.raises(StepError, match="two: every operand must come from one trace: got values of several"):
        step_of(lambda x: bind(Two(1), x, kept[0]))
    with pytest.raises(StepError, match="outputs: each must be a value of this trace: got x: fp64"):
        step_of(lambda x: kept[0])
    with pytest.raises(StepError, match="outputs: each must be a value of this trace: got 7"):
        step_of(lambda x: 7)
    with pytest.raises(TypeError, match="one: every operand must be a Value: got Aval"):
        bind(One(1), X)


def test_operands_are_where_the_op_wants_them():
    host = Aval((3,), "int64")
    trace(lambda x, n: bind(Lengths(1), x, n), x=X, n=on_host(host))
    for wrong in (host, staged(host)):
        with pytest.raises(ShapeError, match="lengths: lengths must be on the host: got n, which is not"):
            trace(lambda x, n: bind(Lengths(1), x, n), x=X, n=wrong)
    with pytest.raises(ShapeError, match="one: a must be on the device: got x, which is not"):
        trace(lambda x: bind(One(1), x), x=on_host(X))
    (made,) = trace(lambda x: bind(One(1), bind(One(3), x)[0]), x=staged(X)).outputs
    assert made == "out_1"


def test_shapes_are_refused_when_they_are_bound():
    with pytest.raises(ShapeError, match=r"two: axis T \(.*\) must be the same everywhere: 2 in a, 3 in b"):
        trace(lambda x, y: bind(Two(1), x, y), x=X, y=Aval((3,), "fp64"))
    with pytest.raises(ShapeError, match="two: b must have the dtype of a, fp64: got fp32"):
        trace(lambda x, y: bind(Two(1), x, y), x=X, y=Aval((2,), "fp32"))
    with pytest.raises(ShapeError, match=r"two takes 2 operands \(a, b\): got 1"):
        trace(lambda x: bind(Two(1), x), x=X)
    with pytest.raises(StepError, match="x: each leaf must be an Aval, as it is or marked: got 3"):
        trace(lambda x: bind(One(1), x), x=3)


@pytest.mark.parametrize(
    ("inputs", "equations", "outputs", "message"),
    [
        (("x", "x"), (), (), "inputs: each name must be there once: got x twice"),
        (("x",), ((("y",), ("a",)),), (), "'a = one y': each operand must be an input or an earlier result: got y"),
        (("x",), ((("a",), ("a",)),), (), "'a = one a': each operand must be an input or an earlier result: got a"),
        (("x",), ((("x",), ("x",)),), (), "'x = one x': each result must have a name of its own: got x again"),
        (("x",), ((("x",), ("a", "b")),), (), "'a, b = one x': must name 1 results: got 2"),
        (("x",), ((("x", "x"), ("a",)),), (), "'a = one x x': must name 1 operands: got 2"),
        (("x",), (), ("a",), "outputs: each must be an input or a result: got a"),
    ],
)
def test_a_step_that_is_none(inputs, equations, outputs, message):
    with pytest.raises(StepError, match=message):
        Step("toy", tuple(map(put, inputs)), tuple(Equation(One(1), *e) for e in equations), outputs)


def test_groups_are_values():
    assert str(Group("dcp", 8)) == "dcp[8]"
    assert [Group("tp", 3).part(7, r) for r in range(3)] == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert [Group("tp", 4).part(2, r) for r in range(4)] == [slice(0, 1), slice(1, 2), slice(2, 2), slice(2, 2)]
    with pytest.raises(InputError, match="size: must be an integer of at least 1: got 0"):
        Group("dcp", 0)
    with pytest.raises(InputError, match="name: must be a word of letters, digits and underscores: got 'd c p'"):
        Group("d c p", 1)
    assert ops.AllReduce(Group("tp", 2)) == ops.AllReduce(Group("tp", 2)) != ops.AllReduce(Group("dcp", 2))
