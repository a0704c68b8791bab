"""The rates of GPUs that `plan` reckons with.

One of them was measured, the H200, and its rates stand in one place, `liger_losses.distributed.Rates`, which
`plan_cluster` takes, too: rounded down from the committed results (a test compares them). Of every other GPU the
vendor's data sheet is known, and it is taken to reach the same share of that as the H200 does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

MEASURED = "h200"


@dataclass(frozen=True)
class Gpu:
    """Rates that a head's products and a copy reach: measured, or `*_share` of the data sheet's."""

    name: str
    gib: int
    tflops: float
    tb_s: float
    sheet_tflops: float
    sheet_tb_s: float
    measured: bool

    @property
    def tflops_share(self) -> float:
        return self.tflops / self.sheet_tflops

    @property
    def tb_s_share(self) -> float:
        return self.tb_s / self.sheet_tb_s

    @property
    def source(self) -> str:
        """`basis` in a word or two."""
        return "measured" if self.measured else "data sheet"

    @property
    def basis(self) -> str:
        """Where the rates come from, for whoever reads a figure made of them."""
        if self.measured:
            return "both measured on it, and rounded down"
        return (
            f"not measured, but {self.tflops_share:.0%} and {self.tb_s_share:.0%} of the data sheet's "
            f"{self.sheet_tflops:g} and {self.sheet_tb_s:g}, the shares that an H200 reaches"
        )


def _table() -> dict[str, dict[str, Any]]:
    text = resources.files(__package__).joinpath("gpus.json").read_text()
    found: dict[str, dict[str, Any]] = json.loads(text)["gpus"]
    return found


def gpu_names() -> list[str]:
    """The keys of `gpus()`; imports no torch."""
    return list(_table())


def gpus() -> dict[str, Gpu]:
    from liger_losses.distributed import Rates

    table, rates = _table(), Rates()
    tflops, tb_s = 1e-12 * rates.products, 1e-12 * rates.memory
    products, memory = tflops / table[MEASURED]["sheet_tflops"], tb_s / table[MEASURED]["sheet_tb_s"]
    return {
        key: Gpu(
            **row,
            tflops=round(products * row["sheet_tflops"], 1),
            tb_s=round(memory * row["sheet_tb_s"], 2),
            measured=key == MEASURED,
        )
        for key, row in table.items()
    }
