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
    extent: ColumnExtent,  # used up; of squares where `eps` is None
    target: Tensor | None,  # [n] columns that are active in any case; what is outside of [0, V) is no column
    *,
    eps: float | None,
    share: float,
) -> ColumnChoice:
    """Columns with an entry above `eps`, or, where that is None, all but the lightest.

    Those together have a Frobenius norm of at most `share` times that of the tile, and none of them one above
    `4 share` times a row's norm (in quadratic mean). A column with NaN is active, and so are all that are not 0 where
    the norm is no number: it is to be seen.
    """
    if use_triton(extent.total):
        from .column_choice_triton import choose_columns_triton

        return choose_columns_triton(extent, target, eps, share)
    weight, total, row_sums = extent
    vocab = len(total)
    active = active_columns(eps, share, weight, len(row_sums)) | total.isnan()
    if target is not None:
        inside = (target >= 0) & (target < vocab)
        chosen = torch.zeros(vocab + 1, dtype=torch.bool, device=active.device)
        active = active | chosen.index_fill_(0, torch.where(inside, target, vocab), True)[:vocab]
    tail = total.masked_fill(active, 0)
    everything = tail.sum()
    return ColumnChoice(
        active,
        torch.nonzero_static(active, size=vocab).squeeze(-1).to(torch.int32),
        active.sum(dtype=torch.int32),
        tail / torch.where(everything > 0, everything, 1),
    )


def cuts_of(vocab: int) -> int:
    """Cuts, two an octave: from the first to where all columns together weigh no more than may be left out."""
    return 2 * max(1, vocab - 1).bit_length() + 1


def first_cut(rows: int) -> float:
    """What a column may weigh at most, relative to what all that are left out may: 16 times its share of the rows."""
    return min(1.0, 16 / max(rows, 1))


def active_columns(eps: float | None, share: float, weight: Tensor, rows: int) -> Tensor:
    """`[V]` bool, without the targets and what is NaN."""
    if eps is not None:
        return weight > eps
    everything = weight.sum()
    allowed = share**2 * everything
    steps = torch.arange(cuts_of(len(weight)), device=weight.device, dtype=weight.dtype)
    cuts = allowed * first_cut(rows) * torch.exp2(-steps / 2)
    below = torch.where(weight <= cuts.unsqueeze(-1), weight, 0).sum(-1)
    return ~(weight <= torch.where((below <= allowed) & everything.isfinite(), cuts, 0).amax())
