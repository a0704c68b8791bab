"""ORPO: a loss over pairs whose NLL term may read other tokens than its odds ratio."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._checks import check_device, check_shape
from ..chunked import ScoredTokens
from ..chunked.tokens import check_integer, widened
from ..losses import ReferenceFreeLoss
from .base import check_head_as, check_rows
from .engine_options import EngineOptions, with_engine_options
from .reference_free import METRICS, ReferenceFreeModule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LigerFusedLinearORPOLoss(ReferenceFreeModule):
    """Odds ratio preference optimisation over a linear head, without the `[2B, T, V]` logits.

    `loss = NLL of the chosen responses - beta * mean over pairs of LS(log_odds(c) - log_odds(r))`, with
    `log_odds(c) = log(p / (1 - p))`, `p = e^c`, of the mean log-probability `c` of a response's tokens. NLL is a mean
    over all its tokens of the batch. Hong et al., "ORPO", arXiv:2403.07691.

    Which tokens NLL reads is the caller's choice: those of the chosen completions, or, as published, the prompts, too.
    Say the latter with `response_mask` or, as in liger-kernel, `nll_target`.

    Args:
        beta: weight of the odds ratio term.
        compute_nll_loss: add the NLL term.
        others: of `LigerFusedLinearCPOLoss`.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    metrics = (*METRICS, "log_odds_ratio", "log_odds_chosen")

    @with_engine_options
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 1,
        **engine: Unpack[EngineOptions],
    ) -> None:
        loss = ReferenceFreeLoss(beta=beta, loss_type="orpo", compute_nll_loss=compute_nll_loss)
        super().__init__(loss, ignore_index=ignore_index, compiled=compiled, chunk_size=chunk_size, **engine)
        # With labels that differ for NLL, the chosen rows are there twice; read with compute_nll_loss only.
        self._loss_of_three = replace(loss, nll_response="third") if compute_nll_loss else loss

    def forward(
        self,
        lin_weight: Tensor,  # [V, H]
        _input: Tensor,  # [2B, T, H], chosen rows first
        target: Tensor | ScoredTokens,  # [2B, T], aligned with _input
        bias: Tensor | None = None,  # [V]
        nll_target: Tensor | None = None,  # [2B, T]
        *,
        response_mask: Tensor | None = None,  # [2B, T] bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss of B pairs, and what is logged of them.

        Args:
            lin_weight: `[V, H]`, the head.
            _input: `[2B, T, H]`, the hidden states that go into it: the chosen rows, then the rejected ones of the same
                pairs. Their dtype is the head's, but under autocast.
            target: `[2B, T]` integer, the token that each hidden state is to predict (shifted by the caller);
                `ignore_index` where nothing is scored. Read without waiting where it is on the CPU, or a
                `ScoredTokens`.
            bias: `[V]`, the head's.
            nll_target: `[2B, T]` integer, labels of the NLL term, of which the chosen half is read; None: those of
                `target`. Where it has every label that the chosen half of `target` has, and prompts beside them, each
                token is projected once. Otherwise the chosen rows are projected a second time. Finding out which reads
                a number from the device, which waits for the work queued so far, unless the targets are on the CPU;
                under `torch.compile`, where nothing can be read, the chosen rows are always projected twice.
            response_mask: `[2B, T]` bool: which of the tokens that `target` scores are the responses': the odds ratio
                reads no others, NLL all that are scored in the chosen half (prompts of the rejected half are best not
                scored). Costs neither a comparison nor a second product. Not with `nll_target`.

        Returns:
            `(loss, metrics)`: a scalar, and detached `(chosen_logps [B], rejected_logps [B], chosen_logits_mean [],
            rejected_logits_mean [], nll_loss [], chosen_rewards [B], rejected_rewards [B], log_odds_ratio [],
            log_odds_chosen [])`; the last two are the means of `LS(d)` and `d`, `d` being the difference of log-odds.
            Log-probabilities and rewards are in nats, fp32 (fp64 for fp64); logit means are over the responses and the
            vocabulary.

        Raises:
            TypeError, ValueError: before any work, naming the argument.
        """
        self.loss.unit_count(check_rows(target, self.rows))
        for name, value in (("nll_target", nll_target), ("response_mask", response_mask)):
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise TypeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor")
            check_shape(name, value, tuple(target.shape))
            if not self.loss.compute_nll_loss:
                raise ValueError(
                    f"{name}: got a tensor, expected None with compute_nll_loss=False: it says what the NLL term reads"
                )
        if response_mask is not None:
            if nll_target is not None:
                raise ValueError("response_mask: got a tensor beside nll_target, expected one of the two")
            return self._result(self.loss, lin_weight, _input, target, bias, response_mask=response_mask)
        if nll_target is None:
            return self._result(self.loss, lin_weight, _input, target, bias)
        return self._with_labels_of_its_own(lin_weight, _input, target, bias, nll_target)

    def _with_labels_of_its_own(
        self,
        weight: Tensor,
        hidden: Tensor,
        target: Tensor | ScoredTokens,
        bias: Tensor | None,
        nll_target: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        ignore = self.options.ignore_index
        if isinstance(target, ScoredTokens):
            target.check_ignored(ignore)
        labels = target.target if isinstance(target, ScoredTokens) else target
        check_integer("target", labels)
        check_integer("nll_target", nll_target)
        check_device("nll_target", nll_target, "target", labels)
        labels, nll_target = widened(labels), widened(nll_target)
        pairs = labels.shape[0] // 2
        check_head_as(("_input", "lin_weight", "bias"), hidden, weight, bias, labels.shape)
        nll = nll_target[:pairs]
        if not torch.compiler.is_compiling():
            # Counts and comparison travel together: one wait for both.
            union = ScoredTokens(torch.cat([nll, labels[pairs:]]), ignore)
            covered = (labels[:pairs] == ignore) | (labels[:pairs] == nll)
            if bool(covered.all()):
                mask = (labels != ignore).to(hidden.device, non_blocking=True)
                return self._result(self.loss, weight, hidden, union, bias, response_mask=mask)
        return self._result(
            self._loss_of_three, weight, torch.cat([hidden, hidden[:pairs]]), torch.cat([labels, nll]), bias
        )
