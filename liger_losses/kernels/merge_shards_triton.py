"""Triton form of `merge_shards`: a program owns some rows and goes through the ranks twice, in their order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_triton import launch
from .rows_triton import cdiv
from .tile_statistics import RowState
from .tile_statistics_triton import difference

_ROWS = 128


@triton.jit(
    do_not_specialize=["stride", "n_ranks", "n_rows"],
    do_not_specialize_on_alignment=["everyone_ptr", "numbers_ptr", "argmax_ptr", "is_top1_ptr", "target_ptr"],
)
def _merge_kernel(
    everyone_ptr, numbers_ptr, stride, argmax_ptr, is_top1_ptr, target_ptr, n_ranks, n_rows,
    ENTROPY: tl.constexpr, SUM_SQ: tl.constexpr, ADDED: tl.constexpr, ARGMAX: tl.constexpr, TOP1: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    # The numbers' places: max, sum_exp, target, then those that there are, in the state's order.
    SQUARES: tl.constexpr = 3 + ENTROPY
    SUMS: tl.constexpr = SQUARES + SUM_SQ
    BEST: tl.constexpr = SUMS + ADDED
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    a_number = tl.cast(n_rows, tl.int64)
    a_rank = (BEST + ARGMAX) * a_number

    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    best = tl.zeros((ROWS,), tl.float32)
    for rank in range(n_ranks):
        from_ptr = everyone_ptr + rank * a_rank + rows
        m = tl.load(from_ptr, mask=inside, other=0.0)
        if ARGMAX:
            # Ties go to the first column, and ranks are in the order of their columns. NaN is above all numbers.
            better = (m > highest) | ((m != m) & (highest == highest)) | (rank == 0)
            best = tl.where(better, tl.load(from_ptr + BEST * a_number, mask=inside, other=0.0), best)
        highest = tl.maximum(highest, m, propagate_nan=tl.PropagateNan.ALL)

    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    first_sum = tl.zeros((ROWS,), tl.float32)
    second_sum = tl.zeros((ROWS,), tl.float32)
    target = tl.full((ROWS,), float("nan"), tl.float32)
    for rank in range(n_ranks):
        from_ptr = everyone_ptr + rank * a_rank + rows
        shift = difference(tl.load(from_ptr, mask=inside, other=0.0), highest)
        rescale = tl.exp(shift)
        sum_exp = tl.load(from_ptr + a_number, mask=inside, other=0.0)
        total += rescale * sum_exp
        found = tl.load(from_ptr + 2 * a_number, mask=inside, other=0.0)
        target = tl.where(found == found, found, target)
        if ENTROPY:
            weighted += rescale * (tl.load(from_ptr + 3 * a_number, mask=inside, other=0.0) + shift * sum_exp)
        if SUM_SQ:
            squares += rescale * rescale * tl.load(from_ptr + SQUARES * a_number, mask=inside, other=0.0)
        if ADDED >= 1:
            first_sum += tl.load(from_ptr + SUMS * a_number, mask=inside, other=0.0)
        if ADDED == 2:
            second_sum += tl.load(from_ptr + (SUMS + 1) * a_number, mask=inside, other=0.0)

    to_ptr = numbers_ptr + rows
    a_row = tl.cast(stride, tl.int64)
    # What `emit` wrote is relative to this rank's own sum; where that is 0 and others' are not, so is what it wrote.
    own = tl.load(to_ptr + a_row, mask=inside, other=0.0)
    own *= tl.exp(difference(tl.load(to_ptr, mask=inside, other=0.0), highest))
    scale_ptr = to_ptr + BEST * a_row
    scale = tl.load(scale_ptr, mask=inside, other=0.0) * tl.where(total > 0.0, own / total, own)
    tl.store(scale_ptr, tl.where((own == 0.0) & (total > 0.0), 0.0, scale), mask=inside)
    tl.store(to_ptr, highest, mask=inside)
    tl.store(to_ptr + a_row, total, mask=inside)
    tl.store(to_ptr + 2 * a_row, target, mask=inside)
    if ENTROPY:
        tl.store(to_ptr + 3 * a_row, weighted, mask=inside)
    if SUM_SQ:
        tl.store(to_ptr + SQUARES * a_row, squares, mask=inside)
    if ADDED >= 1:
        tl.store(to_ptr + SUMS * a_row, first_sum, mask=inside)
    if ADDED == 2:
        tl.store(to_ptr + (SUMS + 1) * a_row, second_sum, mask=inside)
    if ARGMAX:
        column = best.to(tl.int64)
        tl.store(argmax_ptr + rows, column, mask=inside)
        if TOP1:
            hit = column == tl.load(target_ptr + rows, mask=inside, other=-1)
            tl.store(is_top1_ptr + rows, hit.to(tl.int8), mask=inside)


def merge_shards_triton(everyone: Tensor, state: RowState, target: Tensor) -> None:
    ranks, _numbers, rows = everyone.shape
    arguments = (
        everyone,
        state.numbers,
        state.numbers.stride(0),
        everyone if state.argmax is None else state.argmax,
        everyone if state.is_top1 is None else state.is_top1.view(torch.int8),
        target,
        ranks,
        rows,
    )
    launch(
        _merge_kernel, cdiv(rows, _ROWS), arguments, 4,
        ENTROPY=int(state.weighted is not None), SUM_SQ=int(state.sum_sq is not None),
        ADDED=(state.sum_logits is not None) + (state.sum_columns is not None), ARGMAX=int(state.argmax is not None),
        TOP1=state.is_top1 is not None, ROWS=_ROWS,
    )  # fmt: skip
