"""Parameters, prepared once: checked, placed on the device, and brought into the form that the backend's rules want."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import field, frozen

from mla_fx.backends.inputs import Leaves, refuse
from mla_fx.backends.table import Form, Formed, tensors
from mla_fx.backends.world import bits_of
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval, Input, InputError
from mla_fx.effects.aval import FLOATS


@frozen(eq=False)
class Prepared:
    """Every rank's parameters on a device, by the name of their input; many programs can be compiled with them.

    A program never writes a parameter.  Who changes one in place afterwards changes it for all programs, but not the
    forms that were made of it.  `kept` names those that are there in one form only, since nothing wanted them as they
    were: their leaves are of that form.
    """

    ranks: range
    device: str
    inputs: Mapping[str, Input] = field(repr=False)
    leaves: Mapping[str, tuple[Any, ...]] = field(repr=False)
    kept: Mapping[str, Form] = field(factory=dict, repr=False)
    _forms: dict[tuple[str, Form], tuple[Formed, ...]] = field(factory=dict, repr=False)

    def accept(self, put: Input) -> None:
        """Raise `InputError` unless the input was prepared."""
        mine = self.inputs.get(put.name)
        if mine is None or mine.aval != put.aval:
            got = "none of this name" if mine is None else str(mine.aval)
            raise InputError(f"{put.name}: the parameter prepared must be {put.aval}: got {got}")

    def of(self, put: Input, form: Form | None = None) -> tuple[Any, ...]:
        """Every rank's leaf of an input, a tensor, or what the form asked for is; each form is made once."""
        self.accept(put)
        kept = self.kept.get(put.name)
        if form is kept:
            return self.leaves[put.name]
        if kept is not None:
            wanted = "as it is" if form is None else f"as {form.__name__}"
            raise InputError(
                f"{put.name}: must be prepared by the backend that compiles, for the step that it compiles, which "
                f"wants it {wanted}: got it kept as {kept.__name__} alone, as its own backend and step want it"
            )
        assert form is not None
        if (put.name, form) not in self._forms:
            self._forms[put.name, form] = _formed(self.leaves[put.name], form)
        return self._forms[put.name, form]

    def held(self, rank: int) -> tuple[int, int]:
        """Bytes that a rank's parameters take, and those of what they became in forms: memory that is shared once."""
        at = self.ranks.index(rank)
        leaves, formed = (
            {_memory(one) for of in each.values() for one in tensors(of[at])} for each in (self.leaves, self._forms)
        )
        return sum(size for _, size in leaves), sum(size for _, size in formed - leaves)


def _memory(leaf: torch.Tensor) -> tuple[int, int]:
    """Where a tensor lies, or which it is where a library has packed it, out of sight; and how many bytes it takes."""
    return leaf.data_ptr() if leaf.layout is torch.strided else id(leaf), leaf.nbytes


def _formed(leaves: Sequence[torch.Tensor], form: Form) -> tuple[Formed, ...]:
    """Every rank's; ranks may share one."""
    with torch.no_grad():
        made = {key: form(leaf) for key, leaf in {id(leaf): leaf for leaf in leaves}.items()}
    return tuple(made[id(leaf)] for leaf in leaves)


def _shared(leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Every rank's leaf, or the first that is equal to it; a comparison ends at the first difference."""
    found: list[torch.Tensor] = []
    for leaf in leaves:
        same = (one for one in found if one is leaf or torch.equal(bits_of(one), bits_of(leaf)))
        found.append(next(same, leaf))
    return tuple(found)


def prepare(
    inputs: Iterable[Input],
    arguments: Sequence[Any],
    *,
    ranks: range,
    device: str,
    dtype: str | None,
    forms: Mapping[str, Form] | None = None,
) -> Prepared:
    """Check and place the leaves of parameters; `dtype` replaces the floating ones.  Raises `InputError`.

    A tensor that is several leaves, or that ranks share, is placed once; on the host ranks share one that is equal on
    them, bit for bit.  Those that `forms` names are kept in that form alone, one after the other, so that no more than
    one is there twice.
    """
    forms = forms or {}
    wanted = tuple(put for put in inputs if put.role == "parameter")
    found = iter(Leaves(wanted, ranks)(arguments))
    kept: dict[str, tuple[Formed, ...]] = {}
    named: dict[str, Input] = {}
    moved: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    for put in wanted:
        leaves = tuple(next(found) for _ in ranks)
        for rank, leaf in zip(ranks, leaves, strict=True):
            _check(put, f"{put.name} of rank {rank}", leaf, any_float=dtype is not None)
        kind = DTYPES[dtype] if dtype and put.aval.dtype in FLOATS else DTYPES[put.aval.dtype]
        placed = moved if put.name not in forms else {}  # what is formed goes, leaf by leaf
        for leaf in leaves:
            if (id(leaf), kind) not in placed:
                placed[id(leaf), kind] = leaf.detach().to(device, kind)
        own = tuple(placed[id(leaf), kind] for leaf in leaves)
        own = _shared(own) if device == "cpu" else own
        kept[put.name] = _formed(own, forms[put.name]) if put.name in forms else own
        aval = put.aval.with_float(dtype) if dtype else put.aval
        named[put.name] = Input(put.name, aval, put.place, put.role, put.path)
    return Prepared(ranks, device, named, kept, {name: form for name, form in forms.items() if name in kept})


def accept(inputs: Iterable[Input], prepared: Prepared | None, *, ranks: range, device: str) -> None:
    """Raise `InputError` unless the parameters of a program are there, of these ranks and on this device."""
    wanted = [put for put in inputs if put.role == "parameter"]
    if prepared is None:
        if wanted:
            names = ", ".join(dict.fromkeys(put.path[0] for put in wanted))
            raise InputError(f"parameters: the program has some ({names}), as backend.prepare makes them: got none")
        return
    if (prepared.ranks, prepared.device) != (ranks, device):
        raise InputError(
            f"parameters: must be prepared for ranks {ranks.start}..{ranks.stop - 1} on {device}: got those of ranks "
            f"{prepared.ranks.start}..{prepared.ranks.stop - 1} on {prepared.device}"
        )
    for put in wanted:
        prepared.accept(put)


def _check(put: Input, where: str, leaf: Any, *, any_float: bool) -> None:
    """A parameter may come from any device that holds data."""
    plain = type(leaf) in (torch.Tensor, torch.nn.Parameter)
    if plain and leaf.device.type == "meta":
        raise InputError(f"{where}: must have data: got a tensor on the meta device, which has none")
    if plain and any_float and leaf.is_floating_point() and put.aval.dtype in FLOATS:
        put = Input(put.name, Aval(put.aval.shape, _name(leaf.dtype)), put.place, put.role, put.path)
    if not plain or leaf.dtype != DTYPES[put.aval.dtype] or tuple(leaf.shape) != put.aval.shape:
        refuse(put, where, leaf, leaf.device.type if plain else "cpu")


def _name(dtype: torch.dtype) -> str:
    return next(name for name, one in DTYPES.items() if one == dtype)
