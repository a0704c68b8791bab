"""Triton form of `rms_norm`: rows are held in registers, several to a program where they are narrow.

Rows wider than `WIDEST` are walked in blocks, twice. Backward runs a few programs per multiprocessor, each of which
walks its own rows and keeps its part of the weight's gradient in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_triton import launch
from .rows_triton import (
    TILE,
    WALK,
    WIDEST,
    WIDEST_BACKWARD,
    aligned_size,
    cdiv,
    eight_aligned,
    neighbours,
    processors,
    sum_partials,
    tile_shape,
    warps,
)


@triton.jit(
    do_not_specialize=["x_stride", "residual_stride", "rows", "width"], do_not_specialize_on_alignment=["rstd_ptr"]
)
def _forward_kernel(
    x_ptr, x_stride, residual_ptr, residual_stride, weight_ptr, y_ptr, total_ptr, rstd_ptr, rows, width, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    eps, offset = tl.cast(eps, tl.float32), tl.cast(offset, tl.float32)
    x_stride, residual_stride = aligned_size(x_stride, ALIGNED), aligned_size(residual_stride, ALIGNED)
    width = aligned_size(width, ALIGNED)
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < width)
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * width + column, total, mask=mask)
        x = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = x * rstd
    if ROUND:
        y = y.to(total_ptr.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        y *= offset + tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["x_stride", "residual_stride", "rows", "width"], do_not_specialize_on_alignment=["rstd_ptr"]
)
def _forward_wide_kernel(
    x_ptr, x_stride, residual_ptr, residual_stride, weight_ptr, y_ptr, total_ptr, rstd_ptr, rows, width, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    eps, offset = tl.cast(eps, tl.float32), tl.cast(offset, tl.float32)
    x_stride, residual_stride = aligned_size(x_stride, ALIGNED), aligned_size(residual_stride, ALIGNED)
    width = aligned_size(width, ALIGNED)
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
            total = x.to(total_ptr.dtype.element_ty)
            tl.store(total_ptr + row * width + column, total, mask=mask)
            x = total.to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        # Added up anew rather than read back: what this program wrote, other threads of it may have written.
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
            x = x.to(total_ptr.dtype.element_ty).to(tl.float32)
        y = x * rstd
        if ROUND:
            y = y.to(total_ptr.dtype.element_ty).to(tl.float32)
        if HAS_WEIGHT:
            y *= offset + tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["dy_stride", "dtotal_stride", "x_stride", "rows", "width"],
    do_not_specialize_on_alignment=["rstd_ptr", "partial_ptr"],
)
def _backward_kernel(
    dy_ptr, dy_stride, dtotal_ptr, dtotal_stride, x_ptr, x_stride, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, rows,
    width, offset,
    HAS_DTOTAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, ROUND: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.cast(offset, tl.float32)
    dy_stride, dtotal_stride = aligned_size(dy_stride, ALIGNED), aligned_size(dtotal_stride, ALIGNED)
    x_stride, width = aligned_size(x_stride, ALIGNED), aligned_size(width, ALIGNED)
    step = tl.num_programs(0) * ROWS
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = (row < rows) & inside
    # The next rows are on their way while these are worked on.
    next_x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    next_dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0)
    next_rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    for _ in range(tl.program_id(0) * ROWS, rows, step):
        x, dy, rstd = next_x.to(tl.float32), next_dy.to(tl.float32), next_rstd
        ahead = row + step
        ahead_mask = (ahead < rows) & inside
        next_x = tl.load(x_ptr + ahead * x_stride + column, mask=ahead_mask, other=0.0)
        next_dy = tl.load(dy_ptr + ahead * dy_stride + column, mask=ahead_mask, other=0.0)
        next_rstd = tl.load(rstd_ptr + ahead, mask=ahead < rows, other=0.0)
        xhat = x * rstd
        m = dy
        if HAS_WEIGHT:
            m *= offset + weight.to(tl.float32)
        dx = rstd * (m - xhat * (tl.sum(m * xhat, 1) / width)[:, None])
        if HAS_DTOTAL:
            dx += tl.load(dtotal_ptr + row * dtotal_stride + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * width + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEEDS_WEIGHT:
            if ROUND:
                xhat = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
            dw += dy * xhat
        row, mask = ahead, ahead_mask
    if NEEDS_WEIGHT:
        column = tl.arange(0, BLOCK)
        part = partial_ptr + tl.program_id(0).to(tl.int64) * width + column
        tl.store(part, tl.sum(dw, 0), mask=column < width)


@triton.jit(
    do_not_specialize=["dy_stride", "dtotal_stride", "x_stride", "rows", "width"],
    do_not_specialize_on_alignment=["rstd_ptr", "partial_ptr"],
)
def _backward_wide_kernel(
    dy_ptr, dy_stride, dtotal_ptr, dtotal_stride, x_ptr, x_stride, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, rows,
    width, offset,
    HAS_DTOTAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, ROUND: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.cast(offset, tl.float32)
    dy_stride, dtotal_stride = aligned_size(dy_stride, ALIGNED), aligned_size(dtotal_stride, ALIGNED)
    x_stride, width = aligned_size(x_stride, ALIGNED), aligned_size(width, ALIGNED)
    program = tl.program_id(0)
    for index in range(program, rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        rstd = tl.load(rstd_ptr + row)
        products = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < width
            m = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
            if HAS_WEIGHT:
                m *= offset + tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
            products += m * (tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32) * rstd)
        mean = tl.sum(products, 0) / width
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < width
            dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
            xhat = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32) * rstd
            m = dy
            if HAS_WEIGHT:
                m *= offset + tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
            dx = rstd * (m - xhat * mean)
            if HAS_DTOTAL:
                dx += tl.load(dtotal_ptr + row * dtotal_stride + column, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + row * width + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if NEEDS_WEIGHT:
                if ROUND:
                    xhat = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
                # Each thread reads back what it wrote itself: both accesses have one layout.
                part = partial_ptr + program.to(tl.int64) * width + column
                so_far = tl.where(row == program, 0.0, tl.load(part, mask=mask, other=0.0))
                tl.store(part, so_far + dy * xhat, mask=mask)


def forward_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, y: Tensor, total: Tensor | None, rstd: Tensor,
    eps: float, offset: float, round_normed: bool,
) -> None:  # fmt: skip
    rows, width = x.shape
    weight = neighbours(weight)
    wide = width > WIDEST
    block_rows, block = (1, WALK) if wide else tile_shape(width)
    kernel = _forward_wide_kernel if wide else _forward_kernel
    launch(
        kernel,
        cdiv(rows, block_rows),
        (
            x,
            x.stride(0),
            x if residual is None else residual,
            0 if residual is None else residual.stride(0),
            x if weight is None else weight,
            y,
            x if total is None else total,
            rstd,
            rows,
            width,
            eps,
            offset,
        ),
        warps(block_rows * block),
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        ROUND=round_normed,
        ALIGNED=eight_aligned(width, x, residual, weight),
        ROWS=block_rows,
        BLOCK=block,
    )


def backward_triton(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, dx: Tensor, offset: float,
    round_normed: bool, needs_weight: bool,
) -> Tensor | None:  # fmt: skip
    rows, width = x.shape
    weight = neighbours(weight)
    wide = width > WIDEST_BACKWARD
    block_rows, block = (1, WALK) if wide else tile_shape(width)
    needs_weight = needs_weight and weight is not None
    # As many programs as are resident at once: two of a tile of 4096, whose rows take half of the registers each.
    per_processor = max(1, 2 * TILE // (block_rows * block))
    programs = min(cdiv(rows, block_rows), per_processor * processors(x.device))
    partial = torch.empty(programs if needs_weight else 0, width, dtype=torch.float32, device=x.device)
    kernel = _backward_wide_kernel if wide else _backward_kernel
    launch(
        kernel,
        programs,
        (
            dy,
            dy.stride(0),
            x if dtotal is None else dtotal,
            0 if dtotal is None else dtotal.stride(0),
            x,
            x.stride(0),
            x if weight is None else weight,
            rstd,
            dx,
            partial if needs_weight else rstd,
            rows,
            width,
            offset,
        ),
        warps(block_rows * block),
        HAS_DTOTAL=dtotal is not None,
        HAS_WEIGHT=weight is not None,
        NEEDS_WEIGHT=needs_weight,
        ROUND=round_normed,
        ALIGNED=eight_aligned(width, dy, dtotal, x, weight),
        ROWS=block_rows,
        BLOCK=block,
    )
    if not needs_weight or weight is None:
        return None
    return sum_partials(partial, torch.empty_like(weight))
