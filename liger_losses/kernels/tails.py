"""What is outside a tile's active columns, as one column: the rows' sums over them, and their mean weight row."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import use_triton
from .registration import wide_dtype
from .tile_statistics import row_slices


def tail_sums(
    gradient: Tensor,  # [rows, V]
    active: Tensor,  # [V] bool
) -> Tensor:
    """`sum over v not active of G_rv`, `[rows]`, in fp32 (fp64 for fp64)."""
    if gradient.shape[0] and use_triton(gradient):
        from .tails_triton import tail_sums_triton

        return tail_sums_triton(gradient, active)
    wide = wide_dtype(gradient.dtype)
    out = torch.zeros(gradient.shape[0], dtype=wide, device=gradient.device)
    for rows in row_slices(gradient):
        out[rows] = gradient[rows].to(wide, copy=True).masked_fill_(active, 0).sum(-1)
    return out


def weighted_sum(
    matrix: Tensor,  # [V, H]
    weights: Tensor,  # [V] fp32 (fp64 for fp64)
) -> Tensor:
    """`sum_v weights_v matrix_v`, `[H]`, in the dtype of the weights."""
    if use_triton(matrix):
        from .tails_triton import weighted_sum_triton

        return weighted_sum_triton(matrix, weights)
    out = torch.zeros(matrix.shape[1], dtype=weights.dtype, device=matrix.device)
    for rows in row_slices(matrix):
        out.addmv_(matrix[rows].to(weights.dtype).t(), weights[rows])
    return out
