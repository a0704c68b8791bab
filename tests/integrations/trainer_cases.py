"""How the tests build each TRL trainer, and with which options."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import trl
from trl.experimental import a2po, cpo, gmpo, online_dpo, orpo, tpo

from .conftest import TEXT
from .runs import near
from .tiny import tiny_model, trainer_settings

Rows = list[dict[str, Any]]


def _rows(count: int) -> Rows:
    """Prompt, chosen, rejected and a reference answer, of differing lengths."""
    words = [line.split() for line in TEXT]
    rows = []
    for i in range(count):
        line, other = words[i % len(words)], words[(3 * i + 1) % len(words)]
        chosen, rejected = line[4 : 8 + i % 4], other[3 : 6 + i % 5]
        rows.append(
            {
                "prompt": " ".join(line[: 3 + i % 2]),
                "chosen": " " + " ".join(chosen),
                "rejected": " " + " ".join(rejected),
                "reference": " " + " ".join([*chosen, *rejected[:2]]),
            }
        )
    return rows


def _text(rows: Rows) -> Rows:
    return [{"prompt": r["prompt"], "completion": r["chosen"]} for r in rows]


def _unpaired(rows: Rows) -> Rows:
    return [
        {"prompt": r["prompt"], "completion": r[("rejected", "chosen")[i % 3 > 0]], "label": i % 3 > 0}
        for i, r in enumerate(rows)
    ]


def _columns(*names: str) -> Callable[[Rows], Rows]:
    return lambda rows: [{name: row[name] for name in names} for row in rows]


def _reward(completions: list[str], **_: Any) -> list[float]:
    """Something that differs between samples and is the same for the same text."""
    return [sum(map(ord, text)) % 7 / 7.0 for text in completions]


def _saved(family: str, folder: Path) -> str:
    """Trainers that sample make their reference by loading what the policy's config names."""
    model = tiny_model(family)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    return str(folder)


SAMPLING = {"max_completion_length": 8, "num_generations": 2, "temperature": 0.8}
ONLINE = {"max_new_tokens": 8, "max_length": 40}

# Name -> trainer, config, dataset, options without which it is not itself.
TRAINERS: dict[str, tuple[Any, Any, Callable[[Rows], Rows], dict[str, Any]]] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, _text, {}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, _unpaired, {}),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, _columns("prompt"), SAMPLING),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig, _columns("prompt"), SAMPLING),
    "gmpo": (gmpo.GMPOTrainer, gmpo.GMPOConfig, _columns("prompt"), SAMPLING),
    "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig, _columns("prompt", "chosen", "rejected"), {"max_length": 64}),
    "cpo": (cpo.CPOTrainer, cpo.CPOConfig, _columns("prompt", "chosen", "rejected"), {"max_length": 64}),
    "tpo": (tpo.TPOTrainer, tpo.TPOConfig, _columns("prompt", "chosen", "rejected", "reference"), {}),
    "online_dpo": (online_dpo.OnlineDPOTrainer, online_dpo.OnlineDPOConfig, _columns("prompt"), ONLINE),
    "a2po": (
        a2po.A2POTrainer,
        a2po.A2POConfig,
        _columns("prompt"),
        {"max_completion_length": 8, "num_value_samples": 2, "max_prompt_length": 16},
    ),
}
SAMPLERS = ("grpo", "rloo", "gmpo", "online_dpo", "a2po")

# "trainer: what" -> (options, tolerance, metrics that are allowed to differ)
Case = tuple[dict[str, Any], float, tuple[str, ...]]


def case(tolerance: float = 1e-5, exceptions: tuple[str, ...] = (), **options: Any) -> Case:
    return options, tolerance, exceptions


FAST: dict[str, Case] = {
    "sft": case(),
    "sft: dft, accumulation": case(loss_type="dft", gradient_accumulation_steps=2),
    "kto": case(gradient_accumulation_steps=2),
    "grpo: entropy bonus, reference": case(entropy_coef=0.05, beta=0.04),
    "grpo: several iterations": case(num_iterations=2, steps_per_generation=2, gradient_accumulation_steps=2),
    "rloo": case(beta=0.05),
    "orpo": case(),
    "cpo: simpo": case(loss_type="simpo", cpo_alpha=0.0, beta=2.0),
    "cpo": case(gradient_accumulation_steps=2),
    "tpo": case(),
    "online_dpo": case(),
}
CHECKPOINTING = {"gradient_checkpointing": True}
SLOW: dict[str, Case] = {
    "sft: packed": case(packing=True, max_length=24, packing_strategy="wrapped"),
    "sft: packed by sentence": case(packing=True, max_length=24),
    "sft: padding free": case(padding_free=True, max_length=None),
    "sft: prompt scored too": case(completion_only_loss=False),
    "sft: checkpointing": case(**CHECKPOINTING),
    "sft: smoothed": case(label_smoothing_factor=0.1),
    "kto: apo": case(loss_type="apo_zero_unpaired"),
    "kto: weights": case(desirable_weight=1.5, undesirable_weight=0.5, beta=0.3),
    "kto: precomputed": case(precompute_ref_log_probs=True),
    "kto: synchronised": case(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3),
    "kto: checkpointing": case(**CHECKPOINTING),
    **{f"grpo: {kind}": case(loss_type=kind, beta=0.04) for kind in
       ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")},
    "grpo: sequence level": case(importance_sampling_level="sequence", num_iterations=2),
    "grpo: high entropy tokens": case(top_entropy_quantile=0.5),
    "grpo: fp32 head": case(cast_lm_head_to_fp32=True),
    "grpo: synchronised": case(beta=0.04, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3),
    "grpo: truncated masked": case(mask_truncated_completions=True, gradient_accumulation_steps=2),
    "grpo: checkpointing": case(**CHECKPOINTING),
    "rloo: several iterations": case(num_iterations=2),
    "gmpo": case(beta=0.04, num_iterations=2),
    "kto: compiled": case(torch_compile=True, torch_compile_backend="aot_eager"),
    "sft: compiled": case(torch_compile=True, torch_compile_backend="aot_eager"),
    "orpo: compiled": case(torch_compile=True, torch_compile_backend="aot_eager"),
    "orpo: checkpointing, accumulation": case(gradient_accumulation_steps=2, **CHECKPOINTING),
    "cpo: hinge": case(loss_type="hinge"),
    "cpo: ipo": case(loss_type="ipo"),
    "cpo: smoothed": case(label_smoothing=0.1),
    "cpo: alphapo": case(loss_type="simpo", alpha=0.25, cpo_alpha=0.0),
    "tpo: hinge": case(loss_type="hinge"),
    "tpo: ipo": case(loss_type="ipo"),
    "tpo: length normalised": case(loss_type="tpo-l", label_smoothing=0.1),
    "tpo: no likelihood": case(tpo_alpha=0.0),
    "online_dpo: ipo": case(loss_type="ipo"),
    "a2po": case(),
}  # fmt: skip


def build(
    name: str,
    tokenizer: Any,
    folder: Path,
    options: dict[str, Any],
    family: str = "llama",
    peft: Any = None,
    **more: Any,
) -> Any:
    kind, config, rows_of, own = TRAINERS[name]
    settings = {**trainer_settings(folder / "out"), **own, **options}
    rows = _rows(24)
    keywords: dict[str, Any] = {
        "train_dataset": datasets.Dataset.from_list(rows_of(rows)),
        "eval_dataset": datasets.Dataset.from_list(rows_of(rows[:4])),
        "processing_class": tokenizer,
        **({"peft_config": peft} if peft is not None else {}),
        **more,
    }
    model: Any = tiny_model(family)
    if name in SAMPLERS:
        keywords["processing_class"] = copy.deepcopy(tokenizer)
        keywords["processing_class"].padding_side = "left"
        keywords["reward_funcs"] = _reward
        path = _saved(family, folder / "model")
        model = type(model).from_pretrained(path, attn_implementation="eager")
        if hasattr(model.config, "output_router_logits"):
            model.config.output_router_logits = False  # or generation fails; TRL asks for them in its own calls
    if name in ("kto", "online_dpo") and peft is None and not options.get("precompute_ref_log_probs"):
        keywords["ref_model"] = near(tiny_model(family))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(model, args=config(**settings), **keywords)
