"""Losses over pairs of responses, chosen rows first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._checks import check_flag
from ..chunked import ScoredTokens
from ..losses import DPOLoss
from ..losses.pairs import pair_count
from .base import CallOptions, Reference, check_rows, fused_loss
from .engine_options import ReferenceOptions, with_reference_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LigerFusedLinearDPOLoss(torch.nn.Module):
    """Direct preference optimisation over a linear head, without the `[2B, T, V]` logits.

    `loss = mean over pairs of dpo_loss + alpha * NLL of the chosen responses`: see `liger_losses.losses.dpo_loss` for
    the loss types, `liger_losses.losses.DPOLoss` for the options and `liger_losses.fused_linear_loss` for the engine.

    Args:
        ignore_index: targets that are not scored.
        beta: strength of the pull towards the reference.
        alpha: weight of the NLL term; refused without `compute_nll_loss`.
        compute_nll_loss: add the NLL of the chosen responses, a mean over all their scored tokens.
        compiled: accepted and without effect: there is no compile step.
        use_ref_model: False is reference-free: its log-probabilities are taken as 0, and `forward` takes none.
        average_log_prob: sequence log-probabilities are token means instead of sums.
        chunk_size: more than 1: at most so many pairs are in a tile together. 1, the default, sets no bound: tiles are
            filled with as many pairs as `memory_budget` allows, and one pair larger than a tile is spread over several.
            In liger-kernel it bounds memory; here `memory_budget` does, and the result depends on neither. Refused
            above 1 for losses that couple all pairs of a batch.
        loss_type, label_smoothing, discopop_tau, loss_weights, f_divergence, f_alpha: of `dpo_loss`. Label smoothing
            with "sigmoid" is cDPO.
        ld_alpha, use_weighting: of `DPOLoss`.
        temperature, softcap, logit_scale: of the policy's logits, and the reference's, unless `ref_softcap` and
            `ref_logit_scale` say otherwise.
        memory_budget, logits_dtype, strategy, active_vocab: of `fused_linear_loss`.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    @with_reference_options
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str | Sequence[str] = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        *,
        loss_weights: Sequence[float] | None = None,
        f_divergence: str = "reverse_kl",
        f_alpha: float = 0.5,
        ld_alpha: float | None = None,
        use_weighting: bool = False,
        **engine: Unpack[ReferenceOptions],
    ) -> None:
        super().__init__()
        check_flag("compiled", compiled)
        check_flag("use_ref_model", use_ref_model)
        self.loss = DPOLoss(
            beta=beta,
            loss_type=loss_type,
            loss_weights=loss_weights,
            label_smoothing=label_smoothing,
            f_divergence=f_divergence,
            f_alpha=f_alpha,
            discopop_tau=discopop_tau,
            ld_alpha=ld_alpha,
            use_weighting=use_weighting,
            average_log_prob=average_log_prob,
            compute_nll_loss=compute_nll_loss,
            alpha=alpha,
            reference_free=not use_ref_model,
        )
        self.options = CallOptions(
            ignore_index=ignore_index,
            chunk_size=chunk_size,
            **engine,
        )
        self.options.check_separability(self.loss.separability, f"loss_type {', '.join(self.loss.type_names)}")
        self.options.check_reference(use_ref_model)

    def forward(
        self,
        lin_weight: Tensor,  # [V, H]
        _input: Tensor,  # [2B, T, H], chosen rows first
        target: Tensor | ScoredTokens,  # [2B, T], aligned with _input
        bias: Tensor | None = None,  # [V]
        ref_input: Tensor | None = None,  # [2B, T, H']
        ref_weight: Tensor | None = None,  # [V, H']
        ref_bias: Tensor | None = None,  # [V]
        *,
        ref_chosen_logps: Tensor | None = None,  # [B]
        ref_rejected_logps: Tensor | None = None,  # [B]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss of B pairs, and what is logged of them.

        The reference is given as a head and hidden states, or as its log-probabilities computed earlier; it is a
        constant either way.

        Args:
            lin_weight: `[V, H]`, the policy's head.
            _input: `[2B, T, H]`, the hidden states that go into it: the chosen rows, then the rejected ones of the same
                pairs. Their dtype is the head's, but under autocast.
            target: `[2B, T]` integer, the token that each hidden state is to predict (shifted by the caller);
                `ignore_index` where nothing is scored. Read without waiting where it is on the CPU, or a
                `ScoredTokens`.
            bias: `[V]`, the head's.
            ref_input: `[2B, T, H']`, the reference's hidden states, of a width of their own.
            ref_weight: `[V', H']`, with a row for every target.
            ref_bias: `[V']`.
            ref_chosen_logps, ref_rejected_logps: `[B]` each, in nats, in place of those three: reduced over tokens as
                the policy's are (sums; with `average_log_prob` means, with `ld_alpha` length-desensitized).

        Returns:
            `(loss, metrics)`: a scalar, and detached `(chosen_logps [B], rejected_logps [B], chosen_logits_mean [],
            rejected_logits_mean [], nll_loss [], chosen_rewards [B], rejected_rewards [B])`. Log-probabilities and
            rewards are in nats, fp32 (fp64 for fp64); logit means are over scored positions and the vocabulary.

        Raises:
            TypeError, ValueError: before any work, naming the argument.
        """
        pairs = pair_count(check_rows(target, "[2 * pairs, tokens]"))
        known = {"ref_chosen_logps": ref_chosen_logps, "ref_rejected_logps": ref_rejected_logps}
        loss, metrics = fused_loss(
            self.loss,
            self.options,
            _input,
            lin_weight,
            target,
            bias,
            reference=Reference(ref_input, ref_weight, ref_bias, known, (pairs,)),
            use_ref_model=not self.loss.reference_free,
        )
        names = ("chosen_logps", "rejected_logps", "chosen_logits_mean", "rejected_logits_mean", "nll_loss")
        return loss, tuple(metrics[name] for name in (*names, "chosen_rewards", "rejected_rewards"))

    def extra_repr(self) -> str:
        return f"{self.loss}, {self.options}"
