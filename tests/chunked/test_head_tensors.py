"""What shapes logits and statistics beside the head: a temperature per token, column weights, sets of labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked import fused_linear_loss, linear_logprobs

from ..oracle import DTYPES, Case, ToyLoss, check_close, check_loss, make_case, send_back, transformed
from .test_statistics import STRATEGIES, check

STRATEGY_BUDGETS = [("immediate", None), ("immediate", 190_000), ("cached", None), ("recompute", 450_000)]


def with_tensors(*shape: int, **options: Any) -> Case:
    case = make_case(*shape, softcap=5.0, logit_scale=1.3, **options)
    generator = torch.Generator().manual_seed(3)
    case.options["temperature"] = 0.5 + torch.rand(case.target.shape, generator=generator)
    return case


def weights_of(case: Case) -> Tensor:
    weights = torch.rand(case.weight.shape[0], generator=torch.Generator().manual_seed(4))
    weights[3] = 0
    return weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_b55_a_temperature_per_token(strategy: str, dtype: torch.dtype) -> None:
    names, trainable = STRATEGIES[strategy]
    check(with_tensors(3, 7, 17, 257, dtype=dtype, trainable=trainable), names, strategy=strategy)


def test_equal_temperatures_are_one() -> None:
    case = make_case()
    one = linear_logprobs(*case.head, temperature=0.7)
    each = linear_logprobs(*case.head, temperature=torch.full(case.target.shape, 0.7, dtype=torch.float64))
    torch.testing.assert_close(each, one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", ["recompute", "auto"])
def test_column_weights(strategy: str, dtype: torch.dtype) -> None:
    case = with_tensors(3, 7, 17, 257, dtype=dtype)
    case.options["column_weights"] = weights_of(case)
    check(case, ("mean_logprob", "logprob", "mean_logit"), strategy=strategy)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("strategy", "budget"), STRATEGY_BUDGETS)
def test_losses_over_tiles(strategy: str, budget: int | None, dtype: torch.dtype) -> None:
    case = with_tensors(4, 60, 8, 100, dtype=dtype, scored="prompt")
    loss = ToyLoss("token", ("logprob",) if strategy == "cached" else ("logprob", "mean_logprob", "argmax"))
    if strategy != "cached":
        case.options["column_weights"] = weights_of(case)
    got = fused_linear_loss(loss, *case.head, strategy=strategy, memory_budget=budget and 8 * budget, **case.options)
    check_loss(got, loss, case, {})


# sets of labels ------------------------------------------------------------------------------------------------------


def labels_of(case: Case) -> Tensor:
    """None to four of them, some named twice, some places empty."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(-20, case.weight.shape[0], (*case.target.shape, 4), generator=generator).clamp_min(-1)
    labels[..., 3] = labels[..., 1]
    return labels.masked_fill(labels < 0, -100)


def unfused_likelihood(case: Case, labels: Tensor) -> Tensor:
    kind = case.compute
    z = case.hidden.to(kind) @ case.weight.to(kind).T
    z = transformed(z if case.bias is None else z + case.bias.to(kind), **case.options)
    hot = torch.zeros(*z.shape[:-1], z.shape[-1] + 1, dtype=kind)
    hot = hot.scatter(-1, labels.masked_fill(labels < 0, z.shape[-1]), 1.0)[..., :-1]
    likelihood = -F.binary_cross_entropy_with_logits(z, hot, reduction="none").sum(-1)
    return torch.where(case.mask, likelihood, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transform", ["plain", "everything"])
@pytest.mark.parametrize("strategy", ["cached", "recompute", "frozen", "auto"])
def test_sets_of_labels(strategy: str, transform: str, dtype: torch.dtype) -> None:
    trainable = ("hidden",) if strategy == "frozen" else ("hidden", "weight", "bias")
    case = make_case(3, 7, 17, 257, dtype=dtype, trainable=trainable, bias=transform != "plain")
    if transform == "everything":
        case = with_tensors(3, 7, 17, 257, dtype=dtype, trainable=trainable)
    labels = labels_of(case)
    values = linear_logprobs(*case.head, positives=labels, strategy=strategy, **case.options)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rounded = case.rounded()
    exact, naive = (unfused_likelihood(rounded.to(kind), labels) for kind in (torch.float64, wide))
    check_close(values, exact, naive, wide, terms=257, scale=257.0, what="log-likelihood")
    sent = {"logprob": torch.randn(case.target.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}
    gradients = [
        send_back({"logprob": value}, sent, leaves)
        for value, leaves in [(values, case.leaves)]
        + [(unfused_likelihood(of, labels), of.leaves) for of in (case.to(torch.float64), case.to(case.compute))]
    ]
    for got, want, other in zip(*gradients, strict=True):
        check_close(got, want, other, case.compute, terms=case.terms, what=f"gradient of {tuple(got.shape)}")


@pytest.mark.parametrize(("strategy", "budget"), [*STRATEGY_BUDGETS, ("frozen", 300_000)])
def test_strategies_agree_on_sets_of_labels(strategy: str, budget: int | None) -> None:
    trainable = ("hidden",) if strategy == "frozen" else ("hidden", "weight", "bias")
    case = make_case(4, 60, 8, 100, scored="prompt", trainable=trainable)
    labels, loss = labels_of(case), ToyLoss("token")
    value, _ = fused_linear_loss(
        loss, *case.head, positives=labels, strategy=strategy, memory_budget=budget and 8 * budget
    )
    statistics = {"logprob": unfused_likelihood(case, labels)}
    want, _ = loss(statistics, case.mask, {}, loss.totals(case.mask, {}))
    torch.testing.assert_close(value, want)
    torch.testing.assert_close(*(torch.autograd.grad(v, case.leaves) for v in (value, want)))


def test_one_label_is_not_a_class() -> None:
    """Two readings of one label: exclusive (softmax), or one yes among independent noes."""
    case = make_case(1, 3, 4, 6, bias=False)
    one = case.target.unsqueeze(-1)
    got = linear_logprobs(*case.head, positives=one)
    z = case.hidden @ case.weight.T
    want = z.gather(-1, one.clamp_min(0)).squeeze(-1) - F.softplus(z).sum(-1)
    torch.testing.assert_close(got, torch.where(case.mask, want, 0))
    assert not torch.allclose(got, linear_logprobs(*case.head))


def test_what_stands_at_ignored_positions_is_not_looked_at() -> None:
    case = make_case(scored="prompt")
    clean = torch.ones(case.target.shape, dtype=torch.float64)
    for junk in (0.0, -1.0, float("nan"), float("inf")):
        temperature = clean.masked_fill(~case.mask, junk)
        torch.testing.assert_close(linear_logprobs(*case.head, temperature=temperature), linear_logprobs(*case.head))
    labels = labels_of(case)
    wrong = labels.masked_fill(~case.mask.unsqueeze(-1), 10**6)
    torch.testing.assert_close(
        linear_logprobs(*case.head, positives=wrong), linear_logprobs(*case.head, positives=labels)
    )


def test_no_label_at_all() -> None:
    case = make_case()
    none = torch.zeros((*case.target.shape, 0), dtype=torch.int64)
    got, want = (linear_logprobs(*case.head, positives=p) for p in (none, torch.full((*case.target.shape, 1), -100)))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(v.sum(), case.leaves) for v in (got, want)))
