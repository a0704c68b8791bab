"""The head's own gradient, a sum over tiles of products with `G`, whole or of its active columns."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import add_rows, matmul, scaled_cast
from .active import TileGradient
from .head import Precision


class WeightGradient:
    """`dW = sum over tiles of G^T (c * x)` and `db = sum of G^T c`, in fp32 until the one cast in `finish`.

    fp16 has little room below: there the factor is divided by a power of two not below its largest size so far, the
    sum is kept relative to that, and `finish` multiplies it back in fp32.
    """

    def __init__(self, shape: torch.Size, precision: Precision, *, weight: bool, bias: bool) -> None:
        self._shape = (shape[0], shape[1])
        self._precision = precision
        self._want_weight, self._want_bias = weight, bias
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.unit: Tensor | None = None
        self._tails: dict[str, list[tuple[Tensor, Tensor]]] = {"weight": [], "bias": []}

    def add(
        self,
        gradient: TileGradient,  # G
        hidden: Tensor,  # [n, H]
        factor: Tensor,  # [n]
    ) -> None:
        if hidden.shape[0] == 0:
            return
        if self._precision.compute == torch.float16:
            factor = self._relative(factor)
        if self._want_weight:
            scaled = scaled_cast(hidden, factor, hidden.dtype)
            self.weight = self._accumulate("weight", self.weight, gradient, scaled, self._shape)
        if self._want_bias:
            column = factor.to(gradient.entries.dtype).unsqueeze(-1)
            self.bias = self._accumulate("bias", self.bias, gradient, column, (self._shape[0], 1))

    def _accumulate(
        self, name: str, total: Tensor | None, gradient: TileGradient, right: Tensor, shape: tuple[int, int]
    ) -> Tensor:
        wide, device = self._precision.statistics, right.device
        if gradient.columns is None:
            if total is None:
                # The first product writes the sum: nothing to zero, nothing to read.
                empty = torch.empty(shape, dtype=wide, device=device)
                return matmul(gradient.entries.t(), right, out=empty)
            return matmul(gradient.entries.t(), right, out=total, accumulate=True)
        if total is None:
            total = torch.zeros(shape, dtype=wide, device=device)
        for ids, entries, tail in gradient.panels():
            part = torch.empty(entries.shape[1], shape[1], dtype=wide, device=device)
            add_rows(total, ids, matmul(entries.t(), right, out=part))
            if tail is not None:
                assert gradient.profile is not None
                self._tails[name].append((gradient.profile, part[tail].clone()))
        return total

    def _with_tails(self, name: str, total: Tensor | None) -> Tensor | None:
        """The tails' parts are of rank one each: all tiles' in one visit to the sum."""
        if total is not None and self._tails[name]:
            profiles, sums = (torch.stack(parts) for parts in zip(*self._tails[name], strict=True))
            total.addmm_(profiles.t(), sums)
            self._tails[name].clear()
        return total

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

    def tensors(self, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Weight sum, bias sum and unit, with zeros where no tile contributed."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self._precision.statistics, device=device)

        weight, bias = self._with_tails("weight", self.weight), self._with_tails("bias", self.bias)
        weight = zeros(*self._shape) if weight is None and self._want_weight else weight
        bias = zeros(self._shape[0], 1) if bias is None and self._want_bias else bias
        return weight, bias, self.unit


def power_of_two_at_least(values: Tensor) -> Tensor:
    """Scalar tensor `2^k >= max |values|`; 1 where all are zero, NaN or infinite where `values` are."""
    largest = values.abs().amax()
    return torch.where(largest == 0, torch.ones_like(largest), torch.exp2(torch.ceil(torch.log2(largest))))
