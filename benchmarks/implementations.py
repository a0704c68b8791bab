"""Who is measured: an :class:`Implementation` is one row of the tables; here the peers' (`ours` has our own)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from liger_losses.cli.measuring import full_logprobs

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
    WORKLOADS,
    Case,
    Inputs,
    Step,
    advantages,
    preferred,
)

LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Implementation:
    """One way of computing a case's loss.

    ``build(case, inputs, memory_budget)`` returns a function that computes the loss, ready for ``backward``;
    ``applies`` says of which cases. ``logprobs(hidden [R, T, H], weight [V, H], target [R, T]) -> [R, T]`` is given
    where per-token log-probabilities are exposed. ``budget`` picks the bytes handed to ``build`` from the extra memory
    measured so far, by implementation. ``predict(case, budget)`` is the extra memory that the implementation announces.
    """

    name: str
    build: Callable[[Case, Inputs, int | None], Step]
    module: str = "torch"
    applies: Callable[[Case], bool] = lambda case: True
    ours: bool = False
    needs_cuda: bool = False
    logprobs: LogProbs | None = None
    budget: Callable[[Mapping[str, int]], int] | None = None
    predict: Callable[[Case, int | None], int | None] | None = None

    def missing(self, device: torch.device) -> str | None:
        """Why this cannot run here, or None."""
        if self.needs_cuda and device.type != "cuda":
            return "needs a CUDA device"
        try:
            importlib.import_module(self.module)
        except Exception as error:  # an import fails in more ways than ImportError
            return f"missing: {str(error).partition(chr(10))[0]}"
        return None


def does(*workloads: str, frozen: bool = True) -> Callable[[Case], bool]:
    """Cases of these workloads; those with a frozen head too, unless ``frozen`` is false."""
    return lambda case: case.workload in workloads and (frozen or not case.frozen)


def from_logprobs(logprobs: LogProbs) -> Callable[[Case, Inputs, int | None], Step]:
    """A ``build`` that serves every workload: its loss on top of per-token log-probabilities."""

    def build(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
        loss = WORKLOADS[case.workload].loss
        assert loss is not None

        def step() -> Tensor:
            reference = None
            if inputs.reference_hidden is not None and inputs.reference_weight is not None:
                with torch.no_grad():
                    reference = logprobs(inputs.reference_hidden, inputs.reference_weight, inputs.target)
            policy = logprobs(inputs.hidden, inputs.weight, inputs.target)
            return loss(policy, inputs.target != IGNORE_INDEX, reference)

        return step

    return build


# Logits in full, softmax in fp32: what a model without a fused loss does.


def _full(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
    if case.distills:
        return distillation.whole_logits(case, inputs)
    return from_logprobs(full_logprobs)(case, inputs, memory_budget)


def _compiled(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
    of_logprobs = WORKLOADS[case.workload].loss
    assert of_logprobs is not None

    @torch.compile(dynamic=False)
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return of_logprobs(full_logprobs(hidden, weight, target), target != IGNORE_INDEX, None)

    return lambda: loss(inputs.hidden, inputs.weight, inputs.target)


# liger-kernel


def _liger_cross_entropy(
    accumulator: torch.dtype | None, case: Case, inputs: Inputs, memory_budget: int | None
) -> Step:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    # bias, class weights, ignore_index, z-loss, label smoothing, reduction, softcap, return z-loss, accumulator
    options = (None, None, IGNORE_INDEX, 0.0, 0.0, "mean", None, False, accumulator)
    target = inputs.target.flatten()
    return lambda: Function.apply(inputs.hidden.flatten(0, 1), inputs.weight, target, *options)[0]


def _liger_dpo(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    loss = LigerFusedLinearDPOLoss(beta=DPO_BETA, compiled=inputs.hidden.is_cuda)
    reference = {"ref_input": inputs.reference_hidden, "ref_weight": inputs.reference_weight}
    return lambda: loss(inputs.weight, inputs.hidden, inputs.target, **reference)[0]


def _liger_orpo(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
    from liger_kernel.chunked_loss import LigerFusedLinearORPOLoss

    loss = LigerFusedLinearORPOLoss(beta=ORPO_BETA, compiled=inputs.hidden.is_cuda)
    return lambda: loss(inputs.weight, inputs.hidden, inputs.target)[0]


def _liger_simpo(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
    from liger_kernel.chunked_loss import LigerFusedLinearSimPOLoss

    options = {"beta": SIMPO_BETA, "gamma": SIMPO_GAMMA, "compute_nll_loss": False}
    loss = LigerFusedLinearSimPOLoss(**options, compiled=inputs.hidden.is_cuda)
    return lambda: loss(inputs.weight, inputs.hidden, inputs.target)[0]


def _liger_kto(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
    from liger_kernel.chunked_loss import LigerFusedLinearKTOLoss

    loss = LigerFusedLinearKTOLoss(beta=KTO_BETA, use_ref_model=True, compiled=inputs.hidden.is_cuda)
    device = inputs.hidden.device
    labels, kl = preferred(case.rows, device), torch.zeros(1, device=device)
    reference = {"ref_input": inputs.reference_hidden, "ref_weight": inputs.reference_weight}
    return lambda: loss(inputs.hidden, inputs.weight, inputs.target, preference_labels=labels, kl=kl, **reference)[0]


def _liger_grpo(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=GRPO_BETA, loss_type="dapo", compiled=inputs.hidden.is_cuda)
    mask = (inputs.target != IGNORE_INDEX).long()
    per_row = advantages(case.rows, inputs.hidden.device)
    reference = {"ref_input": inputs.reference_hidden, "ref_weight": inputs.reference_weight}
    tokens = inputs.target.clamp_min(0)
    return lambda: loss(inputs.hidden, inputs.weight, tokens, mask, per_row, **reference)[0]


_LIGER = {
    "dpo": _liger_dpo,
    "orpo": _liger_orpo,
    "simpo": _liger_simpo,
    "kto": _liger_kto,
    "grpo": _liger_grpo,
    **dict.fromkeys(BETAS, distillation.liger_chunked),
}


def _liger_chunked(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
    return _LIGER[case.workload](case, inputs, memory_budget)


# cut-cross-entropy


def _cce_logprobs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, target, reduction="none", impl="cce").view(target.shape)


def _cce(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
    from cut_cross_entropy import linear_cross_entropy

    return lambda: linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, impl="cce")


# TRL: its fused head on the scored tokens, as its trainers call it on a GPU


@cache
def _trl_function() -> Any:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    try:
        importlib.import_module("trl.trainer.utils")
    except ImportError:
        # The backward takes one context manager from there, null without ZeRO-3. The module needs datasets and pandas,
        # which need not be installed to time a kernel.
        stand_in = ModuleType("trl.trainer.utils")
        vars(stand_in)["maybe_gather_lm_head_ctx"] = lambda *parameters: nullcontext()
        sys.modules[stand_in.__name__] = stand_in
    return ChunkedLogProbFunction


def _trl_logprobs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    scored = target != IGNORE_INDEX
    options = (1.0, 32768, None, 1.0, ())  # temperature, vocabulary chunk, softcap, logit scale, further statistics
    found = _trl_function().apply(hidden[scored], weight, None, target[scored], *options)[0]
    return torch.zeros(target.shape, dtype=found.dtype, device=found.device).masked_scatter(scored, found)


NAIVE = Implementation("full logits, eager", _full, logprobs=full_logprobs)
"""Its error sets the bound of the correctness gate."""

_TRITON_CE: dict[str, Any] = {"applies": does("ce"), "needs_cuda": True}
PEERS = (
    NAIVE,
    # One graph a head places the compiler in the table; each costs its compilation.
    Implementation("full logits, torch.compile", _compiled, applies=does("ce", frozen=False), needs_cuda=True),
    Implementation("liger-kernel", partial(_liger_cross_entropy, None), "liger_kernel", **_TRITON_CE),
    Implementation(
        "liger-kernel, fp32 accumulator", partial(_liger_cross_entropy, torch.float32), "liger_kernel", **_TRITON_CE
    ),
    Implementation("liger-kernel, compiled", _liger_chunked, "liger_kernel", applies=does(*_LIGER)),
    Implementation("cut-cross-entropy", _cce, "cut_cross_entropy", logprobs=_cce_logprobs, **_TRITON_CE),
    Implementation(
        "TRL fused head",
        from_logprobs(_trl_logprobs),
        "trl.kernels.chunked_logprob",
        applies=lambda case: not case.distills,
        logprobs=_trl_logprobs,
    ),
    Implementation(
        "liger-kernel, fused_linear_jsd",
        distillation.liger_fused,
        "liger_kernel",
        applies=does(*BETAS),
        needs_cuda=True,
    ),
    Implementation("TRL chunked divergence", distillation.trl_chunked, "trl.kernels", applies=does(*BETAS)),
)
