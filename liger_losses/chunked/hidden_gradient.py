"""The hidden gradient: each tile's product of `G` with the weight, whole or of its active columns, at its positions.

With an active vocabulary a tile's `G` is its active columns and a tail of rank one, `t q^T`. The products hold the
columns alone. What a tail adds to row r is `t_r` times its tile's row of `Q W`, which one visit to the weight finds for
all tiles at once. It is added where the products are read to be scaled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import RowTails, matmul, scaled_cast
from .active import TileGradient
from .head import Precision
from .parallel import VocabularyShard
from .problem import rows_summed
from .strategies import PRODUCT_ROWS
from .tile import padded_empty, slices_of
from .tokens import Ranges, ScoredOnDevice, split_ranges

# Profiles add up to 1 over a vocabulary: fp16 has room for this many times as much, and none for what they are.
_PROFILE_UNIT = 2.0**14


class HiddenSums(NamedTuple):
    """What the hidden gradient is made of, by one visit once the row factors are known."""

    kept: Tensor  # [R * T, H] but for the tails
    tails: Tensor | None = None  # [R * T] fp32 (fp64): what a row's tail adds up to
    tiles: Tensor | None = None  # [R * T] int32: whose profile it is spread by; -1: nobody's
    sums: Tensor | None = None  # [tiles, H] fp32 (fp64): `Q W`


class HiddenGradient:
    """`G W` of one tile after the other. Positions that are not scored stay zero."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        scored: ScoredOnDevice,
        precision: Precision,
        shard: VocabularyShard | None,
    ) -> None:
        self._weight, self._scored, self._precision = weight, scored, precision
        make = torch.empty if scored.index is None else torch.zeros
        dtype = precision.compute if shard is None else precision.statistics
        self._kept = make(hidden.shape, dtype=dtype, device=hidden.device)
        self._profiles: list[Tensor] = []
        self._sums: Tensor | None = None
        self._tails = self._tiles = self._kept.new_empty(0)

    def add(self, gradient: TileGradient, ranges: Ranges) -> None:
        """Of the tile at compact `ranges`."""
        entries = gradient.entries
        if entries.shape[0] == 0:
            return
        step = PRODUCT_ROWS if gradient.columns is None else entries.shape[0]
        for piece, rows in zip(split_ranges(ranges, step), slices_of(entries.shape[0], step), strict=True):
            direct = self._scored.index is None and len(piece) == 1
            out = self._kept[slice(*piece[0])] if direct else self._kept.new_empty(
                rows.stop - rows.start, self._kept.shape[1]
            )  # fmt: skip
            if gradient.columns is None:
                matmul(entries[rows], self._weight, out=out)
            else:
                gradient.product(self._weight, out, self._precision.statistics)
            if not direct:
                self._scored.scatter(out, self._kept, piece)
        if gradient.columns is not None:
            self._add_tail(gradient, ranges)

    def _add_tail(self, gradient: TileGradient, ranges: Ranges) -> None:
        assert gradient.profile is not None
        if not self._profiles:
            self._tails = torch.empty(len(self._kept), dtype=self._precision.statistics, device=self._kept.device)
            self._tiles = torch.full_like(self._tails, -1, dtype=torch.int32)
        self._scored.scatter(gradient.tail, self._tails, ranges)
        self._scored.fill(len(self._profiles), self._tiles, ranges)
        self._profiles.append(gradient.profile)

    def expect(self, profile: Tensor | None) -> None:
        """Only this tile is still to come: what its tail needs is begun while its columns are counted."""
        if profile is not None:
            self._sums = self._profile_sums([*self._profiles, profile])

    def sums(self) -> HiddenSums:
        if not self._profiles:
            return HiddenSums(self._kept)
        sums = self._profile_sums(self._profiles) if self._sums is None else self._sums
        return HiddenSums(self._kept, self._tails, self._tiles, sums)

    def _profile_sums(self, each: list[Tensor]) -> Tensor:
        """`Q W`. For 16-bit weights `Q` is two parts, the second of what rounding to 16 bits took from the first."""
        weight, wide, count = self._weight, self._precision.statistics, len(each)
        profiles = torch.stack(each)
        if weight.dtype == wide:
            return profiles @ weight
        profiles.mul_(_PROFILE_UNIT)
        parts = padded_empty(2 * count, weight.shape[0], weight.dtype, weight.device)
        parts[:count] = profiles
        parts[count:] = profiles.sub_(parts[:count])
        both = matmul(parts, weight, out=torch.empty(2 * count, weight.shape[1], dtype=wide, device=weight.device))
        return (both[:count] + both[count:]).div_(_PROFILE_UNIT)


def finish_hidden_gradient(
    sums: HiddenSums, factor: Tensor, dtype: torch.dtype, shard: VocabularyShard | None
) -> Tensor:
    """Rows times `factor` `[R * T]`, of all ranks' columns, rounded once.

    What rows of the head have in common cancels where the ranks' parts meet: rounded before, it would be most of what
    is rounded.
    """
    tails = None
    if sums.tails is not None and sums.tiles is not None and sums.sums is not None:
        tails = RowTails(sums.tails, sums.tiles, sums.sums)
    if shard is None:
        return scaled_cast(sums.kept, factor, dtype, tails)
    out = torch.empty(sums.kept.shape, dtype=dtype, device=sums.kept.device)
    for rows in slices_of(len(out), rows_summed(out.shape[1])):
        own = None if tails is None else RowTails(tails.sizes[rows], tails.which[rows], tails.sums)
        out[rows] = shard.sum(scaled_cast(sums.kept[rows], factor[rows], factor.dtype, own))
    return out
