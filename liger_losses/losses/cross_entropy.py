"""Cross entropy of the target tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import check_choice, check_mask

_REDUCTIONS = ("mean", "sum")
_COUNT = "num_items_in_batch"


def cross_entropy_loss(
    logprobs: Tensor,  # [R, T]
    mask: Tensor,  # [R, T] bool, True where the token is scored
    *,
    reduction: str = "mean",
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Negative log-likelihood of the scored tokens, a scalar: `-sum_t logprob_t / n`, or the sum.

    `n` is the number of scored tokens, or `num_items_in_batch` when given: the count over all micro-batches and ranks
    that share one optimiser step, so that their losses add up to the loss of the whole. No scored token gives 0, with
    a zero gradient. Raises ValueError for an unknown reduction and for `num_items_in_batch` with reduction "sum".
    """
    inputs: dict[str, Tensor] = {}
    if num_items_in_batch is not None:
        inputs[_COUNT] = torch.as_tensor(num_items_in_batch)
    loss = CrossEntropyLoss(reduction=reduction)
    check_mask(mask, logprobs)
    return loss({"logprob": logprobs}, mask, inputs, loss.totals(mask, inputs))[0]


@dataclass(frozen=True, kw_only=True)
class CrossEntropyLoss:
    """`cross_entropy_loss` as a loss object (see the protocol in `liger_losses.chunked.loss`).

    `inputs` may hold `num_items_in_batch`, a tensor with no dimension. It concerns the batch, not its rows: only
    `totals` reads it.
    """

    reduction: str = "mean"

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, _REDUCTIONS)

    @property
    def separability(self) -> str:
        return "token"

    @property
    def statistics(self) -> tuple[str, ...]:
        return ("logprob",)

    def totals(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        unknown = sorted(set(inputs) - {_COUNT})
        if unknown:
            raise ValueError(f"inputs: got {', '.join(unknown)}, expected nothing but {_COUNT} with CrossEntropyLoss")
        count = inputs.get(_COUNT)
        if self.reduction == "sum":
            if count is not None:
                raise ValueError(f"{_COUNT}: got a count, expected none with reduction='sum', which divides by nothing")
            return {"tokens": torch.ones((), dtype=torch.int64, device=mask.device)}
        if count is None:
            return {"tokens": mask.sum().clamp_min(1)}
        if count.dim() != 0:
            raise ValueError(f"{_COUNT}: got shape {list(count.shape)}, expected a tensor with no dimension")
        return {"tokens": count.to(mask.device, non_blocking=True).clamp_min(1)}

    def __call__(
        self,
        statistics: Mapping[str, Tensor],
        mask: Tensor,
        inputs: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        total = -statistics["logprob"].masked_fill(~mask, 0).sum()
        return total / totals["tokens"], {}
