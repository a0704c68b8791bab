"""What `fused_linear_distillation` hands back beside the loss, what a weight of 0 does, and how it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.chunked import (
    DistillationLoss,
    Divergence,
    fused_linear_distillation,
    fused_linear_loss,
    linear_divergence,
)
from liger_losses.losses import BinaryCrossEntropyLoss, CrossEntropyLoss, SampledKLLoss, TokenSelection

from .test_distillation import NO_HEAD, STRATEGIES, make_pair, token_weights

REPORT = ("divergence", "logprob", "entropy", "teacher_entropy", "distillation", "soft", "hard")
MIXED = Divergence(kind="jsd", hard_weight=0.4, soft_weight=0.6, temperature=1.5, scale_by_squared_temperature=True)


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"num_items_in_batch": 50}], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_reports_are_means_and_terms_add_up(weighted: bool, options: dict[str, Any], strategy: str) -> None:
    pair = make_pair(2, 90, scored="prompt")
    weights = 3 * token_weights(pair) if weighted else None
    exact, _ = pair.unfused(MIXED)
    loss, metrics = fused_linear_distillation(
        *pair.case.head, **pair.teacher(), divergence=MIXED, token_weights=weights, report=REPORT, strategy=strategy,
        memory_budget=1_100_000, **options,
    )  # fmt: skip
    count = pair.case.mask.sum()
    for name in REPORT[:5]:
        found = -metrics["nll"] if name == "logprob" else metrics[name]
        torch.testing.assert_close(found, exact[name].sum().detach() / count)
    divisor = {"reduction": 1, "num_items_in_batch": 50}.get(next(iter(options), ""), count)
    soft = ((1 if weights is None else weights) * exact["divergence"]).sum().detach() / divisor
    torch.testing.assert_close(metrics["soft"], soft)
    torch.testing.assert_close(loss.detach(), 0.6 * 1.5**2 * metrics["soft"] + 0.4 * metrics["hard"])


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_a_weight_of_zero_is_a_contribution_of_zero(kind: str, strategy: str) -> None:
    """Whatever the divergence is there: the other tokens' loss and gradient, as if it were masked."""
    pair = make_pair(1, 6, 4, 9)
    hidden, weight, target, bias = pair.case.head
    teacher = pair.logits(torch.float64)
    teacher[0, 2, 3] = -torch.inf  # reverse KL is infinite
    if kind == "forward_kl":
        bias = bias.detach().clone()
        bias[3] = -torch.inf
        teacher[0, :, 3] = -torch.inf
        teacher[0, 2, 3] = 1.0
    masked = target.clone()
    masked[0, 2] = -100
    weights = torch.ones(1, 6, dtype=torch.float64)
    weights[0, 2] = 0
    call: dict[str, Any] = {"teacher_logits": teacher, "divergence": Divergence(kind=kind), "reduction": "sum"}
    assert linear_divergence(hidden, weight, target, bias, teacher_logits=teacher, divergence=call["divergence"])[
        0, 2
    ] == (torch.inf)
    found, want = (
        fused_linear_distillation(hidden, weight, labels, bias, strategy=strategy, token_weights=w, report=(), **call)[
            0
        ]
        for labels, w in ((target, weights), (masked, None))
    )
    assert found.isfinite()
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(*(torch.autograd.grad(value, (hidden, weight)) for value in (found, want)))


def test_the_weights_gradient() -> None:
    pair = make_pair(1, 6, 4, 9)
    weights = torch.ones(1, 6, dtype=torch.float64)
    weights[0, 1] = 0
    weights.requires_grad_()
    loss, _ = fused_linear_distillation(*pair.case.head, **pair.teacher(), token_weights=weights, reduction="sum")
    each = linear_divergence(*pair.case.head, **pair.teacher())
    torch.testing.assert_close(torch.autograd.grad(loss, weights)[0], each.detach())


@pytest.mark.parametrize(
    ("loss", "name", "inputs"),
    [
        (CrossEntropyLoss(), "token_weights", {}),
        (CrossEntropyLoss(lse_square_scale=0.1), "token_weights", {}),
        (CrossEntropyLoss(), "class_weights", {}),
        (CrossEntropyLoss(use_token_scaling=True), None, {}),
        (BinaryCrossEntropyLoss(labels=9), "token_weights", {}),
        (SampledKLLoss(), "token_weights", {"teacher_logprobs": -4 * torch.ones(1, 4)}),
    ],
    ids=str,
)
def test_a_weight_of_zero_in_other_losses(loss: Any, name: str | None, inputs: dict[str, Tensor]) -> None:
    logprob = torch.tensor([[-1.0, -torch.inf, -2.0, -3.0]], requires_grad=True)
    mask = torch.ones(1, 4, dtype=torch.bool)
    statistics = {"logprob": logprob, "lse": torch.tensor([[1.0, torch.inf, 2.0, 0.5]])}
    weights = torch.tensor([[1.0, 0.0, 2.0, 1.0]])
    given = loss.prepare(mask, inputs if name is None else {**inputs, name: weights})
    value, _ = loss(statistics, mask, given, loss.totals(mask, given))
    (gradient,) = torch.autograd.grad(value, logprob)
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert gradient[0].ne(0).tolist() == [True, False, True, True]


def test_a_token_that_is_not_selected_contributes_zero() -> None:
    loss = CrossEntropyLoss(selection=TokenSelection(quantile=0.5, by="entropy"))
    logprob, mask = torch.tensor([[-1.0, -torch.inf, -2.0, -3.0]]), torch.ones(1, 4, dtype=torch.bool)
    statistics = {"logprob": logprob, "entropy": torch.tensor([[2.0, 0.0, 0.1, 3.0]])}
    torch.testing.assert_close(loss(statistics, mask, {}, loss.totals(mask, {}))[0], torch.tensor(2.0))


TWO = torch.zeros(4, 8), torch.zeros(9, 8), torch.zeros(4, dtype=torch.int64)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"report": "divergence"}, TypeError, "report: got 'divergence', expected a non-empty tuple of names out of"),
    ({"report": ("loss",)}, ValueError, "report: got unknown ['loss'], expected names out of ('distillation',"),
    ({"report": ("soft", "soft")}, ValueError, "report: got ('soft', 'soft'), expected each name once"),
    ({"token_statistics": None}, TypeError, "token_statistics: got None, expected a non-empty tuple of names"),
    ({"token_statistics": ("soft",)}, ValueError, "token_statistics: got unknown ['soft']"),
    ({"num_items_in_batch": 2.5}, TypeError, "num_items_in_batch: got 2.5 of type float, expected an int or a torch"),
    ({"teacher_logits": torch.zeros(5, 9)}, ValueError, "teacher_logits: got shape (5, 9), expected (4, 'V')"),
    ({"target": TWO[2][:3]}, ValueError, "target: got shape (3,), expected (4,), that of student_hidden"),
    (NO_HEAD | {"teacher_logits": None, "teacher_probs": "p"}, TypeError, "teacher_probs: got str"),
    ({"student_hidden": [[1.0]]}, TypeError, "student_hidden: got list, expected a torch.Tensor"),
    (
        {"student_hidden": torch.zeros(1, 2, 2, 8), "target": torch.zeros(1, 2, 2).long()},
        ValueError,
        "student_hidden: got shape (1, 2, 2, 8), expected [R, T, H]",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=[message[:50] for *_, message in REFUSED])
def test_refusals_of_one_row(change: dict[str, Any], error: type[Exception], message: str) -> None:
    student = dict(zip(("student_hidden", "student_weight", "target"), TWO, strict=True))
    with pytest.raises(error) as raised:
        fused_linear_distillation(**(student | {"teacher_logits": torch.zeros(4, 9)} | change))
    assert str(raised.value).startswith(message)


def test_the_loss_object_alone_says_what_calls_it() -> None:
    pair = make_pair(1, 3, 4, 9)
    with pytest.raises(ValueError, match="without a teacher, .*; fused_linear_distillation and linear_divergence take"):
        fused_linear_loss(DistillationLoss(), *pair.case.head)
    with pytest.raises(TypeError, match="token_statistics: got None, expected a non-empty tuple"):
        fused_linear_loss(CrossEntropyLoss(), *pair.case.head, token_statistics=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-40, torch.tensor([[1e-40, 1.0, 1.0]])], ids=["number", "tensor"])
def test_temperatures_that_fp32_has_no_inverse_of(temperature: Any) -> None:
    pair = make_pair(1, 3, 4, 9)
    with pytest.raises(ValueError, match=r"temperature: got .*e-4\d, expected 1.2e-38 to 3.4e.38"):
        fused_linear_loss(CrossEntropyLoss(), *pair.case.head, temperature=temperature)
