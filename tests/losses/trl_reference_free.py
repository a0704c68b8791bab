"""Runs the loss methods of TRL's ORPO, CPO and TPO trainers, unchanged, on given logits.

Only what a method reads from its trainer is supplied. TRL shifts labels itself: a first column is added that is never
predicted, and a last position whose logits predict nothing.
"""

from __future__ import annotations

from collections import defaultdict
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

cpo_trainer = pytest.importorskip("trl.experimental.cpo.cpo_trainer", exc_type=ImportError)
orpo_trainer = pytest.importorskip("trl.experimental.orpo.orpo_trainer", exc_type=ImportError)
tpo_trainer = pytest.importorskip("trl.experimental.tpo.tpo_trainer", exc_type=ImportError)

ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"), gather=lambda value: value, gather_for_metrics=lambda value: value
)


def _model(logits: Tensor):
    outputs = SimpleNamespace(logits=pad(logits, (0, 0, 0, 1)))
    return lambda *args, **kwargs: outputs


def _concatenated(
    trainer_class: type, logits: Tensor, labels: Tensor, ids: Tensor, attention: Tensor, **options: object
) -> tuple[Tensor, dict[str, float]]:
    batch = {
        "concatenated_input_ids": pad(ids, (1, 0)),
        "concatenated_attention_mask": pad(attention.long(), (1, 0)),
        "concatenated_labels": pad(labels, (1, 0), value=-100),
    }
    trainer = SimpleNamespace(
        accelerator=ACCELERATOR, is_encoder_decoder=False, aux_loss_enabled=False, padding_value=0, pad_token_id=0,
        concatenated_inputs=lambda *args, **kwargs: batch, get_batch_logps=trainer_class.get_batch_logps, **options,
    )  # fmt: skip
    for method in ("concatenated_forward", "odds_ratio_loss", "cpo_loss"):
        if hasattr(trainer_class, method):
            setattr(trainer, method, MethodType(getattr(trainer_class, method), trainer))
    chosen = {"chosen_labels": labels[: labels.shape[0] // 2]}
    return trainer_class.get_batch_loss_metrics(trainer, _model(logits), chosen)


def trl_orpo(logits: Tensor, labels: Tensor, ids: Tensor, attention: Tensor, *, beta: float = 0.1):
    """`(loss, what TRL logs)`; NLL is of all `ids` of the chosen rows where `attention`."""
    return _concatenated(orpo_trainer.ORPOTrainer, logits, labels, ids, attention, beta=beta)


def trl_cpo(
    logits: Tensor,
    labels: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    gamma: float = 0.5,
    reward_alpha: float = 0.0,
    nll_weight: float = 0.0,
):
    ids = labels.clamp_min(0)
    return _concatenated(
        cpo_trainer.CPOTrainer, logits, labels, ids, torch.ones_like(ids), beta=beta, loss_type=loss_type,
        label_smoothing=label_smoothing, simpo_gamma=gamma, alpha=reward_alpha, cpo_alpha=nll_weight,
    )  # fmt: skip


def trl_tpo(
    logits: Tensor,
    labels: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    gamma: float = 0.5,
    nll_weight: float = 1.0,
):
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=ACCELERATOR, beta=beta, loss_type=loss_type,
        label_smoothing=label_smoothing, tpo_l_gamma=gamma, tpo_alpha=nll_weight, _total_train_tokens=0, _tp_size=1,
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    mask = pad((labels != -100).long(), (1, 0))
    inputs = {
        "input_ids": pad(labels.clamp_min(0), (1, 0)),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
    }
    loss = tpo_trainer.TPOTrainer._compute_loss(trainer, _model(logits), inputs, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}
