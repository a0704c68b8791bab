"""Triton form of `tile_gradient`: one program owns one block of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tile_statistics_triton import aligned, logits_and_slope, readable_columns, row_start, temperature_arguments
from .transform import LogitTransform

_BLOCK = 4096


@triton.jit(
    do_not_specialize=["tile_stride", "out_stride", "first_column", "n_columns"],
    do_not_specialize_on_alignment=[
        "bias_ptr", "target_ptr", "lse_ptr", "logprob_ptr", "entropy_ptr", "dlogprob_ptr", "dentropy_ptr", "dlse_ptr",
        "dlogit_ptr", "column_weights_ptr", "probability_scale_ptr", "inv_t_ptr",
    ],
)  # fmt: skip
def _gradient_kernel(
    tile_ptr,
    tile_stride,
    bias_ptr,
    target_ptr,
    out_ptr,
    out_stride,
    lse_ptr,
    logprob_ptr,
    entropy_ptr,
    dlogprob_ptr,
    dentropy_ptr,
    dlse_ptr,
    dlogit_ptr,
    column_weights_ptr,
    probability_scale_ptr,
    first_column,
    n_columns,
    scale,
    softcap,
    inv_t,
    inv_t_ptr,
    ALIGNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DENTROPY: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_DLOGIT: tl.constexpr,
    HAS_COLUMN_WEIGHTS: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    FROM_PROBABILITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    inv_t = tl.cast(inv_t, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    if ROW_TEMPERATURE:
        inv_t = tl.load(inv_t_ptr + row)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    readable = readable_columns(n_columns, ALIGNED)
    row_ptr = row_start(tile_ptr, row, tile_stride, ALIGNED)
    lse = tl.load(lse_ptr + row)
    local = tl.load(target_ptr + row) - first_column
    is_target = offsets == tl.minimum(tl.maximum(local, -1), n_columns).to(tl.int32)
    if FROM_PROBABILITY:
        p = tl.load(row_ptr + offsets, mask=offsets < readable, other=0.0).to(tl.float32)
        p *= tl.load(probability_scale_ptr + row)
        p = tl.where(is_target, tl.exp(tl.load(logprob_ptr + row)), p)
        logp = tl.where(p > 0, tl.log(tl.where(p > 0, p, 1.0)), 0.0)
        slope = scale * inv_t
        if HAS_SOFTCAP:
            capped = (logp + lse) / (inv_t * softcap)
            slope = slope * (1.0 - capped * capped)
    else:
        z, slope = logits_and_slope(
            row_ptr, bias_ptr, offsets, readable, n_columns, scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP
        )
        logp = z - lse
        p = tl.exp(logp)
    a = tl.load(dlogprob_ptr + row)
    active = a != 0.0
    gradient = tl.where(is_target, 1.0 - p, -p) * a
    if HAS_DENTROPY:
        information = tl.where(p > 0, p * (logp + tl.load(entropy_ptr + row)), 0.0)
        h = tl.load(dentropy_ptr + row)
        active |= h != 0.0
        gradient -= h * information
    if HAS_DLSE:
        to_lse = tl.load(dlse_ptr + row)
        active |= to_lse != 0.0
        gradient += to_lse * p
    if HAS_DLOGIT:
        each = tl.load(dlogit_ptr + row)
        active |= each != 0.0
        if HAS_COLUMN_WEIGHTS:
            each *= tl.load(column_weights_ptr + offsets, mask=offsets < n_columns, other=0.0).to(tl.float32)
        gradient += each
    gradient = tl.where(active, gradient * slope, 0.0)
    out_row = row_start(out_ptr, row, out_stride, ALIGNED)
    tl.store(out_row + offsets, gradient.to(out_ptr.dtype.element_ty), mask=offsets < readable)


def tile_gradient_triton(
    tile: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    logprob: Tensor,
    entropy: Tensor | None,
    dlogprob: Tensor,
    dentropy: Tensor | None,
    dlse: Tensor | None,
    dlogit: Tensor | None,
    column_weights: Tensor | None,
    transform: LogitTransform,
    out: Tensor,
    first_column: int,
    probability_scale: Tensor | None,
) -> None:
    block = _BLOCK if tile.is_cuda else 128
    with torch.cuda.device_of(tile):
        _gradient_kernel[(tile.shape[0], triton.cdiv(tile.shape[1], block))](
            tile,
            tile.stride(0),
            lse if bias is None else bias,
            target,
            out,
            out.stride(0),
            lse,
            logprob,
            lse if entropy is None else entropy,
            dlogprob,
            lse if dentropy is None else dentropy,
            lse if dlse is None else dlse,
            lse if dlogit is None else dlogit,
            lse if column_weights is None else column_weights,
            lse if probability_scale is None else probability_scale,
            first_column,
            tile.shape[1],
            transform.scale,
            transform.softcap or 1.0,
            *temperature_arguments(transform, lse),
            ALIGNED=aligned(tile, out),
            HAS_BIAS=bias is not None,
            HAS_SOFTCAP=transform.softcap is not None,
            HAS_DENTROPY=dentropy is not None,
            HAS_DLSE=dlse is not None,
            HAS_DLOGIT=dlogit is not None,
            HAS_COLUMN_WEIGHTS=column_weights is not None,
            ROW_TEMPERATURE=isinstance(transform.temperature, Tensor),
            FROM_PROBABILITY=probability_scale is not None,
            BLOCK=block,
            num_warps=8,
        )
