"""The functional twins: bound as their signatures say, and traceable."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from liger_losses import functional

GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(4, 5, 6, generator=GENERATOR)
WEIGHT = torch.randn(9, 6, generator=GENERATOR)
TARGET = torch.randint(0, 9, (4, 5), generator=GENERATOR)
LABELS = torch.tensor([True, False, True, False])
FUNCTIONS = {name: f for name, f in vars(functional).items() if name.startswith("liger_")}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "liger_fused_linear_dpo": {"use_ref_model": False},
    "liger_fused_linear_tpo": {"compute_nll_loss": False},
    "liger_fused_linear_kto": {"preference_labels": LABELS, "use_ref_model": False},
    "liger_fused_linear_bco": {"preference_labels": LABELS, "use_ref_model": False},
    "liger_fused_linear_bce": {"_input": HIDDEN.view(20, 6), "positives": TARGET.view(20, 1)},
    "liger_fused_linear_grpo": {
        "selected_token_ids": TARGET, "attention_mask": torch.ones(4, 5), "advantages": torch.randn(4), "beta": 0.0,
        "use_ref_model": False,
    },
    "liger_fused_linear_kl_div": {"target": torch.randn(20, 9, generator=GENERATOR).softmax(-1)},
    "liger_cross_entropy": {"_input": torch.randn(4, 5, 9)},
}  # fmt: skip


def call_of(name: str) -> Callable[[], Any]:
    known = inspect.signature(FUNCTIONS[name]).parameters
    common = {
        "_input": HIDDEN, "weight": WEIGHT, "target": TARGET, "student_input": HIDDEN.view(20, 6),
        "student_weight": WEIGHT, "teacher_input": HIDDEN.view(20, 6) + 0.1, "teacher_weight": WEIGHT + 0.1,
        "true_labels": TARGET.view(20), "shift_labels": TARGET.view(20),
    }  # fmt: skip
    if name == "liger_cross_entropy":
        del common["weight"]  # there it is that of the classes
    given = {n: v for n, v in common.items() if n in known} | ARGUMENTS.get(name, {})
    return lambda: FUNCTIONS[name](**given)


def loss_of(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n in {*ARGUMENTS} or "linear" in n])
def test_compiles_into_one_graph(name: str) -> None:
    torch._dynamo.reset()
    call = call_of(name)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(loss_of(compiled()), loss_of(call()))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [name for name, f in FUNCTIONS.items() if f.__code__.co_name == "function"])
def test_arguments_are_bound_as_the_signature_says(name: str) -> None:
    function = FUNCTIONS[name]
    with pytest.raises(TypeError, match=re.escape(f"{name}() missing a required argument: ")):
        function()
    with pytest.raises(TypeError, match=re.escape(f"{name}() got an unexpected keyword argument 'nonsense'")):
        function(HIDDEN, nonsense=1)
    first = next(iter(inspect.signature(function).parameters))
    with pytest.raises(TypeError, match=re.escape(f"{name}() multiple values for argument '{first}'")):
        function(HIDDEN, **{first: HIDDEN})
    with pytest.raises(TypeError, match=re.escape(f"{name}() too many positional arguments: got 99")):
        function(*[None] * 99)
