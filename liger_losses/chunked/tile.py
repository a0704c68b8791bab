"""Scored tokens that are walked together, and what a loss sends back to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import LogitTransform
from .problem import padded_columns
from .tokens import Ranges, split_ranges


def padded_empty(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[rows, columns]` with rows on 8-element boundaries, so that an odd vocabulary keeps the aligned product path."""
    return torch.empty(rows, padded_columns(columns), dtype=dtype, device=device)[:, :columns]


@dataclass(frozen=True)
class Coefficients:
    """`dL/dstatistic` per token, split into a factor per row and what is left for the tile.

    With log-probabilities alone the factor is `dL/dlogprob` and the tile is the same for every loss. Otherwise the
    factor is the largest of them in size, so that the tile's entries are of order `p` in every dtype.
    """

    factor: Tensor  # [n]
    dlogprob: Tensor | None = None  # [n], relative to the factor
    dentropy: Tensor | None = None
    dlse: Tensor | None = None
    dmean_logprob: Tensor | None = None

    @classmethod
    def of(
        cls,
        given: tuple[Tensor | None, ...],  # in the order of DIFFERENTIABLE
        like: Tensor,
        *,
        only_logprob: bool,  # the tile holds G; otherwise it holds p, also where all others turn out to be None
    ) -> Coefficients:
        if only_logprob:
            return cls(torch.zeros_like(like) if given[0] is None else given[0])
        parts = torch.stack([torch.zeros_like(like) if part is None else part for part in given])
        size = parts.abs().amax(0)
        relative = parts / torch.where(size == 0, torch.ones_like(size), size)
        return cls(size, relative[0], *(None if part is None else relative[i] for i, part in enumerate(given) if i))

    def rows(self, rows: slice) -> Coefficients:
        """Those of some of the tokens."""
        parts = (self.dlogprob, self.dentropy, self.dlse, self.dmean_logprob)
        return Coefficients(self.factor[rows], *(None if part is None else part[rows] for part in parts))


@dataclass(frozen=True)
class TokenTile:
    """Some scored tokens, gathered."""

    ranges: Ranges  # in compact order
    hidden: Tensor  # [n, H] in the compute dtype
    target: Tensor  # [n]
    transform: LogitTransform
    positives: Tensor | None  # [n, P]

    def slices(self, step: int) -> list[tuple[slice, TokenTile]]:
        """The tile in pieces of `step` rows."""
        pieces = split_ranges(self.ranges, step)
        return [
            (rows, self._rows(rows, piece))
            for rows, piece in zip(slices_of(len(self.hidden), step), pieces, strict=False)
        ]

    def _rows(self, rows: slice, ranges: Ranges) -> TokenTile:
        positives = None if self.positives is None else self.positives[rows]
        return TokenTile(ranges, self.hidden[rows], self.target[rows], self.transform.rows(rows), positives)


def slices_of(count: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
