"""Triton form of `weighted_sum`: partial sums in registers, added up in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_triton import launch
from .rows_triton import aligned_size, cdiv, eight_aligned, sum_partials

_PART = 512
_ROWS, _COLUMNS, _STAGES = 32, 256, 2  # blocks of rows are read one ahead


@triton.jit(do_not_specialize=["stride", "n_rows", "n_columns", "part"])
def _weighted_sum_kernel(
    matrix_ptr, weights_ptr, partial_ptr, stride, n_rows, n_columns, part,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n_columns, COLUMNS)
    block, this = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    n_columns = aligned_size(n_columns, ALIGNED)
    stride = aligned_size(stride, ALIGNED)
    first = this * part
    last = tl.minimum(first + part, n_rows)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < last)[:, None] & (columns < n_columns)[None, :]
        values = tl.load(matrix_ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)
        total += values.to(tl.float32) * tl.load(weights_ptr + rows, mask=rows < last, other=0.0)[:, None]
    out = this.to(tl.int64) * n_columns + columns
    tl.store(partial_ptr + out, tl.sum(total, 0), mask=columns < n_columns)


def weighted_sum_triton(matrix: Tensor, weights: Tensor) -> Tensor:
    rows, columns = matrix.shape
    parts = cdiv(rows, _PART)
    partial = torch.empty(parts, columns, device=matrix.device)
    launch(
        _weighted_sum_kernel, cdiv(columns, _COLUMNS) * parts,
        (matrix, weights, partial, matrix.stride(0), rows, columns, _PART), 8, ALIGNED=eight_aligned(columns, matrix),
        ROWS=_ROWS, COLUMNS=_COLUMNS, STAGES=_STAGES,
    )  # fmt: skip
    return sum_partials(partial, torch.empty(columns, device=matrix.device))
