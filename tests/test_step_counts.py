"""`num_items_in_batch` means the same, and is refused in the same words, wherever it is taken."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses import chunked, functional, fused_linear_distillation, fused_linear_loss, losses, modules
from liger_losses.chunked import DistillationLoss
from liger_losses.losses import CrossEntropyLoss, GRPOLoss, SampledKLLoss, cross_entropy_loss, grpo_loss

R, T, H, V = 2, 4, 3, 7
NAME = "num_items_in_batch"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


HIDDEN, WEIGHT, OTHER = normal(R, T, H), normal(V, H, seed=1), normal(V, H, seed=2)
TARGET = torch.tensor([[1, 2, -100, 3], [4, 5, 6, -100]])
MASK = TARGET != -100
LOGPROBS = -normal(R, T, seed=3).exp()
ADVANTAGES = normal(R, seed=4)
TWO_HEADS = (HIDDEN, WEIGHT, HIDDEN, OTHER, TARGET)
SOFT = (HIDDEN, WEIGHT, (HIDDEN @ OTHER.T).softmax(-1), TARGET)


def of_object(loss: Any, **inputs: Tensor) -> Callable[..., Any]:
    def call(**count: Any) -> Any:
        return fused_linear_loss(loss, HIDDEN, WEIGHT, TARGET, inputs=inputs | count)

    return call


def unfused(loss: Any, statistic: str, **inputs: Tensor) -> Callable[..., Any]:
    def call(**count: Any) -> Any:
        given = loss.prepare(MASK, inputs | count)
        return loss({statistic: LOGPROBS}, MASK, given, loss.totals(MASK, given))

    return call


def policy(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **count: call(HIDDEN, WEIGHT, TARGET.clamp(min=0), MASK, ADVANTAGES, **count)


def distilled(**count: Any) -> Any:
    return fused_linear_distillation(HIDDEN, WEIGHT, TARGET, teacher_hidden=HIDDEN, teacher_weight=OTHER, **count)


# By the name of what takes a count as an int or a tensor.
PUBLIC: dict[str, Callable[..., Any]] = {
    "LigerFusedLinearCrossEntropyLoss": lambda **n: modules.LigerFusedLinearCrossEntropyLoss()(WEIGHT, HIDDEN, TARGET, **n),
    "LigerCrossEntropyLoss": lambda **n: modules.LigerCrossEntropyLoss()(HIDDEN @ WEIGHT.T, TARGET, **n),
    "LigerFusedLinearJSDLoss": lambda **n: modules.LigerFusedLinearJSDLoss()(*TWO_HEADS, **n),
    "LigerFusedLinearCosineSimilarityLoss": lambda **n: modules.LigerFusedLinearCosineSimilarityLoss()(*TWO_HEADS, **n),
    "LigerFusedLinearJSD": lambda **n: modules.LigerFusedLinearJSD()(*TWO_HEADS, **n),
    "LigerFusedLinearKLDivLoss": lambda **n: modules.LigerFusedLinearKLDivLoss()(*SOFT, **n),
    "LigerFusedLinearGRPOLoss": policy(modules.LigerFusedLinearGRPOLoss(loss_type="dapo", beta=0.0, use_ref_model=False)),
    "fused_linear_distillation": distilled,
    "cross_entropy_loss": lambda **n: cross_entropy_loss(LOGPROBS, MASK, **n),
    "grpo_loss": lambda **n: grpo_loss(LOGPROBS, MASK, ADVANTAGES, loss_type="dapo", **n),
    "liger_fused_linear_cross_entropy": lambda **n: functional.liger_fused_linear_cross_entropy(HIDDEN, WEIGHT, TARGET, **n),
    "liger_cross_entropy": lambda **n: functional.liger_cross_entropy(HIDDEN @ WEIGHT.T, TARGET, **n),
    "liger_fused_linear_jsd_loss": lambda **n: functional.liger_fused_linear_jsd_loss(*TWO_HEADS, **n),
    "liger_fused_linear_cosine": lambda **n: functional.liger_fused_linear_cosine(*TWO_HEADS, **n),
    "liger_fused_linear_jsd": lambda **n: functional.liger_fused_linear_jsd(*TWO_HEADS, **n),
    "liger_fused_linear_kl_div": lambda **n: functional.liger_fused_linear_kl_div(*SOFT, **n),
    "liger_fused_linear_grpo": lambda **n: policy(functional.liger_fused_linear_grpo)(
        loss_type="dapo", beta=0.0, use_ref_model=False, **n
    ),
}  # fmt: skip

# Loss objects, whose inputs are tensors.
POLICY = GRPOLoss(loss_type="dapo", beta=0.0, on_policy=True)
OBJECTS: dict[str, Callable[..., Any]] = {
    "CrossEntropyLoss": of_object(CrossEntropyLoss()),
    "GRPOLoss": of_object(POLICY, advantages=ADVANTAGES),
    "SampledKLLoss": of_object(SampledKLLoss(), teacher_logprobs=LOGPROBS),
    "DistillationLoss": unfused(DistillationLoss(report=()), "distillation"),
}
WRONG: list[tuple[Any, type[Exception], str]] = [
    (0, ValueError, "got 0, expected a finite number > 0"),
    (-3, ValueError, "got -3, expected a finite number > 0"),
    (float("nan"), ValueError, "got nan, expected a finite number > 0"),
    (True, TypeError, "got True of type bool, expected a Python number"),
    (2.5, TypeError, "got 2.5 of type float, expected an int or a torch.Tensor"),
    ("8", TypeError, "got '8' of type str, expected a Python number"),
    (torch.tensor(0), ValueError, "got 0, expected > 0"),
    (torch.tensor(-2.0), ValueError, "got -2.0, expected > 0"),
    (torch.tensor(float("nan")), ValueError, "got nan, expected > 0"),
    (torch.tensor([3]), ValueError, "got shape [1], expected []"),
    (torch.tensor(True), TypeError, "got torch.bool, expected a number"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG, ids=[f"{type(w).__name__}-{m}" for w, _, m in WRONG])
@pytest.mark.parametrize("name", [*PUBLIC, *OBJECTS])
def test_a_count_that_is_none_is_refused_in_the_same_words(
    name: str, wrong: Any, error: type[Exception], message: str
) -> None:
    if name in OBJECTS and not isinstance(wrong, Tensor):
        wrong, error, message = torch.zeros(3), ValueError, "got shape [3], expected []"
    with pytest.raises(error, match=re.escape(f"{NAME}: {message}")):
        (PUBLIC | OBJECTS)[name](**{NAME: wrong})


@pytest.mark.parametrize("name", [*PUBLIC, *OBJECTS])
def test_it_divides_instead_of_the_scored_tokens(name: str) -> None:
    def value(**count: Any) -> Tensor:
        found = (PUBLIC | OBJECTS)[name](**count)
        return found[0] if isinstance(found, tuple) else found

    plain = value()  # over 6 tokens
    counts = [torch.tensor(12), torch.tensor(12.0)] + [12] * (name in PUBLIC)
    for count in counts:
        torch.testing.assert_close(value(num_items_in_batch=count), plain / 2)


@pytest.mark.parametrize("loss", [CrossEntropyLoss(reduction="sum"), DistillationLoss(reduction="sum")], ids=repr)
def test_a_sum_divides_by_nothing(loss: Any) -> None:
    message = f"{NAME}: got a count, expected none with reduction='sum', which divides by nothing"
    with pytest.raises(ValueError, match=re.escape(message)):
        loss.prepare(MASK, {NAME: torch.tensor(3)})


def test_every_taker_is_tested() -> None:
    found = set()
    for home in (modules, functional, losses, chunked):
        for name, value in vars(home).items():
            if name.startswith("_") or not getattr(value, "__module__", "").startswith("liger_losses"):
                continue
            call = value.forward if isinstance(value, type) and issubclass(value, torch.nn.Module) else value
            inputs = value.__doc__ or "" if isinstance(value, type) and hasattr(value, "prepare") else ""
            if f"`{NAME}`" in inputs or (callable(call) and NAME in inspect.signature(call).parameters):
                found.add(name)
    assert found == {*PUBLIC, *OBJECTS}
