"""Logits tile -> log-likelihood of a set of labels, every label an independent yes or no, and its gradient.

With positives `S` of a row, `log P = sum_{v in S} z_v - sum_v softplus(z_v)` over the columns, and

    d log P / draw_v = (1[v in S] - sigmoid(z_v)) * dz_v/draw_v

which, like the gradient of a softmax's log-probability, does not depend on the loss: what a loss adds is a factor per
row. Binary cross entropy over a label space of any size is `-log P`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import use_triton
from .registration import wide_dtype
from .tile_statistics import row_slices
from .transform import LogitTransform

# A label out of range that the host did not see: the row's log-likelihood is NaN.
INVALID_POSITIVE = -2


class BernoulliState:
    """The running log-likelihood of `rows` rows, with what `RowState` offers as far as it has a meaning here."""

    names = ("logprob",)

    def __init__(self, rows: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self.total = torch.zeros(rows, device=device, dtype=dtype)
        self.lse = torch.zeros_like(self.total)  # the gradient reads none
        self.gradient_scale = torch.ones_like(self.total)  # `out` is final

    def statistics(self, vocab_size: int, column_weights: Tensor | None = None) -> dict[str, Tensor]:
        return {"logprob": self.total}

    def narrow(self, start: int, rows: int) -> BernoulliState:
        """A view of some of the rows."""
        view = BernoulliState.__new__(BernoulliState)
        for name, value in vars(self).items():
            setattr(view, name, value[start : start + rows])
        return view


def bernoulli_tile(
    tile: Tensor,  # [rows, columns] projected rows, before bias and transform
    bias: Tensor | None,  # [columns]
    positives: Tensor,  # [rows, P] int64, of the whole vocabulary, each once; < 0: none
    transform: LogitTransform,
    *,
    total: Tensor | None = None,  # [rows]; the log-likelihood of these columns is added
    out: Tensor | None = None,  # [rows, columns], may be `tile`: the gradient, rounded once
    factor: Tensor | None = None,  # [rows], of the gradient
    first_column: int = 0,
) -> None:
    """Add to `total`, write `out`, or both."""
    if tile.shape[0] == 0:
        return
    if total is not None:
        total.masked_fill_((positives == INVALID_POSITIVE).any(-1), torch.nan)
    columns = positives - first_column
    inside = (columns >= 0) & (columns < tile.shape[1])
    columns = torch.where(inside, columns, -1)
    # Read before `out`, which may be the tile, is written.
    at_positives = tile.gather(1, columns.clamp_min(0))
    if use_triton(tile):
        from .bernoulli_tile_triton import bernoulli_tile_triton

        bernoulli_tile_triton(tile, bias, columns, at_positives, transform, total, out, factor)
        return
    wide = wide_dtype(tile.dtype)
    for rows in row_slices(tile):
        own, picked = transform.rows(rows), columns[rows]
        positive_bias = None if bias is None else bias[picked.clamp_min(0)]
        z, slope = own.apply(tile[rows].to(wide), bias)
        z_positive, slope_positive = own.apply(at_positives[rows].to(wide), positive_bias)
        if total is not None:
            found = z_positive.masked_fill(picked < 0, 0).sum(-1)
            total[rows] += found - F.softplus(z).sum(-1)
        if out is not None:
            scale = 1 if factor is None else factor[rows].unsqueeze(-1)
            out[rows] = (torch.sigmoid(z) * slope * -scale).to(out.dtype)
            entry = (torch.sigmoid(-z_positive) * slope_positive * scale).to(out.dtype)
            row, place = (picked >= 0).nonzero(as_tuple=True)
            out[rows][row, picked[row, place]] = entry[row, place]
