"""Losses without a reference against TRL's own code, values and gradients, and where TRL is wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from liger_losses.losses import ReferenceFreeLoss

from . import trl_reference_free as trl
from .batch import Batch, make_batch
from .test_reference_free import evaluate, prompts_and_responses


def compare(loss: ReferenceFreeLoss, batch: Batch, peer, tolerance: float = 1e-10, **inputs: Tensor) -> dict:
    """Value, gradient and what both report; returns what TRL logs."""
    ours, theirs = batch.leaf(), batch.leaf()
    value, metrics = evaluate(loss, ours, **inputs)
    expected, logged = peer(theirs.logits)
    torch.testing.assert_close(value, expected.to(value.dtype), rtol=tolerance, atol=tolerance)
    value.backward()
    expected.backward()
    assert ours.logits.grad.abs().max() > 0
    torch.testing.assert_close(ours.logits.grad, theirs.logits.grad, rtol=tolerance, atol=tolerance)
    for name, key in (
        ("chosen_logps", "logps/chosen"),
        ("rejected_logps", "logps/rejected"),
        ("chosen_rewards", "rewards/chosen"),
        ("rejected_rewards", "rewards/rejected"),
        ("nll_loss", "nll_loss"),
        ("log_odds_ratio", "log_odds_ratio"),
        ("log_odds_chosen", "log_odds_chosen"),
    ):
        if key in logged:
            assert metrics[name].mean().item() == pytest.approx(logged[key], rel=1e-5, abs=1e-6), name
    return logged


@pytest.mark.parametrize(
    ("loss_type", "label_smoothing"),
    [("sigmoid", 0.0), ("sigmoid", 0.1), ("hinge", 0.0), ("ipo", 0.0), ("simpo", 0.0), ("simpo", 0.1)],
)
@pytest.mark.parametrize("nll_weight", [0.0, 0.7])
@pytest.mark.parametrize("reward_alpha", [0.0, 0.25, -0.5])
def test_cpo_is_trls(loss_type: str, nll_weight: float, reward_alpha: float, label_smoothing: float) -> None:
    options = {"loss_type": loss_type, "beta": 0.4, "reward_alpha": reward_alpha}
    options["label_smoothing"] = label_smoothing
    if loss_type == "simpo":
        options["gamma"] = 0.8
    nll = {"compute_nll_loss": True, "alpha": nll_weight} if nll_weight else {}
    batch = make_batch(6)
    compare(
        ReferenceFreeLoss(**options, **nll), batch,
        lambda logits: trl.trl_cpo(logits, batch.target, **options, nll_weight=nll_weight),
    )  # fmt: skip


def test_orpo_is_trls() -> None:
    """NLL of prompt and completion. TRL computes the odds in fp32."""
    batch = make_batch(6)
    whole, ids, responses = prompts_and_responses(batch)
    loss = ReferenceFreeLoss(loss_type="orpo", beta=0.6, compute_nll_loss=True)
    compare(
        loss, whole, lambda logits: trl.trl_orpo(logits, batch.target, ids, whole.mask, beta=0.6), 1e-6,
        response_mask=responses,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loss_type", "label_smoothing"),
    [("sigmoid", 0.0), ("sigmoid", 0.1), ("hinge", 0.0), ("ipo", 0.0), ("tpo-l", 0.0), ("tpo-l", 0.1)],
)
@pytest.mark.parametrize("nll_weight", [0.0, 0.7])
def test_tpo_is_trls(loss_type: str, nll_weight: float, label_smoothing: float) -> None:
    options = {"loss_type": loss_type, "beta": 0.4, "label_smoothing": label_smoothing}
    if loss_type == "tpo-l":
        options["gamma"] = 0.8
    nll = {"compute_nll_loss": True, "alpha": nll_weight, "nll_response": "third"} if nll_weight else {}
    batch = make_batch(6)
    logged = compare(
        ReferenceFreeLoss(**options, **nll), batch,
        lambda logits: trl.trl_tpo(logits, batch.target, **options, nll_weight=nll_weight),
    )  # fmt: skip
    _, metrics = evaluate(ReferenceFreeLoss(**options, **nll), batch)
    assert metrics["chosen_logits_mean"].item() == pytest.approx(logged["logits/chosen"], rel=1e-5)
    assert metrics["rejected_logits_mean"].item() == pytest.approx(logged["logits/rejected"], rel=1e-5)


def test_where_trl_is_wrong() -> None:
    """Each with the smallest input: an empty response, a certain one, an improbable one."""
    # A row with no scored token: TRL's mean log-prob is 0 / 0.
    batch = make_batch(2)
    batch.mask[2], batch.target[2] = False, -100
    assert trl.trl_cpo(batch.logits, batch.target, loss_type="simpo")[0].isnan()
    assert evaluate(ReferenceFreeLoss(loss_type="simpo"), batch)[0].isfinite()
    # Log-prob 0 for both: TRL's log1mexp(0) is -inf, and -inf - -inf.
    certain, target = torch.full((2, 1, 3), -1e4), torch.zeros(2, 1, dtype=torch.long)
    certain[..., 0] = 0
    batch = Batch(certain, torch.zeros(2, 1), target, torch.ones(2, 1, dtype=torch.bool))
    assert trl.trl_orpo(certain, target, target, batch.mask)[0].isnan()
    value, _ = evaluate(ReferenceFreeLoss(loss_type="orpo", beta=0.1, compute_nll_loss=True), batch)
    assert value.item() == pytest.approx(0.1 * math.log(2))
    # e^-120 is 0 in fp32, and 0^-0.25 infinite: TRL's AlphaPO rewards are -inf - -inf.
    certain[..., 0] = -120
    certain[..., 1] = 0
    assert trl.trl_cpo(certain, target, loss_type="simpo", reward_alpha=0.25)[0].isnan()
    value, metrics = evaluate(ReferenceFreeLoss(loss_type="simpo", reward_alpha=0.25), batch)
    assert value.item() == pytest.approx(math.log1p(math.exp(0.5)))
    assert metrics["chosen_rewards"].item() == pytest.approx(0.1 * (1 - math.exp(30)) / 0.25, rel=1e-5)
