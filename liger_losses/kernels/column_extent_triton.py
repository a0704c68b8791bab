"""Triton form of `column_extent`: one program owns a block of columns of some of the rows, and no atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .column_extent import ColumnExtent
from .launch_triton import launch
from .rows_triton import aligned_size, cdiv
from .tile_statistics_triton import aligned, readable_columns, row_start

# A warp owns a block's columns of four neighbouring rows at a time, so that a row's sum crosses no warp. Rows are read
# two steps ahead, through shared memory: left to itself the compiler reads a row when it needs it.
_WARPS, _COLUMNS, _STAGES = 2, 256, 3
_RUN = tl.constexpr(4)
_STEPS = 32  # Shorter parts of columns fill the device where there are few, and cost a read of each.
# Of the kernel that adds the parts up: columns of a program, and rows of those that add up the rows' sums.
_SUM_COLUMNS, _SUM_ROWS, _SUM_PARTS = 256, 32, 64


@triton.jit
def _load(gradient_ptr, row, stride, n_rows, columns, readable):
    mask = (row < n_rows)[:, None] & (columns < readable)[None, :]
    return tl.load(gradient_ptr + (row * stride)[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _with(weight, of_one, SQUARES: tl.constexpr):
    return weight + of_one if SQUARES else tl.maximum(weight, of_one)


@triton.jit
def _fold(
    raw, scale_ptr, row, n_rows, columns, n_columns, weight, total, SQUARES: tl.constexpr, HAS_SCALE: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    values = raw.to(tl.float32)
    if RAGGED:
        # Up to the 8-element boundary, so that the mask of the load is uniform over 16 bytes; junk is in no sum.
        values = tl.where((columns < n_columns)[None, :], values, 0.0)
    each = tl.sum(values, 1)
    size = tl.abs(values)
    if HAS_SCALE:
        size *= tl.abs(tl.load(scale_ptr + row, mask=row < n_rows, other=0.0))[:, None]
    return _with(weight, size * size if SQUARES else size, SQUARES), total + size, each


@triton.jit(do_not_specialize=["stride", "n_rows", "n_columns"])
def _extent_kernel(
    gradient_ptr, scale_ptr, partial_ptr, row_sums_ptr, stride, n_rows, n_columns,
    SQUARES: tl.constexpr, HAS_SCALE: tl.constexpr, ALIGNED: tl.constexpr, RAGGED: tl.constexpr, WARPS: tl.constexpr,
    COLUMNS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n_columns, COLUMNS)
    block, part = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    readable = readable_columns(n_columns, ALIGNED)
    # What is left are offsets of 32 bits inside the part.
    before = part * (WARPS * STEPS * _RUN)
    gradient_ptr = row_start(gradient_ptr, tl.cast(before, tl.int64), stride, ALIGNED)
    stride = aligned_size(stride, ALIGNED)
    scale_ptr += before
    row_sums_ptr += tl.cast(block, tl.int64) * n_rows + before
    n_rows -= before
    weight = tl.zeros((WARPS, COLUMNS), tl.float32)
    total = tl.zeros((WARPS, COLUMNS), tl.float32)
    number = tl.arange(0, _RUN)[None, :]
    for step in tl.range(0, tl.minimum(STEPS, tl.cdiv(n_rows, WARPS * _RUN)), num_stages=STAGES):
        row = (step * WARPS + tl.arange(0, WARPS)) * _RUN
        sums = tl.zeros((WARPS, _RUN), tl.float32)
        raw0 = _load(gradient_ptr, row, stride, n_rows, columns, readable)
        raw1 = _load(gradient_ptr, row + 1, stride, n_rows, columns, readable)
        raw2 = _load(gradient_ptr, row + 2, stride, n_rows, columns, readable)
        raw3 = _load(gradient_ptr, row + 3, stride, n_rows, columns, readable)
        for i in tl.static_range(_RUN):
            raw = raw0 if i == 0 else raw1 if i == 1 else raw2 if i == 2 else raw3
            weight, total, each = _fold(
                raw, scale_ptr, row + i, n_rows, columns, n_columns, weight, total, SQUARES, HAS_SCALE, RAGGED
            )
            sums = tl.where(number == i, each[:, None], sums)
        rows = row[:, None] + number
        tl.store(row_sums_ptr + rows, sums, mask=rows < n_rows)
    out = partial_ptr + tl.cast(part, tl.int64) * 2 * n_columns + columns
    tl.store(out, tl.sum(weight, 0) if SQUARES else tl.max(weight, 0), mask=columns < n_columns)
    tl.store(out + n_columns, tl.sum(total, 0), mask=columns < n_columns)


@triton.jit(do_not_specialize=["parts", "n_rows", "n_columns", "blocks"])
def _extent_sum_kernel(
    partial_ptr, row_partial_ptr, extent_ptr, row_sums_ptr, parts, n_rows, n_columns, blocks,
    SQUARES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    # The first programs add up columns, the others rows.
    of_columns = tl.cdiv(n_columns, COLUMNS)
    if tl.program_id(0) < of_columns:
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < n_columns
        weight = tl.zeros((COLUMNS,), tl.float32)
        total = tl.zeros((COLUMNS,), tl.float32)
        for part in range(parts):
            source = partial_ptr + tl.cast(part, tl.int64) * 2 * n_columns + columns
            weight = _with(weight, tl.load(source, mask=inside, other=0.0), SQUARES)
            total += tl.load(source + n_columns, mask=inside, other=0.0)
        tl.store(extent_ptr + columns, weight, mask=inside)
        tl.store(extent_ptr + n_columns + columns, total, mask=inside)
    else:
        rows = (tl.program_id(0) - of_columns) * ROWS + tl.arange(0, ROWS)
        sums = tl.zeros((PARTS, ROWS), tl.float32)
        for start in range(0, blocks, PARTS):
            part = start + tl.arange(0, PARTS)
            mask = (part < blocks)[:, None] & (rows < n_rows)[None, :]
            sums += tl.load(row_partial_ptr + part.to(tl.int64)[:, None] * n_rows + rows[None, :], mask=mask, other=0.0)
        tl.store(row_sums_ptr + rows, tl.sum(sums, 0), mask=rows < n_rows)


def column_extent_triton(gradient: Tensor, scale: Tensor | None, squares: bool) -> ColumnExtent:
    rows, columns = gradient.shape
    parts, blocks = cdiv(rows, _WARPS * _RUN.value * _STEPS), cdiv(columns, _COLUMNS)
    partial = gradient.new_empty((parts * 2 * columns + blocks * rows,), dtype=torch.float32)
    row_partial = partial[parts * 2 * columns :]
    out = gradient.new_empty((2 * columns + rows,), dtype=torch.float32)
    extent, row_sums = out[: 2 * columns], out[2 * columns :]
    is_aligned = aligned(gradient)
    launch(
        _extent_kernel, parts * blocks,
        (gradient, partial if scale is None else scale, partial, row_partial, gradient.stride(0), rows, columns),
        _WARPS, SQUARES=squares, HAS_SCALE=scale is not None, ALIGNED=is_aligned,
        RAGGED=is_aligned and columns % 8 != 0, WARPS=_WARPS, COLUMNS=_COLUMNS, STEPS=_STEPS, STAGES=_STAGES,
    )  # fmt: skip
    launch(
        _extent_sum_kernel, cdiv(columns, _SUM_COLUMNS) + cdiv(rows, _SUM_ROWS),
        (partial, row_partial, extent, row_sums, parts, rows, columns, blocks), 4,
        SQUARES=squares, COLUMNS=_SUM_COLUMNS, ROWS=_SUM_ROWS, PARTS=_SUM_PARTS,
    )  # fmt: skip
    return ColumnExtent(extent[:columns], extent[columns:], row_sums)
