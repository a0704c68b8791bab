"""Triton form of `scaled_cast`: one program owns one block of one row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch_triton import launch
from .rows_triton import aligned_size, cdiv, eight_aligned
from .scaled_cast import RowTails

_BLOCK = 2048


@triton.jit(do_not_specialize=["width"])
def _scaled_cast_kernel(
    rows_ptr, factor_ptr, sizes_ptr, which_ptr, sums_ptr, out_ptr, width,
    PER_ROW: tl.constexpr, TAILS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    width = aligned_size(width, ALIGNED)
    offsets = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < width
    factor = tl.load(factor_ptr + row) if PER_ROW else tl.load(factor_ptr)
    values = tl.load(rows_ptr + row * width + offsets, mask=mask, other=0.0).to(tl.float32)
    if TAILS:
        which = tl.load(which_ptr + row)
        own = sums_ptr + tl.maximum(which, 0).to(tl.int64) * width + offsets
        n_held = aligned_size(tl.where(which >= 0, width, 0), ALIGNED)
        size = tl.where(which >= 0, tl.load(sizes_ptr + row), 0.0)
        values += size * tl.load(own, mask=offsets < n_held, other=0.0)
    tl.store(out_ptr + row * width + offsets, (values * factor).to(out_ptr.dtype.element_ty), mask=mask)


def scaled_cast_triton(rows: Tensor, factor: Tensor, out: Tensor, tails: RowTails | None) -> None:
    count, width = rows.shape
    sizes, which, sums = (rows, rows, rows) if tails is None else tails
    is_aligned = eight_aligned(width, rows, out) and (tails is None or eight_aligned(width, sums))
    launch(
        _scaled_cast_kernel, count * cdiv(width, _BLOCK), (rows, factor, sizes, which, sums, out, width), 4,
        PER_ROW=factor.dim() == 1, TAILS=tails is not None, ALIGNED=is_aligned, BLOCK=_BLOCK,
    )  # fmt: skip
