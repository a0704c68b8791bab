"""Triton form of `scaled_cast`: one program owns one block of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["factor_ptr"])
def _scaled_cast_kernel(
    rows_ptr, factor_ptr, out_ptr, width, PER_ROW: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if ALIGNED:
        # Told so, the compiler moves 16 bytes at a time.
        width = width // 8 * 8
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < width
    factor = tl.load(factor_ptr + row) if PER_ROW else tl.load(factor_ptr)
    values = tl.load(rows_ptr + row * width + offsets, mask=mask, other=0.0).to(tl.float32) * factor
    tl.store(out_ptr + row * width + offsets, values.to(out_ptr.dtype.element_ty), mask=mask)


def scaled_cast_triton(rows: Tensor, factor: Tensor, out: Tensor) -> None:
    count, width = rows.shape
    with torch.cuda.device_of(rows):
        _scaled_cast_kernel[(count, triton.cdiv(width, _BLOCK))](
            rows,
            factor,
            out,
            width,
            PER_ROW=factor.dim() == 1,
            ALIGNED=width % 8 == 0,
            BLOCK=_BLOCK,
            num_warps=4,
        )
