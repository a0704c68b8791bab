"""What each of TRL's trainers asks of its models: the table behind `fuse_trainer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Trainer

from liger_losses.integrations._distillation_recipes import DISTILLATION
from liger_losses.integrations._recipe import Labels, Recipe, reads_logits_refused
from liger_losses.integrations._scored_logits import IGNORE_INDEX


def _of(*names: str) -> Callable[[Any], tuple[str, ...]]:
    return lambda trainer: names


def _dpo_outputs(trainer: Any) -> tuple[str, ...]:
    weighting = ("log_sum_sq_probs",) if trainer.use_weighting else ()
    return ("log_probs", "entropy", "mean_logits", "is_top1", *weighting)


def _sft_not_replaced(trainer: Any) -> tuple[str, ...]:
    return (
        *("compute_metrics: TRL builds full logits for it in evaluation",) * bool(trainer.compute_metrics),
        *("compute_loss_func: it is handed full logits",) * bool(trainer.compute_loss_func),
        *("label_smoothing_factor: TRL computes it from full logits",)
        * (trainer.label_smoother is not None and trainer.args.loss_type == "nll"),
    )


def _policy_gradient(trainer: Any) -> tuple[str, ...]:
    # The entropy is logged, and selects tokens; only a bonus on it differentiates it.
    return ("log_probs", "entropy") if getattr(trainer, "_entropy_bonus_enabled", False) else ("log_probs",)


def _policy_head(trainer: Any) -> dict[str, Any]:
    return {
        "temperature": trainer.temperature,
        "fp32": bool(getattr(trainer.args, "cast_lm_head_to_fp32", False)),
    }


def _pair_labels(trainer: Any, arguments: dict[str, Any], padding: int) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = trainer.concatenated_inputs(
        arguments["batch"], is_encoder_decoder=False, padding_value=padding, device=trainer.accelerator.device
    )
    return batch


def _cpo_labels(trainer: Any, arguments: dict[str, Any]) -> Labels:
    batch = _pair_labels(trainer, arguments, trainer.pad_token_id)
    return lambda ids: batch["concatenated_labels"]


def _orpo_labels(trainer: Any, arguments: dict[str, Any]) -> Labels:
    batch = _pair_labels(trainer, arguments, trainer.padding_value)
    chosen = len(arguments["batch"]["chosen_labels"])

    def labels(ids: Tensor) -> Tensor:
        # The likelihood of a chosen row is over prompt and completion, the odds ratio over completions.
        scored = batch["concatenated_labels"].clone()
        scored[:chosen] = ids[:chosen].masked_fill(batch["concatenated_attention_mask"][:chosen] != 1, IGNORE_INDEX)
        return scored

    return labels


def _tpo_labels(trainer: Any, arguments: dict[str, Any]) -> Labels | None:
    if arguments.get("return_outputs"):  # evaluation with compute_metrics, which is handed logits
        return None
    return lambda ids: ids.masked_fill(arguments["inputs"]["completion_mask"] == 0, IGNORE_INDEX)


def _online_dpo_labels(trainer: Any, arguments: dict[str, Any]) -> Labels:
    width = arguments["completion_ids"].shape[1]

    def labels(ids: Tensor) -> Tensor:
        if ids.shape[1] == width:
            raise ValueError(
                "prompt_ids has no token left (max_length is at most the completion's length): there is no position "
                "that predicts the completion's first token; raise max_length."
            )
        # Padding too: the logged KL, entropy and reward sum over all of the completion's positions.
        scored = ids.clone()
        scored[:, :-width] = IGNORE_INDEX
        return scored

    return labels


def _a2po_labels(trainer: Any, arguments: dict[str, Any]) -> Labels:
    keep = arguments["logits_to_keep"]

    def labels(ids: Tensor) -> Tensor:
        scored = ids.masked_fill(arguments["attention_mask"] == 0, IGNORE_INDEX)
        scored[:, :-keep] = IGNORE_INDEX
        return scored

    return labels


_PAIRS: dict[str, Any] = {
    "outputs": _of("log_probs", "mean_logits"),
    "head": lambda trainer: {"mean_logits_everywhere": True},
    "readers": ("get_batch_logps",),
    "refused": reads_logits_refused,
    "not_replaced": lambda trainer: (),
}
_POLICY = Recipe(_of("log_probs", "entropy"), _policy_gradient, head=_policy_head, not_replaced=lambda trainer: ())

# Class name of a TRL trainer -> recipe. A class of the user's goes by the first of TRL's that it derives from.
RECIPES: dict[str, Recipe] = {
    "SFTTrainer": Recipe(_of("log_probs", "entropy", "is_top1"), not_replaced=_sft_not_replaced),
    "DPOTrainer": Recipe(_dpo_outputs, scoring_passes=lambda trainer: int(not trainer.precompute_ref_logps)),
    "KTOTrainer": Recipe(
        _of("log_probs", "entropy", "mean_logits"),
        scoring_passes=lambda trainer: (
            (1 + trainer.calculate_KL) * (not trainer.precompute_ref_logps) + trainer.calculate_KL
        ),
    ),
    "GRPOTrainer": _POLICY,
    "GMPOTrainer": _POLICY,
    "RLOOTrainer": _POLICY,
    "AsyncGRPOTrainer": _POLICY,
    "ORPOTrainer": Recipe(labels={"concatenated_forward": _orpo_labels}, **_PAIRS),
    "CPOTrainer": Recipe(labels={"concatenated_forward": _cpo_labels}, **_PAIRS),
    "TPOTrainer": Recipe(
        _of("log_probs", "entropy", "mean_logits", "is_top1"),
        labels={"_compute_loss": _tpo_labels},
        refused=reads_logits_refused,
    ),
    "OnlineDPOTrainer": Recipe(
        _of("log_probs"),
        scoring_passes=lambda trainer: 1,
        labels={"_forward": _online_dpo_labels},
        refused=reads_logits_refused,
        not_replaced=lambda trainer: (),
    ),
    "A2POTrainer": Recipe(
        _of("log_probs"),
        labels={"_get_sequence_logps": _a2po_labels},
        refused=reads_logits_refused,
        not_replaced=lambda trainer: (),
    ),
    **DISTILLATION,
}

# Why a trainer of TRL's has no recipe, where that is not plain.
WITHOUT_RECIPE = {
    "AsyncDistillationTrainer": "it cannot be built without a GPU and vLLM servers, one of them for the teacher",
    "ServerDistillationTrainer": "its teacher is a server, which sends some log-probabilities and no hidden states",
}


def recipe_of(trainer: Any) -> Recipe:
    """The recipe of the first of TRL's classes that the trainer's class derives from.

    Raises:
        TypeError: There is none; the message lists the supported ones.
    """
    for kind in type(trainer).__mro__:
        if kind.__module__.partition(".")[0] == "trl":
            if kind.__name__ in RECIPES:
                return RECIPES[kind.__name__]
            if kind.__name__ in WITHOUT_RECIPE:
                raise TypeError(f"a {kind.__name__} is not supported: {WITHOUT_RECIPE[kind.__name__]}.")
            break
    else:
        if isinstance(trainer, Trainer):
            raise TypeError(
                f"trainer is a {type(trainer).__name__}, of transformers and none of trl's; what can be fused is its "
                "model: liger_losses.integrations.transformers.fuse_model(trainer.model)."
            )
    raise TypeError(
        f"trainer is a {type(trainer).__name__}; supported are, of trl and trl.experimental: {', '.join(RECIPES)}."
    )
