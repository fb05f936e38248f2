"""CPU rule of `ops.Embedding`."""

from collections.abc import Sequence

from mla_fx.backends.common import embedding
from mla_fx.backends.cpu.kernel import Tensors, engine, function, room
from mla_fx.backends.cpu.together import one_by_one
from mla_fx.backends.device import Run
from mla_fx.effects import Group


def several(
    tokens: Tensors, table: Tensors, *, runs: Sequence[Run], vocabulary: int, group: Group
) -> Sequence[Tensors]:
    """Copy the rows that a rank holds, those of the vocabulary alone."""
    if engine() is None or not (tokens[0].is_contiguous() and table[0].is_contiguous()):
        return one_by_one(embedding.rule, tokens, table, runs=runs, vocabulary=vocabulary, group=group)
    rows, features = table[0].shape
    firsts = [run.rank * rows for run in runs]
    held = [min(rows, vocabulary - first) for first in firsts]
    outs = room(table, len(tokens[0]), features)
    sizes = len(tokens[0]), features * outs[0].element_size()
    function("mla_fx_embedding", "ii")((tokens, table, firsts, held, outs), *sizes)
    return (outs,)
