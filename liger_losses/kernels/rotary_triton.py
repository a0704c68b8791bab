"""Triton form of `rotary`: one program owns one token, all heads of q and of k, and reads its cos and sin once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_triton import launch
from .rows_triton import aligned_size, power_of_2

_ELEMENTS = 4096  # of a tile of heads


@triton.jit
def _pairs(
    ptr, heads, n_heads, stride, width, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    # The two entries of each pair. Interleaved entries are read as they lie and split afterwards.
    rows = heads[:, None].to(tl.int64) * stride
    inside = heads[:, None] < n_heads
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(ptr + rows + column, mask=inside & (column < width), other=0.0)
        a, b = tl.split(tl.reshape(both, (HEADS, PAIRS, 2)))
    else:
        column = tl.arange(0, PAIRS)[None, :]
        mask = inside & (column < width // 2)
        a = tl.load(ptr + rows + column, mask=mask, other=0.0)
        b = tl.load(ptr + rows + width // 2 + column, mask=mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store_pairs(
    ptr, heads, n_heads, stride, width, a, b, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    rows = heads[:, None].to(tl.int64) * stride
    inside = heads[:, None] < n_heads
    a, b = a.to(ptr.dtype.element_ty), b.to(ptr.dtype.element_ty)
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.reshape(tl.join(a, b), (HEADS, 2 * PAIRS))
        tl.store(ptr + rows + column, both, mask=inside & (column < width))
    else:
        column = tl.arange(0, PAIRS)[None, :]
        mask = inside & (column < width // 2)
        tl.store(ptr + rows + column, a, mask=mask)
        tl.store(ptr + rows + width // 2 + column, b, mask=mask)


@triton.jit
def _rotate_heads(
    ptr, out_ptr, n_heads, stride, out_stride, width, size, cos_a, cos_b, sin_a, sin_b,
    READ_INTERLEAVED: tl.constexpr, WRITE_INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    for start in range(0, n_heads, HEADS):
        heads = start + tl.arange(0, HEADS)
        a, b = _pairs(ptr, heads, n_heads, stride, width, READ_INTERLEAVED, HEADS, PAIRS)
        if INVERSE:
            first, second = a * cos_a + b * sin_b, b * cos_b - a * sin_a
        else:
            first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
        _store_pairs(out_ptr, heads, n_heads, out_stride, width, first, second, WRITE_INTERLEAVED, HEADS, PAIRS)
        if REST > 0:
            column = width + tl.arange(0, REST)[None, :]
            mask = (heads[:, None] < n_heads) & (column < size)
            rest = tl.load(ptr + heads[:, None].to(tl.int64) * stride + column, mask=mask, other=0.0)
            tl.store(out_ptr + heads[:, None].to(tl.int64) * out_stride + column, rest, mask=mask)


@triton.jit(
    do_not_specialize=[
        "length", "q_heads", "k_heads", "width", "size",
        "q_batch", "q_head", "q_token", "q_out_batch", "q_out_head", "q_out_token",
        "k_batch", "k_head", "k_token", "k_out_batch", "k_out_head", "k_out_token",
        "cos_batch", "cos_token", "sin_batch", "sin_token",
    ],
)  # fmt: skip
def _rotary_kernel(
    q_ptr, q_out_ptr, k_ptr, k_out_ptr, cos_ptr, sin_ptr, length, q_heads, k_heads, width, size,
    q_batch, q_head, q_token, q_out_batch, q_out_head, q_out_token,
    k_batch, k_head, k_token, k_out_batch, k_out_head, k_out_token,
    cos_batch, cos_token, sin_batch, sin_token,
    HAS_K: tl.constexpr, READ_INTERLEAVED: tl.constexpr, WRITE_INTERLEAVED: tl.constexpr, PAIR_TABLE: tl.constexpr,
    TABLE_INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, ALIGNED: tl.constexpr, REST: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // length).to(tl.int64)
    token = (tl.program_id(0) % length).to(tl.int64)
    width = aligned_size(width // 2, ALIGNED) * 2
    cos_row = cos_ptr + batch * cos_batch + token * cos_token
    sin_row = sin_ptr + batch * sin_batch + token * sin_token
    pair = tl.arange(0, PAIRS)
    mask = pair < width // 2
    if PAIR_TABLE:
        first, second = pair, pair
    elif TABLE_INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + width // 2
    cos_a = tl.load(cos_row + first, mask=mask, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos_row + second, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin_row + first, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin_row + second, mask=mask, other=0.0).to(tl.float32)[None, :]
    q_at = q_ptr + batch * aligned_size(q_batch, ALIGNED) + token * aligned_size(q_token, ALIGNED)
    q_to = q_out_ptr + batch * aligned_size(q_out_batch, ALIGNED) + token * aligned_size(q_out_token, ALIGNED)
    _rotate_heads(
        q_at, q_to, q_heads, aligned_size(q_head, ALIGNED), aligned_size(q_out_head, ALIGNED), width, size,
        cos_a, cos_b, sin_a, sin_b, READ_INTERLEAVED, WRITE_INTERLEAVED, INVERSE, REST, HEADS, PAIRS,
    )  # fmt: skip
    if HAS_K:
        k_at = k_ptr + batch * aligned_size(k_batch, ALIGNED) + token * aligned_size(k_token, ALIGNED)
        k_to = k_out_ptr + batch * aligned_size(k_out_batch, ALIGNED) + token * aligned_size(k_out_token, ALIGNED)
        _rotate_heads(
            k_at, k_to, k_heads, aligned_size(k_head, ALIGNED), aligned_size(k_out_head, ALIGNED), width, size,
            cos_a, cos_b, sin_a, sin_b, READ_INTERLEAVED, WRITE_INTERLEAVED, INVERSE, REST, HEADS, PAIRS,
        )  # fmt: skip


def _strides(tensor: Tensor, heads_dim: int) -> tuple[int, int, int]:
    """Of batch, head and token."""
    return tensor.stride(0), tensor.stride(heads_dim), tensor.stride(3 - heads_dim)


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in tensor.stride()[:-1])


def rotate_triton(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], cos: Tensor, sin: Tensor, layout: str, pair_table: bool,
    heads_dim: int, inverse: bool,
) -> None:  # fmt: skip
    inputs = [t if t.stride(-1) == 1 else t.contiguous() for t in inputs]
    targets = [t if t.stride(-1) == 1 else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in outputs]
    cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
    q, q_out, k, k_out = inputs[0], targets[0], inputs[-1], targets[-1]
    batch, length, size = q.shape[0], q.shape[3 - heads_dim], q.shape[-1]
    width = cos.shape[-1] * (2 if pair_table else 1)
    pairs = power_of_2(max(1, width // 2))
    rest = 0 if width == size else power_of_2(size - width)
    most = max(t.shape[heads_dim] for t in inputs)
    heads = min(power_of_2(most), max(1, _ELEMENTS // (2 * pairs)))
    read, write = layout != "half", layout == "interleaved"
    launch(
        _rotary_kernel,
        batch * length,
        (
            q,
            q_out,
            k,
            k_out,
            cos,
            sin,
            length,
            q.shape[heads_dim],
            k.shape[heads_dim],
            width,
            size,
            *_strides(q, heads_dim),
            *_strides(q_out, heads_dim),
            *_strides(k, heads_dim),
            *_strides(k_out, heads_dim),
            0 if cos.shape[0] == 1 else cos.stride(0),
            cos.stride(1),
            0 if sin.shape[0] == 1 else sin.stride(0),
            sin.stride(1),
        ),
        4,
        HAS_K=len(inputs) == 2,
        READ_INTERLEAVED=write if inverse else read,
        WRITE_INTERLEAVED=read if inverse else write,
        PAIR_TABLE=pair_table,
        TABLE_INTERLEAVED=layout == "interleaved",
        INVERSE=inverse,
        ALIGNED=width % 16 == 0 and all(_is_aligned(t) for t in (*inputs, *targets)),
        REST=rest,
        HEADS=heads,
        PAIRS=pairs,
    )
    for target, out in zip(targets, outputs, strict=True):
        if target is not out:
            out.copy_(target)
