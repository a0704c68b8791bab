"""A step's count divides in the loss's dtype: whatever the count's, an fp64 loss loses nothing and an fp32 one stays so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses import fused_linear_distillation, fused_linear_loss
from liger_losses.losses import CrossEntropyLoss, GRPOLoss, SampledKLLoss, cross_entropy_loss, grpo_loss
from liger_losses.modules import LigerFusedLinearCrossEntropyLoss, LigerFusedLinearGRPOLoss

ROWS, TOKENS, WIDTH, VOCAB = 2, 3, 4, 7
COUNT = (1 << 24) + 1  # fp32 holds the even numbers here
GRPO = {"loss_type": "dapo", "beta": 0.0, "entropy_coef": 0.1, "num_processes": 1}
Known = dict[str, Tensor]


def _known(dtype: torch.dtype) -> Known:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "hidden": random(ROWS, TOKENS, WIDTH),
        "weight": random(VOCAB, WIDTH),
        "logprobs": -random(ROWS, TOKENS).abs(),
        "lse": random(ROWS, TOKENS),
        "entropy": random(ROWS, TOKENS).abs(),
        "advantages": random(ROWS),
        "target": torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator),
        "mask": torch.ones(ROWS, TOKENS, dtype=torch.bool),
    }


def _fused(loss: Any, k: Known, **inputs: Tensor) -> Tensor:
    return fused_linear_loss(loss, k["hidden"], k["weight"], k["target"], inputs=inputs)[0]


CALLS: dict[str, Callable[[Known, Any], Tensor]] = {
    "cross_entropy_loss": lambda k, n: cross_entropy_loss(
        k["logprobs"], k["mask"], lse=k["lse"], lse_square_scale=0.1, num_items_in_batch=n
    ),
    "CrossEntropyLoss": lambda k, n: _fused(CrossEntropyLoss(lse_square_scale=0.1), k, num_items_in_batch=n),
    "cross entropy": lambda k, n: LigerFusedLinearCrossEntropyLoss(lse_square_scale=0.1)(
        k["weight"], k["hidden"], k["target"], num_items_in_batch=n
    ),
    "grpo_loss": lambda k, n: grpo_loss(
        k["logprobs"], k["mask"], k["advantages"], entropy=k["entropy"], num_items_in_batch=n, **GRPO
    )[0],
    "GRPOLoss": lambda k, n: _fused(
        GRPOLoss(**GRPO, on_policy=True), k, advantages=k["advantages"], num_items_in_batch=n
    ),
    "GRPO": lambda k, n: LigerFusedLinearGRPOLoss(use_ref_model=False, **GRPO)(
        k["hidden"], k["weight"], k["target"], k["mask"], k["advantages"], num_items_in_batch=n
    )[0],
    "SampledKLLoss": lambda k, n: _fused(SampledKLLoss(), k, teacher_logprobs=k["logprobs"], num_items_in_batch=n),
    "distillation": lambda k, n: fused_linear_distillation(
        k["hidden"], k["weight"], k["target"], teacher_hidden=-k["hidden"], teacher_weight=k["weight"],
        num_items_in_batch=n,
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_counts_divide_in_the_dtype_of_the_loss(call: Callable[[Known, Any], Tensor]) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        known = _known(dtype)
        one = call(known, torch.tensor(1))
        exact = call(known, torch.tensor(COUNT, dtype=torch.float64))
        assert one.dtype == exact.dtype == dtype
        torch.testing.assert_close(exact * COUNT, one, rtol=tolerance, atol=0)
        share = call(known, torch.tensor(1 / 3, dtype=torch.float64))  # a rank's, where the ranks score one token
        torch.testing.assert_close(share / 3, one, rtol=tolerance, atol=0)


def test_class_weights_in_fp64_leave_an_fp32_loss_fp32() -> None:
    known = _known(torch.float32)
    weights = torch.linspace(0.5, 2, VOCAB, dtype=torch.float64)
    expected = torch.nn.functional.cross_entropy(
        (known["hidden"] @ known["weight"].T).flatten(0, 1), known["target"].flatten(), weights.float()
    )
    seen = LigerFusedLinearCrossEntropyLoss(weights)(known["weight"], known["hidden"], known["target"])
    torch.testing.assert_close(seen, expected)
