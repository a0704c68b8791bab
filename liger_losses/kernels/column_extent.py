"""What each column of a gradient tile weighs: the largest of its entries, and their sum and that of their squares.

A trained model's softmax is peaked, so that most columns of a tile's `G` hold next to nothing. These numbers say
which, whatever `G` is the gradient of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import use_triton
from .registration import wide_dtype
from .tile_statistics import row_slices


def column_extent(
    gradient: Tensor,  # [rows, V]
    scale: Tensor | None,  # [rows]: the entries are those of `gradient` times this
) -> tuple[Tensor, Tensor, Tensor]:
    """`max_r |scale_r G_rv|`, `sum_r |scale_r G_rv|`, `sum_r (scale_r G_rv)^2`: `[V]` each, fp32 (fp64 for fp64).

    A column that holds NaN has sums that are NaN.
    """
    if gradient.shape[0] and use_triton(gradient):
        from .column_extent_triton import column_extent_triton

        return column_extent_triton(gradient, scale)
    wide = wide_dtype(gradient.dtype)
    largest, total, squares = torch.zeros(3, gradient.shape[1], dtype=wide, device=gradient.device)
    for rows in row_slices(gradient):
        size = gradient[rows].to(wide).abs()
        if scale is not None:
            size.mul_(scale[rows].abs().unsqueeze(-1))
        torch.maximum(largest, size.amax(0), out=largest)
        total.add_(size.sum(0))
        squares.add_(size.square_().sum(0))
    return largest, total, squares
