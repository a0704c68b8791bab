"""Losses over pairs of responses that need no reference model: CPO, SimPO, AlphaPO, TPO. ORPO is in `odds_ratio`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._checks import check_choice, check_flag
from ..chunked import ScoredTokens
from ..losses import ReferenceFreeLoss
from .base import CallOptions, check_rows, fused_loss
from .engine_options import EngineOptions, with_engine_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

METRICS = (
    "chosen_logps",
    "rejected_logps",
    "chosen_logits_mean",
    "rejected_logits_mean",
    "nll_loss",
    "chosen_rewards",
    "rejected_rewards",
)


class ReferenceFreeModule(torch.nn.Module):
    """A `ReferenceFreeLoss` over a linear head."""

    metrics: tuple[str, ...] = METRICS
    rows = "[2 * pairs, tokens]"

    def __init__(
        self,
        loss: ReferenceFreeLoss,
        *,
        ignore_index: int,
        compiled: bool,
        chunk_size: int,
        loss_types: tuple[str, ...] = (),  # those of the class, where it has a choice
        **engine: Unpack[EngineOptions],
    ) -> None:
        super().__init__()
        check_flag("compiled", compiled)
        if loss_types:
            check_choice("loss_type", loss.loss_type, loss_types)
        self.loss = loss
        self.options = CallOptions(ignore_index=ignore_index, chunk_size=chunk_size, **engine)
        self.options.check_separability(loss.separability, f"loss_type {loss.loss_type}")

    def forward(
        self,
        lin_weight: Tensor,  # [V, H]
        _input: Tensor,  # [2B, T, H], chosen rows first
        target: Tensor | ScoredTokens,  # [2B, T], aligned with _input
        bias: Tensor | None = None,  # [V]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss of B pairs, and what is logged of them.

        Args:
            lin_weight: `[V, H]`, the head.
            _input: `[2B, T, H]`, the hidden states that go into it: the chosen rows, then the rejected ones of the same
                pairs, for TPO with its NLL term `[3B, T, H]`, its reference responses last. Their dtype is the head's,
                but under autocast.
            target: `[2B, T]` integer (`[3B, T]` there), the token that each hidden state is to predict (shifted by the
                caller); `ignore_index` where nothing is scored. Read without waiting where it is on the CPU, or a
                `ScoredTokens`.
            bias: `[V]`, the head's.

        Returns:
            `(loss, metrics)`: a scalar, and detached `(chosen_logps [B], rejected_logps [B], chosen_logits_mean [],
            rejected_logits_mean [], nll_loss [], chosen_rewards [B], rejected_rewards [B])`. Log-probabilities and
            rewards are in nats, fp32 (fp64 for fp64); logit means are over scored positions and the vocabulary.

        Raises:
            TypeError, ValueError: before any work, naming the argument.
        """
        self.loss.unit_count(check_rows(target, self.rows))
        return self._result(self.loss, lin_weight, _input, target, bias)

    def _result(
        self,
        loss: ReferenceFreeLoss,
        weight: Tensor,
        hidden: Tensor,
        target: Tensor | ScoredTokens,
        bias: Tensor | None,
        **inputs: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        value, metrics = fused_loss(loss, self.options, hidden, weight, target, bias, inputs=inputs)
        return value, tuple(metrics[name] for name in self.metrics)

    def extra_repr(self) -> str:
        return f"{self.loss}, {self.options}"


class LigerFusedLinearCPOLoss(ReferenceFreeModule):
    """Contrastive preference optimisation over a linear head, without the `[2B, T, V]` logits.

    `loss = mean over pairs of reference_free_loss + alpha * NLL of the chosen responses`, for "sigmoid"
    `-(1-e) LS(beta (c - r)) - e LS(-beta (c - r))` of the log-probabilities `c`, `r` of the two responses. See
    `liger_losses.losses.reference_free_loss` for the loss types and `liger_losses.losses.ReferenceFreeLoss` for the
    options. Xu et al., "Contrastive Preference Optimization", arXiv:2401.08417.

    Args:
        ignore_index: targets that are not scored.
        beta: scale of the margin.
        alpha: weight of the NLL term, a mean over all chosen scored tokens; refused without `compute_nll_loss`.
        label_smoothing: the presumed share of flipped labels; refused for loss types without a smoothed form.
        compute_nll_loss: add the NLL term. True by default, as in liger-kernel: part of the method.
        compiled: accepted and without effect: there is no compile step.
        average_log_prob: token means also for "sigmoid" and "hinge", which are defined on sums.
        chunk_size: more than 1: at most so many pairs are in a tile together. 1, the default, sets no bound: tiles are
            filled with as many pairs as `memory_budget` allows, and one pair larger than a tile is spread over several.
            The result depends on neither.
        loss_type: "sigmoid", "hinge" (SLiC), "ipo" or "simpo"; the last two are of token means.
        gamma: target margin of "simpo", which alone reads it.
        reward_alpha: AlphaPO's alpha, TRL's `alpha`: rewards `(1 - p^(-a)) / a` in place of `log p`.
        temperature, softcap, logit_scale, memory_budget, logits_dtype, strategy, active_vocab: of `fused_linear_loss`.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    @with_engine_options
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        *,
        loss_type: str = "sigmoid",
        gamma: float = 0.5,
        reward_alpha: float = 0.0,
        **engine: Unpack[EngineOptions],
    ) -> None:
        loss = ReferenceFreeLoss(
            beta=beta,
            loss_type=loss_type,
            label_smoothing=label_smoothing,
            gamma=gamma,
            reward_alpha=reward_alpha,
            average_log_prob=average_log_prob,
            compute_nll_loss=compute_nll_loss,
            alpha=alpha,
        )
        types = ("sigmoid", "hinge", "ipo", "simpo")
        super().__init__(
            loss, ignore_index=ignore_index, compiled=compiled, chunk_size=chunk_size, loss_types=types, **engine
        )


class LigerFusedLinearSimPOLoss(ReferenceFreeModule):
    """Simple preference optimisation over a linear head, without the `[2B, T, V]` logits.

    `loss = mean over pairs of -(1-e) LS(z) - e LS(-z), z = beta (c - r) - gamma`, of mean log-probabilities per token,
    plus `alpha * NLL of the chosen responses`. Meng et al., "SimPO", arXiv:2405.14734.

    The paper's loss has no NLL term. It is added by default as in liger-kernel, which makes this CPO-SimPO: pass
    `compute_nll_loss=False` for SimPO.

    Args:
        gamma: target margin, subtracted from `beta (c - r)` and not divided by `beta`.
        others: of `LigerFusedLinearCPOLoss`.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    @with_engine_options
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
        **engine: Unpack[EngineOptions],
    ) -> None:
        loss = ReferenceFreeLoss(
            beta=beta,
            loss_type="simpo",
            label_smoothing=label_smoothing,
            gamma=gamma,
            compute_nll_loss=compute_nll_loss,
            alpha=alpha,
        )
        super().__init__(loss, ignore_index=ignore_index, compiled=compiled, chunk_size=chunk_size, **engine)


class LigerFusedLinearAlphaPOLoss(ReferenceFreeModule):
    """SimPO with a reward of another shape, over a linear head, without the `[2B, T, V]` logits.

    `loss = mean over pairs of -(1-e) LS(z) - e LS(-z), z = beta (R_c - R_r) - gamma`, with the rewards
    `R = (1 - p^(-reward_alpha)) / reward_alpha` of `p`, the exponential of the mean log-probability per token; SimPO at
    `reward_alpha = 0`. Gupta et al., "AlphaPO", arXiv:2501.03884.

    Args:
        reward_alpha: the paper's alpha, any number. (`alpha` weighs the NLL term, as in the other classes.)
        compute_nll_loss: add the NLL term; False by default, as in the paper.
        others: of `LigerFusedLinearSimPOLoss`.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    @with_engine_options
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        reward_alpha: float = 0.25,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
        **engine: Unpack[EngineOptions],
    ) -> None:
        loss = ReferenceFreeLoss(
            beta=beta,
            loss_type="simpo",
            label_smoothing=label_smoothing,
            gamma=gamma,
            reward_alpha=reward_alpha,
            compute_nll_loss=compute_nll_loss,
            alpha=alpha,
        )
        super().__init__(loss, ignore_index=ignore_index, compiled=compiled, chunk_size=chunk_size, **engine)


class LigerFusedLinearTPOLoss(ReferenceFreeModule):
    """Triple preference optimisation over a linear head, without the `[3B, T, V]` logits.

    `loss = mean over pairs of reference_free_loss + alpha * NLL of the reference responses`: the rows are `[3B, T]`,
    the chosen responses first, then the rejected, then the reference (gold) responses, which only the NLL term reads.
    There is no reference model. Saeidi et al., "Triple Preference Optimization", arXiv:2405.16681.

    Args:
        beta, alpha, gamma: TRL's `beta`, `tpo_alpha`, `tpo_l_gamma`, with its defaults.
        compute_nll_loss: False: no NLL term, and rows are `[2B, T]`.
        loss_type: "sigmoid", "hinge" (both of sums), "ipo" or "tpo-l" (of token means; it alone reads `gamma`).
        others: of `LigerFusedLinearCPOLoss`.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    @with_engine_options
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.01,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
        *,
        loss_type: str = "sigmoid",
        **engine: Unpack[EngineOptions],
    ) -> None:
        loss = ReferenceFreeLoss(
            beta=beta,
            loss_type=loss_type,
            label_smoothing=label_smoothing,
            gamma=gamma,
            compute_nll_loss=compute_nll_loss,
            alpha=alpha,
            nll_response="third" if compute_nll_loss else "chosen",
        )
        types = ("sigmoid", "hinge", "ipo", "tpo-l")
        super().__init__(
            loss, ignore_index=ignore_index, compiled=compiled, chunk_size=chunk_size, loss_types=types, **engine
        )
        self.rows = f"[{loss.unit_rows} * pairs, tokens]"
