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
def finite(maximum):
    # Something that -inf may be subtracted from: -inf - -inf is no number.
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def difference(lower, higher):
    # `lower - higher`; 0 where nothing has been seen yet, and the sums that it rescales are 0.
    return tl.where(lower == -float("inf"), 0.0, lower - finite(higher))


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
    # One running maximum and sum per lane: nothing is reduced across the program until the row has been read.
    lane_max = tl.full((BLOCK,), -float("inf"), tl.float32)
    lane_sum = tl.zeros((BLOCK,), tl.float32)
    if ENTROPY:
        lane_weighted = tl.zeros((BLOCK,), tl.float32)
    if SUM_SQ:
        lane_sq = tl.zeros((BLOCK,), tl.float32)
    if MEAN:
        lane_logits = tl.zeros((BLOCK,), tl.float32)
    if TOP1:
        lane_before = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, n_columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < n_columns
        z, _ = logits_and_slope(row_ptr, bias_ptr, offsets, mask, scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP)
        if MEAN:
            lane_logits += tl.where(mask, z, 0.0)
        z = tl.where(mask, z, -float("inf"))
        if TOP1:
            lane_before = tl.maximum(lane_before, tl.where(offsets < local, z, -float("inf")))
        highest = tl.maximum(lane_max, z)
        shift = difference(lane_max, highest)
        rescale = tl.exp(shift)
        below = z - finite(highest)
        e = tl.exp(below)
        if ENTROPY:
            lane_weighted = rescale * (lane_weighted + shift * lane_sum) + tl.where(e > 0, e * below, 0.0)
        if SUM_SQ:
            lane_sq = lane_sq * rescale * rescale + e * e
        lane_sum = lane_sum * rescale + e
        lane_max = highest

    old_max = tl.load(max_ptr + row)
    old_sum = tl.load(sum_exp_ptr + row)
    m = tl.maximum(old_max, tl.max(lane_max, 0))
    shift = difference(lane_max, m)
    rescale = tl.exp(shift)
    old_shift = difference(old_max, m)
    old_rescale = tl.exp(old_shift)
    s = old_sum * old_rescale + tl.sum(lane_sum * rescale, 0)
    if ENTROPY:
        weighted = old_rescale * (tl.load(weighted_ptr + row) + old_shift * old_sum)
        weighted += tl.sum(rescale * (lane_weighted + shift * lane_sum), 0)
    if SUM_SQ:
        sum_sq = tl.load(sum_sq_ptr + row) * old_rescale * old_rescale + tl.sum(lane_sq * rescale * rescale, 0)
    if MEAN:
        sum_logits = tl.load(sum_logits_ptr + row) + tl.sum(lane_logits, 0)
    if TOP1:
        before = tl.maximum(tl.load(max_before_ptr + row), tl.max(lane_before, 0))

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
