"""Counts read ahead, whichever call is given them: the same result, and no other `ignore_index` than theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_losses as library
from liger_losses.chunked import ScoredTokens
from liger_losses.losses import CrossEntropyLoss

ROWS, LENGTH, HIDDEN, VOCAB = 4, 5, 8, 19
IGNORE = 3  # a class that occurs among the targets

Call = Callable[[Any], Any]


def tensors(flat: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """weight, hidden, target."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    hidden = torch.randn(ROWS, LENGTH, HIDDEN, generator=generator)
    target = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    target[:, 1] = IGNORE
    return (weight, hidden.flatten(0, 1), target.flatten()) if flat else (weight, hidden, target)


def calls(flat: bool, **options: Any) -> dict[str, Call]:
    """By name, functions of the target alone. Those of rows have no form for one row of tokens."""
    weight, hidden, target = tensors(flat)
    labels = torch.tensor([True, False] * (ROWS // 2))
    either: dict[str, Call] = {
        "linear_logprobs": lambda t: library.linear_logprobs(hidden, weight, t, **options),
        "linear_divergence": lambda t: library.linear_divergence(
            hidden, weight, t, teacher_hidden=hidden, teacher_weight=2 * weight, **options
        ),
        "fused_linear_distillation": lambda t: library.fused_linear_distillation(
            hidden, weight, t, teacher_hidden=hidden, teacher_weight=2 * weight, **options
        ),
        "JSD": lambda t: library.LigerFusedLinearJSD(**options)(hidden, weight, hidden, 2 * weight, t),
        **{
            f"cross entropy, {reduction}": lambda t, reduction=reduction: library.LigerFusedLinearCrossEntropyLoss(
                reduction=reduction, return_predicted_tokens=True, **options
            )(weight, hidden, t)
            for reduction in ("mean", "sum", "none")
        },
    }
    if flat:
        return either
    return {
        **either,
        "fused_linear_loss": lambda t: library.fused_linear_loss(CrossEntropyLoss(), hidden, weight, t, **options),
        "DPO": lambda t: library.LigerFusedLinearDPOLoss(use_ref_model=False, **options)(weight, hidden, t),
        "CPO": lambda t: library.LigerFusedLinearCPOLoss(**options)(weight, hidden, t),
        "ORPO": lambda t: library.LigerFusedLinearORPOLoss(**options)(weight, hidden, t),
        "ORPO with labels of its own": lambda t: library.LigerFusedLinearORPOLoss(**options)(
            weight, hidden, t, nll_target=target
        ),
        "KTO": lambda t: library.LigerFusedLinearKTOLoss(**options)(hidden, weight, t, preference_labels=labels),
        "BCO": lambda t: library.LigerFusedLinearBCOLoss(use_ref_model=False, **options)(
            hidden, weight, t, preference_labels=labels
        ),
    }


CASES = [(flat, name) for flat in (False, True) for name in calls(flat)]


@pytest.mark.parametrize(("flat", "name"), CASES)
def test_the_same_result(flat: bool, name: str) -> None:
    target = tensors(flat)[2]
    call = calls(flat, ignore_index=IGNORE)[name]
    torch.testing.assert_close(call(ScoredTokens(target, IGNORE)), call(target), rtol=0, atol=0)


@pytest.mark.parametrize(("flat", "name"), CASES)
def test_another_ignore_index(flat: bool, name: str) -> None:
    with pytest.raises(ValueError, match="ignore_index: got -100, but target was read with 3"):
        calls(flat)[name](ScoredTokens(tensors(flat)[2], IGNORE))


def test_counts_are_not_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator each reading waits."""
    weight, hidden, target = tensors(flat=True)
    ahead, made = ScoredTokens(target), []
    monkeypatch.setattr(ScoredTokens, "__init__", lambda *_: made.append(1))
    library.LigerFusedLinearCrossEntropyLoss()(weight, hidden, ahead)
    assert not made
