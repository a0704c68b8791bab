"""The tile walk: project some tokens, read their statistics, form what the gradient products need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels import (
    BernoulliState,
    Columns,
    DivergenceState,
    Emit,
    LogitTransform,
    RowState,
    TeacherTile,
    bernoulli_tile,
    divergence_gradient,
    divergence_tile,
    fold_tile,
    matmul,
    tile_gradient,
)
from .active import ActiveVocabulary, HostCount, Selection, TileGradient, Weighed, begin, unweighed
from .head import Precision
from .head_tensors import HeadTensors, logit_coefficients
from .hidden_gradient import HiddenGradient
from .parallel import VocabularyShard, merge, visit_divergence
from .problem import Plan
from .tile import Coefficients, TokenTile, padded_empty
from .tokens import Ranges, ScoredOnDevice
from .weight_gradient import WeightGradient

State = RowState | BernoulliState | DivergenceState


class TileWalk:
    """One call's tensors and buffers, and the steps that every strategy is made of."""

    def __init__(
        self,
        hidden: Tensor,  # [R * T, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,
        scored: ScoredOnDevice,
        transform: LogitTransform,
        precision: Precision,
        plan: Plan,
        tensors: HeadTensors,
        active: ActiveVocabulary | None = None,
        shard: VocabularyShard | None = None,
    ) -> None:
        self.hidden = hidden
        self.weight = weight.to(precision.compute)
        self.bias = bias
        self.scored = scored
        self.tensors = tensors.to(precision.statistics)
        self.teacher = None if tensors.teacher is None else tensors.teacher.computed(precision)
        temperature = self.tensors.temperature
        self.transform = transform if temperature is None else replace(transform, temperature=temperature)
        self.precision = precision
        self.plan = plan
        self.active = active
        if active is not None:
            begin()
        self._count = HostCount()  # of a tile's active columns
        self._flat = False  # a tile had too many active columns: those that follow will have, too
        self._ahead: TokenTile | None = None  # whose first logits are in the buffer already
        self._left: TileGradient | None = None  # a tile whose products were left for later
        self._behind: list[Callable[[], None]] = []  # those
        self._teacher_ahead: tuple[Ranges, TeacherTile] | None = None
        self.shard = shard
        self.first_column = 0 if shard is None else shard.first
        self._logits: Tensor | None = None
        self._teacher_logits: Tensor | None = None

    @property
    def vocab_size(self) -> int:
        """Columns here."""
        return self.weight.shape[0]

    @property
    def all_columns(self) -> int:
        """Columns on all ranks."""
        return self.vocab_size if self.shard is None else self.shard.vocab_size

    @property
    def column_weights(self) -> Tensor | None:
        """Those of the columns here."""
        weights = self.tensors.column_weights
        return weights if weights is None or self.shard is None else weights[self.shard.columns]

    def state(self, rows: int, names: tuple[str, ...]) -> State:
        device, dtype = self.hidden.device, self.precision.statistics
        if self.teacher is not None:
            return DivergenceState(rows, names, self.teacher.divergence, device=device, dtype=dtype)
        if self.tensors.positives is not None:
            return BernoulliState(rows, device=device, dtype=dtype)
        weighted = self.tensors.column_weights is not None
        return RowState(rows, names, device=device, dtype=dtype, column_weights=weighted)

    def statistics(self, state: State) -> dict[str, Tensor]:
        return state.statistics(self.all_columns, self.tensors.column_weights)

    def buffer(self, rows: int, dtype: torch.dtype) -> Tensor:
        """`[rows, V]`."""
        return padded_empty(rows, self.vocab_size, dtype, self.hidden.device)

    def tile_hidden(self, ranges: Ranges) -> Tensor:
        """`[n, H]` hidden states of compact `ranges`, in the compute dtype."""
        return self.scored.gather(self.hidden, ranges).to(self.precision.compute)

    def tile(self, ranges: Ranges) -> TokenTile:
        """The tokens of compact `ranges`."""

        if self._ahead is not None and self._ahead.ranges == ranges:
            return self._ahead

        def gather(values: Tensor) -> Tensor:
            return self.scored.gather(values, ranges)

        positives = self.tensors.positives
        return TokenTile(
            ranges,
            self.tile_hidden(ranges),
            gather(self.scored.target),
            self.transform.gathered(gather),
            None if positives is None else gather(positives),
        )

    def project(
        self,
        tile: TokenTile,
        state: State,
        emit: Emit,
        gradient: Tensor | None,  # [n, V], written unless emit is NOTHING
    ) -> None:
        """Logits of a tile, `logit_rows` at a time, folded into `state`; `emit` decides what `gradient` receives."""
        for rows, piece, logits in self._projected(tile):
            part = state.narrow(rows.start, rows.stop - rows.start)
            self._fold_and_merge(logits, piece, part, emit, None if gradient is None else gradient[rows])

    def _projected(self, tile: TokenTile) -> Iterator[tuple[slice, TokenTile, Tensor]]:
        ahead, self._ahead = self._ahead is tile, None
        for rows, piece in tile.slices(self.plan.logit_rows):
            logits = self._logits_buffer(rows.stop - rows.start)
            if rows.start or not ahead:
                matmul(piece.hidden, self.weight.t(), out=logits)
            yield rows, piece, logits

    def project_again(
        self,
        tile: TokenTile,
        numbers: Tensor,  # [1, n], or [5, n] with a teacher: the state's `lse`, of all columns
        emit: Emit,
        gradient: Tensor,  # [n, V], written
    ) -> None:
        """What `project` wrote to `gradient`, once more.

        A vocabulary's ranks may differ in which tiles they come back to, each having kept others: so that none waits
        here for the others, `G` is formed from what is known of its rows.
        """
        if self.shard is None or emit != Emit.GRADIENT:
            self.project(tile, self.state(len(tile.hidden), ()), emit, gradient)
            return
        for rows, piece, logits in self._projected(tile):
            self._write_gradient(logits, piece, numbers[:, rows], gradient[rows])

    def _write_gradient(self, logits: Tensor, tile: TokenTile, numbers: Tensor, out: Tensor) -> None:
        """`G` of this rank's columns."""
        first, ones = self.first_column, torch.ones_like(numbers[0])
        if tile.positives is not None:
            bernoulli_tile(logits, self.bias, tile.positives, tile.transform, out=out, first_column=first)
        elif self.teacher is not None:
            state = DivergenceState.of_kept(numbers, self.teacher.divergence)
            columns = Columns(self.vocab_size, self.vocab_size)
            divergence_gradient(
                logits, self.bias, tile.target, self.teacher_rows(tile.ranges), state, tile.transform, columns,
                factor=ones, out=out, first_column=first,
            )  # fmt: skip
        else:
            (lse,) = numbers
            tile_gradient(
                logits, self.bias, tile.target, lse=lse, logprob=lse, entropy=None, dlogprob=ones, dentropy=None,
                dlse=None, transform=tile.transform, out=out, first_column=first,
            )  # fmt: skip

    def _fold_and_merge(
        self, logits: Tensor, tile: TokenTile, state: State, emit: Emit, gradient: Tensor | None
    ) -> None:
        """`fold` of whole rows. Where `G` depends on columns of other ranks, a second visit writes it once they met."""
        if self.shard is None or not emit:
            self.fold(logits, tile, state, emit, gradient)
            return
        late = emit == Emit.GRADIENT and isinstance(state, RowState)
        self.fold(logits, tile, state, Emit.NOTHING if late else emit, None if late else gradient)
        merge(self.shard, state, tile.target)
        if late:
            assert gradient is not None
            self._write_gradient(logits, tile, state.lse.unsqueeze(0), gradient)
            state.gradient_scale.fill_(1)

    def merge(self, state: State) -> None:
        """Of all scored tokens, where no gradient was formed on the way."""
        if self.shard is not None:
            merge(self.shard, state, self.scored.gather(self.scored.target, ((0, self.scored.count),)))

    def fold(
        self,
        logits: Tensor,  # [n, columns]
        tile: TokenTile,
        state: State,
        emit: Emit = Emit.NOTHING,
        gradient: Tensor | None = None,  # [n, V]
        columns: slice | None = None,  # of the vocabulary; None: all of it
    ) -> None:
        """One block of logits into `state`, and with `emit` what the gradient products need."""
        first, bias, weights = self.first_column, self.bias, self.column_weights
        if columns is not None:
            first += columns.start
            bias, weights = (None if t is None else t[columns] for t in (bias, weights))
        if isinstance(state, BernoulliState):
            assert tile.positives is not None
            bernoulli_tile(
                logits, bias, tile.positives, tile.transform, total=state.total, out=gradient, first_column=first
            )
            return
        if isinstance(state, DivergenceState):
            teacher = self.teacher
            assert teacher is not None
            assert columns is None
            rows = self.teacher_rows(tile.ranges)
            if self.shard is not None:
                visit_divergence(self.shard, logits, bias, tile.target, rows, state, tile.transform, gradient)
                return
            divergence_tile(
                logits, bias, tile.target, rows, state, tile.transform,
                teacher.columns(self.vocab_size), out=gradient,
            )  # fmt: skip
            return
        fold_tile(
            logits, bias, tile.target, state, tile.transform, first_column=first, emit=emit, out=gradient,
            column_weights=weights,
        )  # fmt: skip

    def teacher_rows(self, ranges: Ranges) -> TeacherTile:
        """The teacher's logits of compact `ranges`, at most `logit_rows` of them."""
        ahead, self._teacher_ahead = self._teacher_ahead, None
        if ahead is not None and ahead[0] == ranges:
            return ahead[1]
        teacher = self.teacher
        assert teacher is not None
        width = teacher.columns(self.vocab_size).teacher
        if teacher.logits is not None:
            return teacher.tile(self.scored.gather(teacher.logits[:, :width], ranges))
        assert teacher.hidden is not None
        assert teacher.weight is not None
        if self._teacher_logits is None:
            dtype, rows = self.precision.logits, self.plan.logit_rows
            self._teacher_logits = padded_empty(rows, width, dtype, self.hidden.device)
        hidden = self.scored.gather(teacher.hidden, ranges).to(self.precision.compute)
        return teacher.tile(matmul(hidden, teacher.weight[:width].t(), out=self._teacher_logits[: len(hidden)]))

    def _logits_buffer(self, rows: int) -> Tensor:
        if self._logits is None:
            self._logits = self.buffer(self.plan.logit_rows, self.precision.logits)
        return self._logits[:rows]

    def combine(self, gradient: Tensor, tile: TokenTile, state: RowState, coefficients: Coefficients) -> None:
        """In place, from `p` to the gradient of a loss with several coefficients, relative to the row factor."""
        assert coefficients.dlogprob is not None
        statistics = self.statistics(state)
        dlse, dlogit = logit_coefficients(
            coefficients.dlse, coefficients.dmean_logprob, self.all_columns, self.tensors.column_weights
        )
        tile_gradient(
            gradient,
            self.bias,
            tile.target,
            lse=state.lse,
            logprob=(state.target - state.max) - torch.log(state.sum_exp),
            entropy=statistics.get("entropy"),
            dlogprob=coefficients.dlogprob,
            dentropy=coefficients.dentropy,
            dlse=dlse,
            dlogit=dlogit,
            column_weights=self.column_weights,
            transform=tile.transform,
            out=gradient,
            first_column=self.first_column,
            probability_scale=state.gradient_scale,
        )

    def project_ahead(self, ranges: Ranges) -> None:
        """Start on the tile that `project` will be asked for next: its first logits, while their buffer is free."""
        tile = self.tile(ranges)
        for rows, piece in tile.slices(self.plan.logit_rows)[:1]:
            matmul(piece.hidden, self.weight.t(), out=self._logits_buffer(rows.stop - rows.start))
            self._ahead = tile
            if self.teacher is not None and self.teacher.hidden is not None:
                self._teacher_ahead = piece.ranges, self.teacher_rows(piece.ranges)

    @property
    def choosing(self) -> bool:
        """Whether the columns of a tile are still chosen."""
        return self.active is not None and not self._flat

    def weigh(
        self, entries: Tensor, tile: TokenTile, scale: Tensor | None = None, following: Ranges | None = None
    ) -> Weighed:
        """What the products of a tile multiply, given its `G` `[n, V]` up to a `scale` per row: started on, to be asked
        for late.

        With an active vocabulary the asker waits for the number of its columns. Until then the device projects the tile
        at `following`, which `project` is to be asked for next.
        """
        if self.active is None or entries.shape[0] == 0:
            return Weighed(lambda: TileGradient(entries))
        if self._flat:
            return Weighed(lambda: unweighed(entries))
        labelled = tile.positives is None and (self.teacher is None or self.teacher.divergence.hard_weight > 0)
        own = tile.target - self.first_column if labelled else None
        selection = Selection(self.active, entries, scale, own, self._count)
        if following is not None:
            self.project_ahead(following)

        def chosen() -> TileGradient:
            self.catch_up()
            found = selection.gradient()
            self._flat = found.columns is None
            return found

        return Weighed(chosen, selection.profile)

    def gradient(
        self, entries: Tensor, tile: TokenTile, scale: Tensor | None = None, following: Ranges | None = None
    ) -> TileGradient:
        """`weigh`, and wait."""
        return self.weigh(entries, tile, scale, following).gradient()

    def later(self, gradient: TileGradient, work: Callable[[], None]) -> None:
        """Products with a tile's `gradient`, in the order in which they are asked for.

        Those of active columns are begun when the next tile's are being counted, or asked for: what is queued then
        keeps the device busy until the host knows their number, and at the end of a walk until it is asked for
        gradients. A tile that is multiplied whole cannot wait: the next one is written over it.
        """
        if gradient is not self._left:
            self.catch_up()
        if gradient.columns is None:
            work()
        else:
            self._left = gradient
            self._behind.append(work)

    def catch_up(self) -> None:
        """Begin what was left for later."""
        behind, self._behind, self._left = self._behind, [], None
        for work in behind:
            work()

    def hidden_gradient(self) -> HiddenGradient:
        """Of every position, to be added to."""
        return HiddenGradient(self.hidden, self.weight, self.scored, self.precision, self.shard)

    def weight_gradient(self, needs: tuple[bool, bool, bool], *, keep: bool = False) -> WeightGradient:
        """Of weight and bias, to be added to; with `keep` one product over all tokens where it rounds but once."""
        rows = self.scored.count if keep and not self.plan.problem.wide_weight_sum else 0
        return WeightGradient(self.weight.shape, self.precision, weight=needs[1], bias=needs[2], rows=rows)
