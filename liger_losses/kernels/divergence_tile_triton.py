"""Triton form of `divergence_tile`: one program owns one row of both tiles, and what is written for it.

A row of two fp32 tiles is 8 bytes an element each time it is visited, so visits are what costs. The first one reads the
log-sum-exps. The second sums the divergence and, where `S` is known by then (forward and reverse KL, Jeffreys, cosine,
squared error), writes the gradient; the others need a third. Every visit begins where the one before it ended: of a
row's last blocks some are still in the second-level cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .divergence_terms_triton import COSINE, FORMS, JEFFREYS, MSE, entry, finite_logits, terms
from .divergence_tile import Columns, DivergenceState, TeacherTile
from .tile_statistics_triton import (
    aligned,
    finite,
    logits_and_slope,
    readable_columns,
    row_start,
    temperature_arguments,
)
from .transform import LogitTransform

_BLOCK = 2048
_WARPS = 16
_GRADIENT_BLOCK = 4096
_HEADROOM = tl.constexpr(40.0)  # see tile_statistics_triton


@triton.jit
def _both_sides(
    s_row, s_bias_ptr, t_row, t_bias_ptr, offsets, readable_s, readable_t, n_columns, n_student, n_teacher,
    scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, T_HAS_BIAS: tl.constexpr, T_HAS_SOFTCAP: tl.constexpr,
    PROBABILITIES: tl.constexpr,
):  # fmt: skip
    # The student's logits, their slope, and the tempered logits of both sides.
    z, slope = logits_and_slope(
        s_row, s_bias_ptr, offsets, readable_s, n_columns, scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP
    )
    s = tl.where(offsets < n_student, z * inv_d, -float("inf"))
    if PROBABILITIES:
        raw = tl.load(t_row + offsets, mask=offsets < n_teacher, other=0.0).to(tl.float32)
        t = tl.where(offsets < n_teacher, tl.log(raw) * t_inv, -float("inf"))
    else:
        t, _slope = logits_and_slope(
            t_row, t_bias_ptr, offsets, readable_t, n_teacher, t_scale, t_softcap, t_inv, T_HAS_BIAS, T_HAS_SOFTCAP
        )
    return z, slope, s, t


@triton.jit
def _visit(
    s_row, s_bias_ptr, t_row, t_bias_ptr, out_row, local, lse_s, lse_t, lse_h, total, parameter, weight, hard_weight,
    readable_s, readable_t, n_columns, n_student, n_teacher, n_all,
    scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, T_HAS_BIAS: tl.constexpr, T_HAS_SOFTCAP: tl.constexpr,
    PROBABILITIES: tl.constexpr, FORM: tl.constexpr, SOFT: tl.constexpr, HARD: tl.constexpr, VALUE: tl.constexpr,
    EMIT: tl.constexpr, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The sums of d and g over the row, and the gradient, as asked.
    value = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    blocks = tl.cdiv(n_all, BLOCK)
    for i in range(0, blocks):
        start = i * BLOCK
        if BACKWARDS:
            start = (blocks - 1 - i) * BLOCK
        offsets = start + tl.arange(0, BLOCK)
        z, slope, s, t = _both_sides(
            s_row, s_bias_ptr, t_row, t_bias_ptr, offsets, readable_s, readable_t, n_columns, n_student, n_teacher,
            scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
            HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES,
        )  # fmt: skip
        if VALUE:
            if (FORM == COSINE) or (FORM == MSE):  # noqa: SIM109
                a, b = finite_logits(s, t)
                if FORM == COSINE:
                    value += (a / lse_s - b / lse_t) * (a / lse_s - b / lse_t) * 0.5
                else:
                    value += (a - b) * (a - b) * total
            else:
                _p, d, g = terms(s - lse_s, t - lse_t, parameter, FORM)
                value += d
                sums += g
        if EMIT:
            gradient = entry(
                z, slope, s, t, offsets == local, lse_s, lse_t, lse_h, total, parameter, weight, hard_weight,
                FORM, SOFT, HARD,
            )  # fmt: skip
            tl.store(out_row + offsets, gradient.to(out_row.dtype.element_ty), mask=offsets < readable_s)
    return tl.sum(value, 0), tl.sum(sums, 0)


@triton.jit
def _row_sums(
    s_row, s_bias_ptr, t_row, t_bias_ptr, ref_s, ref_t, ref_h, readable_s, readable_t, n_columns, n_student, n_teacher,
    n_all, scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, T_HAS_BIAS: tl.constexpr, T_HAS_SOFTCAP: tl.constexpr,
    PROBABILITIES: tl.constexpr, SEPARATE_HARD: tl.constexpr, CROSS: tl.constexpr, ENTROPY: tl.constexpr,
    COSINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Sums per lane, relative to the references.
    high_s = tl.full((BLOCK,), -float("inf"), tl.float32)
    high_t = tl.full((BLOCK,), -float("inf"), tl.float32)
    high_h = tl.full((BLOCK,), -float("inf"), tl.float32)
    sum_s = tl.zeros((BLOCK,), tl.float32)
    sum_t = tl.zeros((BLOCK,), tl.float32)
    sum_h = tl.zeros((BLOCK,), tl.float32)
    first = tl.zeros((BLOCK,), tl.float32)  # E_s of (z_s - z_t), or |z_s|^2; and so on
    second = tl.zeros((BLOCK,), tl.float32)
    third = tl.zeros((BLOCK,), tl.float32)
    entropy_s = tl.zeros((BLOCK,), tl.float32)
    entropy_t = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_all, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        z, _slope, s, t = _both_sides(
            s_row, s_bias_ptr, t_row, t_bias_ptr, offsets, readable_s, readable_t, n_columns, n_student, n_teacher,
            scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
            HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES,
        )  # fmt: skip
        e_s = tl.exp(s - ref_s)
        e_t = tl.exp(t - ref_t)
        sum_s += e_s
        sum_t += e_t
        high_s = tl.maximum(high_s, s)
        high_t = tl.maximum(high_t, t)
        if SEPARATE_HARD:
            sum_h += tl.exp(z - ref_h)
            high_h = tl.maximum(high_h, z)
        if CROSS:
            first += tl.where(e_s > 0.0, e_s * (tl.where(e_s > 0.0, s, 0.0) - t), 0.0)
        if COSINE:
            a, b = finite_logits(s, t)
            first += a * a
            second += b * b
            third += a * b
        if ENTROPY:
            entropy_s += tl.where(e_s > 0.0, e_s * (s - ref_s), 0.0)
            entropy_t += tl.where(e_t > 0.0, e_t * (t - ref_t), 0.0)
    return (
        tl.max(high_s, 0), tl.max(high_t, 0), tl.max(high_h, 0), tl.sum(sum_s, 0), tl.sum(sum_t, 0), tl.sum(sum_h, 0),
        tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0), tl.sum(entropy_s, 0), tl.sum(entropy_t, 0),
    )  # fmt: skip


@triton.jit
def _outside(high, reference):
    return (high - reference > _HEADROOM) | (high < reference)


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
    ENTROPY: tl.constexpr, CROSS: tl.constexpr, EMIT: tl.constexpr, BLOCK: tl.constexpr,
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
    local = tl.minimum(tl.maximum(tl.load(target_ptr + row), -1), n_columns).to(tl.int32)

    z, _slope, s, t = _both_sides(
        s_row, s_bias_ptr, t_row, t_bias_ptr, tl.arange(0, BLOCK), readable_s, readable_t, n_columns, n_student,
        n_teacher, scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
        HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES,
    )  # fmt: skip
    ref_s = finite(tl.max(s, 0))
    ref_t = finite(tl.max(t, 0))
    ref_h = finite(tl.max(z, 0))
    high_s, high_t, high_h, sum_s, sum_t, sum_h, first, second, third, entropy_s, entropy_t = _row_sums(
        s_row, s_bias_ptr, t_row, t_bias_ptr, ref_s, ref_t, ref_h, readable_s, readable_t, n_columns, n_student,
        n_teacher, n_all, scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
        HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, SEPARATE_HARD, CROSS, ENTROPY,
        FORM == COSINE, BLOCK,
    )  # fmt: skip
    again = _outside(high_s, ref_s) | _outside(high_t, ref_t)
    if SEPARATE_HARD:
        again = again | _outside(high_h, ref_h)
    if again:
        ref_s = finite(high_s)
        ref_t = finite(high_t)
        ref_h = finite(high_h)
        high_s, high_t, high_h, sum_s, sum_t, sum_h, first, second, third, entropy_s, entropy_t = _row_sums(
            s_row, s_bias_ptr, t_row, t_bias_ptr, ref_s, ref_t, ref_h, readable_s, readable_t, n_columns, n_student,
            n_teacher, n_all, scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
            HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, SEPARATE_HARD, CROSS, ENTROPY,
            FORM == COSINE, BLOCK,
        )  # fmt: skip
    lse_s = ref_s + tl.log(sum_s)
    lse_t = ref_t + tl.log(sum_t)
    lse_h = lse_s
    if SEPARATE_HARD:
        lse_h = ref_h + tl.log(sum_h)
    if ENTROPY:
        tl.store(entropy_ptr + row, tl.log(sum_s) - entropy_s / sum_s)
        tl.store(t_entropy_ptr + row, tl.log(sum_t) - entropy_t / sum_t)
    if LABEL:
        tl.store(lse_h_ptr + row, lse_h)
        one = tl.minimum(tl.maximum(local, 0), n_columns - 1) + tl.arange(0, 1)
        found, _slope = logits_and_slope(
            s_row, s_bias_ptr, one, n_columns, n_columns, scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP
        )
        if (local >= 0) & (local < n_columns):
            tl.store(found_ptr + row + tl.arange(0, 1), found)

    total = -1.0
    if CROSS:
        total = first / sum_s - (lse_s - lse_t)
        if FORM == JEFFREYS:
            total -= 1.0
    if FORM == COSINE:
        lse_s = tl.maximum(tl.sqrt(first), 1e-12)
        lse_t = tl.maximum(tl.sqrt(second), 1e-12)
        total = third / lse_s / lse_t
    if FORM == MSE:
        total = 1.0 / tl.maximum(n_student, n_teacher).to(tl.float32)
    tl.store(lse_s_ptr + row, lse_s)
    tl.store(lse_t_ptr + row, lse_t)

    EARLY: tl.constexpr = FORM <= MSE
    value, sums = _visit(
        s_row, s_bias_ptr, t_row, t_bias_ptr, out_row, local, lse_s, lse_t, lse_h, total, parameter, weight,
        hard_weight, readable_s, readable_t, n_columns, n_student, n_teacher, n_all,
        scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
        HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, FORM, SOFT, HARD, True, EMIT and EARLY, True,
        BLOCK,
    )  # fmt: skip
    if not EARLY:
        total = sums
    tl.store(value_ptr + row, value)
    tl.store(total_ptr + row, total)
    if EMIT and not EARLY:
        _visit(
            s_row, s_bias_ptr, t_row, t_bias_ptr, out_row, local, lse_s, lse_t, lse_h, total, parameter, weight,
            hard_weight, readable_s, readable_t, n_columns, n_student, n_teacher, n_columns,
            scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
            HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, FORM, SOFT, HARD, False, True, False,
            BLOCK,
        )  # fmt: skip


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
    FORM: tl.constexpr, SOFT: tl.constexpr, HARD: tl.constexpr, BLOCK: tl.constexpr,
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
    z, slope, s, t = _both_sides(
        row_start(s_ptr, row, s_stride, ALIGNED), s_bias_ptr, row_start(t_ptr, row, t_stride, T_ALIGNED), t_bias_ptr,
        offsets, readable, readable_columns(n_teacher, T_ALIGNED), n_columns, n_student, n_teacher,
        scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
        HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES,
    )  # fmt: skip
    local = tl.minimum(tl.maximum(tl.load(target_ptr + row) - first_column, -1), n_columns).to(tl.int32)
    factor = tl.load(factor_ptr + row)
    gradient = entry(
        z, slope, s, t, offsets == local, tl.load(lse_s_ptr + row), tl.load(lse_t_ptr + row), tl.load(lse_h_ptr + row),
        tl.load(total_ptr + row), parameter, weight, hard_weight, FORM, SOFT, HARD,
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
        "inv_d": inverse_student,
        "t_scale": teacher.transform.scale,
        "t_softcap": teacher.transform.softcap or 1.0,
        "t_inv": one * inverse_teacher,
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
        "FORM": FORMS.index(options.form),
        "SOFT": options.weight > 0,
        "HARD": options.hard_weight > 0,
        "num_warps": _WARPS,
    }


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
            BLOCK=_BLOCK if tile.is_cuda else 128,
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
        )
