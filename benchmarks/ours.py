"""The rows of liger_losses. A new loss is one entry of `FUSED`.

Targets are handed over on the host, where a data loader leaves them: the library copies them itself, and then waits for
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import distillation
from .cases import (
    BETAS,
    DPO_BETA,
    GRPO_BETA,
    IGNORE_INDEX,
    KTO_BETA,
    ORPO_BETA,
    SIMPO_BETA,
    SIMPO_GAMMA,
    Case,
    Inputs,
    advantages,
    preferred,
)
from .implementations import PEERS, Implementation, Step, does

SHARE_OF_TRL = 6
DEFAULT_BUDGET = 400 * 2**20


def _cross_entropy(inputs: Inputs, options: dict[str, Any]) -> Step:
    from liger_losses.chunked import fused_linear_loss
    from liger_losses.losses import CrossEntropyLoss

    loss = CrossEntropyLoss()
    return lambda: fused_linear_loss(loss, inputs.hidden, inputs.weight, inputs.loaded, **options)[0]


def _dpo(inputs: Inputs, options: dict[str, Any]) -> Step:
    from liger_losses import LigerFusedLinearDPOLoss

    module = LigerFusedLinearDPOLoss(beta=DPO_BETA, **options)
    reference = {"ref_input": inputs.reference_hidden, "ref_weight": inputs.reference_weight}
    return lambda: module(inputs.weight, inputs.hidden, inputs.loaded, **reference)[0]


def _orpo(inputs: Inputs, options: dict[str, Any]) -> Step:
    from liger_losses import LigerFusedLinearORPOLoss

    module = LigerFusedLinearORPOLoss(beta=ORPO_BETA, **options)
    return lambda: module(inputs.weight, inputs.hidden, inputs.loaded)[0]


def _simpo(inputs: Inputs, options: dict[str, Any]) -> Step:
    from liger_losses import LigerFusedLinearSimPOLoss

    module = LigerFusedLinearSimPOLoss(beta=SIMPO_BETA, gamma=SIMPO_GAMMA, compute_nll_loss=False, **options)
    return lambda: module(inputs.weight, inputs.hidden, inputs.loaded)[0]


def _kto(inputs: Inputs, options: dict[str, Any]) -> Step:
    from liger_losses import LigerFusedLinearKTOLoss

    module = LigerFusedLinearKTOLoss(beta=KTO_BETA, use_ref_model=True, **options)
    labels, kl = preferred(len(inputs.hidden), inputs.hidden.device), inputs.hidden.new_zeros((), dtype=torch.float32)
    more = {"ref_input": inputs.reference_hidden, "ref_weight": inputs.reference_weight, "kl": kl}
    return lambda: module(inputs.hidden, inputs.weight, inputs.loaded, preference_labels=labels, **more)[0]


def _grpo(inputs: Inputs, options: dict[str, Any]) -> Step:
    from liger_losses import LigerFusedLinearGRPOLoss

    module = LigerFusedLinearGRPOLoss(beta=GRPO_BETA, **options)
    mask, per_row = inputs.loaded != IGNORE_INDEX, advantages(len(inputs.hidden), inputs.hidden.device)
    reference = {"ref_input": inputs.reference_hidden, "ref_weight": inputs.reference_weight}
    return lambda: module(inputs.hidden, inputs.weight, inputs.loaded, mask, per_row, **reference)[0]


# By workload: what builds the step, and the separability under which the planner sees it.
FUSED: dict[str, tuple[Callable[[Inputs, dict[str, Any]], Step], str]] = {
    "ce": (_cross_entropy, "token"),
    "dpo": (_dpo, "pair"),
    "orpo": (_orpo, "pair"),
    "simpo": (_simpo, "pair"),
    "kto": (_kto, "sequence"),
    "grpo": (_grpo, "token"),
    **{name: (partial(distillation.ours, beta=beta), "token") for name, beta in BETAS.items()},
}


def _build(options: dict[str, Any], case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
    return FUSED[case.workload][0](inputs, {**options, "memory_budget": memory_budget})


def _logprobs(options: dict[str, Any], hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from liger_losses import linear_logprobs

    return linear_logprobs(hidden, weight, target, **options)


def predicted_extra(options: dict[str, Any], case: Case, memory_budget: int | None) -> int:
    """Bytes beyond inputs and returned gradients that the planner announces."""
    from liger_losses.chunked.planner import plan

    return plan(
        tokens=case.rows * case.length,
        scored=[case.scored // case.rows] * case.rows,
        hidden_size=case.head.hidden,
        vocab_size=case.head.vocab,
        separability=FUSED[case.workload][1],
        trainable_head=not case.frozen,
        teacher_hidden_size=case.teacher.hidden if case.teacher else None,
        memory_budget=memory_budget,
        **options,
    ).workspace


def minimum_budget(extra: Mapping[str, int]) -> int:
    """A sixth of what TRL's fused head was measured to need in the same run."""
    measured = extra.get("TRL fused head")
    return DEFAULT_BUDGET if measured is None else measured // SHARE_OF_TRL


def peers_budget(extra: Mapping[str, int]) -> int:
    """What liger-kernel's chunked loss was measured to need in the same run."""
    return extra.get("liger-kernel, compiled", DEFAULT_BUDGET)


def row(name: str, options: dict[str, Any], **fields: Any) -> Implementation:
    fields.setdefault("applies", does(*FUSED))
    fields.update(logprobs=partial(_logprobs, options), predict=partial(predicted_extra, options))
    return Implementation(name, partial(_build, options), "liger_losses.losses", ours=True, **fields)


# What the immediate strategy is an alternative to: it is cross entropy's default, and distillation's is "cached".
_SEPARABLE = does(*(name for name in FUSED if name not in ("ce", *BETAS)), frozen=False)
_AS_LIGER: dict[str, Any] = {"budget": peers_budget, "applies": does(*BETAS, frozen=False)}
_SMALL: dict[str, Any] = {"budget": minimum_budget, "applies": does("ce", "dpo", frozen=False)}

OURS = (
    row("ours (fp32 logits)", {"logits_dtype": "float32"}),
    row("ours (bf16 logits)", {"logits_dtype": "input"}),
    # A frozen head has no [V, H] accumulator to save: its default already is the small one.
    row("ours (cached, fp32)", {"strategy": "cached"}, applies=_SEPARABLE),
    row("ours (cached, bf16)", {"strategy": "cached", "logits_dtype": "input"}, applies=_SEPARABLE),
    row("ours (liger-kernel's memory, fp32)", {"logits_dtype": "float32"}, **_AS_LIGER),
    row("ours (liger-kernel's memory, bf16)", {"logits_dtype": "input"}, **_AS_LIGER),
    row("ours (min memory, fp32)", {"strategy": "recompute"}, **_SMALL),
    row("ours (min memory, bf16)", {"strategy": "recompute", "logits_dtype": "input"}, **_SMALL),
)

# Peers first: the memory budget of the last row is a share of what TRL was measured to need.
IMPLEMENTATIONS: tuple[Implementation, ...] = (*PEERS, *OURS)
