"""The recipes of TRL's distillation trainers, which compare the distributions of two models.

Most of them read the logits of both: their code runs on `LinearLogits`. `DistillationTrainer` has a chunked divergence
of its own, taken of hidden states and weights: there another function is put in its place.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked import Divergence, linear_divergence
from liger_losses.integrations._linear_logits import LinearLogits, WithLinearLogits, divergence
from liger_losses.integrations._recipe import Recipe, reads_logits_refused
from liger_losses.integrations._scored_logits import IGNORE_INDEX, with_globals
from liger_losses.integrations._scoring import FusedHeadReport

Method = Callable[..., Any]


@contextmanager
def _teacher_answering(trainer: Any, scored: Tensor) -> Iterator[None]:
    """The trainer's teacher answering with `LinearLogits` for a while: the trainer calls it as its attribute."""
    teacher = trainer.teacher_model
    trainer.teacher_model = WithLinearLogits(teacher, scored)
    try:
        yield
    finally:
        trainer.teacher_model = teacher


def _two_logits(trainer: Any, head: FusedHeadReport) -> dict[str, Method]:
    """For a trainer that calls both models on `inputs` in `compute_loss` and masks by their labels."""
    own, own_step = type(trainer).compute_loss, type(trainer).prediction_step
    signature = inspect.signature(own)
    for_the_loss_only: list[bool] = []  # evaluations under way that drop the logits

    @functools.wraps(own_step)
    def prediction_step(
        model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        for_the_loss_only.append(prediction_loss_only)
        try:
            return own_step(trainer, model, inputs, prediction_loss_only, ignore_keys)
        finally:
            for_the_loss_only.pop()

    @functools.wraps(own)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(trainer, *args, **kwargs)
        outputs = given.arguments.get("return_outputs", False)
        if outputs and not (for_the_loss_only and for_the_loss_only[-1]):  # compute_metrics is handed logits
            return own(*given.args, **given.kwargs)
        given.arguments["return_outputs"] = False
        scored = given.arguments["inputs"]["labels"] != IGNORE_INDEX
        given.arguments["model"] = WithLinearLogits(given.arguments["model"], scored)
        with _teacher_answering(trainer, scored):
            loss = own(*given.args, **given.kwargs)
        return (loss, {}) if outputs else loss

    return {
        "compute_loss": compute_loss,
        "prediction_step": prediction_step,
        "generalized_jsd_loss": _jsd_loss_of(trainer),
    }


def _jsd_loss_of(trainer: Any) -> Method:
    """`generalized_jsd_loss` of two logits.

    TRL's own code masks and reduces. It runs the branch of the forward KL, which takes one divergence of two
    log-softmaxes, and that divergence is the one for the `beta` asked for. With the top k only, it runs as it is.
    """
    own = type(trainer).generalized_jsd_loss
    signature = inspect.signature(own)

    @functools.wraps(own)
    def generalized_jsd_loss(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        student = asked["student_logits"]
        if isinstance(student, LinearLogits) and not 0 < asked.get("top_k", 0) < student.size(-1):
            if asked["reduction"] not in ("batchmean", "sum"):
                raise ValueError(
                    f"reduction: got {asked['reduction']!r}, expected 'batchmean' or 'sum' on a fused head"
                )
            asked["student_logits"] = dataclasses.replace(student, beta=float(asked["beta"]))
            asked["beta"] = 0
        return own(*given.args, **given.kwargs)

    return generalized_jsd_loss


def _forward_logits_of(trainer: Any) -> Method:
    own = type(trainer)._forward_logits

    @functools.wraps(own)
    def forward_logits(model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int) -> Any:
        return own(trainer, WithLinearLogits(model, attention_mask), input_ids, attention_mask, logits_to_keep)

    return forward_logits


def _self_distillation_loss_of(trainer: Any) -> Method:
    """`_compute_self_distillation_loss`, on the positions of its loss mask, with the engine's divergence."""
    own = type(trainer)._compute_self_distillation_loss
    name = "compute_full_logit_self_distillation_loss"

    def full(student: LinearLogits, teacher: LinearLogits, *, distillation_alpha: float) -> Tensor:
        return divergence(student, teacher, distillation_alpha)

    ours = with_globals(own, {name: full})

    @functools.wraps(own)
    def compute_self_distillation_loss(model: Any, inputs: Any, distillation_logits: Any) -> Tensor:
        mask = distillation_logits.loss_mask
        logits = dataclasses.replace(
            distillation_logits,
            student_logits=distillation_logits.student_logits.at(mask),
            teacher_logits=distillation_logits.teacher_logits.at(mask),
        )
        return ours(trainer, model, inputs, logits)

    return compute_self_distillation_loss


def _self_distillation(trainer: Any, head: FusedHeadReport) -> dict[str, Method]:
    return {
        "_forward_logits": _forward_logits_of(trainer),
        "_compute_self_distillation_loss": _self_distillation_loss_of(trainer),
    }


class _ChunkedDivergence:
    """In the place of TRL's autograd function of that name, which calls it by `apply`."""

    def __init__(self, head: FusedHeadReport) -> None:
        self._head = head

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor, teacher_weight: Tensor,
        teacher_bias: Tensor | None, beta: float, temperature: float = 1.0, logit_scale: float = 1.0,
        softcap: float | None = None, teacher_logit_scale: float = 1.0, teacher_softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        values = linear_divergence(
            hidden, weight, torch.zeros(len(hidden), dtype=torch.long, device="cpu"), bias,
            teacher_hidden=teacher_hidden, teacher_weight=teacher_weight, teacher_bias=teacher_bias,
            divergence=Divergence(kind="jsd", beta=float(beta), temperature=float(temperature)),
            statistics=("distillation", "entropy"), softcap=softcap, logit_scale=logit_scale,
            teacher_softcap=teacher_softcap, teacher_logit_scale=teacher_logit_scale,
            **self._head.engine,
        )  # fmt: skip
        return values["distillation"], values["entropy"]


_LOSS, _FUNCTION = "_chunked_divergence_loss", "ChunkedDivergenceFunction"


def _chunked_divergence(trainer: Any, head: FusedHeadReport) -> dict[str, Method]:
    own = type(trainer)._compute_loss
    # Only the scored positions, as TRL has it where its kernel runs in Triton.
    names = {_FUNCTION: _ChunkedDivergence(head), "_use_triton": lambda device: True}
    loss = with_globals(own.__globals__[_LOSS], names)
    return {"_compute_loss": functools.partial(with_globals(own, {_LOSS: loss}), trainer)}


def _distillation_refused(trainer: Any) -> str | None:
    own = getattr(type(trainer), "_compute_loss", None)
    loss = None if own is None else own.__globals__.get(_LOSS)
    if not isinstance(loss, types.FunctionType) or not {_FUNCTION, "_use_triton"} <= set(loss.__globals__):
        return f"this release of TRL has no {_LOSS} that calls {_FUNCTION}; expected one like 1.16"
    return None


def _server_refused(trainer: Any) -> str | None:
    if trainer.use_teacher_server:
        return (
            "use_teacher_server=True: a server sends a few log-probabilities of the teacher and no hidden states; "
            "expected a local teacher"
        )
    return _logits_refused(trainer)


def _gold_refused(trainer: Any) -> str | None:
    if trainer.use_uld_loss:
        return (
            "use_uld_loss=True: distributions over two vocabularies are compared in sorted order, which takes whole "
            "rows of both; expected one vocabulary and use_uld_loss=False"
        )
    return _logits_refused(trainer)


def _logits_refused(trainer: Any) -> str | None:
    if trainer.is_fsdp_enabled:
        return "under FSDP the head's weight is gone once the forward is over, and this trainer's loss comes after it"
    return reads_logits_refused(trainer)


def _whole(trainer: Any, trained: int) -> tuple[int, int, int]:
    """Student and teacher forward, dX, dW. Recomputing projects both once more."""
    return 3 + trained, 3 + trained, 5 + trained if trained else 3


def _chunked(trainer: Any, trained: int) -> tuple[int, int, int]:
    """TRL projects both in backward again, and for a mixture once more in forward."""
    return 5 + trained + 2 * (0 < trainer.beta < 1), *_whole(trainer, trained)[1:]


def _some(ids: int, trained: int) -> tuple[int, int, int]:
    """Log-probabilities of a few tokens: `ids` products to find them; the rest of the student's, and the teacher's."""
    return 3 + trained, 3 + trained + ids, 4 + trained + ids if trained else 3 + ids


def _self_distillation_products(trainer: Any, trained: int) -> tuple[int, int, int]:
    mode, weight = trainer.args.distillation_mode, getattr(trainer.args, "distillation_weight", 1.0)
    before, after, past = {
        "full_logits": _whole(trainer, trained),
        "sampled_token": _some(0, trained),
        "topk_logits": _some(1, trained),
    }[mode]
    if weight == 0.0:
        return 2 + trained, 2 + trained, 2 + 2 * trained
    if weight < 1.0:
        after, past = after + 2 + trained, past + 2 + 2 * trained
    return before, after, past


def _iw_opd_products(trainer: Any, trained: int) -> tuple[int, int, int]:
    slots, beta = trainer.loss_top_k, trainer.beta
    vocabulary = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config().vocab_size
    if trainer.distillation_objective == "iw_opd":
        return _some(0, trained)
    if not 0 < slots < vocabulary:
        return _whole(trainer, trained)
    # To find the likeliest of either model, whose log-probabilities TRL then has too, asked for or not.
    if slots == 1 and beta > 0:
        return _some(2 + (trainer.reverse_kl_top_1_mode == "argmax"), trained)
    if not 0 < beta < 1:
        return _some(1, trained)
    before, kept, _ = _some(5, trained)  # of the student's likeliest what dX needs, too, unless it is recomputed
    return before, kept, kept


_TWO_LOGITS: dict[str, Any] = {
    "outputs": lambda trainer: ("log_probs",),
    "teacher": "teacher_model",
    "linear": True,
    "not_replaced": lambda trainer: (
        ("compute_metrics: TRL builds full logits for it in evaluation",) * bool(trainer.compute_metrics)
    ),
}
_SELF = Recipe(
    **_TWO_LOGITS,
    overrides=_self_distillation,
    products=_self_distillation_products,
    refused=_server_refused,
)

DISTILLATION: dict[str, Recipe] = {
    "DistillationTrainer": Recipe(
        lambda trainer: ("log_probs", "entropy"),
        teacher="teacher_model",
        products=_chunked,
        overrides=_chunked_divergence,
        refused=_distillation_refused,
        not_replaced=lambda trainer: (),
    ),
    "GKDTrainer": Recipe(**_TWO_LOGITS, overrides=_two_logits, products=_whole, refused=_logits_refused),
    "GOLDTrainer": Recipe(**_TWO_LOGITS, overrides=_two_logits, products=_whole, refused=_gold_refused),
    "IWOPDTrainer": Recipe(**_TWO_LOGITS, overrides=_two_logits, products=_iw_opd_products, refused=_server_refused),
    "SDFTTrainer": _SELF,
    "SDPOTrainer": _SELF,
}
