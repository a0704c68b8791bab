"""The keyword-only options that every module hands on to the engine, written once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

from .base import CallOptions

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    P = ParamSpec("P")


class TilingOptions(TypedDict, total=False):
    """How `liger_losses.fused_linear_loss` goes about it."""

    memory_budget: int | None
    logits_dtype: str
    strategy: str
    active_vocab: float | str | None


class HeadOptions(TilingOptions, total=False):
    """The same, and what a model does to its logits."""

    softcap: float | None
    logit_scale: float | None


class EngineOptions(HeadOptions, total=False):
    """The same, and a temperature, where a loss has none of its own."""

    temperature: float


class ReferenceOptions(EngineOptions, total=False):
    """The same, and what a reference model's logits have of their own (None: the policy's)."""

    ref_softcap: float | None
    ref_logit_scale: float | None


def _with(options: type, init: Callable[P, None]) -> Callable[P, None]:
    signature = inspect.signature(init)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    engine = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(CallOptions, name),
            annotation=CallOptions.__annotations__[name],
        )
        for name in options.__annotations__
    ]
    shown = signature.replace(parameters=[*named, *engine])
    known = tuple(shown.parameters)

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{init.__qualname__}() got an unexpected keyword argument {name!r}")
        init(*args, **kwargs)

    checked.__signature__ = shown  # type: ignore[attr-defined]
    return checked


def with_engine_options(init: Callable[P, None]) -> Callable[P, None]:
    """`init`, whose `**engine` are `EngineOptions`: its signature shows them one by one, and others are refused."""
    return _with(EngineOptions, init)


def with_tiling_options(init: Callable[P, None]) -> Callable[P, None]:
    """The same for `TilingOptions`, where a constructor names some of the others by position."""
    return _with(TilingOptions, init)


def with_head_options(init: Callable[P, None]) -> Callable[P, None]:
    """The same for `HeadOptions`."""
    return _with(HeadOptions, init)


def with_reference_options(init: Callable[P, None]) -> Callable[P, None]:
    """The same for `ReferenceOptions`."""
    return _with(ReferenceOptions, init)
