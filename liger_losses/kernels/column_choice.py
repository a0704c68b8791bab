"""Which columns of a tile are active, from what they weigh, and how its tail is spread over the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .column_extent import ColumnExtent
from .dispatch import use_triton


@dataclass(frozen=True)
class ColumnChoice:
    """The active columns, of which only the device knows how many there are."""

    active: Tensor  # [V] bool
    ids: Tensor  # [V] int32: theirs, ascending; then junk
    count: Tensor  # [] int32
    profile: Tensor  # [V] total_v / sum of the totals of columns that are not active, and 0 where v is active


def choose_columns(
    extent: ColumnExtent,  # used up
    target: Tensor | None,  # [n] columns that are active in any case; what is outside of [0, V) is no column
    *,
    eps: float | None,
    share: float,
) -> ColumnChoice:
    """Columns with an entry above `eps`, or, where that is None, all but the lightest.

    Those together have a Frobenius norm of at most `share` times that of the tile, and none of them an entry above
    `4 share` times a row's norm (in quadratic mean). A column with NaN is active, and so are all that are not 0 where
    the norm is no number: it is to be seen.
    """
    if use_triton(extent.total):
        from .column_choice_triton import choose_columns_triton

        return choose_columns_triton(extent, target, eps, share)
    vocab = len(extent.total)
    active = active_columns(eps, share, extent.largest, extent.squares, len(extent.row_sums))
    if target is not None:
        inside = (target >= 0) & (target < vocab)
        chosen = torch.zeros(vocab + 1, dtype=torch.bool, device=active.device)
        active = active | chosen.index_fill_(0, torch.where(inside, target, vocab), True)[:vocab]
    tail = extent.total.masked_fill(active, 0)
    everything = tail.sum()
    return ColumnChoice(
        active,
        torch.nonzero_static(active, size=vocab).squeeze(-1).to(torch.int32),
        active.sum(dtype=torch.int32),
        tail / torch.where(everything > 0, everything, 1),
    )


def cuts_of(vocab: int) -> int:
    """Two cuts an octave, from what all columns together may not exceed to where a single column cannot, by their
    squares: `2^(-i / 2)` of it."""
    return 2 * max(1, vocab - 1).bit_length() + 1


def active_columns(eps: float | None, share: float, largest: Tensor, squares: Tensor, rows: int) -> Tensor:
    """`[V]` bool, without the targets."""
    if eps is not None:
        return (largest > eps) | squares.isnan()
    everything = squares.sum()
    allowed = share**2 * everything
    steps = torch.arange(cuts_of(len(squares)), device=squares.device, dtype=squares.dtype)
    cuts = allowed * torch.exp2(-steps / 2)
    below = torch.where(squares <= cuts.unsqueeze(-1), squares, 0).sum(-1)
    cut = torch.where((below <= allowed) & everything.isfinite(), cuts, 0).amax()
    return ~(squares <= cut) | (largest > 4 * share * (everything / max(rows, 1)).sqrt())
