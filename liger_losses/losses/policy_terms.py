"""What policy losses add to the policy term, each a pure function: KL, sampler correction, token masks, value loss.

Inputs are zero where nothing is scored (`GRPOLoss.prepare` sees to it); `mask` is `[r, T]` bool.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .policy_types import bounded_exp

# Estimates of KL(policy || reference) from one sample, with d = log policy - log reference.
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: bounded_exp(-d) + d - 1,
}

SAMPLER_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def sampler_ratio(
    logprobs: Tensor,  # [r, T], of the policy at the time of sampling
    sampling_logprobs: Tensor,  # [r, T], of the program that sampled; NaN where it told none
    mask: Tensor,  # [r, T]
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """Weights `[r, T]`, detached, that correct for the sampler's own arithmetic.

    `w = exp(logprob - sampling_logprob)` of the token, or of the sequence's sums. "truncate" clamps `w` to
    `[clip_min, clip_max]`, "mask" drops what lies outside. 1 where the sampler told no log-probability.
    """
    difference = (logprobs - sampling_logprobs).detach().nan_to_num(nan=0.0).masked_fill(~mask, 0)
    level, action = mode.split("_")
    if level == "sequence":
        difference = difference.sum(dim=1, keepdim=True)
    ratio = bounded_exp(difference)
    if action == "truncate":
        ratio = ratio.clamp(clip_min, clip_max)
    else:
        if clip_min is not None:
            ratio = ratio.masked_fill(ratio < clip_min, 0)
        if clip_max is not None:
            ratio = ratio.masked_fill(ratio > clip_max, 0)
    return torch.where(mask, ratio, 1)


def on_policy_mask(
    logprobs: Tensor,  # [r, T]
    behaviour_logprobs: Tensor,  # [r, T], of the sampler, or of the old policy; NaN counts as no evidence
    advantages: Tensor,  # [r, T]
    mask: Tensor,  # [r, T]
    threshold: float,
) -> Tensor:
    """Which tokens stay, `[r, T]` bool: those of an advantage >= 0, and those of sequences near the policy.

    Near: `mean_t(behaviour_logprob - logprob) <= threshold` over the scored tokens of the row.

    DeepSeek-AI, "DeepSeek-V3.2", arXiv:2512.02556, Eq. 9.
    """
    drift = (behaviour_logprobs - logprobs.detach()).nan_to_num(nan=0.0).masked_fill(~mask, 0)
    mean = drift.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp_min(1)
    return (advantages >= 0) | (mean <= threshold)


def top_entropy_mask(
    entropy: Tensor,  # [R, T], the whole batch
    mask: Tensor,  # [R, T]
    quantile: float,  # share of the tokens that stay, in [0, 1]
) -> Tensor:
    """The scored tokens whose entropy is at least the batch's `1 - quantile` quantile, `[R, T]` bool.

    Quantiles between two entropies are interpolated linearly. 0 keeps the largest entropy alone.

    Wang et al., "Beyond the 80/20 Rule", arXiv:2506.01939.
    """
    entropy = entropy.detach().masked_fill(~mask, torch.inf)
    # Scored entropies come first, and how many they are stays on the device.
    ordered = torch.cat([entropy.flatten().sort().values, entropy.new_full((1,), torch.inf)])
    place = (1 - quantile) * (mask.sum() - 1).clamp_min(0).to(entropy.dtype)
    # By index_select: a 0-dimensional index in brackets is read by the host.
    lower, upper = ordered.index_select(0, torch.stack([place.floor(), place.ceil()]).long())
    # Infinities are those of a batch with nothing scored.
    threshold = torch.where(place.floor() == place.ceil(), lower, torch.lerp(lower, upper, place.frac()))
    return mask & (entropy >= threshold)


def value_loss(
    values: Tensor,  # [r, T]
    returns: Tensor,  # [r, T]
    old_values: Tensor | None,  # [r, T]; None: no clipping
    clip: float | None,
) -> Tensor:
    """`max((v - R)^2, (v_clipped - R)^2) / 2` per token `[r, T]`, `v_clipped` within `clip` of the old value.

    Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347; the clipped form is that of its
    authors' implementation.
    """
    squares = (values - returns).square()
    if old_values is not None and clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        squares = torch.maximum(squares, (clipped - returns).square())
    return squares / 2
