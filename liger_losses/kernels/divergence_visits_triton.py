"""One visit to a row of both models' logits: its sums, or the divergence, its `S` and the gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from .divergence_terms_triton import COSINE, MSE, entry, finite_logits, mixture_sums, terms
from .tile_statistics_triton import capped_tanh


@triton.jit
def _side(
    row_ptr, bias_ptr, offsets, readable, n_columns, scale, softcap, inv_t, inv_d,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PROBABILITIES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    # Logits, their slope, and the logits times `inv_d`; without `MASKED` every column of the block exists.
    if MASKED:
        raw = tl.load(row_ptr + offsets, mask=offsets < readable, other=0.0).to(tl.float32)
        if HAS_BIAS:
            raw += tl.load(bias_ptr + offsets, mask=offsets < n_columns, other=0.0).to(tl.float32)
    else:
        raw = tl.load(row_ptr + offsets).to(tl.float32)
        if HAS_BIAS:
            raw += tl.load(bias_ptr + offsets).to(tl.float32)
    slope = scale * inv_t
    if PROBABILITIES:
        z = tl.log(raw)
        compared = z * inv_d
    elif HAS_SOFTCAP:
        capped = capped_tanh(raw * (scale / softcap))
        z = capped * (softcap * inv_t)
        compared = capped * (softcap * inv_t * inv_d)
        slope = (1.0 - capped * capped) * slope
    else:
        z = raw * slope
        compared = raw * (slope * inv_d)
    return z, slope, compared


@triton.jit
def both_sides(
    s_row, s_bias_ptr, t_row, t_bias_ptr, offsets, readable_s, readable_t, n_columns, n_student, n_teacher,
    scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, T_HAS_BIAS: tl.constexpr, T_HAS_SOFTCAP: tl.constexpr,
    PROBABILITIES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    # The student's logits, their slope, and what is compared of both sides: -inf where a side has no column.
    z, slope, s = _side(
        s_row, s_bias_ptr, offsets, readable_s, n_columns, scale, softcap, inv_t, inv_d,
        HAS_BIAS, HAS_SOFTCAP, False, MASKED,
    )  # fmt: skip
    _z, _slope, t = _side(
        t_row, t_bias_ptr, offsets, readable_t, n_teacher, t_scale, t_softcap, 1.0, t_inv,
        T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, MASKED,
    )  # fmt: skip
    if MASKED:
        z = tl.where(offsets < n_columns, z, -float("inf"))
        s = tl.where(offsets < n_student, s, -float("inf"))
        t = tl.where(offsets < n_teacher, t, -float("inf"))
    return z, slope, s, t


@triton.jit
def _visit_block(
    start, value, sums,
    s_row, s_bias_ptr, t_row, t_bias_ptr, out_row, local, lse_s, lse_t, lse_h, total, parameter, weight, hard_weight,
    readable_s, readable_t, n_columns, n_student, n_teacher, scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, T_HAS_BIAS: tl.constexpr, T_HAS_SOFTCAP: tl.constexpr,
    PROBABILITIES: tl.constexpr, FORM: tl.constexpr, SOFT: tl.constexpr, HARD: tl.constexpr, VALUE: tl.constexpr,
    SUMS: tl.constexpr, EMIT: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = start + tl.arange(0, BLOCK)
    z, slope, s, t = both_sides(
        s_row, s_bias_ptr, t_row, t_bias_ptr, offsets, readable_s, readable_t, n_columns, n_student, n_teacher,
        scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
        HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, MASKED,
    )  # fmt: skip
    if VALUE:
        if (FORM == COSINE) or (FORM == MSE):  # noqa: SIM109
            a, b = finite_logits(s, t)
            if FORM == COSINE:
                value += (a / lse_s - b / lse_t) * (a / lse_s - b / lse_t) * 0.5
            else:
                value += (a - b) * (a - b) * total
        else:
            _p, d, _g = terms(s - lse_s, t - lse_t, parameter, FORM)
            value += d
    if SUMS:
        _p, _d, g = terms(s - lse_s, t - lse_t, parameter, FORM)
        sums += g
    if EMIT:
        gradient = entry(
            z, slope, s, t, offsets == local, lse_s, lse_t, lse_h, total, parameter, weight, hard_weight,
            FORM, SOFT, HARD,
        ).to(out_row.dtype.element_ty)  # fmt: skip
        if MASKED:
            tl.store(out_row + offsets, gradient, mask=offsets < readable_s)
        else:
            tl.store(out_row + offsets, gradient)
    return value, sums


@triton.jit
def visit(
    s_row, s_bias_ptr, t_row, t_bias_ptr, out_row, local, lse_s, lse_t, lse_h, total, parameter, weight, hard_weight,
    readable_s, readable_t, n_columns, n_student, n_teacher, n_full, n_all,
    scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, T_HAS_BIAS: tl.constexpr, T_HAS_SOFTCAP: tl.constexpr,
    PROBABILITIES: tl.constexpr, FORM: tl.constexpr, SOFT: tl.constexpr, HARD: tl.constexpr, VALUE: tl.constexpr,
    SUMS: tl.constexpr, EMIT: tl.constexpr, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # The sums of d and g over the row, and the gradient, as asked. Columns up to n_full fill blocks of both sides; they
    # are on their way, STAGES blocks of them, while one is computed.
    value = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    if BACKWARDS:
        for start in range(n_full, n_all, BLOCK):
            value, sums = _visit_block(
                start, value, sums,
                s_row, s_bias_ptr, t_row, t_bias_ptr, out_row, local, lse_s, lse_t, lse_h, total, parameter, weight,
                hard_weight, readable_s, readable_t, n_columns, n_student, n_teacher,
                scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
                HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, FORM, SOFT, HARD, VALUE, SUMS, EMIT,
                True, BLOCK,
            )  # fmt: skip
    for start in tl.range(0, n_full, BLOCK, num_stages=STAGES):
        place = start
        if BACKWARDS:
            place = n_full - BLOCK - start
        value, sums = _visit_block(
            place, value, sums,
            s_row, s_bias_ptr, t_row, t_bias_ptr, out_row, local, lse_s, lse_t, lse_h, total, parameter, weight,
            hard_weight, readable_s, readable_t, n_columns, n_student, n_teacher,
            scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
            HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, FORM, SOFT, HARD, VALUE, SUMS, EMIT, False,
            BLOCK,
        )  # fmt: skip
    if not BACKWARDS:
        for start in range(n_full, n_all, BLOCK):
            value, sums = _visit_block(
                start, value, sums,
                s_row, s_bias_ptr, t_row, t_bias_ptr, out_row, local, lse_s, lse_t, lse_h, total, parameter, weight,
                hard_weight, readable_s, readable_t, n_columns, n_student, n_teacher,
                scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
                HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, FORM, SOFT, HARD, VALUE, SUMS, EMIT,
                True, BLOCK,
            )  # fmt: skip
    return tl.sum(value, 0), tl.sum(sums, 0)


@triton.jit
def _sum_block(
    start, sum_s, sum_t, sum_h, first, c1, c2, c3, c4, entropy_s, entropy_t,
    s_row, s_bias_ptr, t_row, t_bias_ptr, ref_s, ref_t, ref_h, readable_s, readable_t, n_columns, n_student, n_teacher,
    kappa, scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, T_HAS_BIAS: tl.constexpr, T_HAS_SOFTCAP: tl.constexpr,
    PROBABILITIES: tl.constexpr, SEPARATE_HARD: tl.constexpr, CROSS: tl.constexpr, MIXED: tl.constexpr,
    ENTROPY: tl.constexpr, COSINE_SUMS: tl.constexpr, BASE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = start + tl.arange(0, BLOCK)
    z, _slope, s, t = both_sides(
        s_row, s_bias_ptr, t_row, t_bias_ptr, offsets, readable_s, readable_t, n_columns, n_student, n_teacher,
        scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
        HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, MASKED,
    )  # fmt: skip
    if COSINE_SUMS:
        a, b = finite_logits(s, t)
        first += a * a
        c1 += b * b
        c2 += a * b
    s = s * BASE
    t = t * BASE
    e_s = tl.exp2(s - ref_s)
    e_t = tl.exp2(t - ref_t)
    sum_s += e_s
    sum_t += e_t
    if SEPARATE_HARD:
        sum_h += tl.exp(z - ref_h)
    if CROSS:
        first += tl.where(e_s > 0.0, e_s * (tl.where(e_s > 0.0, s, 0.0) - t), 0.0)
    if MIXED:
        first, c1, c2, c3, c4 = mixture_sums(e_s, e_t, s - ref_s, kappa, first, c1, c2, c3, c4)
    if ENTROPY:
        entropy_s += tl.where(e_s > 0.0, e_s * (s - ref_s), 0.0)
        entropy_t += tl.where(e_t > 0.0, e_t * (t - ref_t), 0.0)
    return sum_s, sum_t, sum_h, first, c1, c2, c3, c4, entropy_s, entropy_t


@triton.jit
def row_sums(
    s_row, s_bias_ptr, t_row, t_bias_ptr, ref_s, ref_t, ref_h, readable_s, readable_t, n_columns, n_student, n_teacher,
    n_full, n_all, kappa, scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, T_HAS_BIAS: tl.constexpr, T_HAS_SOFTCAP: tl.constexpr,
    PROBABILITIES: tl.constexpr, SEPARATE_HARD: tl.constexpr, CROSS: tl.constexpr, MIXED: tl.constexpr,
    ENTROPY: tl.constexpr, COSINE_SUMS: tl.constexpr, BASE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Sums per lane, relative to the references; of the compared logits in base 2.
    sum_s = tl.zeros((BLOCK,), tl.float32)
    sum_t = tl.zeros((BLOCK,), tl.float32)
    sum_h = tl.zeros((BLOCK,), tl.float32)
    # E_s of (z_s - z_t); or |z_s|^2, and in the next two |z_t|^2 and their product; or the five sums of `mixture_sums`.
    first = tl.zeros((BLOCK,), tl.float32)
    c1 = tl.zeros((BLOCK,), tl.float32)
    c2 = tl.zeros((BLOCK,), tl.float32)
    c3 = tl.zeros((BLOCK,), tl.float32)
    c4 = tl.zeros((BLOCK,), tl.float32)
    entropy_s = tl.zeros((BLOCK,), tl.float32)
    entropy_t = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, n_full, BLOCK, num_stages=STAGES):
        sum_s, sum_t, sum_h, first, c1, c2, c3, c4, entropy_s, entropy_t = _sum_block(
            start, sum_s, sum_t, sum_h, first, c1, c2, c3, c4, entropy_s, entropy_t,
            s_row, s_bias_ptr, t_row, t_bias_ptr, ref_s, ref_t, ref_h, readable_s, readable_t, n_columns, n_student,
            n_teacher, kappa, scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
            HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, SEPARATE_HARD, CROSS, MIXED,
            ENTROPY, COSINE_SUMS, BASE, False, BLOCK,
        )  # fmt: skip
    for start in range(n_full, n_all, BLOCK):
        sum_s, sum_t, sum_h, first, c1, c2, c3, c4, entropy_s, entropy_t = _sum_block(
            start, sum_s, sum_t, sum_h, first, c1, c2, c3, c4, entropy_s, entropy_t,
            s_row, s_bias_ptr, t_row, t_bias_ptr, ref_s, ref_t, ref_h, readable_s, readable_t, n_columns, n_student,
            n_teacher, kappa, scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
            HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, SEPARATE_HARD, CROSS, MIXED,
            ENTROPY, COSINE_SUMS, BASE, True, BLOCK,
        )  # fmt: skip
    return (
        tl.sum(sum_s, 0), tl.sum(sum_t, 0), tl.sum(sum_h, 0), tl.sum(first, 0), tl.sum(c1, 0), tl.sum(c2, 0),
        tl.sum(c3, 0), tl.sum(c4, 0), tl.sum(entropy_s, 0), tl.sum(entropy_t, 0),
    )  # fmt: skip


@triton.jit
def row_maxima(
    s_row, s_bias_ptr, t_row, t_bias_ptr, readable_s, readable_t, n_columns, n_student, n_teacher, n_all,
    scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, T_HAS_BIAS: tl.constexpr, T_HAS_SOFTCAP: tl.constexpr,
    PROBABILITIES: tl.constexpr, BASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Of the compared logits, in base 2, and of the student's own.
    high_s = tl.full((BLOCK,), -float("inf"), tl.float32)
    high_t = tl.full((BLOCK,), -float("inf"), tl.float32)
    high_h = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, n_all, BLOCK):
        z, _slope, s, t = both_sides(
            s_row, s_bias_ptr, t_row, t_bias_ptr, start + tl.arange(0, BLOCK), readable_s, readable_t, n_columns,
            n_student, n_teacher, scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
            HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, True,
        )  # fmt: skip
        high_s = tl.maximum(high_s, s * BASE)
        high_t = tl.maximum(high_t, t * BASE)
        high_h = tl.maximum(high_h, z)
    return tl.max(high_s, 0), tl.max(high_t, 0), tl.max(high_h, 0)
