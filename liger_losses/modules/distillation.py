"""Divergences over two heads, under liger-kernel's names: what they compute is `fused_linear_distillation`.

Those that are mixed with cross entropy are in `soft_and_hard`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._checks import check_choice, check_number
from ..chunked import Divergence, ScoredTokens, fused_linear_distillation
from ..chunked.teacher import Teacher, check_teacher, teacher_transform
from ..chunked.tokens import check_integer
from ..kernels import LogitTransform
from .base import CallOptions, check_accumulator, check_head_as, renamed
from .engine_options import HeadOptions, with_head_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


_STUDENT = ("student_input", "student_weight", "student_bias")


class DistillationModule(torch.nn.Module):
    """A `Divergence`, the engine's options, and one call under the caller's names."""

    def __init__(
        self,
        divergence: Divergence,
        ignore_index: int,
        *,
        teacher_softcap: float | None = None,
        teacher_logit_scale: float | None = None,
        max_units: int | None = None,
        **engine: Unpack[HeadOptions],
    ) -> None:
        super().__init__()
        self.divergence = divergence
        self.options = CallOptions(ignore_index=ignore_index, **engine)
        teacher_transform(teacher_softcap, teacher_logit_scale)
        self.teacher_softcap, self.teacher_logit_scale = teacher_softcap, teacher_logit_scale
        self.max_units = max_units

    def _call(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor | ScoredTokens | None,
        bias: Tensor | None,
        *,
        labels_name: str,
        report: tuple[str, ...] = (),
        reduction: str = "mean",
        num_items_in_batch: Tensor | int | None = None,
        token_weights: Tensor | None = None,
        **teacher: Any,  # tensors, as fused_linear_distillation calls them
    ) -> tuple[Tensor, dict[str, Tensor]]:
        names = ("teacher_input", "teacher_weight", "teacher_bias", "target")
        known = dict(zip(names, ("teacher_hidden", "teacher_weight", "teacher_bias", "teacher_probs"), strict=True))
        for name, taken in known.items():
            if taken in teacher and teacher[taken] is None and name != "teacher_bias":
                raise TypeError(f"{name}: got NoneType, expected a torch.Tensor")
        if labels is None:
            if not isinstance(hidden, Tensor):
                raise TypeError(f"student_input: got {type(hidden).__name__}, expected a torch.Tensor")
            # On the host: counting them waits for nothing.
            labels = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device="cpu")
        elif not isinstance(labels, (Tensor, ScoredTokens)):
            raise TypeError(f"{labels_name}: got {type(labels).__name__}, expected a torch.Tensor")
        if isinstance(labels, Tensor):
            check_integer(labels_name, labels)
        check_head_as(_STUDENT, hidden, weight, bias, labels.shape, labels_name)
        second = Teacher(
            self.divergence,
            teacher.get("teacher_hidden"),
            teacher.get("teacher_weight"),
            teacher.get("teacher_bias"),
            teacher.get("teacher_probs"),
            LogitTransform(),  # named: torch.compile does not follow a dataclass's own default of this kind
        )
        check_teacher(second, hidden.shape[:-1], hidden.device, names)
        if second.logits is not None and second.logits.shape[-1] != len(weight):
            raise ValueError(f"target: got shape {tuple(second.logits.shape)}, expected {len(weight)} columns, the "
                             "student's vocabulary")  # fmt: skip
        engine = {name: value for name, value in self.options.policy().items() if name != "temperature"}
        try:
            return fused_linear_distillation(
                hidden,
                weight,
                labels,
                bias,
                **teacher,
                divergence=self.divergence,
                report=report,
                reduction=reduction,
                num_items_in_batch=num_items_in_batch,
                token_weights=token_weights,
                teacher_softcap=self.teacher_softcap,
                teacher_logit_scale=self.teacher_logit_scale,
                strategy=self.options.strategy,
                max_units=self.max_units,
                **engine,
            )
        except (TypeError, ValueError) as error:
            callers = {taken: name for name, taken in known.items()}
            callers |= {"student_hidden": "student_input", "target": labels_name}
            raise renamed(error, callers) from None

    def extra_repr(self) -> str:
        return f"{self.divergence}, {self.options}"


class LigerFusedLinearJSD(DistillationModule):
    """Generalised Jensen-Shannon divergence of a teacher over two heads, averaged over the scored tokens: nothing else.

    Args:
        jsd_beta: weight of the teacher in the mixture, in [0, 1]: `Divergence(kind="jsd")`; 0 is forward KL, 1 reverse.
        ignore_index: labels that are not scored. temperature: > 0, of both sides, without a factor of its square.
        accum_dtype: accepted as None or torch.float32: gradients are always summed in fp32 (fp64 for fp64).
        vocabulary, teacher_softcap, teacher_logit_scale and the rest: as in `LigerFusedLinearJSDLoss`.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    @with_head_options
    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
        *,
        vocabulary: str = "shared",
        teacher_softcap: float | None = None,
        teacher_logit_scale: float | None = None,
        **engine: Unpack[HeadOptions],
    ) -> None:
        check_accumulator(accum_dtype)
        check_number("jsd_beta", jsd_beta, low=0, high=1)
        super().__init__(
            Divergence(kind="jsd", beta=jsd_beta, temperature=temperature, vocabulary=vocabulary),
            ignore_index,
            teacher_softcap=teacher_softcap,
            teacher_logit_scale=teacher_logit_scale,
            **engine,
        )

    def forward(
        self,
        student_input: Tensor,  # [N, H] or [R, T, H]
        student_weight: Tensor,  # [V, H]
        teacher_input: Tensor,  # [N, H'] or [R, T, H']
        teacher_weight: Tensor,  # [V', H']
        shift_labels: Tensor | ScoredTokens | None = None,  # [N] or [R, T]; None: every token is scored
        student_bias: Tensor | None = None,  # [V]
        teacher_bias: Tensor | None = None,  # [V']
        *,
        num_items_in_batch: Tensor | int | None = None,
        token_weights: Tensor | None = None,
    ) -> Tensor:
        """The divergence.

        Args:
            student_input: `[N, H]` or `[R, T, H]`, the hidden states that go into the student's head, in its dtype, but
                under autocast.
            student_weight: `[V, H]`, the student's head.
            teacher_input: `[N, H']` or `[R, T, H']`, the teacher's hidden states, of a width of their own. The teacher
                is a constant.
            teacher_weight: `[V', H']`; where V' is not V, `vocabulary` says what becomes of the rest.
            shift_labels: `[N]` or `[R, T]` integer, read only for where they are `ignore_index`, which is not scored;
                None: every token is. Read without waiting where they are on the CPU, or a `ScoredTokens`.
            student_bias: `[V]`.
            teacher_bias: `[V']`.
            num_items_in_batch: an int or `[]`: divides in place of the scored tokens.
            token_weights: a factor a token, in the shape of the labels, floating-point; the divisor does not count it.

        Returns:
            The mean over the scored tokens in nats, a scalar, fp32 (fp64 for fp64).

        Raises:
            TypeError, ValueError: before any work, naming the argument.
        """
        return self._call(
            student_input, student_weight, shift_labels, student_bias, labels_name="shift_labels",
            teacher_hidden=teacher_input, teacher_weight=teacher_weight, teacher_bias=teacher_bias,
            num_items_in_batch=num_items_in_batch, token_weights=token_weights,
        )[0]  # fmt: skip


class LigerFusedLinearKLDivLoss(DistillationModule):
    """`KL(target || softmax(student logits / temperature))` of given probabilities, over the student's head.

    Each row of `target` is divided by its sum first. Of rows that sum to 1 that is the number of liger-kernel and of
    `torch.nn.functional.kl_div`; of others theirs is `sum y log(y / s)` of the row as it stands, which is not 0 where
    the two agree. Rows of zeros, or with a negative entry, give NaN.

    Args:
        reduction: `"batchmean"`: the sum over the scored tokens, divided by their number; `"mean"`: also by the
            vocabulary's size; `"sum"`.
        ignore_index: labels that are not scored. temperature: > 0, of the student alone.
        eps: accepted, in [0, 1e-6], and without effect: a probability of 0 contributes 0 without it.
        accum_dtype: accepted as None or torch.float32: gradients are always summed in fp32 (fp64 for fp64).
        softcap, logit_scale, memory_budget, logits_dtype, strategy, active_vocab: of `fused_linear_distillation`.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    @with_head_options
    def __init__(
        self,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
        **engine: Unpack[HeadOptions],
    ) -> None:
        check_choice("reduction", reduction, ("batchmean", "mean", "sum"))
        check_number("eps", eps, low=0)
        if eps > 1e-6:
            raise ValueError(f"eps: got {eps}, expected 0 <= eps <= 1e-6: it only keeps the logarithm of 0 away")
        check_accumulator(accum_dtype)
        divergence = Divergence(temperature=temperature, teacher_temperature=1.0)
        super().__init__(divergence, ignore_index, **engine)
        self.reduction = reduction

    def forward(
        self,
        student_input: Tensor,  # [N, H] or [R, T, H]
        student_weight: Tensor,  # [V, H]
        target: Tensor,  # [N, V] or [R, T, V] probabilities, of the student's vocabulary
        shift_labels: Tensor | ScoredTokens | None = None,  # [N] or [R, T]; None: every token is scored
        student_bias: Tensor | None = None,  # [V]
        *,
        num_items_in_batch: Tensor | int | None = None,
        token_weights: Tensor | None = None,
    ) -> Tensor:
        """The divergence.

        Args:
            student_input: `[N, H]` or `[R, T, H]`, the hidden states that go into the student's head, in its dtype, but
                under autocast.
            student_weight: `[V, H]`, the student's head.
            target: `[N, V]` or `[R, T, V]`, probabilities over the student's vocabulary, a constant.
            shift_labels: `[N]` or `[R, T]` integer, read only for where they are `ignore_index`, which is not scored;
                None: every token is. Read without waiting where they are on the CPU, or a `ScoredTokens`.
            student_bias: `[V]`.
            num_items_in_batch: an int or `[]`: divides in place of the scored tokens.
            token_weights: a factor a token, in the shape of the labels, floating-point; the divisor does not count it.

        Returns:
            The loss in nats, a scalar, fp32 (fp64 for fp64).

        Raises:
            TypeError, ValueError: before any work, naming the argument.
        """
        loss = self._call(
            student_input, student_weight, shift_labels, student_bias, labels_name="shift_labels",
            teacher_probs=target, reduction="sum" if self.reduction == "sum" else "mean",
            num_items_in_batch=num_items_in_batch, token_weights=token_weights,
        )[0]  # fmt: skip
        return loss / student_weight.shape[0] if self.reduction == "mean" else loss
