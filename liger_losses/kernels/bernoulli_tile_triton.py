"""Triton form of `bernoulli_tile`: one program owns one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tile_statistics_triton import (
    aligned,
    capped_tanh,
    logits_and_slope,
    readable_columns,
    row_start,
    temperature_arguments,
)
from .transform import LogitTransform

_BLOCK = 2048
_WARPS = 16


@triton.jit
def _sigmoid(z):
    e = tl.exp(-tl.abs(z))
    return tl.where(z < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _softplus(z):
    # log(1 + e) of an e far below the rounding of 1 is e: over a large label space those add up.
    e = tl.exp(-tl.abs(z))
    u = 1.0 + e
    return tl.maximum(z, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit(
    do_not_specialize=["tile_stride", "out_stride", "n_columns", "n_positives"],
    do_not_specialize_on_alignment=[
        "bias_ptr", "positives_ptr", "at_positives_ptr", "total_ptr", "factor_ptr", "inv_t_ptr",
    ],
)  # fmt: skip
def _bernoulli_kernel(
    tile_ptr,
    tile_stride,
    bias_ptr,
    positives_ptr,
    at_positives_ptr,
    total_ptr,
    out_ptr,
    out_stride,
    factor_ptr,
    n_columns,
    n_positives,
    scale,
    softcap,
    inv_t,
    inv_t_ptr,
    ALIGNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    TOTAL: tl.constexpr,
    GRADIENT: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_POSITIVES: tl.constexpr,
):
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    inv_t = tl.cast(inv_t, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    if ROW_TEMPERATURE:
        inv_t = tl.load(inv_t_ptr + row)
    factor = 1.0
    if HAS_FACTOR:
        factor = tl.load(factor_ptr + row)
    row_ptr = row_start(tile_ptr, row, tile_stride, ALIGNED)
    out_row = row_start(out_ptr, row, out_stride, ALIGNED)
    readable = readable_columns(n_columns, ALIGNED)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        z, slope = logits_and_slope(
            row_ptr, bias_ptr, offsets, readable, n_columns, scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP
        )
        if TOTAL:
            sums += tl.where(offsets < n_columns, _softplus(z), 0.0)
        if GRADIENT:
            gradient = -_sigmoid(z) * slope * factor
            tl.store(out_row + offsets, gradient.to(out_ptr.dtype.element_ty), mask=offsets < readable)
    if TOTAL:
        total = -tl.sum(sums, 0)
    tl.debug_barrier()
    for start in range(0, n_positives, BLOCK_POSITIVES):
        places = start + tl.arange(0, BLOCK_POSITIVES)
        column = tl.load(positives_ptr + row * n_positives + places, mask=places < n_positives, other=-1)
        raw = tl.load(at_positives_ptr + row * n_positives + places, mask=column >= 0, other=0.0).to(tl.float32)
        if HAS_BIAS:
            raw += tl.load(bias_ptr + column, mask=column >= 0, other=0.0).to(tl.float32)
        slope = scale * inv_t
        if HAS_SOFTCAP:
            t = capped_tanh(raw * (scale / softcap))
            z = t * (softcap * inv_t)
            slope = (1.0 - t * t) * slope
        else:
            z = raw * slope
        if TOTAL:
            total += tl.sum(tl.where(column >= 0, z, 0.0), 0)
        if GRADIENT:
            entry = _sigmoid(-z) * slope * factor
            tl.store(out_row + column, entry.to(out_ptr.dtype.element_ty), mask=column >= 0)
    if TOTAL:
        tl.store(total_ptr + row, tl.load(total_ptr + row) + total)


def bernoulli_tile_triton(
    tile: Tensor,
    bias: Tensor | None,
    columns: Tensor,
    at_positives: Tensor,
    transform: LogitTransform,
    total: Tensor | None,
    out: Tensor | None,
    factor: Tensor | None,
) -> None:
    written = tile if out is None else out
    with torch.cuda.device_of(tile):
        _bernoulli_kernel[(tile.shape[0],)](
            tile,
            tile.stride(0),
            tile if bias is None else bias,
            columns,
            at_positives,
            tile if total is None else total,
            written,
            written.stride(0),
            tile if factor is None else factor,
            tile.shape[1],
            columns.shape[1],
            transform.scale,
            transform.softcap or 1.0,
            *temperature_arguments(transform, tile),
            ALIGNED=aligned(tile, written),
            HAS_BIAS=bias is not None,
            HAS_SOFTCAP=transform.softcap is not None,
            ROW_TEMPERATURE=isinstance(transform.temperature, Tensor),
            TOTAL=total is not None,
            GRADIENT=out is not None,
            HAS_FACTOR=factor is not None,
            BLOCK=_BLOCK if tile.is_cuda else 128,
            BLOCK_POSITIVES=16,
            num_warps=_WARPS,
        )
