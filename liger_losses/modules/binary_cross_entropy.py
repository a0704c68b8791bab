"""Binary cross entropy over a label space too large for its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._checks import check_choice, check_float_tensor
from .._weighting import weighted
from ..chunked import fused_linear_loss, linear_logprobs
from ..losses import BinaryCrossEntropyLoss
from .base import CallOptions, check_head_as
from .engine_options import EngineOptions, with_engine_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LigerFusedLinearBCELoss(torch.nn.Module):
    """Binary cross entropy over a label space too large for its logits: extreme multi-label classification.

    `liger_losses.losses.BinaryCrossEntropyLoss` of `z = _input @ lin_weight.T + bias`. The positive labels of a row are
    given by their ids, `[N, P]`, filled up with `ignore_index` (not as a row of zeros and ones); an id that is repeated
    counts once, and a row without any is scored, all its labels being negative.

    Args:
        reduction: `"mean"` over rows and labels, `"sum"`, or `"none"`: the sum over labels of each row.
        ignore_index: fills up the places of a row with fewer positives than others.
        softcap, logit_scale, temperature: of the logits.
        memory_budget, logits_dtype, strategy, active_vocab: of `fused_linear_loss`.
    """

    @with_engine_options
    def __init__(
        self,
        reduction: str = "mean",
        ignore_index: int = -100,
        **engine: Unpack[EngineOptions],
    ) -> None:
        super().__init__()
        check_choice("reduction", reduction, ("mean", "sum", "none"))
        self.reduction = reduction
        self.options = CallOptions(ignore_index=ignore_index, **engine)
        if self.options.strategy == "immediate" and reduction == "none":
            raise ValueError("strategy: got 'immediate' with reduction='none', expected a deferred strategy")

    def forward(
        self,
        lin_weight: Tensor,  # [V, H]
        _input: Tensor,  # [N, H]
        positives: Tensor,  # [N, P] labels of each row, ignore_index where there are fewer; repeated ones count once
        bias: Tensor | None = None,  # [V]
        *,
        row_weights: Tensor | None = None,  # [N]
    ) -> Tensor:
        """The loss of N rows.

        Args:
            lin_weight: `[V, H]`, the head: a row for each label.
            _input: `[N, H]`, the hidden states that go into it. Their dtype is the head's, but under autocast.
            positives: `[N, P]` integer, the positive labels of each row; `ignore_index` where there are fewer. Repeated
                ones count once.
            bias: `[V]`, the head's.
            row_weights: `[N]` floating-point, a factor a row; the divisor does not count it.

        Returns:
            The loss in nats, fp32 (fp64 for fp64): a scalar, or `[N]` with reduction "none".

        Raises:
            TypeError, ValueError: before any work, naming the argument.
        """
        if not isinstance(positives, Tensor) or positives.dim() != 2:
            seen = list(positives.shape) if isinstance(positives, Tensor) else type(positives).__name__
            raise ValueError(f"positives: got {seen}, expected a tensor [rows, labels]")
        check_head_as(("_input", "lin_weight", "bias"), _input, lin_weight, bias, positives.shape[:1], "positives")
        if row_weights is not None:
            check_float_tensor("row_weights", row_weights, (len(positives),))
        # Every row is scored, also one without a positive. On the host: counting them waits for nothing.
        target = torch.zeros(1, len(positives), dtype=torch.int64, device="cpu")
        options = {**self.options.policy(), "strategy": self.options.strategy, "positives": positives.unsqueeze(0)}
        if self.reduction == "none":
            loss = -linear_logprobs(_input.unsqueeze(0), lin_weight, target, bias, **options).squeeze(0)
            return loss if row_weights is None else weighted(loss, row_weights, torch.ones_like(loss, dtype=torch.bool))
        inputs = {} if row_weights is None else {"token_weights": row_weights.unsqueeze(0)}
        loss = BinaryCrossEntropyLoss(labels=len(lin_weight), reduction=self.reduction)
        return fused_linear_loss(loss, _input.unsqueeze(0), lin_weight, target, bias, inputs=inputs, **options)[0]

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, {self.options}"
