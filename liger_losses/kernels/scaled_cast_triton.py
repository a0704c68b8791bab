"""Triton form of `scaled_cast`: one program owns one block of one row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch_triton import launch
from .rows_triton import aligned_size, cdiv, eight_aligned

_BLOCK = 2048


@triton.jit(do_not_specialize=["width"])
def _scaled_cast_kernel(
    rows_ptr, factor_ptr, out_ptr, width, PER_ROW: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    width = aligned_size(width, ALIGNED)
    offsets = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < width
    factor = tl.load(factor_ptr + row) if PER_ROW else tl.load(factor_ptr)
    values = tl.load(rows_ptr + row * width + offsets, mask=mask, other=0.0).to(tl.float32) * factor
    tl.store(out_ptr + row * width + offsets, values.to(out_ptr.dtype.element_ty), mask=mask)


def scaled_cast_triton(rows: Tensor, factor: Tensor, out: Tensor) -> None:
    count, width = rows.shape
    launch(
        _scaled_cast_kernel, count * cdiv(width, _BLOCK), (rows, factor, out, width), 4, PER_ROW=factor.dim() == 1,
        ALIGNED=eight_aligned(width, rows, out), BLOCK=_BLOCK,
    )  # fmt: skip
