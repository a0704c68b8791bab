"""From a projected row to logits: `z = softcap * tanh(scale * (r + b) / softcap) / temperature`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its logits after the projection: scale first, then softcap, then temperature."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        # Comparisons, which NaN fails: they trace where torch.compile makes numbers symbolic, math.isfinite does not.
        for name, value in (("logit_scale", self.scale), ("softcap", self.softcap), ("temperature", self.temperature)):
            if name == "softcap" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
                raise TypeError(f"{name}: got {value!r}, expected a number")
        for name, value in (("temperature", self.temperature), ("softcap", self.softcap)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}: got {value}, expected a finite number > 0")
        if not -math.inf < self.scale < math.inf:
            raise ValueError(f"logit_scale: got {self.scale}, expected a finite number")

    @property
    def inverse_temperature(self) -> float:
        return 1.0 / self.temperature

    def apply(self, raw: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """Logits of `raw` and their slope `dz / draw` (a number where it is constant)."""
        if bias is not None:
            raw = raw + bias.to(raw.dtype)
        slope = self.scale * self.inverse_temperature
        if self.softcap is None:
            return raw * slope, slope
        capped = torch.tanh(raw * (self.scale / self.softcap))
        return capped * (self.softcap * self.inverse_temperature), (1 - capped * capped) * slope

    def slope_at(self, logits: Tensor) -> Tensor | float:
        """`dz / draw` where the logits themselves are known and `raw` is not."""
        slope = self.scale * self.inverse_temperature
        if self.softcap is None:
            return slope
        capped = logits * (self.temperature / self.softcap)
        return (1 - capped * capped) * slope
