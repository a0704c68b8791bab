"""Which rotation a function computes, found out by running it: `_layer_probes` for rotary embeddings."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.integrations._layer_evidence import LENGTHS, difference, generator, laboratory
from liger_losses.integrations._layer_probes import PLAIN_DTYPES, Refusal
from liger_losses.kernels.rotary import rotary


@dataclass(frozen=True)
class Rotary:
    layout: str
    table: str  # "full", or "pair": the first half of full-width tables; "narrow": tables of half the width
    partial: bool  # tables narrower than the heads were tried, and pass the rest of a head on
    single: bool  # one tensor in, one out

    def __str__(self) -> str:
        return f"rotary ({self.layout.replace('_', ' ')})"

    def __call__(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, heads_dim: int) -> Any:
        if self.table == "pair":
            cos, sin = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
        table = "full" if self.table == "full" else "pair"
        rotated = rotary(q, k, cos, sin, layout=self.layout, table=table, heads_dim=heads_dim)
        return rotated[0] if self.single else rotated


def recognise_rotary(function: Callable[..., Any]) -> Rotary:
    """The layout with which `function(q, k, cos, sin)` (or of one tensor) is a rotation by the tables.

    Raises:
        Refusal: There is none.
    """
    reason = "computes none of the known rotations"
    with laboratory():
        for layout, table, single in itertools.product(
            ("half", "interleaved", "interleaved_to_half"), ("full", "pair", "narrow"), (False, True)
        ):
            plain = Rotary(layout, table, False, single)
            if not _rotates(function, plain, 8):
                continue
            partial = table != "narrow" and layout != "interleaved_to_half" and _rotates(function, plain, 4)
            found = next((d for dim in (1, 2) if (d := _rotary_difference(function, plain, dim))), None)
            if found is None:
                return Rotary(layout, table, partial, single)
            reason = f"{found}, unlike a {plain}"
    raise Refusal(reason)


def _rotates(function: Callable[..., Any], candidate: Rotary, width: int) -> bool:
    return all(_same_rotary(function, candidate, width, dtype, dim) for dtype in PLAIN_DTYPES for dim in (1, 2))


def _rotary_difference(function: Callable[..., Any], candidate: Rotary, dim: int) -> str | None:
    """With the tables of one batch row, which serve all."""
    size = 8
    tables = torch.randn(2, 1, 2 * LENGTHS[-1], size // 2 if candidate.table == "narrow" else size, device="cpu")

    def on_heads(rotate: Callable[..., Any]) -> Callable[[nn.Module, Tensor], Tensor]:
        def rotated(_: nn.Module, x: Tensor) -> Any:
            q = x.reshape(1, 1, -1, size) if dim == 1 else x.reshape(1, -1, 1, size)
            heads = [q] if candidate.single else [q, -q]
            cos, sin = tables[:, :, : q.shape[3 - dim]].unbind(0)
            out = rotate(*heads, cos, sin)
            return out if candidate.single else torch.cat(tuple(out), dim)

        return rotated

    return difference(
        on_heads(lambda *t: function(*t, unsqueeze_dim=dim)),
        on_heads(lambda *t: candidate(t[0], None if candidate.single else t[1], t[-2], t[-1], dim)),
        lambda scale: nn.Module(),
        lambda *shape: torch.randn(*shape, size, generator=generator(), device="cpu"),
        1e-5,
    )


def _same_rotary(function: Callable[..., Any], candidate: Rotary, width: int, dtype: torch.dtype, dim: int) -> bool:
    batch, length, size, source = 2, 5, 8, generator()

    def heads(number: int) -> Tensor:
        shape = (batch, number, length, size) if dim == 1 else (batch, length, number, size)
        return torch.randn(shape, generator=source, device="cpu").to(dtype)

    table = width // 2 if candidate.table == "narrow" else width
    q, k = heads(3), None if candidate.single else heads(1)
    cos, sin = torch.randn(2, batch, length, table, generator=source, device="cpu").to(dtype)
    tensors = [q] if k is None else [q, k]
    before = [t.clone() for t in tensors]
    try:
        seen = function(*tensors, cos, sin, unsqueeze_dim=dim)
    except Exception:
        return False
    if any(not torch.equal(t, old) for t, old in zip(tensors, before, strict=True)):
        return False
    if candidate.single != isinstance(seen, Tensor):
        return False
    found = candidate(q, k, cos, sin, dim)
    exact = candidate(q.double(), None if k is None else k.double(), cos.double(), sin.double(), dim)
    pairs = [(seen, found, exact)] if candidate.single else list(zip(seen, found, exact, strict=False))
    # Products are rounded before they are added, some to nothing: the size of a result is that of its terms.
    return all(
        s.shape == f.shape
        and s.dtype == f.dtype
        and bool(((s.double() - e).abs() <= 4 * torch.finfo(dtype).eps * _terms(e)).all())
        for s, f, e in pairs
    )


def _terms(exact: Tensor) -> Tensor:
    return exact.abs().amax().clamp(min=1.0)
