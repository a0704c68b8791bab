"""Every module and functional twin over a head hands `active_vocab` on to the engine."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_losses
from liger_losses import functional, record_active_vocabulary
from liger_losses.chunked import active

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


HIDDEN, WEIGHT, OTHER = normal(4, 5, 6), normal(90, 6), normal(20, 6)
TARGET = torch.randint(0, 90, (4, 5), generator=GENERATOR)
LABELS = torch.tensor([True, False, True, False])
FUNCTIONS = {name: f for name, f in vars(functional).items() if name.startswith("liger_fused_linear")}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "liger_fused_linear_dpo": {"use_ref_model": False},
    "liger_fused_linear_tpo": {"compute_nll_loss": False},
    "liger_fused_linear_kto": {"preference_labels": LABELS, "use_ref_model": False},
    "liger_fused_linear_bco": {"preference_labels": LABELS, "use_ref_model": False},
    "liger_fused_linear_bce": {"positives": TARGET.view(20, 1)},
    "liger_fused_linear_grpo": {
        "selected_token_ids": TARGET, "attention_mask": torch.ones(4, 5), "advantages": normal(4), "beta": 0.0,
        "use_ref_model": False,
    },
    "liger_fused_linear_kl_div": {"target": normal(20, 90).softmax(-1)},
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_twin_hands_it_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "CROSSOVER", 1.0)
    known = inspect.signature(FUNCTIONS[name]).parameters
    rows = name in ("liger_fused_linear_bce", "liger_fused_linear_kl_div")

    def run(rule: float | str | None) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
        flat = hidden.view(20, 6)
        given = {
            "_input": flat if rows else hidden, "weight": weight, "target": TARGET, "student_input": flat,
            "student_weight": weight, "teacher_input": OTHER, "teacher_weight": WEIGHT + 0.1,
            "true_labels": TARGET.view(20), "shift_labels": TARGET.view(20),
        } | ARGUMENTS.get(name, {})  # fmt: skip
        result = FUNCTIONS[name](**{n: v for n, v in given.items() if n in known}, active_vocab=rule)
        loss = result if isinstance(result, Tensor) else result[0]
        return (loss.detach(), *torch.autograd.grad(loss, [hidden, weight]))

    with record_active_vocabulary() as report:
        nothing_left_out = run(0.0)
    assert report.tiles > 0
    assert report.whole_tiles == 0
    for got, want in zip(nothing_left_out, run(None), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    with record_active_vocabulary() as report:
        run(0.99)
    assert report.share < 0.5
    with pytest.raises(ValueError, match="active_vocab: got 'on'"):
        run("on")


def test_label_smoothing_is_refused() -> None:
    module = liger_losses.LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1, active_vocab="auto")
    with pytest.raises(ValueError, match="active_vocab: got 'auto' for a loss that differentiates mean_logprob"):
        module(WEIGHT.clone().requires_grad_(), HIDDEN, TARGET)


def test_losses_that_differentiate_the_entropy_or_the_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "CROSSOVER", 1.0)

    def gradients(rule: float | None, **options: Any) -> list[Tensor]:
        hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
        module = liger_losses.LigerFusedLinearCrossEntropyLoss(lse_square_scale=0.1, active_vocab=rule, **options)
        return list(torch.autograd.grad(module(weight, hidden, TARGET), [hidden, weight]))

    for got, want in zip(gradients(0.0), gradients(None), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    exact, near = gradients(None)[1], gradients(1e-2)[1]
    assert 0 < (exact - near).norm() / exact.norm() < 0.02


def test_a_strategy_without_resident_tiles_is_refused_when_it_is_named() -> None:
    for name in ("LigerFusedLinearCrossEntropyLoss", "LigerFusedLinearDPOLoss", "LigerFusedLinearJSDLoss"):
        with pytest.raises(ValueError, match="strategy: got 'recompute' with active_vocab"):
            getattr(liger_losses, name)(active_vocab="auto", strategy="recompute")


@pytest.mark.parametrize(
    ("rule", "advice"), [(None, "expected 'recompute' or 'immediate'"), (0.1, "expected 'immediate'")]
)
def test_what_is_advised_is_not_refused(rule: Any, advice: str) -> None:
    module = liger_losses.LigerFusedLinearCrossEntropyLoss(lse_square_scale=0.1, active_vocab=rule, strategy="cached")
    with pytest.raises(ValueError, match=advice):
        module(WEIGHT.clone().requires_grad_(), HIDDEN.view(20, 6), TARGET.view(20))
