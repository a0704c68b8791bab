"""What kernels that reduce along rows share: their tiles, and sums over rows without atomics.

A program leaves its part of such a sum, and one more kernel adds the parts up in a fixed order.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_triton import launch

# Columns of a row that registers have room for; backward holds the row that comes next and the weight's gradient too.
WIDEST, WIDEST_BACKWARD = 16384, 8192
TILE = 4096  # elements of a program's tile of narrow rows
WALK = 4096  # columns of a block of a wide row

_COLUMNS = 32
_PARTS = 64


def cdiv(count: int, size: int) -> int:
    # Triton's own is a device function, which the host runs slowly.
    return -(-count // size)


def power_of_2(size: int) -> int:
    """The next one, from 1 up."""
    return 1 << max(0, size - 1).bit_length()


def tile_shape(width: int) -> tuple[int, int]:
    """Rows and columns of a program's tile; whole rows."""
    block = power_of_2(width)
    return max(1, TILE // block), block


def warps(elements: int) -> int:
    """Enough threads for 16 to 32 elements each."""
    return min(16, max(4, elements // 512))


def eight_aligned(width: int, *tensors: Tensor | None) -> bool:
    """Whether all rows begin on 16-byte boundaries and hold whole groups of 8 elements."""
    if width % 8:
        return False
    for tensor in tensors:
        if tensor is not None and (tensor.data_ptr() % 16 or (tensor.dim() > 1 and tensor.stride(0) % 8)):
            return False
    return True


def neighbours(vector: Tensor | None) -> Tensor | None:
    """`vector` with its elements side by side, as kernels read it."""
    return None if vector is None else vector.contiguous()


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; a small number for the interpreter, so that programs own several rows."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def aligned_size(size, ALIGNED: tl.constexpr):
    # Told that rows are on 8-element boundaries, the compiler moves 16 bytes at a time.
    if ALIGNED:
        size = size // 8 * 8
    return size


@triton.jit(do_not_specialize=["parts", "width"], do_not_specialize_on_alignment=["partial_ptr"])
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
    launch(_sum_kernel, cdiv(width, _COLUMNS), (partial, out, parts, width), 4, COLUMNS=_COLUMNS, PARTS=_PARTS)
    return out
