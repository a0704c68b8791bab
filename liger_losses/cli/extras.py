"""What an optional extra brings, or the command that brings it."""

from __future__ import annotations

import importlib
from typing import Any

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
