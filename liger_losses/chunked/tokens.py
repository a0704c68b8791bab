"""Which tokens are scored, and how they group into units: what the host must know before the first product."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from .._checks import check_whole

INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

Ranges = tuple[tuple[int, int], ...]

SEPARABILITY = ("token", "sequence", "pair", "batch")


class ScoredTokens:
    """Targets `[R, T]` (of any other shape: one row), and the positions that are scored (`!= ignore_index`).

    Only scored positions are projected, so the host must know how many there are. For targets on the CPU that is
    free and nothing synchronises later. For targets on an accelerator the counts travel to the host asynchronously
    from the moment of construction: build this before the backbone runs and reading them later waits for nothing;
    built at the time of the loss, it waits once, for the work queued so far.
    """

    def __init__(self, target: Tensor, ignore_index: int = -100) -> None:
        check_target(target)
        check_ignore_index(ignore_index)
        target = widened(target)
        self.shape = target.shape
        self.ignore_index = ignore_index
        rows = target if target.dim() == 2 else target.reshape(1, -1)
        self.target = target
        self._target = rows
        self._mask = rows != ignore_index
        counts = self._mask.sum(-1)
        self._on: dict[torch.device, ScoredOnDevice] = {}
        self._in_range: int | None = None  # the smallest vocabulary that the targets were found to fit
        self._event: torch.cuda.Event | None = None
        if counts.is_cuda:
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(counts.device))
        else:
            self._counts = counts

    def as_row(self) -> ScoredTokens:
        """The same, of shape `[1, N]` where it was `[N]`."""
        row = copy.copy(self)
        row.target, row.shape = self._target, self._target.shape
        return row

    @property
    def rows(self) -> int:
        return self._target.shape[0]

    def row_counts(self) -> list[int]:
        """Scored tokens of each row, on the host."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        counts: list[int] = self._counts.tolist()
        return counts

    def check_ignored(self, ignore_index: int) -> None:
        """Raise where a caller takes other targets for those that are not scored."""
        if self.ignore_index != ignore_index:
            raise ValueError(f"ignore_index: got {ignore_index}, but target was read with {self.ignore_index}")

    def check_range(self, vocab_size: int, name: str = "target") -> None:
        """Raise for a scored target outside `[0, vocab_size)`, where the targets can be read without waiting.

        On an accelerator such a token's log-probability is NaN instead: nothing is trained on it unnoticed.
        """
        seen = self.outside(vocab_size)
        if seen is not None:
            raise _out_of_range(name, seen, vocab_size, self.ignore_index)

    def outside(self, vocab_size: int) -> str | None:
        """A scored target that `check_range` would refuse, and where it is, in words."""
        if self._in_range is not None and vocab_size >= self._in_range:
            return None
        seen = _outside(self._target, self._mask, vocab_size)
        if seen is None:
            self._in_range = vocab_size
        return seen

    def to(self, device: torch.device) -> ScoredOnDevice:
        """Targets, mask and the positions of scored tokens on `device`, without a synchronisation."""
        if device not in self._on:
            self._on[device] = self._move(device)
        return self._on[device]

    def _move(self, device: torch.device) -> ScoredOnDevice:
        counts = self.row_counts()
        target, mask = self._target, self._mask
        if target.device != device:
            target, mask = upload(target, device), upload(mask, device)
        total = sum(counts)
        index = None
        if total < mask.numel():
            # The count is known, so that listing the positions need not wait for one.
            index = torch.nonzero_static(mask.reshape(-1), size=total).squeeze(-1)
        # Kernels find a token's number at its position: a column of a matrix is copied.
        return ScoredOnDevice(target.reshape(-1).contiguous(), mask, index, tuple(counts))


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; from the host without waiting for what is queued there."""
    if device.type == "cuda" and not tensor.is_cuda and not torch.compiler.is_compiling():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def check_range(target: Tensor, mask: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise for a scored target outside `[0, vocab_size)`, if the target can be read without waiting."""
    seen = _outside(target, mask, vocab_size)
    if seen is not None:
        raise _out_of_range("target", seen, vocab_size, ignore_index)


def _outside(target: Tensor, mask: Tensor, vocab_size: int) -> str | None:
    if target.device.type != "cpu":
        return None
    wrong = mask & ((target < 0) | (target >= vocab_size))
    if not bool(wrong.any()):
        return None
    place = tuple(wrong.nonzero()[0].tolist())
    names = {1: "position {}", 2: "row {}, position {}"}.get(len(place), "index {}")
    return f"{int(target[place])} at " + names.format(*(place if len(place) <= 2 else (place,)))


def _out_of_range(name: str, seen: str, vocab_size: int, ignore_index: int) -> ValueError:
    return ValueError(f"{name}: got {seen}; expected a class in [0, {vocab_size}) or ignore_index={ignore_index}")


def check_ignore_index(ignore_index: int) -> None:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index: got {ignore_index!r}, expected an int")
    if not -(1 << 63) <= ignore_index < 1 << 63:
        raise ValueError(f"ignore_index: got {ignore_index}, expected a number that fits 64 bits")


def widened(ids: Tensor) -> Tensor:
    """As int64: in narrower ones a vocabulary's size and `ignore_index` wrap around, -100 being 156 in uint8."""
    return ids.to(torch.int64)


def check_target(target: Tensor) -> None:
    check_integer("target", target)


def check_integer(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
    check_whole(name, tensor)
    if tensor.dtype not in INTEGER_DTYPES:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, expected an integer dtype (int64)")


@dataclass(frozen=True)
class ScoredOnDevice:
    """Scored tokens, ready to be gathered. The *compact* order is that of the flattened `[R, T]` positions."""

    target: Tensor  # [R * T] int64
    mask: Tensor  # [R, T] bool
    index: Tensor | None  # [n] positions of scored tokens in [R * T]; None when all are
    row_counts: tuple[int, ...]
    _joined: dict[Ranges, Tensor] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        return sum(self.row_counts)

    def gather(self, values: Tensor, ranges: Ranges) -> Tensor:
        """The rows of `values` `[R * T, ...]` at compact `ranges`; a view where they are contiguous."""
        if self.index is None:
            return values[slice(*ranges[0])] if len(ranges) == 1 else torch.cat([values[a:b] for a, b in ranges])
        return values.index_select(0, self._positions(ranges))

    def scatter(self, values: Tensor, into: Tensor, ranges: Ranges) -> None:
        """Inverse of `gather`: write `values` to their positions in `into` `[R * T, ...]`."""
        if self.index is not None:
            into.index_copy_(0, self._positions(ranges), values.to(into.dtype))
            return
        done = 0
        for start, stop in ranges:
            into[start:stop].copy_(values[done : done + stop - start])
            done += stop - start

    def fill(self, value: int, into: Tensor, ranges: Ranges) -> None:
        """`scatter` of one value."""
        if self.index is not None:
            into.index_fill_(0, self._positions(ranges), value)
            return
        for start, stop in ranges:
            into[start:stop].fill_(value)

    def at_positions(self, values: Tensor) -> Tensor:
        """`[..., R * T]`, a new tensor, from `[..., n]` of all scored tokens; zero where nothing is scored."""
        if self.index is None:
            return values.clone(memory_format=torch.contiguous_format)
        return values.new_zeros(*values.shape[:-1], self.mask.numel()).index_copy_(-1, self.index, values)

    def _positions(self, ranges: Ranges) -> Tensor:
        assert self.index is not None
        if len(ranges) == 1:
            return self.index[slice(*ranges[0])]
        if ranges not in self._joined:
            self._joined[ranges] = torch.cat([self.index[start:stop] for start, stop in ranges])
        return self._joined[ranges]


def split_ranges(ranges: Ranges, rows: int) -> list[Ranges]:
    """Cut compact `ranges`, laid end to end, into pieces of at most `rows` tokens (at least one piece)."""
    count = sum(stop - start for start, stop in ranges)
    return _cut(ranges, [min(rows, count - start) for start in range(0, max(count, 1), rows)])


def _cut(ranges: Ranges, sizes: list[int]) -> list[Ranges]:
    """Compact `ranges`, laid end to end, in pieces of `sizes` tokens, which are as many as they have."""
    pieces: list[Ranges] = []
    left = list(reversed(ranges))
    for size in sizes:
        piece: list[tuple[int, int]] = []
        while size:
            start, stop = left.pop()
            taken = min(size, stop - start)
            if taken:
                piece.append((start, start + taken))
            if start + taken < stop:
                left.append((start + taken, stop))
            size -= taken
        pieces.append(tuple(piece) or ((0, 0),))
    return pieces


@dataclass(frozen=True)
class UnitGroup:
    """Whole units whose tokens enter the loss together.

    `rows` are the row ranges `[start, stop)` of the units (two for pairs: chosen, then rejected), `tokens` the matching
    ranges in compact order.
    """

    rows: Ranges
    tokens: Ranges

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.tokens)

    def tiles(self, rows: int) -> list[Ranges]:
        """The tokens in tiles of at most `rows`: the last one as large as may be, those before it even."""
        early = streamed(self.count, rows)
        tiles = -(-early // rows)
        each = -(-early // max(tiles, 1))
        return _cut(self.tokens, [*(min(each, early - i * each) for i in range(tiles)), self.count - early])


def streamed(count: int, rows: int) -> int:
    """Of a group's tokens those that are projected again: all but the last tile's."""
    return max(0, count - rows)


def unit_sizes(row_counts: tuple[int, ...], unit_rows: int) -> list[int]:
    """Scored tokens of each unit: unit `i` of `n` holds the rows `i`, `n + i`, ..."""
    units = len(row_counts) // unit_rows
    return [sum(row_counts[unit::units]) for unit in range(units)]


def pack_units(sizes: list[int], capacity: int, max_units: int | None) -> list[tuple[int, int]]:
    """Consecutive units into groups of at most `capacity` tokens; a larger unit is a group of its own."""
    groups: list[tuple[int, int]] = []
    start, filled = 0, 0
    for unit, size in enumerate(sizes):
        full = max_units is not None and unit - start >= max_units
        if unit > start and (filled + size > capacity or full):
            groups.append((start, unit))
            start, filled = unit, 0
        filled += size
    groups.append((start, len(sizes)))
    return groups


def group_units(
    row_counts: tuple[int, ...], separability: str, capacity: int, max_units: int | None = None, unit_rows: int = 1
) -> list[UnitGroup]:
    """Pack the units of a batch into groups, in order. `unit_rows`: rows of one unit, 1 unless it is a pair."""
    offsets = [0, *accumulate(row_counts)]
    rows = len(row_counts)
    if separability == "token":
        step = capacity if max_units is None else min(capacity, max_units)
        total = offsets[-1]
        return [UnitGroup((), ((start, min(start + step, total)),)) for start in range(0, max(total, 1), step)]
    if separability == "batch":
        return [UnitGroup(((0, rows),), ((0, offsets[-1]),))]
    groups = []
    part = rows // unit_rows
    for start, stop in pack_units(unit_sizes(row_counts, unit_rows), capacity, max_units):
        ranges: Ranges = tuple((row * part + start, row * part + stop) for row in range(unit_rows))
        groups.append(UnitGroup(ranges, tuple((offsets[a], offsets[b]) for a, b in ranges)))
    return groups
