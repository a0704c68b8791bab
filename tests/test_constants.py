"""What a loss takes as a constant may not wait for a gradient: refused by name, wherever it is handed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_losses as ll
from liger_losses.losses import BCOLoss, DPOLoss, GRPOLoss, KTOLoss, SampledKLLoss

from .policy_case import ROWS, TOKENS, make_case

GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(4, TOKENS, 8, generator=GENERATOR, requires_grad=True)
WEIGHT = torch.randn(13, 8, generator=GENERATOR, requires_grad=True)
TARGET = torch.randint(13, (4, TOKENS), generator=GENERATOR)
LABELS = torch.tensor([True, False, True, True])
PAIR, ROW, TOKEN, ONE = torch.zeros(2), torch.zeros(4), torch.ones(4, TOKENS), torch.tensor(0.1)

Case = tuple[Callable[..., Any], dict[str, Tensor]]


def _policy(beta: float = 0.1, **options: Any) -> Callable[..., Any]:
    case = make_case(torch.float32)
    module = ll.LigerFusedLinearGRPOLoss(beta=beta, use_ref_model=beta > 0, **options)

    def call(**given: Tensor) -> Any:
        return module(case.hidden, case.weight, case.ids, case.mask, bias=case.bias, **given)

    return call


def _loss(loss: Any) -> Callable[..., Any]:
    return lambda **given: ll.fused_linear_loss(loss, HIDDEN, WEIGHT, TARGET, inputs={**given})


def _token(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, TOKENS, generator=GENERATOR)


# Call -> what it is handed, all of it constants.
CASES: dict[str, Case] = {
    "GRPO": (
        _policy(),
        {
            "advantages": torch.randn(ROWS, generator=GENERATOR), "old_per_token_logps": _token(),
            "ref_per_token_logps": _token(), "vllm_is_ratio": _token().exp(),
        },
    ),
    "GRPO, sampler": (
        _policy(0.0, sampler_mode="token_truncate"), {"advantages": _token(), "sampling_per_token_logps": _token()}
    ),
    "DPO": (
        lambda **given: ll.LigerFusedLinearDPOLoss()(WEIGHT, HIDDEN, TARGET, **given),
        {"ref_chosen_logps": PAIR, "ref_rejected_logps": PAIR},
    ),
    "KTO": (
        lambda **given: ll.LigerFusedLinearKTOLoss(use_ref_model=True)(
            HIDDEN, WEIGHT, TARGET, preference_labels=LABELS, **given
        ),
        {"ref_logps": ROW, "kl": ONE},
    ),
    "BCO": (
        lambda **given: ll.LigerFusedLinearBCOLoss()(HIDDEN, WEIGHT, TARGET, preference_labels=LABELS, **given),
        {"ref_logps": ROW, "shift": ONE},
    ),
    "cross entropy": (
        lambda **given: ll.LigerFusedLinearCrossEntropyLoss()(WEIGHT, HIDDEN, TARGET, **given), {"temperature": TOKEN}
    ),
    "linear_logprobs": (
        lambda **given: ll.linear_logprobs(HIDDEN, WEIGHT, TARGET, statistics=("mean_logprob",), **given),
        {"temperature": TOKEN, "column_weights": torch.ones(13)},
    ),
    "linear_topk_logprobs": (
        lambda **given: ll.linear_topk_logprobs(HIDDEN, WEIGHT, TARGET.unsqueeze(-1), **given), {"temperature": TOKEN}
    ),
    "GRPOLoss": (
        _loss(GRPOLoss(beta=0.1, on_policy=False, loss_type="dapo")),
        {
            "advantages": ROW, "old_logprobs": _token(4), "ref_logprobs": _token(4),
            "num_items_in_batch": torch.tensor(20.0),
        },
    ),
    "DPOLoss, sequences": (_loss(DPOLoss()), {"ref_logps": ROW}),
    "DPOLoss, tokens": (_loss(DPOLoss()), {"ref_logprobs": TOKEN}),
    "KTOLoss": (_loss(KTOLoss()), {"labels": LABELS, "ref_logps": ROW, "kl": ROW}),
    "BCOLoss": (
        _loss(BCOLoss(shift_includes_batch=True)),
        {"labels": LABELS, "ref_logprobs": TOKEN, "shift": ONE, "shift_count": ONE},
    ),
    "SampledKLLoss": (_loss(SampledKLLoss()), {"teacher_logprobs": _token(4), "token_weights": TOKEN}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_constant_that_requires_a_gradient(case: str) -> None:
    call, given = CASES[case]
    call(**given)
    for name, value in given.items():
        if not value.is_floating_point():
            continue
        waiting = {**given, name: value.clone().requires_grad_()}
        message = f"^{name}: got a tensor that requires a gradient, expected a constant \\(detach it\\)$"
        with pytest.raises(ValueError, match=message):
            call(**waiting)
        with torch.no_grad():  # where nothing gets a gradient, nothing waits for one
            call(**waiting)


def test_what_has_a_gradient_is_no_constant() -> None:
    weights = TOKEN.clone().requires_grad_()
    ll.LigerFusedLinearCrossEntropyLoss()(WEIGHT, HIDDEN, TARGET, token_weights=weights).backward()
    assert weights.grad is not None
    assert weights.grad.abs().sum() > 0
    case = make_case(torch.float32)
    values = _token().requires_grad_()
    module = ll.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="ppo", vf_coef=0.5)
    given = {"advantages": case.inputs["advantages"], "returns": case.inputs["returns"], "values": values}
    module(case.hidden, case.weight, case.ids, case.mask, **given)[0].backward()
    assert values.grad is not None
    assert values.grad.abs().sum() > 0


def _weighted_cross_entropy(**given: Tensor) -> Any:
    module = ll.LigerFusedLinearCrossEntropyLoss(ce_weight=given.pop("ce_weight"))
    return module(WEIGHT, HIDDEN, TARGET, **given)


NUMBERS: dict[str, Case] = {
    **CASES,
    "cross entropy, weighted": (_weighted_cross_entropy, {"ce_weight": torch.ones(13), "token_weights": TOKEN}),
    "cross entropy of logits, weighted": (
        lambda ce_weight: ll.LigerCrossEntropyLoss(weight=ce_weight)(
            (HIDDEN @ WEIGHT.T).flatten(0, 1), TARGET.flatten()
        ),
        {"ce_weight": torch.ones(13)},
    ),
}


def tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", NUMBERS)
def test_a_constant_of_16_bits_is_read_as_the_number_that_it_is(case: str, dtype: torch.dtype) -> None:
    """And summed, squared and divided by in fp32: in 16 bits sums of weights lose digits, or are infinite."""
    call, given = NUMBERS[case]
    generator = torch.Generator().manual_seed(1)
    high = 3e4 if dtype == torch.float16 and case.endswith("weighted") else 20.0
    narrow = {
        name: (0.5 + high * torch.rand(value.shape, generator=generator)).to(dtype)
        if value.is_floating_point()
        else value
        for name, value in given.items()
    }
    wide = {name: value.float() if value.is_floating_point() else value for name, value in narrow.items()}
    found, expected = tensors_of(call(**narrow)), tensors_of(call(**wide))
    assert all(tensor.isfinite().all() for tensor in expected)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
