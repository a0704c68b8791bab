"""Divergences between a student's and a teacher's next-token distributions, of logits or log-probabilities that exist.

The kinds, their formulas and their papers are the rows of `divergence_kinds.DIVERGENCES`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import (
    check_choice,
    check_device,
    check_flag,
    check_float_tensor,
    check_fp32_range,
    check_number,
    check_scored,
    check_shared,
    check_temperature,
)
from .._constants import taken
from ..kernels import check_of_logits, wide_dtype
from .divergence_kinds import DIVERGENCES, DivergenceNumbers, log_ratio, probability_times

ENDPOINTS = ("trl", "formula")
VOCABULARIES = ("shared", "padded")


def check_divergence(
    kind: str,
    endpoints: str,
    **given: float | None,  # beta, skew, alpha, mu
) -> DivergenceNumbers:
    """The numbers of a kind, its own defaults where None; raises for what it does not read."""
    check_choice("kind", kind, tuple(DIVERGENCES))
    check_choice("endpoints", endpoints, ENDPOINTS)
    reads = dict(DIVERGENCES[kind].reads)
    for name, value in given.items():
        if value is None:
            continue
        if name not in reads:
            raise ValueError(f"{name}: got {value!r} with kind={kind!r}, expected None: nothing would read it")
        bounds = {} if name == "alpha" else {"low": 0, "high": 1}
        check_number(name, value, **bounds)
        if name == "skew" and value == 1:
            raise ValueError("skew: got 1, expected 0 <= skew < 1: the divergence is 0 whatever the student")
    if endpoints != "trl" and kind != "jsd":
        raise ValueError(f"endpoints: got {endpoints!r} with kind={kind!r}, expected 'trl': nothing would read it")
    numbers = {name: default if given.get(name) is None else given[name] for name, default in reads.items()}
    return DivergenceNumbers(**numbers, endpoints=endpoints)  # type: ignore[arg-type]


def divergence(
    student_logits: Tensor,  # [*, V]
    teacher_logits: Tensor,  # [*, V]
    *,
    kind: str = "forward_kl",
    beta: float | None = None,
    skew: float | None = None,
    alpha: float | None = None,
    mu: float | None = None,
    endpoints: str = "trl",
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
    scale_by_squared_temperature: bool = False,
    vocabulary: str = "shared",
    mask: Tensor | None = None,  # [*] bool, True where the token is scored
) -> Tensor:
    """The divergence of every token, `[*]` in nats, between `s = softmax(z_s / T)` and `t = softmax(z_t / T)`.

    Log-probabilities may stand for logits: at `T = 1` normalising them again changes nothing.

    Args:
        student_logits, teacher_logits: `-inf` is a probability of 0. 16-bit logits are computed with in fp32. The
            teacher is a constant: no gradient goes to it.
        kind: a row of `DIVERGENCES`.
        beta: of "jsd", in `[0, 1]`, default 0.5. skew: of the two skewed KL, in `[0, 1)`, default 0.1. alpha: of
            "alpha", default 0.5. mu: of "akl", the teacher's mass that makes the head, in `[0, 1]`, default 0.5;
            tokens as probable as the head's last belong to it.
        endpoints: of "jsd" at `beta` 0 and 1. `"trl"`, which is liger-kernel's as well: forward and reverse KL.
            `"formula"`: what the formula gives, 0.
        temperature: `T` of both models, also of the logits of "mse"; refused with "cosine", which it cannot change.
        teacher_temperature: of the teacher alone; None: as `temperature`.
        scale_by_squared_temperature: multiply by `T^2`, so that the gradient's size does not depend on `T` (Hinton et
            al.). Off by default, as in TRL and liger-kernel.
        vocabulary: of two vocabularies that agree on their first columns and differ in length. `"shared"`: only the
            columns that both have exist, at least 2, and both softmaxes are over these. `"padded"`: each model gives
            probability 0 to what it lacks, and a divergence that is infinite for it is `inf`; refused for kinds of
            logits, where what is absent has no number.
        mask: rows where it is False give 0, and whatever their logits hold reaches no gradient.

    Returns:
        `[*]`, fp32 (fp64 for fp64). Never below 0: what rounding leaves there is cut off, the gradient is not.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    numbers = check_divergence(kind, endpoints, beta=beta, skew=skew, alpha=alpha, mu=mu)
    check_temperature("temperature", temperature)
    if teacher_temperature is not None:
        check_temperature("teacher_temperature", teacher_temperature)
    check_flag("scale_by_squared_temperature", scale_by_squared_temperature)
    check_choice("vocabulary", vocabulary, VOCABULARIES)
    if scale_by_squared_temperature:
        check_fp32_range("temperature, squared", temperature**2)
    check_of_logits(kind, vocabulary, temperature, teacher_temperature, scale_by_squared_temperature)
    check_pair(("student_logits", "teacher_logits"), student_logits, teacher_logits, mask, same_size=False)
    student, teacher = _one_vocabulary(student_logits, teacher_logits.detach(), vocabulary)
    if teacher_temperature is None:
        teacher_temperature = temperature
    student, teacher = scored_rows(student, teacher, mask)
    student, teacher = student / temperature, teacher / teacher_temperature
    if not DIVERGENCES[kind].of_logits:
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    value = DIVERGENCES[kind].function(student, teacher, numbers)
    if scale_by_squared_temperature:
        value = value * temperature**2
    return not_negative(value)


def logprob_divergence(
    student_logprobs: Tensor,  # [*, V]
    teacher_logprobs: Tensor,  # [*, V]
    *,
    kind: str = "forward_kl",
    beta: float | None = None,
    skew: float | None = None,
    alpha: float | None = None,
    mu: float | None = None,
    endpoints: str = "trl",
    mask: Tensor | None = None,  # [*] bool
) -> Tensor:
    """The formula of `divergence` as it stands, `[*]`, of log-probabilities that are not normalised again.

    Every entry is a variable of its own: the gradient is the one with respect to log-probabilities, and a sum over
    part of the vocabulary may be negative. "cosine" and "mse" are of logits and refused.
    """
    numbers = check_divergence(kind, endpoints, beta=beta, skew=skew, alpha=alpha, mu=mu)
    if DIVERGENCES[kind].of_logits:
        raise ValueError(f"kind: got {kind!r}, which is of logits; expected a divergence of probabilities")
    check_pair(("student_logprobs", "teacher_logprobs"), student_logprobs, teacher_logprobs, mask)
    student, teacher = scored_rows(student_logprobs, teacher_logprobs.detach(), mask)
    return DIVERGENCES[kind].function(student, teacher, numbers)


def kl_terms(
    log_q: Tensor,  # any shape
    p: Tensor,  # the same, probabilities or with log_target their logarithms
    *,
    log_target: bool = False,
    eps: float = 0.0,
) -> Tensor:
    """`p (log max(p, eps) - log q)` of every entry, 0 where `p` is 0; `p` is a constant. `eps` not with log_target."""
    p = p.detach()
    if log_target:
        return probability_times(p, log_ratio(p, log_q))
    gap = p.clamp(min=eps).log() - log_q
    return p * gap.masked_fill(p == 0, 0)


def check_pair(
    names: tuple[str, str], student: Tensor, teacher: Tensor, mask: Tensor | None, same_size: bool = True
) -> None:
    """Raise unless both are floating-point of one shape `[*, V]` (V may differ without `same_size`), the mask `[*]`."""
    for name, tensor in zip(names, (student, teacher), strict=True):
        check_float_tensor(name, tensor)
        if tensor.dim() == 0 or tensor.shape[-1] == 0:
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected [*, V] with V >= 1")
    check_device(names[1], teacher, names[0], student)
    stop = None if same_size else -1
    if student.shape[:stop] != teacher.shape[:stop]:
        expected = list(student.shape) if same_size else [*student.shape[:-1], "V"]
        raise ValueError(f"{names[1]}: got shape {list(teacher.shape)}, expected {expected}")
    if mask is not None:
        check_scored(mask, tuple(student.shape[:-1]))
        check_device("mask", mask, names[0], student)


def scored_rows(student: Tensor, teacher: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both in one wide dtype; equal rows where not scored, which no kind finds any divergence in."""
    dtype = wide_dtype(student.dtype, teacher.dtype)
    student, teacher = student.to(dtype), taken(teacher, teacher.device, dtype)
    if mask is None:
        return student, teacher
    unscored = ~mask.unsqueeze(-1)
    return student.masked_fill(unscored, 0), teacher.masked_fill(unscored, 0)


def not_negative(value: Tensor) -> Tensor:
    """Rounding's negative remainders become 0; the gradient stays."""
    return value - value.detach().clamp(max=0)


def _one_vocabulary(student: Tensor, teacher: Tensor, vocabulary: str) -> tuple[Tensor, Tensor]:
    sizes = student.shape[-1], teacher.shape[-1]
    if sizes[0] == sizes[1]:
        return student, teacher
    if vocabulary == "shared":
        check_shared(sizes[1], sizes[0])
        return student[..., : min(sizes)], teacher[..., : min(sizes)]
    pad = max(sizes)
    return tuple(F.pad(z, (0, pad - z.shape[-1]), value=-torch.inf) for z in (student, teacher))  # type: ignore[return-value]
