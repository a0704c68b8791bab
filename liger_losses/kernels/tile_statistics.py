"""Logits tile -> per-token statistics, and in the same visit the gradient of the log-probability (or the softmax).

A row's statistics are folded into a running state, so that a tile may hold all of the vocabulary or a block of it. When
the tile holds all of it, the same visit also writes, up to a factor per row that is known when the row ends
(`RowState.gradient_scale`), one of:

- `Emit.GRADIENT`: `G_v = (1[v = y] - p_v) * dz_v/draw_v`, which does not depend on the loss;
- `Emit.PROBABILITY`: `p_v`, from which the gradient of a loss with several coefficients is formed later.

Each logit is read once and each entry written once; no tensor of shape `[rows, V]` exists but the tile and `out`. The
factor costs nothing: whoever multiplies `G` scales rows anyway.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .dispatch import use_triton
from .transform import LogitTransform

STATISTICS = ("logprob", "entropy", "lse", "mean_logit", "is_top1", "log_sum_sq_prob")
DIFFERENTIABLE = ("logprob", "entropy", "lse")

# Elements of a slice of rows that the torch twin visits at once: its temporaries stay in cache.
_TWIN_ELEMENTS = 1 << 19


class Emit(enum.IntEnum):
    """What `fold_tile` writes to `out`."""

    NOTHING = 0
    GRADIENT = 1
    PROBABILITY = 2


class RowState:
    """Running statistics of `rows` rows of logits, over the vocabulary columns seen so far.

    `sum_exp = sum e^(z - max)`, `weighted = sum e^(z - max) (z - max)`, `sum_sq = sum e^(2 (z - max))`: relative to the
    running maximum, so that large logits lose nothing. `target` is NaN until the target's column has been seen, which
    makes a target out of range visible as a NaN log-probability. `gradient_scale * out` is what `emit` promises.
    """

    def __init__(self, rows: int, names: tuple[str, ...], *, device: torch.device, dtype: torch.dtype) -> None:
        optional = {"weighted": "entropy", "sum_sq": "log_sum_sq_prob", "sum_logits": "mean_logit"}
        fields = {"max": -math.inf, "sum_exp": 0.0, "target": math.nan, "gradient_scale": 1.0}
        fields |= {field: 0.0 for field, name in optional.items() if name in names}
        if "is_top1" in names:
            fields["max_before_target"] = -math.inf
        start = _initial(tuple(fields.values()), device, dtype)
        values = dict(zip(fields, start.unsqueeze(-1).repeat(1, rows), strict=True))
        self.names = names
        self.max, self.sum_exp, self.target = values["max"], values["sum_exp"], values["target"]
        self.gradient_scale = values["gradient_scale"]
        self.weighted = values.get("weighted")
        self.sum_sq = values.get("sum_sq")
        self.sum_logits = values.get("sum_logits")
        self.max_before_target = values.get("max_before_target")

    @property
    def lse(self) -> Tensor:
        return self.max + torch.log(self.sum_exp)

    def statistics(self, vocab_size: int) -> dict[str, Tensor]:
        """The statistics asked for, each `[rows]`, once every column has been folded."""
        result: dict[str, Tensor] = {}
        for name in self.names:
            if name == "logprob":
                # Relative to the maximum first: both terms are then small, whatever the size of the logits.
                result[name] = (self.target - self.max) - torch.log(self.sum_exp)
            elif name == "lse":
                result[name] = self.lse
            elif name == "entropy" and self.weighted is not None:
                result[name] = torch.log(self.sum_exp) - self.weighted / self.sum_exp
            elif name == "mean_logit" and self.sum_logits is not None:
                result[name] = self.sum_logits / vocab_size
            elif name == "is_top1" and self.max_before_target is not None:
                # Ties go to the first column, as argmax has it.
                result[name] = (self.target >= self.max) & (self.target > self.max_before_target)
            elif name == "log_sum_sq_prob" and self.sum_sq is not None:
                result[name] = torch.log(self.sum_sq) - 2 * torch.log(self.sum_exp)
        return result

    def narrow(self, start: int, rows: int) -> RowState:
        """A view of some of the rows."""
        view = RowState.__new__(RowState)
        for name, value in vars(self).items():
            setattr(view, name, value[start : start + rows] if isinstance(value, Tensor) else value)
        return view


@functools.cache
def _initial(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    # Kept on the device: a state is made for every tile, and one copy is all that it should cost.
    return torch.tensor(values, device=device, dtype=dtype)


def fold_tile(
    tile: Tensor,  # [rows, columns] projected rows, before bias and transform
    bias: Tensor | None,  # [columns]
    target: Tensor,  # [rows] int64, column of the whole vocabulary
    state: RowState,  # of these rows; updated
    transform: LogitTransform,
    *,
    first_column: int = 0,
    emit: Emit = Emit.NOTHING,
    out: Tensor | None = None,  # [rows, columns], not `tile`
) -> None:
    """Fold `tile` into `state`; with `emit`, also write `out` (the tile must then hold the whole vocabulary).

    Rows of `out` that lie on 8-element boundaries may be written up to the boundary after their last column.
    """
    if tile.shape[0] == 0:
        return
    if use_triton(tile):
        from .tile_statistics_triton import fold_tile_triton

        fold_tile_triton(tile, bias, target, state, transform, first_column=first_column, emit=emit, out=out)
        return
    for rows in row_slices(tile):
        _fold_rows(
            tile[rows],
            bias,
            target[rows],
            state.narrow(rows.start, rows.stop - rows.start),
            transform,
            first_column,
            emit,
            None if out is None else out[rows],
        )


def row_slices(tile: Tensor) -> Iterator[slice]:
    step = max(1, _TWIN_ELEMENTS // max(1, tile.shape[1]))
    for start in range(0, tile.shape[0], step):
        yield slice(start, min(start + step, tile.shape[0]))


def _fold_rows(
    tile: Tensor,
    bias: Tensor | None,
    target: Tensor,
    state: RowState,
    transform: LogitTransform,
    first_column: int,
    emit: Emit,
    out: Tensor | None,
) -> None:
    z, slope = transform.apply(tile.to(state.max.dtype), bias)
    columns = torch.arange(first_column, first_column + tile.shape[1], device=tile.device)
    is_target = columns == target.unsqueeze(-1)

    highest = torch.maximum(state.max, z.amax(-1))
    # Where everything so far is -inf the difference is -inf - -inf; such rows hold nothing to rescale.
    shift = torch.where(state.max == -math.inf, torch.zeros_like(highest), state.max - highest)
    rescale = torch.where(state.max == -math.inf, torch.zeros_like(highest), torch.exp(shift))
    # The same for a block that is -inf throughout (a masked vocabulary): nothing is summed from it.
    below = z - torch.where(highest == -math.inf, torch.zeros_like(highest), highest).unsqueeze(-1)
    e = torch.exp(below)
    if state.weighted is not None:
        terms = torch.where(e > 0, e * below, torch.zeros_like(e))
        state.weighted.copy_(rescale * (state.weighted + shift * state.sum_exp) + terms.sum(-1))
    if state.sum_sq is not None:
        state.sum_sq.mul_(rescale * rescale).add_((e * e).sum(-1))
    if state.sum_logits is not None:
        state.sum_logits.add_(z.sum(-1))
    if state.max_before_target is not None:
        before = z.masked_fill(columns >= target.unsqueeze(-1), -math.inf).amax(-1)
        state.max_before_target.copy_(torch.maximum(state.max_before_target, before))
    state.sum_exp.mul_(rescale).add_(e.sum(-1))
    state.max.copy_(highest)
    found = torch.where(is_target, z, torch.zeros_like(z)).sum(-1)
    state.target.copy_(torch.where(is_target.any(-1), found, state.target))

    if emit != Emit.NOTHING:
        assert out is not None
        p = e.div_(state.sum_exp.unsqueeze(-1))
        out.copy_(p if emit == Emit.PROBABILITY else (is_target.to(p.dtype) - p) * slope)
