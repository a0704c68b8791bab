"""The backward of strategy `recompute`: the logits once more, all tokens over one vocabulary block after the other.

Apart from `deferred`, whose other strategies multiply or scale in backward what their forward kept: this one kept none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import DivergenceState, TeacherTile, bernoulli_tile, divergence_gradient, matmul, tile_gradient
from .head_tensors import logit_coefficients
from .teacher import Teacher
from .walk import TileWalk
from .weight_gradient import power_of_two_at_least


def backward_recompute(
    walk: TileWalk,
    needs: tuple[bool, bool, bool],
    coefficients: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    lse: Tensor,
    entropy: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias.

    A block of columns finishes its rows of `dW` by one product over all tokens, so that no `[V, H]` sum exists.
    """
    count, compute, wide = walk.scored.count, walk.precision.compute, walk.precision.statistics
    device, everything = walk.hidden.device, ((0, count),)
    vocab, width = walk.weight.shape
    tile = walk.tile(everything)

    def compact(values: Tensor | None) -> Tensor | None:
        return None if values is None else walk.scored.gather(values, everything)

    second = _Second.of(walk, lse)
    lse = lse[0] if second is not None else lse
    # All coefficients are known here, so they go into the tile; fp16 keeps a common power of two outside.
    parts = [compact(part) for part in coefficients]
    unit = None
    if compute == torch.float16 and count:
        unit = power_of_two_at_least(torch.cat([part for part in parts if part is not None]))
        parts = [None if part is None else part / unit for part in parts]
    dlogprob, dentropy, *rest = parts
    dlse, dlogit = logit_coefficients(rest[0], rest[1], walk.all_columns, walk.tensors.column_weights)
    assert dlogprob is not None
    row_lse, row_entropy = walk.scored.gather(lse, everything), compact(entropy)

    d_hidden = torch.zeros(count, width, dtype=wide, device=device) if needs[0] else None
    d_weight = torch.empty(vocab, width, dtype=dtypes[1], device=device) if needs[1] else None
    d_bias = torch.empty(vocab, dtype=dtypes[2], device=device) if needs[2] else None
    ones = torch.ones(count, 1, dtype=compute, device=device) if needs[2] else None
    step = walk.plan.vocab_block
    logits = torch.empty(count, step, dtype=walk.precision.logits, device=device)
    gradient = logits if walk.precision.logits == compute else torch.empty(count, step, dtype=compute, device=device)
    for start in range(0, vocab, step):
        block = slice(start, min(start + step, vocab))
        columns = block.stop - block.start
        rows, out = logits[:, :columns], gradient[:, :columns]
        matmul(tile.hidden, walk.weight[block].t(), out=rows)
        bias, weights = (None if t is None else t[block] for t in (walk.bias, walk.column_weights))
        first = walk.first_column + start
        if second is not None:
            divergence_gradient(
                rows, bias, tile.target, second.block(start, block.stop), second.state, tile.transform,
                second.teacher.columns(vocab).block(start, block.stop), factor=dlogprob, out=out, first_column=first,
            )  # fmt: skip
        elif tile.positives is not None:
            bernoulli_tile(rows, bias, tile.positives, tile.transform, out=out, factor=dlogprob, first_column=first)
        else:
            tile_gradient(
                rows,
                bias,
                tile.target,
                lse=row_lse,
                logprob=row_lse,
                entropy=row_entropy,
                dlogprob=dlogprob,
                dentropy=dentropy,
                dlse=dlse,
                dlogit=dlogit,
                column_weights=weights,
                transform=tile.transform,
                out=out,
                first_column=first,
            )
        if d_hidden is not None:
            matmul(out, walk.weight[block], out=d_hidden, accumulate=True)
        if d_weight is not None:
            _block_product(out, tile.hidden, d_weight[block], unit, wide)
        if d_bias is not None and ones is not None:
            _block_product(out, ones, d_bias[block].unsqueeze(-1), unit, wide)
    del logits, gradient, rows, out, tile, second  # before the hidden gradient is cast
    return _positions(walk, d_hidden, unit, dtypes[0]), d_weight, d_bias


class _Second:
    """The teacher of all scored tokens, a block of its vocabulary at a time, and what forward knew of its rows."""

    def __init__(self, walk: TileWalk, teacher: Teacher, kept: Tensor) -> None:
        self._walk, self.teacher = walk, teacher
        everything = ((0, walk.scored.count),)
        rows = torch.stack([walk.scored.gather(row, everything) for row in kept])
        self.state = DivergenceState.of_kept(rows, teacher.divergence)
        self._hidden = self._buffer = None
        if teacher.hidden is not None:
            self._hidden = walk.scored.gather(teacher.hidden, everything).to(walk.precision.compute)
            size = (walk.scored.count, walk.plan.vocab_block)
            self._buffer = torch.empty(size, dtype=walk.precision.logits, device=walk.hidden.device)

    @classmethod
    def of(cls, walk: TileWalk, kept: Tensor) -> _Second | None:
        teacher = walk.teacher
        return None if teacher is None else cls(walk, teacher, kept)

    def block(self, start: int, stop: int) -> TeacherTile:
        """Its logits of the columns `[start, stop)`, as far as it has them."""
        columns = self.teacher.columns(self._walk.vocab_size).block(start, stop).teacher
        some = slice(start, start + columns)
        if self._hidden is None or self._buffer is None:
            assert self.teacher.logits is not None
            rows = self._walk.scored.gather(self.teacher.logits[:, some], ((0, self._walk.scored.count),))
        else:
            assert self.teacher.weight is not None
            rows = matmul(self._hidden, self.teacher.weight[some].t(), out=self._buffer[:, :columns])
        return self.teacher.tile(rows, some)


def _block_product(gradient: Tensor, right: Tensor, out: Tensor, unit: Tensor | None, wide: torch.dtype) -> None:
    if unit is None and out.dtype == gradient.dtype:
        matmul(gradient.t(), right, out=out)
        return
    total = torch.empty(out.shape, dtype=wide, device=out.device)
    matmul(gradient.t(), right, out=total)
    out.copy_(total if unit is None else total.mul_(unit))


def _positions(walk: TileWalk, d_hidden: Tensor | None, unit: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if d_hidden is None:
        return None
    if unit is not None:
        d_hidden.mul_(unit)
    part = dtype if walk.shard is None else d_hidden.dtype
    full = d_hidden.to(part)
    if walk.scored.index is not None:
        full = torch.zeros(walk.hidden.shape, dtype=part, device=d_hidden.device)
        walk.scored.scatter(d_hidden, full, ((0, walk.scored.count),))
    return full if walk.shard is None else walk.shard.sum(full).to(dtype)
