"""The sums that a divergence is made of, over some of a row's columns, once the log-sum-exps of all of them are known.

`divergence_tile` reads whole rows. Where a row's columns lie on several devices, each one's part of `D = sum_v d` and
of `S = sum_v g` (see `divergence_tile`) is a plain sum over its own columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import use_triton
from .divergence_tile import Columns, DivergenceState, TeacherTile, _compared, _slices, _terms, _without
from .head_mass import Reduce, head_share
from .transform import LogitTransform


def divergence_sums(
    tile: Tensor,  # [rows, columns] of the student
    bias: Tensor | None,  # [columns]
    teacher: TeacherTile,  # of the same columns
    state: DivergenceState,  # with `student_lse` and `teacher_lse` of whole rows; `value` and `total` are written
    transform: LogitTransform,
) -> None:
    """Write these columns' part of `D` to `state.value` and of `S` to `state.total`; softmax divergences only."""
    if tile.shape[0] == 0:
        return
    columns = Columns(tile.shape[1], tile.shape[1])
    if use_triton(tile, _without(state.divergence)):
        from .divergence_sums_triton import divergence_sums_triton

        divergence_sums_triton(tile, bias, teacher, state, transform, columns)
        return
    for rows in _slices(tile):
        part, logs, logt = _logprobs(tile, bias, teacher, state, transform, rows)
        value, g = _terms(state.divergence, logs, logt, part.share)
        part.value.copy_(value.sum(-1))
        part.total.copy_(g.sum(-1))


def divergence_share(
    tile: Tensor,  # [rows, columns] of the student
    bias: Tensor | None,  # [columns]
    teacher: TeacherTile,  # of the same columns
    state: DivergenceState,  # with `student_lse` and `teacher_lse` of whole rows; `share` is written
    transform: LogitTransform,
    reduce: Reduce,
    most_columns: int,  # that any of the devices has: each calls `reduce` as often
) -> None:
    """Adaptive KL's weight, from columns that lie on several devices."""
    for rows in _slices(tile, most_columns):
        part, logs, logt = _logprobs(tile, bias, teacher, state, transform, rows)
        part.share.copy_(head_share(torch.exp(logs), torch.exp(logt), state.divergence.mu, reduce))


def _logprobs(
    tile: Tensor,
    bias: Tensor | None,
    teacher: TeacherTile,
    state: DivergenceState,
    transform: LogitTransform,
    rows: slice,
) -> tuple[DivergenceState, Tensor, Tensor]:
    """Some rows of the state, and of both sides' log-probabilities of these columns."""
    part, wide = state.narrow(rows.start, rows.stop - rows.start), state.total.dtype
    z, _slope = transform.rows(rows).apply(tile[rows].to(wide), bias)
    student, tempered = _compared(z, teacher, rows, state.divergence, Columns(tile.shape[1], tile.shape[1]), wide)
    return part, student - part.student_lse.unsqueeze(-1), tempered - part.teacher_lse.unsqueeze(-1)
