"""The active vocabulary: gradient products over the columns of a tile that hold something.

A trained model's softmax is peaked, and most of `G W` and `G^T x` multiplies numbers next to nothing. A
tile's active columns are chosen from `G` itself, so that one rule serves every loss whose gradient goes through such a
matrix:

- a number `eps`: the columns where some entry exceeds `eps` in size;
- `"auto"`: all but the lightest columns, whose entries have a Frobenius norm of at most d = `DROPPED[dtype]` times
  that of all entries of the tile, and those of a single one at most 4 d times a row's norm (in quadratic mean);

in either case with every row's target. The other columns, the *tail*, become one: row r's sum over them, `t_r`, spread
as they are spread in the tile as a whole, `q_v = sum_r |G_rv| / sum`. So what a token's tail adds up to is kept, and so
is what a column of it adds up to over the tile's tokens, at the price of one column more; lost is how the tail of one
token differs from that of the others. (Left out altogether, the tail of many small probabilities would be missed: it
points in one direction, that of the mean row of the weight.) Values are never touched.

Of a vocabulary that is spread over ranks each chooses among its own columns, against its own entries' norm: what all of
them move to their tails, one for each, is then at most the same d of the whole tile's, and nobody has to be asked.

How many columns that makes, the device knows: the count travels to the host while the next tile's projection runs, so
that waiting for it leaves the device busy. Hence nothing is sized by a guess, and nothing can overflow. Once a tile of
a call turned out to have too many, the call's other tiles are multiplied whole without being weighed.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels import (
    choose_columns,
    column_extent,
    gather_columns,
    gather_rows,
    matmul,
    wide_dtype,
)
from ..kernels.tile_statistics import row_slices

# Above this share of the vocabulary a tile is multiplied whole. On an H200 moving columns costs what it saves at 0.72.
CROSSOVER = 0.6

# What "auto" may move to the tail, relative to the tile's Frobenius norm: a quarter of the unit roundoff, which is what
# storing the entries may put them off by.
DROPPED = {dtype: torch.finfo(dtype).eps / 8 for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}

# Columns whose rows of the weight are gathered, and whose part of the weight's gradient is formed, at a time.
PANEL = 8192

_ROUND = 64


@dataclass(frozen=True)
class ActiveVocabulary:
    """The rule by which columns are chosen."""

    eps: float | None  # None: "auto"

    @classmethod
    def of(cls, given: object) -> ActiveVocabulary | None:
        """The rule that a caller's `active_vocab` names. Raises for what names none."""
        if given is None:
            return None
        if torch.compiler.is_compiling():
            raise ValueError(f"active_vocab: got {given!r} under torch.compile, where the columns of a tile are "
                             "unknown; expected None")  # fmt: skip
        if isinstance(given, str):
            if given != "auto":
                raise ValueError(f"active_vocab: got {given!r}, expected None, 'auto' or a number in [0, 1)")
            return cls(None)
        if isinstance(given, bool) or not isinstance(given, (int, float)):
            raise TypeError(f"active_vocab: got {given!r}, expected None, 'auto' or a number in [0, 1)")
        if not 0 <= given < 1:
            raise ValueError(f"active_vocab: got {given}, expected None, 'auto' or a number in [0, 1)")
        return cls(float(given))


@dataclass(frozen=True)
class TileGradient:
    """`G` of a tile: in full, or its active columns and its tail."""

    entries: Tensor  # [n, V], or [n, C]: A active columns, the tail's, and zeros
    columns: Tensor | None = None  # [A] ids, ascending
    profile: Tensor | None = None  # [V] q: how the tail is spread

    def kept(self, room: int) -> TileGradient | None:
        """Itself where its active columns fit `room` bytes; None in full, in a buffer that the next tile needs."""
        return None if self.columns is None or self.entries.nbytes > room else self

    def panels(self) -> Iterator[tuple[Tensor, Tensor, int | None]]:
        """Ids and entries of the active columns, `PANEL` at a time, and where among the entries the tail's are."""
        assert self.columns is not None
        count = len(self.columns)
        for start in range(0, self.entries.shape[1], PANEL):
            entries = self.entries[:, start : start + PANEL]
            tail = count - start if start <= count < start + entries.shape[1] else None
            yield self.columns[start : start + PANEL], entries, tail

    @property
    def tail(self) -> Tensor:
        """`[n]` what the entries of the tail add up to."""
        assert self.columns is not None
        return self.entries[:, len(self.columns)]

    def product(
        self,
        weight: Tensor,  # [V, H]
        out: Tensor,  # [n, H]
        wide: torch.dtype,
    ) -> Tensor:
        """`G W` of the active columns, summed in `wide`."""
        one = self.entries.shape[1] <= PANEL
        total = out if one else torch.zeros(out.shape, dtype=wide, device=out.device)
        for ids, entries, _ in self.panels():
            rows = torch.empty(entries.shape[1], weight.shape[1], dtype=weight.dtype, device=weight.device)
            matmul(entries, gather_rows(weight, ids, rows), out=total, accumulate=not one)
        return out if one else out.copy_(total)


class HostCount:
    """A number on its way from the device to the host, one at a time."""

    def __init__(self) -> None:
        self._on_host: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def send(self, count: Tensor) -> None:
        """Queue its copy."""
        if not count.is_cuda:
            self._on_host = count
            return
        if self._on_host is None or self._event is None:
            self._on_host, self._event = torch.empty((), dtype=count.dtype, pin_memory=True), torch.cuda.Event()
        self._on_host.copy_(count, non_blocking=True)
        self._event.record(torch.cuda.current_stream(count.device))

    def wait(self) -> int:
        """The number. Waits until the device has it."""
        assert self._on_host is not None
        if self._event is not None:
            self._event.synchronize()
        return int(self._on_host)


class Selection:
    """The active columns of a tile, whose number is under way to the host."""

    def __init__(
        self,
        rule: ActiveVocabulary,
        gradient: Tensor,  # [n, V] up to `scale`
        scale: Tensor | None,  # [n]
        target: Tensor | None,  # [n] columns that are always active; others than these are nobody's, or another rank's
        count: HostCount,
    ) -> None:
        self._gradient, self._scale = gradient, scale
        extent = column_extent(gradient, scale, squares=rule.eps is None)
        self._row_sums = extent.row_sums
        self._choice = choose_columns(extent, target, eps=rule.eps, share=DROPPED[gradient.dtype])
        self._count = count
        count.send(self._choice.count)

    @property
    def profile(self) -> Tensor:
        """`[V]` of the tail, should the tile not be multiplied whole."""
        return self._choice.profile

    def gradient(self) -> TileGradient:
        """The tile's active columns, or all of them where there are many. Waits until the device has counted them."""
        count, (rows, vocab) = self._count.wait(), self._gradient.shape
        whole = count > CROSSOVER * vocab
        report = _recording.get()
        if report is not None:
            report._add(rows, vocab, self._choice.count, self._dropped(whole), whole)
        if whole:
            return TileGradient(self._gradient)
        ids, width = self._choice.ids[:count], -(-(count + 1) // _ROUND) * _ROUND
        entries = torch.empty(rows, width, dtype=self._gradient.dtype, device=self._gradient.device)
        gather_columns(self._gradient, ids, self._row_sums, entries)
        return TileGradient(entries, ids, self.profile)

    def _dropped(self, whole: bool) -> Tensor:
        """Each row's sum of the entries in the tail, in size."""
        dropped = torch.zeros_like(self._row_sums)
        if whole:
            return dropped
        for rows in row_slices(self._gradient):
            size = self._gradient[rows].to(dropped.dtype, copy=True).abs_()
            each = size.masked_fill_(self._choice.active, 0).sum(-1)
            dropped[rows] = each if self._scale is None else each * self._scale[rows].abs()
        return dropped


@dataclass
class ActiveVocabularyReport:
    """What the gradients formed inside `record_active_vocabulary` left out. Tensors stay on the device.

    For log-probabilities (at temperature 1, without a softcap) an entry's size is a probability, so that `dropped` is
    the probability mass of a token outside the active columns: of it, only the sum entered the gradient.
    """

    tiles: int = 0
    whole_tiles: int = 0  # multiplied whole: too many of their columns are active, or were in an earlier tile
    _began: bool = False
    _rows: list[int] = field(default_factory=list)
    _shares: list[Tensor] = field(default_factory=list)
    _dropped: list[Tensor] = field(default_factory=list)

    def _add(self, rows: int, vocab: int, count: Tensor, dropped: Tensor, whole: bool) -> None:
        self.tiles += 1
        self.whole_tiles += whole
        self._rows.append(rows)
        self._shares.append(count / vocab)
        self._dropped.append(dropped)

    def _add_unweighed(self, entries: Tensor) -> None:
        self.tiles += 1
        self.whole_tiles += 1
        self._dropped.append(torch.zeros(len(entries), dtype=wide_dtype(entries.dtype), device=entries.device))

    def _check(self) -> None:
        if not self._began:
            raise RuntimeError("nothing was recorded: no gradient was formed with active_vocab inside the block")

    @property
    def share(self) -> Tensor:
        """Mean over tokens of their tile's share of active columns: of the tiles that were weighed, whole ones too.

        0 where no token was scored, as `dropped_mean` and `dropped_max` are.
        """
        self._check()
        if not self.tiles:
            return torch.zeros(())
        parts = [share * rows for share, rows in zip(self._shares, self._rows, strict=True)]
        return torch.stack(parts).sum() / sum(self._rows)

    @property
    def dropped(self) -> Tensor:
        """`[tokens]`, in the order of the tiles: the sizes of a token's entries outside the active columns, summed."""
        self._check()
        return torch.cat(self._dropped) if self.tiles else torch.zeros(0)

    @property
    def dropped_mean(self) -> Tensor:
        """Mean of `dropped`."""
        return self.dropped.mean() if self.tiles else self.share

    @property
    def dropped_max(self) -> Tensor:
        """Largest of `dropped`."""
        return self.dropped.max() if self.tiles else self.share


@dataclass(frozen=True)
class Weighed:
    """A tile whose columns are being chosen."""

    gradient: Callable[[], TileGradient]  # waits until the device has counted them
    profile: Tensor | None = None  # [V] of the tail, should the tile not be multiplied whole; known to the device alone


def begin() -> None:
    """Of a walk over an active vocabulary, though there be no token in it."""
    report = _recording.get()
    if report is not None:
        report._began = True


def unweighed(entries: Tensor) -> TileGradient:
    """A tile that is multiplied whole because an earlier one was."""
    report = _recording.get()
    if report is not None:
        report._add_unweighed(entries)
    return TileGradient(entries)


_recording: contextvars.ContextVar[ActiveVocabularyReport | None] = contextvars.ContextVar("recording", default=None)


@contextlib.contextmanager
def record_active_vocabulary() -> Iterator[ActiveVocabularyReport]:
    """Measure what `active_vocab` leaves out inside the block, at the cost of one more visit to each tile.

    Example:
        >>> with record_active_vocabulary() as report:
        ...     loss, metrics = fused_linear_loss(loss, hidden, weight, target, active_vocab="auto")
        >>> report.share, report.dropped_mean, report.dropped_max
    """
    report = ActiveVocabularyReport()
    token = _recording.set(report)
    try:
        yield report
    finally:
        _recording.reset(token)
