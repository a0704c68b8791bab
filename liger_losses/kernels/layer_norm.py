"""LayerNorm: `y = (x - mean) / sqrt(var + eps) * (offset + w) + b` along the last dimension.

The variance is the mean of squared distances from the mean, summed in a second pass over the row: `mean(x^2) - mean^2`
loses all its digits where the mean is large.

Backward, with `xhat = (x - mean) rstd` and `m = dy (offset + w)`:
`dx = rstd (m - mean(m) - xhat mean(m xhat))`, `dw = sum_rows dy xhat`, `db = sum_rows dy`. Ba, Kiros and Hinton,
arXiv:1607.06450.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import use_triton
from .fastest import torch_is_faster
from .registration import (
    Operator,
    check_floating,
    check_numbers,
    check_vector,
    dense_like,
    differentiable_once,
    distinct,
    remember_implementation,
    rows_of,
    transformed,
    wide_dtype,
)


def layer_norm(
    x: Tensor,  # [..., H]
    weight: Tensor | None = None,  # [H]
    bias: Tensor | None = None,  # [H]
    *,
    eps: float = 1e-5,
    offset: float = 0.0,
) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * (offset + weight) + bias` along the last dimension, in fp32 (fp64 for fp64).

    The result is rounded once, to the dtype of `x`. A row whose variance overflows is NaN.

    Args:
        x: `[..., H]`; any width, any strides. Never written to, nor is the gradient that arrives.
        weight: `[H]`, or None for no weight (`offset` must be 0 then).
        bias: `[H]`, or None.
        eps: Added to the (biased) variance.
        offset: Added to the weight: 1 for Nemotron.

    Raises:
        ValueError: A shape or option does not fit.
        TypeError: An input is no floating-point tensor, or an option no number.
    """
    check_floating("weight", "bias", x=x, weight=weight, bias=bias)
    check_numbers(eps, offset)
    if x.dim() == 0:
        raise ValueError("x: got a scalar, expected [..., H]")
    check_vector("weight", weight, x.shape[-1])
    check_vector("bias", bias, x.shape[-1])
    if weight is None and offset:
        raise ValueError(f"offset: got {offset} without a weight, expected 0")
    if transformed():
        return _normalised(x, weight, bias, eps, offset)[0].to(x.dtype)
    same = (weight is None or weight.dtype == x.dtype) and (bias is None or bias.dtype == x.dtype)
    if same and not offset and torch_is_faster("layer_norm", x):
        return F.layer_norm(x, x.shape[-1:], weight, bias, float(eps))
    return _LayerNorm.apply(x, distinct(weight, x), distinct(bias, x, weight), float(eps), float(offset))


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Result, not yet rounded, mean and reciprocal deviation of each row, of torch's operations alone."""
    wide = wide_dtype(x.dtype)
    exact = x.to(wide)
    mean = exact.mean(-1)
    centred = exact - mean.unsqueeze(-1)
    variance = centred.pow(2).mean(-1)
    rstd = torch.rsqrt(variance + eps) + 0 * variance  # NaN where the variance is infinite
    y = centred * rstd.unsqueeze(-1)
    y = y if weight is None else y * (offset + weight.to(wide))
    return y if bias is None else y + bias.to(wide), mean, rstd


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, rows, wide = dense_like(x), rows_of(x), wide_dtype(x.dtype)
    mean = x.new_empty(rows.shape[0], dtype=wide)
    rstd = torch.empty_like(mean)
    if x.numel() == 0:
        return y, mean, rstd
    if use_triton(x):
        from .layer_norm_triton import forward_triton

        forward_triton(rows, weight, bias, y, mean, rstd, eps, offset)
        return y, mean, rstd
    normed, found_mean, found_rstd = _normalised(rows, weight, bias, eps, offset)
    mean.copy_(found_mean)
    rstd.copy_(found_rstd)
    y.view(rows.shape).copy_(normed)
    return y, mean, rstd


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    offset: float,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dx = dense_like(x)
    dw = torch.empty_like(weight) if needs_weight and weight is not None else None
    db = torch.empty_like(bias) if needs_bias and bias is not None else None
    if x.numel() == 0:
        return dx, None if dw is None else dw.zero_(), None if db is None else db.zero_()
    rows, sent = rows_of(x), rows_of(dy)
    if use_triton(x):
        from .layer_norm_triton import backward_triton

        backward_triton(sent, rows, weight, mean, rstd, dx, dw, db, offset)
        return dx, dw, db
    wide, scale = rstd.dtype, rstd.unsqueeze(-1)
    sent, xhat = sent.to(wide), (rows.to(wide) - mean.unsqueeze(-1)) * scale
    m = sent if weight is None else sent * (offset + weight.to(wide))
    gradient = m - m.mean(-1, keepdim=True) - xhat * (m * xhat).mean(-1, keepdim=True)
    dx.view(rows.shape).copy_(scale * gradient)
    if dw is not None:
        dw.copy_((sent * xhat).sum(0))
    if db is not None:
        db.copy_(sent.sum(0))
    return dx, dw, db


def _empty_like(parameter: Tensor | None, needed: bool, x: Tensor) -> Tensor:
    return torch.empty_like(parameter) if needed and parameter is not None else x.new_empty(0)


def _fake_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    mean, rstd = (x.new_empty(rows, dtype=wide_dtype(x.dtype)) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


def _fake_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, offset: float,
    needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), _empty_like(weight, needs_weight, x), _empty_like(bias, needs_bias, x)


layer_norm_forward = Operator(
    "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
layer_norm_backward = Operator(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, float offset, "
    "bool needs_weight, bool needs_bias) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> Tensor:
        remember_implementation(ctx)
        y, mean, rstd = layer_norm_forward(x, weight, bias, eps, offset)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dx, dw, db = layer_norm_backward(dy, x, weight, bias, mean, rstd, ctx.offset, needs[1], needs[2])
        return dx if needs[0] else None, dw if needs[1] else None, db if needs[2] else None, None, None
