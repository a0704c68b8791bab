"""Statistics first, gradients when they are asked for: strategies `cached`, `recompute` and `frozen`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import Emit, matmul
from .active import TileGradient, unweighed
from .head import Precision
from .hidden_gradient import HiddenGradient, HiddenSums, finish_hidden_gradient
from .parallel import VocabularyShard
from .problem import Problem
from .recompute import backward_recompute
from .teacher import Teacher
from .tokens import Ranges
from .walk import State, TileWalk
from .weight_gradient import finish_weight_gradient


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

    @functools.cache
    def at_positions() -> tuple[list[Tensor], Tensor, Tensor]:
        """What is known at every position once all tiles have been projected: statistics, `lse`, the row factor."""
        compact, place = walk.statistics(state), walk.scored.at_positions
        return [place(compact[name]) for name in names], place(state.lse), place(state.gradient_scale)

    tiles = tile_ranges(count, plan.tile_rows)
    if not keep_product and not keep_gradient:
        if 0 < plan.forward_columns < walk.vocab_size:
            _fold_columns(walk, state)
        else:
            for ranges in tiles:
                walk.project(walk.tile(ranges), state.narrow(*_place(ranges)), Emit.NOTHING, None)
        walk.merge(state)
    elif kept is not None:
        cache = _choose_columns(walk, state, tiles, hidden, kept if keep_gradient else None, cache_rows, at_positions)
        if cache is not None:
            _multiply_whole(walk, state, tiles[1:], hidden, cache)
    else:
        if keep_gradient:
            # While tracing the cache has room for every position; an operator's output is never left unwritten.
            cache = walk.buffer(cache_rows, walk.precision.compute)
            cache[count:].zero_()
        _multiply_whole(walk, state, tiles, hidden, cache)
    return (
        *at_positions(),
        HiddenSums(_nothing(walk)) if hidden is None else hidden.sums(),
        _nothing(walk) if cache is None else cache,
    )


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
    before_last: Callable[[], object],  # does what does not depend on the columns, before their number is waited for
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
            before_last()
            if hidden is not None:
                walk.catch_up()
                hidden.expect(weighed.profile)
        gradient = weighed.gradient()
        if hidden is not None:
            walk.later(gradient, functools.partial(hidden.add, gradient, ranges))
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
        return backward_recompute(walk, needs, coefficients, lse, entropy, dtypes)
    at_rows = coefficients[0] * scale
    weight = bias = None
    if needs[1] or needs[2]:
        weight, bias = _whole_weight_gradient(walk, needs, at_rows, cache, dtypes)
    hidden = finish_hidden_gradient(product, at_rows, dtypes[0], walk.shard) if needs[0] else None
    return hidden, weight, bias


def _whole_weight_gradient(
    walk: TileWalk,
    needs: tuple[bool, bool, bool],
    at_rows: Tensor,  # [R * T]
    cache: Tensor,  # [N, V], or longer
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> tuple[Tensor | None, Tensor | None]:
    """Of weight and bias. The scored hidden states are gone once it returns: what follows needs their room."""
    count = walk.scored.count
    everything = ((0, count),)
    total = walk.weight_gradient(needs, keep=True)
    factor = walk.scored.gather(at_rows, everything)
    total.add(TileGradient(cache[:count]), walk.tile_hidden(everything), factor)
    return finish_weight_gradient(total.tensors(walk.hidden.device), None, dtypes)


def outside_autocast(device: torch.device) -> torch.autocast:
    # The walk has chosen its dtypes; under autocast a plain fp32 product would be made a bf16 one.
    return torch.autocast(device.type, enabled=False)
