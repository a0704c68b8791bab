"""What `fuse_trainer` has to know of one of TRL's trainers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from liger_losses.integrations._scoring import FusedHeadReport

Labels = Callable[[Tensor], Tensor]  # input ids [B, T] -> labels [B, T], not shifted


@dataclass(frozen=True)
class Recipe:
    """How one trainer's models are fused.

    Attributes:
        outputs: Fields that it reads from its policy.
        differentiable: Those of them through which gradient flows. The fewer, the cheaper is backward.
        reference_outputs: Fields that it reads from its reference model.
        head: Further options of `fuse_head`, for policy and reference.
        scoring_passes: Passes of a step through policy or reference without a gradient.
        teacher: Attribute with the teacher, where the trainer compares whole distributions; None where it does not.
        linear: Whether the heads are asked for `linear_logits`: the distillation trainers that read logits.
        products: Of a step, where that is not for the general rule: (trainer, 1 with a trained head else 0) to TRL's
            own, the fewest now, and those when the planner has to recompute.
        overrides: Methods to put on the instance: (trainer, the policy's head) to name and function.
        labels: Method that reads `model(...).logits` -> which tokens it scores, from the method's arguments by name;
            None where this call needs logits. Empty where the trainer asks its models for `fused_lm_head=True` itself.
        readers: Further methods that are handed those logits.
        refused: Why this instance cannot be fused; None where it can.
        not_replaced: Where full logits are still built, and why.
    """

    outputs: Callable[[Any], tuple[str, ...]]
    differentiable: Callable[[Any], tuple[str, ...]] = lambda trainer: ("log_probs",)
    reference_outputs: tuple[str, ...] = ("log_probs",)
    head: Callable[[Any], dict[str, Any]] = lambda trainer: {}
    scoring_passes: Callable[[Any], int] = lambda trainer: 0
    teacher: str | None = None
    linear: bool = False
    products: Callable[[Any, int], tuple[int, int, int]] | None = None
    overrides: Callable[[Any, FusedHeadReport], dict[str, Callable[..., Any]]] = lambda trainer, head: {}
    labels: dict[str, Callable[[Any, dict[str, Any]], Labels | None]] = field(default_factory=dict)
    readers: tuple[str, ...] = ()
    refused: Callable[[Any], str | None] = lambda trainer: None
    not_replaced: Callable[[Any], tuple[str, ...]] = lambda trainer: (
        ("compute_metrics: TRL builds full logits for it in evaluation",) * bool(trainer.compute_metrics)
    )


def reads_logits_refused(trainer: Any) -> str | None:
    """Why a trainer that reads logits position by position cannot have them taken away; None where it can."""
    if getattr(trainer, "is_encoder_decoder", False):
        return "its model is an encoder-decoder; expected a causal language model"
    for name, config in (getattr(trainer.model, "peft_config", None) or {}).items():
        if config.is_prompt_learning and config.peft_type != "PREFIX_TUNING":
            return (
                f"adapter {name!r} puts virtual tokens before the input ({config.peft_type.value}), and this trainer "
                "reads logits and labels position by position; expected an adapter that leaves the length as it is"
            )
    return None
