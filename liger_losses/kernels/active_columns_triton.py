"""Triton forms of `active_columns`: a program owns a block of what is written. Each entry has one writer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_triton import launch
from .rows_triton import aligned_size, eight_aligned, power_of_2

_COLUMNS, _ROWS = 1024, 8
_BLOCK = 2048


@triton.jit(
    do_not_specialize=["stride", "out_stride", "n_rows", "n_ids", "width"], do_not_specialize_on_alignment=["ids_ptr"]
)
def _gather_columns_kernel(
    tile_ptr, stride, ids_ptr, out_ptr, out_stride, n_rows, n_ids, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    offsets = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ids = tl.load(ids_ptr + offsets, mask=offsets < n_ids, other=0)
    first = tl.program_id(1) * ROWS
    # The ids stay in registers from row to row.
    for row in range(first, tl.minimum(first + ROWS, n_rows)):
        start = tl.cast(row, tl.int64)
        values = tl.load(tile_ptr + start * stride + ids, mask=offsets < n_ids, other=0.0)
        tl.store(out_ptr + start * out_stride + offsets, values, mask=offsets < width)


def gather_columns_triton(tile: Tensor, ids: Tensor, out: Tensor) -> None:
    rows, width = out.shape
    with torch.cuda.device_of(tile):
        _gather_columns_kernel[(triton.cdiv(width, _COLUMNS), triton.cdiv(rows, _ROWS))](
            tile, tile.stride(0), ids, out, out.stride(0), rows, len(ids), width, ROWS=_ROWS, COLUMNS=_COLUMNS,
            num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["stride", "out_stride", "n_ids", "width"], do_not_specialize_on_alignment=["ids_ptr"])
def _gather_rows_kernel(
    weight_ptr, stride, ids_ptr, out_ptr, out_stride, n_ids, width, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    # Told so, the compiler moves 16 bytes at a time.
    width = aligned_size(width, ALIGNED)
    stride = aligned_size(stride, ALIGNED)
    out_stride = aligned_size(out_stride, ALIGNED)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(ids_ptr + tl.minimum(row, n_ids - 1)) * stride
    values = tl.load(weight_ptr + start + offsets, mask=offsets < width, other=0.0)
    tl.store(out_ptr + row * out_stride + offsets, tl.where(row < n_ids, values, 0.0), mask=offsets < width)


def gather_rows_triton(weight: Tensor, ids: Tensor, out: Tensor) -> None:
    rows, width = out.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    with torch.cuda.device_of(weight):
        _gather_rows_kernel[(rows, triton.cdiv(width, block))](
            weight, weight.stride(0), ids, out, out.stride(0), len(ids), width,
            ALIGNED=eight_aligned(width, weight, out), BLOCK=block, num_warps=4,
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
