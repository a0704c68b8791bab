"""Every loss type, divergence and option against TRL's own code, values and gradients."""

from __future__ import annotations

import pytest
import torch

from liger_losses.losses import LOSS_TYPES, DPOLoss, alignment_weights, sequence_logprobs

from . import trl_reference
from .batch import SMOOTHED, evaluate, make_batch

# TRL's DPO has no ipo_sum; its online DPO has (tests/losses/test_reference_free.py).
TRL_TYPES = [name for name in LOSS_TYPES if name != "ipo_sum"]
DIVERGENCES = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("js_divergence", 0.5)]
DIVERGENCES += [("alpha_divergence", alpha) for alpha in (0.0, 0.5, 1.0, 2.0)]


def compare(options: dict, *, dtype: torch.dtype = torch.float64, tolerance: float = 1e-10) -> None:
    ours, theirs = make_batch(dtype=dtype).leaf(), make_batch(dtype=dtype).leaf()
    value, metrics = evaluate(DPOLoss(**options), ours)
    expected, logged = trl_reference.trl_dpo_loss(theirs, **options)
    assert value.dtype == dtype
    torch.testing.assert_close(value, expected.to(dtype), rtol=tolerance, atol=tolerance)
    value.backward()
    expected.backward()
    torch.testing.assert_close(ours.logits.grad, theirs.logits.grad, rtol=tolerance, atol=tolerance)
    assert ours.logits.grad.abs().max() > 0
    for name, key in (
        ("chosen_logps", "logps/chosen"),
        ("rejected_logps", "logps/rejected"),
        ("chosen_rewards", "rewards/chosen"),
        ("rejected_rewards", "rewards/rejected"),
        ("chosen_logits_mean", "logits/chosen"),
        ("rejected_logits_mean", "logits/rejected"),
    ):
        assert not metrics[name].requires_grad
        assert metrics[name].mean().item() == pytest.approx(logged[key], rel=1e-5, abs=1e-6), name


def smoothing_of(name: str) -> dict:
    # TRL accepts label_smoothing with "sigmoid" and ignores it (checked below), so only the others are compared.
    return {"label_smoothing": SMOOTHED[name]} if name in SMOOTHED and name != "sigmoid" else {}


# TRL holds exo_pair's label smoothing in fp32 whatever the dtype.
TOLERANCE = {"exo_pair": 1e-7}


@pytest.mark.parametrize("loss_type", TRL_TYPES)
@pytest.mark.parametrize("beta", [0.1, 1.3])
def test_loss_type(loss_type: str, beta: float) -> None:
    compare(
        {"loss_type": loss_type, "beta": beta, **smoothing_of(loss_type)}, tolerance=TOLERANCE.get(loss_type, 1e-10)
    )


@pytest.mark.parametrize("loss_type", [name for name in TRL_TYPES if LOSS_TYPES[name].any_divergence])
@pytest.mark.parametrize(("f_divergence", "f_alpha"), DIVERGENCES)
def test_divergence(loss_type: str, f_divergence: str, f_alpha: float) -> None:
    options = {"loss_type": loss_type, "f_divergence": f_divergence, "beta": 0.3, **smoothing_of(loss_type)}
    if f_divergence == "alpha_divergence":
        # TRL's alpha divergence has no fp64 form.
        compare({**options, "f_alpha": f_alpha}, dtype=torch.float32, tolerance=2e-5)
    else:
        compare(options, tolerance=TOLERANCE.get(loss_type, 1e-10))


@pytest.mark.parametrize("loss_type", TRL_TYPES)
@pytest.mark.parametrize("ld_alpha", [0.0, 0.4, 1.0])
def test_length_desensitization(loss_type: str, ld_alpha: float) -> None:
    compare(
        {"loss_type": loss_type, "ld_alpha": ld_alpha, **smoothing_of(loss_type)},
        tolerance=TOLERANCE.get(loss_type, 1e-10),
    )


@pytest.mark.parametrize(
    "loss_type",
    [name for name in TRL_TYPES if LOSS_TYPES[name].separability == "pair" and name not in ("hinge", "sft")],
)
@pytest.mark.parametrize("ld_alpha", [None, 0.4])
def test_weighting(loss_type: str, ld_alpha: float | None) -> None:
    compare(
        {"loss_type": loss_type, "use_weighting": True, "ld_alpha": ld_alpha, **smoothing_of(loss_type)},
        tolerance=TOLERANCE.get(loss_type, 1e-10),
    )


def test_weighting_where_trl_raises() -> None:
    """TRL multiplies the weights in place: its hinge then has no backward, and its sft no forward."""
    ours, theirs = make_batch().leaf(), make_batch().leaf()
    expected, _ = trl_reference.trl_dpo_loss(theirs, "hinge", use_weighting=True)
    value, _ = evaluate(DPOLoss(loss_type="hinge", use_weighting=True), ours)
    torch.testing.assert_close(value, expected)
    with pytest.raises(RuntimeError, match="inplace"):
        expected.backward()
    with pytest.raises(RuntimeError, match="single memory location"):
        trl_reference.trl_dpo_loss(theirs, "sft", use_weighting=True)

    # What its formulas say.
    statistics = ours.statistics()
    w = alignment_weights(statistics["logprob"], statistics["log_sum_sq_prob"], ours.mask)
    pair_weights = w[:5] * w[5:]
    logps = sequence_logprobs(statistics["logprob"] - ours.ref_logprobs, ours.mask)
    hinge = (1 - 0.1 * (logps[:5] - logps[5:])).relu()
    (want,) = torch.autograd.grad((hinge * pair_weights).mean(), ours.logits, retain_graph=True)
    (got,) = torch.autograd.grad(value, ours.logits)
    torch.testing.assert_close(got, want)
    value, _ = evaluate(DPOLoss(loss_type="sft", use_weighting=True), ours)
    nll = -statistics["logprob"][:5].sum() / ours.mask[:5].sum()
    torch.testing.assert_close(value, nll * pair_weights.mean())


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        {"loss_type": ["sigmoid", "ipo"]},
        {"loss_type": ["hinge", "robust"], "label_smoothing": 0.2, "loss_weights": [0.5, -0.3]},
        {"loss_type": ["aot", "apo_zero"], "label_smoothing": 0.1},
        {"loss_type": ["sigmoid_norm", "sppo_hard"], "use_weighting": True},
        {"loss_type": ["discopop", "hinge"], "discopop_tau": 0.5, "f_divergence": "js_divergence"},
    ],
    ids=lambda options: "+".join(options["loss_type"]),
)
def test_mixture(options: dict) -> None:
    compare(options)


def test_trl_ignores_label_smoothing_with_sigmoid() -> None:
    """The one formula where we differ on purpose: with smoothing we compute cDPO, TRL plain DPO."""
    batch = make_batch()
    plain, _ = trl_reference.trl_dpo_loss(batch, "sigmoid")
    smoothed, _ = trl_reference.trl_dpo_loss(batch, "sigmoid", label_smoothing=0.3)
    assert smoothed == plain
    ours, metrics = evaluate(DPOLoss(label_smoothing=0.3), batch)
    z = metrics["chosen_rewards"] - metrics["rejected_rewards"]
    expected = (-0.7 * z.sigmoid().log() - 0.3 * (-z).sigmoid().log()).mean()
    torch.testing.assert_close(ours, expected)
    assert not torch.isclose(ours, plain)
