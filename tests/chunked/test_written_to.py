"""Tensors of the caller's that are written to between forward and backward: the same gradients, or an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses import Divergence, linear_divergence, linear_logprobs
from liger_losses.chunked import Plan, calls, planner

ROWS, HIDDEN, VOCAB = 300, 16, 257


@pytest.fixture(params=["kept", "again"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an active vocabulary: there is room for all that backward needs, or for nothing."""
    original = planner.make_plan
    room = {"kept": (1 << 30, True), "again": (0, False)}[request.param]

    def changed(*args: Any, **kwargs: Any) -> Plan:
        made = original(*args, **kwargs)
        return replace(made, cache_bytes=room[0], whole_cache=room[1])

    monkeypatch.setattr(calls, "make_plan", changed)


def head() -> dict[str, Tensor]:
    torch.manual_seed(0)
    given = {"hidden": torch.randn(ROWS, HIDDEN), "weight": torch.randn(VOCAB, HIDDEN), "bias": torch.randn(VOCAB)}
    return {name: tensor.requires_grad_() for name, tensor in given.items()}


def holds(value: Tensor, leaves: list[Tensor], written: Tensor) -> None:
    once = torch.autograd.grad(value, leaves, retain_graph=True)
    with torch.no_grad():
        written.copy_(torch.ones_like(written))
    try:
        again = torch.autograd.grad(value, leaves)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


WALKS: list[dict[str, Any]] = [
    {"strategy": "cached"}, {"strategy": "recompute"}, {"strategy": "cached", "active_vocab": 1e-3}
]  # fmt: skip


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("options", WALKS, ids=str)
@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "target", "temperature", "positives"])
def test_of_logprobs(name: str, options: dict[str, Any]) -> None:
    given = head()
    leaves = list(given.values())
    given["target"] = torch.randint(VOCAB, (ROWS,))
    if name == "temperature":
        given[name] = torch.rand(ROWS) + 0.5
    if name == "positives":
        given[name] = torch.randint(VOCAB, (ROWS, 3))
    holds(linear_logprobs(**given, **options).sum(), leaves, given[name])


TEACHERS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "head": lambda: {
        "teacher_hidden": torch.randn(ROWS, 8), "teacher_weight": torch.randn(VOCAB, 8),
        "teacher_bias": torch.randn(VOCAB),
    },
    "logits": lambda: {"teacher_logits": torch.randn(ROWS, VOCAB)},
    "probabilities": lambda: {"teacher_probs": torch.rand(ROWS, VOCAB)},
}  # fmt: skip


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("options", WALKS, ids=str)
@pytest.mark.parametrize(
    ("teacher", "name"),
    [("head", f"teacher_{of}") for of in ("hidden", "weight", "bias")]
    + [("logits", "teacher_logits"), ("probabilities", "teacher_probs"), ("logits", "target")],
)
def test_of_a_divergence(teacher: str, name: str, options: dict[str, Any]) -> None:
    student = {f"student_{of}": tensor for of, tensor in head().items()}
    given = {**TEACHERS[teacher](), "target": torch.randint(VOCAB, (ROWS,))}
    divergence = Divergence(kind="jsd", hard_weight=0.5)
    value = linear_divergence(**student, **given, divergence=divergence, **options)
    holds(value.sum(), list(student.values()), given[name])
