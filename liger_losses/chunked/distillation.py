"""Distillation over two heads: a divergence per token, differentiable, and its token mean in one pass."""

from __future__ import annotations

from dataclasses import replace
from typing import overload

from torch import Tensor

from .._checks import check_count, check_float_tensor
from ..kernels import DISTILLATION, Divergence
from .call import prepare
from .calls import run_loss, token_values
from .distillation_loss import COUNT, WEIGHTS, DistillationLoss
from .head import check_head
from .head_tensors import HeadTensors, make_transform
from .loss import check_statistics
from .planner import check_deferred
from .teacher import Teacher, check_teacher, teacher_transform
from .tokens import ScoredTokens

_STUDENT = ("student_hidden", "student_weight", "student_bias")


def _teacher(
    divergence: Divergence,
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    logits: Tensor | None,
    probabilities: Tensor | None,
    softcap: float | None,
    logit_scale: float | None,
) -> Teacher:
    if not isinstance(divergence, Divergence):
        raise TypeError(f"divergence: got {type(divergence).__name__}, expected a Divergence")
    given = {"teacher_logits": logits, "teacher_probs": probabilities}
    head = {"teacher_hidden": hidden, "teacher_weight": weight, "teacher_bias": bias}
    for name, tensor in {**head, **given}.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
    if hidden is None:
        for name, value in (("teacher_softcap", softcap), ("teacher_logit_scale", logit_scale)):
            if value is not None:
                raise ValueError(f"{name}: got {value} without teacher_hidden, expected None: logits that are given "
                                 "have been through it")  # fmt: skip
    if logits is not None and probabilities is not None:
        raise ValueError("teacher_probs: got a tensor beside teacher_logits, expected one of them")
    if probabilities is not None and divergence.kind in ("cosine", "mse"):
        raise ValueError(f"teacher_probs: got a tensor with kind {divergence.kind!r}, which compares logits")
    return Teacher(
        divergence,
        hidden,
        weight,
        bias,
        probabilities if logits is None else logits,
        teacher_transform(softcap, logit_scale),
        probabilities is not None,
    )


@overload
def linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    target: Tensor | ScoredTokens,
    student_bias: Tensor | None = ...,
    *,
    teacher_hidden: Tensor | None = ...,
    teacher_weight: Tensor | None = ...,
    teacher_bias: Tensor | None = ...,
    teacher_logits: Tensor | None = ...,
    teacher_probs: Tensor | None = ...,
    divergence: Divergence = ...,
    statistics: None = ...,
    ignore_index: int = ...,
    softcap: float | None = ...,
    logit_scale: float | None = ...,
    teacher_softcap: float | None = ...,
    teacher_logit_scale: float | None = ...,
    memory_budget: int | None = ...,
    logits_dtype: str = ...,
    strategy: str = ...,
    active_vocab: float | str | None = ...,
) -> Tensor: ...


@overload
def linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    target: Tensor | ScoredTokens,
    student_bias: Tensor | None = ...,
    *,
    teacher_hidden: Tensor | None = ...,
    teacher_weight: Tensor | None = ...,
    teacher_bias: Tensor | None = ...,
    teacher_logits: Tensor | None = ...,
    teacher_probs: Tensor | None = ...,
    divergence: Divergence = ...,
    statistics: tuple[str, ...],
    ignore_index: int = ...,
    softcap: float | None = ...,
    logit_scale: float | None = ...,
    teacher_softcap: float | None = ...,
    teacher_logit_scale: float | None = ...,
    memory_budget: int | None = ...,
    logits_dtype: str = ...,
    strategy: str = ...,
    active_vocab: float | str | None = ...,
) -> dict[str, Tensor]: ...


def linear_divergence(
    student_hidden: Tensor,  # [*, H]
    student_weight: Tensor,  # [V, H]
    target: Tensor | ScoredTokens,  # [*] integer
    student_bias: Tensor | None = None,  # [V]
    *,
    teacher_hidden: Tensor | None = None,  # [*, H']
    teacher_weight: Tensor | None = None,  # [V', H']
    teacher_bias: Tensor | None = None,  # [V']
    teacher_logits: Tensor | None = None,  # [*, V']
    teacher_probs: Tensor | None = None,  # [*, V']
    divergence: Divergence = Divergence(),  # noqa: B008
    statistics: tuple[str, ...] | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float | None = None,
    memory_budget: int | None = None,
    logits_dtype: str = "float32",
    strategy: str = "auto",
    active_vocab: float | str | None = None,
) -> Tensor | dict[str, Tensor]:
    """A divergence between student and teacher for each token, without the `[*, V]` logits of either.

    | statistic | value | gradient |
    |---|---|---|
    | `distillation` | `soft_weight * c * D + hard_weight * (-log p[target])`, see `Divergence` | yes |
    | `divergence` | `D` | no |
    | `logprob` | `log p[target]` of the student, without the divergence's temperature | no |
    | `entropy`, `teacher_entropy` | of the two softmaxes that `D` compares, in nats | no |

    The teacher is constant. Products of `2 N H V` FLOPs over the scored tokens, N, with backward: the teacher's one and
    the student's three; two with a frozen head, one under `torch.no_grad`; strategy `"recompute"` projects both sides
    twice.

    Args:
        student_hidden, student_weight, student_bias: of the student's head, `softcap`, `logit_scale` of its logits.
        target: `[*]`, aligned with `student_hidden`. Positions of `ignore_index` are not projected and have value 0;
            the labels themselves are read only for the hard term and `logprob`.
        teacher_hidden, teacher_weight, teacher_bias: of the teacher's head, of its own width; `teacher_softcap`,
            `teacher_logit_scale` of its logits (None: none of either).
        teacher_logits: instead, its logits, or log-probabilities, which are logits too. teacher_probs: instead, its
            probabilities; each row is normalised to sum to 1. Rows with a negative entry, or of zeros alone, are not
            probabilities, and give NaN: looking for them would wait for the device.
        divergence: which divergence, its temperature and the weights.
        statistics: names out of the table; None returns `distillation` itself.
        ignore_index, memory_budget, strategy, active_vocab: as in `linear_logprobs`.
        logits_dtype: `"float32"`, or `"input"`: both models' logits are rounded to the compute dtype. In bf16 that puts
            the gradient off by 8 % where the teacher is near the student (0.2 % from fp32 logits), for a few per cent
            of the time: a gradient of a divergence is a difference of near-equal distributions.

    Returns:
        A tensor `[*]`, or a dict of them by name: fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError, ValueError: before any work, naming the argument.
    """
    if statistics is not None:
        check_statistics("statistics", statistics, DISTILLATION)
    names = ("distillation",) if statistics is None else tuple(statistics)
    check_deferred(strategy, "fused_linear_distillation")
    teacher = _teacher(
        divergence, teacher_hidden, teacher_weight, teacher_bias, teacher_logits, teacher_probs, teacher_softcap,
        teacher_logit_scale,
    )  # fmt: skip
    call = prepare(student_hidden, student_weight, target, student_bias, ignore_index, logits_dtype, _STUDENT)
    call.read(HeadTensors(teacher=teacher), names)
    call.transform = make_transform(logit_scale, softcap, 1.0)
    wanted = tuple(name for name in names if name == "distillation")
    values = token_values(call, names, wanted, strategy, memory_budget, active_vocab)
    return values["distillation"] if statistics is None else values


def fused_linear_distillation(
    student_hidden: Tensor,  # [R, T, H] or [N, H]
    student_weight: Tensor,  # [V, H]
    target: Tensor | ScoredTokens,  # [R, T] or [N] integer
    student_bias: Tensor | None = None,  # [V]
    *,
    teacher_hidden: Tensor | None = None,  # [R, T, H']
    teacher_weight: Tensor | None = None,  # [V', H']
    teacher_bias: Tensor | None = None,  # [V']
    teacher_logits: Tensor | None = None,  # [R, T, V']
    teacher_probs: Tensor | None = None,  # [R, T, V']
    divergence: Divergence = Divergence(),  # noqa: B008
    token_weights: Tensor | None = None,  # [R, T]
    num_items_in_batch: Tensor | int | None = None,
    reduction: str = "mean",
    report: tuple[str, ...] | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float | None = None,
    memory_budget: int | None = None,
    logits_dtype: str = "float32",
    strategy: str = "auto",
    max_units: int | None = None,
    token_statistics: tuple[str, ...] = (),
    active_vocab: float | str | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Distillation of a teacher into a student over their two heads, averaged over the scored tokens.

        loss = sum_t w_t (soft_weight c D_t + hard_weight (-log p_t[target_t])) / max(1, scored tokens)

    with `D` of `divergence`. The gradients are formed while both tiles of logits are resident: the teacher's product
    and three of the student's, against six or eight where they are recomputed. No scored token gives 0, with a zero
    gradient. A pure divergence unless `divergence.hard_weight` asks for the labels.

    Args:
        student_hidden, student_weight, target, student_bias, teacher_*, divergence, ignore_index, softcap,
            logit_scale: as in `linear_divergence`, with hidden states `[R, T, H]`, or `[N, H]` as one row; no other
            number of dimensions. The teacher gets no gradient, whatever it requires.
        token_weights: `w`, a factor per token; the divisor does not count it. A weight of 0 is a contribution of 0,
            also where the divergence is infinite. Where it requires a gradient it gets one, from a deferred strategy.
        num_items_in_batch: divides instead of the scored tokens: an int, or a tensor that need not be read.
        reduction: `"mean"` or `"sum"`.
        report: what to hand back among the metrics. Plain means over the scored tokens, whatever the weights, the
            reduction and the count: `divergence`, `logprob` (as `nll`), `entropy`, `teacher_entropy`, `distillation`.
            Terms of the loss, with its weights and divisor: `soft`, `hard`, so that it is
            `soft_weight c soft + hard_weight hard`. None: `divergence`, unless `token_statistics` names it.
        memory_budget, strategy, max_units, active_vocab: as in `fused_linear_loss`; a unit is a token.
        logits_dtype: as in `linear_divergence`: with `"input"` a bf16 gradient may be off by 8 %.
        token_statistics: per-token numbers to hand back among the metrics, names as in `linear_divergence`; not one
            that `report` names as well, since metrics hold one entry of a name.

    Returns:
        `(loss, metrics)`.

    Raises:
        TypeError, ValueError: before any work, naming the argument.
    """
    teacher = _teacher(
        divergence, teacher_hidden, teacher_weight, teacher_bias, teacher_logits, teacher_probs, teacher_softcap,
        teacher_logit_scale,
    )  # fmt: skip
    if not isinstance(target, (Tensor, ScoredTokens)):
        raise TypeError(f"target: got {type(target).__name__}, expected a torch.Tensor or ScoredTokens")
    if token_statistics != ():
        check_statistics("token_statistics", token_statistics, DISTILLATION)
    if report is None:
        report = () if "divergence" in token_statistics else ("divergence",)
    loss = DistillationLoss(report=report, reduction=reduction)
    both = [name for name in token_statistics if name in report and name != "logprob"]  # a mean of which is `nll`
    if both:
        raise ValueError(f"token_statistics: got {both}, which report has too, and metrics hold one entry of a name; "
                         "expected others, or a report without")  # fmt: skip
    inputs = {}
    if token_weights is not None:
        check_float_tensor(WEIGHTS, token_weights, tuple(target.shape))
        inputs[WEIGHTS] = token_weights
    if num_items_in_batch is not None:
        inputs[COUNT] = check_count(COUNT, num_items_in_batch)
    shape = target.shape
    if len(shape) == 1 and isinstance(student_hidden, Tensor) and student_hidden.dim() == 2:
        # One row of all tokens, checked before for messages about what the caller gave.
        check_head(student_hidden, student_weight, student_bias, shape, _STUDENT)
        check_teacher(teacher, shape, student_hidden.device)
        student_hidden = student_hidden.unsqueeze(0)
        target = target.as_row() if isinstance(target, ScoredTokens) else target.unsqueeze(0)
        inputs = {name: value.unsqueeze(0) if name == WEIGHTS else value for name, value in inputs.items()}
        hidden, logits = (None if t is None else t.unsqueeze(0) for t in (teacher.hidden, teacher.logits))
        teacher = replace(teacher, hidden=hidden, logits=logits)
    value, metrics = run_loss(
        loss, student_hidden, student_weight, target, student_bias, inputs,
        given=HeadTensors(teacher=teacher), ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap,
        temperature=1.0, memory_budget=memory_budget, logits_dtype=logits_dtype, strategy=strategy, max_units=max_units,
        token_statistics=token_statistics, head=_STUDENT, active_vocab=active_vocab,
    )  # fmt: skip
    return value, {name: m.reshape(shape) if name in token_statistics else m for name, m in metrics.items()}
