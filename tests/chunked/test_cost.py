"""What a call costs: products counted one by one, and every allocation of a call seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from liger_losses.chunked import fused_linear_loss, linear_logprobs, operators, plan
from liger_losses.chunked.problem import Plan
from liger_losses.kernels import tile_statistics
from liger_losses.modules import LigerFusedLinearDPOLoss

from ..oracle import Case, ToyLoss, make_case

BOTH, HEAD, HIDDEN = ("hidden", "weight"), ("weight",), ("hidden",)


@pytest.fixture
def count_products(counted_flops: Callable[[], float]) -> Callable[[Case], float]:
    """Products since the last call of it, in units of `2 N H V` over the scored tokens of a case."""
    return lambda case: counted_flops() / (2.0 * case.mask.sum().item() * case.hidden.shape[-1] * case.weight.shape[0])


@pytest.mark.parametrize(
    ("strategy", "trainable", "products"),
    [
        ("immediate", BOTH, 3), ("immediate", HEAD, 2), ("immediate", HIDDEN, 2),
        ("cached", BOTH, 3), ("cached", HEAD, 2), ("cached", HIDDEN, 2),
        ("recompute", BOTH, 4), ("recompute", HEAD, 3), ("recompute", HIDDEN, 3),
        ("frozen", HIDDEN, 2), ("auto", BOTH, 3), ("auto", HEAD, 2), ("auto", HIDDEN, 2), ("auto", (), 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scored", ["all", "prompt"])
def test_products(
    strategy: str, trainable: tuple[str, ...], products: int, scored: str, count_products: Callable[[Case], float]
) -> None:
    """B49: only scored tokens are projected."""
    case = make_case(4, 70, 8, 200, bias=False, trainable=trainable, scored=scored)
    value, _ = fused_linear_loss(ToyLoss("pair"), *case.head, strategy=strategy)
    if trainable:
        value.backward()
    assert count_products(case) == products


@pytest.mark.parametrize("strategy", ["auto", "immediate", "cached", "recompute"])
def test_no_gradient_no_gradient_products(strategy: str, count_products: Callable[[Case], float]) -> None:
    """B48: an evaluation projects once."""
    case = make_case(bias=False)
    with torch.no_grad():
        fused_linear_loss(ToyLoss("pair"), *case.head, strategy=strategy)
    assert count_products(case) == 1
    case = make_case(bias=False, trainable=())
    fused_linear_loss(ToyLoss("pair"), *case.head, strategy=strategy)
    assert count_products(case) == 1


@pytest.mark.parametrize("options", [{"statistics": ("is_top1", "mean_logit")},
                                     {"statistics": ("entropy",), "differentiable": ()}], ids=str)  # fmt: skip
def test_statistics_without_gradient_are_projected_once(
    options: dict[str, Any], count_products: Callable[[Case], float]
) -> None:
    case = make_case(bias=False)
    linear_logprobs(*case.head, **options)
    assert count_products(case) == 1


def test_a_reference_adds_one_product(count_products: Callable[[Case], float]) -> None:
    case = make_case(4, 70, 8, 200, bias=False, scored="prompt")
    reference = make_case(4, 70, 8, 200, bias=False, trainable=(), seed=1)
    loss, _ = LigerFusedLinearDPOLoss()(case.weight, case.hidden, case.target, None, reference.hidden, reference.weight)
    loss.backward()
    assert count_products(case) == 4


def test_streaming_projects_all_but_the_last_tile_again(count_products: Callable[[Case], float]) -> None:
    case = make_case(2, 300, 8, 40, bias=False, scored="all")
    options = {"strategy": "immediate", "memory_budget": 160_000}
    value, _ = fused_linear_loss(ToyLoss("pair"), *case.head, **options)
    value.backward()
    found = plan(tokens=600, hidden_size=8, vocab_size=40, scored=(300, 300), dtype=torch.float64, separability="pair",
                 **options)  # fmt: skip
    assert found.tile_rows < 600
    assert count_products(case) == pytest.approx(found.gemms)


# memory -------------------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Every tensor that is made: the largest, the shapes, and the peak of what is alive. The library's operators are
    entered, not seen from outside."""

    def __init__(self, *existing: Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in existing}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = self.peak = 0
        self.shapes: Counter[tuple[int, ...]] = Counter()  # of new memory, not of views
        traced = (operators.token_statistics, operators.token_statistics_backward)
        self._operators = {operator._qualname: operator._init_fn for operator in traced}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = self._operators.get(func._schema.name)
        if inside is not None:
            with self:
                return inside(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if storage.data_ptr() in self._known or reference.cdata in self._alive:
            return
        self.shapes[tuple(tensor.shape)] += 1
        self.largest = max(self.largest, storage.nbytes())
        self._alive[reference.cdata] = (reference, storage.nbytes())


@pytest.fixture
def small_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch twin's own temporaries, which the Triton kernel has none of, made small."""
    monkeypatch.setattr(tile_statistics, "TWIN_ELEMENTS", 1 << 14)


PER_TOKEN = 60 * 8


def per_token_bytes(case: Case) -> int:
    """Vectors with a number per token: statistics, running sums, masks, index, the loss's own. Not in a plan."""
    return PER_TOKEN * case.target.numel()


def run(case: Case, loss: ToyLoss, **options: Any) -> Allocations:
    with Allocations(*(tensor for tensor in case.head if tensor is not None)) as seen:
        value, _ = fused_linear_loss(loss, *case.head, **options)
        if case.leaves:
            torch.autograd.grad(value, case.leaves)
    return seen


TWIN = 20 * 8 * (1 << 14)  # bytes of the twin's temporaries


def planned_and_seen(strategy: str, scored: str, length: int, width: int, vocab: int) -> tuple[Plan, Allocations, int]:
    """The plan of a pair, what its step allocated, and the peak of what is neither input nor returned gradient."""
    trainable = HIDDEN if strategy == "frozen" else BOTH
    case = make_case(2, length, width, vocab, torch.float32, bias=False, scored=scored, trainable=trainable)
    found = plan(
        tokens=2 * length, hidden_size=width, vocab_size=vocab, scored=case.mask.sum(-1).tolist(), dtype=torch.float32,
        separability="pair", trainable_head=strategy != "frozen", strategy=strategy,
    )  # fmt: skip
    seen = run(case, ToyLoss("pair"), strategy=strategy)
    return found, seen, seen.peak - sum(leaf.nbytes for leaf in case.leaves)


EACH = pytest.mark.parametrize("strategy", ["immediate", "cached", "recompute", "frozen"])


@pytest.mark.usefixtures("small_twin")
@EACH
@pytest.mark.parametrize("scored", ["all", "prompt"])
def test_the_plan_is_kept(strategy: str, scored: str) -> None:
    """The peak beyond inputs and returned gradients is at most the plan's, and not far below it."""
    found, seen, workspace = planned_and_seen(strategy, scored, 400, 64, 4096)
    assert workspace <= found.workspace + PER_TOKEN * found.problem.positions + TWIN
    assert workspace >= 0.8 * found.workspace
    assert seen.largest <= found.budget


@EACH
@pytest.mark.parametrize("scored", ["all", "prompt"])
def test_the_plan_knows_every_copy_of_the_hidden_states(
    strategy: str, scored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above where hidden states are large beside the logits, and one copy more would be seen."""
    monkeypatch.setattr(tile_statistics, "TWIN_ELEMENTS", 1 << 11)
    found, _, workspace = planned_and_seen(strategy, scored, 300, 1024, 1024)
    one_copy = found.problem.tokens * 1024 * 4
    assert workspace <= found.workspace + one_copy // 10


@pytest.mark.usefixtures("small_twin")
def test_b01_one_long_pair_takes_no_more_memory_than_a_short_one() -> None:
    """DPO, B=2, V=4096, H=16: under one budget, whatever the length."""
    budget = 6 << 20
    peaks = []
    for length in (256, 2048):
        case = make_case(2, length, 16, 4096, torch.float32, bias=False, scored="all")
        seen = run(case, ToyLoss("pair"), memory_budget=budget, max_units=1)
        assert seen.largest <= budget
        assert seen.largest < 2 * length * 4096 * 4
        peaks.append(seen.peak - sum(leaf.nbytes for leaf in case.leaves) - per_token_bytes(case))
    assert max(peaks) <= budget + TWIN


@pytest.mark.parametrize(
    ("strategy", "names"),
    [("auto", ("logprob",)), ("frozen", ("logprob",)), ("immediate", ("logprob",)), ("immediate", ("logprob", "lse")),
     ("recompute", ("logprob", "lse"))],
)  # fmt: skip
def test_b47_a_frozen_head_has_no_buffer_of_its_size(strategy: str, names: tuple[str, ...]) -> None:
    case = make_case(4, 7, 8, 200, trainable=("hidden",))
    seen = run(case, ToyLoss("pair", names), strategy=strategy)
    assert (28, 8) in seen.shapes
    assert not {(200, 8), (8, 200)} & set(seen.shapes)


def test_b51_recompute_makes_nothing_of_the_heads_size_but_its_gradient() -> None:
    """Nor whole logits: 280 tokens, of which a block of columns is alive."""
    case = make_case(4, 70, 8, 1000, torch.float32, bias=False, scored="all")
    seen = run(case, ToyLoss("batch"), strategy="recompute", memory_budget=700_000)
    assert seen.shapes[1000, 8] == 1
    assert seen.largest < 280 * 1000 * 4
    assert run(case, ToyLoss("pair"), strategy="immediate").shapes[1000, 8] == 2  # the sum, and the result


def test_b49_memory_follows_scored_tokens() -> None:
    """95 % ignored: the cache of the logits' gradient holds what is scored."""
    case = make_case(2, 400, 8, 500, torch.float32, bias=False, scored="all")
    full = run(case, ToyLoss("pair"), strategy="cached").largest
    case.target[:, :380] = -100
    assert run(case, ToyLoss("pair"), strategy="cached").largest <= full / 5
