"""The engine on a GPU: values, bits, synchronisation, memory, compilation."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.chunked import ScoredTokens, fused_linear_loss, linear_logprobs, plan
from liger_losses.modules import LigerFusedLinearDPOLoss

from ..oracle import (
    DIFFERENTIABLE,
    DTYPES,
    STATISTICS,
    ToyLoss,
    check_gradients,
    check_loss,
    check_statistics,
    make_case,
    send_back,
    unfused,
    upstream,
)

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
MIB = 1 << 20
LOGPROB = ("logprob", "mean_logit", "is_top1")
PAIR, SEVERAL = ToyLoss("pair", ("logprob", "mean_logit")), ToyLoss("pair", ("logprob", "entropy", "lse"))


# values -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", ["cached", "recompute", "frozen", "auto"])
@pytest.mark.parametrize(
    "transform", [{}, {"softcap": 20.0, "logit_scale": 1.2, "temperature": 0.8}], ids=["plain", "all"]
)
def test_statistics_and_gradients(strategy: str, dtype: torch.dtype, transform: dict[str, float]) -> None:
    names = LOGPROB if strategy in ("cached", "frozen") else STATISTICS
    trainable = ("hidden",) if strategy == "frozen" else ("hidden", "weight", "bias")
    case = make_case(4, 101, 72, 5003, dtype, trainable=trainable, device="cuda", **transform)
    values = linear_logprobs(*case.head, statistics=names, strategy=strategy, **case.options)
    check_statistics(values, case)
    sent = upstream(case, [name for name in names if name in DIFFERENTIABLE])
    exact, naive = case.to(torch.float64), case.to(dtype)
    check_gradients(
        send_back(values, sent, case.leaves),
        send_back(unfused(exact), sent, exact.leaves),
        send_back(unfused(naive), sent, naive.leaves),
        case,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss", [PAIR, SEVERAL], ids=["logprob", "several"])
@pytest.mark.parametrize("budget", [None, 14 * MIB], ids=["resident", "streamed"])
def test_losses(loss: ToyLoss, dtype: torch.dtype, budget: int | None) -> None:
    """Pairs of 600 tokens, in one tile and over several."""
    case = make_case(4, 301, 72, 5003, dtype, device="cuda", scored="prompt")
    if budget is not None and dtype == torch.float64:
        budget *= 2
    got = fused_linear_loss(loss, *case.head, strategy="immediate", memory_budget=budget)
    check_loss(got, loss, case, {})


@pytest.mark.parametrize(("hidden", "weight"), [(BF16, torch.float32), (torch.float32, BF16)], ids=str)
def test_b40_mixed_dtypes_and_autocast(hidden: torch.dtype, weight: torch.dtype) -> None:
    case = make_case(4, 50, 64, 1003, hidden, weight_dtype=weight, device="cuda")
    check_loss(fused_linear_loss(PAIR, *case.head), PAIR, case, {})
    with torch.autocast("cuda", dtype=BF16):
        check_loss(fused_linear_loss(PAIR, *case.head), PAIR, case, {})


def test_a_target_out_of_range_is_nan_in_its_place_alone() -> None:
    """Nothing waits to look: the one log-probability says it."""
    case = make_case(2, 9, 16, 1003, BF16, device="cuda")
    want = linear_logprobs(*case.head)
    row, column = case.mask.nonzero()[3].tolist()
    case.target[row, column] = 1003
    got = linear_logprobs(*case.head)
    assert got[row, column].isnan()
    got[row, column] = want[row, column]
    assert torch.equal(got, want)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("strategy", ["immediate", "cached", "recompute"])
@pytest.mark.parametrize("scored", ["all", "prompt"])
def test_same_bits(strategy: str, scored: str) -> None:
    case = make_case(4, 700, 256, 5003, BF16, device="cuda", scored=scored)

    def run() -> list[Tensor]:
        value, metrics = fused_linear_loss(PAIR, *case.head, strategy=strategy)
        return [value.detach(), *metrics.values(), *torch.autograd.grad(value, case.leaves)]

    first = run()
    for _ in range(2):
        assert all(torch.equal(one, two) for one, two in zip(first, run(), strict=True))


# synchronisation ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_asynchronous(step: Callable[[], Tensor]) -> None:
    """Forward and backward, after a first run that compiles and sets up."""
    step().backward()
    with no_synchronisation():
        step().backward()


@pytest.mark.unpoisoned
@pytest.mark.parametrize("scored", ["all", "prompt"])
@pytest.mark.parametrize("loss", [PAIR, SEVERAL, ToyLoss("token"), ToyLoss("batch")], ids=str)
@pytest.mark.parametrize("strategy", ["auto", "immediate", "cached", "recompute"])
def test_a_loss_does_not_wait(strategy: str, loss: ToyLoss, scored: str) -> None:
    """Target on the CPU, or its counts read ahead."""
    if (strategy, loss.separability) == ("immediate", "batch") or (strategy == "cached" and loss is SEVERAL):
        return
    for dtype in (BF16, torch.float16):
        case = make_case(4, 60, 64, 1003, dtype, device="cuda", scored=scored)
        for target in (case.target.cpu(), ScoredTokens(case.target)):
            check_asynchronous(
                lambda: fused_linear_loss(loss, case.hidden, case.weight, target, case.bias, strategy=strategy)[0]  # noqa: B023
            )


@pytest.mark.unpoisoned
@pytest.mark.parametrize("trainable", [("hidden",), ("hidden", "weight")], ids=str)
def test_the_dpo_module_does_not_wait(trainable: tuple[str, ...]) -> None:
    case = make_case(4, 60, 64, 1003, BF16, bias=False, device="cuda", trainable=trainable)
    reference = make_case(4, 60, 64, 1003, BF16, device="cuda", trainable=(), seed=1)
    target = case.target.cpu()
    for options in ({}, {"compute_nll_loss": True, "label_smoothing": 0.1}, {"use_weighting": True}):
        module = LigerFusedLinearDPOLoss(**options)
        check_asynchronous(
            lambda: module(case.weight, case.hidden, target, None, reference.hidden, reference.weight)[0]  # noqa: B023
        )


# memory -------------------------------------------------------------------------------------------------------------


def measured_workspace(step: Callable[[], Any], leaves: list[Tensor]) -> int:
    """Peak beyond inputs and returned gradients, of a second run: libraries have taken their own workspace by then.

    The larger of two: autograd's thread may let go of the former run's gradients while the next one is measured.
    """
    seen = []
    for _ in range(3):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = step()
        torch.cuda.synchronize()
        seen.append(torch.cuda.max_memory_allocated() - before)
        del result
    return max(seen[1:]) - sum(leaf.nbytes for leaf in leaves)


@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    ("strategy", "length", "width", "vocab", "share", "budget"),
    [
        ("immediate", 4096, 2048, 65_536, 1.0, None),
        ("immediate", 4096, 1024, 65_539, 0.5, 900 * MIB),
        ("cached", 2048, 2048, 65_536, 1.0, None),
        ("cached", 4096, 1024, 32_003, 0.5, None),
        ("recompute", 4096, 2048, 65_536, 1.0, None),
        ("recompute", 4096, 2048, 65_536, 0.5, 400 * MIB),
        ("frozen", 4096, 2048, 128_256, 1.0, None),
        ("frozen", 4096, 2048, 128_256, 0.5, 700 * MIB),
        ("auto", 4096, 2048, 65_536, 0.5, None),
    ],
)
def test_the_measured_peak_is_the_planned_one(
    strategy: str, length: int, width: int, vocab: int, share: float, budget: int | None
) -> None:
    """Within 10 %."""
    head = strategy != "frozen"
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(2, length, width, dtype=BF16, device="cuda", generator=generator).requires_grad_()
    weight = torch.randn(vocab, width, dtype=BF16, device="cuda", generator=generator).mul_(0.05).requires_grad_(head)
    target = torch.randint(0, vocab, (2, length))
    target[:, : round(length * (1 - share))] = -100
    leaves = [leaf for leaf in (hidden, weight) if leaf.requires_grad]
    found = plan(
        tokens=2 * length, hidden_size=width, vocab_size=vocab, scored=(target != -100).sum(-1).tolist(),
        separability="pair", trainable_head=head, strategy=strategy, memory_budget=budget,
    )  # fmt: skip

    def step() -> tuple[Tensor, ...]:
        value, _ = fused_linear_loss(PAIR, hidden, weight, target, strategy=strategy, memory_budget=budget)
        return torch.autograd.grad(value, leaves)

    measured = measured_workspace(step, leaves)
    print(f"measured {measured / MIB:.1f} MiB, planned {found.workspace / MIB:.1f} MiB\n{found.explain()}")
    assert measured == pytest.approx(found.workspace, rel=0.1)


@pytest.mark.unpoisoned
def test_an_evaluation_takes_one_tile() -> None:
    hidden = torch.randn(2, 4096, 1024, dtype=BF16, device="cuda")
    weight = torch.randn(65_536, 1024, dtype=BF16, device="cuda").mul_(0.05)
    target = torch.randint(0, 65_536, (2, 4096))
    found = plan(tokens=8192, hidden_size=1024, vocab_size=65_536, trainable_head=False, trainable_hidden=False)
    with torch.no_grad():
        measured = measured_workspace(lambda: linear_logprobs(hidden, weight, target), [])
    assert measured == pytest.approx(found.workspace, rel=0.1)


# compilation --------------------------------------------------------------------------------------------------------


def test_no_compilation_per_length() -> None:
    """B38: lengths and row counts are run-time numbers, so the kernels' cache stays as it is."""
    from liger_losses.kernels.tile_gradient_triton import _gradient_kernel
    from liger_losses.kernels.tile_statistics_triton import _fold_kernel

    def compiled() -> int:
        device = torch.cuda.current_device()
        return sum(len(kernel.device_caches[device][0]) for kernel in (_fold_kernel, _gradient_kernel))

    def run(length: int) -> None:
        case = make_case(4, length, 32, 1003, BF16, device="cuda", scored="all" if length % 3 else "prompt")
        for loss in (PAIR, SEVERAL):
            for strategy in ("immediate", "recompute"):
                value, _ = fused_linear_loss(loss, *case.head, strategy=strategy)
                torch.autograd.grad(value, case.leaves)

    for length in (98, 99):  # one with padding, one without
        run(length)
    before = compiled()
    assert before > 0
    for length in range(100, 111):
        run(length)
    assert compiled() == before


@pytest.fixture
def compile_cleanly() -> Iterator[None]:
    """Inductor's cache on disk does not know when an operator's schema has changed."""
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    with inductor.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


@pytest.mark.unpoisoned
@pytest.mark.usefixtures("compile_cleanly")
@pytest.mark.parametrize("strategy", ["cached", "recompute"])
def test_compiles_into_one_graph(strategy: str) -> None:
    case = make_case(4, 60, 64, 1003, torch.float32, device="cuda")

    def function(*leaves: Tensor) -> Tensor:
        hidden, weight, bias = leaves
        return linear_logprobs(hidden, weight, case.target, bias, strategy=strategy).square().mean()

    got, want = torch.compile(function, fullgraph=True)(*case.leaves), function(*case.leaves)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(value, case.leaves) for value in (got, want)))


@pytest.mark.unpoisoned
@pytest.mark.usefixtures("compile_cleanly")
def test_the_dpo_module_compiles_into_one_graph() -> None:
    case = make_case(4, 60, 64, 1003, torch.float32, bias=False, device="cuda")
    reference = make_case(4, 60, 64, 1003, torch.float32, bias=False, device="cuda", trainable=(), seed=1)
    module = LigerFusedLinearDPOLoss(compute_nll_loss=True)
    arguments = (case.weight, case.hidden, case.target, None, reference.hidden, reference.weight)
    got, want = torch.compile(module, fullgraph=True)(*arguments), module(*arguments)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(loss, case.leaves) for loss, _ in (got, want)))
