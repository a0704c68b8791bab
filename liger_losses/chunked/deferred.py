"""Statistics first, gradients when they are asked for: strategies `cached`, `recompute` and `frozen`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels import (
    DivergenceState,
    Emit,
    TeacherTile,
    bernoulli_tile,
    divergence_gradient,
    matmul,
    tile_gradient,
)
from .active import TileGradient, unweighed
from .head import Precision
from .head_tensors import logit_coefficients
from .hidden_gradient import HiddenGradient, HiddenSums, finish_hidden_gradient
from .parallel import VocabularyShard
from .problem import Problem
from .teacher import Teacher
from .tokens import Ranges
from .walk import State, TileWalk
from .weight_gradient import finish_weight_gradient, power_of_two_at_least


def describe(
    hidden: Tensor,
    weight: Tensor,
    counts: tuple[int, ...],
    precision: Precision,
    needs: tuple[bool, bool, bool],
    teacher: Teacher | None = None,
    shard: VocabularyShard | None = None,
    **more: Any,
) -> Problem:
    """The planner's view of a call."""
    problem = Problem(
        tokens=sum(counts),
        positions=hidden.numel() // hidden.shape[-1],
        hidden_size=weight.shape[1],
        vocab_size=weight.shape[0] if shard is None else shard.largest,
        compute_bytes=precision.compute.itemsize,
        logits_bytes=precision.logits.itemsize,
        statistics_bytes=precision.statistics.itemsize,
        hidden_itemsize=hidden.dtype.itemsize,
        weight_itemsize=weight.dtype.itemsize,
        hidden_grad=needs[0],
        weight_grad=needs[1],
        bias_grad=needs[2],
        spread=shard is not None,
        wide_weight_sum=needs[2] or weight.dtype != precision.compute or precision.compute == torch.float16,
        cast_weight=weight.dtype != precision.compute,
        row_counts=counts,
        **more,
    )
    return problem if teacher is None else teacher.describe(problem, precision, spread=shard is not None)


def tile_ranges(count: int, rows: int) -> list[Ranges]:
    return [((start, min(start + rows, count)),) for start in range(0, count, rows)]


def forward(
    walk: TileWalk,
    names: tuple[str, ...],
    needs: tuple[bool, bool, bool],
    cache_rows: int,
    kept: list[TileGradient | None] | None = None,  # with an active vocabulary: receives what is kept of each tile
) -> tuple[list[Tensor], Tensor, Tensor, HiddenSums, Tensor]:
    """Statistics at every position (zero where not scored), `lse`, the row factor of `G`, `G W` and `G`.

    With a teacher `lse` is `[5, R * T]`, see `DivergenceState`. The last two are empty where they are not kept.
    """
    count, plan = walk.scored.count, walk.plan
    keep_product = plan.strategy in ("cached", "frozen") and needs[0]
    keep_gradient = plan.strategy == "cached" and (needs[1] or needs[2])
    hidden = walk.hidden_gradient() if keep_product else None
    state, cache = walk.state(count, names), None
    results = _Results(walk, state, names)
    tiles = tile_ranges(count, plan.tile_rows)
    if not keep_product and not keep_gradient:
        if 0 < plan.forward_columns < walk.vocab_size:
            _fold_columns(walk, state)
        else:
            for ranges in tiles:
                walk.project(walk.tile(ranges), state.narrow(*_place(ranges)), Emit.NOTHING, None)
        walk.merge(state)
    elif kept is not None:
        cache = _choose_columns(walk, state, tiles, hidden, kept if keep_gradient else None, cache_rows, results)
        if cache is not None:
            _multiply_whole(walk, state, tiles[1:], hidden, cache)
    else:
        if keep_gradient:
            # While tracing the cache has room for every position; an operator's output is never left unwritten.
            cache = walk.buffer(cache_rows, walk.precision.compute)
            cache[count:].zero_()
        _multiply_whole(walk, state, tiles, hidden, cache)
    return (
        *results.at_positions(),
        HiddenSums(_nothing(walk)) if hidden is None else hidden.sums(),
        _nothing(walk) if cache is None else cache,
    )


class _Results:
    """What is known at every position once all tiles have been projected."""

    def __init__(self, walk: TileWalk, state: State, names: tuple[str, ...]) -> None:
        self._walk, self._state, self._names = walk, state, names
        self._found: tuple[list[Tensor], Tensor, Tensor] | None = None

    def at_positions(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Statistics, `lse` and the row factor of `G`. Found once, when first asked for."""
        if self._found is None:
            compact, place = self._walk.statistics(self._state), self._walk.scored.at_positions
            values = [place(compact[name]) for name in self._names]
            self._found = values, place(self._state.lse), place(self._state.gradient_scale)
        return self._found


def _place(ranges: Ranges) -> tuple[int, int]:
    """First row and number of rows of a tile."""
    ((start, stop),) = ranges
    return start, stop - start


def _multiply_whole(
    walk: TileWalk, state: State, tiles: list[Ranges], hidden: HiddenGradient | None, cache: Tensor | None
) -> None:
    """All columns of every tile, and all of `G` into `cache` if there is one."""
    if cache is None:
        buffer = walk.buffer(min(walk.plan.tile_rows, walk.scored.count), walk.precision.compute)
    for ranges in tiles:
        start, rows = _place(ranges)
        entries = buffer[:rows] if cache is None else cache[start : start + rows]
        walk.project(walk.tile(ranges), state.narrow(start, rows), Emit.GRADIENT, entries)
        gradient = TileGradient(entries) if walk.active is None else unweighed(entries)
        if hidden is not None:
            hidden.add(gradient, ranges)


def _choose_columns(
    walk: TileWalk,
    state: State,
    tiles: list[Ranges],
    hidden: HiddenGradient | None,
    kept: list[TileGradient | None] | None,  # receives what is kept of each tile; None: nothing is
    cache_rows: int,
    results: _Results,
) -> Tensor | None:
    """The active columns of every tile. If the first one was multiplied whole: the cache for all of `G`, begun."""
    buffer = walk.buffer(min(walk.plan.tile_rows, walk.scored.count), walk.precision.compute)
    room = walk.plan.cache_bytes
    for ranges, following in zip(tiles, [*tiles[1:], None], strict=False):
        start, rows = _place(ranges)
        entries, part, tile = buffer[:rows], state.narrow(start, rows), walk.tile(ranges)
        walk.project(tile, part, Emit.GRADIENT, entries)
        weighed = walk.weigh(entries, tile, part.gradient_scale, following)
        if following is None:
            # All that does not depend on the columns, before waiting for their number.
            results.at_positions()
            if hidden is not None:
                walk.catch_up()
                hidden.expect(weighed.profile)
        gradient = weighed.gradient()
        if hidden is not None:
            walk.later(gradient, partial(hidden.add, gradient, ranges))
        if kept is None:
            continue
        if start == 0 and gradient.columns is None and walk.plan.whole_cache:
            # Logits this flat will not do with few columns: from here on as without an active vocabulary.
            cache = walk.buffer(cache_rows, walk.precision.compute)
            cache[:rows] = entries
            return cache
        kept.append(gradient.kept(room))
        room -= 0 if kept[-1] is None else kept[-1].entries.nbytes
    walk.catch_up()
    return None


def _fold_columns(walk: TileWalk, state: State) -> None:
    """All tokens over one block of the vocabulary after the other."""
    tile, step = walk.tile(((0, walk.scored.count),)), walk.plan.forward_columns
    buffer = torch.empty(walk.scored.count, step, dtype=walk.precision.logits, device=walk.hidden.device)
    for start in range(0, walk.vocab_size, step):
        block = slice(start, min(start + step, walk.vocab_size))
        logits = matmul(tile.hidden, walk.weight[block].t(), out=buffer[:, : block.stop - block.start])
        walk.fold(logits, tile, state, columns=block)


def _nothing(walk: TileWalk) -> Tensor:
    return torch.empty(0, dtype=walk.precision.compute, device=walk.hidden.device)


def backward(
    walk: TileWalk,
    needs: tuple[bool, bool, bool],
    coefficients: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],  # of DIFFERENTIABLE at every position
    lse: Tensor,
    entropy: Tensor | None,
    scale: Tensor,
    product: HiddenSums,
    cache: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias."""
    if walk.plan.strategy == "recompute":
        return _backward_recompute(walk, needs, coefficients, lse, entropy, dtypes)
    at_rows = coefficients[0] * scale
    weight = bias = None
    if needs[1] or needs[2]:
        count = walk.scored.count
        everything = ((0, count),)
        total = walk.weight_gradient(needs, keep=True)
        factor = walk.scored.gather(at_rows, everything)
        total.add(TileGradient(cache[:count]), walk.tile_hidden(everything), factor)
        weight, bias = finish_weight_gradient(total.tensors(walk.hidden.device), None, dtypes)
    hidden = finish_hidden_gradient(product, at_rows, dtypes[0], walk.shard) if needs[0] else None
    return hidden, weight, bias


def _backward_recompute(
    walk: TileWalk,
    needs: tuple[bool, bool, bool],
    coefficients: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    lse: Tensor,
    entropy: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Vocabulary blocks: each finishes its rows of `dW` by one product over all tokens, so no `[V, H]` sum exists."""
    count, compute, wide = walk.scored.count, walk.precision.compute, walk.precision.statistics
    device, everything = walk.hidden.device, ((0, count),)
    vocab, width = walk.weight.shape
    tile = walk.tile(everything)

    def compact(values: Tensor | None) -> Tensor | None:
        return None if values is None else walk.scored.gather(values, everything)

    second = _Second.of(walk, lse)
    lse = lse[0] if second is not None else lse
    # All coefficients are known here, so they go into the tile; fp16 keeps a common power of two outside.
    parts = [compact(part) for part in coefficients]
    unit = None
    if compute == torch.float16 and count:
        unit = power_of_two_at_least(torch.cat([part for part in parts if part is not None]))
        parts = [None if part is None else part / unit for part in parts]
    dlogprob, dentropy, *rest = parts
    dlse, dlogit = logit_coefficients(rest[0], rest[1], walk.all_columns, walk.tensors.column_weights)
    assert dlogprob is not None
    row_lse, row_entropy = walk.scored.gather(lse, everything), compact(entropy)

    d_hidden = torch.zeros(count, width, dtype=wide, device=device) if needs[0] else None
    d_weight = torch.empty(vocab, width, dtype=dtypes[1], device=device) if needs[1] else None
    d_bias = torch.empty(vocab, dtype=dtypes[2], device=device) if needs[2] else None
    ones = torch.ones(count, 1, dtype=compute, device=device) if needs[2] else None
    step = walk.plan.vocab_block
    logits = torch.empty(count, step, dtype=walk.precision.logits, device=device)
    gradient = logits if walk.precision.logits == compute else torch.empty(count, step, dtype=compute, device=device)
    for start in range(0, vocab, step):
        block = slice(start, min(start + step, vocab))
        columns = block.stop - block.start
        rows, out = logits[:, :columns], gradient[:, :columns]
        matmul(tile.hidden, walk.weight[block].t(), out=rows)
        bias, weights = (None if t is None else t[block] for t in (walk.bias, walk.column_weights))
        first = walk.first_column + start
        if second is not None:
            divergence_gradient(
                rows, bias, tile.target, second.block(start, block.stop), second.state, tile.transform,
                second.teacher.columns(vocab).block(start, block.stop), factor=dlogprob, out=out, first_column=first,
            )  # fmt: skip
        elif tile.positives is not None:
            bernoulli_tile(rows, bias, tile.positives, tile.transform, out=out, factor=dlogprob, first_column=first)
        else:
            tile_gradient(
                rows,
                bias,
                tile.target,
                lse=row_lse,
                logprob=row_lse,
                entropy=row_entropy,
                dlogprob=dlogprob,
                dentropy=dentropy,
                dlse=dlse,
                dlogit=dlogit,
                column_weights=weights,
                transform=tile.transform,
                out=out,
                first_column=first,
            )
        if d_hidden is not None:
            matmul(out, walk.weight[block], out=d_hidden, accumulate=True)
        if d_weight is not None:
            _block_product(out, tile.hidden, d_weight[block], unit, wide)
        if d_bias is not None and ones is not None:
            _block_product(out, ones, d_bias[block].unsqueeze(-1), unit, wide)
    del logits, gradient, rows, out, tile, second  # before the hidden gradient is cast
    return _positions(walk, d_hidden, unit, dtypes[0]), d_weight, d_bias


class _Second:
    """The teacher of all scored tokens, a block of its vocabulary at a time, and what forward knew of its rows."""

    def __init__(self, walk: TileWalk, teacher: Teacher, kept: Tensor) -> None:
        self._walk, self.teacher = walk, teacher
        everything = ((0, walk.scored.count),)
        rows = torch.stack([walk.scored.gather(row, everything) for row in kept])
        self.state = DivergenceState.of_kept(rows, teacher.divergence)
        self._hidden = self._buffer = None
        if teacher.hidden is not None:
            self._hidden = walk.scored.gather(teacher.hidden, everything).to(walk.precision.compute)
            size = (walk.scored.count, walk.plan.vocab_block)
            self._buffer = torch.empty(size, dtype=walk.precision.logits, device=walk.hidden.device)

    @classmethod
    def of(cls, walk: TileWalk, kept: Tensor) -> _Second | None:
        teacher = walk.teacher
        return None if teacher is None else cls(walk, teacher, kept)

    def block(self, start: int, stop: int) -> TeacherTile:
        """Its logits of the columns `[start, stop)`, as far as it has them."""
        columns = self.teacher.columns(self._walk.vocab_size).block(start, stop).teacher
        some = slice(start, start + columns)
        if self._hidden is None or self._buffer is None:
            assert self.teacher.logits is not None
            rows = self._walk.scored.gather(self.teacher.logits[:, some], ((0, self._walk.scored.count),))
        else:
            assert self.teacher.weight is not None
            rows = matmul(self._hidden, self.teacher.weight[some].t(), out=self._buffer[:, :columns])
        return self.teacher.tile(rows, some)


def _block_product(gradient: Tensor, right: Tensor, out: Tensor, unit: Tensor | None, wide: torch.dtype) -> None:
    if unit is None and out.dtype == gradient.dtype:
        matmul(gradient.t(), right, out=out)
        return
    total = torch.empty(out.shape, dtype=wide, device=out.device)
    matmul(gradient.t(), right, out=total)
    out.copy_(total if unit is None else total.mul_(unit))


def _positions(walk: TileWalk, d_hidden: Tensor | None, unit: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if d_hidden is None:
        return None
    if unit is not None:
        d_hidden.mul_(unit)
    part = dtype if walk.shard is None else d_hidden.dtype
    full = d_hidden.to(part)
    if walk.scored.index is not None:
        full = torch.zeros(walk.hidden.shape, dtype=part, device=d_hidden.device)
        walk.scored.scatter(d_hidden, full, ((0, walk.scored.count),))
    return full if walk.shard is None else walk.shard.sum(full).to(dtype)


def outside_autocast(device: torch.device) -> torch.autocast:
    # The walk has chosen its dtypes; under autocast a plain fp32 product would be made a bf16 one.
    return torch.autocast(device.type, enabled=False)
