"""Policy-gradient losses on per-token log-probabilities: GRPO and its relatives, PPO, RLOO.

Notation of a token: `l` is its log-probability under the policy, `o` under the policy that the rollouts are attributed
to (old), `f` under the reference, `s` as the program that sampled reported it; `a` is the advantage, `H` the entropy.
`r = exp(l - o)` is its ratio, and `m` its row's: `exp(mean_t(l - o))` over the scored tokens.

The loss types are rows of `policy_types.py`, the other terms functions of `policy_terms.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._checks import check_count, check_float_tensor, check_mask
from .._constants import taken, wide
from .._weighting import divided
from .._weighting import divisor as of_count
from .policy_options import PolicyOptions
from .policy_terms import KL_ESTIMATORS, on_policy_mask, sampler_ratio, top_entropy_mask, value_loss
from .policy_types import POLICY_TYPES, Tokens, bounded_exp, vespo_log_correction, vespo_log_weight, vespo_phi

_COUNT = "num_items_in_batch"
# Inputs that `prepare` adds: what a token's loss is divided by, [R, T]; the sampler correction where it is a constant,
# [R, T], and for VESPO its log, [R, 1], or [R, T] where tokens stand alone.
_DIVISOR, _SAMPLER, _LOG_SAMPLER = "divisor", "sampler_weight", "log_sampler_weight"


def grpo_loss(
    logprobs: Tensor,  # [R, T]
    mask: Tensor,  # [R, T] bool, True where the token is scored
    advantages: Tensor,  # [R] or [R, T]
    *,
    old_logprobs: Tensor | None = None,  # [R, T]; None: those of the policy, detached
    ref_logprobs: Tensor | None = None,  # [R, T]; with beta
    sampling_logprobs: Tensor | None = None,  # [R, T]; with sampler_mode or off_policy_mask_threshold
    sampling_ratio: Tensor | None = None,  # [R], [R, 1] or [R, T]; instead of them
    entropy: Tensor | None = None,  # [R, T]; with entropy_coef, top_entropy_quantile or report_entropy
    values: Tensor | None = None,  # [R, T]; with vf_coef
    returns: Tensor | None = None,  # [R, T]; with vf_coef
    old_values: Tensor | None = None,  # [R, T]; with value_clip
    num_items_in_batch: Tensor | int | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss of a batch, a scalar, and its metrics. `options`, formulas and metrics are those of `GRPOLoss`
    (but `on_policy`, which `old_logprobs=None` says here).

    Gradients reach `logprobs`, `entropy` and `values`; everything else is a constant. What stands at positions that
    are not scored is never read.
    """
    if "on_policy" in options:
        raise TypeError("on_policy: got a value, expected none: old_logprobs=None says it")
    loss = GRPOLoss(**options, on_policy=old_logprobs is None)
    check_mask(mask, logprobs)
    given: dict[str, Any] = {
        "advantages": advantages,
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "sampling_logprobs": sampling_logprobs,
        "sampling_ratio": sampling_ratio,
        "values": values,
        "returns": returns,
        "old_values": old_values,
        _COUNT: None if num_items_in_batch is None else check_count("num_items_in_batch", num_items_in_batch),
    }
    if (entropy is not None) != ("entropy" in loss.statistics):
        raise ValueError(
            f"entropy: got {'None' if entropy is None else 'a tensor'}, expected it with entropy_coef, "
            "top_entropy_quantile or report_entropy, and only then"
        )
    statistics = {"logprob": wide(logprobs)}
    if entropy is not None:
        check_float_tensor("entropy", entropy, tuple(mask.shape))
        statistics["entropy"] = wide(entropy)
    inputs = loss.prepare(mask, {name: value for name, value in given.items() if value is not None})
    return loss(statistics, mask, inputs, loss.totals(mask, inputs))


@dataclass(frozen=True, kw_only=True)
class GRPOLoss(PolicyOptions):
    """Policy-gradient losses, as a loss object (see the protocol in `liger_losses.chunked.loss`).

    With `c(x) = clip(x, 1 - epsilon_low, 1 + epsilon_high)` and `d(x) = min(x, delta)` (`x` without `delta`), the
    policy term of a token, and what the sum over scored tokens is divided by:

    | loss_type | policy term | divisor | paper |
    |---|---|---|---|
    | `grpo` | `-min(d(r) a, c(r) a)` | tokens of the row, then rows | arXiv:2402.03300 |
    | `bnpo` | same | tokens of the batch | |
    | `dr_grpo` | same | rows * `max_completion_length` | arXiv:2503.20783 |
    | `dapo`, `ppo` | same | tokens of the step | arXiv:2503.14476, 1707.06347 |
    | `luspo` | same, usually with `m` for `r` | rows | arXiv:2602.05261 |
    | `gspo` | same with `m` for `r` | as grpo | arXiv:2507.18071 |
    | `rloo` | same with `exp(sum_t(l - o))` for `r` | as grpo | arXiv:2402.14740 |
    | `cispo` | `-sg(min(r, epsilon_high)) a l` | tokens of the step | arXiv:2506.13585 |
    | `sapo` | `-4 S(tau (r - 1)) a / tau`, `tau` by the sign of `a` | as grpo | arXiv:2511.20347 |
    | `vespo` | `-sg(phi(w)) a l` | tokens of the step | arXiv:2602.10693 |
    | `gmpo` | `-exp(mean_t(u)) a` | as grpo | arXiv:2507.20673 |

    `sg` is a constant of the gradient, `S` the sigmoid; `phi(w) = e^q w^k e^(-q w)` with `(k, q)` by the sign of `a`
    and `w = exp(sum_t(l - o))`, times the sampler's correction; `u = min(l - o, epsilon_high)` if `a > 0`, else
    `max(l - o, -epsilon_low)`. Tokens count where scored: a truncated completion that is masked leaves both the sum and
    the count. Rows count whether or not anything of theirs is scored, so that micro-batches of equally many rows
    average to the whole. A batch with nothing scored gives 0.

    To the policy term, times the masks and the sampler's weight below, `beta * KL` is added per token before the
    division, and `- entropy_coef * mean H` after it.

    Args:
        loss_type: see above. `delta >= 1 + epsilon_high` makes the clip two-sided for negative advantages: the dual
            clip of arXiv:1912.09729.
        importance_sampling_level: "sequence" puts `m` in the place of `r` for any type but vespo; `gspo`, `rloo` and
            `gmpo` have a sequence's ratio by themselves, whatever it says.
        epsilon_low, epsilon_high, delta: bounds of the ratio. cispo reads `epsilon_high` as the bound itself (5, say:
            the default 0.2 is made for the others), gmpo reads both in log space (0.4 in its paper).
        max_completion_length: with dr_grpo.
        sapo_temperature_pos, sapo_temperature_neg; vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg:
            for advantages > 0 (vespo: >= 0), and the others.
        beta: weight of the KL to the reference.
        kl_estimator: `k1 = l - f`, `k2 = (l - f)^2 / 2`, `k3 = exp(f - l) - (f - l) - 1`
            (http://joschu.net/blog/kl-approx.html). As a loss, `k1` alone has a gradient that knows nothing of the
            reference: use it with `use_bias_correction_kl`.
        use_bias_correction_kl: the KL times the (differentiable, unclipped) ratio, arXiv:2512.02556.
        entropy_coef: weight of the mean entropy, a bonus. Makes entropy a statistic with a gradient.
        top_entropy_quantile: the policy term and the entropy bonus are taken over this share of the batch's scored
            tokens, those of the largest entropy (`top_entropy_mask`); divisors and KL are not. Below 1, the loss
            couples the whole batch.
        off_policy_mask_threshold: drops the policy term of sequences that drifted (`on_policy_mask`).
        sampler_mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask": the policy term times
            `sampler_ratio(o, s)`; vespo takes it into `w`, and the token modes only.
        sampler_clip_min, sampler_clip_max: its bounds.
        vf_coef: weight of the value loss (`value_loss`), for loss_type ppo, divided as the policy term is.
        value_clip: how far its values may move from `old_values` in the loss.
        on_policy: the rollouts are the policy's own: no `old_logprobs`, `o = sg(l)`.
        report_entropy: read entropy for the metric alone.
        num_processes: ranks whose gradients are averaged; None: torch.distributed's world size, 1 without. Ranks that
            share one vocabulary have the same tokens and count as one.

    `inputs`, all constants but `values`: `advantages` `[R]` or `[R, T]`; `[R, T]` each, as the options ask:
    `old_logprobs` (unless `on_policy`), `ref_logprobs` (with `beta`), `sampling_logprobs` (with `sampler_mode`; may
    come with `off_policy_mask_threshold`, which else reads `old_logprobs`; NaN where unknown), `values` and `returns`
    (with `vf_coef`), `old_values` (with `value_clip`); `sampling_ratio` `[R]`, `[R, 1]` or `[R, T]` in
    place of `sampler_mode`; and, for types divided by the tokens of the step, `num_items_in_batch` `n` without
    dimensions: scored tokens of all micro-batches and processes of one optimiser step. The divisor is then
    `n / num_processes`, so that the micro-batches' losses add up, and processes average, to the loss of the whole step.
    Without it the divisor is the tokens of this batch. The entropy's mean follows the same rule where `n` is given.

    Metrics, detached shares that add up to means over the batch's scored tokens: `kl` (with `beta`); `clip_low`,
    `clip_high` and their sum `clip_ratio`: tokens whose ratio lies beyond a bound on the side where the clip takes the
    gradient away (0 for sapo and vespo, which do not clip; a sequence's ratio counts for each of its tokens); `ratio`;
    `entropy` if it is read; `sampler_weight` if there is one; `phi` of vespo; and `value_loss`, divided as the loss is.
    """

    constants = (
        "advantages", "old_logprobs", "ref_logprobs", "sampling_logprobs", "sampling_ratio", "returns", "old_values",
        _COUNT,
    )  # fmt: skip

    @property
    def separability(self) -> str:
        if self.top_entropy_quantile < 1:
            return "batch"
        sums_rows = (
            self.level == "sequence"
            or self.off_policy_mask_threshold is not None
            or (self.loss_type == "vespo" and not self._sequence_weight_is_constant)
            or (self.on_policy and (self.sampler_mode or "").startswith("sequence"))
        )
        return "sequence" if sums_rows else "token"

    @property
    def _sequence_weight_is_constant(self) -> bool:
        return self.on_policy and self.sampler_mode is None

    @property
    def statistics(self) -> tuple[str, ...]:
        reads_entropy = self.entropy_coef != 0 or self.top_entropy_quantile < 1 or self.report_entropy
        return ("logprob", "entropy") if reads_entropy else ("logprob",)

    @property
    def differentiable(self) -> tuple[str, ...]:
        return ("logprob", "entropy") if self.entropy_coef != 0 else ("logprob",)

    def prepare(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Checked inputs, zero where not scored, and what each token's loss is divided by."""
        self.check_inputs(tuple(mask.shape), inputs)
        clean = {name: _clean(name, value, mask) for name, value in inputs.items() if name != _COUNT}
        clean["advantages"] = _per_token(clean["advantages"], mask).masked_fill(~mask, 0)
        if _COUNT in inputs:
            clean[_COUNT] = inputs[_COUNT].detach().to(mask.device, non_blocking=True)
        clean[_DIVISOR] = self._divisor(mask, clean)
        correction = clean.pop("sampling_ratio", None)
        if self.sampler_mode is not None and not self.on_policy:
            correction = self._sampler_ratio(clean["old_logprobs"], clean["sampling_logprobs"], mask)
        if correction is not None and self.loss_type == "vespo":
            if correction.dim() == 2 and correction.shape == mask.shape:
                correction = torch.where(mask, correction, 1)
            log = vespo_log_correction(correction.reshape(mask.shape[0], -1))
            clean[_LOG_SAMPLER] = log.expand(mask.shape) if self.separability == "token" else log
        elif correction is not None:
            clean[_SAMPLER] = torch.where(mask, _per_token(correction, mask), 1)
        return clean

    def totals(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if _DIVISOR not in inputs:
            raise ValueError(f"inputs: got {', '.join(sorted(inputs))}, expected what GRPOLoss.prepare makes of them")
        tokens = mask.sum().clamp_min(1)
        return {"tokens": tokens, "step_tokens": of_count(inputs[_COUNT]) if _COUNT in inputs else tokens}

    def __call__(
        self,
        statistics: Mapping[str, Tensor],
        mask: Tensor,
        inputs: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = statistics["logprob"].masked_fill(~mask, 0)
        inputs = {n: v.to(logprobs.dtype) if v.is_floating_point() else v for n, v in inputs.items()}
        entropy = statistics["entropy"].masked_fill(~mask, 0) if "entropy" in statistics else None
        kept = mask
        if self.top_entropy_quantile < 1:
            assert entropy is not None
            kept = top_entropy_mask(entropy, mask, self.top_entropy_quantile)
        sampler = inputs.get(_SAMPLER)
        if self.sampler_mode is not None and self.on_policy:
            sampler = self._sampler_ratio(logprobs, inputs["sampling_logprobs"], mask)

        tokens = self._tokens(logprobs, mask, kept, inputs, sampler)
        losses = self.type.per_token(tokens, self)
        if self.off_policy_mask_threshold is not None:
            behaviour = inputs["sampling_logprobs"] if "sampling_logprobs" in inputs else inputs["old_logprobs"]
            near = on_policy_mask(logprobs, behaviour, tokens.advantages, mask, self.off_policy_mask_threshold)
            losses = losses.masked_fill(~near, 0)
        if not self.type.own_kept:
            losses = losses.masked_fill(~kept, 0)
        if sampler is not None and self.loss_type != "vespo":
            losses = losses * sampler
        metrics = self._metrics(tokens, entropy, sampler, totals)
        processes = self._processes(inputs)

        def summed(per_token: Tensor) -> Tensor:
            return processes * (per_token.masked_fill(~mask, 0) / inputs[_DIVISOR]).sum()

        if self.beta != 0:
            kl = KL_ESTIMATORS[self.kl_estimator](logprobs - inputs["ref_logprobs"])
            kl = kl * tokens.ratio if self.use_bias_correction_kl else kl
            losses = losses + self.beta * kl
            metrics["kl"] = _share(kl, tokens, totals)
        if self.vf_coef != 0:
            value = value_loss(inputs["values"], inputs["returns"], inputs.get("old_values"), self.value_clip)
            losses = losses + self.vf_coef * value
            metrics["value_loss"] = summed(value)
        loss = summed(losses)
        if self.entropy_coef != 0:
            assert entropy is not None
            share = divided(entropy.masked_fill(~kept, 0).sum() * processes, totals["step_tokens"])
            if self.top_entropy_quantile < 1:
                share = share * totals["tokens"] / kept.sum().clamp_min(1)
            loss = loss - self.entropy_coef * share
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    def _tokens(
        self, logprobs: Tensor, mask: Tensor, kept: Tensor, inputs: Mapping[str, Tensor], sampler: Tensor | None
    ) -> Tokens:
        log_ratio = logprobs - (logprobs.detach() if self.on_policy else inputs["old_logprobs"])
        log_level = log_ratio
        if self.level == "sequence":
            log_level = log_ratio.sum(dim=1, keepdim=True)
            if not self.type.ratio_of_sums:
                log_level = log_level / mask.sum(dim=1, keepdim=True).clamp_min(1)
        log_weight = None
        if self.loss_type == "vespo":
            log_weight = torch.zeros_like(logprobs) if self.on_policy else vespo_log_weight(log_ratio)
            if _LOG_SAMPLER in inputs:
                log_weight = log_weight + inputs[_LOG_SAMPLER]
            elif sampler is not None:
                log_weight = log_weight + vespo_log_correction(sampler)
        return Tokens(logprobs, log_ratio, bounded_exp(log_level), inputs["advantages"], mask, kept, log_weight)

    def _metrics(
        self, t: Tokens, entropy: Tensor | None, sampler: Tensor | None, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        below, above = self.type.clips(t, self)
        metrics = {
            "clip_low": _share(below & (t.advantages < 0), t, totals),
            "clip_high": _share(above & (t.advantages > 0), t, totals),
            "ratio": _share(t.ratio, t, totals),
        }
        metrics["clip_ratio"] = metrics["clip_low"] + metrics["clip_high"]
        if entropy is not None:
            metrics["entropy"] = _share(entropy, t, totals)
        if self.loss_type == "vespo":
            metrics["phi"] = _share(vespo_phi(t, self), t, totals)
        elif sampler is not None:
            metrics["sampler_weight"] = _share(sampler, t, totals)
        return metrics

    def _sampler_ratio(self, logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor) -> Tensor:
        assert self.sampler_mode is not None
        bounds = (self.sampler_clip_min, self.sampler_clip_max)
        return sampler_ratio(logprobs, sampling_logprobs, mask, self.sampler_mode, *bounds)

    def _divisor(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Of each token, `[R, T]`; the number of processes is left to the end."""
        rows = max(mask.shape[0], 1)
        match self.type.divisor:
            case "sequence":
                divisor = rows * mask.sum(dim=1, keepdim=True).clamp_min(1)
            case "step" if _COUNT in inputs:
                divisor = of_count(inputs[_COUNT])
            case "batch" | "step":
                divisor = mask.sum().clamp_min(1)
            case "length":
                assert self.max_completion_length is not None
                divisor = mask.new_full((), rows * self.max_completion_length, dtype=torch.int64)
            case _:
                divisor = mask.new_full((), rows, dtype=torch.int64)
        return divisor.expand(mask.shape)

    def _processes(self, inputs: Mapping[str, Tensor]) -> int:
        """Ranks that share `num_items_in_batch`; 1 without it."""
        if _COUNT not in inputs:
            return 1
        if self.num_processes is not None:
            return self.num_processes
        parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_world_size() if parallel else 1

    def check_inputs(self, per_token: tuple[int, ...], inputs: Mapping[str, Tensor]) -> None:
        """Raise unless `inputs` are those the options ask for, for a mask of shape `per_token` `[R, T]`."""
        rows = per_token[0]
        required = {"advantages"}
        optional: set[str] = set()
        if not self.on_policy:
            required.add("old_logprobs")
        if self.beta != 0:
            required.add("ref_logprobs")
        if self.vf_coef != 0:
            required |= {"values", "returns"}
        if self.value_clip is not None:
            required.add("old_values")
        if self.sampler_mode is not None or (self.off_policy_mask_threshold is not None and self.on_policy):
            required.add("sampling_logprobs")
        elif self.off_policy_mask_threshold is not None:
            optional.add("sampling_logprobs")
        if self.sampler_mode is None:
            optional.add("sampling_ratio")
        if self.type.divisor == "step":
            optional.add(_COUNT)
        elif _COUNT in inputs:
            divided = ", ".join(name for name, known in POLICY_TYPES.items() if known.divisor == "step")
            raise ValueError(
                f"{_COUNT}: got a count with loss_type={self.loss_type!r}, which is not divided by the tokens of the "
                f"step; expected none, or one of the types that are: {divided}"
            )
        missing, unknown = sorted(required - set(inputs)), sorted(set(inputs) - required - optional)
        if missing or unknown:
            raise ValueError(
                f"inputs: got {', '.join(sorted(inputs)) or 'none'}, expected {', '.join(sorted(required))}, and at "
                f"most {', '.join(sorted(optional)) or 'nothing'} beside, with loss_type={self.loss_type!r}, "
                f"on_policy={self.on_policy}, beta={self.beta:g}, sampler_mode={self.sampler_mode!r}, "
                f"vf_coef={self.vf_coef:g}"
            )
        shapes = {"advantages": ((rows,), per_token), "sampling_ratio": ((rows,), (rows, 1), per_token)}
        for name, value in inputs.items():
            if name != _COUNT:
                check_float_tensor(name, value, *shapes.get(name, (per_token,)))
            else:
                check_count(name, value)


def _clean(name: str, value: Tensor, mask: Tensor) -> Tensor:
    """A constant (but for `values`) of at least fp32, with zeros where nothing is scored."""
    value = value if name == "values" else value.detach()
    value = taken(wide(value), mask.device)
    return value.masked_fill(~mask, 0) if value.shape == mask.shape else value


def _per_token(value: Tensor, mask: Tensor) -> Tensor:
    return (value.unsqueeze(1) if value.dim() == 1 else value).expand(mask.shape)


def _share(value: Tensor, t: Tokens, totals: Mapping[str, Tensor]) -> Tensor:
    """These tokens' part of the mean over the batch's."""
    value = value.detach().to(t.logprobs.dtype).expand(t.mask.shape)
    return value.masked_fill(~t.mask, 0).sum() / totals["tokens"]
