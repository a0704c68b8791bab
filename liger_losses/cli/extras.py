"""What an optional extra brings, or the command that brings it."""

from __future__ import annotations

import importlib
import re
from typing import Any

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
MIB = 2**20


class CommandError(Exception):
    """Something the user can mend; printed without a traceback, exit status 2."""


def require(module: str, extra: str = "cli") -> Any:
    """The module, or a `CommandError` that names the extra it comes with."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise CommandError(f"{package} is not installed; it comes with: pip install 'liger-losses[{extra}]'") from error


def parse_bytes(text: str) -> int:
    """`"16GiB"`, `"500 MB"`, `"1048576"` as bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"got {text!r}, expected bytes such as 500MiB or 16GiB")
    size = int(float(found[1]) * _UNITS[found[2]])
    if size < 1:
        raise ValueError(f"got {text!r}, expected > 0 bytes")
    return size
