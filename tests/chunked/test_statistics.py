"""`linear_logprobs`: every statistic and gradient against fp64 over whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liger_losses.chunked import ScoredTokens, linear_logprobs

from ..oracle import (
    DIFFERENTIABLE,
    DTYPES,
    STATISTICS,
    TRANSFORMS,
    Case,
    check_gradients,
    check_statistics,
    make_case,
    send_back,
    unfused,
    upstream,
)

ONLY_LOGPROB = ("logprob", "mean_logit", "is_top1", "log_sum_sq_prob")
# A strategy, what it may differentiate, and what it may train.
STRATEGIES = {
    "cached": (ONLY_LOGPROB, ("hidden", "weight", "bias")),
    "recompute": (STATISTICS, ("hidden", "weight", "bias")),
    "frozen": (ONLY_LOGPROB, ("hidden",)),
    "auto": (STATISTICS, ("hidden", "weight", "bias")),
}
SHAPES = {  # rows, length, H, V
    "odd": (3, 7, 17, 257),
    "one token": (1, 1, 16, 64),
    "one pair": (2, 9, 16, 130),
    "one class": (2, 3, 5, 1),
    "more tokens than a tile": (1, 131, 8, 40),
}


def check(case: Case, names: tuple[str, ...], *, logits: torch.dtype | None = None, **options: Any) -> None:
    """Values and gradients of one call."""
    values = linear_logprobs(*case.head, statistics=names, **case.options, **options)
    assert list(values) == list(names)
    check_statistics(values, case, logits=logits)
    for name in names:
        assert values[name].requires_grad == (name in DIFFERENTIABLE and bool(case.leaves))
    sent = upstream(case, [name for name in names if name in DIFFERENTIABLE])
    exact, naive = case.to(torch.float64), case.to(case.compute)
    check_gradients(
        send_back(values, sent, case.leaves),
        send_back(unfused(exact), sent, exact.leaves),
        send_back(unfused(naive), sent, naive.leaves),
        case,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_statistics_and_gradients(strategy: str, transform: str, dtype: torch.dtype) -> None:
    names, trainable = STRATEGIES[strategy]
    case = make_case(dtype=dtype, trainable=trainable, bias=transform != "plain", **TRANSFORMS[transform])
    check(case, names, strategy=strategy)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scored", ["all", "prompt", "row", "nothing"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shapes_and_masks(strategy: str, shape: str, scored: str, dtype: torch.dtype) -> None:
    names, trainable = STRATEGIES[strategy]
    check(make_case(*SHAPES[shape], dtype=dtype, scored=scored, trainable=trainable), names, strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("scored", ["all", "prompt", "row", "nothing"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_everything_together(
    strategy: str, transform: str, shape: str, scored: str, bias: bool, dtype: torch.dtype
) -> None:
    names, trainable = STRATEGIES[strategy]
    case = make_case(
        *SHAPES[shape], dtype=dtype, scored=scored, trainable=trainable, bias=bias, **TRANSFORMS[transform]
    )
    check(case, names, strategy=strategy)


@pytest.mark.parametrize("trainable", [("hidden",), ("weight",), ("bias",), ("weight", "bias"), ("hidden", "bias"), ()])
@pytest.mark.parametrize("strategy", ["cached", "recompute", "auto"])
def test_what_is_trained(strategy: str, trainable: tuple[str, ...]) -> None:
    check(make_case(trainable=trainable), ONLY_LOGPROB, strategy=strategy)
    check(make_case(trainable=trainable, dtype=torch.float16), ONLY_LOGPROB, strategy=strategy)


@pytest.mark.parametrize("names", [(name,) for name in STATISTICS] + [("lse", "logprob"), ("entropy", "is_top1")])
def test_any_statistics_in_any_order(names: tuple[str, ...]) -> None:
    check(make_case(softcap=4.0), names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strategy", ["cached", "recompute"])
def test_logits_in_the_dtype_of_the_inputs(strategy: str, dtype: torch.dtype) -> None:
    names = ("logprob", "lse", "entropy") if strategy == "recompute" else ("logprob",)
    check(make_case(dtype=dtype), names, logits=dtype, logits_dtype="input", strategy=strategy)


@pytest.mark.parametrize(
    ("strategy", "budget"),
    [("recompute", 450_000), ("recompute", 700_000), ("recompute", None), ("cached", 700_000), ("cached", None)],
)
def test_tiles_and_blocks_of_any_size(strategy: str, budget: int | None) -> None:
    """Vocabulary blocks of 128 columns and up; row tiles with a ragged last one."""
    for scored in ("prompt", "all"):
        check(
            make_case(2, 150, 8, 300, torch.float32, scored=scored),
            ("logprob",),
            strategy=strategy,
            memory_budget=budget,
        )


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 3, 2), (1, 1, 4, 2)], ids=str)
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    case = make_case(1, 12, scored="prompt")
    count = torch.Size(shape).numel()
    flat = linear_logprobs(case.hidden[0, :count], case.weight, case.target[0, :count], case.bias)
    got = linear_logprobs(
        case.hidden[0, :count].reshape(*shape, 17), case.weight, case.target[0, :count].reshape(shape), case.bias
    )
    assert got.shape == shape
    torch.testing.assert_close(got.reshape(-1), flat, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
def test_no_tokens(shape: tuple[int, int]) -> None:
    case = make_case(*shape, scored="all")
    value = linear_logprobs(*case.head)
    assert value.shape == shape
    assert all((g == 0).all() for g in torch.autograd.grad(value.sum(), case.leaves))


@pytest.mark.parametrize("strategy", ["cached", "recompute", "auto"])
def test_nothing_scored_is_a_differentiable_zero(strategy: str) -> None:
    case = make_case(scored="nothing")
    value = linear_logprobs(*case.head, strategy=strategy)
    assert (value == 0).all()
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(value.sum(), case.leaves))


def test_statistics_of_ignored_positions_are_zero_whatever_is_sent_back() -> None:
    case = make_case()
    value = linear_logprobs(*case.head)
    assert (value[~case.mask] == 0).all()
    clean = torch.autograd.grad(value, case.leaves, case.mask.double(), retain_graph=True)
    sent = torch.where(case.mask, 1.0, torch.nan).double()
    for got, want in zip(torch.autograd.grad(value, case.leaves, sent), clean, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16])
def test_target_dtypes(kind: torch.dtype) -> None:
    case = make_case()
    want = linear_logprobs(*case.head)
    assert torch.equal(linear_logprobs(case.hidden, case.weight, case.target.to(kind), case.bias), want)


def test_scored_tokens_stand_for_their_target() -> None:
    case = make_case()
    scored = ScoredTokens(case.target)
    want = linear_logprobs(*case.head)
    for _ in range(2):  # read once, used twice
        assert torch.equal(linear_logprobs(case.hidden, case.weight, scored, case.bias), want)


@pytest.mark.parametrize("ignore_index", [-1, 3, 100_000])
def test_ignore_index(ignore_index: int) -> None:
    case = make_case()
    target = torch.where(case.target == ignore_index, 0, case.target)
    case.target = target
    want = linear_logprobs(*case.head)
    other = target.masked_fill(target == -100, ignore_index)
    assert torch.equal(linear_logprobs(case.hidden, case.weight, other, case.bias, ignore_index=ignore_index), want)


def test_no_scale_is_a_scale_of_one() -> None:
    case = make_case()
    assert torch.equal(linear_logprobs(*case.head, logit_scale=None), linear_logprobs(*case.head, logit_scale=1.0))


def test_differentiable_selects_gradients() -> None:
    """Entropy read as a metric costs no extra pass, and carries no gradient."""
    case = make_case()
    options = {"statistics": ("logprob", "entropy"), "differentiable": ("logprob",), "strategy": "cached"}
    values = linear_logprobs(*case.head, **options)
    assert values["logprob"].requires_grad
    assert not values["entropy"].requires_grad
    check_statistics(values, case)


def test_non_contiguous_tensors() -> None:
    case = make_case(scored="prompt")
    want = linear_logprobs(*case.head)
    wanted = torch.autograd.grad(want.sum(), case.leaves)
    hidden = case.hidden.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    weight = case.weight.detach().t().contiguous().t().requires_grad_()
    bias = torch.stack([case.bias.detach(), case.bias.detach()], 1)[:, 0].requires_grad_()
    target = torch.stack([case.target, case.target], -1)[..., 1]
    assert not any(tensor.is_contiguous() for tensor in (hidden, weight, bias, target))
    for strategy in ("cached", "recompute"):
        got = linear_logprobs(hidden, weight, target, bias, strategy=strategy)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), (hidden, weight, bias)), wanted)


def test_expanded_tensors() -> None:
    case = make_case(scored="all")
    row, value = case.hidden.detach()[:1, :1].requires_grad_(), case.bias.detach()[:1].requires_grad_()
    hidden, bias = row.expand(4, 5, -1), value.expand(257)
    got = linear_logprobs(hidden, case.weight, case.target, bias, strategy="recompute")
    want = linear_logprobs(hidden.contiguous(), case.weight, case.target, bias.contiguous(), strategy="recompute")
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(v.square().sum(), (row, value)) for v in (got, want)))
