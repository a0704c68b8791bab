"""Gated activation `y = act(gate) * up`: the middle of SwiGLU and GeGLU MLPs (Shazeer, arXiv:2002.05202).

`act` is `silu`, `gelu` (exact, by erf), `gelu_tanh` or `relu2` (`relu(x)^2`). Arithmetic is fp32 (fp64 for fp64) with
one rounding at the end. Only the inputs are kept for backward, which forms the activation again.

Gate and up are two tensors, or the two halves of one (`packed_gated_activation`), whose gradient is then one tensor,
too: what a fused gate-up projection needs, without a copy.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import use_triton
from .registration import (
    Operator,
    check_floating,
    dense_like,
    differentiable_once,
    distinct,
    remember_implementation,
    rows_of,
    transformed,
    wide_dtype,
)

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")
_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


def gated_activation(
    gate: Tensor,  # [..., I]
    up: Tensor,  # [..., I]
    activation: str = "silu",
) -> Tensor:
    """`act(gate) * up`, `[..., I]`, in the promoted dtype of both. Neither is written to.

    Raises:
        ValueError: The shapes differ, or the activation is unknown.
        TypeError: An input is no floating-point tensor.
    """
    check_floating(gate=gate, up=up)
    _check_activation(activation)
    if gate.shape != up.shape:
        raise ValueError(f"up: got shape {tuple(up.shape)}, expected that of gate, {tuple(gate.shape)}")
    if gate.dim() == 0:
        raise ValueError("gate: got a scalar, expected [..., I]")
    if transformed():
        return _composed(gate, up, activation).to(torch.promote_types(gate.dtype, up.dtype))
    return _Gated.apply(gate, distinct(up, gate), activation)


def packed_gated_activation(
    gate_up: Tensor,  # [..., 2 I]
    activation: str = "silu",
) -> Tensor:
    """`act(gate) * up`, `[..., I]`, where `gate_up` holds the gate in its first half and up in its second.

    Raises:
        ValueError: The last size is odd, or the activation is unknown.
        TypeError: The input is no floating-point tensor.
    """
    check_floating(gate_up=gate_up)
    _check_activation(activation)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: got shape {tuple(gate_up.shape)}, expected [..., 2 I]")
    if transformed():
        gate, up = gate_up.chunk(2, -1)
        return _composed(gate, up, activation).to(gate_up.dtype)
    return _Gated.apply(gate_up, None, activation)


def _composed(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Not yet rounded, of torch's operations alone."""
    wide = wide_dtype(gate.dtype, up.dtype)
    return _activated(gate.to(wide), activation) * up.to(wide)


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, expected one of {ACTIVATIONS}")


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up as rows."""
    if up is not None:
        return rows_of(gate), rows_of(up)
    first, second = rows_of(gate).chunk(2, -1)
    return first, second


def _forward(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    width = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    dtype = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)
    y = dense_like(gate, dtype) if up is not None else gate.new_empty((*gate.shape[:-1], width))
    if y.numel() == 0:
        return y
    g, u = _halves(gate, up)
    if dtype != torch.float64 and use_triton(gate):
        from .gated_activation_triton import forward_triton

        forward_triton(g, u, y, activation)
        return y
    y.view(-1, width).copy_(_composed(g, u, activation))
    return y


def _backward(dy: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> tuple[Tensor, Tensor | None]:
    dgate, dup = dense_like(gate), None if up is None else dense_like(up)
    if dy.numel() == 0:
        return dgate, dup
    g, u = _halves(gate, up)
    dg, du = _halves(dgate, dup)
    sent = rows_of(dy)
    if dy.dtype != torch.float64 and use_triton(gate):
        from .gated_activation_triton import backward_triton

        backward_triton(sent, g, u, dg, du, activation)
        return dgate, dup
    wide = wide_dtype(dy.dtype)
    g, sent = g.to(wide), sent.to(wide)
    du.copy_(sent * _activated(g, activation))
    dg.copy_(sent * u.to(wide) * _slope(g, activation))
    return dgate, dup


def _activated(g: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(g)
    if activation == "relu2":
        return F.relu(g).square()
    return F.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none")


def _slope(g: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        sigmoid = torch.sigmoid(g)
        return sigmoid * (1 + g * (1 - sigmoid))
    if activation == "relu2":
        return 2 * F.relu(g)
    if activation == "gelu":
        density = torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(g / math.sqrt(2))) + g * density
    t = torch.tanh(_TANH_SCALE * (g + _TANH_CUBE * g**3))
    return 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * _TANH_SCALE * (1 + 3 * _TANH_CUBE * g * g)


def _fake_forward(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _fake_backward(dy: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(0) if up is None else up.new_empty(up.shape)


gated_activation_forward = Operator(
    "gated_activation_forward(Tensor gate, Tensor? up, str activation) -> Tensor", _forward, _fake_forward
)
gated_activation_backward = Operator(
    "gated_activation_backward(Tensor dy, Tensor gate, Tensor? up, str activation) -> (Tensor, Tensor)",
    _backward,
    _fake_backward,
)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
        remember_implementation(ctx)
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return gated_activation_forward(gate, up, activation)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = gated_activation_backward(dy, gate, up, ctx.activation)
        needs = ctx.needs_input_grad
        return dgate if needs[0] else None, dup if needs[1] else None, None
