"""Runs TRL's own `DPOTrainer._compute_loss` on given log-probabilities.

The method is TRL's, unchanged; only what it reads from the trainer and the two models is supplied. Its two models
return per-token statistics as TRL's fused head does. The first column of the completion mask is the prompt's, so that
TRL's unshifted and shifted token counts agree, as they do for any real prompt.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from .batch import Batch

dpo_trainer = pytest.importorskip("trl.trainer.dpo_trainer", exc_type=ImportError)


class _Model(torch.nn.Module):
    is_gradient_checkpointing = False

    def __init__(self, outputs: SimpleNamespace) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, **kwargs: object) -> SimpleNamespace:
        assert kwargs["fused_lm_head"] is True
        return self.outputs


def trl_dpo_loss(
    batch: Batch,
    loss_type: str | list[str],
    *,
    loss_weights: list[float] | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence: str = "reverse_kl",
    f_alpha: float = 0.5,
    discopop_tau: float = 0.05,
    ld_alpha: float | None = None,
    use_weighting: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """`(loss, what TRL logs)`."""
    statistics = batch.statistics()
    policy = _Model(
        SimpleNamespace(
            log_probs=statistics["logprob"],
            entropy=torch.zeros_like(statistics["logprob"]),
            mean_logits=statistics["mean_logit"],
            log_sum_sq_probs=statistics["log_sum_sq_prob"],
            is_top1=torch.zeros_like(batch.mask),
            aux_loss=None,
        )
    )
    types = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda m: m
    )
    trainer = SimpleNamespace(
        model=policy,
        ref_model=_Model(SimpleNamespace(log_probs=batch.ref_logprobs)),
        accelerator=accelerator,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=discopop_tau),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        ld_alpha=ld_alpha,
        f_divergence_type=f_divergence,
        f_alpha_divergence_coef=f_alpha,
        loss_types=types,
        loss_weights=loss_weights or [1.0] * len(types),
        beta=beta,
        label_smoothing=label_smoothing,
        use_weighting=use_weighting,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    mask = torch.nn.functional.pad(batch.mask.long(), (1, 0))
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    loss = dpo_trainer.DPOTrainer._compute_loss(trainer, policy, inputs, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}
