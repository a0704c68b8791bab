"""What a user can mend, and what every command counts in."""

from __future__ import annotations

from typing import Any

from .. import _extras

MIB = 2**20


class CommandError(Exception):
    """Something the user can mend; printed without a traceback, exit status 2."""


def require(module: str, extra: str = "cli") -> Any:
    """The module, or a `CommandError` that names the extra it comes with."""
    try:
        return _extras.require(module, extra)
    except ImportError as error:
        raise CommandError(str(error)) from error
