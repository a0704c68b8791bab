"""The deferred walk over an active vocabulary: what is kept from forward to backward is `G` of the active columns.

Any function of the log-probabilities then costs little more than one product, in a few per cent of the memory of the
logits. Tiles that are multiplied whole, and those there was no room for, are projected again in backward.

How many columns a tile has is known only once it has been projected, which no fake tensor can say: this is a plain
`autograd.Function`, and `torch.compile` is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._constants import savable
from ..kernels import Emit, differentiable_once, remember_implementation
from .active import TileGradient
from .deferred import backward, forward, outside_autocast, tile_ranges
from .head_tensors import HeadTensors
from .hidden_gradient import HiddenSums, finish_hidden_gradient
from .walk import TileWalk
from .weight_gradient import finish_weight_gradient


@dataclass(frozen=True)
class ActiveCall:
    """What the autograd function needs beside the differentiable tensors."""

    walk: Callable[[Tensor, Tensor, Tensor | None, HeadTensors], TileWalk]  # of hidden, weight, bias
    tensors: HeadTensors
    names: tuple[str, ...]
    one: str  # of `names`, the statistic whose gradient is `G` up to a factor per row
    needs: tuple[bool, bool, bool]


class ActiveFunction(torch.autograd.Function):
    """`*statistics = f(hidden, weight, bias)`, at every position."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [R * T, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        call: ActiveCall,
    ) -> tuple[Tensor, ...]:
        kept: list[TileGradient | None] = []
        with outside_autocast(hidden.device):
            walk = call.walk(hidden, weight, bias, call.tensors)
            values, lse, scale, of_hidden, cache = forward(walk, call.names, call.needs, walk.scored.count, kept)
        tensors = [part for t in kept if t is not None for part in (t.entries, t.columns, t.profile)]
        teacher = call.tensors.teacher
        if all(tile is not None for tile in kept):
            # No tile is projected again, and the teacher has said all it has to say.
            call = replace(call, tensors=replace(call.tensors, teacher=None))
        else:
            # Read through `call`; here so that autograd refuses what was written to in between.
            tensors += [walk.scored.target, *(() if teacher is None else teacher.tensors)]
        ctx.call, ctx.kept = call, [tile is not None for tile in kept]
        remember_implementation(ctx)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(v for v, name in zip(values, call.names, strict=True) if name != call.one))
        ctx.save_for_backward(*savable(hidden, weight, bias), lse, scale, cache, *of_hidden, *savable(*tensors))
        return tuple(values)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        call: ActiveCall = ctx.call
        sent = upstream[call.names.index(call.one)]
        if sent is None:
            return None, None, None, None
        hidden, weight, bias, lse, scale, cache, *tensors = ctx.saved_tensors
        count = len(HiddenSums._fields)
        of_hidden, tensors = HiddenSums(*tensors[:count]), tensors[count:]
        dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        with outside_autocast(hidden.device):
            walk = call.walk(hidden, weight, bias, call.tensors)
            # A loss may send anything back to positions that are not scored, NaN included: none of it is used.
            each = torch.where(walk.scored.mask.reshape(-1), sent, 0).to(scale.dtype)
            if cache.dim() == 2 or not any(call.needs[1:]):
                # A first tile with most of its columns active, or a frozen head.
                coefficients = (each, None, None, None)
                found = backward(walk, call.needs, coefficients, lse, None, scale, of_hidden, cache, dtypes)
                return (*found, None)
            parts = iter(tensors)
            kept = [TileGradient(next(parts), next(parts), next(parts)) if one else None for one in ctx.kept]
            weights = _weight_gradient(walk, kept, each * scale, lse, call.needs, dtypes)
            # However the other ranks come by their weights' gradients, this is where all of them meet.
            d_hidden = finish_hidden_gradient(of_hidden, each * scale, dtypes[0], walk.shard) if call.needs[0] else None
        return d_hidden, *weights, None


def _weight_gradient(
    walk: TileWalk,
    kept: list[TileGradient | None],
    at_rows: Tensor,  # [R * T]
    lse: Tensor,  # [R * T], or [5, R * T] with a teacher
    needs: tuple[bool, bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> tuple[Tensor | None, Tensor | None]:
    total = walk.weight_gradient(needs)
    tiles = tile_ranges(walk.scored.count, walk.plan.tile_rows)
    entries = None
    if any(gradient is None for gradient in kept):
        entries = walk.buffer(min(walk.plan.tile_rows, walk.scored.count), walk.precision.compute)
    for ranges, gradient in zip(tiles, kept, strict=True):
        tile = walk.tile(ranges)
        if gradient is None:
            assert entries is not None
            gradient = TileGradient(entries[: len(tile.hidden)])
            numbers = [walk.scored.gather(row, ranges) for row in lse.view(-1, lse.shape[-1])]
            walk.project_again(tile, torch.stack(numbers), Emit.GRADIENT, gradient.entries)
        total.add(gradient, tile.hidden, walk.scored.gather(at_rows, ranges))
    return finish_weight_gradient(total.tensors(walk.hidden.device), None, dtypes)
