"""Triton form of `tile_statistics`: one program owns one row, and everything written for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tile_statistics import Emit, RowState
from .transform import LogitTransform

# Of the shapes tried on an H200, the one near the best for fp32 and for bf16 logits, with and without `emit`.
_BLOCK = 2048
_WARPS = 16

# A row is summed relative to the maximum of its first block. Where a later logit exceeds that by more, the row is
# summed again relative to its true maximum: e^(2 * 40) is far from overflow, 40 roundings of an fp32 far from visible.
_HEADROOM = tl.constexpr(40.0)


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
def row_start(ptr, row, stride, ALIGNED: tl.constexpr):
    # Rows of an aligned tile begin on 8-element boundaries: told so, the compiler moves 16 bytes at a time.
    if ALIGNED:
        stride = stride // 8 * 8
    return ptr + row * stride


@triton.jit
def readable_columns(n_columns, ALIGNED: tl.constexpr):
    # An aligned tile may be read, and written, up to the 8-element boundary: the mask is then uniform over 16 bytes.
    if ALIGNED:
        n_columns = (n_columns + 7) // 8 * 8
    return n_columns


@triton.jit
def logits_and_slope(
    row_ptr, bias_ptr, offsets, readable, n_columns, scale, softcap, inv_t,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    raw = tl.load(row_ptr + offsets, mask=offsets < readable, other=0.0).to(tl.float32)
    if HAS_BIAS:
        raw += tl.load(bias_ptr + offsets, mask=offsets < n_columns, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        t = capped_tanh(raw * (scale / softcap))
        z = t * (softcap * inv_t)
        slope = (1.0 - t * t) * (scale * inv_t)
    else:
        z = raw * (scale * inv_t)
        slope = scale * inv_t
    return tl.where(offsets < n_columns, z, -float("inf")), slope


@triton.jit
def _row_sums(
    row_ptr, bias_ptr, column_weights_ptr, out_row, reference, readable, n_columns, scale, softcap, inv_t,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, SUM_SQ: tl.constexpr,
    MEAN: tl.constexpr, COLUMNS: tl.constexpr, ARGMAX: tl.constexpr, EMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Sums per lane, relative to `reference`: nothing crosses the program until the row has been read.
    highest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    logits = tl.zeros((BLOCK,), tl.float32)
    columns = tl.zeros((BLOCK,), tl.float32)
    best = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n_columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        z, slope = logits_and_slope(
            row_ptr, bias_ptr, offsets, readable, n_columns, scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP
        )
        below = z - reference
        e = tl.exp(below)
        if EMIT == 1:
            tl.store(out_row + offsets, (e * slope).to(out_row.dtype.element_ty), mask=offsets < readable)
        if EMIT == 2:
            tl.store(out_row + offsets, e.to(out_row.dtype.element_ty), mask=offsets < readable)
        total += e
        if ARGMAX:
            best = tl.where(z > highest, offsets, best)
        highest = tl.maximum(highest, z)
        if ENTROPY:
            weighted += tl.where(e > 0, e * below, 0.0)
        if SUM_SQ:
            squares += e * e
        if MEAN:
            logits += tl.where(offsets < n_columns, z, 0.0)
        if COLUMNS:
            weight = tl.load(column_weights_ptr + offsets, mask=offsets < n_columns, other=0.0).to(tl.float32)
            columns += tl.where(weight == 0, 0.0, z * weight)
    maximum = tl.max(highest, 0)
    return (
        maximum,
        tl.sum(total, 0),
        tl.sum(weighted, 0),
        tl.sum(squares, 0),
        tl.sum(logits, 0),
        tl.sum(columns, 0),
        # Ties go to the first column.
        tl.min(tl.where(highest == maximum, best, n_columns), 0),
    )


# Sizes and the alignment of per-row numbers are run-time facts: a kernel is compiled once, not once a length.
@triton.jit(
    do_not_specialize=["tile_stride", "out_stride", "first_column", "n_columns"],
    do_not_specialize_on_alignment=[
        "bias_ptr", "target_ptr", "max_ptr", "sum_exp_ptr", "target_logit_ptr", "weighted_ptr", "sum_sq_ptr",
        "sum_logits_ptr", "sum_columns_ptr", "argmax_ptr", "gradient_scale_ptr", "column_weights_ptr", "inv_t_ptr",
    ],
)  # fmt: skip
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
    sum_columns_ptr,
    argmax_ptr,
    gradient_scale_ptr,
    column_weights_ptr,
    first_column,
    n_columns,
    scale,
    softcap,
    inv_t,
    inv_t_ptr,
    ALIGNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    SUM_SQ: tl.constexpr,
    MEAN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ARGMAX: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    EMIT: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # torch.compile hands Python floats over as fp64 on some versions; the arithmetic is fp32.
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    inv_t = tl.cast(inv_t, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    if ROW_TEMPERATURE:
        inv_t = tl.load(inv_t_ptr + row)
    row_ptr = row_start(tile_ptr, row, tile_stride, ALIGNED)
    readable = readable_columns(n_columns, ALIGNED)
    # 64-bit targets clamped to this tile: -1 before it, n_columns after it. Comparisons below are 32-bit.
    local64 = tl.load(target_ptr + row) - first_column
    local = tl.minimum(tl.maximum(local64, -1), n_columns).to(tl.int32)

    first, _first_slope = logits_and_slope(
        row_ptr, bias_ptr, tl.arange(0, BLOCK), readable, n_columns, scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP
    )
    reference = finite(tl.max(first, 0))
    out_row = row_start(out_ptr, row, out_stride, ALIGNED)
    # What is written is relative to `reference` too. fp16 has no room for that: there the row is written by a second
    # visit, relative to its lse.
    EARLY: tl.constexpr = 0 if NORMALISE else EMIT
    highest, total, weighted, squares, logits, columns, best = _row_sums(
        row_ptr, bias_ptr, column_weights_ptr, out_row, reference, readable, n_columns, scale, softcap, inv_t,
        HAS_BIAS, HAS_SOFTCAP, ENTROPY, SUM_SQ, MEAN, COLUMNS, ARGMAX, EARLY, BLOCK,
    )  # fmt: skip
    if (highest - reference > _HEADROOM) | (highest < reference):
        reference = finite(highest)
        highest, total, weighted, squares, logits, columns, best = _row_sums(
            row_ptr, bias_ptr, column_weights_ptr, out_row, reference, readable, n_columns, scale, softcap, inv_t,
            HAS_BIAS, HAS_SOFTCAP, ENTROPY, SUM_SQ, MEAN, COLUMNS, ARGMAX, EARLY, BLOCK,
        )  # fmt: skip

    old_max = tl.load(max_ptr + row)
    old_sum = tl.load(sum_exp_ptr + row)
    m = tl.maximum(old_max, highest)
    shift = reference - finite(m)
    rescale = tl.exp(shift)
    old_shift = difference(old_max, m)
    old_rescale = tl.exp(old_shift)
    s = old_sum * old_rescale + total * rescale
    tl.store(max_ptr + row, m)
    tl.store(sum_exp_ptr + row, s)
    if ENTROPY:
        old = old_rescale * (tl.load(weighted_ptr + row) + old_shift * old_sum)
        tl.store(weighted_ptr + row, old + rescale * (weighted + shift * total))
    if SUM_SQ:
        old = tl.load(sum_sq_ptr + row) * old_rescale * old_rescale
        tl.store(sum_sq_ptr + row, old + squares * rescale * rescale)
    if MEAN:
        tl.store(sum_logits_ptr + row, tl.load(sum_logits_ptr + row) + logits)
    if COLUMNS:
        tl.store(sum_columns_ptr + row, tl.load(sum_columns_ptr + row) + columns)
    if ARGMAX:
        tl.store(argmax_ptr + row, best.to(tl.int64) + first_column, mask=highest > old_max)
    one = tl.minimum(tl.maximum(local, 0), n_columns - 1) + tl.arange(0, 1)
    found, found_slope = logits_and_slope(
        row_ptr, bias_ptr, one, n_columns, n_columns, scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP
    )
    in_tile = (local >= 0) & (local < n_columns)
    if in_tile:
        tl.store(target_logit_ptr + row + tl.arange(0, 1), found)

    if EMIT != 0:
        if NORMALISE:
            reference = finite(reference + tl.log(total))
            _row_sums(
                row_ptr, bias_ptr, column_weights_ptr, out_row, reference, readable, n_columns, scale, softcap, inv_t,
                HAS_BIAS, HAS_SOFTCAP, False, False, False, False, False, EMIT, BLOCK,
            )  # fmt: skip
            total = tl.where(total > 0.0, 1.0, total)
        if EMIT == 1:
            # d logprob / draw = -(e - total [v = y]) slope / total. The target's entry is formed in fp32 and rounded
            # once; the row's factor takes that rounding back, since one entry often outweighs all the others together.
            entry = (tl.exp(found - reference) - total) * found_slope
            rounded = entry.to(out_ptr.dtype.element_ty).to(tl.float32)
            lost = tl.where((rounded != 0.0) & in_tile, entry / tl.where(rounded != 0.0, rounded, 1.0), 1.0)
            tl.store(gradient_scale_ptr + row + tl.arange(0, 1), -lost / total)
            tl.debug_barrier()
            if in_tile:
                tl.store(out_row + one, rounded.to(out_ptr.dtype.element_ty))
        else:
            tl.store(gradient_scale_ptr + row, 1.0 / total)


def aligned(*tensors: Tensor) -> bool:
    """Whether rows begin on 8-element boundaries (16 bytes, 32 for fp32) and leave room up to the next one."""
    return all(
        t.stride(0) % 8 == 0 and t.data_ptr() % (8 * t.element_size()) == 0 and t.stride(0) >= -(-t.shape[1] // 8) * 8
        for t in tensors
    )


def temperature_arguments(transform: LogitTransform, unused: Tensor) -> tuple[float, Tensor]:
    """`inv_t, inv_t_ptr`: one inverse temperature, or one per row."""
    inverse = transform.inverse_temperature
    return (1.0, inverse.to(torch.float32)) if isinstance(inverse, Tensor) else (inverse, unused)


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
    column_weights: Tensor | None,
) -> None:
    unused = state.max
    written = tile if out is None else out
    with torch.cuda.device_of(tile):
        _fold_kernel[(tile.shape[0],)](
            tile,
            tile.stride(0),
            unused if bias is None else bias,
            target,
            written,
            written.stride(0),
            state.max,
            state.sum_exp,
            state.target,
            unused if state.weighted is None else state.weighted,
            unused if state.sum_sq is None else state.sum_sq,
            unused if state.sum_logits is None else state.sum_logits,
            unused if state.sum_columns is None else state.sum_columns,
            unused if state.argmax is None else state.argmax,
            state.gradient_scale,
            unused if column_weights is None else column_weights,
            first_column,
            tile.shape[1],
            transform.scale,
            transform.softcap or 1.0,
            *temperature_arguments(transform, unused),
            ALIGNED=aligned(tile, written),
            HAS_BIAS=bias is not None,
            HAS_SOFTCAP=transform.softcap is not None,
            ENTROPY=state.weighted is not None,
            SUM_SQ=state.sum_sq is not None,
            MEAN=state.sum_logits is not None,
            COLUMNS=state.sum_columns is not None,
            ARGMAX=state.argmax is not None,
            ROW_TEMPERATURE=isinstance(transform.temperature, Tensor),
            EMIT=int(emit),
            NORMALISE=written.dtype == torch.float16,
            BLOCK=_BLOCK if tile.is_cuda else 128,
            num_warps=_WARPS,
        )
