"""A head whose vocabulary is spread over ranks: each projects its own columns, and numbers per token are merged.

What a rank reads off its columns are partial results, as those of a block of columns are. A tile's states are gathered
in one small collective and folded on every rank alike, so that all ranks go on with the same bits. Nothing of the size
of a logits tile or of the weight is communicated; the hidden gradient, a sum over columns, is reduced in backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import (
    BernoulliState,
    Columns,
    DivergenceState,
    LogitTransform,
    RowState,
    TeacherTile,
    divergence_gradient,
    divergence_share,
    divergence_sums,
    divergence_tile,
    fold_tile,
    merge_shards,
    shard_numbers,
)

# Its former name is all that torch has up to 2.12.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@dataclass(frozen=True)
class VocabularyShard:
    """Which columns of the vocabulary this rank holds, and the group that holds them all."""

    group: str  # name of the process group
    bounds: tuple[int, ...]  # rank r of the group holds the columns [bounds[r], bounds[r + 1])

    @cached_property
    def process_group(self) -> dist.ProcessGroup:
        # Operators take no objects; a name is what torch's functional collectives resolve, too.
        resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
        return resolve(self.group)

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    @property
    def first(self) -> int:
        return self.bounds[self.rank]

    @property
    def vocab_size(self) -> int:
        return self.bounds[-1]

    @property
    def largest(self) -> int:
        """Columns of the largest shard: what every rank plans for, so that all walk the same tiles."""
        return max(stop - start for start, stop in pairwise(self.bounds))

    @property
    def columns(self) -> slice:
        rank = self.rank
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def encode(self) -> str:
        return ";".join([",".join(map(str, self.bounds)), self.group])

    @classmethod
    def decode(cls, text: str) -> VocabularyShard | None:
        if not text:
            return None
        bounds, group = text.split(";", 1)
        return cls(group, tuple(map(int, bounds.split(","))))

    def gather(self, numbers: Tensor) -> Tensor:
        """`[ranks, ...]`, in the order of the columns."""
        everyone = numbers.new_empty((len(self.bounds) - 1) * numbers.shape[0], *numbers.shape[1:])
        getattr(dist, _GATHER)(everyone, numbers, group=self.process_group)
        return everyone.view(-1, *numbers.shape)

    def sum(self, numbers: Tensor) -> Tensor:
        """In place."""
        dist.all_reduce(numbers, group=self.process_group)
        return numbers


def merge(shard: VocabularyShard, state: RowState | BernoulliState | DivergenceState, target: Tensor) -> None:
    """From this rank's columns to all columns, in place; one collective. Divergences are merged as they are visited."""
    if isinstance(state, BernoulliState):
        shard.sum(state.total)
    elif isinstance(state, RowState) and target.shape[0]:
        merge_shards(shard.gather(shard_numbers(state)), state, target)


def visit_divergence(
    shard: VocabularyShard,
    tile: Tensor,  # [rows, columns] of this rank
    bias: Tensor | None,
    target: Tensor,  # [rows], columns of the whole vocabulary
    teacher: TeacherTile,  # the same columns of the teacher
    state: DivergenceState,
    transform: LogitTransform,
    out: Tensor | None,
) -> None:
    """What `divergence_tile` does to whole rows, where every rank has some of the columns; two collectives.

    The normalisers first, then the sums that are relative to them, then the gradient: each a visit to both tiles. In
    between adaptive KL looks for the teacher's head, with one collective for each bit of a probability, and two more.
    """
    if tile.shape[0] == 0:
        return
    options, first = state.divergence, shard.first
    of_logits = options.form in ("cosine", "mse")
    # Of these rows alone: their numbers lie side by side, as collectives want them.
    own = DivergenceState(tile.shape[0], state.names, options, device=tile.device, dtype=state.total.dtype)
    _normalisers(shard, tile, bias, target, teacher, own, transform, of_logits)
    if of_logits:
        _compare_logits(shard, tile, bias, target - first, teacher, own, transform)
    else:
        if options.form == "akl":
            divergence_share(tile, bias, teacher, own, transform, shard.sum, shard.largest)
        divergence_sums(tile, bias, teacher, own, transform)
        shard.sum(own.sums)
    if out is not None:
        columns = Columns(tile.shape[1], tile.shape[1])
        divergence_gradient(
            tile, bias, target, teacher, own, transform, columns, factor=own.gradient_scale, out=out,
            first_column=first,
        )  # fmt: skip
    state.numbers.copy_(own.numbers)


def _normalisers(
    shard: VocabularyShard,
    tile: Tensor,
    bias: Tensor | None,
    target: Tensor,
    teacher: TeacherTile,
    state: DivergenceState,
    transform: LogitTransform,
    of_logits: bool,
) -> None:
    """Log-sum-exps, entropies and the label's logit; all that is folded for them is merged as rows of one state."""
    options, rows = state.divergence, tile.shape[0]
    inverse_student, inverse_teacher = options.inverse_temperatures
    compared = not of_logits or state.entropy is not None
    separate = state.reads_label and (not compared or options.temperature != 1)
    sides: list[tuple[Tensor, Tensor | None, LogitTransform]] = []
    if compared:
        other = teacher.transform
        sides = [
            (tile, bias, _tempered(transform, inverse_student)),
            (teacher.logits, teacher.bias, _tempered(other, inverse_teacher)),
        ]
    if separate:
        sides.append((tile, bias, transform))
    if not sides:
        return
    names = ("entropy",) if state.entropy is not None else ()
    found = RowState(len(sides) * rows, names, device=tile.device, dtype=state.total.dtype)
    for place, (logits, shift, own) in enumerate(sides):
        part = found.narrow(place * rows, rows)
        fold_tile(logits, shift, target, part, own, first_column=shard.first)
    merge(shard, found, target)  # which reads no target: nobody asked whether it is the largest
    lse, hard = found.lse.view(-1, rows), len(sides) - 1 if separate else 0
    if compared:
        state.lse[:2].copy_(lse[:2])
    if state.reads_label:
        state.hard_lse.copy_(lse[hard])
        state.target.copy_(found.target[hard * rows :][:rows])
    if state.entropy is not None and state.teacher_entropy is not None:
        entropies = found.statistics(shard.vocab_size)["entropy"]
        state.entropy.copy_(entropies[:rows])
        state.teacher_entropy.copy_(entropies[rows : 2 * rows])


def _tempered(transform: LogitTransform, inverse: float) -> LogitTransform:
    return transform if inverse == 1 else replace(transform, temperature=transform.temperature / inverse)


def _compare_logits(
    shard: VocabularyShard,
    tile: Tensor,
    bias: Tensor | None,
    target: Tensor,
    teacher: TeacherTile,
    state: DivergenceState,
    transform: LogitTransform,
) -> None:
    """Cosine and squared error, from what each rank finds of its own columns: every term is >= 0 here, too."""
    own = DivergenceState(len(tile), (), state.divergence, device=tile.device, dtype=state.total.dtype)
    columns = Columns(tile.shape[1], tile.shape[1])
    divergence_tile(tile, bias, target, teacher, own, transform, columns)
    everyone = shard.gather(torch.stack([own.student_lse, own.teacher_lse, own.total, own.value]))
    a, b, cosine, value = everyone.unbind(1)
    if state.divergence.form == "mse":
        sizes = [stop - start for start, stop in pairwise(shard.bounds)]
        state.value.copy_(torch.stack([mean * size for mean, size in zip(value, sizes, strict=True)]).sum(0))
        state.value.div_(shard.vocab_size)
        state.total.fill_(1 / shard.vocab_size)
        return
    # A rank whose columns have no direction, an infinite norm, has no part in that of all.
    a, b = (norms.masked_fill(norms.isinf(), 0) for norms in (a, b))
    norm_a, norm_b = (norms.square().sum(0).sqrt() for norms in (a, b))
    norm_a, norm_b = (norms.masked_fill(norms == 0, math.inf) for norms in (norm_a, norm_b))
    part_a, part_b = a / norm_a, b / norm_b
    state.student_lse.copy_(norm_a)
    state.teacher_lse.copy_(norm_b)
    state.total.copy_((part_a * part_b * cosine).sum(0))
    # |x - y|^2 = (|x| - |y|)^2 + 2 |x| |y| (1 - cos), rank by rank, and a half where one is no unit.
    half = (norm_a.isinf() ^ norm_b.isinf()) / 2
    state.value.copy_(((part_a - part_b).square() / 2 + part_a * part_b * value).sum(0) + half)
