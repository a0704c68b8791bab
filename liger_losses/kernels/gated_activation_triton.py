"""Triton form of `gated_activation`: one program owns one block of one row (of all elements, where rows are dense)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .gated_activation import ACTIVATIONS
from .launch_triton import launch
from .rows_triton import aligned_size, cdiv, eight_aligned

_BLOCK = 2048
_WARPS = 8


@triton.jit
def _activation_and_slope(g, ACTIVATION: tl.constexpr):
    # ACTIVATION is the position in ACTIVATIONS: silu, gelu, gelu_tanh, relu2.
    if ACTIVATION == 0:
        sigmoid = tl.sigmoid(g)
        value, slope = g * sigmoid, sigmoid * (1.0 + g * (1.0 - sigmoid))
    elif ACTIVATION == 1:
        normal = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        value, slope = g * normal, normal + g * tl.exp(-0.5 * g * g) * 0.3989422804014327
    elif ACTIVATION == 2:
        # (1 + tanh u) / 2 = sigmoid(2 u): no cancellation below, and one exponential. 2 sqrt(2 / pi) = 1.59576...;
        # 3 * 0.044715 = 0.134145.
        square = g * g
        sigmoid = tl.sigmoid(g * (1.0 + 0.044715 * square) * 1.5957691216057308)
        value = g * sigmoid
        slope = value * (1.0 - sigmoid) * 1.5957691216057308 * (1.0 + 0.134145 * square)
        slope = sigmoid + tl.where(square > 1e4, 0.0, slope)  # 0 * inf, where the square overflows
    else:
        positive = tl.maximum(g, 0.0)
        value, slope = positive * positive, 2.0 * positive
    return value, slope


@triton.jit(do_not_specialize=["gate_stride", "up_stride", "width", "blocks"])
def _forward_kernel(
    gate_ptr, gate_stride, up_ptr, up_stride, y_ptr, width, blocks,
    ACTIVATION: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    gate_stride, up_stride = aligned_size(gate_stride, ALIGNED), aligned_size(up_stride, ALIGNED)
    width = aligned_size(width, ALIGNED)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    g = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    value, _slope = _activation_and_slope(g, ACTIVATION)
    tl.store(y_ptr + row * width + column, (value * u).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["dy_stride", "gate_stride", "up_stride", "dgate_stride", "dup_stride", "width", "blocks"]
)
def _backward_kernel(
    dy_ptr, dy_stride, gate_ptr, gate_stride, up_ptr, up_stride, dgate_ptr, dgate_stride, dup_ptr, dup_stride, width,
    blocks,
    ACTIVATION: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    gate_stride, up_stride = aligned_size(gate_stride, ALIGNED), aligned_size(up_stride, ALIGNED)
    dgate_stride, dup_stride = aligned_size(dgate_stride, ALIGNED), aligned_size(dup_stride, ALIGNED)
    dy_stride, width = aligned_size(dy_stride, ALIGNED), aligned_size(width, ALIGNED)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activation_and_slope(g, ACTIVATION)
    tl.store(dup_ptr + row * dup_stride + column, (dy * value).to(dup_ptr.dtype.element_ty), mask=mask)
    tl.store(dgate_ptr + row * dgate_stride + column, (dy * u * slope).to(dgate_ptr.dtype.element_ty), mask=mask)


def _rows_and_width(rows: Tensor, *tensors: Tensor) -> tuple[int, int, bool]:
    """Of the grid, and whether rows are on 16-byte boundaries. Dense rows are one long row: no block is cut short."""
    if all(t.is_contiguous() for t in tensors):
        count = rows.numel()
        return 1, count, count % 8 == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)
    return rows.shape[0], rows.shape[1], eight_aligned(rows.shape[1], *tensors)


def forward_triton(gate: Tensor, up: Tensor, y: Tensor, activation: str) -> None:
    rows, width, aligned = _rows_and_width(gate, gate, up, y)
    blocks = cdiv(width, _BLOCK)
    launch(
        _forward_kernel,
        rows * blocks,
        (gate, gate.stride(0), up, up.stride(0), y, width, blocks),
        _WARPS,
        ACTIVATION=ACTIVATIONS.index(activation),
        ALIGNED=aligned,
        BLOCK=_BLOCK,
    )


def backward_triton(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, activation: str) -> None:
    rows, width, aligned = _rows_and_width(dy, dy, gate, up, dgate, dup)
    blocks = cdiv(width, _BLOCK)
    launch(
        _backward_kernel,
        rows * blocks,
        (
            dy,
            dy.stride(0),
            gate,
            gate.stride(0),
            up,
            up.stride(0),
            dgate,
            dgate.stride(0),
            dup,
            dup.stride(0),
            width,
            blocks,
        ),
        _WARPS,
        ACTIVATION=ACTIVATIONS.index(activation),
        ALIGNED=aligned,
        BLOCK=_BLOCK,
    )
