"""Triton form of `tile_statistics`: one program owns one row, and everything written for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tile_statistics import Emit, RowState
from .transform import LogitTransform

_BLOCK = 8192


@triton.jit
def capped_tanh(x):
    # Through exp(-2|x|) in (0, 1]: no overflow, and odd in x to the last bit.
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def logits_and_slope(
    row_ptr, bias_ptr, offsets, mask, scale, softcap, inv_t, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    raw = tl.load(row_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        raw += tl.load(bias_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        t = capped_tanh(raw * (scale / softcap))
        z = t * (softcap * inv_t)
        slope = (1.0 - t * t) * (scale * inv_t)
    else:
        z = raw * (scale * inv_t)
        slope = scale * inv_t
    return z, slope


@triton.jit(do_not_specialize=["tile_stride", "out_stride", "first_column", "n_columns"])
def _fold_kernel(
    tile_ptr,
    tile_stride,
    bias_ptr,
    target_ptr,
    out_ptr,
    out_stride,
    max_ptr,
    sum_exp_ptr,
    target_logit_ptr,
    weighted_ptr,
    sum_sq_ptr,
    sum_logits_ptr,
    max_before_ptr,
    first_column,
    n_columns,
    scale,
    softcap,
    inv_t,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    SUM_SQ: tl.constexpr,
    MEAN: tl.constexpr,
    TOP1: tl.constexpr,
    EMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # torch.compile hands Python floats over as fp64 on some versions; the arithmetic is fp32.
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    inv_t = tl.cast(inv_t, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = tile_ptr + row * tile_stride
    local = tl.load(target_ptr + row) - first_column
    m = tl.load(max_ptr + row)
    s = tl.load(sum_exp_ptr + row)
    if ENTROPY:
        weighted = tl.load(weighted_ptr + row)
    if SUM_SQ:
        sum_sq = tl.load(sum_sq_ptr + row)
    if MEAN:
        sum_logits = tl.load(sum_logits_ptr + row)
    if TOP1:
        before = tl.load(max_before_ptr + row)

    for start in range(0, n_columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < n_columns
        z, _ = logits_and_slope(row_ptr, bias_ptr, offsets, mask, scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP)
        if MEAN:
            sum_logits += tl.sum(tl.where(mask, z, 0.0), 0)
        z = tl.where(mask, z, -float("inf"))
        if TOP1:
            before = tl.maximum(before, tl.max(tl.where(offsets < local, z, -float("inf")), 0))
        highest = tl.maximum(m, tl.max(z, 0))
        # A row that has only seen -inf has nothing to rescale, and -inf - -inf is no number.
        empty = m == -float("inf")
        shift = tl.where(empty, 0.0, m - highest)
        rescale = tl.where(empty, 0.0, tl.exp(shift))
        below = z - highest
        e = tl.exp(below)
        if ENTROPY:
            weighted = rescale * (weighted + shift * s) + tl.sum(tl.where(e > 0, e * below, 0.0), 0)
        if SUM_SQ:
            sum_sq = sum_sq * rescale * rescale + tl.sum(e * e, 0)
        s = s * rescale + tl.sum(e, 0)
        m = highest

    tl.store(max_ptr + row, m)
    tl.store(sum_exp_ptr + row, s)
    if ENTROPY:
        tl.store(weighted_ptr + row, weighted)
    if SUM_SQ:
        tl.store(sum_sq_ptr + row, sum_sq)
    if MEAN:
        tl.store(sum_logits_ptr + row, sum_logits)
    if TOP1:
        tl.store(max_before_ptr + row, before)
    if (local >= 0) & (local < n_columns):
        one = local + tl.arange(0, 1)
        z, _ = logits_and_slope(row_ptr, bias_ptr, one, one >= 0, scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP)
        tl.store(target_logit_ptr + row + tl.arange(0, 1), z)

    if EMIT != 0:
        lse = m + tl.log(s)
        # `out` may be the tile: no thread may write before every thread has read the target's logit above.
        tl.debug_barrier()
        for start in range(0, n_columns, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < n_columns
            z, slope = logits_and_slope(row_ptr, bias_ptr, offsets, mask, scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP)
            p = tl.exp(z - lse)
            if EMIT == 1:
                p = tl.where(offsets == local, 1.0 - p, -p) * slope
            tl.store(out_ptr + row * out_stride + offsets, p.to(out_ptr.dtype.element_ty), mask=mask)


def fold_tile_triton(
    tile: Tensor,
    bias: Tensor | None,
    target: Tensor,
    state: RowState,
    transform: LogitTransform,
    *,
    first_column: int,
    emit: Emit,
    out: Tensor | None,
) -> None:
    unused = state.max
    with torch.cuda.device_of(tile):
        _fold_kernel[(tile.shape[0],)](
            tile,
            tile.stride(0),
            unused if bias is None else bias,
            target,
            tile if out is None else out,
            0 if out is None else out.stride(0),
            state.max,
            state.sum_exp,
            state.target,
            unused if state.weighted is None else state.weighted,
            unused if state.sum_sq is None else state.sum_sq,
            unused if state.sum_logits is None else state.sum_logits,
            unused if state.max_before_target is None else state.max_before_target,
            first_column,
            tile.shape[1],
            transform.scale,
            transform.softcap or 1.0,
            transform.inverse_temperature,
            HAS_BIAS=bias is not None,
            HAS_SOFTCAP=transform.softcap is not None,
            ENTROPY=state.weighted is not None,
            SUM_SQ=state.sum_sq is not None,
            MEAN=state.sum_logits is not None,
            TOP1=state.max_before_target is not None,
            EMIT=int(emit),
            BLOCK=_BLOCK if tile.is_cuda else min(_BLOCK, 128),
            num_warps=16,
        )
