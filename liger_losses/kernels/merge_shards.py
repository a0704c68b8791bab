"""Each rank's numbers of a row -> those of all columns, where a vocabulary is spread over ranks.

What a rank folds from its columns is what a block of columns gives: with `M = max_r m_r`,

    max = M, sum_exp = sum_r e^(m_r - M) sum_exp_r, weighted = sum_r e^(m_r - M) (weighted_r + (m_r - M) sum_exp_r)

and so on. Every rank folds the same numbers in the same order, so that all have the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .dispatch import use_triton
from .tile_statistics import RowState


def shard_numbers(state: RowState) -> Tensor:
    """`[numbers, rows]`, contiguous: what the other ranks need of this one."""
    numbers = state.numbers[:-1]  # but the scale of what this rank wrote
    if state.argmax is None:
        return numbers.contiguous()
    # A column's number, as a float of the statistics' dtype, is exact up to 2^24.
    return torch.cat([numbers, state.argmax.unsqueeze(0).to(numbers.dtype)])


def merge_shards(
    everyone: Tensor,  # [ranks, numbers, rows] `shard_numbers`, in the order of the columns
    state: RowState,  # of these rows, folded from this rank's columns; written
    target: Tensor,  # [rows] int64
) -> None:
    """From this rank's columns to all of them, in place, `gradient_scale` and `is_top1` included."""
    if everyone.shape[2] == 0:
        return
    if use_triton(everyone):
        from .merge_shards_triton import merge_shards_triton

        merge_shards_triton(everyone, state, target)
        return
    parts = dict(zip((*state.held[:-1], "argmax"), everyone.unbind(1), strict=False))
    highest = parts["max"].amax(0)
    # A shard that is -inf throughout (a masked vocabulary) adds nothing: -inf - -inf is no number.
    shift = torch.where(parts["max"] == -math.inf, torch.zeros_like(parts["max"]), parts["max"] - highest)
    rescale = torch.exp(shift)
    total = (rescale * parts["sum_exp"]).sum(0)
    # What `emit` wrote is relative to this rank's own sum; where that is 0 and others' are not, so is what it wrote.
    own = state.sum_exp * torch.exp(torch.where(state.max == -math.inf, 0, state.max - highest))
    state.gradient_scale.mul_(torch.where(total > 0, own / total, own)).masked_fill_((own == 0) & (total > 0), 0)
    if state.weighted is not None:
        state.weighted.copy_((rescale * (parts["weighted"] + shift * parts["sum_exp"])).sum(0))
    if state.sum_sq is not None:
        state.sum_sq.copy_((rescale * rescale * parts["sum_sq"]).sum(0))
    for name, added in (("sum_logits", state.sum_logits), ("sum_columns", state.sum_columns)):
        if added is not None:
            added.copy_(parts[name].sum(0))
    if state.argmax is not None:
        # Ties go to the first column, and ranks are in the order of their columns.
        winner = parts["max"].argmax(0, keepdim=True)
        state.argmax.copy_(parts["argmax"].gather(0, winner).squeeze(0))
        if state.is_top1 is not None:
            torch.eq(state.argmax, target, out=state.is_top1)
    seen = ~parts["target"].isnan()
    found = torch.where(seen, parts["target"], 0).sum(0)
    state.target.copy_(torch.where(seen.any(0), found, math.nan))
    state.sum_exp.copy_(total)
    state.max.copy_(highest)
