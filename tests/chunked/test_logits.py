"""`logit_statistics`: the statistics of logits that exist, against fp64, without touching them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.chunked import fused_linear_loss, linear_logprobs, logit_statistics
from liger_losses.chunked.logits import _statistics

from ..oracle import (
    DIFFERENTIABLE,
    DTYPES,
    EXACT,
    IGNORE,
    STATISTICS,
    TRANSFORMS,
    ToyLoss,
    check_close,
    largest,
    make_case,
    read_statistics,
    send_back,
    transformed,
)


def make_logits(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (3, 5), vocab: int = 257) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return (3 * torch.randn(*shape, vocab, generator=generator)).to(dtype).requires_grad_()


def make_target(shape: tuple[int, ...] = (3, 5), vocab: int = 257) -> Tensor:
    target = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1))
    target.view(-1)[1::4] = IGNORE
    return target


def unfused(
    logits: Tensor, target: Tensor, options: dict[str, Any], kind: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    leaf = logits.detach().to(kind).requires_grad_()
    values = read_statistics(
        transformed(leaf, **options), target.masked_fill(target == IGNORE, 0), options.get("column_weights")
    )
    return leaf, {name: torch.where(target != IGNORE, value, 0) for name, value in values.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transform", [*TRANSFORMS, "tensors"])
def test_values_and_gradients(transform: str, dtype: torch.dtype) -> None:
    logits, target = make_logits(dtype), make_target()
    options: dict[str, Any] = TRANSFORMS.get(transform, {})
    if transform == "tensors":
        options = {"temperature": torch.linspace(0.5, 2, 15).view(3, 5), "column_weights": torch.linspace(0, 2, 257)}
    before = logits.detach().clone()
    values = logit_statistics(logits, target, statistics=STATISTICS, **options)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    references = [unfused(logits, target, options, kind) for kind in (torch.float64, wide)]
    for name, value in values.items():
        assert value.requires_grad == (name in DIFFERENTIABLE)
        if name in EXACT:
            assert torch.equal(value, references[0][1][name])
        else:
            exact, naive = (reference[name] for _, reference in references)
            check_close(value, exact, naive, wide, terms=257, scale=largest(logits), what=name)
    generator = torch.Generator().manual_seed(2)
    sent = {name: torch.randn(3, 5, generator=generator, dtype=torch.float64) for name in DIFFERENTIABLE}
    got, exact, naive = (
        send_back(of, sent, [leaf])[0] for leaf, of in [(logits, values), *((leaf, of) for leaf, of in references)]
    )
    assert got.dtype == dtype
    check_close(got, exact, naive, dtype, terms=257, scale=largest(exact), what="gradient")
    assert torch.equal(logits, before)
    assert not got[target == IGNORE].any()


def test_they_are_those_of_the_head() -> None:
    case = make_case(softcap=4.0)
    logits = case.hidden @ case.weight.T + case.bias
    names = (*DIFFERENTIABLE, "mean_logit", "argmax")
    torch.testing.assert_close(
        logit_statistics(logits, case.target, statistics=names, softcap=4.0),
        linear_logprobs(*case.head, statistics=names, softcap=4.0),
    )


def test_what_is_not_scored_reaches_nothing() -> None:
    logits, target = make_logits().detach(), make_target()
    logits[target == IGNORE] = float("nan")
    logits.requires_grad_()
    values = logit_statistics(logits, target, statistics=STATISTICS)
    sent = {name: torch.full((3, 5), float("nan")).masked_fill(target != IGNORE, 1.0) for name in DIFFERENTIABLE}
    (gradient,) = send_back(values, sent, [logits])
    assert torch.isfinite(gradient).all()
    assert all(torch.isfinite(value.double()).all() for value in values.values())


@pytest.mark.parametrize(
    "make",
    [lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[..., ::3]],
    ids=["transposed", "rows", "columns"],
)
def test_any_strides(make: Any) -> None:
    logits = make(make_logits())
    target = make_target(logits.shape[:-1], logits.shape[-1])
    got, want = (logit_statistics(of, target)["logprob"] for of in (logits, logits.contiguous()))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(v.sum(), logits, retain_graph=True) for v in (got, want)))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0), (2, 3, 1)], ids=str)
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    logits, target = make_logits(shape=shape, vocab=9), torch.zeros(shape, dtype=torch.int64)
    value = logit_statistics(logits, target)["logprob"]
    torch.testing.assert_close(value, logits.log_softmax(-1)[..., 0])
    value.sum().backward()


def test_gradcheck_and_opcheck() -> None:
    logits, target = make_logits(shape=(4,), vocab=7), make_target((4,), 7)

    def function(z: Tensor) -> tuple[Tensor, ...]:
        values = logit_statistics(z, target, statistics=DIFFERENTIABLE, softcap=3.0, temperature=torch.full((4,), 0.7))
        return tuple(values.values())

    assert torch.autograd.gradcheck(function, logits)
    temperature, weights = torch.ones(4, dtype=torch.float64), torch.ones(7, dtype=torch.float64)
    scalars = ("logprob,entropy,mean_logprob,argmax", "logprob,entropy,mean_logprob", IGNORE, 1.0, 3.0, 1.0)
    torch.library.opcheck(_statistics, (logits, target, temperature, weights, *scalars))


def test_compiles_into_one_graph() -> None:
    torch._dynamo.reset()
    logits, target = make_logits(), make_target()

    def function(z: Tensor) -> Tensor:
        return logit_statistics(z, target, statistics=("logprob", "lse"))["lse"].sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f(logits), logits)[0] for f in (compiled, function))
    torch.testing.assert_close(got, want)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": [1.0]}, TypeError, "logits: got list, expected a tensor of one of torch.float16"),
        ({"logits": torch.ones(3, 5, 9).long()}, TypeError, "logits: got torch.int64"),
        ({"logits": torch.ones(3, 4, 9)}, ValueError, "logits: got shape (3, 4, 9), expected (3, 5, 'V'), V >= 1"),
        ({"logits": torch.ones(3, 5, 0)}, ValueError, "logits: got shape (3, 5, 0)"),
        ({"target": None}, TypeError, "target: got NoneType"),
        ({"target": torch.full((3, 5), 9)}, ValueError, "target: got 9 at row 0, position 0; expected a class in [0, 9)"),
        ({"statistics": ("perplexity",)}, ValueError, "statistics: got unknown ['perplexity']"),
        ({"differentiable": ("entropy",)}, ValueError, "differentiable: got ['entropy'], expected names out of"),
        ({"temperature": torch.ones(3)}, ValueError, "temperature: got shape [3], expected [3, 5]"),
        ({"temperature": 0.0}, ValueError, "temperature: got 0.0"),
        ({"column_weights": torch.ones(9)}, ValueError, "column_weights: got a tensor, expected None"),
        ({"softcap": -1.0}, ValueError, "softcap: got -1.0"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index: got 1.5"),
    ],
)  # fmt: skip
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"logits": torch.ones(3, 5, 9), "target": torch.zeros(3, 5, dtype=torch.int64)} | change
    with pytest.raises(error, match=re.escape(message)):
        logit_statistics(**arguments)


@pytest.mark.parametrize(
    ("strategy", "separability"), [("immediate", "pair"), ("immediate", "token"), ("cached", "batch")]
)
def test_token_statistics_beside_a_loss(strategy: str, separability: str) -> None:
    """Handed back at every position, whether the loss reads them or not, and without disturbing it."""
    case = make_case(4, 30, 8, 100, scored="prompt")
    loss, names = ToyLoss(separability), ("argmax", "logprob", "is_top1")
    value, metrics = fused_linear_loss(
        loss, *case.head, strategy=strategy, token_statistics=names, memory_budget=3_000_000
    )
    plain, plain_metrics = fused_linear_loss(loss, *case.head, strategy=strategy)
    torch.testing.assert_close(value, plain)
    assert set(metrics) == {*plain_metrics, *names}
    with torch.no_grad():
        want = linear_logprobs(*case.head, statistics=names)
    for name in names:
        torch.testing.assert_close(metrics[name], want[name])
