"""Small inputs on which software of this kind went wrong for its users, by their number, with the right value.

Here: B13, B16, B17, B20, B23, B27, B53, B54. Others stand where their subject is tested: B01, B47, B48, B49, B51 in
test_cost.py; B21, B25, B40, X05 in test_precision.py; X03 in test_refusals.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_losses.chunked import linear_logprobs
from liger_losses.modules import LigerFusedLinearDPOLoss

from ..oracle import STATISTICS, Case, make_case, unfused

BETA = 0.3


def pairs(rows: int = 4, length: int = 8, **options: Any) -> tuple[Case, Case]:
    """A policy and a reference, fp64."""
    case = make_case(rows, length, 6, 19, **options)
    reference = make_case(rows, length, 6, 19, trainable=(), seed=9)
    reference.target = case.target
    return case, reference


def dpo(case: Case, reference: Case, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    module = LigerFusedLinearDPOLoss(beta=BETA, **options)
    return module(case.weight, case.hidden, case.target, case.bias, reference.hidden, reference.weight, reference.bias)


def log_ratios(case: Case, reference: Case) -> tuple[Tensor, Tensor]:
    """`log pi - log ref` of chosen and rejected sequences."""
    policy, ref = (unfused(each, ("logprob",))["logprob"].sum(-1) for each in (case, reference))
    return (policy - ref).chunk(2)


def test_b13_a_row_with_no_scored_token() -> None:
    """Log-probability 0 and no gradient; the other pair as it was; nothing reaches the weight's gradient."""
    case, reference = pairs(scored="all")
    case.target[3] = -100
    for options in ({}, {"average_log_prob": True, "compute_nll_loss": True}):
        loss, outputs = dpo(case, reference, **options)
        assert outputs[1][1] == 0
        hidden, weight, _ = torch.autograd.grad(loss, case.leaves)
        assert loss.isfinite()
        assert weight.isfinite().all()
        assert (hidden[3] == 0).all()
        assert (hidden[:3] != 0).any(-1).all()


def test_b13_a_chosen_half_with_no_scored_token() -> None:
    case, reference = pairs(scored="all")
    case.target[:2] = -100
    loss, outputs = dpo(case, reference, compute_nll_loss=True)
    assert outputs[4] == 0
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, case.leaves))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_b16_label_smoothing(smoothing: float) -> None:
    case, reference = pairs()
    chosen, rejected = log_ratios(case, reference)
    z = BETA * (chosen - rejected)
    want = (-(1 - smoothing) * logsigmoid(z) - smoothing * logsigmoid(-z)).mean()
    torch.testing.assert_close(dpo(case, reference, label_smoothing=smoothing)[0], want)


def test_b16_label_smoothing_is_refused_where_it_has_no_form() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing: got 0\.1"):
        LigerFusedLinearDPOLoss(loss_type="hinge", label_smoothing=0.1)


def test_b17_ipo_divides_by_the_lengths_of_the_mask() -> None:
    case, reference = pairs(2, 6, scored="all")
    case.target[0, 2:] = -100
    case.target[1, 5:] = -100
    chosen, rejected = log_ratios(case, reference)
    want = (chosen / 2 - rejected / 5 - 1 / (2 * BETA)).square().mean()
    torch.testing.assert_close(dpo(case, reference, loss_type="ipo")[0], want)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "sigmoid_norm"}, {"loss_type": "aot"}, {"loss_type": "aot_unpaired"}, {"loss_type": "sft"},
        {"loss_type": ("sigmoid", "bco_pair", "sft"), "loss_weights": (0.8, 0.2, 1.0)},
        {"f_divergence": "js_divergence"}, {"f_divergence": "alpha_divergence", "f_alpha": 0.7},
        {"use_weighting": True}, {"ld_alpha": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_b17_every_variant_is_fused(options: dict[str, Any]) -> None:
    """The loss object on whole logits; that the objects are TRL's formulas is tested in tests/losses."""
    case, reference = pairs(6)
    loss, _ = dpo(case, reference, **options)
    objective = LigerFusedLinearDPOLoss(beta=BETA, **options).loss
    inputs = {"ref_logprobs": unfused(reference, ("logprob",))["logprob"]}
    want, _ = objective(unfused(case), case.mask, inputs, objective.totals(case.mask, inputs))
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(*(torch.autograd.grad(value, case.leaves) for value in (loss, want)))


def test_b20_scale_then_softcap_then_temperature() -> None:
    case = make_case(1, 5, 16, 40, scored="all")
    got = linear_logprobs(*case.head, softcap=5.0, logit_scale=1.3, temperature=0.7)
    z = 5 * torch.tanh(1.3 * (case.hidden @ case.weight.T + case.bias) / 5) / 0.7
    want = z.log_softmax(-1).gather(-1, case.target.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(value.sum(), case.leaves) for value in (got, want)))
    torch.testing.assert_close(linear_logprobs(*case.head, logit_scale=None), linear_logprobs(*case.head))


@pytest.mark.parametrize("strategy", ["cached", "recompute"])
def test_b23_every_tokens_own_upstream_gradient(strategy: str) -> None:
    """`grad_W = sum_i g_i (1[y_i] - p_i) x_i^T`; the first token is ignored."""
    case = make_case(1, 5, 6, 19, bias=False, scored="all")
    case.target[0, 0] = -100
    sent = torch.tensor([[9.0, -1.0, 0.5, 2.0, 0.0]], dtype=torch.float64)
    got = torch.autograd.grad(linear_logprobs(*case.head, strategy=strategy), case.weight, sent)[0]
    p = (case.hidden @ case.weight.T).softmax(-1)[0]
    want = sum(
        sent[0, i] * torch.outer(torch.nn.functional.one_hot(case.target[0, i], 19) - p[i], case.hidden[0, i])
        for i in range(1, 5)
    )
    torch.testing.assert_close(got, want)


def test_b27_logit_means_are_over_scored_positions() -> None:
    case, reference = pairs(2, scored="all")
    case.target[:, 4:] = -100
    z = case.hidden @ case.weight.T + case.bias
    _, outputs = dpo(case, reference)
    torch.testing.assert_close(torch.stack(outputs[2:4]), z[:, :4].mean((1, 2)).detach())


def test_b53_reference_log_probabilities_known_in_advance() -> None:
    case, reference = pairs()
    loss, outputs = dpo(case, reference)
    chosen, rejected = unfused(reference, ("logprob",))["logprob"].sum(-1).chunk(2)
    module = LigerFusedLinearDPOLoss(beta=BETA)
    known, again = module(
        case.weight, case.hidden, case.target, case.bias, ref_chosen_logps=chosen, ref_rejected_logps=rejected
    )
    torch.testing.assert_close((known, *again), (loss, *outputs))


def test_b54_per_token_outputs() -> None:
    case = make_case()
    got = linear_logprobs(*case.head, statistics=STATISTICS)
    want = unfused(case)
    assert list(got) == list(STATISTICS)
    for name in STATISTICS:
        torch.testing.assert_close(got[name], want[name])
