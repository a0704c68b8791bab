"""Logits (or probabilities) of a tile -> gradient with respect to the projected rows, for any coefficients.

With `a = dL/dlogprob`, `h = dL/dentropy`, `l = dL/dlse`, `m = dL/dz_v` where it is the same for every column up to the
column's weight `c_v`:

    dL/draw_v = (a (1[v = y] - p_v) - h p_v (log p_v + entropy) + l p_v + m c_v) * dz_v/draw_v

A row whose coefficients are all 0 has a zero gradient, whatever its logits hold. `1 - p` at the target is formed from
the target's own fp32 log-probability, also when the tile holds rounded `p`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import use_triton
from .tile_statistics import row_slices
from .transform import LogitTransform


def tile_gradient(
    tile: Tensor,  # [rows, columns]: projected rows, or p
    bias: Tensor | None,  # [columns]
    target: Tensor,  # [rows] int64, column of the whole vocabulary
    *,
    lse: Tensor,  # [rows]
    logprob: Tensor,  # [rows]
    entropy: Tensor | None,  # [rows], needed with dentropy
    dlogprob: Tensor,  # [rows] a
    dentropy: Tensor | None,  # [rows] h
    dlse: Tensor | None,  # [rows] l
    dlogit: Tensor | None = None,  # [rows] m
    column_weights: Tensor | None = None,  # [columns] c; None: 1
    transform: LogitTransform,
    out: Tensor,  # [rows, columns], may be `tile`
    first_column: int = 0,
    probability_scale: Tensor | None = None,  # [rows]: the tile holds p up to this factor
) -> None:
    """Write the gradient of one tile to `out`, rounded once to its dtype."""
    if tile.shape[0] == 0:
        return
    if use_triton(tile):
        from .tile_gradient_triton import tile_gradient_triton

        tile_gradient_triton(
            tile, bias, target, lse, logprob, entropy, dlogprob, dentropy, dlse, dlogit, column_weights, transform,
            out, first_column, probability_scale,
        )  # fmt: skip
        return

    def at(values: Tensor, rows: slice) -> Tensor:
        return values[rows].unsqueeze(-1)

    columns = torch.arange(first_column, first_column + tile.shape[1], device=tile.device)
    for rows in row_slices(tile):
        is_target = columns == at(target, rows)
        own = transform.rows(rows)
        slope: Tensor | float
        if probability_scale is not None:
            p = tile[rows].to(lse.dtype) * at(probability_scale, rows)
            p = torch.where(is_target, torch.exp(at(logprob, rows)), p)
            logp = torch.where(p > 0, torch.log(p), torch.zeros_like(p))
            slope = own.slope_at(logp + at(lse, rows))
        else:
            z, slope = own.apply(tile[rows].to(lse.dtype), bias)
            logp = z - at(lse, rows)
            p = torch.exp(logp)
        gradient = at(dlogprob, rows) * (is_target.to(p.dtype) - p)
        if dentropy is not None:
            assert entropy is not None
            information = torch.where(p > 0, p * (logp + at(entropy, rows)), torch.zeros_like(p))
            gradient = gradient - at(dentropy, rows) * information
        if dlse is not None:
            gradient = gradient + at(dlse, rows) * p
        if dlogit is not None:
            each = at(dlogit, rows)
            gradient = gradient + (each if column_weights is None else each * column_weights.to(p.dtype))
        used = [c for c in (dlogprob, dentropy, dlse, dlogit) if c is not None]
        active = torch.stack([at(c, rows) != 0 for c in used]).any(0)
        out[rows] = torch.where(active, gradient * slope, 0).to(out.dtype)
