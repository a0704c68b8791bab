"""A factor per token, and a step's count to divide by: each applied in one place."""

from __future__ import annotations

import torch
from torch import Tensor


def weighted(
    values: Tensor,  # any shape, already 0 where nothing is scored
    weights: Tensor,  # the same shape
    mask: Tensor,  # the same shape, bool
) -> Tensor:
    """`weights * values`, 0 outside the mask and, whatever the value holds, where the weight is 0.

    A value that is infinite or NaN under a weight of 0 contributes 0, and gives both a gradient of 0.
    """
    weights = weights.masked_fill(~mask, 0).to(values.dtype)
    # Finite values stay: a weight of 0 may have a gradient.
    return weights * values.masked_fill((weights == 0) & ~values.isfinite(), 0)


def divided(
    total: Tensor,  # without dimensions, or of each token
    count: Tensor,
) -> Tensor:
    """`total / count` in the dtype of `total`.

    An fp64 count, which is exact beyond 2^24 tokens, would make an fp32 loss fp64: both are without dimensions.
    """
    return total / count.to(total.dtype)


def divisor(count: Tensor) -> Tensor:
    """A count that was handed in, kept > 0: of whole tokens at least 1, of a rank's share, a float, anything."""
    if not count.is_floating_point():
        return count.clamp_min(1)
    return count.clamp_min(max(1e-9, torch.finfo(count.dtype).tiny))
