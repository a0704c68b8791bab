"""What a fused model answers, in a form that wrappers' mixed precision does not round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.integrations._outputs import ModelOutput


@dataclass
class FusedHeadOutput(ModelOutput):
    """Answer of a fused model. Per-token fields are zero where the label is -100, and None where not asked for.

    With T the length of `labels`, per-token fields are `[B, T - 1]`, field `t` scoring `labels[:, t + 1]`; with
    `shift_labels` they are `[B, T]`.

    Attributes:
        loss: Scalar: negative log-likelihood summed over scored tokens, over `num_items_in_batch` (their count when not
            given), plus `router_aux_loss_coef * aux_loss` when router logits are asked for.
        log_probs: Log-probability of each label, fp32.
        entropy: Entropy of the predicted distribution, in nats.
        log_sum_sq_probs: `log sum_v p_v^2`, without gradient.
        mean_logits: Mean over the vocabulary of the logits divided by the temperature, without gradient.
        is_top1: Whether the label is the most likely token, bool.
        label_mask: Whether the label is scored, bool.
        aux_loss: Scalar load-balancing loss of a mixture of experts.
        cache: Keys and values, with `use_cache=True` among the call's arguments.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None
    cache: Any = None

    @property
    def past_key_values(self) -> Any:  # transformers' former name of cache
        return self.cache


class _Unrounded:
    """The fields as they were made; no container of tensors to whoever walks through an answer."""

    def __init__(self, fields: dict[str, Tensor]) -> None:
        self.fields = fields


@dataclass
class _KeptOutput(FusedHeadOutput):
    """The same, whose floating-point fields stay what they are.

    FSDP2 casts what a wrapped module returns to its policy's `output_dtype`, which accelerate sets to its mixed
    precision's 16 bits, by making a new answer out of cast fields. Log-probabilities of 8 bits each, summed over a
    sequence, are off by more than a DPO loss can bear.
    """

    unrounded: _Unrounded | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unrounded is None:
            return
        for name, own in self.unrounded.fields.items():
            seen = getattr(self, name)
            if seen is not None and seen.dtype != own.dtype:
                setattr(self, name, _Kept.apply(own, seen))


class _Kept(torch.autograd.Function):
    """`own`, whose gradient visits `seen` too: a hook that waits for it there is run."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, seen: Tensor) -> Tensor:
        ctx.dtype = seen.dtype
        return own.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        return upstream, torch.zeros_like(upstream, dtype=ctx.dtype)


def answer_of(cache: Any, **fields: Tensor | None) -> FusedHeadOutput:
    """The answer of these fields."""
    if not (dist.is_available() and dist.is_initialized()):
        return FusedHeadOutput(cache=cache, **fields)
    wide = {name: value for name, value in fields.items() if value is not None and value.is_floating_point()}
    return _KeptOutput(cache=cache, **fields, unrounded=_Unrounded(wide))
