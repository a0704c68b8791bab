"""Active vocabulary on a GPU: the same gradients, the same bits, no waiting but for a count, the memory announced."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.cases import Case as Shape
from benchmarks.cases import Head, make_inputs
from liger_losses import Divergence, fused_linear_distillation, linear_logprobs, plan, record_active_vocabulary
from liger_losses.chunked import active, fused_linear_loss

from ..oracle import ToyLoss, check_gradients, check_loss, make_case, send_back, unfused, upstream

pytestmark = pytest.mark.gpu

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
ONE = ("logprob",)
DEVICE = torch.device("cuda")


@pytest.fixture
def never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "CROSSOVER", 1.0)
    monkeypatch.setattr(active, "PANEL", 2048)


@pytest.mark.usefixtures("never_whole")
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("strategy", ["cached", "frozen"])
def test_eps_0_of_logprobs_is_exact(strategy: str, dtype: torch.dtype) -> None:
    trainable = ("hidden",) if strategy == "frozen" else ("hidden", "weight", "bias")
    case = make_case(4, 301, 72, 5003, dtype, trainable=trainable, device="cuda")
    sent = upstream(case, ONE)
    for budget in (None, 48 << 20):
        values = linear_logprobs(*case.head, statistics=ONE, strategy=strategy, active_vocab=0.0, memory_budget=budget)
        exact, naive = case.to(F64), case.to(dtype)
        check_gradients(
            send_back(values, sent, case.leaves),
            send_back(unfused(exact), sent, exact.leaves),
            send_back(unfused(naive), sent, naive.leaves),
            case,
        )


@pytest.mark.usefixtures("never_whole")
@pytest.mark.parametrize("names", [ONE, ("logprob", "entropy", "lse")], ids=",".join)
@pytest.mark.parametrize("dtype", [F64, BF16, F16], ids=str)
@pytest.mark.parametrize("separability", ["token", "pair"])
def test_eps_0_of_a_loss_is_exact(separability: str, dtype: torch.dtype, names: tuple[str, ...]) -> None:
    case, loss = make_case(4, 301, 72, 5003, dtype, device="cuda"), ToyLoss(separability, names)
    for budget in (None, 48 << 20):
        got = fused_linear_loss(loss, *case.head, strategy="immediate", active_vocab=0.0, memory_budget=budget)
        check_loss(got, loss, case, {})


@pytest.mark.usefixtures("never_whole")
@pytest.mark.parametrize("kind", ["jsd", "forward_kl"])
def test_eps_0_of_a_divergence_is_exact(kind: str) -> None:
    case = make_case(2, 140, 72, 5003, F32, device="cuda")
    other = make_case(2, 140, 40, 5003, F32, seed=5, trainable=(), device="cuda")
    exact, got = (
        torch.autograd.grad(
            fused_linear_distillation(
                *case.head, teacher_hidden=other.hidden, teacher_weight=other.weight,
                divergence=Divergence(kind=kind, hard_weight=0.5), active_vocab=rule,
            )[0],
            case.leaves,
        )
        for rule in (None, 0.0)
    )  # fmt: skip
    for one, two in zip(got, exact, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4 * two.abs().max().item())


def peaked(tokens: int = 4096, hidden: int = 2048, vocab: int = 60001) -> tuple[Tensor, Tensor, Tensor]:
    inputs = make_inputs(Shape("ce", Head("peaked", hidden, vocab), 1, tokens, peaked=True), DEVICE)
    return inputs.hidden, inputs.weight, inputs.loaded


def test_auto_stays_within_the_error_of_bf16() -> None:
    hidden, weight, target = peaked(2048)

    def gradients(dtype: torch.dtype, rule: Any) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight)]
        loss = linear_logprobs(*leaves, target, active_vocab=rule).sum()
        return [g.double() for g in torch.autograd.grad(loss, leaves)]

    true = gradients(F64, None)
    with record_active_vocabulary() as report:
        auto = gradients(BF16, "auto")
    assert report.whole_tiles == 0
    assert report.share < 0.3
    for got, exact, want in zip(auto, gradients(BF16, None), true, strict=True):
        assert (got - want).norm() <= 2 * (exact - want).norm() + 2**-10 * want.norm()


@pytest.mark.unpoisoned
@pytest.mark.parametrize("strategy", ["immediate", "cached"])
def test_bits_and_waiting(strategy: str) -> None:
    hidden, weight, target = peaked()
    loss = ToyLoss("token")

    def step() -> tuple[Tensor, ...]:
        value = fused_linear_loss(loss, hidden, weight, target, strategy=strategy, active_vocab="auto")[0]
        return torch.autograd.grad(value, [hidden, weight])

    once = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        twice = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, once, twice))


@pytest.mark.unpoisoned
@pytest.mark.parametrize("strategy", ["immediate", "cached", "frozen"])
def test_memory_is_within_the_plan(strategy: str) -> None:
    hidden, weight, target = peaked(8192)
    weight = weight.detach().requires_grad_(strategy != "frozen")
    leaves = [hidden, weight] if strategy != "frozen" else [hidden]

    def step() -> tuple[Tensor, ...]:
        value = fused_linear_loss(ToyLoss("token"), hidden, weight, target, strategy=strategy, active_vocab=1e-3)[0]
        return torch.autograd.grad(value, leaves)

    step()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = step()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in gradients)
    made = plan(
        tokens=8192, hidden_size=2048, vocab_size=60001, strategy=strategy, trainable_head=strategy != "frozen",
        active_vocab=1e-3,
    )  # fmt: skip
    assert extra <= 1.05 * made.workspace + (16 << 20)
