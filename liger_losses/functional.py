"""The losses as functions, under liger-kernel's names and in its argument order: `_input` first, then the weight.

(The modules' `forward` takes the weight first. That is liger-kernel's interface, too; a swap raises.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .chunked import ScoredTokens
from .modules import LigerFusedLinearDPOLoss


def liger_fused_linear_dpo(
    _input: Tensor,  # [2B, T, H], chosen rows first
    weight: Tensor,  # [V, H]
    target: Tensor | ScoredTokens,  # [2B, T]
    bias: Tensor | None = None,  # [V]
    ref_input: Tensor | None = None,  # [2B, T, H']
    ref_weight: Tensor | None = None,  # [V, H']
    ref_bias: Tensor | None = None,  # [V]
    ignore_index: int = -100,
    beta: float = 0.1,
    compute_nll_loss: bool = False,
    compiled: bool = True,
    use_ref_model: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
    loss_type: str | Sequence[str] = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    alpha: float = 1.0,
    *,
    ref_chosen_logps: Tensor | None = None,  # [B]
    ref_rejected_logps: Tensor | None = None,  # [B]
    **options: Any,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`LigerFusedLinearDPOLoss` as a function; `options` are its keyword-only ones. Returns and raises what it does."""
    module = LigerFusedLinearDPOLoss(
        ignore_index,
        beta,
        alpha,
        compute_nll_loss,
        compiled,
        use_ref_model,
        average_log_prob,
        chunk_size,
        loss_type,
        label_smoothing,
        discopop_tau,
        **options,
    )
    return module(
        weight,
        _input,
        target,
        bias,
        ref_input,
        ref_weight,
        ref_bias,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
    )
