"""Triton form of `tailed_cast`: one program owns a block of some rows, which share the tails' sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_triton import launch
from .rows_triton import aligned_size, cdiv, eight_aligned

_ROWS, _COLUMNS = 8, 512


@triton.jit(do_not_specialize=["n_rows", "width", "n_tails"])
def _tailed_cast_kernel(
    total_ptr, written_ptr, profiles_ptr, sums_ptr, factor_ptr, out_ptr, n_rows, width, n_tails,
    WRITTEN: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, COLUMNS)
    width = aligned_size(width, ALIGNED)
    rows = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = rows < n_rows
    held = inside
    if WRITTEN:
        held = inside & (tl.load(written_ptr + rows, mask=inside, other=0) != 0)
    offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
    narrow = columns < width
    # No traffic where a row holds nothing.
    values = tl.load(total_ptr + offsets, mask=held[:, None] & narrow[None, :], other=0.0)
    for tail in range(n_tails):
        profile = tl.load(profiles_ptr + tl.cast(tail, tl.int64) * n_rows + rows, mask=inside, other=0.0)
        values += profile[:, None] * tl.load(sums_ptr + tail * width + columns, mask=narrow, other=0.0)[None, :]
    values *= tl.load(factor_ptr)
    tl.store(out_ptr + offsets, values.to(out_ptr.dtype.element_ty), mask=inside[:, None] & narrow[None, :])


def tailed_cast_triton(
    total: Tensor, written: Tensor | None, profiles: Tensor, sums: Tensor, factor: Tensor, out: Tensor
) -> None:
    rows, width = total.shape
    launch(
        _tailed_cast_kernel, cdiv(rows, _ROWS) * cdiv(width, _COLUMNS),
        (total, total if written is None else written.view(torch.int8), profiles, sums, factor, out, rows, width,
         len(profiles)),
        4, WRITTEN=written is not None, ALIGNED=eight_aligned(width, total, sums, out), ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
