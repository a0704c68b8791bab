"""Triton form of `divergence_tile`: one program owns one row of both tiles, and what is written for it.

A row of two fp32 tiles is 8 bytes an element each time it is visited, so visits are what costs. The first one reads the
log-sum-exps. The second writes the gradient where `S` is known by then (forward and reverse KL, Jeffreys, cosine,
squared error). JSD sums `S` in the first about a guess of the normalisers' ratio, and mostly knows it then; the
others sum it in a visit between the two. Every visit begins where the one before it ended: of a
row's last blocks some are still in the second-level cache.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .divergence_terms_triton import COSINE, FORMS, HALF_JSD, JEFFREYS, JSD, LN2, LOG2E, MSE, entry, mixture_total
from .divergence_tile import NO_DIRECTION, Columns, DivergenceState, TeacherTile
from .divergence_visits_triton import both_sides, row_maxima, row_sums, visit
from .tile_statistics_triton import (
    aligned,
    finite,
    readable_columns,
    row_start,
    temperature_arguments,
)
from .transform import LogitTransform

_OF_LOGITS = ("cosine", "mse")
_NO_DIRECTION = tl.constexpr(NO_DIRECTION)
# Of the shapes tried on an H200 (blocks of 512 to 8,192, 2 to 32 warps, 1 to 4 stages) the one near the best of each
# kind of both logits dtypes. Without stages JSD took 1.1 times as long with fp32 logits, 1.35 times with bf16 ones.
_BLOCK = 2048
_GRADIENT_BLOCK, _GRADIENT_WARPS = 4096, 16
_HEADROOM = tl.constexpr(2.0**40)  # see tile_statistics_triton


@triton.jit
def _outside(total):
    # A sum relative to a logit of the row's, which counts as 1 in it, where others are far above; or to none, because
    # nothing was found where one was looked for. NaN is outside too.
    return ~((total >= 0.5) & (total < _HEADROOM))


@triton.jit
def _share(sum_s, sum_t, beta):
    # The teacher's part of the mixture, relative to the student's, from both normalisers; some number if they are none.
    ratio = sum_s / sum_t
    return beta / (1.0 - beta) * tl.where((ratio > 1e-6) & (ratio < 1e6), ratio, 1.0)


@triton.jit(
    do_not_specialize=["s_stride", "t_stride", "out_stride", "n_columns", "n_student", "n_teacher"],
    do_not_specialize_on_alignment=[
        "s_bias_ptr", "t_bias_ptr", "target_ptr", "lse_s_ptr", "lse_t_ptr", "lse_h_ptr", "total_ptr", "value_ptr",
        "found_ptr", "entropy_ptr", "t_entropy_ptr", "inv_t_ptr",
    ],
)  # fmt: skip
def _divergence_kernel(
    s_ptr, s_stride, s_bias_ptr, t_ptr, t_stride, t_bias_ptr, out_ptr, out_stride, target_ptr, lse_s_ptr, lse_t_ptr,
    lse_h_ptr, total_ptr, value_ptr, found_ptr, entropy_ptr, t_entropy_ptr, n_columns, n_student, n_teacher,
    scale, softcap, inv_t, inv_t_ptr, inv_d, t_scale, t_softcap, t_inv, parameter, weight, hard_weight,
    ALIGNED: tl.constexpr, T_ALIGNED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr, T_HAS_BIAS: tl.constexpr, T_HAS_SOFTCAP: tl.constexpr, PROBABILITIES: tl.constexpr,
    FORM: tl.constexpr, SOFT: tl.constexpr, HARD: tl.constexpr, LABEL: tl.constexpr, SEPARATE_HARD: tl.constexpr,
    ENTROPY: tl.constexpr, CROSS: tl.constexpr, OF_LOGITS: tl.constexpr, EMIT: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # torch.compile hands Python floats over as fp64 on some versions; the arithmetic is fp32.
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    inv_t = tl.cast(inv_t, tl.float32)
    inv_d = tl.cast(inv_d, tl.float32)
    t_scale = tl.cast(t_scale, tl.float32)
    t_softcap = tl.cast(t_softcap, tl.float32)
    t_inv = tl.cast(t_inv, tl.float32)
    parameter = tl.cast(parameter, tl.float32)
    weight = tl.cast(weight, tl.float32)
    hard_weight = tl.cast(hard_weight, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    if ROW_TEMPERATURE:
        inv_t = tl.load(inv_t_ptr + row)
    s_row = row_start(s_ptr, row, s_stride, ALIGNED)
    t_row = row_start(t_ptr, row, t_stride, T_ALIGNED)
    out_row = row_start(out_ptr, row, out_stride, ALIGNED)
    readable_s = readable_columns(n_columns, ALIGNED)
    readable_t = readable_columns(n_teacher, T_ALIGNED)
    n_all = tl.maximum(tl.maximum(n_student, n_teacher), n_columns)
    n_full = tl.minimum(tl.minimum(n_student, n_teacher), n_columns) // BLOCK * BLOCK
    local = tl.minimum(tl.maximum(tl.load(target_ptr + row), -1), n_columns).to(tl.int32)

    # The logits that are compared come in base 2, unless it is they themselves that a divergence is of.
    BASE: tl.constexpr = LOG2E if OF_LOGITS else 1.0
    z, _slope, s, t = both_sides(
        s_row, s_bias_ptr, t_row, t_bias_ptr, tl.arange(0, BLOCK), readable_s, readable_t, n_columns, n_student,
        n_teacher, scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
        HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, True,
    )  # fmt: skip
    # The target is where a peak is likely.
    one = tl.minimum(tl.maximum(local, 0), n_columns - 1) + tl.arange(0, 1)
    found, _slope, found_s, found_t = both_sides(
        s_row, s_bias_ptr, t_row, t_bias_ptr, one, n_columns, n_teacher, n_columns, n_student, n_teacher,
        scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
        HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, True,
    )  # fmt: skip
    target_s = tl.max(found_s * BASE, 0)
    target_t = tl.max(found_t * BASE, 0)
    ref_s = finite(tl.maximum(tl.max(s * BASE, 0), target_s))
    ref_t = finite(tl.maximum(tl.max(t * BASE, 0), target_t))
    ref_h = finite(tl.maximum(tl.max(z, 0), tl.max(found, 0)))
    # JSD's S is summed in the first visit, about a guess of the ratio of the normalisers: that of the first block and
    # the target.
    MIXED: tl.constexpr = EMIT and ((FORM == JSD) or (FORM == HALF_JSD))  # noqa: SIM109
    kappa = 1.0
    if MIXED:
        beyond = tl.where(local >= BLOCK, 1.0, 0.0)
        kappa = _share(
            tl.sum(tl.exp2(s - ref_s), 0) + beyond * tl.exp2(target_s - ref_s),
            tl.sum(tl.exp2(t - ref_t), 0) + beyond * tl.exp2(target_t - ref_t),
            parameter,
        )
    sum_s, sum_t, sum_h, first, c1, c2, c3, c4, entropy_s, entropy_t = row_sums(
        s_row, s_bias_ptr, t_row, t_bias_ptr, ref_s, ref_t, ref_h, readable_s, readable_t, n_columns, n_student,
        n_teacher, n_full, n_all, kappa, scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
        HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, SEPARATE_HARD, CROSS, MIXED, ENTROPY,
        FORM == COSINE, BASE, BLOCK, STAGES,
    )  # fmt: skip
    again = _outside(sum_s) | _outside(sum_t)
    if SEPARATE_HARD:
        again = again | _outside(sum_h)
    if again:
        high_s, high_t, high_h = row_maxima(
            s_row, s_bias_ptr, t_row, t_bias_ptr, readable_s, readable_t, n_columns, n_student, n_teacher, n_all,
            scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
            HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, BASE, BLOCK,
        )  # fmt: skip
        if MIXED:
            moved = finite(high_s) - ref_s - (finite(high_t) - ref_t)
            kappa = _share(sum_s, sum_t * tl.exp2(moved), parameter)
        ref_s = finite(high_s)
        ref_t = finite(high_t)
        ref_h = finite(high_h)
        sum_s, sum_t, sum_h, first, c1, c2, c3, c4, entropy_s, entropy_t = row_sums(
            s_row, s_bias_ptr, t_row, t_bias_ptr, ref_s, ref_t, ref_h, readable_s, readable_t, n_columns, n_student,
            n_teacher, n_full, n_all, kappa, scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
            HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, SEPARATE_HARD, CROSS, MIXED, ENTROPY,
            FORM == COSINE, BASE, BLOCK, STAGES,
        )  # fmt: skip
    # In base 2, as what they are subtracted from.
    lse_s = ref_s + tl.log2(sum_s)
    lse_t = ref_t + tl.log2(sum_t)
    lse_h = lse_s * LN2
    if SEPARATE_HARD:
        lse_h = ref_h + tl.log(sum_h)
    if ENTROPY:
        tl.store(entropy_ptr + row, (tl.log2(sum_s) - entropy_s / sum_s) * LN2)
        tl.store(t_entropy_ptr + row, (tl.log2(sum_t) - entropy_t / sum_t) * LN2)
    if LABEL:
        tl.store(lse_h_ptr + row, lse_h)
        if (local >= 0) & (local < n_columns):
            tl.store(found_ptr + row + tl.arange(0, 1), found)

    total = -1.0
    if CROSS:
        total = (first / sum_s - (lse_s - lse_t)) * LN2
        if FORM == JEFFREYS:
            total -= 1.0
    if FORM == COSINE:
        # What has no direction is divided by infinity.
        lse_s = tl.sqrt(first)
        lse_s = tl.where(lse_s <= _NO_DIRECTION, float("inf"), lse_s)
        lse_t = tl.sqrt(c1)
        lse_t = tl.where(lse_t <= _NO_DIRECTION, float("inf"), lse_t)
        total = c2 / lse_s / lse_t
    if FORM == MSE:
        total = 1.0 / tl.maximum(n_student, n_teacher).to(tl.float32)
    tl.store(lse_s_ptr + row, lse_s if OF_LOGITS else lse_s * LN2)
    tl.store(lse_t_ptr + row, lse_t if OF_LOGITS else lse_t * LN2)

    # Where S is known by now, one more visit has the value and the gradient; otherwise it is summed first.
    EARLY: tl.constexpr = FORM <= MSE
    known = EARLY or not EMIT
    if MIXED:
        total, known = mixture_total(sum_s, sum_t, parameter, kappa, first, c1, c2, c3, c4)
    if not known:
        _value, total = visit(
            s_row, s_bias_ptr, t_row, t_bias_ptr, out_row, local, lse_s, lse_t, lse_h, total, parameter, weight,
            hard_weight, readable_s, readable_t, n_columns, n_student, n_teacher, n_full, n_all,
            scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
            HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, FORM, SOFT, HARD, False, True, False, True,
            BLOCK, STAGES,
        )  # fmt: skip
    value, sums = visit(
        s_row, s_bias_ptr, t_row, t_bias_ptr, out_row, local, lse_s, lse_t, lse_h, total, parameter, weight,
        hard_weight, readable_s, readable_t, n_columns, n_student, n_teacher, n_full, n_all,
        scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
        HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, FORM, SOFT, HARD, True, not (EARLY or EMIT),
        EMIT, MIXED or EARLY or not EMIT, BLOCK, STAGES,
    )  # fmt: skip
    if not (EARLY or EMIT):
        total = sums
    if FORM == COSINE:
        # |x - y|^2 / 2 is 1 - cos of two units, and lacks a half where one of them is none.
        value += tl.where((lse_s == float("inf")) != (lse_t == float("inf")), 0.5, 0.0)
    tl.store(value_ptr + row, value)
    tl.store(total_ptr + row, total)


@triton.jit(
    do_not_specialize=[
        "s_stride", "t_stride", "out_stride", "n_columns", "n_student", "n_teacher", "first_column",
    ],
    do_not_specialize_on_alignment=[
        "s_bias_ptr", "t_bias_ptr", "target_ptr", "lse_s_ptr", "lse_t_ptr", "lse_h_ptr", "total_ptr", "factor_ptr",
        "inv_t_ptr",
    ],
)  # fmt: skip
def _gradient_kernel(
    s_ptr, s_stride, s_bias_ptr, t_ptr, t_stride, t_bias_ptr, out_ptr, out_stride, target_ptr, lse_s_ptr, lse_t_ptr,
    lse_h_ptr, total_ptr, factor_ptr, first_column, n_columns, n_student, n_teacher,
    scale, softcap, inv_t, inv_t_ptr, inv_d, t_scale, t_softcap, t_inv, parameter, weight, hard_weight,
    ALIGNED: tl.constexpr, T_ALIGNED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr, T_HAS_BIAS: tl.constexpr, T_HAS_SOFTCAP: tl.constexpr, PROBABILITIES: tl.constexpr,
    FORM: tl.constexpr, SOFT: tl.constexpr, HARD: tl.constexpr, OF_LOGITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    inv_t = tl.cast(inv_t, tl.float32)
    inv_d = tl.cast(inv_d, tl.float32)
    t_scale = tl.cast(t_scale, tl.float32)
    t_softcap = tl.cast(t_softcap, tl.float32)
    t_inv = tl.cast(t_inv, tl.float32)
    parameter = tl.cast(parameter, tl.float32)
    weight = tl.cast(weight, tl.float32)
    hard_weight = tl.cast(hard_weight, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    if ROW_TEMPERATURE:
        inv_t = tl.load(inv_t_ptr + row)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    readable = readable_columns(n_columns, ALIGNED)
    z, slope, s, t = both_sides(
        row_start(s_ptr, row, s_stride, ALIGNED), s_bias_ptr, row_start(t_ptr, row, t_stride, T_ALIGNED), t_bias_ptr,
        offsets, readable, readable_columns(n_teacher, T_ALIGNED), n_columns, n_student, n_teacher,
        scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
        HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, True,
    )  # fmt: skip
    local = tl.minimum(tl.maximum(tl.load(target_ptr + row) - first_column, -1), n_columns).to(tl.int32)
    factor = tl.load(factor_ptr + row)
    lse_s = tl.load(lse_s_ptr + row)
    lse_t = tl.load(lse_t_ptr + row)
    if not OF_LOGITS:
        lse_s *= LOG2E
        lse_t *= LOG2E
    gradient = entry(
        z, slope, s, t, offsets == local, lse_s, lse_t, tl.load(lse_h_ptr + row), tl.load(total_ptr + row), parameter,
        weight, hard_weight, FORM, SOFT, HARD,
    )  # fmt: skip
    gradient = tl.where(factor != 0.0, gradient * factor, 0.0)
    out_row = row_start(out_ptr, row, out_stride, ALIGNED)
    tl.store(out_row + offsets, gradient.to(out_ptr.dtype.element_ty), mask=offsets < readable)


def _arguments(
    tile: Tensor,
    bias: Tensor | None,
    teacher: TeacherTile,
    state: DivergenceState,
    transform: LogitTransform,
    columns: Columns,
    written: Tensor,
) -> dict[str, Any]:
    """What both kernels take."""
    options = state.divergence
    inverse_student, inverse_teacher = options.inverse_temperatures
    one = teacher.transform.inverse_temperature
    assert not isinstance(one, Tensor)
    inv_t, inv_t_ptr = temperature_arguments(transform, state.total)
    base = 1.0 if options.form in _OF_LOGITS else math.log2(math.e)
    return {
        "s_ptr": tile,
        "s_stride": tile.stride(0),
        "s_bias_ptr": tile if bias is None else bias,
        "t_ptr": teacher.logits,
        "t_stride": teacher.logits.stride(0),
        "t_bias_ptr": tile if teacher.bias is None else teacher.bias,
        "out_ptr": written,
        "out_stride": written.stride(0),
        "lse_s_ptr": state.student_lse,
        "lse_t_ptr": state.teacher_lse,
        "lse_h_ptr": state.hard_lse,
        "total_ptr": state.total,
        "n_columns": tile.shape[1],
        "n_student": columns.student,
        "n_teacher": columns.teacher,
        "scale": transform.scale,
        "softcap": transform.softcap or 1.0,
        "inv_t": inv_t,
        "inv_t_ptr": inv_t_ptr,
        "inv_d": inverse_student * base,
        "t_scale": teacher.transform.scale,
        "t_softcap": teacher.transform.softcap or 1.0,
        "t_inv": one * inverse_teacher * base,
        "parameter": options.parameter,
        "weight": options.weight * inverse_student,
        "hard_weight": options.hard_weight,
        "ALIGNED": aligned(tile, written),
        "T_ALIGNED": aligned(teacher.logits),
        "HAS_BIAS": bias is not None,
        "HAS_SOFTCAP": transform.softcap is not None,
        "ROW_TEMPERATURE": isinstance(transform.temperature, Tensor),
        "T_HAS_BIAS": teacher.bias is not None,
        "T_HAS_SOFTCAP": teacher.transform.softcap is not None,
        "PROBABILITIES": teacher.probabilities,
        "FORM": HALF_JSD.value if options.form == "jsd" and options.parameter == 0.5 else FORMS.index(options.form),
        "SOFT": options.weight > 0,
        "HARD": options.hard_weight > 0,
        "OF_LOGITS": options.form in _OF_LOGITS,
    }


def shape_of_visits(tile: Tensor) -> dict[str, int]:
    """Block, stages and warps of a kernel in which a program walks along a row."""
    block = _BLOCK if tile.is_cuda else 128
    stages, warps = (4, 4) if tile.element_size() == 2 else (3, 8)
    return {"BLOCK": block, "STAGES": stages, "num_warps": warps}


def divergence_tile_triton(
    tile: Tensor,
    bias: Tensor | None,
    target: Tensor,
    teacher: TeacherTile,
    state: DivergenceState,
    transform: LogitTransform,
    columns: Columns,
    out: Tensor | None,
) -> None:
    options, written = state.divergence, tile if out is None else out
    same = options.temperature == 1 and columns.student == tile.shape[1]
    with torch.cuda.device_of(tile):
        _divergence_kernel[(tile.shape[0],)](
            **_arguments(tile, bias, teacher, state, transform, columns, written),
            target_ptr=target,
            value_ptr=state.value,
            found_ptr=state.target,
            entropy_ptr=state.total if state.entropy is None else state.entropy,
            t_entropy_ptr=state.total if state.teacher_entropy is None else state.teacher_entropy,
            LABEL=state.reads_label,
            SEPARATE_HARD=state.reads_label and not same,
            ENTROPY=state.entropy is not None,
            CROSS=options.form in ("reverse_kl", "jeffreys"),
            EMIT=out is not None,
            **shape_of_visits(tile),
        )


def divergence_gradient_triton(
    tile: Tensor,
    bias: Tensor | None,
    target: Tensor,
    teacher: TeacherTile,
    state: DivergenceState,
    transform: LogitTransform,
    columns: Columns,
    factor: Tensor,
    out: Tensor,
    first_column: int,
) -> None:
    block = _GRADIENT_BLOCK if tile.is_cuda else 128
    with torch.cuda.device_of(tile):
        _gradient_kernel[(tile.shape[0], triton.cdiv(tile.shape[1], block))](
            **_arguments(tile, bias, teacher, state, transform, columns, out),
            target_ptr=target,
            factor_ptr=factor,
            first_column=first_column,
            BLOCK=block,
            num_warps=_GRADIENT_WARPS,
        )
