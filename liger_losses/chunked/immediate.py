"""Gradients formed while the tile is resident: strategy `immediate`, for separable losses with a trainable head."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels import DTYPES, Emit, RowState, differentiable_once, linked, remember_implementation
from .active import TileGradient, Weighed
from .hidden_gradient import HiddenGradient, HiddenSums, finish_hidden_gradient
from .loss import Loss, check_result, differentiable_statistics, gradient_order, only_logprob
from .tile import Coefficients
from .tokens import Ranges, UnitGroup, group_units
from .walk import State, TileWalk
from .weight_gradient import WeightGradient, WeightSums, finish_weight_gradient


@dataclass(frozen=True)
class ImmediateCall:
    """What the autograd function needs beside the three differentiable tensors."""

    walk: TileWalk
    loss: Loss
    report: tuple[str, ...]  # statistics to hand back, after the metrics
    inputs: Mapping[str, Tensor]
    totals: Mapping[str, Tensor]
    needs: tuple[bool, bool, bool]  # hidden, weight, bias
    names: list[str]  # of the metrics, filled by forward: autograd hands tensors back without them


class LossTiles:
    """Evaluates a loss on groups of units, and assembles value, metrics and coefficients of the batch."""

    def __init__(self, call: ImmediateCall) -> None:
        self._call = call
        walk = call.walk
        positions, kind = walk.hidden.shape[0], walk.precision.statistics
        self.names = tuple(dict.fromkeys((*call.loss.statistics, *call.report)))
        self._differentiable = differentiable_statistics(call.loss)
        self._full = {
            name: torch.zeros(positions, dtype=DTYPES.get(name, kind), device=walk.hidden.device) for name in self.names
        }
        self._values: list[Tensor] = []
        self._metrics: list[dict[str, Tensor]] = []

    @property
    def only_logprob(self) -> bool:
        return only_logprob(self._differentiable)

    def evaluate(self, group: UnitGroup, statistics: Mapping[str, Tensor]) -> Coefficients:
        """Coefficients of the group's tokens, in compact order, from their statistics."""
        walk = self._call.walk
        by_token = not group.rows
        for name in self.names:
            walk.scored.scatter(statistics[name], self._full[name], group.tokens)
        seen = {n: statistics[n].unsqueeze(0) if by_token else self._rows(self._full[n], group) for n in self.names}
        leaves = {n: seen[n].detach().requires_grad_() for n in self._differentiable}
        mask = (
            torch.ones_like(next(iter(seen.values())), dtype=torch.bool)
            if by_token
            else self._rows(walk.scored.mask.reshape(-1), group)
        )
        with torch.enable_grad():
            value, metrics = self._call.loss(seen | leaves, mask, self._inputs(group), self._call.totals)
        check_result(value, metrics)
        gradients: Mapping[str, Tensor | None] = dict.fromkeys(leaves)
        if value.requires_grad:
            found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            gradients = dict(zip(leaves, found, strict=True))
        self._values.append(value.detach())
        self._metrics.append({name: metric.detach() for name, metric in metrics.items()})

        def compact(name: str) -> Tensor | None:
            gradient = gradients.get(name)
            if gradient is None or by_token:
                return None if gradient is None else gradient.squeeze(0)
            full = torch.zeros_like(self._full[name])
            done = 0
            for start, stop in self._positions(group):
                full[start:stop] = gradient.reshape(-1)[done : done + stop - start]
                done += stop - start
            return walk.scored.gather(full, group.tokens)

        like = next(iter(statistics.values())).to(walk.precision.statistics)
        return Coefficients.of(
            tuple(map(compact, gradient_order(self._differentiable))), like, only_logprob=self.only_logprob
        )

    def _positions(self, group: UnitGroup) -> Ranges:
        length = self._call.walk.scored.mask.shape[1]
        return tuple((start * length, stop * length) for start, stop in group.rows)

    def _rows(self, full: Tensor, group: UnitGroup) -> Tensor:
        """The group's rows `[r, T]` out of `[R * T]`."""
        length = self._call.walk.scored.mask.shape[1]
        rows = sum(stop - start for start, stop in group.rows)
        return torch.cat([full[start:stop] for start, stop in self._positions(group)]).view(rows, length)

    def _inputs(self, group: UnitGroup) -> dict[str, Tensor]:
        return {name: self._input(value, group) for name, value in self._call.inputs.items()}

    def _input(self, value: Tensor, group: UnitGroup) -> Tensor:
        scored = self._call.walk.scored
        rows, length = scored.mask.shape
        if value.dim() == 0:
            return value
        if not group.rows:
            return scored.gather(value.reshape(rows * length, *value.shape[2:]), group.tokens).unsqueeze(0)
        # One entry per pair follows the chosen rows; one per row follows both ranges.
        ranges = group.rows[:1] if value.shape[0] != rows else group.rows
        return torch.cat([value[start:stop] for start, stop in ranges])

    def value(self) -> Tensor:
        return torch.stack(self._values).sum(0)

    def metrics(self) -> dict[str, Tensor]:
        """Scalars summed, per-unit metrics concatenated, in the order of the units."""
        return {
            name: torch.stack(parts).sum(0) if parts[0].dim() == 0 else torch.cat(parts)
            for name in self._metrics[0]
            for parts in [[metrics[name] for metrics in self._metrics]]
        }

    def reported(self) -> list[Tensor]:
        """`[R, T]` each."""
        return [self._full[name].view(self._call.walk.scored.mask.shape) for name in self._call.report]


class ImmediateFunction(torch.autograd.Function):
    """`loss, *metrics = f(hidden, weight, bias)`, its gradients up to the upstream factor formed in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [R * T, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        call: ImmediateCall,
    ) -> tuple[Tensor, ...]:
        walk, needs = call.walk, call.needs
        tiles = LossTiles(call)
        product = walk.hidden_gradient() if needs[0] else None
        factor = torch.zeros(hidden.shape[0], dtype=walk.precision.statistics, device=hidden.device)
        total = walk.weight_gradient(needs, keep=walk.plan.whole_cache)
        problem = walk.plan.problem
        groups = group_units(
            walk.scored.row_counts, call.loss.separability, walk.plan.tile_rows, problem.max_units, problem.unit_rows
        )
        if walk.plan.whole_cache and call.loss.separability == "token":
            groups = _decided_early(groups, walk.plan.logit_rows)
        pieces = [group.tiles(walk.plan.tile_rows) for group in groups]
        for group, own, following in zip(groups, pieces, [*pieces[1:], None], strict=True):
            one = _Group(walk, group, own, tiles, product, total, None if following is None else following[0])
            coefficients = one.evaluate()
            walk.scored.scatter(coefficients.factor, factor, group.tokens)
            if following is None:
                # What there is to do before the host waits for the last tile's columns.
                value, metrics = tiles.value(), tiles.metrics()
            one.add_gradients(coefficients)
            del one  # and its tile: the next group needs the room
        walk.catch_up()
        remember_implementation(ctx)
        ctx.set_materialize_grads(False)
        ctx.needs, ctx.shard = needs, walk.shard
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        of_hidden = HiddenSums(hidden.new_empty(0)) if product is None else product.sums()
        ctx.save_for_backward(factor, *of_hidden, *total.tensors(hidden.device), linked(hidden, weight, bias))
        extra = [*metrics.values(), *tiles.reported()]
        ctx.mark_non_differentiable(*extra)
        call.names.extend(metrics)
        return (value, *extra)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return None, None, None, None
        factor, *sums, _ = ctx.saved_tensors
        of_hidden, totals = HiddenSums(*sums[: len(HiddenSums._fields)]), WeightSums(*sums[len(HiddenSums._fields) :])
        factor = factor * upstream
        hidden = finish_hidden_gradient(of_hidden, factor, ctx.dtypes[0], ctx.shard) if ctx.needs[0] else None
        weight, bias = finish_weight_gradient(totals, upstream, ctx.dtypes)
        return hidden, weight, bias, None


def _decided_early(groups: list[UnitGroup], rows: int) -> list[UnitGroup]:
    """Groups of single tokens, the first one cut: it decides whether columns are chosen or all of `G` is kept, and then
    no more than `rows` rows were weighed and moved in vain."""
    ((start, stop),) = groups[0].tokens
    if stop - start <= rows:
        return groups
    return [UnitGroup((), ((a, b),)) for a, b in ((start, start + rows), (start + rows, stop))] + groups[1:]


class _Group:
    """A walk over one group of units: a single resident tile, or several of which all but the last are projected twice.

    Of those, the ones of which only the active columns are multiplied keep them, and are not projected again.
    """

    def __init__(
        self,
        walk: TileWalk,
        group: UnitGroup,
        pieces: list[Ranges],  # its tiles
        tiles: LossTiles,
        product: HiddenGradient | None,
        total: WeightGradient,
        following: Ranges | None,  # the first tile of the next group
    ) -> None:
        self._walk, self._group, self._tiles = walk, group, tiles
        self._product, self._total, self._following = product, total, following
        self._pieces = pieces
        sizes = [sum(stop - start for start, stop in piece) for piece in pieces]
        stops = list(itertools.accumulate(sizes))
        self._rows = [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
        self._state = walk.state(group.count, tiles.names)
        buffer = total.buffer(max(sizes))
        self._buffer = walk.buffer(max(sizes), walk.precision.compute) if buffer is None else buffer
        self._emit = Emit.GRADIENT if tiles.only_logprob else Emit.PROBABILITY
        self._kept: list[TileGradient | None] = [None] * len(sizes)  # of each tile, where its `G` is still known
        self._late: Weighed | None = None  # the last tile, its columns not counted yet

    def _part(self, rows: slice) -> State:
        return self._state.narrow(rows.start, rows.stop - rows.start)

    def _entries(self, rows: slice) -> Tensor:
        return self._buffer[: rows.stop - rows.start]

    def evaluate(self) -> Coefficients:
        """Statistics of all tiles, the loss, and the coefficients of its tokens."""
        walk, tiles = self._walk, self._tiles
        room = walk.plan.cache_bytes
        for i, (piece, rows) in enumerate(zip(self._pieces, self._rows, strict=True)):
            part, tile, entries = self._part(rows), walk.tile(piece), self._entries(rows)
            walk.project(tile, part, self._emit, entries)
            if not tiles.only_logprob:
                continue
            last = i == len(self._pieces) - 1
            again = last and any(earlier is None for earlier in self._kept[:-1])
            after = self._following if last else self._pieces[i + 1]
            weighed = walk.weigh(entries, tile, part.gradient_scale, None if again else after)
            if last and walk.choosing:
                self._late = weighed
                continue
            gradient = weighed.gradient()
            self._add_to_hidden(gradient, piece)
            kept = self._kept[i] = gradient if last else gradient.kept(room)
            room -= 0 if kept is None else gradient.entries.nbytes
        coefficients = tiles.evaluate(self._group, walk.statistics(self._state))
        if tiles.only_logprob:
            coefficients = Coefficients(coefficients.factor * self._state.gradient_scale)
        return coefficients

    def add_gradients(self, coefficients: Coefficients) -> None:
        """All tiles' products, the last tile first: it is resident."""
        walk, tiles = self._walk, self._tiles
        if self._late is not None:
            # While the host evaluated the loss, the device counted the columns and went on to the next tile.
            if self._product is not None and self._following is None:
                walk.catch_up()
                self._product.expect(self._late.profile)
            last = self._kept[-1] = self._late.gradient()
            self._add_to_hidden(last, self._pieces[-1])
        order = range(len(self._pieces) - 1, -1, -1)
        for i in order:
            piece, rows, gradient = self._pieces[i], self._rows[i], self._kept[i]
            part, entries, tile = self._part(rows), self._entries(rows), walk.tile(piece)
            if i != order[0] and gradient is None:
                walk.project_again(tile, part.lse.view(-1, entries.shape[0]), self._emit, entries)
            if not tiles.only_logprob:
                assert isinstance(part, RowState)
                walk.combine(entries, tile, part, coefficients.rows(rows))
                gradient = walk.gradient(entries, tile, following=self._pieces[i - 1] if i else self._following)
                self._add_to_hidden(gradient, piece)
            found, factor = TileGradient(entries) if gradient is None else gradient, coefficients.factor[rows]
            walk.later(found, partial(self._total.add, found, tile.hidden, factor))

    def _add_to_hidden(self, gradient: TileGradient, piece: Ranges) -> None:
        if self._product is not None:
            self._walk.later(gradient, partial(self._product.add, gradient, piece))
