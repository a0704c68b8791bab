"""Distillation workloads: a divergence of two heads' next-token distributions, averaged over all tokens.

`jsd` is the Jensen-Shannon divergence at beta 0.5, `fkl` the KL divergence of the student from the teacher.
"""

from __future__ import annotations

import importlib
import math
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import BETAS, IGNORE_INDEX, Case, Inputs, Step


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """`[N]` of two logits `[N, V]`; beta 0 is forward KL."""
    s, t = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    if beta == 0:
        return F.kl_div(s, t, reduction="none", log_target=True).sum(-1)
    m = torch.logaddexp(s + math.log(1 - beta), t + math.log(beta))
    from_teacher, from_student = (F.kl_div(m, p, reduction="none", log_target=True).sum(-1) for p in (t, s))
    return beta * from_teacher + (1 - beta) * from_student


def whole_logits(case: Case, inputs: Inputs, dtype: torch.dtype | None = torch.float32) -> Step:
    """Both models' logits in full, the divergence in `dtype` (None: the inputs')."""
    beta = BETAS[case.workload]

    def step() -> Tensor:
        assert inputs.reference_hidden is not None
        assert inputs.reference_weight is not None
        scored = inputs.target != IGNORE_INDEX
        with torch.no_grad():
            teacher = inputs.reference_hidden[scored] @ inputs.reference_weight.T
        student = inputs.hidden[scored] @ inputs.weight.T
        return divergence(student.to(dtype), teacher.to(dtype), beta).mean()

    return step


def pieces(
    case: Case, inputs: Inputs, dtype: torch.dtype, chunk: int
) -> tuple[Tensor, Tensor, list[Tensor], Tensor | None]:
    """Loss, log-probabilities of the scored tokens, `dX` by chunks and `dW`, in `dtype`, `chunk` tokens at a time."""
    assert inputs.reference_hidden is not None
    assert inputs.reference_weight is not None
    scored = inputs.target != IGNORE_INDEX
    weight, other = inputs.weight.detach().to(dtype), inputs.reference_weight.to(dtype)
    tensors = (inputs.hidden.detach()[scored], inputs.reference_hidden[scored], inputs.target[scored])
    total, logprobs, d_hidden = weight.new_zeros(()), [], []
    d_weight = None if case.frozen else torch.zeros_like(weight)
    for x, tx, y in zip(*(tensor.split(chunk) for tensor in tensors), strict=True):
        hidden = x.to(dtype)
        z = hidden @ weight.T
        logprobs.append(z.gather(1, y[:, None]).squeeze(1) - z.logsumexp(1))
        with torch.enable_grad():
            z.requires_grad_()
            value = divergence(z, tx.to(dtype) @ other.T, BETAS[case.workload]).sum() / len(tensors[0])
            (d_logits,) = torch.autograd.grad(value, z)
        total += value.detach()
        d_hidden.append(d_logits @ weight)
        if d_weight is not None:
            d_weight.addmm_(d_logits.T, hidden)
    return total, torch.cat(logprobs), d_hidden, d_weight


def _head(inputs: Inputs) -> tuple[Any, ...]:
    """Student's and teacher's tensors, tokens flat."""
    assert inputs.reference_hidden is not None
    return inputs.hidden.flatten(0, 1), inputs.weight, inputs.reference_hidden.flatten(0, 1), inputs.reference_weight


def liger_chunked(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=BETAS[case.workload], compiled=inputs.hidden.is_cuda
    )
    return lambda: loss(*_head(inputs), inputs.target.flatten())


def liger_fused(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    loss = LigerFusedLinearJSD(jsd_beta=BETAS[case.workload])
    return lambda: loss(*_head(inputs), inputs.target.flatten())


def trl_chunked(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
    try:
        importlib.import_module("trl.trainer.utils")
    except ImportError:
        # One context manager is taken from there, null without ZeRO-3, by a module that needs pandas: see TRL's head.
        stand_in = ModuleType("trl.trainer.utils")
        vars(stand_in)["maybe_gather_lm_head_ctx"] = lambda *parameters: nullcontext()
        sys.modules[stand_in.__name__] = stand_in
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    options = (BETAS[case.workload], 1.0, 1.0, None, 1.0, None)  # beta, temperature, scale and softcap of each side

    def step() -> Tensor:
        hidden, weight, teacher_hidden, teacher_weight = _head(inputs)
        heads = (hidden, weight, None, teacher_hidden, teacher_weight, None)
        return ChunkedDivergenceFunction.apply(*heads, *options)[0].mean()

    return step


def ours(inputs: Inputs, options: dict[str, Any], beta: float) -> Step:
    from liger_losses import Divergence, fused_linear_distillation

    kind = Divergence(kind="jsd", beta=beta)
    teacher = {"teacher_hidden": inputs.reference_hidden, "teacher_weight": inputs.reference_weight}
    head = inputs.hidden, inputs.weight, inputs.loaded
    return lambda: fused_linear_distillation(*head, **teacher, divergence=kind, report=(), **options)[0]
