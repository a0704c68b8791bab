"""From a projected row to logits: `z = softcap * tanh(scale * (r + b) / softcap) / temperature`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._checks import check_fp32_range


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its logits after the projection: scale first, then softcap, then temperature.

    The temperature is one number, or one per row: a tensor `[rows]` of the statistics' dtype, whose entries are taken
    as they are.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0

    def __post_init__(self) -> None:
        # Comparisons, which NaN fails: they trace where torch.compile makes numbers symbolic, math.isfinite does not.
        for name, value in (("logit_scale", self.scale), ("softcap", self.softcap), ("temperature", self.temperature)):
            if (name == "softcap" and value is None) or (name == "temperature" and isinstance(value, Tensor)):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
                raise TypeError(f"{name}: got {value!r}, expected a number")
        for name, value in (("temperature", self.temperature), ("softcap", self.softcap)):
            if value is not None and not isinstance(value, Tensor) and not 0 < value < math.inf:
                raise ValueError(f"{name}: got {value}, expected a finite number > 0")
            if value is not None and not isinstance(value, Tensor):
                check_fp32_range(name, value)
        if not -math.inf < self.scale < math.inf:
            raise ValueError(f"logit_scale: got {self.scale}, expected a finite number")

    @property
    def inverse_temperature(self) -> float | Tensor:
        return 1.0 / self.temperature

    def rows(self, rows: slice) -> LogitTransform:
        """That of some of the rows."""
        return replace(self, temperature=self.temperature[rows]) if isinstance(self.temperature, Tensor) else self

    def gathered(self, gather: Callable[[Tensor], Tensor]) -> LogitTransform:
        """That of the rows which `gather` picks."""
        return replace(self, temperature=gather(self.temperature)) if isinstance(self.temperature, Tensor) else self

    def apply(self, raw: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """Logits of `raw` and their slope `dz / draw` (a number where it is constant)."""
        if bias is not None:
            raw = raw + bias.to(raw.dtype)
        inverse = _column(self.inverse_temperature)
        slope = self.scale * inverse
        if self.softcap is None:
            return raw * slope, slope
        capped = torch.tanh(raw * (self.scale / self.softcap))
        return capped * (self.softcap * inverse), (1 - capped * capped) * slope

    def slope_at(self, logits: Tensor) -> Tensor | float:
        """`dz / draw` where the logits themselves are known and `raw` is not."""
        slope = self.scale * _column(self.inverse_temperature)
        if self.softcap is None:
            return slope
        capped = logits * (_column(self.temperature) / self.softcap)
        return (1 - capped * capped) * slope


def _column(value: float | Tensor) -> float | Tensor:
    return value.unsqueeze(-1) if isinstance(value, Tensor) else value
