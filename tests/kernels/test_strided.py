"""Tensors whose elements are not side by side: a column of a matrix, every second row, a number repeated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses import (
    Divergence,
    fused_linear_loss,
    linear_divergence,
    linear_logprobs,
    linear_topk_logprobs,
    logit_statistics,
)
from liger_losses.chunked import active
from liger_losses.kernels import fused_add_rms_norm, layer_norm, packed_gated_activation, rms_norm
from liger_losses.losses import CrossEntropyLoss

N, H, V = 4, 8, 24
Result = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
LEAVES = {
    "hidden", "weight", "bias", "student_hidden", "student_weight", "student_bias", "logits", "x", "residual", "gate_up",
}  # fmt: skip


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


HEAD = {"hidden": normal(N, H, seed=0), "weight": normal(V, H, seed=1), "bias": normal(V, seed=2)}
STUDENT = {f"student_{name}": tensor for name, tensor in HEAD.items()}
TARGET = {"target": torch.randint(V, (N,), generator=torch.Generator().manual_seed(3))}
ROWS = {"hidden": HEAD["hidden"].view(2, 2, H), "target": TARGET["target"].view(2, 2)}
TEMPERATURE = {"temperature": normal(N, seed=4).abs() + 0.5}
COLUMNS = {"column_weights": normal(V, seed=5).abs()}
TEACHER = {
    "teacher_hidden": normal(N, 8, seed=6), "teacher_weight": normal(V, 8, seed=7), "teacher_bias": normal(V, seed=8)
}  # fmt: skip
EVERY = ("logprob", "entropy", "lse", "mean_logprob", "argmax", "is_top1")
HARD = Divergence(kind="jsd", hard_weight=0.5)

CALLS: dict[str, tuple[dict[str, Tensor], Callable[..., Result]]] = {
    "cached": (HEAD | TARGET | TEMPERATURE, lambda **t: linear_logprobs(**t, strategy="cached")),
    "recompute": (
        HEAD | TARGET | TEMPERATURE | COLUMNS,
        lambda **t: linear_logprobs(**t, statistics=EVERY, strategy="recompute"),
    ),
    "active": (HEAD | TARGET, lambda **t: linear_logprobs(**t, strategy="cached", active_vocab=1e-3)),
    "immediate": (
        HEAD | ROWS,
        lambda **t: fused_linear_loss(CrossEntropyLoss(lse_square_scale=0.1), **t, strategy="immediate")[0],
    ),
    "several labels": (
        HEAD | TARGET | {"positives": torch.randint(V, (N, 3), generator=torch.Generator().manual_seed(9))},
        lambda **t: linear_logprobs(**t),
    ),
    "top k": (
        HEAD | {"ids": torch.randint(V, (N, 3), generator=torch.Generator().manual_seed(10))} | TEMPERATURE,
        lambda **t: linear_topk_logprobs(**t),
    ),
    "logits": (
        {"logits": normal(N, V, seed=11)} | TARGET | TEMPERATURE | COLUMNS,
        lambda **t: logit_statistics(**t, statistics=EVERY),
    ),
    "a teacher's head": (STUDENT | TARGET | TEACHER, lambda **t: linear_divergence(**t, divergence=HARD)),
    "a teacher's head, again": (
        STUDENT | TARGET | TEACHER,
        lambda **t: linear_divergence(**t, divergence=HARD, strategy="recompute"),
    ),
    "a teacher's logits": (
        STUDENT | TARGET | {"teacher_logits": normal(N, V, seed=12)},
        lambda **t: linear_divergence(**t, divergence=HARD),
    ),
    "rms_norm": ({"x": normal(N, H, seed=13), "weight": normal(H, seed=14)}, rms_norm),
    "fused_add_rms_norm": (
        {"x": normal(N, H, seed=13), "residual": normal(N, H, seed=15), "weight": normal(H, seed=14)},
        fused_add_rms_norm,
    ),
    "layer_norm": (
        {"x": normal(N, H, seed=13), "weight": normal(H, seed=14), "bias": normal(H, seed=15)},
        layer_norm,
    ),
    "gated": ({"gate_up": normal(N, 2 * H, seed=16)}, packed_gated_activation),
}


def spaced(tensor: Tensor) -> Tensor:
    """The same numbers, two apart in every dimension."""
    room = torch.full([2 * size for size in tensor.shape], 7, dtype=tensor.dtype, device=tensor.device)
    room[tuple(slice(None, None, 2) for _ in tensor.shape)] = tensor
    return room[tuple(slice(None, None, 2) for _ in tensor.shape)]


def turned(tensor: Tensor) -> Tensor:
    """The same numbers, the last dimension's furthest apart."""
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1)


def outcome(call: Callable[..., Result], given: dict[str, Tensor]) -> list[Tensor]:
    """Results and gradients."""
    given = {n: t.detach().requires_grad_() if n in LEAVES else t for n, t in given.items()}
    found: Any = call(**given)
    values = list(found.values()) if isinstance(found, dict) else [found] if isinstance(found, Tensor) else list(found)
    sent = [v.detach().cos() for v in values if v.requires_grad]
    leaves = [t for n, t in given.items() if n in LEAVES]
    return values + list(torch.autograd.grad([v for v in values if v.requires_grad], leaves, sent))


@pytest.mark.parametrize("name", CALLS)
def test_each_tensor(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "CROSSOVER", 1.0)  # some columns are always left out
    tensors, call = CALLS[name]
    given = {n: t.to(device) for n, t in tensors.items()}
    want = outcome(call, given)
    for which, layout in itertools.product(given, (spaced, turned)):
        other = layout(given[which])
        if other.is_contiguous():  # of one dimension there is nothing to turn
            continue
        for one, expected in zip(outcome(call, {**given, which: other}), want, strict=True):
            torch.testing.assert_close(
                one, expected, rtol=1e-4, atol=1e-4, msg=lambda text, seen=(which, layout): f"{seen}: {text}"
            )
