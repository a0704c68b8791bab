"""Triton form of `divergence_sums`: one program visits one row of both tiles once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .divergence_terms_triton import LOG2E
from .divergence_tile import Columns, DivergenceState, TeacherTile
from .divergence_tile_triton import _arguments, shape_of_visits
from .divergence_visits_triton import visit
from .tile_statistics_triton import readable_columns, row_start
from .transform import LogitTransform


@triton.jit(
    do_not_specialize=["s_stride", "t_stride", "out_stride", "n_columns", "n_student", "n_teacher"],
    do_not_specialize_on_alignment=[
        "s_bias_ptr", "t_bias_ptr", "lse_s_ptr", "lse_t_ptr", "lse_h_ptr", "total_ptr", "value_ptr", "inv_t_ptr",
    ],
)  # fmt: skip
def _sums_kernel(
    s_ptr, s_stride, s_bias_ptr, t_ptr, t_stride, t_bias_ptr, out_ptr, out_stride, lse_s_ptr, lse_t_ptr, lse_h_ptr,
    total_ptr, value_ptr, n_columns, n_student, n_teacher,
    scale, softcap, inv_t, inv_t_ptr, inv_d, t_scale, t_softcap, t_inv, parameter, weight, hard_weight,
    ALIGNED: tl.constexpr, T_ALIGNED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr, T_HAS_BIAS: tl.constexpr, T_HAS_SOFTCAP: tl.constexpr, PROBABILITIES: tl.constexpr,
    FORM: tl.constexpr, SOFT: tl.constexpr, HARD: tl.constexpr, OF_LOGITS: tl.constexpr, BLOCK: tl.constexpr,
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
    row = tl.program_id(0).to(tl.int64)
    if ROW_TEMPERATURE:
        inv_t = tl.load(inv_t_ptr + row)
    n_full = n_columns // BLOCK * BLOCK
    value, sums = visit(
        row_start(s_ptr, row, s_stride, ALIGNED), s_bias_ptr, row_start(t_ptr, row, t_stride, T_ALIGNED), t_bias_ptr,
        out_ptr, -1, tl.load(lse_s_ptr + row) * LOG2E, tl.load(lse_t_ptr + row) * LOG2E, 0.0, 0.0, parameter, 0.0, 0.0,
        readable_columns(n_columns, ALIGNED), readable_columns(n_teacher, T_ALIGNED), n_columns, n_student, n_teacher,
        n_full, n_columns, scale, softcap, inv_t, inv_d, t_scale, t_softcap, t_inv,
        HAS_BIAS, HAS_SOFTCAP, T_HAS_BIAS, T_HAS_SOFTCAP, PROBABILITIES, FORM, False, False, True, True, False, True,
        BLOCK, STAGES,
    )  # fmt: skip
    tl.store(value_ptr + row, value)
    tl.store(total_ptr + row, sums)


def divergence_sums_triton(
    tile: Tensor,
    bias: Tensor | None,
    teacher: TeacherTile,
    state: DivergenceState,
    transform: LogitTransform,
    columns: Columns,
) -> None:
    with torch.cuda.device_of(tile):
        _sums_kernel[(tile.shape[0],)](
            **_arguments(tile, bias, teacher, state, transform, columns, tile),
            value_ptr=state.value,
            **shape_of_visits(tile),
        )
