"""The true loss and gradients of a case, in float64, and relative errors against them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import distillation
from .cases import IGNORE_INDEX, WORKLOADS, Case, Inputs


@dataclass
class Truth:
    loss: float
    logprobs: Tensor  # [N] of scored tokens, fp64
    hidden: Tensor  # [R, T, H]
    weight: Tensor | None  # [V, H]; None when the head is frozen


@torch.no_grad()
def truth(case: Case, inputs: Inputs, dtype: torch.dtype = torch.float64, chunk: int = 1024) -> Truth:
    """Loss and gradients at the case's own shape, unfused but for a walk over ``chunk`` tokens.

    The inputs' rounded values are the exact inputs. Memory: two ``[V, H]`` and a few ``[chunk, V]`` of ``dtype``.
    """
    scored = inputs.target != IGNORE_INDEX
    of_logprobs = WORKLOADS[case.workload].loss
    if of_logprobs is None:
        loss, logprobs, products, d_weight = distillation.pieces(case, inputs, dtype, chunk)
        return _kept(inputs, scored, loss, logprobs, products, d_weight)
    target = inputs.target[scored]

    def score(hidden: Tensor, weight: Tensor) -> Tensor:
        grid = torch.zeros(inputs.target.shape, dtype=dtype, device=hidden.device)
        rows = []
        for x, y in zip(hidden.split(chunk), target.split(chunk), strict=True):
            logits = x @ weight.T
            rows.append(logits.gather(1, y[:, None]).squeeze(1) - logits.logsumexp(1))
        grid[scored] = torch.cat(rows)
        return grid

    reference = None
    if inputs.reference_hidden is not None and inputs.reference_weight is not None:
        reference = score(inputs.reference_hidden[scored].to(dtype), inputs.reference_weight.to(dtype))
    hidden, weight = inputs.hidden[scored].to(dtype), inputs.weight.to(dtype)
    logprobs = score(hidden, weight)
    with torch.enable_grad():
        leaf = logprobs.clone().requires_grad_()
        loss = of_logprobs(leaf, scored, reference)
        (factor,) = torch.autograd.grad(loss, leaf)

    d_weight = None if case.frozen else torch.zeros_like(weight)
    products = []
    pieces = (part.split(chunk) for part in (hidden, target, factor[scored]))
    for x, y, c in zip(*pieces, strict=True):
        d_logits = torch.softmax(x @ weight.T, 1).mul_(-c[:, None])
        d_logits.scatter_add_(1, y[:, None], c[:, None])
        products.append(d_logits @ weight)
        if d_weight is not None:
            d_weight.addmm_(d_logits.T, x)
    return _kept(inputs, scored, loss, logprobs[scored], products, d_weight)


def _kept(
    inputs: Inputs, scored: Tensor, loss: Tensor, logprobs: Tensor, products: list[Tensor], d_weight: Tensor | None
) -> Truth:
    """fp32 is 16 bits finer than the bf16 gradients compared with it, at half the memory."""
    d_hidden = torch.zeros(inputs.hidden.shape, dtype=torch.float32, device=scored.device)
    d_hidden[scored] = torch.cat(products).to(torch.float32)
    return Truth(loss.item(), logprobs, d_hidden, None if d_weight is None else d_weight.to(torch.float32))


def relative_error(out: Tensor | None, ref: Tensor, rows: int = 8192) -> float:
    """``||out - ref||_F / ||ref||_F`` in float64, a block of rows at a time; NaN when ``out`` is missing."""
    if out is None:
        return float("nan")
    error = torch.zeros((), dtype=torch.float64, device=ref.device)
    norm = torch.zeros_like(error)
    blocks = (part.detach().flatten(0, -2).split(rows) for part in (out, ref))
    for ours, true in zip(*blocks, strict=True):
        error += (ours.double() - true.double()).square().sum()
        norm += true.double().square().sum()
    return (error.sqrt() / norm.sqrt()).item()


def errors(loss: float, inputs: Inputs, true: Truth) -> dict[str, float]:
    """Relative errors of a loss value and of the gradients now on the inputs."""
    found = {"loss": abs(loss - true.loss) / abs(true.loss), "hidden": relative_error(inputs.hidden.grad, true.hidden)}
    if true.weight is not None:
        found["weight"] = relative_error(inputs.weight.grad, true.weight)
    return found


# Bound on an implementation's error: twice the naive low-precision error, plus this. The loss is one number, whose
# naive error can be small by luck, hence the rounding of bf16 itself; a gradient's is a norm over millions of entries.
SLACK = {"loss": 2.0**-8, "hidden": 2.0**-10, "weight": 2.0**-10}


def allowed(naive: dict[str, float]) -> dict[str, float]:
    return {name: 2 * error + SLACK[name] for name, error in naive.items()}


def within(found: dict[str, float], bound: dict[str, float]) -> bool:
    return all(found[name] <= limit for name, limit in bound.items())  # NaN is never within
