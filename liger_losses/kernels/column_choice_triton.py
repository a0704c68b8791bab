"""Triton form of `column_choice`: three kernels, a program of each to a block of the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .column_choice import ColumnChoice, cuts_of, first_cut
from .column_extent import ColumnExtent
from .launch_triton import launch
from .rows_triton import cdiv

_BLOCK = 1024
_CUTS = 64  # room for a vocabulary of 31 bits
_PARTS = 64


@triton.jit(do_not_specialize=["n_columns", "n_targets", "n_cuts", "share", "first"])
def _below_kernel(
    weight_ptr, total_ptr, everything_ptr, target_ptr, below_ptr, n_columns, n_targets, n_cuts, share, first,
    TARGETS: tl.constexpr, CUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # For each cut what the block's columns below it weigh; and a mark on the targets.
    block = tl.program_id(0)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    cuts = tl.arange(0, CUTS)
    below = tl.zeros((CUTS,), tl.float32)
    if n_cuts > 0:
        squares = tl.load(weight_ptr + columns, mask=columns < n_columns, other=0.0)
        largest = tl.load(everything_ptr) * (share * share) * first
        for i in range(n_cuts):
            cut = largest * tl.exp2(i * -0.5)
            below = tl.where(cuts == i, tl.sum(tl.where(squares <= cut, squares, 0.0), 0), below)
    tl.store(below_ptr + block * CUTS + cuts, below)
    if TARGETS:
        for start in range(block * BLOCK, n_targets, tl.num_programs(0) * BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            target = tl.load(target_ptr + offsets, mask=offsets < n_targets, other=-1)
            # All that write an entry write the same: a total that no column has.
            mark = tl.full((BLOCK,), -1.0, tl.float32)
            tl.store(total_ptr + target, mark, mask=(target >= 0) & (target < n_columns))


@triton.jit(do_not_specialize=["n_columns", "n_cuts", "eps", "share", "first"])
def _mark_kernel(
    weight_ptr, total_ptr, everything_ptr, below_ptr, active_ptr, counts_ptr, tails_ptr,
    n_columns, n_cuts, eps, share, first, AUTO: tl.constexpr, CUTS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n_columns
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    total = tl.load(total_ptr + columns, mask=inside, other=0.0)
    if AUTO:
        cuts = tl.arange(0, CUTS)
        below = tl.zeros((CUTS,), tl.float32)
        for start in range(0, tl.num_programs(0), PARTS):
            parts = start + tl.arange(0, PARTS)
            mask = (parts < tl.num_programs(0))[:, None] & (cuts < n_cuts)[None, :]
            below += tl.sum(tl.load(below_ptr + parts[:, None] * CUTS + cuts[None, :], mask=mask, other=0.0), 0)
        everything = tl.load(everything_ptr)
        allowed = everything * (share * share)
        may = (cuts < n_cuts) & (below <= allowed) & (below + everything < float("inf"))
        light = weight <= tl.max(tl.where(may, allowed * first * tl.exp2(cuts * -0.5), 0.0), 0)
    else:
        light = weight <= eps
    # Neither a target, marked by a negative total, nor one with NaN is.
    active = inside & ~(light & (total >= 0))
    tl.store(active_ptr + columns, active.to(tl.int8), mask=inside)
    tl.store(counts_ptr + block, tl.sum(active.to(tl.int32), 0))
    tl.store(tails_ptr + block, tl.sum(tl.where(active, 0.0, total), 0))


@triton.jit(do_not_specialize=["n_columns"])
def _compact_kernel(
    active_ptr, total_ptr, counts_ptr, tails_ptr, ids_ptr, count_ptr, profile_ptr, n_columns,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    before = tl.zeros((PARTS,), tl.int32)
    count = tl.zeros((PARTS,), tl.int32)
    tail = tl.zeros((PARTS,), tl.float32)
    for start in range(0, tl.num_programs(0), PARTS):
        parts = start + tl.arange(0, PARTS)
        counts = tl.load(counts_ptr + parts, mask=parts < tl.num_programs(0), other=0)
        count += counts
        before += tl.where(parts < block, counts, 0)
        tail += tl.load(tails_ptr + parts, mask=parts < tl.num_programs(0), other=0.0)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    active = tl.load(active_ptr + columns, mask=columns < n_columns, other=0).to(tl.int32)
    place = tl.sum(before, 0) + tl.cumsum(active, 0) - active
    tl.store(ids_ptr + place, columns, mask=active != 0)
    everything = tl.sum(tail, 0)
    total = tl.load(total_ptr + columns, mask=columns < n_columns, other=0.0)
    profile = tl.where(active != 0, 0.0, total) / tl.where(everything > 0, everything, 1.0)
    tl.store(profile_ptr + columns, profile, mask=columns < n_columns)
    if block == 0:
        tl.store(count_ptr, tl.sum(count, 0))


def choose_columns_triton(extent: ColumnExtent, target: Tensor | None, eps: float | None, share: float) -> ColumnChoice:
    weight, total, row_sums = extent
    share, first = float(share), first_cut(len(row_sums))
    vocab = len(total)
    blocks = cdiv(vocab, _BLOCK)
    cuts = cuts_of(vocab) if eps is None else 0
    floats = total.new_empty(vocab + blocks * (_CUTS + 1))
    profile, tails, below = floats[:vocab], floats[vocab : vocab + blocks], floats[vocab + blocks :]
    ints = torch.empty(vocab + blocks + 1, dtype=torch.int32, device=total.device)
    ids, counts, count = ints[:vocab], ints[vocab : vocab + blocks], ints[-1]
    active = torch.empty(vocab, dtype=torch.int8, device=total.device)
    everything = weight.sum() if eps is None else weight
    if eps is None or target is not None:
        launch(
            _below_kernel, blocks,
            (weight, total, everything, weight if target is None else target, below, vocab,
             0 if target is None else len(target), cuts, share, first),
            4, TARGETS=target is not None, CUTS=_CUTS, BLOCK=_BLOCK,
        )  # fmt: skip
    launch(
        _mark_kernel, blocks,
        (weight, total, everything, below, active, counts, tails, vocab, cuts, 0.0 if eps is None else eps, share,
         first),
        4, AUTO=eps is None, CUTS=_CUTS, PARTS=_PARTS, BLOCK=_BLOCK,
    )  # fmt: skip
    launch(
        _compact_kernel, blocks, (active, total, counts, tails, ids, count, profile, vocab), 4, PARTS=_PARTS,
        BLOCK=_BLOCK,
    )  # fmt: skip
    return ColumnChoice(active.view(torch.bool), ids, count, profile)
