"""What a step returns, built from the leaves of its outputs: the tree of each rank, in lists over the ranks."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils import _pytree as pytree

from mla_fx.effects import Program


def packer(program: Program, ranks: int) -> Callable[[Sequence[Any]], Any]:
    """Flat outputs to what the step returns, every top-level entry a list over the ranks."""
    spec, count = program.tree, len(program.outputs)

    def of_rank(flat: Sequence[Any], rank: int) -> Iterator[Any]:
        return iter(flat[rank::ranks] if ranks > 1 else flat)

    if spec is None:
        return lambda flat: tuple([list(flat[k * ranks : (k + 1) * ranks]) for k in range(count)])
    if spec.type is not tuple:
        build = _builder(spec)
        return lambda flat: [build(of_rank(flat, rank)) for rank in range(ranks)]
    builders = [_builder(child) for child in spec.children()]

    def pack(flat: Sequence[Any]) -> Any:
        leaves = [of_rank(flat, rank) for rank in range(ranks)]
        return tuple([[build(mine) for mine in leaves] for build in builders])

    return pack


def _builder(spec: Any) -> Callable[[Iterator[Any]], Any]:
    """What builds a tree from its leaves, in order."""
    if spec.is_leaf():
        return next
    below = [_builder(child) for child in spec.children()]
    if pytree.is_namedtuple_class(spec.context) and all(child.is_leaf() for child in spec.children()):
        flat, many = spec.context._make, len(below)
        return lambda leaves: flat(islice(leaves, many))
    if spec.type is list:
        return lambda leaves: [build(leaves) for build in below]
    if spec.type is tuple:
        return lambda leaves: tuple([build(leaves) for build in below])
    if pytree.is_namedtuple_class(spec.context):
        make = spec.context._make
        return lambda leaves: make([build(leaves) for build in below])
    unflatten, context = pytree.SUPPORTED_NODES[spec.type].unflatten_fn, spec.context
    return lambda leaves: unflatten([build(leaves) for build in below], context)
