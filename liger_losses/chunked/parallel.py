"""A head whose vocabulary is spread over ranks: each projects its own columns, and numbers per token are merged.

What a rank reads off its columns are partial results, as those of a block of columns are. A tile's states are gathered
in one small collective and folded on every rank alike, so that all ranks go on with the same bits. Nothing of the size
of a logits tile or of the weight is communicated; the hidden gradient, a sum over columns, is reduced once a call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
)

# Its former name is all that torch has up to 2.12.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

_ADDED = ("sum_logits", "sum_columns")


@dataclass(frozen=True)
class VocabularyShard:
    """Which columns of the vocabulary this rank holds, and the group that holds them all."""

    group: str  # name of the process group
    bounds: tuple[int, ...]  # rank r of the group holds the columns [bounds[r], bounds[r + 1])
    reduce_hidden: bool = True  # False: the hidden gradient is handed back as this rank's part of a sum

    @property
    def process_group(self) -> dist.ProcessGroup:
        # Operators take no objects; a name is what torch's functional collectives resolve, too.
        resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
        return resolve(self.group)

    @property
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
        return ";".join([str(int(self.reduce_hidden)), ",".join(map(str, self.bounds)), self.group])

    @classmethod
    def decode(cls, text: str) -> VocabularyShard | None:
        if not text:
            return None
        reduce_hidden, bounds, group = text.split(";", 2)
        return cls(group, tuple(map(int, bounds.split(","))), bool(int(reduce_hidden)))

    def gather(self, numbers: Tensor) -> Tensor:
        """`[ranks, ...]`, in the order of the columns."""
        everyone = numbers.new_empty((len(self.bounds) - 1) * numbers.shape[0], *numbers.shape[1:])
        getattr(dist, _GATHER)(everyone, numbers, group=self.process_group)
        return everyone.view(-1, *numbers.shape)

    def sum(self, numbers: Tensor) -> Tensor:
        """In place."""
        dist.all_reduce(numbers, group=self.process_group)
        return numbers

    def finish_hidden(self, gradient: Tensor | None) -> Tensor | None:
        """The hidden gradient of all columns, from this rank's."""
        if gradient is None or not self.reduce_hidden:
            return gradient
        return self.sum(gradient.contiguous())


def merge(shard: VocabularyShard, state: RowState | BernoulliState | DivergenceState, target: Tensor) -> None:
    """From this rank's columns to all columns, in place; one collective. Divergences are merged as they are visited."""
    if isinstance(state, BernoulliState):
        shard.sum(state.total)
    elif isinstance(state, RowState):
        merge_rows(shard, [state], target)


def merge_rows(shard: VocabularyShard, states: Sequence[RowState], target: Tensor) -> None:
    """The same for several states of the same rows, packed into one collective."""
    if states[0].max.shape[0] == 0:
        return
    wide = states[0].max.dtype
    packed = [[value.to(wide) for _name, value in _numbers(state)] for state in states]
    everyone = shard.gather(torch.stack([value for values in packed for value in values]))
    done = 0
    for state, values in zip(states, packed, strict=True):
        _fold(state, everyone[:, done : done + len(values)])
        done += len(values)
        if state.is_top1 is not None and state.argmax is not None:
            torch.eq(state.argmax, target, out=state.is_top1)


def _numbers(state: RowState) -> list[tuple[str, Tensor]]:
    # A column's number, as a float of the statistics' dtype, is exact up to 2^24.
    names = ("max", "sum_exp", "target", "weighted", "sum_sq", *_ADDED, "argmax")
    return [(name, value) for name in names if (value := getattr(state, name)) is not None]


def _fold(state: RowState, everyone: Tensor) -> None:
    """`everyone` is `[ranks, numbers, rows]`."""
    parts = {name: everyone[:, i] for i, (name, _value) in enumerate(_numbers(state))}
    highest = parts["max"].amax(0)
    # A shard that is -inf throughout (a masked vocabulary) adds nothing: -inf - -inf is no number.
    shift = torch.where(parts["max"] == -math.inf, torch.zeros_like(parts["max"]), parts["max"] - highest)
    rescale = torch.exp(shift)
    total = (rescale * parts["sum_exp"]).sum(0)
    # What `emit` wrote is relative to this rank's own sum.
    own = state.sum_exp * torch.exp(torch.where(state.max == -math.inf, 0, state.max - highest))
    scale = state.gradient_scale * torch.where(total > 0, own / total, own)
    # Where this rank has nothing and others something, its entries are 0 up to an infinite factor.
    state.gradient_scale.copy_(scale.masked_fill((own == 0) & (total > 0), 0))
    if state.weighted is not None:
        state.weighted.copy_((rescale * (parts["weighted"] + shift * parts["sum_exp"])).sum(0))
    if state.sum_sq is not None:
        state.sum_sq.copy_((rescale * rescale * parts["sum_sq"]).sum(0))
    for name in _ADDED:
        if name in parts:
            getattr(state, name).copy_(parts[name].sum(0))
    if state.argmax is not None:
        # Ties go to the first column, and ranks are in the order of their columns.
        winner = parts["max"].argmax(0, keepdim=True)
        state.argmax.copy_(parts["argmax"].gather(0, winner).squeeze(0))
    seen = ~parts["target"].isnan()
    found = torch.where(seen, parts["target"], 0).sum(0)
    state.target.copy_(torch.where(seen.any(0), found, math.nan))
    state.sum_exp.copy_(total)
    state.max.copy_(highest)


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
    _normalisers(shard, tile, bias, target, teacher, state, transform, of_logits)
    if of_logits:
        _compare_logits(shard, tile, bias, target - first, teacher, state, transform)
    else:
        if options.form == "akl":
            divergence_share(tile, bias, teacher, state, transform, shard.sum, shard.largest)
        divergence_sums(tile, bias, teacher, state, transform)
        value, total = shard.sum(torch.stack([state.value, state.total]))
        state.value.copy_(value)
        state.total.copy_(total)
    if out is not None:
        columns = Columns(tile.shape[1], tile.shape[1])
        divergence_gradient(
            tile, bias, target, teacher, state, transform, columns, factor=torch.ones_like(state.total), out=out,
            first_column=first,
        )  # fmt: skip


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
    options, rows = state.divergence, tile.shape[0]
    names = ("entropy",) if state.entropy is not None else ()
    inverse_student, inverse_teacher = options.inverse_temperatures

    def fold(logits: Tensor, shift: Tensor | None, own: LogitTransform, names: tuple[str, ...]) -> RowState:
        found = RowState(rows, names, device=tile.device, dtype=state.total.dtype)
        fold_tile(logits, shift, target, found, own, first_column=shard.first)
        return found

    compared = not of_logits or state.entropy is not None
    separate = state.reads_label and (not compared or options.temperature != 1)
    states: list[RowState] = []
    if compared:
        tempered = replace(transform, temperature=transform.temperature / inverse_student)
        other = replace(teacher.transform, temperature=teacher.transform.temperature / inverse_teacher)
        states = [fold(tile, bias, tempered, names), fold(teacher.logits, teacher.bias, other, names)]
    if separate:
        states.append(fold(tile, bias, transform, ()))
    if not states:
        return
    merge_rows(shard, states, target)
    if compared and not of_logits:
        state.student_lse.copy_(states[0].lse)
        state.teacher_lse.copy_(states[1].lse)
    if state.entropy is not None and state.teacher_entropy is not None:
        state.entropy.copy_(states[0].statistics(shard.vocab_size)["entropy"])
        state.teacher_entropy.copy_(states[1].statistics(shard.vocab_size)["entropy"])
    if state.reads_label:
        label = states[-1] if separate else states[0]
        state.hard_lse.copy_(label.lse)
        state.target.copy_(label.target)


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
    norm_a, norm_b = (norms.square().sum(0).sqrt() for norms in (a, b))
    part_a, part_b = a / norm_a, b / norm_b
    state.student_lse.copy_(norm_a)
    state.teacher_lse.copy_(norm_b)
    state.total.copy_((part_a * part_b * cosine).sum(0))
    # |x - y|^2 = (|x| - |y|)^2 + 2 |x| |y| (1 - cos), rank by rank.
    state.value.copy_(((part_a - part_b).square() / 2 + part_a * part_b * value).sum(0))
