"""What each column of a gradient tile weighs: the largest of its entries or the sum of their squares; and their sum.

A trained model's softmax is peaked, so that most columns of a tile's `G` hold next to nothing. These numbers say
which, whatever `G` is the gradient of.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import use_triton
from .registration import wide_dtype
from .tile_statistics import row_slices


class ColumnExtent(NamedTuple):
    """Of a tile `[rows, V]`, in fp32 (fp64 for fp64)."""

    weight: Tensor  # [V] sum over r of (scale_r G_rv)^2, or max over r of |scale_r G_rv|
    total: Tensor  # [V] sum over r of |scale_r G_rv|
    row_sums: Tensor  # [rows] sum over v of G_rv, without the scale


def column_extent(
    gradient: Tensor,  # [rows, V]
    scale: Tensor | None,  # [rows]: what is weighed is `gradient` times this
    *,
    squares: bool,  # whether a column weighs the sum of its entries' squares, or its largest entry
) -> ColumnExtent:
    """What the columns weigh, and what the rows add up to, in one visit. A column with NaN has a total that is NaN."""
    if gradient.shape[0] and use_triton(gradient):
        from .column_extent_triton import column_extent_triton

        return column_extent_triton(gradient, scale, squares)
    wide = wide_dtype(gradient.dtype)
    weight, total = torch.zeros(2, gradient.shape[1], dtype=wide, device=gradient.device)
    row_sums = torch.zeros(gradient.shape[0], dtype=wide, device=gradient.device)
    for rows in row_slices(gradient):
        size = gradient[rows].to(wide, copy=True)
        row_sums[rows] = size.sum(-1)
        size.abs_()
        if scale is not None:
            size.mul_(scale[rows].abs().unsqueeze(-1))
        total.add_(size.sum(0))
        if squares:
            weight.add_(size.square_().sum(0))
        else:
            torch.maximum(weight, size.amax(0), out=weight)
    return ColumnExtent(weight, total, row_sums)
