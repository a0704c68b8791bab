"""The last visit to a sum of weight gradients: what the tiles' tails add to it, a factor, and the cast."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import use_triton
from .tile_statistics import row_slices


def tailed_cast(
    total: Tensor,  # [V, H] fp32 (fp64), contiguous
    written: Tensor | None,  # [V] bool: rows of `total` that hold something, others are read as 0; None: all do
    profiles: Tensor,  # [K, V] in the dtype of `total`, contiguous
    sums: Tensor,  # [K, H] likewise
    factor: Tensor,  # [] likewise
    dtype: torch.dtype,
) -> Tensor:
    """A new tensor `(total + profiles^T sums) * factor` in `dtype`, rounded once."""
    out = torch.empty(total.shape, dtype=dtype, device=total.device)
    if total.numel() == 0:
        return out
    if use_triton(total):
        from .tailed_cast_triton import tailed_cast_triton

        tailed_cast_triton(total, written, profiles, sums, factor, out)
        return out
    for rows in row_slices(total):
        part = total[rows]
        if written is not None:
            part = part.masked_fill(written[rows].logical_not().unsqueeze(-1), 0)
        out[rows] = torch.addmm(part, profiles[:, rows].t(), sums).mul_(factor)
    return out
