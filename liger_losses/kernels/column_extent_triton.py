"""Triton form of `column_extent`: one program owns a block of columns of some of the rows, and no atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tile_statistics_triton import aligned, readable_columns, row_start

# Rows whose part of a column one program adds up. More parts fill the device at few columns, and cost a read of each.
_PART = 512
_ROWS, _COLUMNS = 16, 256


@triton.jit(
    do_not_specialize=["stride", "n_rows", "n_columns", "part"],
    do_not_specialize_on_alignment=["scale_ptr", "largest_ptr", "total_ptr", "squares_ptr"],
)
def _extent_kernel(
    gradient_ptr, stride, scale_ptr, largest_ptr, total_ptr, squares_ptr, n_rows, n_columns, part,
    HAS_SCALE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Up to the 8-element boundary, so that the mask is uniform over 16 bytes: what is read there is not stored.
    readable = columns < readable_columns(n_columns, ALIGNED)
    first = tl.program_id(1) * part
    last = tl.minimum(first + part, n_rows)
    largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < last)[:, None] & readable[None, :]
        starts = row_start(gradient_ptr, rows.to(tl.int64), stride, ALIGNED)
        size = tl.abs(tl.load(starts[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32))
        if HAS_SCALE:
            size *= tl.abs(tl.load(scale_ptr + rows, mask=rows < last, other=0.0))[:, None]
        largest = tl.maximum(largest, size)
        total += size
        squares += size * size
    out = tl.program_id(1).to(tl.int64) * n_columns + columns
    tl.store(largest_ptr + out, tl.max(largest, 0), mask=columns < n_columns)
    tl.store(total_ptr + out, tl.sum(total, 0), mask=columns < n_columns)
    tl.store(squares_ptr + out, tl.sum(squares, 0), mask=columns < n_columns)


def column_extent_triton(gradient: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = gradient.shape
    parts = triton.cdiv(rows, _PART)
    largest, total, squares = torch.empty(3, parts, columns, device=gradient.device)
    with torch.cuda.device_of(gradient):
        _extent_kernel[(triton.cdiv(columns, _COLUMNS), parts)](
            gradient,
            gradient.stride(0),
            largest if scale is None else scale,
            largest,
            total,
            squares,
            rows,
            columns,
            _PART,
            HAS_SCALE=scale is not None,
            ALIGNED=aligned(gradient),
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=8,
        )
    return largest.amax(0), total.sum(0), squares.sum(0)
