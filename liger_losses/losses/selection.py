"""Which tokens of a batch a loss is taken over: those at risk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .._checks import check_choice, check_number


@dataclass(frozen=True, kw_only=True)
class TokenSelection:
    """Keeps the tokens of highest risk: those whose score lies at or above a quantile of the batch.

    With `n` scored tokens and `k = max(1, ceil((1 - quantile) n))`, the threshold is the `k`-th largest score (the
    value at risk, VaR). The weight of a token is

    - `"var"`: 1 from the threshold on, 0 below; ties are all kept;
    - `"cvar"`: the same above it, while the tokens at the threshold share what is missing, so that the weights sum to
      `max(1, (1 - quantile) n)`: a mean over these weights is the conditional value at risk of the scores
      (Rockafellar and Uryasev, 2000).

    Weights are constants. Bal et al., "ESLM: Risk-Averse Selective Language Modeling for Efficient Pretraining",
    arXiv:2505.19893.

    Args:
        by: the score: `"loss"` (`-log p` of the label) or `"entropy"` (of the prediction, in nats).
        quantile: in `[0, 1)`: the share of tokens left out.
        weighting: `"var"` or `"cvar"`.
    """

    by: str = "loss"
    quantile: float = 0.5
    weighting: str = "var"

    def __post_init__(self) -> None:
        check_choice("by", self.by, ("loss", "entropy"))
        check_choice("weighting", self.weighting, ("var", "cvar"))
        check_number("quantile", self.quantile, low=0)
        if self.quantile >= 1:
            raise ValueError(f"quantile: got {self.quantile}, expected 0 <= quantile < 1")

    def weights(self, statistics: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """`[R, T]` weights of the scored tokens of the whole batch; zero elsewhere."""
        score = -statistics["logprob"] if self.by == "loss" else statistics["entropy"]
        score = score.detach().masked_fill(~mask, -torch.inf)
        # In fp64: `(1 - quantile) n` of a whole number of tokens must not become the next one.
        kept = ((1 - self.quantile) * mask.sum().double()).clamp_min(1)
        ranked = score.reshape(-1).sort(descending=True).values
        if ranked.numel() == 0:
            return torch.zeros_like(score)
        threshold = ranked.gather(0, ((kept - 1e-6).ceil().long() - 1).clamp_min(0).unsqueeze(0))
        above, at = (score > threshold) & mask, (score == threshold) & mask
        if self.weighting == "var":
            return (above | at).to(score.dtype)
        share = (kept - above.sum()) / at.sum().clamp_min(1)
        return above.to(score.dtype) + at * share.to(score.dtype)
