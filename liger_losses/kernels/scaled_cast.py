"""`factor * rows` in fp32 (fp64), rounded to the asked dtype once, without an intermediate of that size."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import use_triton


def scaled_cast(
    rows: Tensor,  # [N, H] or [N]
    factor: Tensor,  # [] or [N]
    dtype: torch.dtype,
) -> Tensor:
    """A new tensor `factor * rows` (a factor per row, or one for all) in `dtype`."""
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

        scaled_cast_triton(rows, factor, out)
        return out
    # With a dimension, though it be one of size 1: a factor that has none would be rounded to the dtype of the rows.
    return torch.mul(rows, factor.unsqueeze(-1) if factor.dim() < rows.dim() else factor, out=out)
