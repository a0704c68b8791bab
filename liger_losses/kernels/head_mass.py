"""The most probable tokens of a distribution, by the mass that they make up, without sorting it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# From a row's sum over the columns here to that over all columns, where some of them are elsewhere.
Reduce = Callable[[Tensor], Tensor]


def _all_here(sums: Tensor) -> Tensor:
    return sums


def head_mask(
    p: Tensor,  # [*, V] probabilities, fp32 or fp64
    mass: float,  # in [0, 1]
    reduce: Reduce = _all_here,
) -> Tensor:
    """`[*, V]` bool: the fewest most probable tokens whose probabilities sum to `mass` or more.

    That is `p >= tau`, `tau` the largest number for which the sum is no less. Tokens as probable as the last one that
    is needed belong to the head with it, all of them, so that the head does not depend on the tokens' order. A
    probability of 0 never does.

    Positive floats are ordered as the integers of their bits are: `tau` is found bit by bit, the highest first, each
    with one sum over the row (30 of them for fp32: so many bits has a number below 2), without the indices that a sort
    holds beside it.
    """
    bits, integer = (62, torch.int64) if p.dtype == torch.float64 else (30, torch.int32)
    found = torch.zeros(*p.shape[:-1], 1, dtype=integer, device=p.device)
    for bit in reversed(range(bits)):
        tried = found | (1 << bit)
        reached = reduce((p * (p >= tried.view(p.dtype))).sum(-1, keepdim=True)) >= mass
        found = torch.where(reached, tried, found)
    return (p >= found.view(p.dtype)) & (p > 0)


def head_share(
    s: Tensor,  # [*, V] the student's probabilities
    t: Tensor,  # [*, V] the teacher's
    mass: float,
    reduce: Reduce = _all_here,
) -> Tensor:
    """`[*]`: how much of `sum_v |s_v - t_v|` lies in the teacher's head, in [0, 1]; 1/2 for equal distributions."""
    gap = (s - t).abs()
    total = reduce(gap.sum(-1))
    share = reduce(torch.where(head_mask(t, mass, reduce), gap, 0).sum(-1)) / total
    return torch.where(total == 0, 0.5, share.clamp(max=1))
