"""Rotary position embedding: pairs of entries of each head are rotated by the angle of their position.

`(a, b) -> (a cos - b sin, b cos + a sin)`. Su et al., arXiv:2104.09864. Which entries form a pair is the layout:

- `half`: entry `i` with entry `i + R / 2`, `R` the rotated width;
- `interleaved`: entry `2 i` with entry `2 i + 1`;
- `interleaved_to_half`: pairs are read interleaved and written as halves.

The first `R` entries of each head are rotated and the others passed on. cos and sin have one entry per rotated entry
(`full`) or per pair (`pair`), and a row per position or per batch row and position, so positions may differ from row to
row, and multimodal tables (mrope) need nothing special.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import use_triton
from .registration import (
    Operator,
    check_floating,
    differentiable_once,
    distinct,
    remember_implementation,
    transformed,
    wide_dtype,
)

LAYOUTS = ("half", "interleaved", "interleaved_to_half")
TABLES = ("full", "pair")


def rotary(
    q: Tensor,  # [B, heads, T, D] or [B, T, heads, D]
    k: Tensor | None,  # the same, with its own number of heads
    cos: Tensor,  # [B or 1, T, R] or [T, R]; R / 2 with table="pair"
    sin: Tensor,  # as cos
    *,
    layout: str = "half",
    table: str = "full",
    heads_dim: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """New tensors with the strides of `q` and `k`, rotated in fp32 (fp64 for fp64) and rounded once, to their dtypes.

    Args:
        q, k: Any strides; never written to. `k` may be None: then None is returned for it.
        cos, sin: Tables without gradient.
        layout: `"half"`, `"interleaved"`, or `"interleaved_to_half"` (which needs `R == D`).
        table: `"full"`: an entry of cos and sin for every rotated entry; `"pair"`: one for every pair.
        heads_dim: Where the heads are: 1 for `[B, heads, T, D]`, 2 for `[B, T, heads, D]`.

    Raises:
        ValueError: A shape or option does not fit, or a table requires a gradient.
        TypeError: An input is no floating-point tensor.
    """
    check_floating("k", q=q, k=k, cos=cos, sin=sin)
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, expected one of {LAYOUTS}")
    if table not in TABLES:
        raise ValueError(f"table: got {table!r}, expected one of {TABLES}")
    if heads_dim not in (1, 2):
        raise ValueError(f"heads_dim: got {heads_dim!r}, expected 1 for [B, heads, T, D] or 2 for [B, T, heads, D]")
    if cos.dim() == 2 and sin.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    if cos.shape != sin.shape or cos.dim() != 3:
        raise ValueError(
            f"cos, sin: got shapes {tuple(cos.shape)} and {tuple(sin.shape)}, expected [B or 1, T, R] for both"
        )
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("cos, sin: got tables that require a gradient, expected constants; detach them")
    width = cos.shape[-1] * (2 if table == "pair" else 1)
    _check_heads("q", q, cos, width, layout, heads_dim)
    if k is not None:
        time = 3 - heads_dim
        if k.dim() != 4 or k.shape[0] != q.shape[0] or k.shape[time] != q.shape[time] or k.dtype != q.dtype:
            raise ValueError(
                f"k: got shape {tuple(k.shape)} and {k.dtype}, expected the batch size, length and dtype of q, "
                f"{q.shape[0]}, {q.shape[time]} and {q.dtype}"
            )
        _check_heads("k", k, cos, width, layout, heads_dim)
    if transformed():
        tables = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
        pair_table = table == "pair"
        return (
            _composed(q, *tables, layout, pair_table),
            None if k is None else _composed(k, *tables, layout, pair_table),
        )
    return _Rotary.apply(q, distinct(k, q), cos, distinct(sin, cos), layout, table == "pair", heads_dim)


def _composed(x: Tensor, cos: Tensor, sin: Tensor, layout: str, pair_table: bool) -> Tensor:
    """Of torch's operations alone, for transforms that differentiate or batch those."""
    read, write, at, width = _slices(x, cos, layout, pair_table)
    wide = wide_dtype(x.dtype, cos.dtype)
    (c0, c1), (s0, s1) = ([t[..., s].to(wide) for s in at] for t in (cos, sin))
    a, b = (x[..., s].to(wide) for s in read)
    parts = a * c0 - b * s0, b * c1 + a * s1
    rotated = torch.stack(parts, -1).flatten(-2) if write[0].step == 2 else torch.cat(parts, -1)
    return torch.cat([rotated.to(x.dtype), x[..., width:]], -1)


Slices = tuple[slice, slice]


def _slices(x: Tensor, cos: Tensor, layout: str, pair_table: bool) -> tuple[Slices, Slices, Slices, int]:
    """Where the two entries of each pair are read and written, and their entries of the tables; the rotated width."""
    width = cos.shape[-1] * (2 if pair_table else 1)
    halves = slice(0, width // 2), slice(width // 2, width)
    interleaved = slice(0, width, 2), slice(1, width, 2)
    read = halves if layout == "half" else interleaved
    write = interleaved if layout == "interleaved" else halves
    every = slice(None)
    at = (every, every) if pair_table else interleaved if layout == "interleaved" else halves
    return read, write, at, width


def _check_heads(name: str, tensor: Tensor, cos: Tensor, width: int, layout: str, heads_dim: int) -> None:
    if tensor.dim() != 4:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected four dimensions")
    batch, length = tensor.shape[0], tensor.shape[3 - heads_dim]
    if cos.shape[0] not in (1, batch) or cos.shape[1] != length:
        raise ValueError(f"cos, sin: got shape {tuple(cos.shape)}, expected [{batch} or 1, {length}, R] for {name}")
    if width % 2 or width > tensor.shape[-1] or (layout == "interleaved_to_half" and width != tensor.shape[-1]):
        raise ValueError(
            f"cos, sin: got tables for {width} rotated entries, expected an even number of at most "
            f"{tensor.shape[-1]} of {name}'s head (all of them with 'interleaved_to_half')"
        )


def _rotate(
    x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: str, pair_table: bool, heads_dim: int, inverse: bool
) -> tuple[Tensor, Tensor | None]:
    """`inverse` applies the transposed map, which is the backward."""
    inputs = [x] if k is None else [x, k]
    outputs = [torch.empty_like(t) for t in inputs]
    triton = x.dtype != torch.float64 and cos.dtype != torch.float64 and x.numel() > 0 and use_triton(x)
    if triton:
        from .rotary_triton import rotate_triton

        rotate_triton(inputs, outputs, cos, sin, layout, pair_table, heads_dim, inverse)
    else:
        for t, out in zip(inputs, outputs, strict=True):
            _rotate_twin(t, out, cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim), layout, pair_table, inverse)
    return outputs[0], outputs[1] if k is not None else None


def _rotate_twin(
    x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, layout: str, pair_table: bool, inverse: bool
) -> None:
    wide = wide_dtype(x.dtype, cos.dtype)
    read, write, at, width = _slices(x, cos, layout, pair_table)
    cosines, sines = ([t[..., s].to(wide) for s in at] for t in (cos, sin))
    if inverse:
        read, write = write, read
    a, b = (x[..., s].to(wide) for s in read)
    if inverse:
        out[..., write[0]] = a * cosines[0] + b * sines[1]
        out[..., write[1]] = b * cosines[1] - a * sines[0]
    else:
        out[..., write[0]] = a * cosines[0] - b * sines[0]
        out[..., write[1]] = b * cosines[1] + a * sines[1]
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]


def _fake_rotate(
    x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: str, pair_table: bool, heads_dim: int, inverse: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if k is None else torch.empty_like(k)


rotate = Operator(
    "rotate(Tensor q, Tensor? k, Tensor cos, Tensor sin, str layout, bool pair_table, SymInt heads_dim, bool inverse) "
    "-> (Tensor, Tensor)",
    _rotate,
    _fake_rotate,
)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: str, pair_table: bool, heads_dim: int
    ) -> tuple[Tensor, Tensor | None]:
        remember_implementation(ctx)
        ctx.save_for_backward(cos, sin)
        ctx.options = layout, pair_table, heads_dim
        ctx.set_materialize_grads(False)
        rotated_q, rotated_k = rotate(q, k, cos, sin, layout, pair_table, heads_dim, False)
        return rotated_q, None if k is None else rotated_k

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        found: list[Tensor | None]
        if dq is not None:
            rotated = rotate(dq, dk, cos, sin, *ctx.options, True)
            found = [rotated[0], None if dk is None else rotated[1]]
        else:
            found = [None, None if dk is None else rotate(dk, None, cos, sin, *ctx.options, True)[0]]
        needs = ctx.needs_input_grad
        return found[0] if needs[0] else None, found[1] if needs[1] else None, None, None, None, None, None
