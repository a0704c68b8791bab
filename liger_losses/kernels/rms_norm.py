"""RMSNorm, alone or after adding a residual: `y = x / sqrt(mean(x^2) + eps) * (offset + w)` along the last dimension.

`fused_add_rms_norm` first forms `s = x + residual`, rounded to its dtype, and returns it beside `norm(s)`.

Backward, with `xhat = x rstd` and `m = dy (offset + w)`: `dx = rstd (m - xhat mean(m xhat))`, `dw = sum_rows dy xhat`.
Only `rstd` (one fp32 number a row) is kept besides the inputs. Zhang and Sennrich, arXiv:1910.07467.
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

# Where the three conventions in use round; everything else is fp32. llama: `xhat` is rounded to the dtype of `x`, the
# product has the promoted dtype. gemma: one rounding, to the dtype of `x`. none: one rounding, to the promoted dtype.
CASTING_MODES = ("llama", "gemma", "none")


def rms_norm(
    x: Tensor,  # [..., H]
    weight: Tensor | None = None,  # [H]
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` along the last dimension, in fp32 (fp64 for fp64).

    Args:
        x: `[..., H]`; any width, any strides. Never written to, nor is the gradient that arrives.
        weight: `[H]`, or None for no weight (`offset` has no meaning then and must be 0).
        eps: Added to the mean square.
        offset: Added to the weight: 1 for Gemma.
        casting_mode: `"llama"` rounds the normalised states to the dtype of `x` before the weight and returns the
            promoted dtype of both; `"gemma"` rounds once, to the dtype of `x`; `"none"` rounds once, to the promoted
            dtype.

    Raises:
        ValueError: A shape or option does not fit.
        TypeError: An input is no floating-point tensor, or an option no number.
    """
    _check(x, weight, eps, offset, casting_mode)
    if transformed():
        return _composed(x, weight, None, eps, offset, casting_mode)[0]
    if torch_is_faster("rms_norm", x) and _is_torchs(x, weight, offset, casting_mode):
        return F.rms_norm(x, x.shape[-1:], weight, float(eps))
    normed, _ = _RMSNorm.apply(x, distinct(weight, x), None, float(eps), float(offset), casting_mode)
    return normed


def fused_add_rms_norm(
    x: Tensor,  # [..., H]
    residual: Tensor,  # [..., H]
    weight: Tensor | None = None,  # [H]
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    """`s = x + residual`, and `rms_norm(s)`: returns `(normed, s)`, with `x` and the residual read once.

    Arguments and errors are those of `rms_norm`; `residual` has the shape of `x`.
    """
    _check(x, weight, eps, offset, casting_mode, residual)
    if residual.shape != x.shape:
        raise ValueError(f"residual: got shape {tuple(residual.shape)}, expected that of x, {tuple(x.shape)}")
    if transformed():
        return _composed(x, weight, residual, eps, offset, casting_mode)
    other = distinct(residual, x)
    normed, total = _RMSNorm.apply(x, distinct(weight, x, residual), other, float(eps), float(offset), casting_mode)
    return normed, total


_ABSENT: Any = object()


def _check(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, residual: Tensor = _ABSENT
) -> None:
    if residual is _ABSENT:
        check_floating("weight", x=x, weight=weight)
    else:
        check_floating("weight", x=x, residual=residual, weight=weight)
    check_numbers(eps, offset)
    if x.dim() == 0:
        raise ValueError("x: got a scalar, expected [..., H]")
    check_vector("weight", weight, x.shape[-1])
    if casting_mode not in CASTING_MODES:
        raise ValueError(f"casting_mode: got {casting_mode!r}, expected one of {CASTING_MODES}")
    if weight is None and offset:
        raise ValueError(f"offset: got {offset} without a weight, expected 0")


def _is_torchs(x: Tensor, weight: Tensor | None, offset: float, casting_mode: str) -> bool:
    """Whether torch's operator, which rounds once, to the dtype of `x`, computes it."""
    rounds_once = casting_mode != "llama" or weight is None or x.dtype == torch.float32
    return rounds_once and not offset and (weight is None or weight.dtype == x.dtype)


def _composed(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor, Tensor]:
    """Of torch's operations alone, for transforms that differentiate or batch those."""
    total = x if residual is None else x + residual
    dtype = _out_dtype(total.dtype, weight, casting_mode)
    y, _ = _normalised(total, weight, wide_dtype(total.dtype, dtype), eps, offset, casting_mode)
    return y.to(dtype), total


def _normalised(
    total: Tensor, weight: Tensor | None, wide: torch.dtype, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor, Tensor]:
    """Result, not yet rounded, and reciprocal root mean square of each row."""
    exact = total.to(wide)
    rstd = torch.rsqrt(exact.pow(2).mean(-1) + eps)
    xhat = exact * rstd.unsqueeze(-1)
    if casting_mode == "llama":
        xhat = xhat.to(total.dtype).to(wide)
    return xhat if weight is None else xhat * (offset + weight.to(wide)), rstd


def _out_dtype(x: torch.dtype, weight: Tensor | None, casting_mode: str) -> torch.dtype:
    return x if weight is None or casting_mode == "gemma" else torch.promote_types(x, weight.dtype)


def _forward(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Result, sum with the residual if there is one, and reciprocal root mean square of each row."""
    total_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = dense_like(x, _out_dtype(total_dtype, weight, casting_mode))
    rows = rows_of(x)
    wide = wide_dtype(total_dtype, y.dtype)
    rstd = x.new_empty(rows.shape[0], dtype=wide)
    total = None if residual is None else dense_like(x, total_dtype)
    if x.numel() == 0:
        return y, total, rstd
    flat_residual = None if residual is None else rows_of(residual)
    if wide != torch.float64 and use_triton(x):
        from .rms_norm_triton import forward_triton

        forward_triton(rows, flat_residual, weight, y, total, rstd, eps, offset, casting_mode == "llama")
        return y, total, rstd
    if total is not None and flat_residual is not None:
        rows = torch.add(rows, flat_residual, out=total.view(rows.shape))
    normed, scale = _normalised(rows, weight, wide, eps, offset, casting_mode)
    rstd.copy_(scale)
    y.view(rows.shape).copy_(normed)
    return y, total, rstd


def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    dx = dense_like(x)
    if x.numel() == 0:
        return dx, torch.zeros_like(weight) if needs_weight and weight is not None else None
    rows = rows_of(x)
    sent, sent_total = rows_of(dy), None if dtotal is None else rows_of(dtotal)
    if rstd.dtype != torch.float64 and use_triton(x):
        from .rms_norm_triton import backward_triton

        dw = backward_triton(sent, sent_total, rows, weight, rstd, dx, offset, casting_mode == "llama", needs_weight)
        return dx, dw
    wide = rstd.dtype
    scale = rstd.unsqueeze(-1)
    sent, xhat = sent.to(wide), rows.to(wide) * scale
    m = sent if weight is None else sent * (offset + weight.to(wide))
    gradient = scale * (m - xhat * (m * xhat).mean(-1, keepdim=True))
    dx.view(rows.shape).copy_(gradient if sent_total is None else gradient + sent_total.to(wide))
    if not needs_weight or weight is None:
        return dx, None
    xhat = xhat.to(x.dtype).to(wide) if casting_mode == "llama" else xhat
    return dx, (sent * xhat).sum(0).to(weight.dtype)


def _fake_forward(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    total_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = x.new_empty(x.shape, dtype=_out_dtype(total_dtype, weight, casting_mode))
    total = x.new_empty(x.shape if residual is not None else 0, dtype=total_dtype)
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    return y, total, x.new_empty(rows, dtype=wide_dtype(total_dtype, y.dtype))


def _fake_backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float,
    casting_mode: str, needs_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), torch.empty_like(weight) if needs_weight and weight is not None else x.new_empty(0)


rms_norm_forward = Operator(
    "rms_norm_forward(Tensor x, Tensor? weight, Tensor? residual, float eps, float offset, str casting_mode) "
    "-> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
rms_norm_backward = Operator(
    "rms_norm_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor? weight, Tensor rstd, float offset, "
    "str casting_mode, bool needs_weight) -> (Tensor, Tensor)",
    _backward,
    _fake_backward,
)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float, mode: str
    ) -> tuple[Tensor, Tensor | None]:
        remember_implementation(ctx)
        y, total, rstd = rms_norm_forward(x, weight, residual, eps, offset, mode)
        ctx.save_for_backward(x if residual is None else total, weight, rstd)
        ctx.offset, ctx.mode = offset, mode
        ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
        ctx.set_materialize_grads(False)
        return y, None if residual is None else total

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        x_dtype, residual_dtype = ctx.dtypes
        needs_weight = ctx.needs_input_grad[1]
        dw: Tensor | None = None
        if dy is None:
            dx = dtotal
        else:
            dx, dw = rms_norm_backward(dy, dtotal, x, weight, rstd, ctx.offset, ctx.mode, needs_weight)
        if dx is None:
            return None, None, None, None, None, None
        needs_x, _, needs_residual, *_ = ctx.needs_input_grad
        return (
            dx.to(x_dtype) if needs_x else None,
            dw if needs_weight else None,
            dx.to(residual_dtype) if residual_dtype is not None and needs_residual else None,
            None, None, None,
        )  # fmt: skip
