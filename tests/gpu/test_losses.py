"""Every loss module on the device against the same module on the CPU, in fp32; and through bf16 products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_losses
from liger_losses.losses import TokenSelection

pytestmark = pytest.mark.gpu

ROWS, TOKENS, WIDTH, VOCAB = 6, 37, 64, 1003
Call = Callable[[torch.nn.Module, dict[str, Tensor]], Any]


def make(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    target = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    target[:, :5] = -100
    target[1, 20:] = -100
    target[4] = -100
    hidden, weight, bias = normal(ROWS, TOKENS, WIDTH), normal(VOCAB, WIDTH, scale=0.3), normal(VOCAB)
    logprobs = liger_losses.linear_logprobs(*(t.double() for t in (hidden, weight)), target, bias.double()).float()
    # Ratios well inside the clip range, and well outside of it: no rounding carries one over its edge.
    apart = torch.tensor([-0.5, -0.05, 0.05, 0.5])
    old, ref = (logprobs + apart[torch.randint(0, 4, logprobs.shape, generator=generator)] for _ in range(2))
    positives = torch.randint(-200, VOCAB, (ROWS * TOKENS, 4), generator=generator).clamp_min(-1)
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "target": target,
        "positives": positives.masked_fill(positives < 0, -100),
        "old": old,
        "ref": ref,
        "ref_logps": ref.sum(-1),
        "advantages": torch.linspace(-1, 1, ROWS),
        "labels": torch.arange(ROWS) % 2 == 0,
        "temperature": 0.5 + torch.rand(ROWS, TOKENS, generator=generator),
        "classes": torch.rand(VOCAB, generator=generator),
    }


def weight_first(module: torch.nn.Module, t: dict[str, Tensor]) -> Any:
    return module(t["weight"], t["hidden"], t["target"], t["bias"])


def with_reference(module: torch.nn.Module, t: dict[str, Tensor]) -> Any:
    half = ROWS // 2
    known = {"ref_chosen_logps": t["ref_logps"][:half], "ref_rejected_logps": t["ref_logps"][half:]}
    return module(t["weight"], t["hidden"], t["target"], t["bias"], **known)


def labelled(module: torch.nn.Module, t: dict[str, Tensor]) -> Any:
    more = {"preference_labels": t["labels"], "ref_logps": t["ref_logps"]}
    return module(t["hidden"], t["weight"], t["target"], t["bias"], **more)


def policy(module: torch.nn.Module, t: dict[str, Tensor]) -> Any:
    mask = t["target"] != -100
    more = {"old_per_token_logps": t["old"], "ref_per_token_logps": t["ref"]}
    return module(t["hidden"], t["weight"], t["target"], mask, t["advantages"], t["bias"], **more)


def tempered(module: torch.nn.Module, t: dict[str, Tensor]) -> Any:
    return module(t["weight"], t["hidden"], t["target"], t["bias"], temperature=t["temperature"])


def multi_label(module: torch.nn.Module, t: dict[str, Tensor]) -> Any:
    return module(t["weight"], t["hidden"].reshape(-1, WIDTH), t["positives"], t["bias"])


def over_logits(module: torch.nn.Module, t: dict[str, Tensor]) -> Any:
    return module(t["hidden"].float() @ t["weight"].float().T + t["bias"].float(), t["target"])


CE = "LigerFusedLinearCrossEntropyLoss"
EVERYTHING: dict[str, Any] = {"label_smoothing": 0.1, "lse_square_scale": 1e-3, "softcap": 8.0}
ALL_RETURNED = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
CASES: list[tuple[str, dict[str, Any], Call]] = [
    ("LigerFusedLinearDPOLoss", {}, with_reference),
    ("LigerFusedLinearORPOLoss", {}, weight_first),
    ("LigerFusedLinearSimPOLoss", {}, weight_first),
    ("LigerFusedLinearCPOLoss", {"label_smoothing": 0.1}, weight_first),
    ("LigerFusedLinearAlphaPOLoss", {}, weight_first),
    ("LigerFusedLinearTPOLoss", {}, weight_first),
    ("LigerFusedLinearKTOLoss", {"use_ref_model": True}, labelled),
    ("LigerFusedLinearBCOLoss", {}, labelled),
    *(
        ("LigerFusedLinearGRPOLoss", {"loss_type": name}, policy)
        for name in ("grpo", "bnpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gspo", "gmpo")
    ),
    ("LigerFusedLinearGRPOLoss", {"entropy_coef": 0.1}, policy),
    (CE, {}, weight_first),
    (CE, {"reduction": "none"}, weight_first),
    (CE, {**EVERYTHING, **ALL_RETURNED}, weight_first),
    (CE, {**EVERYTHING, "strategy": "recompute"}, weight_first),
    (CE, {}, tempered),
    (CE, {"selection": TokenSelection(by="entropy", weighting="cvar")}, weight_first),
    ("LigerCrossEntropyLoss", {**EVERYTHING, **ALL_RETURNED}, over_logits),
    ("LigerFusedLinearBCELoss", {}, multi_label),
    ("LigerFusedLinearBCELoss", {"reduction": "none"}, multi_label),
]
each = pytest.mark.parametrize(("name", "options", "call"), CASES, ids=[f"{n}-{o}-{c.__name__}" for n, o, c in CASES])


def tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result
    return [tensor for part in parts if part is not None for tensor in tensors_of(part)]


def run(
    name: str, options: dict[str, Any], call: Call, device: str, dtype: torch.dtype, compute: torch.dtype | None = None
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    tensors = {key: value.to(device) for key, value in make(dtype).items()}
    if compute is not None:
        tensors |= {key: tensors[key].to(compute) for key in ("hidden", "weight", "bias")}
    leaves = [tensors[key].requires_grad_() for key in ("hidden", "weight", "bias")]
    module = getattr(liger_losses, name)(**options).to(device)
    values = tensors_of(call(module, tensors))
    return [v.detach().cpu() for v in values], tuple(g.cpu() for g in torch.autograd.grad(values[0].sum(), leaves))


@each
def test_as_on_the_cpu(name: str, options: dict[str, Any], call: Call) -> None:
    got, want = (run(name, options, call, device, torch.float32) for device in ("cuda", "cpu"))
    for ours, theirs in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        largest = theirs.abs().max().item() if theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5 * max(largest, 1e-30), equal_nan=False)


ON_THE_HOST = ("target", "positives")  # where a data loader leaves them


@each
def test_nothing_waits(name: str, options: dict[str, Any], call: Call) -> None:
    """With labels on the host, neither the loss nor its backward synchronises."""
    tensors = {key: value if key in ON_THE_HOST else value.cuda() for key, value in make(torch.bfloat16).items()}
    leaves = [tensors[key].requires_grad_() for key in ("hidden", "weight", "bias")]
    module = getattr(liger_losses, name)(**options).cuda()
    torch.autograd.grad(tensors_of(call(module, tensors))[0].sum(), leaves)  # kernels are compiled, constants made
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(tensors_of(call(module, tensors))[0].sum(), leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each
def test_bf16_products(name: str, options: dict[str, Any], call: Call) -> None:
    """The same rounded tensors in fp32 are the truth; a bf16 gradient is off by a few of its roundings."""
    got = run(name, options, call, "cuda", torch.bfloat16)
    want = run(name, options, call, "cuda", torch.bfloat16, compute=torch.float32)
    torch.testing.assert_close(got[0][0].float(), want[0][0].float(), rtol=2e-3, atol=2e-3)
    for ours, theirs in zip(got[1], want[1], strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - theirs).norm() <= 2e-2 * theirs.norm()
