"""Triton forms of `active_columns`: a program owns a block of what is written. Each entry has one writer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_triton import launch
from .rows_triton import aligned_size, cdiv, eight_aligned, power_of_2

_COLUMNS, _ROWS = 512, 4
_BLOCK = 2048


@triton.jit(do_not_specialize=["stride", "out_stride", "n_rows", "n_ids", "width"])
def _gather_columns_kernel(
    tile_ptr, ids_ptr, row_sums_ptr, out_ptr, stride, out_stride, n_rows, n_ids, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    starts = rows.to(tl.int64)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, width, COLUMNS):
        offsets = first + tl.arange(0, COLUMNS)
        ids = tl.load(ids_ptr + offsets, mask=offsets < n_ids, other=0)
        mask = inside[:, None] & (offsets < n_ids)[None, :]
        values = tl.load(tile_ptr + starts * stride + ids[None, :], mask=mask, other=0.0)
        total += values.to(tl.float32)
        mask = inside[:, None] & ((offsets < width) & (offsets != n_ids))[None, :]
        tl.store(out_ptr + starts * out_stride + offsets[None, :], values, mask=mask)
    tail = tl.load(row_sums_ptr + rows, mask=inside, other=0.0) - tl.sum(total, 1)
    tail = tl.where(tl.abs(tail) < float("inf"), tail, 0.0)
    tl.store(out_ptr + rows.to(tl.int64) * out_stride + n_ids, tail.to(out_ptr.dtype.element_ty), mask=inside)


def gather_columns_triton(tile: Tensor, ids: Tensor, row_sums: Tensor, out: Tensor) -> None:
    rows, width = out.shape
    launch(
        _gather_columns_kernel, cdiv(rows, _ROWS),
        (tile, ids, row_sums, out, tile.stride(0), out.stride(0), rows, len(ids), width), 4, ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride", "out_stride", "n_ids", "width"])
def _gather_rows_kernel(
    weight_ptr, ids_ptr, out_ptr, stride, out_stride, n_ids, width, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    # Told so, the compiler moves 16 bytes at a time.
    width = aligned_size(width, ALIGNED)
    stride = aligned_size(stride, ALIGNED)
    out_ptr += row.to(tl.int64) * aligned_size(out_stride, ALIGNED)
    for first in range(0, width, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        mask = offsets < width
        if row < n_ids:
            start = tl.load(ids_ptr + row).to(tl.int64) * stride
            tl.store(out_ptr + offsets, tl.load(weight_ptr + start + offsets, mask=mask, other=0.0), mask=mask)
        else:
            tl.store(out_ptr + offsets, tl.zeros((BLOCK,), out_ptr.dtype.element_ty), mask=mask)


def gather_rows_triton(weight: Tensor, ids: Tensor, out: Tensor) -> None:
    rows, width = out.shape
    launch(
        _gather_rows_kernel, rows, (weight, ids, out, weight.stride(0), out.stride(0), len(ids), width), 4,
        ALIGNED=eight_aligned(width, weight, out), BLOCK=min(_BLOCK, power_of_2(width)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride", "part_stride", "width"])
def _add_rows_kernel(
    total_ptr, written_ptr, ids_ptr, part_ptr, stride, part_stride, width,
    WRITTEN: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    width = aligned_size(width, ALIGNED)
    stride = aligned_size(stride, ALIGNED)
    part_stride = aligned_size(part_stride, ALIGNED)
    target = tl.load(ids_ptr + row).to(tl.int64)
    n_held = width
    if WRITTEN:
        n_held = aligned_size(tl.where(tl.load(written_ptr + target) == 0, 0, width), ALIGNED)
    for first in range(0, width, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        mask = offsets < width
        sums = total_ptr + target * stride + offsets
        values = tl.load(part_ptr + row * part_stride + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(sums, tl.load(sums, mask=offsets < n_held, other=0.0) + values, mask=mask)
    if WRITTEN:
        tl.debug_barrier()  # all have read it
        tl.store(written_ptr + target, 1)


def add_rows_triton(total: Tensor, written: Tensor | None, ids: Tensor, part: Tensor) -> None:
    width = total.shape[1]
    mask = ids if written is None else written.view(torch.int8)
    launch(
        _add_rows_kernel, len(ids), (total, mask, ids, part, total.stride(0), part.stride(0), width), 4,
        WRITTEN=written is not None, ALIGNED=eight_aligned(width, total, part), BLOCK=min(_BLOCK, power_of_2(width)),
    )  # fmt: skip
