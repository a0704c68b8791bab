"""The oracle of `liger_losses.testing`, and what only this repository's own tests need beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_losses.testing import Case, check_close, check_loss, make_case, unfused, unfused_loss
from liger_losses.testing.oracle import (
    DIFFERENTIABLE,
    IGNORE,
    STATISTICS,
    TRANSFORMS,
    largest,
    read_statistics,
    transformed,
)

__all__ = [
    "DIFFERENTIABLE",
    "DTYPES",
    "EXACT",
    "IGNORE",
    "STATISTICS",
    "TRANSFORMS",
    "Case",
    "ToyLoss",
    "check_close",
    "check_gradients",
    "check_loss",
    "check_statistics",
    "largest",
    "make_case",
    "read_statistics",
    "send_back",
    "transformed",
    "unfused",
    "unfused_loss",
    "upstream",
]

EXACT = {"argmax": torch.int64, "is_top1": torch.bool}  # compared bit by bit
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_statistics(got: Mapping[str, Tensor], case: Case, *, logits: torch.dtype | None = None) -> None:
    """Statistics against fp64. Logits are fp32 (fp64 for fp64) unless `logits` says otherwise."""
    wide = torch.float64 if case.compute == torch.float64 else torch.float32
    rounded = case.rounded()
    exact, naive = unfused(rounded.to(torch.float64)), unfused(rounded.to(logits or wide))
    scale = max(largest(exact[name]) for name in ("lse", "mean_logit", "logprob", "mean_logprob"))
    for name, value in got.items():
        if name in EXACT:
            assert value.dtype == EXACT[name]
            assert torch.equal(value, exact[name])
            continue
        assert value.dtype == wide, name
        check_close(value, exact[name], naive[name], logits or wide, terms=case.terms, scale=scale, what=name)


def check_gradients(got: Sequence[Tensor], exact: Sequence[Tensor], naive: Sequence[Tensor], case: Case) -> None:
    """Gradients of the case's leaves against fp64, as the products' dtype allows."""
    # Of one class nothing is left of any coefficient but what rounding leaves.
    scale = 1.0 if case.weight.shape[0] == 1 else 0.0
    for gradient, want, other, leaf in zip(got, exact, naive, case.leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        what = f"gradient of {tuple(leaf.shape)}"
        check_close(gradient, want, other, case.compute, terms=case.terms, scale=scale, what=what)


def upstream(case: Case, names: Sequence[str], seed: int = 1) -> dict[str, Tensor]:
    """A gradient for each statistic, different at every position, those that are not scored included."""
    generator = torch.Generator().manual_seed(seed)
    shape = case.target.shape
    return {n: torch.randn(shape, generator=generator, dtype=torch.float64).to(case.hidden.device) for n in names}


def send_back(values: Mapping[str, Tensor], sent: Mapping[str, Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of `leaves` for the upstream gradients `sent`; zeros where a leaf is not reached."""
    if not leaves:
        return []
    if not sent:
        return [torch.zeros_like(leaf) for leaf in leaves]
    total = sum((values[name] * gradient.to(values[name].dtype)).sum() for name, gradient in sent.items())
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


@dataclass(frozen=True)
class ToyLoss:
    """A loss of any statistics at any separability, with different coefficients for every token and statistic.

    Optional inputs: `weight` per token or row, `offset` per unit.
    """

    separability: str = "pair"
    statistics: tuple[str, ...] = ("logprob",)

    def totals(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows = mask.new_ones(mask.shape[0]).sum()
        return {"tokens": mask.sum().clamp_min(1), "rows": rows.clamp_min(1)}

    def __call__(
        self, statistics: Mapping[str, Tensor], mask: Tensor, inputs: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        seen = {name: statistics[name].masked_fill(~mask, 0) for name in self.statistics}
        score = sum((0.4 + k) * torch.tanh(seen[n] / 6) for k, n in enumerate(self.statistics) if n not in EXACT)
        score = torch.where(mask, score * (2 - seen[self.statistics[0]].tanh()), 0)
        if "weight" in inputs:
            weight = inputs["weight"]
            score = score * (weight.masked_fill(~mask, 0) if weight.dim() == 2 else weight.unsqueeze(-1))
        if self.separability == "token":
            return score.sum() / totals["tokens"], {"score": score.detach().sum()}
        rows = score.sum(-1)
        if self.separability == "batch":
            return torch.cat([rows, rows.new_zeros(1)]).logsumexp(0), {"rows": rows.detach()}
        units = rows.view(2, -1).diff(dim=0).squeeze(0) if self.separability == "pair" else rows
        units = torch.nn.functional.softplus(units + inputs.get("offset", 0))
        return units.sum() / totals["rows"], {"units": units.detach(), "score": score.detach().sum()}
