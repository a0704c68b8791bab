"""Tile kernels: one operation a file, a torch twin of each beside its Triton form."""

from __future__ import annotations

from .bernoulli_tile import INVALID_POSITIVE, BernoulliState, bernoulli_tile
from .dispatch import implementation
from .products import matmul
from .scaled_cast import scaled_cast
from .tile_gradient import tile_gradient
from .tile_statistics import DIFFERENTIABLE, DTYPES, STATISTICS, Emit, RowState, fold_tile
from .transform import LogitTransform

__all__ = [
    "DIFFERENTIABLE",
    "DTYPES",
    "INVALID_POSITIVE",
    "STATISTICS",
    "BernoulliState",
    "Emit",
    "LogitTransform",
    "RowState",
    "bernoulli_tile",
    "fold_tile",
    "implementation",
    "matmul",
    "scaled_cast",
    "tile_gradient",
]
