"""Rows of many experts, whose counts stay on the device.

A host that knows the counts calls one product for every expert; to know them
it has to wait.  So the rows are cut into tiles of ROWS rows, each of one
expert.  How many tiles there are at most the host does know: Z // ROWS full
ones, and one that is not full for each expert that has rows.  Which expert a
tile has, and which rows, is computed on the device; the product of a tile
reads the weight that it is told by index.

Gathered weights are copies, so tiles go by in chunks whose weights take no
more than BYTES.  A masked product for every expert would read each weight once
but multiply all rows by all of them; a weight gathered for each row would copy
as many weights as there are rows.
"""

from collections.abc import Callable

import torch

#: Rows of a tile.
ROWS = 16
#: What the gathered weights of a chunk may take, unless one alone takes more.
BYTES = 1 << 28
#: Major compute capabilities for which torch has a grouped product that does not read the counts on the host.
GROUPED = (9, 10)


def grouped_product_takes(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch's grouped product runs these on the device alone: bf16, aligned, and a GPU that has the kernel."""
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and weight.is_contiguous()
        and weight.shape[0] < 1024
        and weight.shape[1] % 8 == weight.shape[2] % 8 == 0
        and min(weight.shape[1:]) > 0
        and torch.cuda.get_device_capability(rows.device)[0] in GROUPED
    )


def cut(counts: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tiles of `total` rows that lie expert after expert, of which `counts` [Y] are somebody's.

    Returns the expert of every tile [n], the rows it takes [n, ROWS], and the place of every row among the
    tiles' rows [total].  A tile that is not full takes rows that are not its own, which nobody has a place for.
    """
    own, device = counts.shape[0], counts.device
    tiles = torch.floor_divide(counts + (ROWS - 1), ROWS)
    rows_end, tiles_end = counts.cumsum(0), tiles.cumsum(0)
    rows_start, tiles_start = rows_end - counts, tiles_end - tiles

    tile = torch.arange(total // ROWS + min(own, total), device=device)
    expert = torch.searchsorted(tiles_end, tile, right=True).clamp_max(own - 1)
    first = rows_start.index_select(0, expert) + (tile - tiles_start.index_select(0, expert)) * ROWS
    takes = (first.unsqueeze(1) + torch.arange(ROWS, device=device)).clamp_max(total - 1)

    row = torch.arange(total, device=device)
    of_row = torch.searchsorted(rows_end, row, right=True).clamp_max(own - 1)
    place = tiles_start.index_select(0, of_row) * ROWS + row - rows_start.index_select(0, of_row)
    return expert, takes, place.clamp_max(takes.numel() - 1)  # rows behind the last count: any place


def by_tiles(
    rows: torch.Tensor,
    counts: torch.Tensor,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    features: int,
    bytes_: int,
) -> torch.Tensor:
    """Every row times the weight of its expert: [Z, D] -> [Z, `features`], Z > 0.

    `product` takes rows of tiles [n, ROWS, D] and their experts [n], and returns [n, ROWS, features];
    it gathers `bytes_` for every tile.
    """
    expert, takes, place = cut(counts, rows.shape[0])
    out = rows.new_empty((*takes.shape, features))
    step = max(1, BYTES // max(1, bytes_))
    for at in range(0, len(expert), step):
        some = takes[at : at + step]
        given = rows.index_select(0, some.flatten()).view(*some.shape, rows.shape[1])
        out[at : at + step] = product(given, expert[at : at + step])
    return out.flatten(0, 1).index_select(0, place)
