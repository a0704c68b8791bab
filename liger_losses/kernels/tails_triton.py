"""Triton forms of `tails`: partial sums in registers, added up in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows_triton import aligned_size, eight_aligned, sum_partials
from .tile_statistics_triton import aligned, readable_columns, row_start

_BLOCK = 4096
_PART = 512
_ROWS, _COLUMNS = 16, 256


@triton.jit(do_not_specialize=["stride", "n_columns"], do_not_specialize_on_alignment=["out_ptr"])
def _tail_sums_kernel(gradient_ptr, stride, active_ptr, out_ptr, n_columns, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = row_start(gradient_ptr, row, stride, ALIGNED)
    readable = readable_columns(n_columns, ALIGNED)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n_columns, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values = tl.load(start + columns, mask=columns < readable, other=0.0).to(tl.float32)
        active = tl.load(active_ptr + columns, mask=columns < n_columns, other=1)
        total += tl.where(active == 0, values, 0.0)
    tl.store(out_ptr + row, tl.sum(total, 0))


def tail_sums_triton(gradient: Tensor, active: Tensor) -> Tensor:
    rows, columns = gradient.shape
    out = torch.empty(rows, device=gradient.device)
    with torch.cuda.device_of(gradient):
        _tail_sums_kernel[(rows,)](
            gradient, gradient.stride(0), active.view(torch.int8), out, columns, ALIGNED=aligned(gradient),
            BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["stride", "n_rows", "n_columns", "part"],
    do_not_specialize_on_alignment=["weights_ptr", "partial_ptr"],
)
def _weighted_sum_kernel(
    matrix_ptr, stride, weights_ptr, partial_ptr, n_rows, n_columns, part,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    n_columns = aligned_size(n_columns, ALIGNED)
    stride = aligned_size(stride, ALIGNED)
    first = tl.program_id(1) * part
    last = tl.minimum(first + part, n_rows)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < last)[:, None] & (columns < n_columns)[None, :]
        values = tl.load(matrix_ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)
        total += values.to(tl.float32) * tl.load(weights_ptr + rows, mask=rows < last, other=0.0)[:, None]
    out = tl.program_id(1).to(tl.int64) * n_columns + columns
    tl.store(partial_ptr + out, tl.sum(total, 0), mask=columns < n_columns)


def weighted_sum_triton(matrix: Tensor, weights: Tensor) -> Tensor:
    rows, columns = matrix.shape
    parts = triton.cdiv(rows, _PART)
    partial = torch.empty(parts, columns, device=matrix.device)
    with torch.cuda.device_of(matrix):
        _weighted_sum_kernel[(triton.cdiv(columns, _COLUMNS), parts)](
            matrix, matrix.stride(0), weights, partial, rows, columns, _PART,
            ALIGNED=eight_aligned(columns, matrix), ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
        return sum_partials(partial, torch.empty(columns, device=matrix.device))
