"""Every module's products, counted: 3 of `2 N H V` for losses that separate, 2 with a frozen head, 1 more a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_losses
from liger_losses.losses import TokenSelection

ROWS, TOKENS, WIDTH, VOCAB = 6, 40, 16, 200
HALF = ROWS // 2

Call = Callable[[torch.nn.Module, Tensor, Tensor, Tensor], Any]


def weight_first(module: torch.nn.Module, weight: Tensor, hidden: Tensor, target: Tensor) -> Any:
    return module(weight, hidden, target)


def known_reference(module: torch.nn.Module, weight: Tensor, hidden: Tensor, target: Tensor) -> Any:
    known = {"ref_chosen_logps": torch.zeros(HALF), "ref_rejected_logps": torch.zeros(HALF)}
    return module(weight, hidden, target, **known)


def reference_head(module: torch.nn.Module, weight: Tensor, hidden: Tensor, target: Tensor) -> Any:
    return module(weight, hidden, target, None, hidden.detach() + 0.1, weight.detach() + 0.1)


def labelled(module: torch.nn.Module, weight: Tensor, hidden: Tensor, target: Tensor) -> Any:
    return module(hidden, weight, target, preference_labels=torch.arange(ROWS) % 2 == 0, ref_logps=torch.zeros(ROWS))


def policy(module: torch.nn.Module, weight: Tensor, hidden: Tensor, target: Tensor) -> Any:
    more = {name: torch.full((ROWS, TOKENS), -5.0) for name in ("old_per_token_logps", "ref_per_token_logps")}
    return module(hidden, weight, target, target != -100, torch.linspace(-1, 1, ROWS), **more)


def multi_label(module: torch.nn.Module, weight: Tensor, hidden: Tensor, target: Tensor) -> Any:
    scored = target != -100
    return module(weight, hidden[scored], target[scored].unsqueeze(-1))


# name, options, call, products with a trainable head
CASES: list[tuple[str, dict[str, Any], Call, int]] = [
    ("LigerFusedLinearDPOLoss", {}, known_reference, 3),
    ("LigerFusedLinearDPOLoss", {}, reference_head, 4),
    ("LigerFusedLinearDPOLoss", {"loss_type": "aot"}, known_reference, 3),  # of the batch: cached
    ("LigerFusedLinearORPOLoss", {}, weight_first, 3),
    ("LigerFusedLinearSimPOLoss", {}, weight_first, 3),
    ("LigerFusedLinearCPOLoss", {}, weight_first, 3),
    ("LigerFusedLinearAlphaPOLoss", {}, weight_first, 3),
    ("LigerFusedLinearTPOLoss", {}, weight_first, 3),
    ("LigerFusedLinearKTOLoss", {"use_ref_model": True}, labelled, 3),
    ("LigerFusedLinearBCOLoss", {}, labelled, 3),
    *(
        ("LigerFusedLinearGRPOLoss", {"loss_type": name}, policy, 3)
        for name in ("grpo", "dapo", "cispo", "gspo", "vespo")
    ),
    ("LigerFusedLinearGRPOLoss", {"entropy_coef": 0.1}, policy, 3),
    ("LigerFusedLinearCrossEntropyLoss", {}, weight_first, 3),
    ("LigerFusedLinearCrossEntropyLoss", {"label_smoothing": 0.1, "lse_square_scale": 1e-3}, weight_first, 3),
    ("LigerFusedLinearCrossEntropyLoss", {"selection": TokenSelection()}, weight_first, 3),
    ("LigerFusedLinearCrossEntropyLoss", {"reduction": "none"}, weight_first, 3),
    ("LigerFusedLinearBCELoss", {}, multi_label, 3),
]


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize(
    ("name", "options", "call", "products"), CASES, ids=lambda value: getattr(value, "__name__", None)
)
def test_products(
    name: str, options: dict[str, Any], call: Call, products: int, frozen: bool, counted_flops: Callable[[], float]
) -> None:
    """B47, B49: nothing is spent on a frozen head, nor on tokens that are not scored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_(not frozen)
    target = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    target[:, :9] = -100
    module = getattr(liger_losses, name)(**options, memory_budget=64 << 20)
    result = call(module, weight, hidden, target)
    (result if isinstance(result, Tensor) else result[0]).sum().backward()
    one = 2 * (target != -100).sum().item() * WIDTH * VOCAB
    assert counted_flops() == (products - frozen) * one
