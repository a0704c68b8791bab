"""What holds for any batch: signs, masks, order, tiles, scale."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_losses.chunked import fused_linear_loss, linear_logprobs, plan

from ..oracle import STATISTICS, Case, ToyLoss, make_case

cases = st.builds(
    make_case,
    rows=st.sampled_from([2, 4, 6]),
    length=st.integers(1, 40),
    hidden_size=st.integers(1, 9),
    vocab=st.integers(1, 70),
    bias=st.booleans(),
    scored=st.sampled_from(["all", "prompt", "row", "nothing"]),
    seed=st.integers(0, 1000),
    softcap=st.sampled_from([None, 2.0]),
    logit_scale=st.sampled_from([None, 0.5, 3.0, -1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
several = settings(max_examples=25, deadline=None)


def outcome(case: Case, loss: ToyLoss, **options: Any) -> list[torch.Tensor]:
    value, metrics = fused_linear_loss(loss, *case.head, **case.options, **options)
    return [value.detach(), *metrics.values(), *torch.autograd.grad(value, case.leaves)]


@several
@given(case=cases)
def test_bounds(case: Case) -> None:
    """`log p <= 0`, `0 <= entropy <= log V`, `-entropy <= log sum p^2 <= 0`, `mean <= lse`."""
    vocab = case.weight.shape[0]
    got = {k: v.detach() for k, v in linear_logprobs(*case.head, statistics=STATISTICS, **case.options).items()}
    slack = 1e-12
    assert (got["logprob"] <= 0).all()
    assert (got["entropy"] >= -slack).all()
    assert (got["entropy"] <= torch.tensor(float(vocab)).double().log() + slack).all()
    assert (got["log_sum_sq_prob"] <= slack).all()
    assert (-got["entropy"] <= got["log_sum_sq_prob"] + slack).all()  # Renyi entropies fall with their order
    assert (got["mean_logit"] <= got["lse"] + slack).all()
    assert not got["is_top1"][~case.mask].any()


@several
@given(case=cases, strategy=st.sampled_from(["cached", "recompute"]))
def test_masked_is_sliced(case: Case, strategy: str) -> None:
    """Ignoring positions is the same as not passing them, gradients included, to the bit."""
    value = linear_logprobs(*case.head, strategy=strategy, **case.options)
    hidden = case.hidden.detach()[case.mask].requires_grad_()
    sliced = linear_logprobs(hidden, case.weight, case.target[case.mask], case.bias, strategy=strategy, **case.options)
    assert torch.equal(value[case.mask], sliced)
    full = torch.autograd.grad(value.square().sum(), case.leaves)
    part = torch.autograd.grad(sliced.square().sum(), [hidden, *case.leaves[1:]])
    torch.testing.assert_close(full[0][case.mask], part[0])
    assert (full[0][~case.mask] == 0).all()
    torch.testing.assert_close(full[1:], part[1:])


@several
@given(case=cases, seed=st.integers(0, 100), strategy=st.sampled_from(["immediate", "cached", "recompute"]))
def test_the_order_of_pairs_does_not_matter(case: Case, seed: int, strategy: str) -> None:
    pairs = case.target.shape[0] // 2
    order = torch.randperm(pairs, generator=torch.Generator().manual_seed(seed))
    rows = torch.cat([order, pairs + order])
    loss = ToyLoss("pair", ("logprob", "mean_logit"))
    plain = outcome(case, loss, strategy=strategy)
    shuffled = Case(
        case.hidden.detach()[rows].requires_grad_(), case.weight, case.bias, case.target[rows], case.options
    )
    value, units, score, hidden, *rest = outcome(shuffled, loss, strategy=strategy)
    torch.testing.assert_close([value, score, *rest], [plain[0], plain[2], *plain[4:]])
    torch.testing.assert_close(units, plain[1][order])
    torch.testing.assert_close(hidden, plain[3][rows])


@several
@given(
    case=cases,
    separability=st.sampled_from(["token", "sequence", "pair"]),
    several_statistics=st.booleans(),
    budget=st.integers(40_000, 400_000),
    units=st.sampled_from([None, 1, 2, 7]),
)
def test_neither_the_budget_nor_the_units_a_tile_matter(
    case: Case, separability: str, several_statistics: bool, budget: int, units: int | None
) -> None:
    loss = ToyLoss(separability, ("logprob", "entropy", "lse") if several_statistics else ("logprob",))
    rows, length, width = case.hidden.shape
    least = plan(tokens=rows * length, hidden_size=width, vocab_size=len(case.weight), dtype=torch.float64,
                 separability=separability, scored=case.mask.sum(-1).tolist(), strategy="immediate",
                 memory_budget=1 << 40, trainable_head=True)  # fmt: skip
    small = outcome(case, loss, strategy="immediate", memory_budget=least.workspace, max_units=units)
    torch.testing.assert_close(small, outcome(case, loss, strategy="recompute"))


@several
@given(
    case=cases,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    power=st.integers(-8, 16),
    strategy=st.sampled_from(["immediate", "cached", "recompute"]),
)
def test_a_power_of_two_scales_every_gradient_exactly(
    case: Case, dtype: torch.dtype, power: int, strategy: str
) -> None:
    case = case.to(dtype)
    value, _ = fused_linear_loss(ToyLoss("pair"), *case.head, strategy=strategy, **case.options)
    plain = torch.autograd.grad(value, case.leaves, retain_graph=True)
    scaled = torch.autograd.grad(value * 2.0**power, case.leaves)
    for one, other in zip(plain, scaled, strict=True):
        # Not where a rounding of the smallest numbers intervenes.
        normal = one.abs() > torch.finfo(dtype).tiny * 2.0**40
        assert torch.equal((one.double() * 2.0**power)[normal], other.double()[normal])


@several
@given(case=cases, strategy=st.sampled_from(["cached", "recompute"]))
def test_gradients_are_linear_in_what_is_sent_back(case: Case, strategy: str) -> None:
    """B23: every token's own upstream gradient counts, not the first one's."""
    value = linear_logprobs(*case.head, strategy=strategy, **case.options)
    generator = torch.Generator().manual_seed(7)
    one, two = (torch.randn(value.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    sums = [torch.autograd.grad(value, case.leaves, sent, retain_graph=True) for sent in (one, two, 2 * one - two)]
    for first, second, both in zip(*sums, strict=True):
        torch.testing.assert_close(both, 2 * first - second)
