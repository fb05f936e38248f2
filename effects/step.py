"""A step: what is to be computed, before anything is scheduled.

Inputs and outputs are pytrees of values (tuples, lists, dicts, NamedTuples).
Inputs are named by the argument and the path inside it.
"""

from collections.abc import Mapping
from typing import Any

import torch.utils._pytree as pytree
from attrs import frozen

from mla_fx.effects.op import Value


@frozen(eq=False)
class Step:
    """A described computation: named argument trees in, one tree out."""

    name: str
    arguments: Mapping[str, Any]
    outputs: Any

    def inputs(self) -> dict[str, Value]:
        """Every input value by its path, as in `cache.latent`, in argument order."""
        found: dict[str, Value] = {}
        for argument, tree in self.arguments.items():
            for path, value in pytree.tree_flatten_with_path(tree)[0]:
                found[argument + pytree.keystr(path)] = value
        return found

    def results(self) -> tuple[list[Value], Any]:
        """The output values, flat, and the spec that packs them again."""
        return pytree.tree_flatten(self.outputs)


def arguments(**trees: Any) -> dict[str, Any]:
    """Trees of avals to trees of input values, each named by its path; a shorthand for building steps.

    >>> from mla_fx.effects.aval import Aval
    >>> arguments(hidden=Aval((4, 64), "fp32"))
    {'hidden': hidden: fp32[4, 64]}
    """
    named = {}
    for argument, tree in trees.items():
        leaves, spec = pytree.tree_flatten_with_path(tree)
        values = [Value(aval, argument + pytree.keystr(path)) for path, aval in leaves]
        named[argument] = pytree.tree_unflatten(values, spec)
    return named
