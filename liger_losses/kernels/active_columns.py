"""Moving the active columns of a vocabulary: out of a gradient tile, out of the weight, into a sum over the vocabulary.

`ids` `[A]` are distinct, so that no entry is written twice. The compacted side may be wider than `A`: where it is
gathered, one more entry stands for all other columns, and what is beyond is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import use_triton


def gather_columns(
    tile: Tensor,  # [rows, V]
    ids: Tensor,  # [A]
    row_sums: Tensor,  # [rows] fp32 (fp64 for fp64)
    out: Tensor,  # [rows, C], C > A
) -> Tensor:
    """`out[:, i] = tile[:, ids[i]]`, and `out[:, A]` is what is missing to the row's sum.

    That is 0 where the sum is no finite number: what makes it so is in a column of its own.
    """
    if out.numel() == 0:
        return out
    if use_triton(tile):
        from .active_columns_triton import gather_columns_triton

        gather_columns_triton(tile, ids, row_sums, out)
        return out
    count = len(ids)
    out[:, :count] = tile.index_select(1, ids)
    missing = row_sums - out[:, :count].sum(-1, dtype=row_sums.dtype)
    out[:, count] = missing.masked_fill_(missing.isfinite().logical_not_(), 0)
    out[:, count + 1 :] = 0
    return out


def gather_rows(
    weight: Tensor,  # [V, H]
    ids: Tensor,  # [A]
    out: Tensor,  # [C, H], C >= A
) -> Tensor:
    """`out[i] = weight[ids[i]]`."""
    if out.numel() == 0:
        return out
    if weight.stride(1) == 1 and use_triton(weight):
        from .active_columns_triton import gather_rows_triton

        gather_rows_triton(weight, ids, out)
        return out
    count = len(ids)
    out[:count] = weight.index_select(0, ids)
    out[count:] = 0
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
    part, ids = part[: len(ids)], ids.long()
    if written is None:
        return total.index_add_(0, ids, part)
    held = written.index_select(0, ids).unsqueeze(-1)
    written.index_fill_(0, ids, True)
    return total.index_copy_(0, ids, part + torch.where(held, total.index_select(0, ids), 0))
