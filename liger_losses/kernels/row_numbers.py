"""Numbers of rows, one buffer for all of them: made, cut and communicated as one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

Numbers = TypeVar("Numbers", bound="RowNumbers")


class RowNumbers:
    """Numbers by name, `[rows]` each, as attributes: the rows of `numbers`, `[how many, rows]`, in the order of `held`.

    They are written in place, never assigned. A walk makes and cuts such states all the time, and on a host that keeps
    a device busy each operation counts.
    """

    numbers: Tensor
    held: tuple[str, ...]

    def allocate(self, values: Mapping[str, float], rows: int, device: torch.device, dtype: torch.dtype) -> None:
        """Numbers of these names, the same value for every row."""
        self.held = tuple(values)
        start = _initial(tuple(values.values()), device, dtype)
        self.hold(start.expand(-1, rows).clone(memory_format=torch.contiguous_format))

    def hold(self, numbers: Tensor) -> None:
        """Take `[how many, rows]` as the numbers; neighbours of a row are neighbours in memory."""
        self.numbers = numbers
        vars(self).update(zip(self.held, numbers.unbind(0), strict=True))

    def narrow(self: Numbers, start: int, rows: int) -> Numbers:
        """A view of some of the rows."""
        view = type(self).__new__(type(self))
        vars(view).update(vars(self))
        view.hold(self.numbers[:, start : start + rows])
        return view


@functools.cache
def _initial(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    # Kept on the device: a state is made for every tile, and one copy is all that it should cost.
    return torch.tensor(values, device=device, dtype=dtype).unsqueeze(-1)
