"""Losses of single responses, each labelled desirable or undesirable: KTO, unpaired APO-zero, BCO.

Notation of a response: `u = log pi - log ref` is its log-ratio (`log pi` alone without a reference), `r = b u` its
reward, `S` sigmoid, `LS` log-sigmoid, `b` beta.

`kto_loss` and `bco_loss` are the pure functions of sequence log-probabilities; `KTOLoss` and `BCOLoss` make them loss
objects on per-token statistics. The loss is the mean over all rows of the batch. A row without a scored token is one
of them, a response of log-probability 0 (its loss is a constant); TRL's trainer and liger-kernel count it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .._checks import (
    check_choice,
    check_flag,
    check_float_tensor,
    check_names,
    check_number,
    check_numbers,
    check_shape,
)
from .._constants import taken, wide
from ..kernels import wide_dtype
from .sequence import sequence_logprobs

KTO_LOSS_TYPES = ("kto", "apo_zero_unpaired")

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def kto_loss(
    logps: Tensor,  # [R]
    labels: Tensor,  # [R] bool or integer: True or 1 where the response is desirable
    ref_logps: Tensor | None = None,  # [R]
    *,
    kl: Tensor | None = None,  # [], [1] or [R]
    beta: float = 0.1,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Losses `[R]` of single responses under a Kahneman-Tversky value function; the loss is their mean.

    | loss_type | desirable, times `desirable_weight` | undesirable, times `undesirable_weight` | paper (arXiv) |
    |---|---|---|---|
    | kto | `1 - S(b (u - k))` | `1 - S(b (k - u))` | 2402.01306, Eq. 7 |
    | apo_zero_unpaired | `1 - S(b u)` | `S(b u)` | 2408.06266 |

    Args:
        logps: log-probabilities of the responses under the policy.
        labels: which responses are desirable.
        ref_logps: the same under the reference, a constant; None for a reference-free loss (taken as 0).
        kl: `k`, the estimated KL divergence of the policy from the reference, a constant: one for the batch, or one a
            row. None is 0. Used as it is: whoever estimates it clamps it at 0 (TRL does, after the mean over all
            ranks, which no single rank can know). Refused with "apo_zero_unpaired", which has none.
        beta: strength of the pull towards the reference, `> 0`.
        desirable_weight, undesirable_weight: of the two kinds of response, `>= 0`; with data of one kind in excess they
            restore the balance.

    Log-probabilities in less than fp32 are computed in fp32.

    Raises:
        TypeError, ValueError: naming the argument. A label that is neither 0 nor 1 raises on the CPU; on an
            accelerator, where reading it would wait, its loss is NaN.
    """
    loss = KTOLoss(
        beta=beta,
        loss_type=loss_type,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
        reference_free=ref_logps is None,
    )
    log_ratios = _log_ratios(logps, labels, ref_logps)
    labels = taken(labels, logps.device)
    if kl is not None:
        loss.check_kl("kl", kl, logps.shape[0])
        kl = kl.reshape(()) if kl.shape == (1,) else kl
    return loss.losses(log_ratios, labels, kl)


def bco_loss(
    logps: Tensor,  # [R]
    labels: Tensor,  # [R] bool or integer: True or 1 where the response is desirable
    ref_logps: Tensor | None = None,  # [R]
    *,
    shift: Tensor | float = 0.0,  # []
    beta: float = 0.1,
) -> Tensor:
    """Losses `[R]` of binary classifier optimisation; the loss is their mean.

    `-LS(b u - shift)` for a desirable response, `-LS(-(b u - shift))` for an undesirable one. `shift` is a constant
    near which the two kinds of reward separate: a running mean of rewards `b u` (`LigerFusedLinearBCOLoss` keeps one).

    Args:
        logps, labels, ref_logps, beta: as in `kto_loss`.
        shift: a number or a tensor without dimensions.

    Raises TypeError and ValueError as `kto_loss` does.

    Jung et al., "Binary Classifier Optimization for Large Language Model Alignment", arXiv:2404.04656.
    """
    loss = BCOLoss(beta=beta, reference_free=ref_logps is None)
    log_ratios = _log_ratios(logps, labels, ref_logps)
    labels = taken(labels, logps.device)
    if isinstance(shift, Tensor):
        check_float_tensor("shift", shift, ())
    else:
        check_number("shift", shift)
    return loss.losses(beta * log_ratios, labels, shift)


def check_labels(name: str, labels: object, rows: int) -> None:
    """Raise unless `labels` are `rows` booleans, or integers 0 and 1 (read on the CPU, outside torch.compile)."""
    if not isinstance(labels, Tensor) or labels.dtype not in (torch.bool, *_INTEGERS):
        seen = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"{name}: got {seen}, expected a bool or integer tensor, True or 1 where desirable")
    check_shape(name, labels, (rows,))
    if labels.device.type != "cpu" or labels.dtype == torch.bool or torch.compiler.is_compiling():
        return
    wrong = labels[(labels != 0) & (labels != 1)]
    if wrong.numel():
        raise ValueError(f"{name}: got the value {wrong[0].item()}, expected 1 (desirable) or 0 (undesirable)")


def _log_ratios(logps: Tensor, labels: Tensor, ref_logps: Tensor | None) -> Tensor:
    """`logps - ref_logps` of checked arguments, at least in fp32."""
    check_float_tensor("logps", logps)
    if logps.dim() != 1:
        raise ValueError(f"logps: got shape {list(logps.shape)}, expected [rows]")
    check_labels("labels", labels, logps.shape[0])
    if ref_logps is None:
        return wide(logps)
    check_float_tensor("ref_logps", ref_logps, tuple(logps.shape))
    dtype = wide_dtype(logps.dtype, ref_logps.dtype)
    return logps.to(dtype) - taken(ref_logps.detach(), logps.device, dtype)


def _of_labels(labels: Tensor, desirable: Tensor, undesirable: Tensor) -> Tensor:
    """One or the other by label; NaN for a label that is neither, so that it does not pass for one of them."""
    chosen = torch.where(labels.to(torch.bool), desirable, undesirable)
    return chosen if labels.dtype == torch.bool else chosen.masked_fill((labels != 0) & (labels != 1), torch.nan)


@dataclass(frozen=True, kw_only=True)
class UnpairedLoss:
    """What the loss objects of single responses share: reductions, the reference, labels, metrics.

    `inputs` holds `labels` `[R]` (bool, or integer 0 and 1) and, unless `reference_free`, one of

    - `ref_logprobs` `[R, T]`: per token, reduced here as the policy's are;
    - `ref_logps` `[R]`: per sequence, already reduced that way.

    Args:
        beta: strength of the pull towards the reference.
        average_log_prob: sequence log-probabilities are means over scored tokens instead of sums.
        reference_free: the reference's log-probabilities are 0.

    Metrics, detached scalars: `chosen_logps_sum`, `rejected_logps_sum`, `chosen_rewards_sum`, `rejected_rewards_sum`
    (rewards are `beta * u`), sums over the desirable and the undesirable rows; `chosen_mean_logits_sum`,
    `rejected_mean_logits_sum`, sums over their scored positions of the logits' mean over the vocabulary.
    """

    beta: float = 0.1
    average_log_prob: bool = False
    reference_free: bool = False

    def __post_init__(self) -> None:
        check_number("beta", self.beta, above=0)
        check_flag("average_log_prob", self.average_log_prob)
        check_flag("reference_free", self.reference_free)

    @property
    def constants(self) -> tuple[str, ...]:
        return ("ref_logprobs", "ref_logps", *self._own_inputs())

    @property
    def separability(self) -> str:
        return "sequence"

    @property
    def statistics(self) -> tuple[str, ...]:
        return ("logprob", "mean_logit")

    def totals(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows, given = mask.shape[0], set(inputs)
        references = {"ref_logprobs": tuple(mask.shape), "ref_logps": (rows,)}
        own = self._own_inputs()
        check_names("inputs", inputs, ("labels", *references, *own))
        if "labels" not in given:
            raise ValueError(f"inputs: got no labels, expected labels [{rows}]")
        found = sorted(given & set(references))
        if len(found) != (0 if self.reference_free else 1):
            expected = "none with reference_free=True" if self.reference_free else "one of ref_logprobs, ref_logps"
            raise ValueError(f"inputs: got {' and '.join(found) or 'no reference'}, expected {expected}")
        check_labels("labels", inputs["labels"], rows)
        for name in found:
            check_float_tensor(name, inputs[name], references[name])
        for name in sorted(given & set(own)):
            self._check_own(name, inputs[name], rows)
        return {"rows": torch.full((), max(rows, 1), dtype=torch.int64, device=mask.device)}

    def __call__(
        self,
        statistics: Mapping[str, Tensor],
        mask: Tensor,
        inputs: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logps = sequence_logprobs(statistics["logprob"], mask, average=self.average_log_prob)
        log_ratios = logps - self._reference(logps, mask, inputs)
        labels = inputs["labels"].to(logps.device, non_blocking=True)
        loss = self._row_losses(log_ratios, labels, inputs).sum() / totals["rows"]

        metrics: dict[str, Tensor] = {}
        for name, values in (
            ("logps", logps),
            ("mean_logits", statistics["mean_logit"].masked_fill(~mask, 0).sum(dim=1)),
            ("rewards", self.beta * log_ratios),
        ):
            values = values.detach()
            zero = torch.zeros_like(values)
            metrics[f"chosen_{name}_sum"] = _of_labels(labels, values, zero).sum()
            metrics[f"rejected_{name}_sum"] = _of_labels(labels, zero, values).sum()
        return loss, metrics

    def _reference(self, logps: Tensor, mask: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        if self.reference_free:
            return torch.zeros_like(logps)
        if "ref_logps" in inputs:
            return inputs["ref_logps"].detach().to(logps.dtype)
        logprobs = inputs["ref_logprobs"].detach().to(logps.dtype)
        return sequence_logprobs(logprobs, mask, average=self.average_log_prob)

    def _own_inputs(self) -> tuple[str, ...]:
        """Names of the inputs that only this loss reads; each may be left out."""
        raise NotImplementedError

    def _check_own(self, name: str, value: Tensor, rows: int) -> None:
        raise NotImplementedError

    def _row_losses(self, log_ratios: Tensor, labels: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class KTOLoss(UnpairedLoss):
    """`kto_loss` of per-token statistics, as a loss object (see the protocol in `liger_losses.chunked.loss`).

    The loss is the mean of `kto_loss` over the batch's rows. `inputs` and metrics are those of `UnpairedLoss`; `inputs`
    may hold `kl`, without dimensions or `[R]`.

    Args: of `kto_loss` and `UnpairedLoss`.
    """

    loss_type: str = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("loss_type", self.loss_type, KTO_LOSS_TYPES)
        check_number("desirable_weight", self.desirable_weight, low=0)
        check_number("undesirable_weight", self.undesirable_weight, low=0)

    def check_kl(self, name: str, kl: object, rows: int) -> None:
        """Raise unless `kl` is a float tensor `[]`, `[1]` or `[rows]`, and the loss type reads one."""
        if self.loss_type != "kto":
            raise ValueError(f"{name}: got a tensor, expected None with loss_type {self.loss_type!r}, which has no KL")
        check_float_tensor(name, kl, (), (1,), (rows,))

    def losses(self, log_ratios: Tensor, labels: Tensor, kl: Tensor | None) -> Tensor:
        """Losses `[R]` of arguments already checked; `kto_loss` is the checked form."""
        if kl is not None:
            log_ratios = log_ratios - kl.detach().to(log_ratios.device, log_ratios.dtype, non_blocking=True)
        # 1 - S(z) is S(-z), which does not cancel.
        z = self.beta * log_ratios
        return _of_labels(labels, self.desirable_weight * torch.sigmoid(-z), self.undesirable_weight * torch.sigmoid(z))

    def _own_inputs(self) -> tuple[str, ...]:
        return ("kl",)

    def _check_own(self, name: str, value: Tensor, rows: int) -> None:
        self.check_kl(name, value, rows)

    def _row_losses(self, log_ratios: Tensor, labels: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.losses(log_ratios, labels, inputs.get("kl"))


@dataclass(frozen=True, kw_only=True)
class BCOLoss(UnpairedLoss):
    """`bco_loss` of per-token statistics, as a loss object (see the protocol in `liger_losses.chunked.loss`).

    The loss is the mean of `bco_loss` over the batch's rows. `inputs` and metrics are those of `UnpairedLoss`; `inputs`
    may hold, without dimensions:

    - `shift`: the mean of earlier rewards; 0 when left out;
    - `shift_count`, with `shift_includes_batch` only: how many rewards that mean is of; 0 when left out.

    Args: Options beyond those of UnpairedLoss
        shift_includes_batch: the shift is the mean of the earlier rewards and of this batch's (of all rows, each with
            the same weight), as a constant. All rows then share a number that comes from their statistics:
            separability is "batch" instead of "sequence".
    """

    shift_includes_batch: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("shift_includes_batch", self.shift_includes_batch)

    @property
    def separability(self) -> str:
        return "batch" if self.shift_includes_batch else "sequence"

    def losses(self, rewards: Tensor, labels: Tensor, shift: Tensor | float) -> Tensor:
        """Losses `[R]` of arguments already checked; `bco_loss` is the checked form."""
        if isinstance(shift, Tensor):
            shift = shift.detach().to(rewards.device, rewards.dtype, non_blocking=True)
        z = rewards - shift
        softplus = torch.nn.functional.softplus  # softplus(-z) is -LS(z)
        return _of_labels(labels, softplus(-z), softplus(z))

    def _own_inputs(self) -> tuple[str, ...]:
        return ("shift", "shift_count") if self.shift_includes_batch else ("shift",)

    def _check_own(self, name: str, value: Tensor, rows: int) -> None:
        if name == "shift":
            check_float_tensor(name, value, ())
        else:
            check_numbers(name, value, ())

    def _row_losses(self, log_ratios: Tensor, labels: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        rewards = self.beta * log_ratios
        shift = inputs["shift"] if "shift" in inputs else rewards.new_zeros(())
        if self.shift_includes_batch:
            _, shift = running_mean(inputs.get("shift_count", torch.zeros_like(shift)), shift, rewards)
        return self.losses(rewards, labels, shift)


def running_mean(
    count: Tensor,  # []
    mean: Tensor,  # []
    values: Tensor,  # [n], or [] for their sum
    added: int | None = None,  # n, where `values` is their sum
) -> tuple[Tensor, Tensor]:
    """Count and mean of `count` earlier numbers of that mean and of `n` new ones, as new tensors, detached.

    A sum that is not finite (a batch that overflowed, which a gradient scaler will skip) is left out.

    `mean' = mean + (sum of the new - n mean) / (count + n)` (Chan, Golub and LeVeque, "Algorithms for computing the
    sample variance", 1983), which keeps its digits where a sum over all numbers would grow without bound.
    """
    values = values.detach().to(torch.promote_types(values.dtype, mean.dtype))
    count, mean = count.to(values.device), mean.to(values.device, values.dtype)
    number = values.shape[0] if added is None else added
    total, sum_of_new = count + number, values.sum()
    later = mean + (sum_of_new - number * mean) / total.clamp_min(1)
    finite = torch.isfinite(sum_of_new)
    return torch.where(finite, total, count), torch.where(finite, later, mean)
