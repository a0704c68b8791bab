"""Distillation on the device: against fp64, against the CPU, in the planned memory, without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.chunked import Divergence, fused_linear_distillation, linear_divergence, plan

from ..distillation_oracle import KINDS, NAMES, label_of, unfused_distillation
from ..oracle import make_case
from .test_engine import BF16, MIB, check_asynchronous, measured_workspace

pytestmark = pytest.mark.gpu


def two_heads(dtype: torch.dtype, vocab: int = 1003, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    case = make_case(3, 61, 64, vocab, dtype, device="cuda", bias=False, trainable=("hidden", "weight"), **options)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 61, 96, generator=generator)
    hidden[..., :64] += case.hidden.detach().float().cpu()
    weight = 0.2 * torch.randn(vocab, 96, generator=generator)
    weight[:, :64] += case.weight.detach().float().cpu()
    return case, {"teacher_hidden": hidden.to("cuda", dtype), "teacher_weight": weight.to("cuda", dtype)}


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("options", KINDS, ids=label_of)
def test_against_fp64(options: Divergence, dtype: torch.dtype) -> None:
    case, teacher = two_heads(dtype)
    mask, weights = case.mask, torch.linspace(0.5, 1.5, 183, device="cuda").view(3, 61)
    leaves = [leaf.detach().double().requires_grad_() for leaf in case.leaves]
    z = (leaves[0] @ leaves[1].T)[mask]
    other = (teacher["teacher_hidden"].double() @ teacher["teacher_weight"].double().T)[mask]
    exact = unfused_distillation(z, other, case.target[mask], options)
    want = torch.autograd.grad((exact["distillation"] * weights[mask]).sum(), leaves)
    for strategy in ("cached", "recompute"):
        got = linear_divergence(*case.head, **teacher, divergence=options, statistics=NAMES, strategy=strategy)
        for name in NAMES:
            torch.testing.assert_close(got[name][mask].double(), exact[name].detach(), rtol=2e-4, atol=2e-4)
        found = torch.autograd.grad((got["distillation"] * weights).sum(), case.leaves)
        value, _ = fused_linear_distillation(
            *case.head, **teacher, divergence=options, token_weights=weights, reduction="sum", strategy="immediate"
        )
        again = torch.autograd.grad(value, case.leaves)
        for true, *several in zip(want, found, again, strict=True):
            for gradient in several:
                assert (gradient.double() - true).norm() <= (torch.finfo(dtype).eps + 1e-4) * true.norm()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_b02(beta: float) -> None:
    """N=64, H=128, V=4096, a teacher that is the student but for noise of 0.1: rounding of bf16, once at each end."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(1, 64, 128, device="cuda", generator=generator).bfloat16()
    weight = (3 * 128**-0.5 * torch.randn(4096, 128, device="cuda", generator=generator)).bfloat16()
    other = (hidden + 0.1 * torch.randn(1, 64, 128, device="cuda", generator=generator)).bfloat16()
    target = torch.zeros(1, 64, dtype=torch.int64)

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight)]
        loss, _ = fused_linear_distillation(
            *leaves, target, teacher_hidden=other.to(dtype), teacher_weight=weight.to(dtype),
            divergence=Divergence(kind="jsd", beta=beta),
        )  # fmt: skip
        assert loss >= 0
        return [gradient.double() for gradient in torch.autograd.grad(loss, leaves)]

    for found, exact in zip(gradients(BF16), gradients(torch.float64), strict=True):
        assert (found - exact).norm() <= 2.0**-8 * exact.norm()


@pytest.mark.unpoisoned
def test_the_same_bits_twice() -> None:
    case, teacher = two_heads(BF16)

    def run() -> list[Tensor]:
        loss, _ = fused_linear_distillation(*case.head, **teacher, divergence=Divergence(kind="jsd"))
        return [loss.detach(), *torch.autograd.grad(loss, case.leaves)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_nothing_waits() -> None:
    case, teacher = two_heads(BF16)
    hidden, weight, target, _ = case.head
    loaded = target.cpu()
    options = {"divergence": Divergence(kind="jsd", hard_weight=0.5), **teacher}
    check_asynchronous(lambda: fused_linear_distillation(hidden, weight, loaded, **options)[0])


@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    ("strategy", "share", "budget"),
    [("auto", 1.0, None), ("immediate", 1.0, 1300 * MIB), ("cached", 0.5, None), ("recompute", 1.0, None),
     ("recompute", 0.5, None), ("frozen", 1.0, None)],
)  # fmt: skip
def test_the_measured_peak_is_the_planned_one(strategy: str, share: float, budget: int | None) -> None:
    """Within 10 %, both logits buffers counted."""
    head, vocab, width, other, length = strategy != "frozen", 65_536, 1536, 3584, 4096
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, dtype=BF16, device="cuda", generator=generator).mul_(scale)

    hidden, weight = normal(1, length, width).requires_grad_(), normal(vocab, width, scale=0.05).requires_grad_(head)
    teacher = {"teacher_hidden": normal(1, length, other), "teacher_weight": normal(vocab, other, scale=0.05)}
    target = torch.zeros(1, length, dtype=torch.int64)
    target[:, : round(length * (1 - share))] = -100
    leaves = [leaf for leaf in (hidden, weight) if leaf.requires_grad]
    found = plan(
        tokens=length, hidden_size=width, vocab_size=vocab, scored=int((target != -100).sum()),
        teacher_hidden_size=other, trainable_head=head, strategy=strategy, memory_budget=budget,
    )  # fmt: skip

    def step() -> tuple[Tensor, ...]:
        loss, _ = fused_linear_distillation(
            hidden, weight, target, **teacher, divergence=Divergence(kind="jsd"), strategy=strategy,
            memory_budget=budget,
        )  # fmt: skip
        return torch.autograd.grad(loss, leaves)

    measured = measured_workspace(step, leaves)
    print(f"measured {measured / MIB:.1f} MiB, planned {found.workspace / MIB:.1f} MiB\n{found.explain()}")
    assert measured == pytest.approx(found.workspace, rel=0.1)
