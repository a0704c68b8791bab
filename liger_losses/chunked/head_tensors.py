"""What shapes a call's logits and statistics beside the head: a temperature per token, column weights, labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._checks import FP32_RANGE, check_constant, check_float_tensor, check_fp32_range
from ..kernels import DIFFERENTIABLE, DISTILLATION, INVALID_POSITIVE, STATISTICS, LogitTransform
from .teacher import Teacher, check_teacher
from .tokens import check_integer, upload, widened


@dataclass(frozen=True)
class HeadTensors:
    """What else, beside the head, shapes logits and statistics: none of it has a gradient."""

    temperature: Tensor | None = None  # [R * T], in place of the transform's one number
    column_weights: Tensor | None = None  # [V], of the statistic mean_logprob
    positives: Tensor | None = None  # [R * T, P] labels of each token: the likelihood is a product of Bernoullis
    teacher: Teacher | None = None  # a second model: the statistics are those of `DISTILLATION`

    def to(self, dtype: torch.dtype) -> HeadTensors:
        temperature, weights = (None if t is None else t.to(dtype) for t in (self.temperature, self.column_weights))
        return HeadTensors(temperature, weights, self.positives, self.teacher)

    @property
    def flat(self) -> tuple[Tensor | None, ...]:
        """The tensors alone, for an operator."""
        teacher = (None,) * 4 if self.teacher is None else self.teacher.tensors
        return (self.temperature, self.column_weights, self.positives, *teacher)

    @classmethod
    def of_flat(cls, teacher: str, *tensors: Tensor | None) -> HeadTensors:
        temperature, column_weights, positives, *others = tensors
        return cls(temperature, column_weights, positives, Teacher.decode(teacher, *others))


def logit_coefficients(
    dlse: Tensor | None, dmean_logprob: Tensor | None, vocab_size: int, column_weights: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """`mean_logprob = (sum_v c_v z_v - C lse) / V` taken apart: `dL/dlse`, and `dL/dz_v` up to `c_v`."""
    if dmean_logprob is None:
        return dlse, None
    dlogit = dmean_logprob / vocab_size
    through_lse = -dmean_logprob if column_weights is None else dlogit * -column_weights.sum()
    return through_lse if dlse is None else dlse + through_lse, dlogit


def make_transform(logit_scale: float | None, softcap: float | None, temperature: float | Tensor) -> LogitTransform:
    """What the numbers among the options say; a temperature per token comes as one of the `HeadTensors`."""
    return LogitTransform(
        1.0 if logit_scale is None else logit_scale, softcap, 1.0 if isinstance(temperature, Tensor) else temperature
    )


def check_head_tensors(
    given: HeadTensors,  # as the caller has them
    names: tuple[str, ...],  # of the statistics
    shape: torch.Size,  # of the tokens
    vocab_size: int,
    device: torch.device,
    target: Tensor,  # of the tokens
    ignore_index: int,
) -> HeadTensors:
    """The tensors of a call, checked, flat, on the head's device. Raises before any work, naming the argument.

    What they hold where `target` is ignored is not looked at.
    """
    temperature, columns, positives = given.temperature, given.column_weights, given.positives
    known = STATISTICS if given.teacher is None else DISTILLATION
    foreign = [name for name in names if name not in known]
    if foreign:
        beside, instead = "beside a teacher", ""
        if given.teacher is None:
            beside, instead = "without a teacher", "; fused_linear_distillation and linear_divergence take a teacher"
        raise ValueError(f"statistics: got {foreign} {beside}, expected names out of {known}{instead}")
    for name, tensor, expected in (
        ("temperature", temperature, tuple(shape)),
        ("column_weights", columns, (vocab_size,)),
    ):
        if tensor is not None:
            check_float_tensor(name, tensor, expected)
            check_constant(name, tensor)
    if temperature is not None:
        temperature = _checked_temperature(temperature, target, ignore_index)
    if columns is not None and "mean_logprob" not in names:
        raise ValueError(
            f"column_weights: got a tensor, expected None: mean_logprob is not among the statistics {names}"
        )
    if temperature is not None:
        temperature = temperature.reshape(-1).to(device).contiguous()
    if columns is not None:
        columns = columns.to(device).contiguous()
    if positives is not None:
        if tuple(names) != ("logprob",):
            raise ValueError(
                f"positives: got a tensor, but labels that exclude nothing have a logprob only, not {names}"
            )
        positives = _canonical_positives(positives, shape, vocab_size, device, target, ignore_index)
    teacher = given.teacher
    if teacher is not None:
        check_teacher(teacher, shape, device)
        teacher = teacher.flat()
    return HeadTensors(temperature, columns, positives, teacher)


def check_differentiable_beside(teacher: Teacher | None, differentiable: tuple[str, ...]) -> None:
    """Raise for a gradient that is not formed: beside a teacher, `distillation` alone has one."""
    wrong = [name for name in differentiable if teacher is not None and name in DIFFERENTIABLE]
    if wrong:
        raise ValueError(
            f"loss.differentiable: got {wrong} beside a teacher, expected ('distillation',), which alone has a gradient"
        )


def _checked_temperature(temperature: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """With 1 where nothing is scored."""
    scored = upload(target, temperature.device).reshape(temperature.shape) != ignore_index
    if temperature.device.type == "cpu" and not torch.compiler.is_compiling():
        # On an accelerator reading it would wait; there a bad temperature shows as NaN or infinity.
        wrong = scored & ~((temperature > 0) & torch.isfinite(temperature))
        if bool(wrong.any()):
            raise ValueError(f"temperature: got {temperature[wrong][0].item()}, expected finite numbers > 0")
        outside = scored & ((temperature < FP32_RANGE[0]) | (temperature > FP32_RANGE[1]))
        if bool(outside.any()):
            check_fp32_range("temperature", temperature[outside][0].item())
    return torch.where(scored, temperature, 1)


def _canonical_positives(
    positives: Tensor, shape: torch.Size, vocab_size: int, device: torch.device, target: Tensor, ignore_index: int
) -> Tensor:
    """`[N, P]`, every label once, -1 where there is none."""
    if not isinstance(positives, Tensor):
        raise TypeError(f"positives: got {type(positives).__name__}, expected a torch.Tensor")
    check_integer("positives", positives)
    positives = widened(positives)
    if positives.shape[:-1] != shape:
        raise ValueError(f"positives: got shape {tuple(positives.shape)}, expected {(*shape, 'labels a token')}")
    unscored = target.to(positives.device).reshape(shape) == ignore_index
    absent = (positives == ignore_index) | unscored.unsqueeze(-1)
    wrong = ~absent & ((positives < 0) | (positives >= vocab_size))
    if positives.device.type == "cpu" and not torch.compiler.is_compiling() and bool(wrong.any()):
        raise ValueError(
            f"positives: got {int(positives[wrong][0])}, expected labels in [0, {vocab_size}) or "
            f"ignore_index={ignore_index}"
        )
    # On an accelerator a label out of range makes its token's log-probability NaN.
    labels = positives.masked_fill(absent, -1).masked_fill(wrong, INVALID_POSITIVE)
    labels = labels.reshape(shape.numel(), positives.shape[-1]).sort(-1).values
    repeated = torch.zeros_like(labels, dtype=torch.bool)
    repeated[:, 1:] = labels[:, 1:] == labels[:, :-1]
    return upload(labels.masked_fill(repeated & (labels >= 0), -1), device)
