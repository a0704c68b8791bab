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
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .dispatch import use_triton
from .row_numbers import RowNumbers
from .transform import LogitTransform

STATISTICS = (
    "logprob", "entropy", "lse", "mean_logprob", "mean_logit", "argmax", "is_top1", "log_sum_sq_prob",
)  # fmt: skip
DIFFERENTIABLE = ("logprob", "entropy", "lse", "mean_logprob")
DTYPES = {"argmax": torch.int64, "is_top1": torch.bool}  # of the statistics that are no fp32 numbers

# Elements of a slice of rows that the torch twin visits at once: its temporaries stay in cache.
TWIN_ELEMENTS = 1 << 19


class Emit(enum.IntEnum):
    """What `fold_tile` writes to `out`."""

    NOTHING = 0
    GRADIENT = 1
    PROBABILITY = 2


class RowState(RowNumbers):
    """Running statistics of `rows` rows of logits, over the vocabulary columns seen so far.

    `sum_exp = sum e^(z - max)`, `weighted = sum e^(z - max) (z - max)`, `sum_sq = sum e^(2 (z - max))`: relative to the
    running maximum, so that large logits lose nothing. `target` is NaN until the target's column has been seen, which
    makes a target out of range visible as a NaN log-probability. `sum_logits = sum z_v`, `sum_columns = sum c_v z_v`
    with column weights `c`. `gradient_scale * out` is what `emit` promises.
    """

    max: Tensor
    sum_exp: Tensor
    target: Tensor
    gradient_scale: Tensor
    weighted: Tensor | None = None
    sum_sq: Tensor | None = None
    sum_logits: Tensor | None = None
    sum_columns: Tensor | None = None

    def __init__(
        self,
        rows: int,
        names: tuple[str, ...],
        *,
        device: torch.device,
        dtype: torch.dtype,
        column_weights: bool = False,  # whether `mean_logprob` is weighted
    ) -> None:
        optional = {
            "weighted": "entropy" in names,
            "sum_sq": "log_sum_sq_prob" in names,
            "sum_logits": "mean_logit" in names or ("mean_logprob" in names and not column_weights),
            "sum_columns": "mean_logprob" in names and column_weights,
        }
        values = {"max": -math.inf, "sum_exp": 0.0, "target": math.nan}
        values |= {name: 0.0 for name, wanted in optional.items() if wanted}
        # Last: it is of this tile, the others of the columns.
        self.allocate(values | {"gradient_scale": 1.0}, rows, device, dtype)
        self.names = names
        top1 = "is_top1" in names or "argmax" in names
        self.argmax = torch.zeros(rows, dtype=torch.int64, device=device) if top1 else None
        self.is_top1 = torch.zeros(rows, dtype=torch.bool, device=device) if "is_top1" in names else None

    @property
    def lse(self) -> Tensor:
        return self.max + torch.log(self.sum_exp)

    def statistics(self, vocab_size: int, column_weights: Tensor | None = None) -> dict[str, Tensor]:
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
            elif name == "mean_logprob" and self.sum_columns is not None:
                assert column_weights is not None
                result[name] = (self.sum_columns - column_weights.sum() * self.lse) / vocab_size
            elif name == "mean_logprob" and self.sum_logits is not None:
                result[name] = (self.sum_logits / vocab_size - self.max) - torch.log(self.sum_exp)
            elif name == "argmax" and self.argmax is not None:
                result[name] = self.argmax
            elif name == "is_top1" and self.is_top1 is not None:
                result[name] = self.is_top1
            elif name == "log_sum_sq_prob" and self.sum_sq is not None:
                result[name] = torch.log(self.sum_sq) - 2 * torch.log(self.sum_exp)
        return result

    def narrow(self, start: int, rows: int) -> RowState:
        """A view of some of the rows."""
        view = super().narrow(start, rows)
        if self.argmax is not None:
            view.argmax = self.argmax[start : start + rows]
        if self.is_top1 is not None:
            view.is_top1 = self.is_top1[start : start + rows]
        return view


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
    column_weights: Tensor | None = None,  # [columns], of the statistic mean_logprob
) -> None:
    """Fold `tile` into `state`; with `emit`, also write `out` (the tile must then hold the whole vocabulary).

    Rows of `out` that lie on 8-element boundaries may be written up to the boundary after their last column.
    """
    if tile.shape[0] == 0:
        return
    if use_triton(tile):
        from .tile_statistics_triton import fold_tile_triton

        fold_tile_triton(
            tile, bias, target, state, transform, first_column=first_column, emit=emit, out=out,
            column_weights=column_weights,
        )  # fmt: skip
    else:
        for rows in row_slices(tile):
            _fold_rows(
                tile[rows],
                bias,
                target[rows],
                state.narrow(rows.start, rows.stop - rows.start),
                transform.rows(rows),
                first_column,
                emit,
                None if out is None else out[rows],
                column_weights,
            )
    if state.is_top1 is not None and state.argmax is not None:
        torch.eq(state.argmax, target, out=state.is_top1)


def row_slices(tile: Tensor, times: int = 1, columns: int | None = None) -> Iterator[slice]:
    """Rows of `TWIN_ELEMENTS * times` elements at a time, were they of so many columns (None: the tile's)."""
    step = max(1, TWIN_ELEMENTS * times // max(1, columns or tile.shape[1]))
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
    column_weights: Tensor | None,
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
    if state.sum_columns is not None:
        assert column_weights is not None
        # A column of weight 0 says nothing, be its logit -inf.
        weights = column_weights.to(z.dtype)
        state.sum_columns.add_(torch.where(weights == 0, torch.zeros_like(z), z * weights).sum(-1))
    if state.argmax is not None:
        # Ties go to the first column.
        state.argmax.copy_(torch.where(z.amax(-1) > state.max, z.argmax(-1) + first_column, state.argmax))
    state.sum_exp.mul_(rescale).add_(e.sum(-1))
    state.max.copy_(highest)
    found = torch.where(is_target, z, torch.zeros_like(z)).sum(-1)
    state.target.copy_(torch.where(is_target.any(-1), found, state.target))

    if emit != Emit.NOTHING:
        assert out is not None
        if emit == Emit.PROBABILITY:
            # Where all is -inf, 0 up to an infinite factor: no number, unless columns elsewhere say otherwise.
            empty = state.sum_exp == 0
            state.gradient_scale.masked_fill_(empty, math.inf)
            p = e.div_(torch.where(empty, 1, state.sum_exp).unsqueeze(-1))
        else:
            p = e.div_(state.sum_exp.unsqueeze(-1))
        out.copy_(p if emit == Emit.PROBABILITY else (is_target.to(p.dtype) - p) * slope)
