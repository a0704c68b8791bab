"""`fused_linear_loss`: value, metrics and gradients of any loss object, under every strategy, against fp64."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.chunked import ScoredTokens, fused_linear_loss, plan

from ..oracle import DTYPES, TRANSFORMS, Case, ToyLoss, check_loss, make_case, unfused_loss

SEPARABILITY = ("token", "sequence", "pair", "batch")
LOGPROB = ("logprob", "mean_logit")
SEVERAL = ("logprob", "entropy", "lse", "is_top1")


def combinations(*strategies: str) -> list[tuple[str, str]]:
    """All that exist: a loss over the batch has no "immediate"."""
    return [(s, name) for s in SEPARABILITY for name in strategies if (s, name) != ("batch", "immediate")]


def loss_inputs(loss: ToyLoss, case: Case) -> dict[str, Tensor]:
    """A weight per token or row; for pairs also an offset per pair. Exact in every dtype."""
    rows, length = case.target.shape
    if loss.separability == "token":
        return {"weight": torch.arange(rows * length, dtype=torch.float64).view(rows, length) / 64 + 0.5}
    inputs = {"weight": torch.arange(rows, dtype=torch.float64) / 4 + 0.5}
    if loss.separability == "pair":
        inputs["offset"] = torch.arange(rows // 2, dtype=torch.float64) / 8 - 0.25
    return inputs


def check(loss: ToyLoss, case: Case, **options: Any) -> None:
    inputs = loss_inputs(loss, case)
    wide = torch.float64 if case.compute == torch.float64 else torch.float32
    given = {name: value.to(wide) for name, value in inputs.items()}
    check_loss(fused_linear_loss(loss, *case.head, inputs=given, **case.options, **options), loss, case, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("separability", "strategy"), combinations("auto", "immediate", "cached", "recompute"))
def test_a_loss_of_log_probabilities(separability: str, strategy: str, dtype: torch.dtype) -> None:
    check(ToyLoss(separability, LOGPROB), make_case(dtype=dtype), strategy=strategy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("separability", "strategy"), combinations("auto", "immediate", "recompute"))
def test_a_loss_of_several_statistics(separability: str, strategy: str, dtype: torch.dtype) -> None:
    check(ToyLoss(separability, SEVERAL), make_case(dtype=dtype, **TRANSFORMS["all"]), strategy=strategy)


@pytest.mark.parametrize("trainable", [("hidden",), ("weight",), ("bias",), ("hidden", "weight"), ()], ids=str)
@pytest.mark.parametrize("names", [LOGPROB, SEVERAL], ids=["logprob", "several"])
@pytest.mark.parametrize("strategy", ["auto", "immediate", "recompute"])
def test_what_is_trained(strategy: str, names: tuple[str, ...], trainable: tuple[str, ...]) -> None:
    for dtype in (torch.float64, torch.float16):
        check(ToyLoss("pair", names), make_case(dtype=dtype, trainable=trainable), strategy=strategy)


def test_a_frozen_head_with_strategy_frozen() -> None:
    check(ToyLoss("pair", LOGPROB), make_case(trainable=("hidden",)), strategy="frozen")
    check(ToyLoss("batch", LOGPROB), make_case(trainable=("hidden",), dtype=torch.bfloat16), strategy="frozen")


@pytest.mark.parametrize("scored", ["all", "prompt", "row", "nothing"])
@pytest.mark.parametrize("strategy", ["immediate", "cached", "recompute"])
@pytest.mark.parametrize("separability", ["token", "sequence", "pair"])
def test_masks(separability: str, strategy: str, scored: str) -> None:
    check(ToyLoss(separability, LOGPROB), make_case(scored=scored), strategy=strategy)
    if strategy != "cached":
        check(ToyLoss(separability, SEVERAL), make_case(scored=scored), strategy=strategy)


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize(("separability", "strategy"), combinations("auto", "immediate", "cached", "recompute"))
def test_the_smallest_batches(separability: str, strategy: str, rows: int, length: int) -> None:
    """One token a row; no token; no row."""
    check(ToyLoss(separability, LOGPROB), make_case(rows, length, scored="all"), strategy=strategy)


# A unit that exceeds its tile is streamed; several units share a tile; the last tile is ragged.
H, V = 8, 40


def budget_of(rows: int, case: Case) -> int:
    """Bytes that allow `rows` rows of a gradient tile and no more."""
    size = case.hidden.dtype.itemsize
    positions = case.target.numel()
    logits = {torch.float64: 8}.get(case.hidden.dtype, 4)
    kept = positions * H * size
    accumulator = V * H * logits
    return kept + accumulator + rows * (V * (size + logits) + 3 * H * size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("names", [LOGPROB, SEVERAL], ids=["logprob", "several"])
@pytest.mark.parametrize("separability", ["token", "sequence", "pair"])
@pytest.mark.parametrize("scored", ["all", "prompt"])
def test_units_larger_than_a_tile(separability: str, names: tuple[str, ...], scored: str, dtype: torch.dtype) -> None:
    """Pairs of up to 600 tokens over tiles of 128 rows."""
    case = make_case(4, 300, H, V, dtype, scored=scored)
    loss = ToyLoss(separability, names)
    for rows in (128, 256):
        check(loss, case, strategy="immediate", memory_budget=budget_of(rows, case))


@pytest.mark.parametrize("names", [LOGPROB, SEVERAL], ids=["logprob", "several"])
@pytest.mark.parametrize("separability", ["token", "sequence", "pair"])
def test_units_packed_into_tiles(separability: str, names: tuple[str, ...]) -> None:
    """Short and long units in one batch, whatever is packed with what."""
    case = make_case(12, 60, H, V, scored="prompt")
    case.target[1, 5:] = -100
    case.target[7] = -100
    loss = ToyLoss(separability, names)
    for rows in (128, 256, 384):
        check(loss, case, strategy="immediate", memory_budget=budget_of(rows, case))
    for units in (1, 2, 5, 100):
        check(loss, case, strategy="immediate", max_units=units)


def test_max_units_bounds_what_the_loss_sees() -> None:
    seen: list[int] = []

    class Recording(ToyLoss):
        def __call__(self, statistics, mask, inputs, totals):  # type: ignore[no-untyped-def]
            seen.append(mask.shape[0])
            return super().__call__(statistics, mask, inputs, totals)

    case = make_case(10, 3)
    fused_linear_loss(Recording("pair"), *case.head, max_units=2, strategy="immediate")
    assert seen == [4, 4, 2]


def test_streaming_is_what_the_plan_says() -> None:
    """The budgets above do stream: of a unit of 600 tokens all but the last tile are projected twice."""
    case = make_case(2, 300, H, V, scored="all")
    found = plan(
        tokens=600, hidden_size=H, vocab_size=V, scored=[300, 300], dtype=torch.float64, separability="pair",
        strategy="immediate", memory_budget=budget_of(128, case),
    )  # fmt: skip
    assert found.tile_rows == 128
    assert found.gemms == pytest.approx(3 + (600 - 128) / 600)


@pytest.mark.parametrize("strategy", ["immediate", "recompute", "auto"])
def test_statistics_read_without_their_gradient(strategy: str) -> None:
    """A loss may name a differentiable statistic and only report it."""

    class Reporting(ToyLoss):
        def __call__(self, statistics, mask, inputs, totals):  # type: ignore[no-untyped-def]
            value, metrics = ToyLoss(self.separability, ("logprob",))(statistics, mask, inputs, totals)
            return value, {**metrics, "entropy": statistics["entropy"].detach().sum()}

    check(Reporting("pair", ("logprob", "entropy")), make_case(), strategy=strategy)


@pytest.mark.parametrize("strategy", ["immediate", "recompute"])
def test_a_constant_loss(strategy: str) -> None:
    class Constant(ToyLoss):
        def __call__(self, statistics, mask, inputs, totals):  # type: ignore[no-untyped-def]
            return statistics["logprob"].new_ones(()), {}

    case = make_case()
    value, _ = fused_linear_loss(Constant("pair", SEVERAL), *case.head, strategy=strategy)
    assert value == 1
    if value.requires_grad:
        assert all((g == 0).all() for g in torch.autograd.grad(value, case.leaves))


@pytest.mark.parametrize("strategy", ["cached", "recompute", "auto"])
def test_inputs_receive_gradients_from_deferred_strategies(strategy: str) -> None:
    loss, case = ToyLoss("pair", LOGPROB), make_case()
    got, want = ({name: value.requires_grad_() for name, value in loss_inputs(loss, case).items()} for _ in range(2))
    value, _ = fused_linear_loss(loss, *case.head, inputs=got, strategy=strategy)
    check_loss((value, _), loss, case, want)
    wanted = torch.autograd.grad(unfused_loss(loss, case, want)[0], list(want.values()))
    torch.testing.assert_close(torch.autograd.grad(value, list(got.values())), wanted)


def test_scored_tokens_and_targets_of_other_dtypes() -> None:
    loss, case = ToyLoss("pair", LOGPROB), make_case()
    inputs = loss_inputs(loss, case)
    for target in (ScoredTokens(case.target), case.target.int(), case.target.short()):
        got = fused_linear_loss(loss, case.hidden, case.weight, target, case.bias, inputs=inputs)
        check_loss(got, loss, case, inputs)


@pytest.mark.parametrize("strategy", ["immediate", "cached", "recompute", "auto"])
def test_evaluation_with_any_strategy(strategy: str) -> None:
    """A module keeps its strategy when it is evaluated: without gradients there is nothing to choose."""
    loss, case = ToyLoss("pair", LOGPROB), make_case()
    want, _ = fused_linear_loss(loss, *case.head)
    with torch.no_grad():
        got, _ = fused_linear_loss(loss, *case.head, strategy=strategy)
    torch.testing.assert_close(got, want.detach())


@dataclasses.dataclass(frozen=True)
class Answers:
    """A loss that returns what it is told to."""

    answer: Any
    metrics: Any = None
    differentiable: tuple[str, ...] = ("logprob",)
    separability: str = "pair"
    statistics: tuple[str, ...] = ("logprob",)

    def totals(self, mask: Any, inputs: Any) -> dict:
        return {}

    def __call__(self, statistics: Any, *rest: Any) -> tuple[Any, Any]:
        return self.answer(statistics["logprob"]), self.metrics or {}


@pytest.mark.parametrize("strategy", ["auto", "immediate", "cached", "recompute"])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Answers(lambda logprob: logprob.sum(-1)), "loss: returned shape (4,), expected a tensor without dimensions"),
        (Answers(lambda logprob: 1.0), "loss: returned float, expected a tensor without dimensions"),
        (Answers(torch.sum, {"mean": 0.5}), "loss: returned metric 'mean' of type float"),
    ],
)
def test_what_a_loss_returns_is_checked_the_same_everywhere(strategy: str, loss: Answers, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        fused_linear_loss(loss, *make_case(4, 5, 6, 20, torch.float32).head, strategy=strategy)


def test_what_a_loss_declares_is_checked() -> None:
    with pytest.raises(ValueError, match=re.escape("loss.differentiable: got ['entropy'], expected names out of")):
        fused_linear_loss(Answers(torch.sum, differentiable=("entropy",)), *make_case(4, 5, 6, 20, torch.float32).head)
    with pytest.raises(TypeError, match="loss: got the class Answers, expected an instance"):
        fused_linear_loss(Answers, *make_case(4, 5, 6, 20, torch.float32).head)
    value, _ = fused_linear_loss(Answers(torch.sum, differentiable=()), *make_case(4, 5, 6, 20, torch.float32).head)
    assert torch.isfinite(value)
