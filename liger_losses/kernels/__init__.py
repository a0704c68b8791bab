"""Tile and layer kernels: one operation a file, a torch twin of each beside its Triton form."""

from __future__ import annotations

from .active_columns import add_rows, gather_columns, gather_rows
from .bernoulli_tile import INVALID_POSITIVE, BernoulliState, bernoulli_tile
from .column_choice import choose_columns
from .column_extent import ColumnExtent, column_extent
from .dispatch import implementation
from .divergence import DISTILLATION, Divergence, check_of_logits
from .divergence_sums import divergence_share, divergence_sums
from .divergence_tile import (
    NO_DIRECTION,
    Columns,
    DivergenceState,
    TeacherTile,
    divergence_gradient,
    divergence_tile,
    visit_bytes,
)
from .gated_activation import ACTIVATIONS, gated_activation, packed_gated_activation
from .head_mass import head_mask, head_share
from .layer_norm import layer_norm
from .merge_shards import merge_shards, shard_numbers
from .products import matmul
from .registration import differentiable_once, linked, remember_implementation, transformed, wide_dtype
from .rms_norm import CASTING_MODES, fused_add_rms_norm, rms_norm
from .rotary import rotary
from .scaled_cast import RowTails, scaled_cast
from .tailed_cast import tailed_cast
from .tile_gradient import tile_gradient
from .tile_statistics import DIFFERENTIABLE, DTYPES, STATISTICS, Emit, RowState, fold_tile
from .transform import LogitTransform

__all__ = [
    "ACTIVATIONS",
    "CASTING_MODES",
    "DIFFERENTIABLE",
    "DISTILLATION",
    "DTYPES",
    "INVALID_POSITIVE",
    "NO_DIRECTION",
    "STATISTICS",
    "BernoulliState",
    "ColumnExtent",
    "Columns",
    "Divergence",
    "DivergenceState",
    "Emit",
    "LogitTransform",
    "RowState",
    "RowTails",
    "TeacherTile",
    "add_rows",
    "bernoulli_tile",
    "check_of_logits",
    "choose_columns",
    "column_extent",
    "differentiable_once",
    "divergence_gradient",
    "divergence_share",
    "divergence_sums",
    "divergence_tile",
    "fold_tile",
    "fused_add_rms_norm",
    "gated_activation",
    "gather_columns",
    "gather_rows",
    "head_mask",
    "head_share",
    "implementation",
    "layer_norm",
    "linked",
    "matmul",
    "merge_shards",
    "packed_gated_activation",
    "remember_implementation",
    "rms_norm",
    "rotary",
    "scaled_cast",
    "shard_numbers",
    "tailed_cast",
    "tile_gradient",
    "transformed",
    "visit_bytes",
    "wide_dtype",
]
