"""Active vocabulary: what is left out is what was said, and nothing else changes."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses import (
    Divergence,
    fused_linear_distillation,
    fused_linear_loss,
    linear_divergence,
    linear_logprobs,
    plan,
    record_active_vocabulary,
)
from liger_losses.chunked import Plan, active, calls, planner, walk
from liger_losses.chunked.active import DROPPED, HostCount
from liger_losses.chunked.hidden_gradient import HiddenGradient
from liger_losses.chunked.weight_gradient import WeightGradient
from liger_losses.kernels import column_choice, gather_columns

from ..oracle import (
    IGNORE,
    TRANSFORMS,
    Case,
    ToyLoss,
    check_gradients,
    check_loss,
    make_case,
    send_back,
    unfused,
    upstream,
)

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
ONE = ("logprob",)


@pytest.fixture
def never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are compacted however many of their columns are active, a few columns at a time."""
    monkeypatch.setattr(active, "CROSSOVER", 1.0)
    monkeypatch.setattr(active, "PANEL", 96)


def least_budget(call: Callable[[int], object]) -> int:
    """The least budget that is not refused: tiles are then as small as they get."""
    with pytest.raises(ValueError, match="needs at least") as refused:
        call(1)
    return int(re.search(r"least ([\d,]+) bytes", str(refused.value))[1].replace(",", ""))  # type: ignore[index]


def peaked(rows: int = 3, length: int = 60, hidden: int = 48, vocab: int = 1013, dtype: torch.dtype = F64) -> Case:
    """Most of a token's probability on its target and a few others, the rest on everything."""
    case = make_case(rows, length, hidden, vocab, F64, bias=False, seed=3)
    targets = case.target.clamp_min(0)
    with torch.no_grad():
        case.weight.div_(3)
        others = torch.randint(0, 40, case.target.shape, generator=torch.Generator().manual_seed(4))
        case.hidden.mul_(0.5).add_(40 * case.weight[targets] + 38 * case.weight[others])
    return case.to(dtype)


def gradients(value: Tensor, case: Case) -> list[Tensor]:
    return list(torch.autograd.grad(value, case.leaves))


# Dropping nothing is exact, whatever the walk: here the mechanics are at work and the rule is not.


@pytest.mark.usefixtures("never_whole")
@pytest.mark.parametrize("scored", ["all", "prompt", "nothing"])
@pytest.mark.parametrize("dtype", [F64, BF16, F16], ids=str)
@pytest.mark.parametrize("strategy", ["cached", "frozen"])
def test_eps_0_of_logprobs_is_exact(strategy: str, dtype: torch.dtype, scored: str) -> None:
    trainable = ("hidden",) if strategy == "frozen" else ("hidden", "weight", "bias")
    case = make_case(4, 90, dtype=dtype, scored=scored, trainable=trainable)
    sent = upstream(case, ONE)

    def call(budget: int) -> dict[str, Tensor]:
        return linear_logprobs(
            *case.head, statistics=("logprob", "entropy"), differentiable=ONE, strategy=strategy, active_vocab=0.0,
            memory_budget=budget,
        )  # fmt: skip

    for budget in (1 << 30,) if scored == "nothing" else (1 << 30, least_budget(call)):
        got = send_back(call(budget), sent, case.leaves)
        rounded = case.rounded()
        exact, naive = (send_back(unfused(c), sent, c.leaves) for c in (rounded.to(F64), rounded))
        check_gradients(got, exact, naive, case)


@pytest.mark.usefixtures("never_whole")
@pytest.mark.parametrize("names", [ONE, ("logprob", "entropy", "lse")], ids=",".join)
@pytest.mark.parametrize("dtype", [F64, BF16, F16], ids=str)
@pytest.mark.parametrize("separability", ["token", "sequence", "pair"])
def test_eps_0_of_a_loss_is_exact(separability: str, dtype: torch.dtype, names: tuple[str, ...]) -> None:
    case = make_case(4, 150, 16, 301, dtype=dtype, **TRANSFORMS["all"])
    loss = ToyLoss(separability, names)

    def call(budget: int) -> Any:
        return fused_linear_loss(
            loss, *case.head, strategy="immediate", active_vocab=0.0, memory_budget=budget, **case.options
        )

    for budget in (1 << 30, least_budget(call), least_budget(call) + 300_000):
        check_loss(call(budget), loss, case, {})


@pytest.mark.usefixtures("never_whole")
@pytest.mark.parametrize("strategy", ["immediate", "cached"])
def test_eps_0_of_several_labels_is_exact(strategy: str) -> None:
    case = make_case(3, 40, dtype=F64, scored="all")
    labels = torch.randint(0, 257, (3, 40, 3), generator=torch.Generator().manual_seed(0))
    options = {"strategy": strategy, "positives": labels}
    exact, got = (
        gradients(fused_linear_loss(ToyLoss("sequence"), *case.head, active_vocab=a, **options)[0], case)
        for a in (None, 0.0)
    )
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.usefixtures("never_whole")
@pytest.mark.parametrize("hard", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["jsd", "forward_kl", "reverse_kl"])
@pytest.mark.parametrize("strategy", ["immediate", "cached", "frozen"])
def test_eps_0_of_a_divergence_is_exact(strategy: str, kind: str, hard: float) -> None:
    trainable = ("hidden",) if strategy == "frozen" else ("hidden", "weight", "bias")
    case = make_case(2, 140, dtype=F64, trainable=trainable)
    other = make_case(2, 140, 11, 257, dtype=F64, seed=5, trainable=())
    options: dict[str, Any] = {
        "teacher_hidden": other.hidden, "teacher_weight": other.weight, "strategy": strategy,
        "divergence": Divergence(kind=kind, hard_weight=hard),
    }  # fmt: skip
    exact, got = (
        gradients(fused_linear_distillation(*case.head, active_vocab=a, **options)[0], case) for a in (None, 0.0)
    )
    for one, two in zip(got, exact, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13)
    if strategy != "immediate":
        values = [linear_divergence(*case.head, active_vocab=a, **options) for a in (None, 0.0)]
        assert torch.equal(*values)
        for one, two in zip(*(gradients(value.sum(), case) for value in values), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13)


@pytest.mark.usefixtures("never_whole")
@pytest.mark.parametrize("strategy", ["immediate", "cached"])
def test_both_heads_are_projected_ahead_and_once(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(3, 400, dtype=F64)
    other = make_case(3, 400, 11, 257, dtype=F64, seed=5, trainable=())
    options: dict[str, Any] = {
        "teacher_hidden": other.hidden, "teacher_weight": other.weight, "strategy": strategy,
        "divergence": Divergence(kind="jsd"),
    }  # fmt: skip

    def call(budget: int, rule: Any = 0.0) -> Tensor:
        return fused_linear_distillation(*case.head, active_vocab=rule, memory_budget=budget, **options)[0]

    exact = gradients(call(1 << 30, None), case)
    rows: list[int] = []
    original = walk.matmul

    def counted(a: Tensor, b: Tensor, **more: Any) -> Tensor:
        rows.append(len(a) if b.shape == (11, 257) else 0)
        return original(a, b, **more)

    monkeypatch.setattr(walk, "matmul", counted)
    with record_active_vocabulary() as report:
        got = gradients(call(least_budget(call) + 1_200_000), case)
    assert report.tiles > 2
    # Cached, all columns are more than there is room for: they are projected again in backward.
    assert sum(rows) == int((case.target != IGNORE).sum()) * (1 if strategy == "immediate" else 2)
    for one, two in zip(got, exact, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13)


# The rule.


def columns_of(case: Case, eps: float) -> Tensor:
    """`[V]` bool: some token's p exceeds `eps`, or it is a target."""
    logits = case.hidden @ case.weight.T
    scored = case.target != IGNORE
    entries = torch.softmax(logits[scored], -1).scatter_add(
        1, case.target[scored].unsqueeze(-1), -torch.ones(int(scored.sum()), 1, dtype=logits.dtype)
    )
    chosen = (entries.abs() > eps).any(0)
    chosen[case.target[scored]] = True
    return chosen


def with_tail(case: Case, chosen: Tensor, sent: Tensor) -> list[Tensor]:
    """The gradients of `sent . logprobs`, the columns that are not `chosen` having one profile for all tokens."""
    entries = -torch.softmax(case.hidden @ case.weight.T, -1).detach()
    entries.scatter_add_(-1, case.target.clamp_min(0).unsqueeze(-1), torch.ones_like(entries))
    entries[case.target == IGNORE] = 0
    profile = entries.abs().sum((0, 1)).masked_fill(chosen, 0)
    tail = entries.masked_fill(chosen, 0).sum(-1, keepdim=True) * (profile / profile.sum().clamp_min(1e-300))
    d_logits = (entries.masked_fill(~chosen, 0) + tail) * sent.unsqueeze(-1)
    return [d_logits @ case.weight, torch.einsum("rtv,rth->vh", d_logits, case.hidden)]


@pytest.mark.parametrize("strategy", ["immediate", "cached", "frozen"])
def test_a_number_is_a_bound_on_what_is_left_out(strategy: str) -> None:
    case, eps = peaked(), 1e-3
    sent = upstream(case, ONE)["logprob"]
    chosen = columns_of(case, eps)
    assert 0.05 < chosen.double().mean() < 0.4
    expected = with_tail(case, chosen, sent)
    if strategy == "frozen":
        case.weight.requires_grad_(False)
        expected = expected[:1]
    with record_active_vocabulary() as report:
        if strategy == "immediate":
            value = fused_linear_loss(
                _Weighted(), *case.head, inputs={"sent": sent}, strategy=strategy, active_vocab=eps
            )[0]
        else:
            value = (linear_logprobs(*case.head, strategy=strategy, active_vocab=eps) * sent).sum()
    for got, want in zip(gradients(value, case), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)

    assert (report.tiles, report.whole_tiles) == (1, 0)
    assert report.share.item() == pytest.approx(chosen.double().mean().item())
    p = torch.softmax(case.hidden @ case.weight.T, -1)[case.target != IGNORE].detach()
    lost = p.masked_fill(chosen, 0).sum(-1)
    torch.testing.assert_close(report.dropped, lost)
    assert report.dropped_mean.item() == pytest.approx(lost.mean().item())
    assert report.dropped_max.item() == pytest.approx(lost.max().item())
    assert p.masked_fill(chosen, 0).max() <= eps


def test_the_tail_is_worth_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head as trained ones are: its rows share a mean and a direction of frequency, and the tail points there."""
    monkeypatch.setattr(active, "CROSSOVER", 1.0)
    case = peaked(2, 100, 64, 3001)
    with torch.no_grad():
        case.weight[:, 0] = -0.3 * torch.log(torch.arange(3001) + 3.0)
        case.weight[:, 1] = 0.7
        case.hidden[..., 0] += 1.5
    true = gradients(linear_logprobs(*case.head).sum(), case)
    with record_active_vocabulary() as report:
        got = gradients(linear_logprobs(*case.head, active_vocab=2**-10).sum(), case)

    def without_tail(tile: Tensor, ids: Tensor, row_sums: Tensor, out: Tensor) -> None:
        gather_columns(tile, ids, row_sums, out)[:, len(ids)] = 0

    monkeypatch.setattr(active, "gather_columns", without_tail)
    left_out = gradients(linear_logprobs(*case.head, active_vocab=2**-10).sum(), case)
    assert report.share < 0.4
    for (one, other, exact), times in zip(zip(got, left_out, true, strict=True), (5, 1.1), strict=True):
        assert times * (one - exact).norm() < (other - exact).norm()


class _Weighted:
    separability, statistics = "token", ONE

    def totals(self, mask: Tensor, inputs: Any) -> dict[str, Tensor]:
        return {}

    def __call__(self, statistics: Any, mask: Tensor, inputs: Any, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return (statistics["logprob"] * inputs["sent"]).masked_fill(~mask, 0).sum(), {}


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_auto_leaves_out_less_than_rounding_does(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "CROSSOVER", 0.9)
    case = peaked(dtype=dtype)
    seen = []
    choose = active.choose_columns

    def seeing(*args: Any, **options: Any) -> Any:
        found = choose(*args, **options)
        seen.append(found.active)
        return found

    monkeypatch.setattr(active, "choose_columns", seeing)
    with record_active_vocabulary() as report:
        linear_logprobs(*case.head, active_vocab="auto")
    scored = case.target != IGNORE
    entries = torch.softmax((case.hidden.double() @ case.weight.double().T)[scored], -1)
    entries[torch.arange(len(entries)), case.target[scored]] -= 1
    dropped, share = entries.abs().masked_fill(seen[0], 0), DROPPED[dtype]
    assert dropped.norm() <= 1.01 * share * entries.norm()
    assert dropped.norm(dim=0).max() <= 4.04 * share * entries.norm() / len(entries) ** 0.5
    torch.testing.assert_close(report.dropped.double(), dropped.sum(-1), rtol=0.02, atol=1e-6)
    if dtype != F32:
        assert seen[0].double().mean() < 0.7
        assert dropped.norm() > 0.2 * share * entries.norm()  # and not much less


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_auto_stays_within_the_error_of_the_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "CROSSOVER", 0.9)
    case = peaked(dtype=dtype)
    sent = upstream(case, ONE)["logprob"]

    def errors(rule: Any) -> list[float]:
        found = gradients((linear_logprobs(*case.head, active_vocab=rule) * sent).sum(), case)
        return [((g.double() - t).norm() / t.norm()).item() for g, t in zip(found, true, strict=True)]

    wide = case.to(F64)
    true = gradients((linear_logprobs(*wide.head) * sent).sum(), wide)
    for auto, exact in zip(errors("auto"), errors(None), strict=True):
        assert auto <= 1.2 * exact + torch.finfo(dtype).eps / 16


def test_logits_without_peaks_are_multiplied_whole() -> None:
    case = make_case(3, 200, 16, 300, dtype=BF16, bias=False)
    with torch.no_grad():
        case.hidden.mul_(0.05)
    with record_active_vocabulary() as report:
        got = gradients(fused_linear_loss(ToyLoss("token"), *case.head, active_vocab="auto")[0], case)
    assert report.whole_tiles == report.tiles > 0
    assert report.dropped_max == 0
    assert report.share > 0.9
    for one, other in zip(got, gradients(fused_linear_loss(ToyLoss("token"), *case.head)[0], case), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("strategy", ["immediate", "cached", "frozen"])
@pytest.mark.parametrize("flat", ["all", "second half"])
def test_once_flat_the_following_tiles_are_not_weighed(
    strategy: str, flat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = peaked(4, 400, dtype=F32)
    with torch.no_grad():
        case.hidden[2 if flat == "second half" else 0 :].mul_(0.02)
    if strategy == "frozen":
        case.weight.requires_grad_(False)
    weighed: list[int] = []
    rule = column_choice.active_columns
    monkeypatch.setattr(column_choice, "active_columns", lambda *a: weighed.append(1) or rule(*a))

    def call(budget: int) -> Any:
        return fused_linear_loss(
            ToyLoss("token"), *case.head, strategy=strategy, active_vocab=1e-5, memory_budget=budget
        )[0]

    with record_active_vocabulary() as report:
        got = gradients(call(least_budget(call)), case)
    assert report.tiles > 6
    chosen = len(weighed)
    assert report.whole_tiles == report.tiles - chosen + 1
    assert chosen == 1 if flat == "all" else 1 < chosen < report.tiles
    assert len(report.dropped) == int((case.target != IGNORE).sum())
    assert (report.dropped_max == 0) == (flat == "all")
    assert 0.1 < report.share <= 1
    exact = gradients(fused_linear_loss(ToyLoss("token"), *case.head, strategy=strategy)[0], case)
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * other.abs().max().item())


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Changes the plans made from here on: tiles of 128 rows, and what is given."""

    def change(**changes: Any) -> None:
        original = planner.make_plan

        def changed(*args: Any, **kwargs: Any) -> Plan:
            return replace(original(*args, **kwargs), **{"tile_rows": 128, "logit_rows": 128, **changes})

        monkeypatch.setattr(calls, "make_plan", changed)

    return change


@pytest.mark.usefixtures("never_whole")
@pytest.mark.parametrize("separability", ["token", "sequence"])
@pytest.mark.parametrize("strategy", ["immediate", "cached", "frozen"])
def test_the_device_has_work_while_the_host_waits(
    strategy: str, separability: Any, monkeypatch: pytest.MonkeyPatch, small_tiles: Callable[..., None]
) -> None:
    """A tile's products are queued once the next one's columns are being counted, and before they are waited for."""
    case = peaked(3, 400, dtype=F32)
    if strategy == "frozen":
        case.weight.requires_grad_(False)
    done: list[str] = []

    def noted(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: (done.append(name), original(*args, **more))[1])

    for owner, name in ((HostCount, "send"), (HostCount, "wait"), (HiddenGradient, "add"), (WeightGradient, "add")):
        noted(owner, name)
    # One tile to a unit of a sequence or less.
    small_tiles(tile_rows=400, cache_bytes=1 << 30, whole_cache=False)
    loss = fused_linear_loss(
        ToyLoss(separability), *case.head, strategy=strategy, active_vocab=1e-5, memory_budget=1 << 30
    )[0]
    products = ["add", "add"] if strategy == "immediate" else ["add"]
    tiles = done.count("send")
    assert tiles > 2
    assert done == ["send", "wait"] + (tiles - 1) * ["send", *products, "wait"] + products
    assert loss.requires_grad


@pytest.mark.parametrize("rule", [None, 1e-5])
@pytest.mark.parametrize("separability", ["token", "sequence"])
def test_one_gradient_tile_at_a_time(
    rule: Any, separability: Any, monkeypatch: pytest.MonkeyPatch, small_tiles: Callable[..., None]
) -> None:
    """Beside the logits that are read: a group's tile is gone before the next group has one."""
    case = peaked(3, 400, dtype=F32)
    buffers: list[weakref.ref[Tensor]] = []
    original = walk.TileWalk.buffer

    def noted(self: walk.TileWalk, rows: int, dtype: torch.dtype) -> Tensor:
        alive = sum(buffer() is not None for buffer in buffers)
        assert alive <= 1
        buffers.append(weakref.ref(made := original(self, rows, dtype)))
        return made

    monkeypatch.setattr(walk.TileWalk, "buffer", noted)
    small_tiles(whole_cache=False)
    options: dict[str, Any] = {"strategy": "immediate", "active_vocab": rule, "memory_budget": 1 << 30}
    fused_linear_loss(ToyLoss(separability), *case.head, **options)
    assert len(buffers) > 3


@pytest.mark.parametrize("strategy", ["immediate", "cached", "frozen"])
def test_the_last_tile_alone_is_flat(strategy: str, small_tiles: Callable[..., None]) -> None:
    """What its tail would have needed was begun, and is not used."""
    case = peaked(1, 300, dtype=F64)
    with torch.no_grad():
        case.target.fill_(7)
        case.hidden[:, 256:].mul_(0.02)
    if strategy == "frozen":
        case.weight.requires_grad_(False)
    small_tiles(cache_bytes=1 << 20, whole_cache=False)
    with record_active_vocabulary() as report:
        loss = fused_linear_loss(ToyLoss("token"), *case.head, strategy=strategy, active_vocab=1e-7)[0]
    assert (report.tiles, report.whole_tiles) == (3, 1)
    exact = fused_linear_loss(ToyLoss("token"), *case.head, strategy=strategy)[0]
    for one, other in zip(gradients(loss, case), gradients(exact, case), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


@pytest.mark.parametrize("scored", ["all", "prompt"])
@pytest.mark.parametrize("rows", [128, 1024])
def test_flat_logits_of_single_tokens_are_kept(
    rows: int, scored: str, small_tiles: Callable[..., None], counted_flops: Callable[[], float]
) -> None:
    """All of `G`, for one product over all tokens: the same bits as without an active vocabulary."""
    case = make_case(3, 150, 16, 300, dtype=BF16, bias=False, scored=scored)
    with torch.no_grad():
        case.hidden.mul_(0.05)
    exact = gradients(2 * fused_linear_loss(ToyLoss("token"), *case.head, strategy="cached")[0], case)
    small_tiles(whole_cache=True)
    if rows == 1024:  # one tile: nothing is moved
        small_tiles(tile_rows=rows, logit_rows=rows)
    counted_flops()
    with record_active_vocabulary() as report:
        loss = fused_linear_loss(ToyLoss("token"), *case.head, strategy="immediate", active_vocab="auto")[0]
    got = gradients(2 * loss, case)
    assert report.whole_tiles == report.tiles
    assert len(report.dropped) == int((case.target != IGNORE).sum())
    assert (report.tiles > 2) == (rows == 128)
    one = 2.0 * int((case.target != IGNORE).sum()) * case.weight.numel()
    assert 3 <= counted_flops() / one < 3.1  # and the last tile's tail, begun in vain
    for ours, other in zip(got, exact, strict=True):
        assert torch.equal(ours, other)


def test_a_gradient_of_zero_and_one_that_is_no_number() -> None:
    case = peaked(dtype=F32)
    loss = linear_logprobs(*case.head, active_vocab="auto")
    assert all((g == 0).all() for g in gradients((loss * 0).sum(), case))
    with torch.no_grad():
        case.hidden[0, -1, 0] = float("nan")
    for rule in ("auto", 0.01):
        found = gradients(linear_logprobs(*case.head, active_vocab=rule).sum(), case)
        assert all(g.isnan().any() for g in found)
        with record_active_vocabulary() as report:
            linear_logprobs(*case.head, active_vocab=rule)
        assert report.whole_tiles == 1


# What does not change.


@pytest.mark.parametrize("options", [{}, {"strategy": "cached"}], ids=str)
def test_values_are_those_without(options: dict[str, Any]) -> None:
    case, loss = peaked(dtype=BF16), ToyLoss("sequence", ("logprob", "is_top1", "argmax"))
    without, having = (fused_linear_loss(loss, *case.head, active_vocab=a, **options) for a in (None, 0.01))
    assert torch.equal(without[0], having[0])
    assert all(torch.equal(without[1][name], having[1][name]) for name in without[1])
    with torch.no_grad():
        assert torch.equal(linear_logprobs(*case.head), linear_logprobs(*case.head, active_vocab="auto"))


@pytest.mark.unpoisoned
@pytest.mark.parametrize("strategy", ["immediate", "cached"])
def test_the_same_bits_twice(strategy: str) -> None:
    case = peaked(dtype=BF16)
    once, twice = (
        gradients(fused_linear_loss(ToyLoss("token"), *case.head, strategy=strategy, active_vocab=1e-3)[0], case)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_backward_twice_and_inputs_changed_in_between() -> None:
    case = peaked(dtype=F32)
    loss = linear_logprobs(*case.head, active_vocab=1e-3).sum()
    once = torch.autograd.grad(loss, case.leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(once, torch.autograd.grad(loss, case.leaves), strict=True))
    loss = linear_logprobs(*case.head, active_vocab=1e-3).sum()
    with torch.no_grad():
        case.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, case.leaves)


# What it costs.


@pytest.mark.parametrize("strategy", ["immediate", "cached", "frozen"])
def test_products(strategy: str, counted_flops: Callable[[], float]) -> None:
    case = peaked(dtype=BF16)
    if strategy == "frozen":
        case.weight.requires_grad_(False)
    one = 2.0 * int((case.target != IGNORE).sum()) * case.weight.numel()
    with record_active_vocabulary() as report:
        loss = fused_linear_loss(ToyLoss("token"), *case.head, strategy=strategy, active_vocab=1e-3)[0]
    gradients(loss, case)
    share = -(-round(report.share.item() * 1013 + 1) // 64) * 64 / 1013
    tails = 2 * 2 * 1013 * case.weight.shape[1]  # of the one tile: its profile, in two parts, times the weight
    assert (counted_flops() - tails) / one == pytest.approx(1 + (1 if strategy == "frozen" else 2) * share)


def test_a_unit_larger_than_a_tile_is_projected_once(counted_flops: Callable[[], float]) -> None:
    case, loss = peaked(2, 600, dtype=F32), ToyLoss("pair")

    def call(budget: int) -> Tensor:
        return fused_linear_loss(loss, *case.head, strategy="immediate", active_vocab=1e-2, memory_budget=budget)[0]

    budget = least_budget(call) + 600_000
    counted_flops()
    with record_active_vocabulary() as report:
        gradients(call(budget), case)
    assert report.tiles > 3
    assert report.whole_tiles == 0
    one = 2.0 * int((case.target != IGNORE).sum()) * case.weight.numel()
    assert counted_flops() / one < 1 + 2 * (report.share.item() + 64 / 1013)


@pytest.mark.parametrize("room", ["columns", "nothing", "everything"])
def test_what_is_kept_until_backward(
    room: str, monkeypatch: pytest.MonkeyPatch, small_tiles: Callable[..., None], counted_flops: Callable[[], float]
) -> None:
    small_tiles(whole_cache=room == "everything", **({} if room == "columns" else {"cache_bytes": 0}))
    if room == "everything":
        monkeypatch.setattr(active, "CROSSOVER", 0.0)
    case, kept = peaked(3, 200), []
    sent = upstream(case, ONE)["logprob"]
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        record_active_vocabulary() as report,
    ):
        value = (linear_logprobs(*case.head, strategy="cached", active_vocab=1e-6) * sent).sum()
    assert len(report.dropped) == int((case.target != IGNORE).sum())  # every tile, weighed or not
    got = gradients(value, case)
    one = 2.0 * int((case.target != IGNORE).sum()) * case.weight.numel()
    products = counted_flops() / one
    for found, want in zip(got, with_tail(case, torch.ones(1013, dtype=torch.bool), sent), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
    logits = int((case.target != IGNORE).sum()) * 1013
    held = max(t.numel() for t in kept if t.dtype == F64) / logits
    if room == "everything":
        assert products == pytest.approx(3)
        assert held == pytest.approx(1, rel=0.01)
    elif room == "nothing":
        assert products > 3  # projected again
    else:
        assert held < 0.25


def test_the_plan_says_so() -> None:
    large: dict[str, Any] = {
        "tokens": 12288,
        "hidden_size": 4096,
        "vocab_size": 128256,
        "separability": "pair",
        "scored": [6144, 6144],
    }
    made = plan(**large, active_vocab="auto")
    assert "active vocab" in made.explain()
    assert made.strategy == "immediate"
    assert made.workspace <= made.budget
    assert 3 < made.gemms < 4  # should all columns be active; the unit is larger than a tile
    assert plan(**large, strategy="cached", active_vocab="auto").cache_bytes > 0.1 * 12288 * 128256 * 2
    one_tile_after_the_other = {**large, "separability": "token", "scored": [8192], "tokens": 8192}
    flat = plan(**one_tile_after_the_other, active_vocab="auto")
    assert (flat.strategy, flat.whole_cache) == ("immediate", True)  # all of G is kept, should the logits be flat
    assert not plan(**large, active_vocab="auto", trainable_head=False, trainable_hidden=False).problem.active
    with pytest.raises(ValueError, match="active_vocab: got one for a loss that differentiates entropy or lse"):
        linear_logprobs(*make_case().head, statistics=("logprob", "entropy"), active_vocab="auto")
    with pytest.raises(ValueError, match="active_vocab: got 'auto' for a loss that differentiates mean_logprob"):
        fused_linear_loss(ToyLoss("token", ("logprob", "mean_logprob")), *make_case().head, active_vocab="auto")
    with pytest.raises(ValueError, match="active_vocab: got one for a loss that differentiates entropy or lse"):
        fused_linear_loss(ToyLoss("batch", ("logprob", "lse")), *make_case().head, active_vocab="auto")


def test_refused_while_tracing() -> None:
    case = make_case(dtype=F32)

    @torch.compile(backend="eager", fullgraph=True)
    def traced() -> Tensor:
        return linear_logprobs(*case.head, active_vocab="auto")

    with pytest.raises(Exception, match="active_vocab: got 'auto' under torch.compile"):
        traced()


def test_nothing_recorded() -> None:
    case = peaked(2, 9)
    for call in (lambda: None, lambda: linear_logprobs(*case.head)):
        with record_active_vocabulary() as report:
            call()
        with pytest.raises(RuntimeError, match="nothing was recorded"):
            _ = report.share


@pytest.mark.parametrize("strategy", ["immediate", "cached", "frozen"])
def test_no_scored_token_leaves_nothing_out(strategy: str) -> None:
    case = make_case(2, 9, scored="nothing")
    if strategy == "frozen":
        case.weight.requires_grad_(False)
        case.bias.requires_grad_(False)
    with record_active_vocabulary() as report:
        fused_linear_loss(ToyLoss("token"), *case.head, strategy=strategy, active_vocab="auto")
    assert report.tiles == len(report.dropped) == 0
    assert report.share == report.dropped_mean == report.dropped_max == 0


@pytest.mark.parametrize("rule", [None, 0.0, "auto"])
def test_what_is_no_number_stays_in_its_column(rule: Any) -> None:
    """Where `G` of one column is no number: a row of the head with NaN, each column being a loss of its own."""
    case = peaked(2, 30, dtype=F32)
    labels = case.target.unsqueeze(-1)
    with torch.no_grad():
        case.weight.mul_(0.1)[5, 3] = float("nan")
    target = case.target.masked_fill(case.target == 5, 6)
    loss = linear_logprobs(case.hidden, case.weight, target, positives=labels.masked_fill(labels == 5, 6),
                           active_vocab=rule, strategy="cached")  # fmt: skip
    loss.sum().backward()
    assert case.weight.grad is not None
    assert case.weight.grad.isnan().any(-1).nonzero().squeeze(-1).tolist() == [5]


class _Reads:
    separability, statistics, differentiable = "token", ONE, ()

    def totals(self, mask: Tensor, inputs: Any) -> dict[str, Tensor]:
        return {}

    def __call__(self, statistics: Any, mask: Tensor, inputs: Any, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return (statistics["logprob"].detach() * inputs["scale"]).masked_fill(~mask, 0).sum(), {}


def test_a_loss_that_differentiates_no_statistic() -> None:
    case = peaked(dtype=F32)
    scale = torch.ones(case.target.shape, requires_grad=True)
    value = fused_linear_loss(_Reads(), *case.head, inputs={"scale": scale}, active_vocab="auto")[0]
    (gradient,) = torch.autograd.grad(value, scale)
    torch.testing.assert_close(gradient, linear_logprobs(*case.head).detach())


@pytest.mark.parametrize(
    ("strategy", "share"), [("immediate", "most"), ("cached", "most"), ("cached", "all"), ("frozen", "most")]
)
def test_the_plan_is_kept(strategy: str, share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_losses.kernels import tile_statistics

    from .test_cost import TWIN, per_token_bytes, run

    monkeypatch.setattr(tile_statistics, "TWIN_ELEMENTS", 1 << 16)
    chosen = {"most": 0.39, "all": 1.0}[share]

    def choose(eps: Any, share: Any, largest: Tensor, *rest: Any) -> Tensor:
        return torch.arange(len(largest)) < chosen * len(largest)

    monkeypatch.setattr(column_choice, "active_columns", choose)
    trainable = ("hidden",) if strategy == "frozen" else ("hidden", "weight")
    case = make_case(2, 400, 64, 8192, F32, bias=False, trainable=trainable)
    with torch.no_grad():
        case.target[case.target >= 0] %= 100
    found = plan(
        tokens=800, hidden_size=64, vocab_size=8192, scored=case.mask.sum(-1).tolist(), dtype=F32,
        separability="pair", trainable_head=strategy != "frozen", strategy=strategy, active_vocab="auto",
    )  # fmt: skip
    seen = run(case, ToyLoss("pair"), strategy=strategy, active_vocab="auto")
    workspace = seen.peak - sum(leaf.nbytes for leaf in case.leaves)
    assert workspace <= found.workspace + per_token_bytes(case) + 4 * TWIN
    assert workspace >= 0.6 * found.workspace
