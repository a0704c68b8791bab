"""Tensors of the caller's, brought to where the computation is, and to the dtype that it takes."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import wide_dtype


def taken(
    value: Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,  # None: its own
) -> Tensor:
    """`value` on `device`, without waiting, in a form that autograd may keep; with its gradient where it has one."""
    value = value.to(device, value.dtype if dtype is None else dtype, non_blocking=True)
    return _savable(value)


def wide(values: Tensor) -> Tensor:
    """In fp32 where they have 16 bits: sums of log-probabilities lose digits in 16 bits, or are infinite."""
    return values.to(wide_dtype(values.dtype))


def savable(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors, to be kept for backward: copies of those made in inference mode, which autograd refuses to keep."""
    return tuple(None if tensor is None else _savable(tensor) for tensor in tensors)


def _savable(tensor: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not tensor.is_inference():
        return tensor
    return tensor.clone()
