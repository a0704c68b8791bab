"""From per-token statistics `[R, T]` to one number per sequence `[R]`.

Positions where `mask` is False are never read: whatever they hold, NaN included, reaches neither a value nor a
gradient. A row with no scored position gives 0 and gets a zero gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import check_flag, check_float_tensor, check_mask, check_number, check_scored
from .._constants import wide
from .pairs import pair_count, split_pairs


def sequence_lengths(
    mask: Tensor,  # [R, T] bool
) -> Tensor:
    """Scored tokens per row, `[R]` int64."""
    check_scored(mask)
    if mask.dim() != 2:
        raise ValueError(f"mask: got shape {list(mask.shape)}, expected [rows, tokens]")
    return mask.sum(dim=1)


def sequence_logprobs(
    logprobs: Tensor,  # [R, T]
    mask: Tensor,  # [R, T] bool, True where the token is scored
    *,
    average: bool = False,
) -> Tensor:
    """Log-probability of each sequence: `sum_t logprobs[r, t]` over scored `t`, or their mean with `average`.

    Returns `[R]`. Raises TypeError if `mask` is not bool, ValueError if the shapes differ.
    """
    check_flag("average", average)
    check_mask(mask, logprobs)
    total = wide(logprobs).masked_fill(~mask, 0).sum(dim=1)
    return total / sequence_lengths(mask).clamp_min(1) if average else total


def length_desensitized_logprobs(
    logprobs: Tensor,  # [2B, T], chosen rows first
    mask: Tensor,  # [2B, T] bool
    ld_alpha: float,  # weight of the tokens beyond the shared length, in [0, 1]
) -> Tensor:
    """Sequence log-probabilities of LD-DPO, `[2B]`.

    With `L = min(n_chosen, n_rejected)` scored tokens of a pair,
    `logp = sum_{k <= L} logprob_k + ld_alpha * sum_{k > L} logprob_k` over the scored tokens `k` of a row.
    `ld_alpha = 1` is the plain sum; `ld_alpha = 0` reads only the shared length.

    Liu et al., "Length Desensitization in Direct Preference Optimization", arXiv:2409.06411.
    """
    check_number("ld_alpha", ld_alpha, low=0, high=1)
    check_mask(mask, logprobs)
    pair_count(mask.shape[0])
    shared = torch.minimum(*split_pairs(sequence_lengths(mask))).repeat(2)
    beyond = mask.cumsum(dim=1) > shared.unsqueeze(1)
    scored = wide(logprobs).masked_fill(~mask, 0)
    return torch.where(beyond, ld_alpha * scored, scored).sum(dim=1)


def alignment_weights(
    logprobs: Tensor,  # [R, T]
    log_sum_sq_probs: Tensor,  # [R, T], log sum_v p_v^2
    mask: Tensor,  # [R, T] bool
) -> Tensor:
    """WPO weight of each sequence, `[R]`, detached: `w = exp(mean_t(logprob_t - log sum_v p_v^2))` over scored `t`.

    A token sampled from the policy has on average the weight 1; a token the policy finds unlikely weighs less.
    The weight of a pair is the product of its two. An empty row weighs 1.

    Zhou et al., "WPO: Enhancing RLHF with Weighted Preference Optimization", arXiv:2406.11827, Eq. 2.
    """
    check_mask(mask, logprobs)
    check_float_tensor("log_sum_sq_probs", log_sum_sq_probs, tuple(mask.shape))
    aligned = (wide(logprobs) - wide(log_sum_sq_probs)).detach()
    return sequence_logprobs(aligned, mask, average=True).exp()
