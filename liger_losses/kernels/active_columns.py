"""Moving the active columns of a vocabulary: out of a gradient tile, out of the weight, into a sum over the vocabulary.

`ids` `[A]` are distinct, so that no entry is written twice. The compacted side may be wider than `A`: what is beyond is
written as 0, and not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import use_triton


def gather_columns(
    tile: Tensor,  # [rows, V]
    ids: Tensor,  # [A] int64
    out: Tensor,  # [rows, C], C >= A
) -> Tensor:
    """`out[:, i] = tile[:, ids[i]]`."""
    if out.numel() == 0 or len(ids) == 0:
        return out.zero_()
    if use_triton(tile):
        from .active_columns_triton import gather_columns_triton

        gather_columns_triton(tile, ids, out)
        return out
    out[:, : len(ids)] = tile.index_select(1, ids)
    out[:, len(ids) :] = 0
    return out


def gather_rows(
    weight: Tensor,  # [V, H]
    ids: Tensor,  # [A] int64
    out: Tensor,  # [C, H], C >= A
) -> Tensor:
    """`out[i] = weight[ids[i]]`."""
    if out.numel() == 0 or len(ids) == 0:
        return out.zero_()
    if use_triton(weight):
        from .active_columns_triton import gather_rows_triton

        gather_rows_triton(weight, ids, out)
        return out
    out[: len(ids)] = weight.index_select(0, ids)
    out[len(ids) :] = 0
    return out


def add_rows(
    total: Tensor,  # [V, H], updated
    written: Tensor | None,  # [V] bool, updated: rows of `total` that hold something; None: all do
    ids: Tensor,  # [A]
    part: Tensor,  # [C, H], C >= A
) -> Tensor:
    """`total[ids[i]] += part[i]`, or `=` in rows that hold nothing yet."""
    if len(ids) == 0 or part.numel() == 0:
        return total
    if use_triton(total):
        from .active_columns_triton import add_rows_triton

        add_rows_triton(total, written, ids, part)
        return total
    part = part[: len(ids)]
    if written is None:
        return total.index_add_(0, ids, part)
    held = written.index_select(0, ids).unsqueeze(-1)
    written.index_fill_(0, ids, True)
    return total.index_copy_(0, ids, part + torch.where(held, total.index_select(0, ids), 0))
