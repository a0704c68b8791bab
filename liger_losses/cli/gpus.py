"""The rates of GPUs, as far as they are known here. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Gpu:
    """Rates that a head's products and a copy reach."""

    name: str
    gib: int
    tflops: float
    tb_s: float
    measured: bool


def gpus() -> dict[str, Gpu]:
    table = json.loads(resources.files(__package__).joinpath("gpus.json").read_text())
    return {key: Gpu(**row) for key, row in table["gpus"].items()}
