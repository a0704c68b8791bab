"""Which implementation of a kernel runs: Triton on CUDA, its torch twin elsewhere, or the one that was asked for."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

Implementation = Literal["torch", "triton"]

_requested: contextvars.ContextVar[Implementation | None] = contextvars.ContextVar("implementation", default=None)


@contextlib.contextmanager
def implementation(name: Implementation) -> Iterator[None]:
    """Run the kernels inside the block with implementation `name`, or raise: a request never falls back silently.

    Args:
        name: `"torch"` (the twin of a kernel, which tests compare it with) or `"triton"`, which on CPU tensors needs
            Triton's interpreter (`TRITON_INTERPRET=1`).
    """
    if name not in ("torch", "triton"):
        raise ValueError(f"implementation: got {name!r}, expected 'torch' or 'triton'")
    if name == "triton" and not _triton_installed():
        raise RuntimeError("implementation('triton') was requested, but triton is not installed")
    token = _requested.set(name)
    try:
        yield
    finally:
        _requested.reset(token)


def requested() -> Implementation | None:
    """What `implementation` asks for here."""
    return _requested.get()


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def use_triton(tile: Tensor, without: str | None = None) -> bool:
    """Whether the Triton form runs on `tile`. fp64, the oracle's dtype, has the twin alone, and so has `without`."""
    requested = _requested.get()
    alone = "float64" if tile.dtype == torch.float64 else without
    if alone is not None:
        if requested == "triton":
            raise RuntimeError(
                f"implementation('triton') was requested for {alone}, which only the torch form computes"
            )
        return False
    if requested is not None:
        return requested == "triton"
    return tile.is_cuda and _triton_installed()
