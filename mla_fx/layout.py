"""How the ranks of a model are laid out: who shares heads, who shares the sequence, who shares experts.

    rank r = replica * tp + tensor rank

Ranks 0..tp-1 are the first replica, the next tp the second, and so on; each has requests of its own.  Within one,
heads, columns and rows of the vocabulary are shared out over all tp ranks ("tp"), and the sequence over the dcp
ranks of a context group ("dcp"): consecutive ranks of a replica, so tp is a multiple of dcp, and the cache of a
replica is held tp / dcp times.  Experts are shared out over all ranks of all replicas ("ep").

So every group is of consecutive ranks, and a rank's number in it is r mod its size.  Source: the layouts of vLLM and
SGLang, where decode context parallelism takes its ranks from tensor parallelism, and experts go over all of both.
"""

from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from mla_fx.effects import Group, InputError
from mla_fx.effects.validate import integer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Dimensions that a `DeviceMesh` may have, the slowest first.
_DIMENSIONS: Final = ("dp", "tp", "dcp")


@frozen(kw_only=True)
class Layout:
    """`tp` ranks to a replica, `dcp` of them to a context group, `dp` replicas, experts over all `ep` = tp * dp ranks.

    Raises `InputError` for sizes that do not fit together.

    >>> layout = Layout(tp=4, dcp=2, dp=2)
    >>> layout.size, str(layout)
    (8, 'tp=4,dcp=2,dp=2,ep=8')
    >>> [layout.members(name, 5) for name in ("tp", "dcp")], layout.index("tp", 5), layout.replica(5)
    ([(4, 5, 6, 7), (4, 5)], 1, 1)
    """

    tp: int = field(default=1, validator=integer(1))
    dcp: int = field(validator=integer(1))
    dp: int = field(default=1, validator=integer(1))
    ep: int = field(validator=integer(1))

    @dcp.default
    def _all_of_tp(self) -> int:
        return self.tp

    @ep.default
    def _all_ranks(self) -> int:
        return self.tp * self.dp

    def __attrs_post_init__(self) -> None:
        if self.tp % self.dcp:
            raise InputError(f"dcp: must divide tp, {self.tp}: got {self.dcp}")
        if self.ep != self.size:
            raise InputError(f"ep: must be tp * dp = {self.tp} * {self.dp} = {self.size}: got {self.ep}")

    @property
    def size(self) -> int:
        """All ranks."""
        return self.tp * self.dp

    def group(self, name: str) -> Group:
        """The group "tp", "dcp" or "ep"; raises `InputError` for another."""
        sizes = {"tp": self.tp, "dcp": self.dcp, "ep": self.ep}
        if name not in sizes:
            raise InputError(f"group: must be one of {', '.join(sizes)}: got {name!r}")
        return Group(name, sizes[name])

    def members(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group of this name that `rank` is in, in order."""
        size = self.group(name).size
        first = rank // size * size
        return tuple(range(first, first + size))

    def index(self, name: str, rank: int) -> int:
        """The number of `rank` in its group of this name."""
        return rank % self.group(name).size

    def replica(self, rank: int) -> int:
        """Which replica `rank` belongs to."""
        return rank // self.tp

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """A layout as `str` writes it, or with what has a default left out; raises `InputError`.

        >>> Layout.parse("tp=8,dcp=2") == Layout(tp=8, dcp=2)
        True
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.strip().partition("=")
            if name not in ("tp", "dcp", "dp", "ep") or name in sizes or not size.isdecimal():
                raise InputError(f"layout: must be like tp=16,dcp=8,dp=2,ep=32, each once: got {text!r}")
            sizes[name] = int(size)
        return cls(**sizes)

    @classmethod
    def from_mesh(cls, mesh: "DeviceMesh") -> "Layout":
        """The layout of all ranks of a mesh with dimensions "dp", "tp" and "dcp", in this order; any may be missing.

        A mesh has each rank once, so where it has "dcp" a tensor group is the ranks along "tp" and "dcp" together:
        (dp=2, tp=2, dcp=4) is Layout(tp=8, dcp=4, dp=2).  Raises `InputError` for other dimensions, or ranks in
        another order.
        """
        names = mesh.mesh_dim_names or ()
        if not names or list(names) != [name for name in _DIMENSIONS if name in names]:
            raise InputError(f"mesh: must have dimensions of {_DIMENSIONS}, in this order: got {names or None}")
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(len(ranks))):
            raise InputError(f"mesh: must have the ranks 0, 1, 2, ... in order: got {ranks}")
        sizes = dict(zip(names, mesh.mesh.shape, strict=True))
        tp, dcp = sizes.get("tp", 1), sizes.get("dcp")
        return cls(tp=tp * (dcp or 1), dcp=dcp or tp, dp=sizes.get("dp", 1))

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in ("tp", "dcp", "dp", "ep"))


def layout_of(ranks: int | Layout) -> Layout:
    """A layout as it is; of a number, so many ranks that share everything out.  Raises `InputError`."""
    if isinstance(ranks, Layout):
        return ranks
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise InputError(f"ranks: must be an integer of at least 1, or a Layout: got {ranks!r}")
    return Layout(tp=ranks)
