"""Dtypes: autocast, mixed inputs, and coefficients that 16 bits have no room for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_losses.chunked import fused_linear_loss, linear_logprobs

from ..oracle import (
    Case,
    ToyLoss,
    check_gradients,
    check_loss,
    check_statistics,
    make_case,
    send_back,
    unfused,
    upstream,
)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAMES = ("logprob", "mean_logit")


def check_call(case: Case, values: dict[str, Tensor], computed_in: torch.dtype) -> None:
    """Values and gradients of `values`, whose products ran in `computed_in`; each gradient in its tensor's dtype."""
    check_statistics(values, case.rounded(computed_in))
    sent = upstream(case, ("logprob",))
    found = send_back(values, sent, case.leaves)
    assert [gradient.dtype for gradient in found] == [leaf.dtype for leaf in case.leaves]
    exact, naive = case.to(F64), case.to(computed_in)
    check_gradients(
        [gradient.to(computed_in) for gradient in found],
        send_back(unfused(exact), sent, exact.leaves),
        send_back(unfused(naive), sent, naive.leaves),
        naive,
    )


@pytest.mark.parametrize("strategy", ["cached", "recompute", "auto"])
@pytest.mark.parametrize(("hidden", "weight"), [(BF16, F32), (F32, BF16), (F16, F32), (F32, F64), (BF16, F64)], ids=str)
def test_b40_mixed_dtypes(hidden: torch.dtype, weight: torch.dtype, strategy: str) -> None:
    """Products in the lower of the two; each gradient in its tensor's dtype."""
    case = make_case(dtype=hidden, weight_dtype=weight)
    values = linear_logprobs(*case.head, statistics=NAMES, strategy=strategy)
    check_call(case, values, case.compute)


@pytest.mark.parametrize("strategy", ["cached", "recompute", "auto"])
@pytest.mark.parametrize(("hidden", "weight"), [(F32, F32), (BF16, F32), (BF16, BF16), (F16, BF16)], ids=str)
def test_b40_autocast(hidden: torch.dtype, weight: torch.dtype, strategy: str) -> None:
    """Products in autocast's dtype, fp32 logits; backward runs outside the context, as it should."""
    case = make_case(dtype=hidden, weight_dtype=weight)
    with torch.autocast("cpu", dtype=BF16):
        values = linear_logprobs(*case.head, statistics=NAMES, strategy=strategy)
    check_call(case, values, BF16)


@pytest.mark.parametrize("strategy", ["immediate", "cached", "recompute", "auto"])
def test_autocast_equals_inputs_cast_by_hand(strategy: str) -> None:
    """A fused loss under autocast: the bits of the cast inputs, gradients in fp32."""
    case, loss = make_case(dtype=F32), ToyLoss("pair", NAMES)
    with torch.autocast("cpu", dtype=BF16):
        value, _ = fused_linear_loss(loss, *case.head, strategy=strategy)
        found = torch.autograd.grad(value, case.leaves)  # inside the context, too
    lowered = case.rounded(BF16)
    want, _ = fused_linear_loss(loss, lowered.hidden, lowered.weight, case.target, case.bias, strategy=strategy)
    torch.testing.assert_close(value, want)
    assert all(gradient.dtype == F32 for gradient in found)
    for got, expected in zip(found, torch.autograd.grad(want, lowered.leaves), strict=True):
        torch.testing.assert_close(got.to(expected.dtype), expected)


def test_autocast_leaves_fp64_alone() -> None:
    case = make_case()
    with torch.autocast("cpu", dtype=BF16):
        values = linear_logprobs(*case.head, statistics=NAMES)
    check_statistics(values, case)


@pytest.mark.parametrize(("hidden", "weight"), [(BF16, F32), (F32, BF16), (F16, F32)], ids=str)
@pytest.mark.parametrize("strategy", ["immediate", "cached", "recompute"])
def test_mixed_dtypes_in_a_loss(strategy: str, hidden: torch.dtype, weight: torch.dtype) -> None:
    case, loss = make_case(dtype=hidden, weight_dtype=weight), ToyLoss("pair", NAMES)
    check_loss(fused_linear_loss(loss, *case.head, strategy=strategy), loss, case, {})


def test_float16_and_bfloat16_have_no_lower_of_the_two() -> None:
    case = make_case(dtype=F16, weight_dtype=BF16)
    with pytest.raises(TypeError, match="hidden, weight: got float16 and bfloat16"):
        linear_logprobs(*case.head)


@pytest.mark.parametrize(
    ("strategy", "names"),
    [("cached", ("logprob",)), ("recompute", ("logprob",)), ("recompute", ("logprob", "entropy"))],
)
@pytest.mark.parametrize("size", [2.0**-24, 1.0, 2.0**12], ids=["tiny", "one", "huge"])
def test_float16_coefficients_of_any_size(size: float, strategy: str, names: tuple[str, ...]) -> None:
    """A coefficient of 6e-8, as of a mean over a large batch, neither vanishes nor overflows: the sum over tokens is
    divided by a power of two and multiplied back in fp32. Weights are fp32 so that the results have room."""
    case = make_case(dtype=F16, weight_dtype=F32)
    values = linear_logprobs(*case.head, statistics=names, strategy=strategy)
    sent = {name: size * gradient for name, gradient in upstream(case, names).items()}
    unit = upstream(case, names)
    _, weight, bias = send_back(values, sent, case.leaves)
    again = linear_logprobs(*case.head, statistics=names, strategy=strategy)
    _, unit_weight, unit_bias = send_back(again, unit, case.leaves)
    assert weight.isfinite().all()
    assert torch.equal(weight, size * unit_weight)
    assert torch.equal(bias, size * unit_bias)


@pytest.mark.parametrize("names", [("logprob",), ("logprob", "entropy")], ids=str)
def test_float16_loss_scale(names: tuple[str, ...]) -> None:
    """Unscaled fp16 gradients of a mean over many tokens: what the upstream factor restores is not lost before."""
    case = make_case(4, 60, dtype=F16, scored="all")
    loss = ToyLoss("pair", names)
    value, _ = fused_linear_loss(loss, *case.head, strategy="immediate")
    wanted = torch.autograd.grad(value, case.leaves, retain_graph=True)
    scaled = torch.autograd.grad(value * 1024.0, case.leaves)
    for plain, large in zip(wanted, scaled, strict=True):
        torch.testing.assert_close(large.float() / 1024, plain.float(), rtol=2**-10, atol=2**-24)
        assert (plain != 0).float().mean() > 0.5


@pytest.mark.parametrize("strategy", ["immediate", "cached", "recompute"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_x05_statistics_and_losses_are_wide(strategy: str, dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype)
    value, metrics = fused_linear_loss(ToyLoss("pair"), *case.head, strategy=strategy)
    assert value.dtype == F32
    assert all(metric.dtype == F32 for metric in metrics.values())
    case = make_case(dtype=F64)
    assert fused_linear_loss(ToyLoss("pair"), *case.head, strategy=strategy)[0].dtype == F64


def test_b21_log_probabilities_of_wide_logits() -> None:
    """bf16 inputs whose logits have a standard deviation of 9.6: errors of 6e-6, not of 0.1."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 64, 1024, generator=generator).to(BF16)
    weight = (0.3 * torch.randn(4096, 1024, generator=generator)).to(BF16)
    case = Case(hidden, weight, None, torch.randint(0, 4096, (1, 64), generator=generator))
    value = linear_logprobs(*case.head)
    exact = unfused(case.to(F64))["logprob"]
    assert 9 < exact.std() < 10
    assert (value - exact).abs().max() < 2e-5
    rounded = linear_logprobs(*case.head, logits_dtype="input")
    assert 1e-2 < (rounded - exact).abs().max() < 1
    check_statistics({"logprob": value}, case)


@pytest.mark.parametrize("rows", [2, 16, 64, 256])
def test_b25_the_error_does_not_grow_with_the_number_of_tiles(rows: int) -> None:
    """The head's gradient is summed in fp32 and rounded once."""
    case = make_case(rows, 4, 32, 64, BF16, bias=False, scored="all")
    loss = ToyLoss("pair")
    value, _ = fused_linear_loss(loss, *case.head, strategy="immediate", max_units=1)
    got = torch.autograd.grad(value, case.weight)[0].double()
    exact_case = case.to(F64)
    values = unfused(exact_case, loss.statistics)
    exact = torch.autograd.grad(loss(values, case.mask, {}, loss.totals(case.mask, {}))[0], exact_case.weight)[0]
    # Roundings: of G, of c x, of the result; the first two average out over tokens.
    assert ((got - exact).norm() / exact.norm()) <= 3 * torch.finfo(BF16).eps / 2
