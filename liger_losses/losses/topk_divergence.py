"""Divergences from a teacher of whom a part is known: its k most probable tokens, or the tokens that were sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .._checks import check_choice, check_count, check_float_tensor, check_mask, check_names, check_scored
from .._constants import taken, wide
from .._weighting import divided, divisor, weighted
from .divergence import check_divergence, check_pair, not_negative, scored_rows
from .divergence_kinds import DIVERGENCES, must_cover
from .policy_terms import KL_ESTIMATORS

TAILS = ("renormalise", "renormalise_both", "bucket", "drop")


def topk_divergence(
    student_logprobs: Tensor,  # [*, k], normalised over the whole vocabulary
    teacher_logprobs: Tensor,  # [*, k], likewise; -inf in slots that hold nothing
    *,
    kind: str = "forward_kl",
    tail: str = "renormalise",
    beta: float | None = None,
    skew: float | None = None,
    alpha: float | None = None,
    endpoints: str = "trl",
    mask: Tensor | None = None,  # [*] bool, True where the token is scored
) -> Tensor:
    """The divergence of every token, `[*]`, when the teacher is known at `k` token ids.

    Both are log-probabilities at the same `k` different ids: the student's from `liger_losses.linear_topk_logprobs`, or
    `logits.log_softmax(-1).gather(-1, ids)`. They must be of one temperature, the teacher's: what lies outside its
    `k` ids cannot be tempered again. With `s_k`, `t_k` the probabilities and `S`, `T` their sums, at most 1:

    | `tail` | student | teacher | forward KL |
    |---|---|---|---|
    | `"renormalise"` | `s_k`, `1 - S` | `t_k / T`, 0 | `sum_k (t_k / T) log((t_k / T) / s_k)` |
    | `"bucket"` | `s_k`, `1 - S` | `t_k`, `1 - T` | over k + 1 outcomes; never above that of whole vocabularies |
    | `"renormalise_both"` | `s_k / S` | `t_k / T` | blind to how much mass the student gives to the `k` ids |
    | `"drop"` | `s_k` | `t_k` | `sum_k t_k log(t_k / s_k)`, the whole one's terms at `k`; may be negative |

    `1 - S` and `1 - T` are taken as at least the dtype's epsilon, which is as far as a sum near 1 is known. Logits are
    not log-probabilities: where `S` or `T` is above 1 the result means nothing, also of two equal arguments, and
    nothing raises, since looking would wait for the device.

    Args:
        teacher_logprobs: a constant. The student's value in a slot of `-inf` is not read: it is part of the tail. A row
            of such slots alone gives 0.
        kind: an f-divergence of `DIVERGENCES`, that is any but "akl", "cosine" and "mse". With "renormalise" the
            divergence must be finite where the teacher is 0, which no reverse KL is; with "drop" it must be
            "forward_kl", "reverse_kl" or "jsd".
        beta, skew, alpha, endpoints: as in `divergence`.
        mask: as in `divergence`.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    numbers = check_divergence(kind, endpoints, beta=beta, skew=skew, alpha=alpha)
    check_choice("tail", tail, TAILS)
    if not DIVERGENCES[kind].is_f:
        raise ValueError(f"kind: got {kind!r}, which needs the whole vocabulary; expected an f-divergence")
    if tail == "renormalise" and "teacher" in must_cover(kind, numbers):
        raise ValueError(
            f"tail: got 'renormalise' with kind={kind!r}, which is infinite: the student has mass where the teacher is "
            "given none; expected 'bucket' or 'renormalise_both'"
        )
    if tail == "drop" and kind not in ("forward_kl", "reverse_kl", "jsd"):
        raise ValueError(f"tail: got 'drop' with kind={kind!r}, expected forward_kl, reverse_kl or jsd")
    check_pair(("student_logprobs", "teacher_logprobs"), student_logprobs, teacher_logprobs, mask)
    student, teacher = scored_rows(student_logprobs, teacher_logprobs.detach(), mask)
    absent = teacher == -torch.inf
    if mask is not None:
        absent = absent | ~mask.unsqueeze(-1)
    student, teacher = student.masked_fill(absent, -torch.inf), teacher.masked_fill(absent, -torch.inf)
    if tail in ("renormalise", "renormalise_both"):
        teacher = teacher - _log_sum(teacher)
    if tail == "renormalise_both":
        student = student - _log_sum(student)
    elif tail != "drop":
        rest = torch.full_like(teacher[..., :1], -torch.inf) if tail == "renormalise" else _log_tail(teacher)
        student, teacher = torch.cat([student, _log_tail(student)], -1), torch.cat([teacher, rest], -1)
    value = DIVERGENCES[kind].function(student, teacher, numbers).masked_fill(absent.all(-1), 0)
    return value if tail == "drop" else not_negative(value)


def _log_sum(logprobs: Tensor) -> Tensor:
    """`log sum_k p_k`, `[*, 1]`; 0 for a row without mass, which so keeps a gradient of 0."""
    empty = (logprobs == -torch.inf).all(-1, keepdim=True)
    return logprobs.masked_fill(empty, 0).logsumexp(-1, keepdim=True).masked_fill(empty, 0)


def _log_tail(logprobs: Tensor) -> Tensor:
    """`log(1 - sum_k p_k)`, `[*, 1]`, the difference at least the dtype's epsilon; 0 for a row without mass."""
    empty = (logprobs == -torch.inf).all(-1, keepdim=True)
    mass = logprobs.masked_fill(empty, 0).logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(logprobs.dtype).eps)
    # Each form where it is the accurate one.
    near = mass > -math.log(2)
    log_tail = torch.where(
        near,
        torch.log(-torch.expm1(mass.masked_fill(~near, -1))),
        torch.log1p(-torch.exp(mass.masked_fill(near, -1))),
    )
    return log_tail.masked_fill(empty, 0)


def sampled_kl(
    student_logprobs: Tensor,  # any shape, of sampled tokens
    teacher_logprobs: Tensor,  # the same, of the same tokens
    *,
    estimator: str = "k2",
    mask: Tensor | None = None,  # the same, bool
) -> Tensor:
    """An estimate of the reverse KL `KL(s||t)` from one token sampled by the student, at each position.

    With `d = log s - log t` of the sampled token:

    | `estimator` | value | its mean over samples | its gradient's mean |
    |---|---|---|---|
    | `"k1"` | `d` | the KL | 0: of use as a metric, and as a reward |
    | `"k2"` | `d^2 / 2` | close to the KL when that is small | that of the KL at each position |
    | `"k3"` | `e^-d - 1 + d` | the KL, never negative | that of the forward KL `KL(t||s)` |

    (`d` times the gradient of `log s` is both k2's gradient and a policy gradient with reward `-d`.) The teacher is a
    constant. Positions outside the mask give 0, without a gradient. Schulman, "Approximating KL Divergence", 2020;
    Tang and Munos, arXiv:2506.09477, on the gradients.
    """
    check_choice("estimator", estimator, tuple(KL_ESTIMATORS))
    check_float_tensor("student_logprobs", student_logprobs)
    check_float_tensor("teacher_logprobs", teacher_logprobs, tuple(student_logprobs.shape))
    teacher_logprobs = taken(teacher_logprobs.detach(), student_logprobs.device)
    difference = wide(student_logprobs) - wide(teacher_logprobs)
    if mask is not None:
        check_scored(mask, tuple(student_logprobs.shape))
        difference = difference.masked_fill(~mask, 0)
    return KL_ESTIMATORS[estimator](difference)


@dataclass(frozen=True, kw_only=True)
class SampledKLLoss:
    """`sampled_kl` as a loss object (see the protocol in `liger_losses.chunked.loss`): its mean over scored tokens.

    The targets are tokens sampled by the student, the input is what the teacher gives them, so that distilling on
    policy needs the teacher's forward pass and no more of its vocabulary than one number a token.

    Args:
        estimator: `"k1"`, `"k2"` or `"k3"`; see `sampled_kl` for what the gradient of each is.

    `inputs` hold `teacher_logprobs` `[R, T]`, and may hold `token_weights` `[R, T]` and, without dimensions,
    `num_items_in_batch`, what the sum is divided by in place of the number of scored tokens.

    Metrics: `reverse_kl`, the mean of `d` over scored tokens.
    """

    estimator: str = "k2"

    constants = ("teacher_logprobs", "token_weights", "num_items_in_batch")

    def __post_init__(self) -> None:
        check_choice("estimator", self.estimator, tuple(KL_ESTIMATORS))

    @property
    def separability(self) -> str:
        return "token"

    @property
    def statistics(self) -> tuple[str, ...]:
        return ("logprob",)

    def prepare(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_names("inputs", inputs, ("teacher_logprobs", "token_weights", "num_items_in_batch"))
        if "teacher_logprobs" not in inputs:
            raise ValueError("inputs: got no teacher_logprobs, expected a tensor [R, T]")
        for name in ("teacher_logprobs", "token_weights"):
            if name in inputs:
                check_float_tensor(name, inputs[name], tuple(mask.shape))
        if "num_items_in_batch" in inputs:
            check_count("num_items_in_batch", inputs["num_items_in_batch"])
        return {name: taken(value.detach(), mask.device) for name, value in inputs.items()}

    def totals(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scored = mask.sum()
        return {"tokens": divisor(inputs.get("num_items_in_batch", scored)), "scored": scored.clamp_min(1)}

    def __call__(
        self,
        statistics: Mapping[str, Tensor],
        mask: Tensor,
        inputs: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, teacher = statistics["logprob"], inputs["teacher_logprobs"]
        check_mask(mask, logprobs)
        weights = inputs.get("token_weights")
        # Before the estimate: the gradient of an infinite one would be NaN under any weight.
        read = mask if weights is None else mask & (weights != 0)
        estimate = sampled_kl(logprobs, teacher, estimator=self.estimator, mask=read)
        if weights is not None:
            estimate = weighted(estimate, weights, read)
        with torch.no_grad():
            mean = sampled_kl(logprobs, teacher, estimator="k1", mask=mask).sum() / totals["scored"]
        return divided(estimate.sum(), totals["tokens"]), {"reverse_kl": mean}
