"""Modules of optional dependencies, or an error that names the extra they come with."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def require(module: str, extra: str) -> Any:
    """The module.

    Raises:
        ModuleNotFoundError: Its package is not installed; the message says which extra brings it. One that is there and
            lacks a dependency of its own says so itself.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or package).partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{package} is not installed; it comes with: pip install 'liger-losses[{extra}]'", name=package
        ) from error
