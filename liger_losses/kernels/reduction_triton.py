"""Sums over rows without atomics: programs leave partial sums, one more kernel adds those up in a fixed order."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 32
_PARTS = 64


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; a small number for the interpreter, so that programs own several rows."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit(do_not_specialize=["parts", "width"])
def _sum_kernel(partial_ptr, out_ptr, parts, width, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns[None, :] < width
    total = tl.zeros((PARTS, COLUMNS), tl.float32)
    for start in range(0, parts, PARTS):
        rows = start + tl.arange(0, PARTS)
        offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
        total += tl.load(partial_ptr + offsets, mask=(rows[:, None] < parts) & inside, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=columns < width)


def sum_partials(partial: Tensor, out: Tensor) -> Tensor:
    """`out [H] = sum of partial [P, H]` (fp32), rounded once."""
    parts, width = partial.shape
    _sum_kernel[(triton.cdiv(width, _COLUMNS),)](
        partial, out, parts, width, COLUMNS=_COLUMNS, PARTS=_PARTS, num_warps=4
    )
    return out
