"""The head's own gradient, a sum over tiles of products with `G`, whole or of its active columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import add_rows, matmul, scaled_cast, tailed_cast
from .active import TileGradient
from .head import Precision
from .tile import padded_empty


class WeightSums(NamedTuple):
    """What the gradients of weight and bias are made of, by one visit to the sums once the upstream factor is known."""

    weight: Tensor | None  # [V, H] fp32 (fp64)
    bias: Tensor | None  # [V, 1]
    unit: Tensor | None  # [] that all sums are relative to
    written: Tensor | None  # [V] bool: rows of `weight` that hold something; None: all
    profiles: Tensor | None  # [tiles, V]
    sums: Tensor | None  # [tiles, H]: to `weight` comes `profiles^T sums`
    entries: Tensor | None = None  # [N, V]; where all of `G` was kept, instead of the above
    hidden: Tensor | None = None  # [N, H]
    factor: Tensor | None = None  # [N]


class WeightGradient:
    """`dW = sum over tiles of G^T (c * x)` and `db = sum of G^T c`, in fp32 until the one cast in `finish`.

    With `rows` all of `G` is kept instead, of so many tokens, if the first tile is a whole one: one product is made in
    `finish`, rounded once, with no running sum.

    With an active vocabulary most rows of `dW` receive the tails' part alone. They are never written, and the tails'
    part, of rank one for each tile, is added where the sum is read to be cast.

    fp16 has little room below: there the factor is divided by a power of two not below its largest size so far, the
    sum is kept relative to that, and `finish` multiplies it back in fp32.
    """

    def __init__(self, shape: torch.Size, precision: Precision, *, weight: bool, bias: bool, rows: int = 0) -> None:
        self._shape = (shape[0], shape[1])
        self._precision = precision
        self._want_weight, self._want_bias = weight, bias
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.unit: Tensor | None = None
        self._written: Tensor | None = None
        self._tails: dict[str, list[tuple[Tensor, Tensor]]] = {"weight": [], "bias": []}
        self._rows, self._entries = rows, torch.empty(0)
        self._kept: list[tuple[Tensor, Tensor]] = []

    def buffer(self, rows: int) -> Tensor | None:
        """Where the next tile's `G` `[rows, V]` is best written: among what is kept, if anything is."""
        done = sum(len(hidden) for hidden, _ in self._kept)
        return self._entries[done : done + rows] if done else None

    def add(
        self,
        gradient: TileGradient,  # G
        hidden: Tensor,  # [n, H]
        factor: Tensor,  # [n]
    ) -> None:
        if hidden.shape[0] == 0:
            return
        if self._kept or (self._rows and self.weight is None and gradient.columns is None):
            self._keep(gradient.entries, hidden, factor)
            return
        if self._precision.compute == torch.float16:
            factor = self._relative(factor)
        if self._want_weight:
            scaled = scaled_cast(hidden, factor, hidden.dtype)
            if gradient.columns is None:
                self.weight = self._whole(self._filled(self.weight), gradient, scaled, self._shape)
            else:
                if self.weight is None:
                    self.weight = self._empty(self._shape, hidden.device)
                    self._written = torch.zeros(self._shape[0], dtype=torch.bool, device=hidden.device)
                self._add_columns("weight", self.weight, self._written, gradient, scaled)
        if self._want_bias:
            column, shape = factor.to(gradient.entries.dtype).unsqueeze(-1), (self._shape[0], 1)
            if gradient.columns is None:
                self.bias = self._whole(self.bias, gradient, column, shape)
            else:
                self.bias = self._empty(shape, hidden.device).zero_() if self.bias is None else self.bias
                self._add_columns("bias", self.bias, None, gradient, column)

    def _keep(self, entries: Tensor, hidden: Tensor, factor: Tensor) -> None:
        place = self.buffer(len(entries))
        if place is None:
            alone = len(entries) == self._rows
            self._entries = (
                entries if alone else padded_empty(self._rows, self._shape[0], entries.dtype, entries.device)
            )
            place = self._entries[: len(entries)]
        if place.data_ptr() != entries.data_ptr():
            place.copy_(entries)
        self._kept.append((hidden, factor))

    def _empty(self, shape: tuple[int, int], device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=self._precision.statistics, device=device)

    def _whole(self, total: Tensor | None, gradient: TileGradient, right: Tensor, shape: tuple[int, int]) -> Tensor:
        if total is None:
            # The first product writes the sum: nothing to zero, nothing to read.
            return matmul(gradient.entries.t(), right, out=self._empty(shape, right.device))
        return matmul(gradient.entries.t(), right, out=total, accumulate=True)

    def _filled(self, total: Tensor | None) -> Tensor | None:
        """`total` with all rows written."""
        if total is not None and self._written is not None:
            total.masked_fill_(self._written.logical_not().unsqueeze(-1), 0)
            self._written = None
        return total

    def _add_columns(
        self, name: str, total: Tensor, written: Tensor | None, gradient: TileGradient, right: Tensor
    ) -> None:
        for ids, entries, tail in gradient.panels():
            part = self._empty((entries.shape[1], total.shape[1]), right.device)
            add_rows(total, written, ids, matmul(entries.t(), right, out=part))
            if tail is not None:
                assert gradient.profile is not None
                self._tails[name].append((gradient.profile, part[tail].clone()))

    def _relative(self, factor: Tensor) -> Tensor:
        unit = power_of_two_at_least(factor)
        if self.unit is not None:
            unit = torch.maximum(unit, self.unit)
            for total in (self.weight, self.bias):
                if total is not None:
                    total.mul_(self.unit / unit)
            for tails in self._tails.values():
                for _, part in tails:
                    part.mul_(self.unit / unit)
        self.unit = unit
        return factor / unit

    def tensors(self, device: torch.device) -> WeightSums:
        """What `finish_weight_gradient` takes, with zeros where no tile contributed."""
        if self._kept:
            hidden, factor = (
                parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*self._kept, strict=True)
            )
            return WeightSums(None, None, None, None, None, None, self._entries, hidden, factor)
        weight, bias, tails = self.weight, self.bias, self._stacked("weight")
        if weight is None and self._want_weight:
            weight = self._empty(self._shape, device).zero_()
        if bias is None and self._want_bias:
            bias = self._empty((self._shape[0], 1), device).zero_()
        profiles, sums = self._stacked("bias")
        if bias is not None and profiles is not None and sums is not None:
            bias = torch.addmm(bias, profiles.t(), sums)
        return WeightSums(weight, bias, self.unit, self._written, *tails)

    def _stacked(self, name: str) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if not self._tails[name]:
            return None, None
        profiles, sums = (torch.stack(parts) for parts in zip(*self._tails[name], strict=True))
        return profiles, sums


def finish_weight_gradient(
    totals: WeightSums,
    upstream: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],  # of hidden, weight, bias
) -> tuple[Tensor | None, Tensor | None]:
    """The sums times `upstream`, each cast once."""
    if totals.entries is not None and totals.hidden is not None and totals.factor is not None:
        factor = totals.factor if upstream is None else totals.factor * upstream
        scaled = scaled_cast(totals.hidden, factor, totals.hidden.dtype)
        out = torch.empty(totals.entries.shape[1], scaled.shape[1], dtype=dtypes[1], device=scaled.device)
        return matmul(totals.entries.t(), scaled, out=out), None
    some = totals.weight if totals.weight is not None else totals.bias
    if some is None:
        return None, None
    scale = some.new_ones(()) if upstream is None else upstream.to(some.dtype)
    if totals.unit is not None:
        scale = scale * totals.unit
    weight = bias = None
    if totals.weight is not None:
        if totals.profiles is None or totals.sums is None:
            weight = scaled_cast(totals.weight, scale, dtypes[1])
        else:
            weight = tailed_cast(totals.weight, totals.written, totals.profiles, totals.sums, scale, dtypes[1])
    if totals.bias is not None:
        bias = scaled_cast(totals.bias.squeeze(-1), scale, dtypes[2])
    return weight, bias


def power_of_two_at_least(values: Tensor) -> Tensor:
    """Scalar tensor `2^k >= max |values|`; 1 where all are zero, NaN or infinite where `values` are."""
    largest = values.abs().amax()
    return torch.where(largest == 0, torch.ones_like(largest), torch.exp2(torch.ceil(torch.log2(largest))))
