"""TRL trainers that are already built, made fused in one call.

TRL's trainers ask their models for `fused_lm_head=True`. `fuse_trainer` lets the models answer it with this library's
engine: nothing of the trainer is overridden, so every loss type and option computes what it did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from liger_losses.integrations.transformers import FusedHead, fuse_head, unfuse_head

_OLDEST, _BELOW = "1.15", "2"
_STATE = "_liger_fusion"


@dataclass(frozen=True)
class _Recipe:
    """What a trainer reads from the answers of its policy, and through which of it gradient flows."""

    outputs: Callable[[Any], tuple[str, ...]]
    differentiable: tuple[str, ...]
    reference_outputs: tuple[str, ...] = ("log_probs",)


def _dpo_outputs(trainer: Any) -> tuple[str, ...]:
    weighting = ("log_sum_sq_probs",) if trainer.use_weighting else ()
    return ("log_probs", "entropy", "mean_logits", "is_top1", *weighting)


# DPO logs the entropy and never differentiates it.
_RECIPES = {"DPOTrainer": _Recipe(_dpo_outputs, differentiable=("log_probs",))}


@dataclass(frozen=True)
class FuseReport:
    """What `fuse_trainer` did. `print(report)` is meant for people.

    Products count the large matrix products of the head per optimisation step over the scored tokens, in units of
    `2 * tokens * hidden * vocabulary` operations.

    Attributes:
        trainer: Class name of the trainer.
        trl: Version of TRL.
        policy: The policy's head.
        reference: The reference model's head; None where there is no separate reference model.
        reference_pass: Whether each step scores a reference (False with precomputed reference log-probabilities).
        products_before: Products per step of TRL's own fused head.
        products_after: Products per step now.
        products_past_budget: Products per step when the planner has to recompute to stay in the memory budget.
        not_replaced: Where full logits are still built, and why.
    """

    trainer: str
    trl: str
    policy: FusedHead
    reference: FusedHead | None
    reference_pass: bool
    products_before: int
    products_after: int
    products_past_budget: int
    not_replaced: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.reference is not None:
            reference = str(self.reference)
        else:
            reference = "the policy with its adapter off" if self.reference_pass else "precomputed log-probabilities"
        after = f"{self.products_after} now"
        if self.products_past_budget != self.products_after:
            after += f" ({self.products_past_budget} where the memory budget asks for recomputing)"
        lines = [
            f"{self.trainer} (trl {self.trl}) runs on fused heads",
            f"  policy     {self.policy}",
            f"  reference  {reference}",
            f"  head products per step: {self.products_before} before, {after}",
            *(f"  not replaced: {reason}" for reason in self.not_replaced),
        ]
        return "\n".join(lines)


def fuse_trainer(
    trainer: Any,  # trl.DPOTrainer
    *,
    memory_budget: int | None = None,
    logits_dtype: str = "float32",
    strategy: str = "auto",
) -> FuseReport:
    """Let the models of a built TRL trainer score labels with `linear_logprobs`; call it before `trainer.train()`.

    Policy and reference model are covered, through accelerate's wrapper and PEFT. Losses, metrics, evaluation,
    generation and saving are the trainer's own. A second call with the same options returns the first report; with
    other options it fuses anew.

    Args:
        trainer: A `trl.DPOTrainer` (or subclass).
        memory_budget, logits_dtype, strategy: As in `liger_losses.linear_logprobs`.

    Raises:
        TypeError: The trainer is of no supported class.
        ImportError: TRL is older than 1.15, or 2 or newer.
        ValueError: A head cannot be fused (adapter on it, quantised, logits that are not those of a plain head).
        RuntimeError: Training has started.

    Example:
        >>> trainer = DPOTrainer(model, args=args, train_dataset=pairs, processing_class=tokenizer)
        >>> print(fuse_trainer(trainer))
        >>> trainer.train()
    """
    recipe = _recipe_of(trainer)
    settings: dict[str, Any] = {"memory_budget": memory_budget, "logits_dtype": logits_dtype, "strategy": strategy}
    state = vars(trainer).get(_STATE)
    if state is not None and state[1] == settings:
        report: FuseReport = state[0]
        return report
    if trainer.model_wrapped is not trainer.model or trainer.state.global_step > 0:
        raise RuntimeError(
            f"the {type(trainer).__name__} has started training (global_step={trainer.state.global_step}); "
            "call fuse_trainer(trainer) after building it and before trainer.train()."
        )
    if state is not None:
        unfuse_trainer(trainer)
    accelerator = trainer.accelerator
    models = _models_of(trainer)
    fused: dict[str, FusedHead] = {}
    try:
        for role, model in models.items():
            outputs = recipe.outputs(trainer) if role == "policy" else recipe.reference_outputs
            differentiable = recipe.differentiable if role == "policy" else ()
            fused[role] = fuse_head(
                model, outputs=outputs, differentiable=differentiable, accelerator=accelerator, **settings
            )
    except Exception:
        for role in fused:  # all or nothing
            unfuse_head(models[role], accelerator=accelerator)
        raise
    report = _report(trainer, fused, strategy)
    vars(trainer)[_STATE] = (report, settings)
    return report


def unfuse_trainer(trainer: Any) -> None:
    """Put back the forwards that `fuse_trainer` found. It may be called after training too.

    Raises:
        ValueError: The trainer is not fused.
    """
    if _STATE not in vars(trainer):
        raise ValueError(f"the {type(trainer).__name__} is not fused; fuse_trainer(trainer) was not called on it.")
    for model in _models_of(trainer).values():
        unfuse_head(model, accelerator=trainer.accelerator)
    del vars(trainer)[_STATE]


def _recipe_of(trainer: Any) -> _Recipe:
    import trl

    installed = version("trl")
    if not Version(_OLDEST) <= Version(installed) < Version(_BELOW):
        raise ImportError(
            f"trl {installed} is installed; fuse_trainer knows the trainers of trl >={_OLDEST},<{_BELOW}, whose models "
            "answer fused_lm_head=True."
        )
    for name, recipe in _RECIPES.items():
        if isinstance(trainer, getattr(trl, name)):
            return recipe
    raise TypeError(f"trainer is a {type(trainer).__name__}; supported are {', '.join(f'trl.{n}' for n in _RECIPES)}.")


def _models_of(trainer: Any) -> dict[str, Any]:
    models = {"policy": trainer.accelerator.unwrap_model(trainer.model)}
    if trainer.ref_model is not None:
        models["reference"] = trainer.accelerator.unwrap_model(trainer.ref_model)
    return models


def _report(trainer: Any, fused: dict[str, FusedHead], strategy: str) -> FuseReport:
    policy = fused["policy"]
    reference_pass = not trainer.precompute_ref_logps
    reference = 1 if reference_pass else 0
    # Forward and dX, and dW unless frozen; recomputing adds the forward once more.
    recompute = 3 + policy.trainable
    fewest = recompute - (strategy != "recompute") + reference
    return FuseReport(
        trainer=type(trainer).__name__,
        trl=version("trl"),
        policy=policy,
        reference=fused.get("reference"),
        reference_pass=reference_pass,
        products_before=recompute + reference,
        products_after=fewest,
        # Only the planner's choice for a trained head depends on the budget: a frozen one keeps nothing of its size.
        products_past_budget=recompute + reference if policy.trainable and strategy == "auto" else fewest,
        not_replaced=("compute_metrics: TRL builds full logits for it in evaluation",) * bool(trainer.compute_metrics),
    )
