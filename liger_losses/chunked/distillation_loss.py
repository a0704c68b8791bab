"""The token mean of a distillation as a loss object: not among `losses`, since `fused_linear_distillation` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .._checks import check_choice, check_count, check_divides, check_float_tensor, check_names
from .._constants import taken
from .._weighting import divided, divisor, weighted
from ..kernels import DISTILLATION
from .loss import check_statistics

COUNT, WEIGHTS = "num_items_in_batch", "token_weights"  # its inputs
_REPORT = (*DISTILLATION, "soft", "hard")
_TERMS = {"soft": "divergence", "hard": "logprob"}  # and the statistic of each


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """The token mean of `distillation` as a loss object of `fused_linear_loss`'s protocol.

    `sum_t w_t distillation_t / max(1, scored tokens)`; divided by `num_items_in_batch` instead where that is given: the
    count over all micro-batches and ranks of an optimiser step. `reduction="sum"` divides by nothing.

    `fused_linear_distillation` is what calls it: the statistics need a teacher, which `fused_linear_loss` has none of.

    Inputs: `token_weights` `w` `[R, T]`, which may require a gradient; a token of weight 0 contributes 0, whatever it
        holds. `num_items_in_batch` without dimensions.
    Metrics: by the names in `report`. Statistics, `"logprob"` under the name `nll`: plain means over the scored tokens,
        whatever the weights, the reduction and the count. `"soft"` and `"hard"`: the terms of the loss, with its token
        weights and its divisor, so that it is `soft_weight c soft + hard_weight hard`.
    """

    report: tuple[str, ...] = ("divergence",)
    reduction: str = "mean"

    separability = "token"
    differentiable = ("distillation",)

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, ("mean", "sum"))
        if self.report not in ((), []):
            check_statistics("report", self.report, _REPORT)

    @property
    def statistics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("distillation", *(_TERMS.get(name, name) for name in self.report))))

    def prepare(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_names("inputs", inputs, (WEIGHTS, COUNT))
        if WEIGHTS in inputs:
            check_float_tensor(WEIGHTS, inputs[WEIGHTS], tuple(mask.shape))
        if COUNT in inputs:
            check_divides(COUNT, self.reduction)
            check_count(COUNT, inputs[COUNT])
        return {name: taken(value, mask.device) for name, value in inputs.items()}

    def totals(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scored = mask.sum().clamp_min(1)
        if self.reduction == "sum":
            return {"count": torch.ones_like(scored), "scored": scored}
        return {"count": divisor(inputs[COUNT]) if COUNT in inputs else scored, "scored": scored}

    def __call__(
        self, statistics: Mapping[str, Tensor], mask: Tensor, inputs: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        def term(name: str) -> Tensor:
            each = statistics[name].masked_fill(~mask, 0)
            if WEIGHTS in inputs:
                each = weighted(each, inputs[WEIGHTS], mask)
            return divided(each.sum(), totals["count"])

        metrics = {}
        for name in self.report:
            each = statistics[_TERMS.get(name, name)].detach()
            mean = divided(each.masked_fill(~mask, 0).sum(), totals["scored"])
            metrics[name] = term(_TERMS[name]).detach() if name in _TERMS else mean
        if "logprob" in metrics:
            metrics["nll"] = -metrics.pop("logprob")
        if "hard" in metrics:
            metrics["hard"] = -metrics["hard"]
        return term("distillation"), metrics
