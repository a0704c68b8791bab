"""Kernels as operators: one graph node under torch.compile, a plain call otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .dispatch import implementation, requested


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError("second derivatives are not supported: this gradient has no derivative of its own")


def remember_implementation(ctx: Any) -> None:
    """In `forward`: `backward` will run what was asked for here, though autograd runs it in a thread of the device."""
    ctx.implementation = None if torch.compiler.is_compiling() else requested()


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A `backward` without a derivative: differentiating what it returned raises, whatever the upstream gradient is.

    (torch's `once_differentiable` raises only where the upstream gradient itself requires one; elsewhere a gradient
    penalty would silently contribute nothing.)
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *upstream: Any) -> Any:
        asked = getattr(ctx, "implementation", None)
        if asked is None:
            return once(ctx, *upstream)
        with implementation(asked):
            return once(ctx, *upstream)

    def once(ctx: Any, *upstream: Any) -> Any:
        if not torch.is_grad_enabled():  # all but always; a context manager is no small part of a norm's time
            return backward(ctx, *upstream)
        with torch.no_grad():
            found = backward(ctx, *upstream)
        if torch.compiler.is_compiling():
            return found

        def sealed(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:
                return None
            out: Tensor = _Undifferentiable.apply(gradient.detach().requires_grad_())
            return out

        return tuple(map(sealed, found)) if isinstance(found, tuple) else sealed(found)

    return wrapped


_LIBRARY = torch.library.Library("liger_losses", "FRAGMENT")
_PLAIN = (Tensor, torch.nn.Parameter)


def _without_none(implementation: Callable[..., Any]) -> Callable[..., Any]:
    def whole(first: Tensor, *others: Any) -> Any:
        found = implementation(first, *others)
        if isinstance(found, tuple):
            return tuple(first.new_empty(0) if result is None else result for result in found)
        return found

    return whole


class Operator:
    """`liger_losses::name`, without a derivative of its own: an `autograd.Function` calls one forward and one backward.

    A norm takes less time on a device than the dispatcher's detour through Python takes on the host. So plain tensors
    outside a trace go straight to the implementation, and everything else (tracing, fake tensors, subclasses) through
    the operator. Where the implementation has None for a result, the operator, whose schema has no name for that, has a
    tensor of no elements.
    """

    def __init__(self, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, _without_none(implementation), "CompositeExplicitAutograd")
        torch.library.register_fake(f"liger_losses::{name}", fake, lib=_LIBRARY)
        self.op = getattr(torch.ops.liger_losses, name).default
        self.implementation = implementation

    def __call__(self, first: Tensor, *others: Any) -> Any:
        if not torch.compiler.is_compiling() and type(first) in _PLAIN:
            return self.implementation(first, *others)
        return self.op(first, *others)


def rows_of(tensor: Tensor) -> Tensor:
    """`[..., H]` as `[rows, H]` with neighbours in memory along H: itself or a view, where there is one."""
    if tensor.dim() == 2 and tensor.stride(1) == 1:
        return tensor
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.shape[-1] else tensor.new_empty(0, 0)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def dense_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised, contiguous. (The quickest of torch's ways to one.)"""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """What to compute in: fp64 where an input is, else fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def check_floating(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a tensor")
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: got dtype {tensor.dtype}, expected a floating-point tensor")


def check_vector(name: str, vector: Tensor | None, width: int) -> None:
    if vector is not None and vector.shape != (width,):
        raise ValueError(f"{name}: got shape {tuple(vector.shape)}, expected ({width},), the last size of x")
