"""Gated activations against fp64, in every form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.kernels import ACTIVATIONS, gated_activation, packed_gated_activation

from .test_norms import BF16, F16, F32, WIDTHS, check, make

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    "relu2": lambda g: F.relu(g).square(),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 130), (2, 2056)], ids=str)
def test_two_tensors(device: str, activation: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gate, up = ((3 * make(*shape, dtype=dtype, device=device, seed=i).detach()).requires_grad_() for i in range(2))
    check(lambda g, u: gated_activation(g, u, activation), lambda g, u: PLAIN[activation](g) * u, [gate, up], terms=8)


@pytest.mark.parametrize("width", WIDTHS)
def test_widths(device: str, width: int) -> None:
    gate, up = (make(3, width, dtype=F32, device=device, seed=i) for i in range(2))
    check(gated_activation, lambda g, u: F.silu(g) * u, [gate, up], terms=8)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [5, 64])
def test_packed(device: str, activation: str, width: int) -> None:
    def plain(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return PLAIN[activation](gate) * up

    both = make(3, 2, 2 * width, dtype=F32, device=device)
    check(lambda b: packed_gated_activation(b, activation), plain, [both], terms=8)
    gate, up = both.chunk(2, -1)  # the same halves, as views
    assert torch.equal(gated_activation(gate, up, activation), packed_gated_activation(both, activation))


def test_far_from_zero(device: str) -> None:
    gate = torch.tensor([-1e4, -90.0, -30.0, 30.0, 90.0, 1e4], device=device, requires_grad=True)
    for activation in ACTIVATIONS:
        y = gated_activation(gate, torch.ones_like(gate), activation)
        torch.testing.assert_close(y, PLAIN[activation](gate), rtol=1e-5, atol=1e-6)
        (gradient,) = torch.autograd.grad(y.sum(), gate)
        assert gradient.isfinite().all()


def test_backward_twice(device: str) -> None:
    """B31: what is saved for backward is the caller's, and stays."""
    a, b = (make(4, 8, dtype=F32, device=device, seed=i) for i in range(2))
    for activation in ACTIVATIONS:
        y = gated_activation(a, b, activation)
        first = torch.autograd.grad(y.sum(), (a, b), retain_graph=True)
        second = torch.autograd.grad(y.sum(), (a, b))
        assert all(torch.equal(f, s) for f, s in zip(first, second, strict=True))


def test_the_edges(device: str) -> None:
    for shape in ((0, 8), (2, 0)):
        gate = torch.empty(shape, device=device, requires_grad=True)
        y = gated_activation(gate, gate)
        assert y.shape == torch.autograd.grad(y.sum(), gate)[0].shape == shape
    both = make(6, 4, 16, dtype=F32, device=device)
    for gate, up in ((both[::2], both[1::2]), (both[..., ::2], both[..., 1::2]), (both[..., 1:8], both[..., 8:15])):
        torch.testing.assert_close(gated_activation(gate, up), F.silu(gate) * up)
        found, wanted = (
            torch.autograd.grad(y.square().sum(), both)[0] for y in (gated_activation(gate, up), F.silu(gate) * up)
        )
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gated_activation(torch.zeros(2, 3), torch.zeros(3)), ValueError, "up: got shape (3,), expected that of gate, (2, 3)"),
        (lambda: gated_activation(torch.zeros(2), torch.zeros(2), "x"), ValueError, "activation: got 'x', expected one of ('silu', 'gelu', 'gelu_tanh', 'relu2')"),
        (lambda: packed_gated_activation(torch.zeros(2, 3)), ValueError, "gate_up: got shape (2, 3), expected [..., 2 I]"),
    ],
)  # fmt: skip
def test_bad_arguments(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
