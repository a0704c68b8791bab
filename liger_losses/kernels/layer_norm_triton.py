"""Triton form of `layer_norm`: rows in registers, several to a program where they are narrow, in blocks where wide."""

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


@triton.jit(do_not_specialize=["x_stride", "rows", "width"], do_not_specialize_on_alignment=["mean_ptr", "rstd_ptr"])
def _forward_kernel(
    x_ptr, x_stride, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, rows, width, eps, offset,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    eps, offset = tl.cast(eps, tl.float32), tl.cast(offset, tl.float32)
    x_stride, width = aligned_size(x_stride, ALIGNED), aligned_size(width, ALIGNED)
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    mask = (row < rows) & inside
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    mean = (tl.sum(x, 1) / width)[:, None]
    # Columns past the row's end are at no distance from the mean, though what was read for them is.
    centred = tl.where(inside, x - mean, 0.0)
    variance = (tl.sum(centred * centred, 1) / width)[:, None]
    rstd = tl.rsqrt(variance + eps) + 0.0 * variance  # NaN where the variance is infinite
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = centred * rstd
    if HAS_WEIGHT:
        y *= offset + tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["x_stride", "rows", "width"], do_not_specialize_on_alignment=["mean_ptr", "rstd_ptr"])
def _forward_wide_kernel(
    x_ptr, x_stride, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, rows, width, eps, offset,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    eps, offset = tl.cast(eps, tl.float32), tl.cast(offset, tl.float32)
    x_stride, width = aligned_size(x_stride, ALIGNED), aligned_size(width, ALIGNED)
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / width
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
        centred = tl.where(column < width, x - mean, 0.0)
        squares += centred * centred
    variance = tl.sum(squares, 0) / width
    rstd = tl.rsqrt(variance + eps) + 0.0 * variance  # NaN where the variance is infinite
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        y = (tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        if HAS_WEIGHT:
            y *= offset + tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["dy_stride", "x_stride", "rows", "width"],
    do_not_specialize_on_alignment=["mean_ptr", "rstd_ptr", "dw_ptr", "db_ptr"],
)
def _backward_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, rows, width, offset,
    HAS_WEIGHT: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, NEEDS_BIAS: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.cast(offset, tl.float32)
    dy_stride, x_stride, width = (
        aligned_size(dy_stride, ALIGNED),
        aligned_size(x_stride, ALIGNED),
        aligned_size(width, ALIGNED),
    )
    step = tl.num_programs(0) * ROWS
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    dw, db = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    for _ in range(tl.program_id(0) * ROWS, rows, step):
        mask = (row < rows) & inside
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        xhat = tl.where(inside, (x - mean) * rstd, 0.0)
        m = dy
        if HAS_WEIGHT:
            m *= offset + weight.to(tl.float32)
        dx = rstd * (m - (tl.sum(m, 1) / width)[:, None] - xhat * (tl.sum(m * xhat, 1) / width)[:, None])
        tl.store(dx_ptr + row * width + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEEDS_WEIGHT:
            dw += dy * xhat
        if NEEDS_BIAS:
            db += dy
        row += step
    column = tl.arange(0, BLOCK)
    part = tl.program_id(0).to(tl.int64) * width + column
    if NEEDS_WEIGHT:
        tl.store(dw_ptr + part, tl.sum(dw, 0), mask=column < width)
    if NEEDS_BIAS:
        tl.store(db_ptr + part, tl.sum(db, 0), mask=column < width)


@triton.jit(
    do_not_specialize=["dy_stride", "x_stride", "rows", "width"],
    do_not_specialize_on_alignment=["mean_ptr", "rstd_ptr", "dw_ptr", "db_ptr"],
)
def _backward_wide_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, rows, width, offset,
    HAS_WEIGHT: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, NEEDS_BIAS: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.cast(offset, tl.float32)
    dy_stride, x_stride, width = (
        aligned_size(dy_stride, ALIGNED),
        aligned_size(x_stride, ALIGNED),
        aligned_size(width, ALIGNED),
    )
    program = tl.program_id(0)
    for index in range(program, rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
        total, products = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < width
            m = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
            if HAS_WEIGHT:
                m *= offset + tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
            total += m
            products += m * ((x - mean) * rstd)
        mean_m, mean_mx = tl.sum(total, 0) / width, tl.sum(products, 0) / width
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < width
            dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
            xhat = (tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
            m = dy
            if HAS_WEIGHT:
                m *= offset + tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
            dx = rstd * (m - mean_m - xhat * mean_mx)
            tl.store(dx_ptr + row * width + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            # Each thread reads back what it wrote itself: both accesses have one layout.
            part = program.to(tl.int64) * width + column
            if NEEDS_WEIGHT:
                so_far = tl.where(row == program, 0.0, tl.load(dw_ptr + part, mask=mask, other=0.0))
                tl.store(dw_ptr + part, so_far + dy * xhat, mask=mask)
            if NEEDS_BIAS:
                so_far = tl.where(row == program, 0.0, tl.load(db_ptr + part, mask=mask, other=0.0))
                tl.store(db_ptr + part, so_far + dy, mask=mask)


def forward_triton(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, mean: Tensor, rstd: Tensor, eps: float,
    offset: float,
) -> None:  # fmt: skip
    rows, width = x.shape
    weight, bias = neighbours(weight), neighbours(bias)
    wide = width > WIDEST
    block_rows, block = (1, WALK) if wide else tile_shape(width)
    kernel = _forward_wide_kernel if wide else _forward_kernel
    launch(
        kernel,
        cdiv(rows, block_rows),
        (
            x,
            x.stride(0),
            x if weight is None else weight,
            x if bias is None else bias,
            y,
            mean,
            rstd,
            rows,
            width,
            eps,
            offset,
        ),
        warps(block_rows * block),
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        ALIGNED=eight_aligned(width, x, weight, bias),
        ROWS=block_rows,
        BLOCK=block,
    )


def backward_triton(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, dx: Tensor, dw: Tensor | None,
    db: Tensor | None, offset: float,
) -> None:  # fmt: skip
    rows, width = x.shape
    weight = neighbours(weight)
    wide = width > WIDEST_BACKWARD
    block_rows, block = (1, WALK) if wide else tile_shape(width)
    programs = min(cdiv(rows, block_rows), max(1, 2 * TILE // (block_rows * block)) * processors(x.device))
    partial = torch.empty(2, programs, width, dtype=torch.float32, device=x.device)
    kernel = _backward_wide_kernel if wide else _backward_kernel
    launch(
        kernel,
        programs,
        (
            dy,
            dy.stride(0),
            x,
            x.stride(0),
            x if weight is None else weight,
            mean,
            rstd,
            dx,
            partial[0],
            partial[1],
            rows,
            width,
            offset,
        ),
        warps(block_rows * block),
        HAS_WEIGHT=weight is not None,
        NEEDS_WEIGHT=dw is not None,
        NEEDS_BIAS=db is not None,
        ALIGNED=eight_aligned(width, dy, x, weight),
        ROWS=block_rows,
        BLOCK=block,
    )
    for sums, out in ((partial[0], dw), (partial[1], db)):
        if out is not None:
            sum_partials(sums, out)
