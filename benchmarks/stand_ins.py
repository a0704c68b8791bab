"""Stand-ins for `datasets`, `pandas` and `pyarrow` where they are not installed, so that TRL can be imported there.

TRL imports all three on top of its modules, for data that it reads and tables that it prints. The benchmark of the
trainers gives them batches that exist, so nothing of these libraries is at work in what is timed: rows go through
`Dataset.map` once when a trainer is built. Whatever is installed is left alone.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Row = dict[str, Any]


class Rows:
    """A few rows with the part of `datasets.Dataset` that TRL's trainers use on them."""

    features = None
    cache_files: tuple[str, ...] = ()
    _fingerprint = "rows"

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    @classmethod
    def from_list(cls, rows: list[Row]) -> Rows:
        return cls(rows)

    @property
    def column_names(self) -> list[str]:
        return list(self._rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def map(self, function: Callable[..., Row], fn_kwargs: Row | None = None, **_: Any) -> Rows:
        return Rows([{**row, **function(dict(row), **(fn_kwargs or {}))} for row in self._rows])

    def filter(self, function: Callable[[Row], bool], **_: Any) -> Rows:
        return Rows([row for row in self._rows if function(row)])


class _Absent:
    """Something of an absent library: a type that nothing is an instance of, and an error to call."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ModuleNotFoundError(f"{type(self).__module__}.{type(self).__name__} is a stand-in: install the library")


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Absent,), {"__module__": self.__name__})


def _missing(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is None
    except ValueError:  # a stand-in already, or half of a module
        return False


def install() -> list[str]:
    """Put stand-ins where a library is missing, and name them. Call before TRL is imported."""
    found = []
    for library, parts in (
        ("datasets", ("fingerprint",)),
        ("pandas", ()),
        ("pyarrow", ("compute", "types")),
    ):
        # What is missing for pyarrow's sake counts as missing: datasets cannot be imported without it.
        if not _missing(library) and not (library == "datasets" and _missing("pyarrow")):
            continue
        found.append(library)
        for name in (library, *(f"{library}.{part}" for part in parts)):
            module = _StandIn(name)
            module.__spec__ = ModuleSpec(name, None)
            sys.modules[name] = module
            parent, _, part = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], part, module)
    if "datasets" in found:
        sys.modules["datasets"].Dataset = Rows  # type: ignore[attr-defined]
    return found
