"""How the tests build each of TRL's distillation trainers, and with which options."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import datasets
import trl
from trl.experimental import gkd, gold, iw_opd, sdft, sdpo

from .conftest import TEXT
from .runs import near
from .tiny import tiny_model
from .trainer_cases import Case, case

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %} <eos>{% endif %} {% endfor %}"


def _prompt(line: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": line}]


def _messages(count: int) -> list[dict[str, Any]]:
    rows = []
    for i in range(count):
        words = TEXT[i % len(TEXT)].split()
        answer = {"role": "assistant", "content": " ".join(words[3 : 6 + i % 5])}
        rows.append({"messages": [*_prompt(" ".join(words[: 3 + i % 2])), answer]})
    return rows


def _prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": " ".join(TEXT[i % len(TEXT)].split()[: 3 + i % 2])} for i in range(count)]


def _privileged(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "privileged_context": TEXT[(i + 3) % len(TEXT)]}
        for i, row in enumerate(_prompts(count))
    ]


def _reward(completions: list[Any], **_: Any) -> list[float]:
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(sum(map(ord, text)) % 2) for text in texts]


SAMPLING = {"max_completion_length": 8, "num_generations": 2}
# Name -> trainer, config, dataset, options without which it is not itself.
TRAINERS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "distillation": (trl.DistillationTrainer, trl.DistillationConfig, _prompts, {"max_completion_length": 8}),
    "gkd": (gkd.GKDTrainer, gkd.GKDConfig, _messages, {"max_new_tokens": 8, "max_length": 48, "lmbda": 0.0}),
    "gold": (
        gold.GOLDTrainer,
        gold.GOLDConfig,
        _messages,
        {"max_completion_length": 8, "max_length": 48, "lmbda": 0.0},
    ),
    "iw_opd": (
        iw_opd.IWOPDTrainer,
        iw_opd.IWOPDConfig,
        _messages,
        {"max_completion_length": 8, "max_length": 48, "max_prompt_length": 24, "lmbda": 0.0},
    ),
    "sdft": (sdft.SDFTTrainer, sdft.SDFTConfig, _privileged, {**SAMPLING, "max_prompt_length": 24}),
    "sdpo": (sdpo.SDPOTrainer, sdpo.SDPOConfig, _privileged, {**SAMPLING, "max_prompt_length": 24}),
}
SELF_TAUGHT = ("sdft", "sdpo")

ACCUMULATION = {"gradient_accumulation_steps": 2}
FAST: dict[str, Case] = {
    "distillation": case(),
    "gkd": case(),
    "gold: temperature": case(temperature=1.7, beta=0.3),
    "iw_opd": case(),
    "sdft: whole": case(distillation_mode="full_logits", distillation_alpha=0.5),
    "sdpo": case(),
}


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
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        **own,
        **options,
    }
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    tokenizer.padding_side = "left"
    student = tiny_model(family)
    student.generation_config.eos_token_id = 2
    keywords: dict[str, Any] = {"processing_class": tokenizer, **({"peft_config": peft} if peft is not None else {})}
    if name in SELF_TAUGHT:  # they load what the student's config names, as their teacher
        student.save_pretrained(folder / "model")
        student = type(student).from_pretrained(folder / "model", attn_implementation="eager")
    else:
        teacher = near(tiny_model(family))
        if name == "iw_opd":  # it looks for the teacher's tokenizer where the teacher came from
            teacher.save_pretrained(folder / "teacher")
            tokenizer.save_pretrained(folder / "teacher")
            teacher = type(teacher).from_pretrained(folder / "teacher", attn_implementation="eager")
        keywords["teacher_model"] = teacher
    if name == "sdpo":
        keywords["reward_funcs"] = _reward
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(
            student,
            args=config(**settings),
            train_dataset=datasets.Dataset.from_list(rows_of(24)),
            eval_dataset=datasets.Dataset.from_list(rows_of(4)),
            **{**keywords, **more},
        )
