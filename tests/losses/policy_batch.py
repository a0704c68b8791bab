"""A small batch of rollouts, its statistics read off whole logits, and TRL's own policy losses run on it."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.losses import GRPOLoss

ROWS, TOKENS, VOCAB = 5, 7, 11


@dataclass
class Rollouts:
    logits: Tensor  # [R, T, V]
    target: Tensor  # [R, T]
    mask: Tensor  # [R, T] bool
    inputs: dict[str, Tensor] = field(default_factory=dict)  # every input a loss may ask for

    def statistics(self) -> dict[str, Tensor]:
        log_p = self.logits.log_softmax(-1)
        return {
            "logprob": torch.where(self.mask, log_p.gather(-1, self.target.unsqueeze(-1)).squeeze(-1), 0),
            "entropy": torch.where(self.mask, -(log_p.exp() * log_p).sum(-1), 0),
        }

    def leaf(self) -> Rollouts:
        return replace(self, logits=self.logits.detach().clone().requires_grad_())

    def wanted(self, loss: GRPOLoss, *more: str) -> dict[str, Tensor]:
        """Those of the inputs that the loss must have, and `more`."""
        names = ["advantages", *more]
        names += [] if loss.on_policy else ["old_logprobs"]
        names += ["ref_logprobs"] if loss.beta else []
        names += ["sampling_logprobs"] if loss.sampler_mode or loss.off_policy_mask_threshold else []
        names += ["values", "returns"] if loss.vf_coef else []
        names += ["old_values"] if loss.value_clip else []
        return {name: self.inputs[name] for name in names}


def make_rollouts(seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 0.3) -> Rollouts:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    target = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    lengths = torch.tensor([7, 4, 6, 2, 5]).unsqueeze(1)
    position = torch.arange(TOKENS)
    mask = position < lengths
    mask[2, 1] = False  # a tool's output between the policy's own tokens
    batch = Rollouts(1.5 * normal(ROWS, TOKENS, VOCAB), target, mask)
    logprob = batch.statistics()["logprob"]
    old = logprob + spread * normal(ROWS, TOKENS)
    batch.inputs = {
        "advantages": normal(ROWS),
        "old_logprobs": old,
        "ref_logprobs": logprob + spread * normal(ROWS, TOKENS),
        "sampling_logprobs": old + 0.4 * normal(ROWS, TOKENS),
        "sampling_ratio": (0.3 * normal(ROWS, TOKENS)).exp(),
        "values": normal(ROWS, TOKENS),
        "returns": normal(ROWS, TOKENS),
        "old_values": normal(ROWS, TOKENS),
        "num_items_in_batch": torch.tensor(40),
    }
    return batch


def evaluate(
    loss: GRPOLoss, batch: Rollouts, inputs: dict[str, Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss object on the whole batch at once: the unfused loss."""
    inputs = loss.prepare(batch.mask, batch.wanted(loss) if inputs is None else inputs)
    statistics = {name: value for name, value in batch.statistics().items() if name in loss.statistics}
    return loss(statistics, batch.mask, inputs, loss.totals(batch.mask, inputs))


# TRL ----------------------------------------------------------------------------------------------------------------


def trl_loss(loss: GRPOLoss, batch: Rollouts, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
    """`(loss, what TRL logs)` of TRL's own method; only what it reads from the trainer is supplied."""
    module = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError)
    trainer_class = module.GRPOTrainer
    if loss.loss_type == "gmpo":
        from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer as trainer_class
    if loss.loss_type == "rloo":
        from trl.trainer.rloo_trainer import RLOOTrainer as trainer_class
    # GSPO is its grpo with sequence-level ratios.
    loss_type, level = ("grpo", "sequence") if loss.loss_type == "gspo" else (loss.loss_type, loss.level)
    statistics = batch.statistics()
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=loss.num_processes or 1,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, dim, pad_index: x,
            sync_gradients=True,
        ),
        args=SimpleNamespace(
            delta=loss.delta,
            use_bias_correction_kl=loss.use_bias_correction_kl,
            steps_per_generation=1,
            **{
                name: getattr(loss, name)
                for name in (
                    "sapo_temperature_pos",
                    "sapo_temperature_neg",
                    "vespo_k_pos",
                    "vespo_lambda_pos",
                    "vespo_k_neg",
                    "vespo_lambda_neg",
                )
            },
        ),
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=loss.beta,
        epsilon_low=loss.epsilon_low,
        epsilon_high=loss.epsilon_high,
        max_completion_length=loss.max_completion_length,
        top_entropy_quantile=loss.top_entropy_quantile,
        off_policy_mask_threshold=loss.off_policy_mask_threshold,
        use_vllm=loss.sampler_mode is not None,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=loss.sampler_mode,
        vllm_importance_sampling_clip_min=loss.sampler_clip_min,
        vllm_importance_sampling_clip_max=loss.sampler_clip_max,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=loss.entropy_coef != 0,
        use_adaptive_entropy=False,
        entropy_coef=loss.entropy_coef,
        aux_loss_enabled=False,
        get_off_policy_mask=module.GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=module.GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *a, **k: (statistics["logprob"], statistics["entropy"], None),
        _metrics={"train": defaultdict(list)},
    )
    trainer.get_high_entropy_mask = module.GRPOTrainer.get_high_entropy_mask.__get__(trainer)
    mask = batch.mask.long()
    old = inputs.get("old_logprobs")
    sent = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": batch.target,
        "completion_mask": mask,
        "advantages": inputs["advantages"],
        "old_per_token_logps": old,
        "ref_per_token_logps": inputs.get("ref_logprobs"),
        "num_items_in_batch": inputs.get("num_items_in_batch", mask.sum()),
    }
    if "sampling_logprobs" in inputs:
        sent["sampling_per_token_logps"] = inputs["sampling_logprobs"]
    if loss.sampler_mode is not None:
        sampled = statistics["logprob"].detach() if old is None else old
        sent["importance_sampling_ratio"] = trl_sampler_ratio(trainer, sampled, inputs["sampling_logprobs"], mask)
    if loss.loss_type == "rloo":
        sent["old_logps"] = (old * mask).sum(1)
    value = trainer_class._compute_loss(trainer, None, sent)
    return value, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def trl_sampler_ratio(trainer: Any, old: Tensor, sampling: Tensor, mask: Tensor) -> Tensor:
    """TRL forms the ratio inside the method that also generates: the statement is taken out and run as it stands."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    (statement,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and any(
            isinstance(child, ast.Assign) and getattr(child.targets[0], "id", "") == "per_token_logps_diff"
            for child in node.body
        )
    ]
    names = {
        "self": trainer, "torch": torch, "math": math, "completion_mask": mask, "tool_mask": None,
        "old_per_token_logps": old, "sampling_per_token_logps": sampling,
    }  # fmt: skip
    exec(compile(ast.Module([statement], []), "grpo_trainer.py", "exec"), names)
    return names["vllm_importance_sampling_ratio"]
