"""TRL trainers that are already built, made fused in one call.

Most of TRL's trainers ask their models for `fused_lm_head=True`. `fuse_trainer` lets the models answer it with this
library's engine. The others read `model(...).logits`: they are handed a stand-in that holds what the engine said of
each token. Either way the loss is computed by the trainer's own code, so every loss type and option does what it did.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from liger_losses._checks import check_flag
from liger_losses._extras import require
from liger_losses.integrations._recipe import Recipe
from liger_losses.integrations._recipes import recipe_of
from liger_losses.integrations._scored_logits import WithoutLogits, reading_scored_logits
from liger_losses.integrations.transformers import FusedHeadReport, fuse_head, unfuse_head

require("trl", "trl")  # whoever has no TRL is told so here, not with a trainer in hand
_OLDEST, _BELOW = "1.15", "2"
_STATE = "_liger_fusion"


@dataclass(frozen=True)
class FuseReport:
    """What `fuse_trainer` did. `print(report)` is meant for people.

    Products count the large matrix products of the head per optimisation step over the scored tokens, in units of
    `2 * tokens * hidden * vocabulary` operations. Trainers that sample score their samples without a gradient too, when
    they are made; that is not counted.

    Attributes:
        trainer: Class name of the trainer.
        trl: Version of TRL.
        full_logits_before: Whether TRL builds the logits of every position, scored or not, in this trainer.
        policy: The policy's head.
        reference: The reference model's head; None where there is no separate reference model.
        teacher: The teacher's head; None where there is no teacher, or it is the policy itself.
        reference_pass: Whether training steps score tokens without a gradient, by a reference or by the policy.
        products_before: Products per step of TRL's own head.
        products_after: Products per step now.
        products_past_budget: Products per step when the planner has to recompute to stay in the memory budget.
        not_replaced: Where full logits are still built, and why.
        self_taught: Whether the teacher is the policy itself, in another context or with another adapter.
    """

    trainer: str
    trl: str
    full_logits_before: bool
    policy: FusedHeadReport
    reference: FusedHeadReport | None
    reference_pass: bool
    products_before: int
    products_after: int
    products_past_budget: int
    not_replaced: tuple[str, ...] = ()
    teacher: FusedHeadReport | None = None
    self_taught: bool = False

    def __str__(self) -> str:
        after = f"{self.products_after} now"
        if self.products_past_budget != self.products_after:
            after += f" ({self.products_past_budget} where the memory budget asks for recomputing)"
        if self.full_logits_before and self.products_after > self.products_before:
            after += ", the price of not holding the logits"
        before = f"{self.products_before} before"
        if self.full_logits_before:
            before += ", with full logits of every position"
        lines = [
            f"{self.trainer} (trl {self.trl}) runs on fused heads",
            f"  policy     {_folded(self.policy)}",
            *([f"  reference  {self._reference()}"] if self._reference() else []),
            *([f"  teacher    {_folded(self.teacher)}"] if self.teacher else []),
            *(["  teacher    the policy itself"] if self.self_taught and not self.teacher else []),
            f"  head products per step: {before}, {after}",
            *(f"  not replaced: {reason}" for reason in self.not_replaced),
        ]
        return "\n".join(lines)

    def _reference(self) -> str | None:
        if self.reference is not None:
            return _folded(self.reference)
        if not self.reference_pass:
            return "precomputed log-probabilities" if self.trainer.startswith(("DPO", "KTO")) else None
        return "the policy with its adapter off"


def _folded(head: FusedHeadReport) -> str:
    """What it answers below what it is: one line is wider than most terminals."""
    return str(head).replace("; ", ";\n             ", 1)


def fuse_trainer(
    trainer: Any,  # a trainer of trl or trl.experimental
    *,
    memory_budget: int | None = None,
    logits_dtype: str = "float32",
    strategy: str = "auto",
    active_vocab: float | str | None = None,
    verify: bool = True,
) -> FuseReport:
    """Let the models of a built TRL trainer score labels with `linear_logprobs`; call it before `trainer.train()`.

    Policy, reference model and local teacher are covered, through accelerate's wrapper and PEFT. Losses, metrics,
    evaluation, generation and saving are the trainer's own. A second call with the same options returns the first
    report; with other options it fuses anew.

    Args:
        trainer: One of TRL's (see `docs/trl.md`), or of a class derived from one.
        memory_budget, logits_dtype, strategy, active_vocab: As in `liger_losses.linear_logprobs`.
        verify: Hold a few random tokens' log-probabilities against those of each model's own logits, and refuse if they
            differ.

    Raises:
        TypeError: The trainer is of no supported class (the message lists them), or `verify` is no bool.
        ImportError: TRL is older than 1.15, or 2 or newer.
        ValueError: A head cannot be fused (an adapter other than LoRA and DoRA on it, logits that are not those of a
            plain head, log-probabilities that are not the model's own), the trainer's model is an encoder-decoder, or
            `active_vocab` is given to a trainer that differentiates the entropy.
        RuntimeError: Training has started.

    Example:
        >>> trainer = DPOTrainer(model, args=args, train_dataset=pairs, processing_class=tokenizer)
        >>> print(fuse_trainer(trainer))
        >>> trainer.train()
    """
    recipe = _recipe_of(trainer)
    check_flag("verify", verify)
    settings: dict[str, Any] = {
        "memory_budget": memory_budget, "logits_dtype": logits_dtype, "strategy": strategy, "active_vocab": active_vocab
    }  # fmt: skip
    state = vars(trainer).get(_STATE)
    if state is not None and state[1] == settings:
        report: FuseReport = state[0]
        return report
    if trainer.model_wrapped is not trainer.model or trainer.state.global_step > 0:
        raise RuntimeError(
            f"the {type(trainer).__name__} has started training (global_step={trainer.state.global_step}); "
            "call fuse_trainer(trainer) after building it and before trainer.train()."
        )
    if reason := recipe.refused(trainer):
        raise ValueError(f"the {type(trainer).__name__} cannot be fused: {reason}.")
    if state is not None:
        unfuse_trainer(trainer)
    accelerator = trainer.accelerator
    models = _models_of(trainer, recipe)
    fused: dict[str, FusedHeadReport] = {}
    try:
        for role, model in models.items():
            outputs = recipe.outputs(trainer) if role == "policy" else recipe.reference_outputs
            differentiable = recipe.differentiable(trainer) if role == "policy" else ()
            fused[role] = fuse_head(
                model, outputs=outputs, differentiable=differentiable, accelerator=accelerator, verify=verify,
                **recipe.head(trainer), **settings,
            )  # fmt: skip
        _check_vocabularies(fused)
    except Exception:
        for role in fused:  # all or nothing
            unfuse_head(models[role], accelerator=accelerator)
        raise
    methods = _methods_without_logits(trainer, recipe, fused["policy"])
    vars(trainer).update(methods)
    report = _report(trainer, recipe, fused, strategy)
    vars(trainer)[_STATE] = (report, settings, tuple(methods))
    return report


def unfuse_trainer(trainer: Any) -> None:
    """Put back the forwards and methods that `fuse_trainer` found. It may be called after training too.

    Raises:
        TypeError: The trainer is of no supported class.
        ValueError: The trainer is not fused.
    """
    recipe = _recipe_of(trainer)
    if _STATE not in vars(trainer):
        raise ValueError(f"the {type(trainer).__name__} is not fused; fuse_trainer(trainer) was not called on it.")
    for model in _models_of(trainer, recipe).values():
        unfuse_head(model, accelerator=trainer.accelerator)
    for name in vars(trainer)[_STATE][2]:
        del vars(trainer)[name]
    del vars(trainer)[_STATE]


def _recipe_of(trainer: Any) -> Recipe:
    from packaging.version import Version  # which trl and transformers bring, and torch does not

    installed = version("trl")
    if not Version(_OLDEST) <= Version(installed) < Version(_BELOW):
        raise ImportError(
            f"trl {installed} is installed; fuse_trainer knows the trainers of trl >={_OLDEST},<{_BELOW}, whose models "
            "answer fused_lm_head=True."
        )
    return recipe_of(trainer)


def _models_of(trainer: Any, recipe: Recipe) -> dict[str, Any]:
    def unwrapped(model: Any) -> Any:
        # accelerate has compiled reference and teacher by now; the policy is compiled when training begins.
        return trainer.accelerator.unwrap_model(model, keep_torch_compile=False)

    models = {"policy": unwrapped(trainer.model)}
    if getattr(trainer, "ref_model", None) is not None:
        models["reference"] = unwrapped(trainer.ref_model)
    if recipe.teacher is not None:
        teacher = unwrapped(getattr(trainer, recipe.teacher))
        if teacher is not models["policy"]:
            models["teacher"] = teacher
    return models


def _check_vocabularies(fused: dict[str, FusedHeadReport]) -> None:
    policy, teacher = fused["policy"], fused.get("teacher")
    if teacher is not None and teacher.vocabulary != policy.vocabulary:
        raise ValueError(
            f"the teacher's head has {teacher.vocabulary} rows and the student's {policy.vocabulary}; expected the "
            "same vocabulary, padding included."
        )


def _methods_without_logits(trainer: Any, recipe: Recipe, head: FusedHeadReport) -> dict[str, Callable[..., Any]]:
    """The trainer's methods that read logits, as attributes of the instance, with models that do not build them."""
    kind = type(trainer)
    methods: dict[str, Callable[..., Any]] = recipe.overrides(trainer, head)
    methods |= {n: reading_scored_logits(getattr(kind, n)) for n in recipe.readers}
    for name, labels in recipe.labels.items():
        methods[name] = _method_without_logits(trainer, getattr(kind, name), labels, head)
    return methods


def _method_without_logits(
    trainer: Any, own: Any, labels_of: Callable[[Any, dict[str, Any]], Any], head: FusedHeadReport
) -> Callable[..., Any]:
    ours, signature = reading_scored_logits(own), inspect.signature(own)
    scored_means_only = head.options["softcap"] is not None or not head.mean_logits_everywhere

    @functools.wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(trainer, *args, **kwargs)
        labels = labels_of(trainer, given.arguments)
        if labels is None:
            return own(*given.args, **given.kwargs)
        given.arguments["model"] = WithoutLogits(given.arguments["model"], labels, head.vocabulary, scored_means_only)
        return ours(*given.args, **given.kwargs)

    return method


def _report(trainer: Any, recipe: Recipe, fused: dict[str, FusedHeadReport], strategy: str) -> FuseReport:
    policy = fused["policy"]
    scoring = recipe.scoring_passes(trainer)
    full_logits = bool(recipe.labels) or recipe.linear
    # Forward and dX, and dW unless frozen; recomputing adds the forward once more.
    recompute = 3 + policy.trainable
    may_keep = policy.differentiable == ("log_probs",) and strategy != "recompute"
    fewest = recompute - may_keep + scoring
    before, past_budget = recompute - full_logits + scoring, recompute + scoring
    if recipe.products is not None:
        before, fewest, past_budget = recipe.products(trainer, int(policy.trainable))
        fewest = past_budget if strategy == "recompute" else fewest
    return FuseReport(
        trainer=type(trainer).__name__,
        trl=version("trl"),
        full_logits_before=full_logits,
        policy=policy,
        reference=fused.get("reference"),
        reference_pass=scoring > 0,
        products_before=before,
        products_after=fewest,
        # Only the planner's choice for a trained head depends on the budget: a frozen one keeps nothing of its size.
        products_past_budget=past_budget if policy.trainable and strategy == "auto" else fewest,
        not_replaced=recipe.not_replaced(trainer),
        teacher=fused.get("teacher"),
        self_taught=recipe.teacher is not None and "teacher" not in fused,
    )
