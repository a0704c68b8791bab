"""Distillation over two heads under liger-kernel's names: what they compute is `fused_linear_distillation`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._checks import check_choice, check_flag, check_number, check_size, check_temperature, check_weights
from ..chunked import Divergence, ScoredTokens, fused_linear_distillation
from ..chunked.teacher import Teacher, check_teacher, teacher_transform
from ..chunked.tokens import check_integer
from ..kernels import LogitTransform
from .base import CallOptions, check_accumulator, check_chunk_strategy, check_head_as, renamed
from .engine_options import HeadOptions, with_head_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


_STUDENT = ("student_input", "student_weight", "student_bias")


class _Distillation(torch.nn.Module):
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


class _SoftAndHard(_Distillation):
    """Soft loss and cross entropy, weighted: what liger-kernel's chunked distillation losses share."""

    def __init__(
        self,
        divergence: Divergence,
        ignore_index: int,
        scale: float,  # what the soft loss is, in divergences
        *,
        compiled: bool,
        chunk_size: int,
        return_soft_hard_loss: bool,
        teacher_softcap: float | None,
        teacher_logit_scale: float | None,
        **engine: Unpack[HeadOptions],
    ) -> None:
        check_flag("compiled", compiled)
        check_flag("return_soft_hard_loss", return_soft_hard_loss)
        check_size("chunk_size", chunk_size)
        if chunk_size != 1024:
            check_chunk_strategy(chunk_size, engine.get("strategy", "auto"), 1024)
        super().__init__(
            divergence,
            ignore_index,
            teacher_softcap=teacher_softcap,
            teacher_logit_scale=teacher_logit_scale,
            max_units=None if chunk_size == 1024 else chunk_size,
            **engine,
        )
        self.return_soft_hard_loss = return_soft_hard_loss
        self._scale = scale

    def forward(
        self,
        student_input: Tensor,  # [N, H] or [R, T, H]
        student_weight: Tensor,  # [V, H]
        teacher_input: Tensor,  # [N, H'] or [R, T, H']
        teacher_weight: Tensor,  # [V', H']
        true_labels: Tensor | ScoredTokens,  # [N] or [R, T]
        student_bias: Tensor | None = None,  # [V]
        teacher_bias: Tensor | None = None,  # [V']
        *,
        num_items_in_batch: Tensor | int | None = None,
        token_weights: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The loss, or with `return_soft_hard_loss` `(loss, soft, hard)`, the latter two detached.

        `loss = weight_soft_loss * soft + weight_hard_loss * hard`: both are divided as the loss is, by the scored
        tokens or `num_items_in_batch`, and carry `token_weights`.
        """
        if true_labels is None:
            raise TypeError("true_labels: got NoneType, expected a torch.Tensor")
        loss, metrics = self._call(
            student_input, student_weight, true_labels, student_bias, labels_name="true_labels",
            teacher_hidden=teacher_input, teacher_weight=teacher_weight, teacher_bias=teacher_bias,
            report=("soft", "hard") if self.return_soft_hard_loss else (),
            num_items_in_batch=num_items_in_batch, token_weights=token_weights,
        )  # fmt: skip
        if not self.return_soft_hard_loss:
            return loss
        return loss, self._scale * metrics["soft"], metrics["hard"]


class LigerFusedLinearJSDLoss(_SoftAndHard):
    """Generalised Jensen-Shannon divergence of a teacher, mixed with the labels' cross entropy, over two heads.

        loss = (weight_soft_loss * sum_t JSD_t + weight_hard_loss * sum_t -log p_t[label])
               / max(1, scored tokens)

    **Half of it is a cross entropy by default**, as in liger-kernel; `weight_hard_loss=0.0, weight_soft_loss=1.0` is
    the divergence alone. The temperature divides both sides' logits of the divergence, is not made up for by its
    square, and does not concern the cross entropy; it has nothing to do with a temperature of sampling.

    Args:
        weight_hard_loss, weight_soft_loss: >= 0, one of them > 0.
        beta: weight of the teacher in the mixture, in [0, 1]: `Divergence(kind="jsd")`; 0 is forward KL, 1 reverse KL.
        ignore_index: labels that are not scored, in either part.
        temperature: > 0.
        compiled: accepted and without effect: there is no compile step.
        chunk_size: other than 1024, the default, which sets no bound: at most so many tokens are in a tile.
        return_soft_hard_loss: return `(loss, soft, hard)`, detached terms: `loss = weight_soft_loss * soft +
            weight_hard_loss * hard`.
        vocabulary: `"shared"` or `"padded"`, where the heads' vocabularies differ in size; see `Divergence`.
        teacher_softcap, teacher_logit_scale: of the teacher's logits. softcap, logit_scale: of the student's.
        memory_budget, strategy, active_vocab: of `fused_linear_loss`. logits_dtype: of `fused_linear_distillation`:
            with `"input"` a bf16 gradient is off by 8 % where the teacher is near.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    @with_head_options
    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
        *,
        vocabulary: str = "shared",
        teacher_softcap: float | None = None,
        teacher_logit_scale: float | None = None,
        **engine: Unpack[HeadOptions],
    ) -> None:
        check_weights(weight_hard_loss=weight_hard_loss, weight_soft_loss=weight_soft_loss)
        super().__init__(
            Divergence(
                kind="jsd", beta=beta, temperature=temperature, soft_weight=weight_soft_loss,
                hard_weight=weight_hard_loss, vocabulary=vocabulary,
            ),
            ignore_index,
            1.0,
            compiled=compiled,
            chunk_size=chunk_size,
            return_soft_hard_loss=return_soft_hard_loss,
            teacher_softcap=teacher_softcap,
            teacher_logit_scale=teacher_logit_scale,
            **engine,
        )  # fmt: skip


class LigerFusedLinearCosineSimilarityLoss(_SoftAndHard):
    """`beta * (1 - cos)` of the two models' logits, mixed with the labels' cross entropy, over two heads.

        loss = (weight_soft_loss * sum_t beta (1 - cos_t) + weight_hard_loss * sum_t -log p_t[label])
               / max(1, scored tokens)

    Args:
        weight_hard_loss, weight_soft_loss, ignore_index, compiled, chunk_size, return_soft_hard_loss and the
            keyword-only options: as in `LigerFusedLinearJSDLoss`; the vocabulary is `"shared"` only.
        beta: >= 0, a factor.
        temperature: > 0, accepted as in liger-kernel and without effect: it scales logits, and a cosine has no scale.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    @with_head_options
    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
        *,
        vocabulary: str = "shared",
        teacher_softcap: float | None = None,
        teacher_logit_scale: float | None = None,
        **engine: Unpack[HeadOptions],
    ) -> None:
        check_weights(weight_hard_loss=weight_hard_loss, weight_soft_loss=weight_soft_loss)
        check_number("beta", beta, low=0)
        check_temperature("temperature", temperature)
        super().__init__(
            Divergence(
                kind="cosine", soft_weight=weight_soft_loss * beta, hard_weight=weight_hard_loss, vocabulary=vocabulary,
            ),
            ignore_index,
            beta,
            compiled=compiled,
            chunk_size=chunk_size,
            return_soft_hard_loss=return_soft_hard_loss,
            teacher_softcap=teacher_softcap,
            teacher_logit_scale=teacher_logit_scale,
            **engine,
        )  # fmt: skip


class LigerFusedLinearJSD(_Distillation):
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
        return self._call(
            student_input, student_weight, shift_labels, student_bias, labels_name="shift_labels",
            teacher_hidden=teacher_input, teacher_weight=teacher_weight, teacher_bias=teacher_bias,
            num_items_in_batch=num_items_in_batch, token_weights=token_weights,
        )[0]  # fmt: skip


class LigerFusedLinearKLDivLoss(_Distillation):
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
        loss = self._call(
            student_input, student_weight, shift_labels, student_bias, labels_name="shift_labels",
            teacher_probs=target, reduction="sum" if self.reduction == "sum" else "mean",
            num_items_in_batch=num_items_in_batch, token_weights=token_weights,
        )[0]  # fmt: skip
        return loss / student_weight.shape[0] if self.reduction == "mean" else loss
