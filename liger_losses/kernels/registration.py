"""Kernels as operators: one graph node under torch.compile, a plain call otherwise."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .dispatch import implementation, requested


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *of: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError("second derivatives are not supported: this gradient has no derivative of its own")


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor | None) -> Tensor:
        return first.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError  # what depends on it is sealed


def linked(first: Tensor, *others: Tensor | None) -> Tensor:
    """In `forward`: a tensor of no elements that depends on those given and keeps none of them.

    To be saved where they are not, for `differentiable_once` seals what depends on saved tensors.
    """
    with torch.enable_grad():
        out: Tensor = _Linked.apply(first, *others)
    return out


def remember_implementation(ctx: Any) -> None:
    """In `forward`: `backward` will run what was asked for here, though autograd runs it in a thread of the device."""
    ctx.implementation = None if torch.compiler.is_compiling() else requested()


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A `backward` without a derivative: differentiating what it returned raises, whatever the upstream gradient is.

    (torch's `once_differentiable` raises only where the upstream gradient itself requires one; elsewhere a gradient
    penalty would silently contribute nothing.) What is returned depends on all that was saved, for
    `torch.autograd.grad` looks only at nodes on the way to the tensors that it is asked for.
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
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return backward(ctx, *upstream)
        read = _ReadOnce(ctx)
        with torch.no_grad():
            found = backward(read, *upstream)
        # An operator's results may be a list, whose gradients come as one.
        sent = [t for each in upstream for t in (each if isinstance(each, (list, tuple)) else (each,))]
        sources = [t for t in (*read.saved_tensors, *sent) if isinstance(t, Tensor) and t.requires_grad]

        def sealed(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:
                return None
            out: Tensor = _Undifferentiable.apply(gradient.detach().requires_grad_(), *sources)
            return out

        return tuple(map(sealed, found)) if isinstance(found, tuple) else sealed(found)

    return wrapped


class _ReadOnce:
    """A context whose saved tensors are unpacked once, as checkpointing asks, and with the graph they are part of."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def transformed() -> bool:
    """Whether a functorch transform (grad, vmap, jvp, ...) or forward-mode AD is at work, of which an
    `autograd.Function` with one backward knows nothing."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def distinct(tensor: Tensor | None, *others: Tensor | None) -> Tensor | None:
    """`tensor`, or a view of it where it is one of the others: a trace takes no tensor twice into one Function."""
    if tensor is not None and torch.compiler.is_compiling() and any(tensor is other for other in others):
        return tensor.view_as(tensor)
    return tensor


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


_FLOATING = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def check_floating(*optional: str, **tensors: Tensor | None) -> None:
    """Dense floating-point tensors of one device; None for those named as optional."""
    device = None
    for name, tensor in tensors.items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a tensor")
        if tensor.dtype not in _FLOATING:
            raise TypeError(f"{name}: got dtype {tensor.dtype}, expected a floating-point tensor of 16 bits or more")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: got a tensor of layout {tensor.layout}, expected a dense one")
        if device is None:
            device, first = tensor.device, name
        elif tensor.device != device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}, expected the device of {first}, {device}")


def check_vector(name: str, vector: Tensor | None, width: int) -> None:
    if vector is not None and vector.shape != (width,):
        raise ValueError(f"{name}: got shape {tuple(vector.shape)}, expected ({width},), the last size of x")


def check_numbers(eps: Any, offset: Any = 0.0) -> None:
    """Finite, and eps at least 0."""
    if type(eps) is float and type(offset) is float and 0.0 <= eps < math.inf and -math.inf < offset < math.inf:
        return  # all but always
    for name, value in (("eps", eps), ("offset", offset)):
        if not isinstance(value, (float, int)) or isinstance(value, bool):
            raise TypeError(f"{name}: got {value!r}, expected a number")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps: got {eps!r}, expected a finite number of at least 0")
    if not -math.inf < offset < math.inf:
        raise ValueError(f"offset: got {offset!r}, expected a finite number")
