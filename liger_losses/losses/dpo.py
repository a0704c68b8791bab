"""Direct preference optimisation as a loss object on per-token statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .._checks import check_flag, check_float_tensor, check_names, check_number
from .pairs import chosen_response_nll, pair_metrics, pair_totals, split_pairs
from .preference import DPOObjective
from .sequence import alignment_weights, length_desensitized_logprobs, sequence_lengths, sequence_logprobs


@dataclass(frozen=True, kw_only=True)
class DPOLoss(DPOObjective):
    """`dpo_loss` of per-token statistics, as a loss object (see the protocol in `liger_losses.chunked.loss`).

    `loss = mean over pairs of dpo_loss + alpha * NLL of the chosen responses`, the second term with `compute_nll_loss`
    only; NLL is averaged over all chosen scored tokens of the batch (RPO, arXiv:2404.19733). Rows are `[2B, T]`, the
    chosen half first. An empty row counts as a response of log-probability 0.

    The reference is a constant. `inputs` holds one of

    - `ref_logprobs` `[2B, T]`: per token, reduced here as the policy's are;
    - `ref_logps` `[2B]`: per sequence, already reduced that way;

    and nothing with `reference_free`.

    Args: Options beyond those of dpo_loss
        ld_alpha: LD-DPO (arXiv:2409.06411): weight, in `[0, 1]`, of the tokens beyond the pair's shared length.
        use_weighting: WPO (arXiv:2406.11827): each pair's loss times the weights of its two responses.
        average_log_prob: sequence log-probabilities are means over scored tokens instead of sums.
        compute_nll_loss, alpha: whether to add the NLL term, and its weight.
        reference_free: the reference's log-probabilities are 0.

    Metrics, detached: `chosen_logps`, `rejected_logps`, `chosen_rewards`, `rejected_rewards` (`beta * (c - rc)`,
    `beta * (r - rr)`), each `[B]`; `chosen_logits_mean`, `rejected_logits_mean`, over scored positions and the
    vocabulary; `nll_loss`, 0 when neither the NLL term nor `sft` computes it.
    """

    ld_alpha: float | None = None
    use_weighting: bool = False
    average_log_prob: bool = False
    compute_nll_loss: bool = False
    alpha: float = 1.0
    reference_free: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("use_weighting", "average_log_prob", "compute_nll_loss", "reference_free"):
            check_flag(name, getattr(self, name))
        check_number("alpha", self.alpha)
        if self.alpha != DPOLoss.alpha and not self.compute_nll_loss:
            raise ValueError(
                f"alpha: got {self.alpha}, expected the default: it weighs the NLL term, and compute_nll_loss is False"
            )
        if self.ld_alpha is not None:
            check_number("ld_alpha", self.ld_alpha, low=0, high=1)
            if self.average_log_prob:
                raise ValueError(
                    f"ld_alpha: got {self.ld_alpha}, expected None with average_log_prob=True: it weighs a sum"
                )
        if self.average_log_prob and self.needs("lengths"):
            raise ValueError(
                "average_log_prob: got True, expected False: it would divide by the length twice with loss_type "
                f"{', '.join(self.type_names)}"
            )
        if self.use_weighting:
            self.check_pair_weights("use_weighting")

    constants = ("ref_logprobs", "ref_logps")

    @property
    def separability(self) -> str:
        # WPO times sft is (mean of the pair weights) times (NLL of the batch): a product of two totals.
        return "batch" if self.couples_pairs or (self.use_weighting and self.needs("nll")) else "pair"

    @property
    def statistics(self) -> tuple[str, ...]:
        return ("logprob", "mean_logit", "log_sum_sq_prob") if self.use_weighting else ("logprob", "mean_logit")

    def totals(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        totals = pair_totals(mask)
        shapes = {"ref_logprobs": tuple(mask.shape), "ref_logps": (mask.shape[0],)}
        check_names("inputs", inputs, tuple(shapes))
        if len(inputs) != (0 if self.reference_free else 1):
            expected = "none with reference_free=True" if self.reference_free else "one of ref_logprobs, ref_logps"
            raise ValueError(f"inputs: got {' and '.join(sorted(inputs)) or 'no reference'}, expected {expected}")
        for name, value in inputs.items():
            check_float_tensor(name, value, shapes[name])
        return totals

    def __call__(
        self,
        statistics: Mapping[str, Tensor],
        mask: Tensor,
        inputs: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = statistics["logprob"]
        logps = self._reduce(logprobs, mask)
        references = self._reference(logps, mask, inputs)
        (chosen, rejected), (ref_chosen, ref_rejected) = split_pairs(logps), split_pairs(references)

        nll = logps.new_zeros(())
        if self.compute_nll_loss or self.needs("nll"):
            nll = chosen_response_nll(logprobs, mask, totals)
        weights = None
        if self.use_weighting:
            chosen_weights, rejected_weights = split_pairs(
                alignment_weights(logprobs, statistics["log_sum_sq_prob"], mask)
            )
            weights = chosen_weights * rejected_weights
        losses = self.losses(
            chosen,
            rejected,
            ref_chosen,
            ref_rejected,
            split_pairs(sequence_lengths(mask)) if self.needs("lengths") else None,
            # `nll` is this subset's share; spread over its pairs so that their sum over `pairs` gives it back.
            nll * totals["pairs"] / max(chosen.shape[0], 1) if self.needs("nll") else None,
            weights,
        )
        loss = losses.sum() / totals["pairs"]
        if self.compute_nll_loss:
            loss = loss + self.alpha * nll

        metrics = pair_metrics(statistics, mask, totals, logps, nll)
        rewards = self.beta * (logps - references).detach()
        metrics["chosen_rewards"], metrics["rejected_rewards"] = split_pairs(rewards)
        return loss, metrics

    def _reduce(self, logprobs: Tensor, mask: Tensor) -> Tensor:
        if self.ld_alpha is not None:
            return length_desensitized_logprobs(logprobs, mask, self.ld_alpha)
        return sequence_logprobs(logprobs, mask, average=self.average_log_prob)

    def _reference(self, logps: Tensor, mask: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        if self.reference_free:
            return torch.zeros_like(logps)
        if "ref_logps" in inputs:
            return inputs["ref_logps"].detach().to(logps.dtype)
        return self._reduce(inputs["ref_logprobs"].detach().to(logps.dtype), mask)
