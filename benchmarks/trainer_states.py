"""The states of a built trainer of TRL's that benchmarks compare: its head as shipped, whole logits, fused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


class _WholeLogits:
    """Answers `fused_lm_head=True` from the logits of every position, as TRL did before its fused head."""

    def __init__(self, model: Any) -> None:
        self._model, self._own = model, vars(model)["forward"]
        model.forward = self

    def __call__(self, *args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **inputs: Any) -> Any:
        from types import SimpleNamespace

        if not fused_lm_head or labels is None:
            return self._own(*args, labels=labels, **inputs)
        logits = self._own(*args, **inputs).logits[:, :-1].float()
        target = labels[:, 1:]
        scored = target != -100
        log_softmax = logits.log_softmax(-1)
        log_probs = log_softmax.gather(-1, target.clamp(min=0)[..., None])[..., 0].masked_fill(~scored, 0)
        with torch.no_grad():
            entropy = torch.stack([-(row.exp() * row).sum(-1) for row in log_softmax]).masked_fill(~scored, 0)
            mean, top = logits.mean(-1).masked_fill(~scored, 0), (logits.argmax(-1) == target) & scored
        return SimpleNamespace(log_probs=log_probs, entropy=entropy, mean_logits=mean, is_top1=top, label_mask=scored,
                               log_sum_sq_probs=None, aux_loss=None, loss=None)  # fmt: skip

    def undo(self) -> None:
        self._model.forward = self._own


@contextmanager
def _as_shipped(trainer: Any) -> Any:
    yield


@contextmanager
def _whole_logits(trainer: Any) -> Any:
    replaced = [_WholeLogits(model) for model in (trainer.model, trainer.ref_model)]
    try:
        yield
    finally:
        for one in replaced:
            one.undo()


@contextmanager
def _fused(trainer: Any) -> Any:
    from liger_losses.integrations.trl import fuse_trainer, unfuse_trainer

    print(fuse_trainer(trainer))
    try:
        yield
    finally:
        unfuse_trainer(trainer)


@contextmanager
def _fused_with_layers(trainer: Any) -> Any:
    from liger_losses.integrations.layers import fuse_layers, unfuse_layers

    models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
    with _fused(trainer):
        try:
            for model in models:
                print(fuse_layers(model))
            yield
        finally:
            for model in models:
                unfuse_layers(model)


Implementation = tuple[str, Callable[[Any], AbstractContextManager[Any]]]
SHIPPED, FUSED, WHOLE = ("TRL", _as_shipped), ("fuse_trainer", _fused), ("TRL's loss on whole logits", _whole_logits)
LAYERED = ("fuse_trainer, fuse_layers", _fused_with_layers)
