"""The mean weight row of what is outside a tile's active columns."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import use_triton
from .tile_statistics import row_slices


def weighted_sum(
    matrix: Tensor,  # [V, H]
    weights: Tensor,  # [V] fp32 (fp64 for fp64)
) -> Tensor:
    """`sum_v weights_v matrix_v`, `[H]`, in the dtype of the weights."""
    if use_triton(matrix):
        from .weighted_sum_triton import weighted_sum_triton

        return weighted_sum_triton(matrix, weights)
    out = torch.zeros(matrix.shape[1], dtype=weights.dtype, device=matrix.device)
    for rows in row_slices(matrix):
        out.addmv_(matrix[rows].to(weights.dtype).t(), weights[rows])
    return out
