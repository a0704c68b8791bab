"""What the loss modules share: the engine's options, the reference model, and one call that checks everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._checks import check_constant, check_float_tensor, check_size
from .._constants import taken
from ..chunked import Loss, ScoredTokens, fused_linear_loss, linear_logprobs
from ..chunked.head import NAMES, check_head
from ..chunked.placements import check_placed
from ..chunked.planner import check_tiling
from ..chunked.tokens import check_ignore_index, check_target
from ..kernels import LogitTransform


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """How a module calls the engine: the heads' logits, and the tiling. Checked at construction."""

    ignore_index: int = -100
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float | None = 1.0
    ref_softcap: float | None = None  # None: as softcap
    ref_logit_scale: float | None = None  # None: as logit_scale
    memory_budget: int | None = None
    logits_dtype: str = "float32"
    strategy: str = "auto"
    active_vocab: float | str | None = None
    chunk_size: int = 1

    def __post_init__(self) -> None:
        _check_transform(self.policy())
        given = {"softcap": self.ref_softcap, "logit_scale": self.ref_logit_scale}
        try:
            _check_transform(self.reference())
        except (TypeError, ValueError) as error:
            raise renamed(error, {name: f"ref_{name}" for name, value in given.items() if value is not None}) from None
        check_ignore_index(self.ignore_index)
        check_tiling(self.strategy, self.memory_budget, self.logits_dtype, self.active_vocab)
        check_size("chunk_size", self.chunk_size)

    def policy(self) -> dict[str, Any]:
        return {
            "ignore_index": self.ignore_index,
            "temperature": self.temperature,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "memory_budget": self.memory_budget,
            "logits_dtype": self.logits_dtype,
            "active_vocab": self.active_vocab,
        }

    def reference(self) -> dict[str, Any]:
        options = {**self.policy(), "active_vocab": None}  # nothing is differentiated there
        if self.ref_softcap is not None:
            options["softcap"] = self.ref_softcap
        if self.ref_logit_scale is not None:
            options["logit_scale"] = self.ref_logit_scale
        return options

    def check_separability(self, separability: str, names: str) -> None:
        """Raise for options that have no meaning for a loss; `names` says in the message which loss it is."""
        if self.chunk_size > 1 and separability == "batch":
            raise ValueError(
                f"chunk_size: got {self.chunk_size}, expected 1 for {names}, which needs the whole batch at once"
            )
        if self.chunk_size > 1:
            check_chunk_strategy(self.chunk_size, self.strategy, 1)
        if self.strategy == "immediate" and separability == "batch":
            raise ValueError(
                f"strategy: got 'immediate' with {names}, which needs the whole batch at once; expected another one"
            )

    def check_reference(self, use_ref_model: bool) -> None:
        """Raise for options of a reference that there is none of."""
        for name, value in (("ref_softcap", self.ref_softcap), ("ref_logit_scale", self.ref_logit_scale)):
            if value is not None and not use_ref_model:
                raise ValueError(f"{name}: got {value} with use_ref_model=False, expected None: nothing would read it")

    @property
    def max_units(self) -> int | None:
        """liger-kernel's default of one unit a chunk asks for no bound here: `memory_budget` sizes the tiles."""
        return None if self.chunk_size == 1 else self.chunk_size


def _check_transform(options: Mapping[str, Any]) -> None:
    scale = options["logit_scale"]
    LogitTransform(1.0 if scale is None else scale, options["softcap"], options["temperature"])


_REFERENCE = ("ref_input", "ref_weight", "ref_bias")


@dataclass(frozen=True)
class Reference:
    """What a caller gave of the reference model: a head and its hidden states, or its log-probabilities, or nothing."""

    hidden: Tensor | None = None  # [R, T, H']
    weight: Tensor | None = None  # [V, H']
    bias: Tensor | None = None  # [V]
    known: Mapping[str, Tensor | None] = field(default_factory=dict)  # log-probabilities, by argument name
    known_shape: tuple[int, ...] = ()  # of each
    known_as: str = "ref_logps"  # the loss's input that they make up, end to end

    def check(self, wanted: bool, target_shape: torch.Size, target_name: str) -> None:
        """Raise before any work, naming the argument of `forward`."""
        head = {"ref_input": self.hidden, "ref_weight": self.weight}
        given = [name for name, value in {**head, "ref_bias": self.bias, **self.known}.items() if value is not None]
        if not wanted:
            if given:
                raise ValueError(f"{given[0]}: got a tensor, expected None with use_ref_model=False")
            return
        by_head, by_logps = (any(name in given for name in names) for names in ((*head, "ref_bias"), self.known))
        if by_head == by_logps:
            raise ValueError(
                f"use_ref_model=True: got {', '.join(given) or 'no reference'}, expected either ref_input and "
                f"ref_weight, or {' and '.join(self.known)}"
            )
        for name, value in (head if by_head else self.known).items():
            if value is None:
                raise ValueError(f"{name}: got None, expected a tensor beside {', '.join(given)}")
            if by_logps:
                check_float_tensor(name, value, self.known_shape)
                check_constant(name, value)
        if by_head:
            check_head_as(_REFERENCE, self.hidden, self.weight, self.bias, target_shape, target_name)

    def inputs(self, target: Tensor | ScoredTokens, options: CallOptions, device: torch.device) -> dict[str, Tensor]:
        """The loss's input of the reference: `ref_logprobs` from one product of its head, or what was known."""
        known = [value for value in self.known.values() if value is not None]
        if known:
            return {self.known_as: known[0] if len(known) == 1 else torch.cat([taken(v, device) for v in known])}
        if self.hidden is None or self.weight is None:
            return {}
        try:
            with torch.no_grad():
                logprobs = linear_logprobs(self.hidden, self.weight, target, self.bias, **options.reference())
        except (TypeError, ValueError) as error:
            raise renamed(error, dict(zip(NAMES, _REFERENCE, strict=True))) from None
        return {"ref_logprobs": logprobs}

    def check_range(self, target: ScoredTokens, policy: int, policy_name: str) -> None:
        """Raise for targets that the reference has no column for; it may have fewer, or more, than the policy."""
        if self.weight is None or len(self.weight) >= policy:
            return
        seen = target.outside(len(self.weight))
        if seen is not None:
            raise ValueError(
                f"ref_weight: got {len(self.weight)} rows beside the {policy} of {policy_name}, expected one for every "
                f"target, among which is {seen}"
            )


NO_REFERENCE = Reference()


def check_chunk_strategy(chunk_size: int, strategy: str, unbounded: int) -> None:
    """Raise for a bound of a tile's units that a strategy does not know; `unbounded` is what sets none."""
    if strategy not in ("auto", "immediate"):
        raise ValueError(
            f"chunk_size: got {chunk_size} with strategy={strategy!r}, whose tiles hold tokens; expected {unbounded}"
        )


def check_accumulator(dtype: torch.dtype | None) -> None:
    """liger-kernel's `accum_dtype`, where there is one way to sum."""
    if dtype not in (None, torch.float32):
        raise ValueError(f"accum_dtype: got {dtype}, expected None or torch.float32, which is what is done")


def check_head_as(
    names: tuple[str, str, str],
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: torch.Size,
    target_name: str = "target",
) -> None:
    """The engine's own checks of a head, under the names the caller used."""
    try:
        check_head(hidden, weight, bias, shape, names)
    except (TypeError, ValueError) as error:
        raise renamed(error, {"target": target_name}) from None
    assert hidden is not None
    assert weight is not None
    check_placed(hidden, weight, bias, names)


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """An error of the engine's under the names of the caller's arguments; `names` maps the engine's to those."""
    named, colon, rest = str(error).partition(":")
    return type(error)(", ".join(names.get(name, name) for name in named.split(", ")) + colon + rest)


def fused_loss(
    loss: Loss,
    options: CallOptions,
    hidden: Tensor,  # [R, T, H]
    weight: Tensor,  # [V, H]
    target: Tensor | ScoredTokens,  # [R, T]
    bias: Tensor | None,  # [V]
    *,
    reference: Reference = NO_REFERENCE,
    use_ref_model: bool = False,
    inputs: Mapping[str, Tensor] | None = None,
    names: tuple[str, str, str] = ("_input", "lin_weight", "bias"),  # of the head's tensors, in messages
    target_name: str = "target",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Checks everything, then the reference's log-probabilities, then the fused loss.

    The target's form and its number of rows are the caller's to check (`check_rows`).
    """
    check_head_as(names, hidden, weight, bias, target.shape, target_name)
    reference.check(use_ref_model, target.shape, target_name)
    if isinstance(target, Tensor) and not torch.compiler.is_compiling():
        # Read once for both heads: on an accelerator each reading waits for the work queued so far.
        target = ScoredTokens(target, options.ignore_index)
    if isinstance(target, ScoredTokens):
        target.check_range(len(weight), target_name)
        reference.check_range(target, len(weight), names[1])
    inputs = {**(inputs or {}), **reference.inputs(target, options, hidden.device)}
    try:
        return fused_linear_loss(
            loss,
            hidden,
            weight,
            target,
            bias,
            inputs=inputs,
            strategy=options.strategy,
            max_units=options.max_units,
            **options.policy(),
        )
    except (TypeError, ValueError) as error:
        raise renamed(error, dict(zip((*NAMES, "target"), (*names, target_name), strict=True))) from None


def check_rows(target: Tensor | ScoredTokens, expected: str) -> int:
    """Rows of a target `[R, T]`; raises naming what `expected` says of its shape."""
    if not isinstance(target, (Tensor, ScoredTokens)):
        raise TypeError(f"target: got {type(target).__name__}, expected a torch.Tensor")
    if len(target.shape) != 2:
        raise ValueError(f"target: got shape {list(target.shape)}, expected {expected}")
    if isinstance(target, Tensor):
        check_target(target)
    return target.shape[0]
