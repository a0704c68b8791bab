"""The last visit to a product, without an intermediate: what is still to be added to rows, a factor, and the cast."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import use_triton
from .tile_statistics import row_slices


class RowTails(NamedTuple):
    """To row `r` comes `sizes_r sums_k` with `k = which_r`, or nothing where that is negative."""

    sizes: Tensor  # [N] fp32 (fp64), contiguous
    which: Tensor  # [N] int32, contiguous
    sums: Tensor  # [K, H] fp32 (fp64), contiguous


def scaled_cast(
    rows: Tensor,  # [N, H] or [N]
    factor: Tensor,  # [] or [N]
    dtype: torch.dtype,
    tails: RowTails | None = None,  # of `[N, H]`
) -> Tensor:
    """A new tensor `factor * (rows + tails)` (a factor per row, or one for all) in `dtype`, rounded once."""
    out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    if rows.numel() == 0:
        return out
    # torch's own product of mixed dtypes reads element by element on CUDA, at a quarter of the memory's speed.
    if (
        rows.dim() == 2
        and rows.is_contiguous()
        and torch.float64 not in (rows.dtype, factor.dtype)
        and use_triton(rows)
    ):
        from .scaled_cast_triton import scaled_cast_triton

        scaled_cast_triton(rows, factor, out, tails)
        return out
    if tails is not None:
        for some in row_slices(rows):
            sizes = tails.sizes[some].masked_fill(tails.which[some] < 0, 0).unsqueeze(-1)
            own = tails.sums.index_select(0, tails.which[some].clamp_min(0)).mul_(sizes).add_(rows[some])
            out[some] = own.mul_(factor[some].unsqueeze(-1) if factor.dim() else factor)
        return out
    # With a dimension, though it be one of size 1: a factor that has none would be rounded to the dtype of the rows.
    return torch.mul(rows, factor.unsqueeze(-1) if factor.dim() < rows.dim() else factor, out=out)
