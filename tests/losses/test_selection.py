"""Tokens at risk: value at risk and conditional value at risk over a batch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.losses import TokenSelection

SCORES = torch.tensor([[5.0, 1.0, 9.0, 4.0], [4.0, 7.0, 2.0, 4.0]])
EVERY = torch.ones(2, 4, dtype=torch.bool)


def weights(selection: TokenSelection, scores: Tensor = SCORES, mask: Tensor = EVERY) -> Tensor:
    return selection.weights({"logprob": -scores, "entropy": scores}, mask)


@pytest.mark.parametrize("by", ["loss", "entropy"])
def test_value_at_risk_keeps_the_highest_and_all_ties(by: str) -> None:
    got = weights(TokenSelection(by=by, quantile=0.5))  # four of eight: 9, 7, 5 and the first of three 4s
    assert got.tolist() == [[1, 0, 1, 1], [1, 1, 0, 1]]


@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.875, 0.95])
def test_cvar_is_the_mean_beyond_the_quantile(quantile: float) -> None:
    """Rockafellar and Uryasev: `min_c c + E[(score - c)+] / (1 - quantile)`, the minimum being at one of the scores."""
    share = max(1 / 8, 1 - quantile)
    want = min((c + (SCORES - c).clamp_min(0).mean() / share).item() for c in SCORES.flatten())
    picked = weights(TokenSelection(quantile=quantile, weighting="cvar"))
    assert picked.sum() == pytest.approx(8 * share)
    assert (picked * SCORES).sum() / picked.sum() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("weighting", ["var", "cvar"])
def test_only_scored_tokens_count(weighting: str) -> None:
    mask = torch.tensor([[True, True, False, True], [False, True, True, False]])
    scores = SCORES.masked_fill(~mask, float("nan"))
    got = weights(TokenSelection(quantile=0.6, weighting=weighting), scores, mask)
    assert got.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert not weights(TokenSelection(weighting=weighting), scores, torch.zeros_like(mask)).any()
    assert weights(TokenSelection(weighting=weighting), scores[:0], mask[:0]).shape == (0, 4)


def test_a_whole_number_of_tokens_stays_it() -> None:
    """(1 - 0.9) * 50 is 4.999... or 5.000...1; five tokens are kept."""
    scores = torch.arange(50.0).view(5, 10)
    mask = torch.ones_like(scores, dtype=torch.bool)
    for tokens in range(1, 10):
        assert weights(TokenSelection(quantile=1 - tokens / 10), scores, mask).sum() == 5 * tokens


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"by": "risk"}, ValueError, "by: got 'risk', expected one of loss, entropy"),
        ({"weighting": "mean"}, ValueError, "weighting: got 'mean', expected one of var, cvar"),
        ({"quantile": 1}, ValueError, "quantile: got 1, expected 0 <= quantile < 1"),
        ({"quantile": -0.1}, ValueError, "quantile: got -0.1"),
        ({"quantile": "half"}, TypeError, "quantile: got 'half'"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        TokenSelection(**options)
