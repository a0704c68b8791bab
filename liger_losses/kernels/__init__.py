"""Tile kernels: one operation a file, a torch twin of each beside its Triton form."""

from __future__ import annotations

from .bernoulli_tile import INVALID_POSITIVE, BernoulliState, bernoulli_tile
from .dispatch import implementation
from .divergence import DISTILLATION, Divergence
from .divergence_tile import Columns, DivergenceState, TeacherTile, divergence_gradient, divergence_tile
from .products import matmul
from .scaled_cast import scaled_cast
from .tile_gradient import tile_gradient
from .tile_statistics import DIFFERENTIABLE, DTYPES, STATISTICS, Emit, RowState, fold_tile
from .transform import LogitTransform

__all__ = [
    "DIFFERENTIABLE",
    "DISTILLATION",
    "DTYPES",
    "INVALID_POSITIVE",
    "STATISTICS",
    "BernoulliState",
    "Columns",
    "Divergence",
    "DivergenceState",
    "Emit",
    "LogitTransform",
    "RowState",
    "TeacherTile",
    "bernoulli_tile",
    "divergence_gradient",
    "divergence_tile",
    "fold_tile",
    "implementation",
    "matmul",
    "scaled_cast",
    "tile_gradient",
]
