"""Triton forms of `tailed_cast`: for a few tails, whose sums stay in registers over many rows, and for many."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_triton import launch
from .rows_triton import aligned_size, cdiv, eight_aligned

# Of a program: with a few tails rows one after the other, with many a block of rows, which share what is read of them.
_FEW, _STEPS, _FEW_COLUMNS = (4, 8), 32, 1024
_ROWS, _COLUMNS = 8, 512


@triton.jit(do_not_specialize=["n_rows", "width", "n_tails"])
def _few_tails_kernel(
    total_ptr, written_ptr, profiles_ptr, sums_ptr, factor_ptr, out_ptr, n_rows, width, n_tails,
    WRITTEN: tl.constexpr, ALIGNED: tl.constexpr, TAILS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, COLUMNS)
    width = aligned_size(width, ALIGNED)
    first = tl.program_id(0) // blocks * STEPS
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    tails = tl.arange(0, TAILS)
    some = tails < n_tails
    mask = some[:, None] & (columns < width)[None, :]
    sums = tl.load(sums_ptr + tails[:, None] * width + columns[None, :], mask=mask, other=0.0)
    factor = tl.load(factor_ptr)
    profiles_ptr += tails.to(tl.int64) * n_rows
    for row in range(first, tl.minimum(first + STEPS, n_rows)):
        n_held = width
        if WRITTEN:
            # No traffic where a row holds nothing.
            n_held = aligned_size(tl.where(tl.load(written_ptr + row) == 0, 0, width), ALIGNED)
        start = tl.cast(row, tl.int64) * width
        values = tl.load(total_ptr + start + columns, mask=columns < n_held, other=0.0)
        profile = tl.load(profiles_ptr + row, mask=some, other=0.0)
        values = (values + tl.sum(profile[:, None] * sums, 0)) * factor
        tl.store(out_ptr + start + columns, values.to(out_ptr.dtype.element_ty), mask=columns < width)


@triton.jit(do_not_specialize=["n_rows", "width", "n_tails"])
def _many_tails_kernel(
    total_ptr, written_ptr, profiles_ptr, sums_ptr, factor_ptr, out_ptr, n_rows, width, n_tails,
    WRITTEN: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, COLUMNS)
    width = aligned_size(width, ALIGNED)
    rows = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = rows < n_rows
    held = inside
    if WRITTEN:
        held = inside & (tl.load(written_ptr + rows, mask=inside, other=0) != 0)
    offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
    narrow = columns < width
    values = tl.load(total_ptr + offsets, mask=held[:, None] & narrow[None, :], other=0.0)
    for tail in range(n_tails):
        profile = tl.load(profiles_ptr + tl.cast(tail, tl.int64) * n_rows + rows, mask=inside, other=0.0)
        values += profile[:, None] * tl.load(sums_ptr + tail * width + columns, mask=narrow, other=0.0)[None, :]
    values *= tl.load(factor_ptr)
    tl.store(out_ptr + offsets, values.to(out_ptr.dtype.element_ty), mask=inside[:, None] & narrow[None, :])


def tailed_cast_triton(
    total: Tensor, written: Tensor | None, profiles: Tensor, sums: Tensor, factor: Tensor, out: Tensor
) -> None:
    (rows, width), count = total.shape, len(profiles)
    arguments = total, total if written is None else written.view(torch.int8), profiles, sums, factor, out
    sizes = rows, width, count
    named = {"WRITTEN": written is not None, "ALIGNED": eight_aligned(width, total, sums, out)}
    few = next((most for most in _FEW if count <= most), None)
    if few is None:
        blocks = cdiv(rows, _ROWS) * cdiv(width, _COLUMNS)
        launch(_many_tails_kernel, blocks, (*arguments, *sizes), 4, **named, ROWS=_ROWS, COLUMNS=_COLUMNS)
    else:
        blocks = cdiv(rows, _STEPS) * cdiv(width, _FEW_COLUMNS)
        launch(
            _few_tails_kernel, blocks, (*arguments, *sizes), 4, **named, TAILS=few, STEPS=_STEPS, COLUMNS=_FEW_COLUMNS
        )  # fmt: skip
