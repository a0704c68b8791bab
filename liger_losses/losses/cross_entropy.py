"""Cross entropy of the target tokens, with everything that is done to it in training a language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .._checks import (
    check_choice,
    check_count,
    check_divides,
    check_flag,
    check_float_tensor,
    check_mask,
    check_names,
    check_number,
    check_size,
)
from .._constants import taken, wide
from .._weighting import divided, divisor, weighted
from .selection import TokenSelection

REDUCTIONS = ("mean", "sum")
_COUNT = "num_items_in_batch"
_PER_TOKEN = ("token_weights", "class_weights")


def cross_entropy_loss(
    logprobs: Tensor,  # [R, T]
    mask: Tensor,  # [R, T] bool, True where the token is scored
    *,
    mean_logprobs: Tensor | None = None,  # [R, T], for label_smoothing
    lse: Tensor | None = None,  # [R, T], for lse_square_scale
    entropy: Tensor | None = None,  # [R, T], for a selection by entropy
    token_weights: Tensor | None = None,  # [R, T]
    class_weights: Tensor | None = None,  # [R, T], the weight of each token's class
    num_items_in_batch: Tensor | int | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    use_token_scaling: bool = False,
    selection: TokenSelection | None = None,
) -> Tensor:
    """Cross entropy of the scored tokens: `CrossEntropyLoss` (see there) on statistics that exist. Returns a scalar.

    Raises ValueError for a statistic that an option needs and that is missing, or that none reads.
    """
    loss = CrossEntropyLoss(
        reduction=reduction,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        use_token_scaling=use_token_scaling,
        selection=selection,
    )
    check_mask(mask, logprobs)
    statistics = {"logprob": wide(logprobs)}
    given = {"mean_logprob": ("mean_logprobs", mean_logprobs), "lse": ("lse", lse), "entropy": ("entropy", entropy)}
    for name, (argument, value) in given.items():
        if value is None and name in loss.statistics:
            raise ValueError(f"{argument}: got None, expected a tensor for the options of {loss}")
        if value is None:
            continue
        if name not in loss.statistics:
            raise ValueError(f"{argument}: got a tensor, expected None: no option of {loss} reads it")
        check_float_tensor(argument, value, tuple(mask.shape))
        statistics[name] = wide(value)
    inputs = {"token_weights": token_weights, "class_weights": class_weights}
    present = {name: value for name, value in inputs.items() if value is not None}
    if num_items_in_batch is not None:
        present[_COUNT] = check_count(_COUNT, num_items_in_batch)
    present = loss.prepare(mask, present)
    return loss(statistics, mask, present, loss.totals(mask, present))[0]


@dataclass(frozen=True, kw_only=True)
class CrossEntropyLoss:
    """Cross entropy as a loss object (see the protocol in `liger_losses.chunked.loss`). Of a scored token of label `y`:

        nll     = -(1 - s) c_y log p_y - s mean_v(c_v log p_v)          s: label_smoothing, c: class weights
        z_loss  = lse_square_scale * lse^2
        loss    = k w (nll + z_loss)                                    w: token_weights
        k       = p_y, as a constant, with use_token_scaling; else 1

    `mean` divides the first part by the sum of `c_y`, as `torch.nn.functional.cross_entropy` does (without class
    weights, the number of scored tokens), and the z-loss by the number of scored tokens; both by `num_items_in_batch`
    when given: the count, > 0, over all micro-batches and ranks that share one optimiser step, so that their losses add
    up to the loss of the whole. Divisors of 0 are taken as 1: no scored token gives 0, with a zero gradient.

    Args:
        reduction: `"mean"` or `"sum"`.
        label_smoothing: in `[0, 1)`; the head's `column_weights` must be the class weights, where there are any.
        lse_square_scale: of the z-loss (PaLM, arXiv:2204.02311).
        use_token_scaling: dynamic fine-tuning, DFT (arXiv:2508.05629).
        selection: only the tokens that a `TokenSelection` picks (ESLM, arXiv:2505.19893); it needs the whole batch.
        report_accuracy: adds the metric `token_accuracy`, the share of scored tokens whose label is the first maximum.

    `inputs` may hold `token_weights` and `class_weights` `[R, T]`, and `num_items_in_batch` without dimensions. A token
    of weight 0 contributes 0 and sends no gradient back, whatever its cross entropy holds.

    Metrics: `z_loss`, the part of it in the loss, if there is one.
    """

    reduction: str = "mean"
    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0
    use_token_scaling: bool = False
    selection: TokenSelection | None = None
    report_accuracy: bool = False

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, REDUCTIONS)
        check_number("label_smoothing", self.label_smoothing, low=0)
        if self.label_smoothing >= 1:
            raise ValueError(f"label_smoothing: got {self.label_smoothing}, expected 0 <= label_smoothing < 1")
        check_number("lse_square_scale", self.lse_square_scale, low=0)
        check_flag("use_token_scaling", self.use_token_scaling)
        check_flag("report_accuracy", self.report_accuracy)
        if self.selection is not None and not isinstance(self.selection, TokenSelection):
            raise TypeError(f"selection: got {type(self.selection).__name__}, expected a TokenSelection")

    @property
    def separability(self) -> str:
        return "token" if self.selection is None else "batch"

    @property
    def differentiable(self) -> tuple[str, ...]:
        optional = {"mean_logprob": self.label_smoothing > 0, "lse": self.lse_square_scale > 0}
        return ("logprob", *(name for name, wanted in optional.items() if wanted))

    @property
    def statistics(self) -> tuple[str, ...]:
        scored_by_entropy = self.selection is not None and self.selection.by == "entropy"
        return self.differentiable + ("entropy",) * scored_by_entropy + ("is_top1",) * self.report_accuracy

    def prepare(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        known = (*_PER_TOKEN, _COUNT)
        check_names("inputs", inputs, known)
        for name in _PER_TOKEN:
            if name in inputs:
                check_float_tensor(name, inputs[name], tuple(mask.shape))
        if _COUNT in inputs:
            self._check_count(inputs[_COUNT])

        def read(value: Tensor) -> Tensor:
            return taken(wide(value) if value.is_floating_point() else value, mask.device)

        return {name: read(value) for name, value in inputs.items()}

    def _check_count(self, count: Tensor) -> None:
        check_divides(_COUNT, self.reduction)
        if self.selection is not None:
            raise ValueError(
                f"{_COUNT}: got a count, expected none with a selection, which divides by the tokens that it picks"
            )
        check_count(_COUNT, count)

    def totals(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.reduction == "sum":
            one = torch.ones((), dtype=torch.int64, device=mask.device)
            return {"tokens": one, "weights": one, "scored": mask.sum().clamp_min(1)}
        tokens = divisor(inputs[_COUNT]) if _COUNT in inputs else mask.sum().clamp_min(1)
        weights = tokens
        if "class_weights" in inputs and _COUNT not in inputs:
            total = inputs["class_weights"].masked_fill(~mask, 0).sum()
            weights = torch.where(total == 0, torch.ones_like(total), total)
        return {"tokens": tokens, "weights": weights, "scored": mask.sum().clamp_min(1)}

    def parts(
        self, statistics: Mapping[str, Tensor], mask: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Of every token, zero where it is not scored: cross entropy and z-loss `[r, T]`, before any division."""
        scored = {name: value.masked_fill(~mask, 0) for name, value in statistics.items() if name != "is_top1"}
        logprob = scored["logprob"]
        nll = -logprob
        if "class_weights" in inputs:
            nll = weighted(nll, inputs["class_weights"], mask)
        if self.label_smoothing > 0:
            nll = (1 - self.label_smoothing) * nll - self.label_smoothing * scored["mean_logprob"]
        z_loss = self.lse_square_scale * scored["lse"] ** 2 if self.lse_square_scale > 0 else None
        scale = None
        if "token_weights" in inputs:
            scale = inputs["token_weights"].masked_fill(~mask, 0).to(nll.dtype)
        if self.use_token_scaling:
            probability = logprob.detach().exp()
            scale = probability if scale is None else scale * probability
        if scale is not None:
            nll, z_loss = weighted(nll, scale, mask), None if z_loss is None else weighted(z_loss, scale, mask)
        return nll, z_loss

    def __call__(
        self,
        statistics: Mapping[str, Tensor],
        mask: Tensor,
        inputs: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        nll, z_loss = self.parts(statistics, mask, inputs)
        divisors = totals["weights"], totals["tokens"]
        if self.selection is not None:
            picked = self.selection.weights(statistics, mask)
            nll, z_loss = weighted(nll, picked, mask), None if z_loss is None else weighted(z_loss, picked, mask)
            if self.reduction == "mean":
                divisors = self._divisors(picked, mask, inputs)
        loss = divided(nll.sum(), divisors[0])
        metrics = {}
        if z_loss is not None:
            share = divided(z_loss.sum(), divisors[1])
            loss, metrics["z_loss"] = loss + share, share.detach()
        if self.report_accuracy:
            metrics["token_accuracy"] = (statistics["is_top1"] & mask).sum() / totals["scored"]
        return loss, metrics

    def _divisors(self, picked: Tensor, mask: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """As `totals`, over the tokens picked: positive where any token is scored."""
        tokens = picked.sum()
        weights = tokens
        if "class_weights" in inputs:
            weights = (picked * inputs["class_weights"].masked_fill(~mask, 0)).sum()
        weights, tokens = (torch.where(total == 0, torch.ones_like(total), total) for total in (weights, tokens))
        return weights, tokens


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropyLoss:
    """Binary cross entropy over a large label space, every label an independent yes or no.

    With the engine's `positives` `S` of a row, `loss = -log P = sum_v softplus(z_v) - sum_{v in S} z_v`; `mean` divides
    by the number of scored rows times `labels`, as `torch.nn.functional.binary_cross_entropy_with_logits` does.

    Args:
        labels: V, what a row's mean is taken over. reduction: `"mean"` or `"sum"`.

    `inputs` may hold `token_weights` `[R, T]`, one factor for each row of labels.
    """

    labels: int
    reduction: str = "mean"

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, REDUCTIONS)
        check_size("labels", self.labels)

    @property
    def separability(self) -> str:
        return "token"

    @property
    def statistics(self) -> tuple[str, ...]:
        return ("logprob",)

    def prepare(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_names("inputs", inputs, ("token_weights",))
        for name, value in inputs.items():
            check_float_tensor(name, value, tuple(mask.shape))
        return {name: taken(value, mask.device) for name, value in inputs.items()}

    def totals(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.reduction == "sum":
            return {"entries": torch.ones((), dtype=torch.int64, device=mask.device)}
        return {"entries": mask.sum().clamp_min(1) * self.labels}

    def __call__(
        self,
        statistics: Mapping[str, Tensor],
        mask: Tensor,
        inputs: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -statistics["logprob"].masked_fill(~mask, 0)
        if "token_weights" in inputs:
            loss = weighted(loss, inputs["token_weights"], mask)
        return loss.sum() / totals["entries"], {}
