"""Distillation losses mixed with the labels' cross entropy, under liger-kernel's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .._checks import check_flag, check_number, check_size, check_temperature, check_weights
from ..chunked import Divergence, ScoredTokens
from .base import check_chunk_strategy
from .distillation import DistillationModule
from .engine_options import HeadOptions, with_head_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _SoftAndHard(DistillationModule):
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
        """The loss, the soft one and the labels' cross entropy weighted.

        Args:
            student_input: `[N, H]` or `[R, T, H]`, the hidden states that go into the student's head, in its dtype, but
                under autocast.
            student_weight: `[V, H]`, the student's head.
            teacher_input: `[N, H']` or `[R, T, H']`, the teacher's hidden states, of a width of their own. The teacher
                is a constant.
            teacher_weight: `[V', H']`; where V' is not V, `vocabulary` says what becomes of the rest.
            true_labels: `[N]` or `[R, T]` integer, the token that each hidden state is to predict (shifted by the
                caller); `ignore_index` where neither part is scored. Read without waiting where it is on the CPU, or a
                `ScoredTokens`.
            student_bias: `[V]`.
            teacher_bias: `[V']`.
            num_items_in_batch: an int or `[]`: divides in place of the scored tokens.
            token_weights: a factor a token, in the shape of the labels, floating-point; the divisor does not count it.

        Returns:
            The loss, a scalar, fp32 (fp64 for fp64); with `return_soft_hard_loss` `(loss, soft, hard)`, the latter two
            detached: `loss = weight_soft_loss * soft + weight_hard_loss * hard`. Both are divided as the loss is, by
            the scored tokens or `num_items_in_batch`, and carry `token_weights`. In nats; a cosine has no unit.

        Raises:
            TypeError, ValueError: before any work, naming the argument.
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
