"""How the tests build each of TRL's distillation trainers, and with which options."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import datasets
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from trl.experimental import gkd, gold, iw_opd, sdft, sdpo

from .conftest import TEXT
from .runs import near
from .tiny import tiny_model, trainer_settings
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
        {"max_completion_length": 8, "max_length": 48, "max_prompt_length": 24, "lmbda": 1.0},
    ),
    "sdft": (sdft.SDFTTrainer, sdft.SDFTConfig, _privileged, {**SAMPLING, "max_prompt_length": 24}),
    "sdpo": (sdpo.SDPOTrainer, sdpo.SDPOConfig, _privileged, {**SAMPLING, "max_prompt_length": 24}),
}
SELF_TAUGHT = ("sdft", "sdpo")

FORWARD, MIXED, REVERSE = {"beta": 0.0}, {"beta": 0.3}, {"beta": 1.0}
ACCUMULATION, CHECKPOINTING = {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}
WHOLE, TOP = {"distillation_mode": "full_logits"}, {"distillation_mode": "topk_logits", "distillation_topk": 5}
SAMPLED = {"distillation_mode": "sampled_token", "distillation_alpha": 1.0}
ON_POLICY, JSD = {"lmbda": 1.0}, {"distillation_objective": "jsd", "loss_top_k": 0}
# Rollouts older than a step: what they are compared with is scored when they are made.
OLD = {"num_iterations": 2, "steps_per_generation": 1}
FAST: dict[str, Case] = {
    "distillation": case(),
    "gkd": case(),
    "gold: temperature": case(temperature=1.7, **MIXED),
    "iw_opd": case(),
    "sdft: whole": case(**WHOLE, distillation_alpha=0.5),
    "sdft: top k": case(**TOP, distillation_alpha=0.5, distillation_add_tail=True),
    "sdpo": case(),
}
SLOW: dict[str, Case] = {
    "distillation: forward": case(**FORWARD),
    "distillation: mixed, temperature": case(**MIXED, temperature=0.7),
    "distillation: accumulation, checkpointing": case(**ACCUMULATION, **CHECKPOINTING),
    "gkd: forward, accumulation": case(**FORWARD, **ACCUMULATION),
    "gkd: reverse, checkpointing": case(**REVERSE, **CHECKPOINTING),
    "gkd: compiled": case(torch_compile=True, torch_compile_backend="aot_eager"),
    "distillation: compiled": case(torch_compile=True, torch_compile_backend="aot_eager"),
    "sdft: compiled": case(**WHOLE, torch_compile=True, torch_compile_backend="aot_eager"),
    "gkd: on policy": case(**ON_POLICY),
    "gkd: the teacher's words": case(seq_kd=True),
    "gold: forward": case(**FORWARD),
    "gold: reverse, on policy": case(**REVERSE, **ON_POLICY),
    "gold: accumulation": case(**ACCUMULATION),
    "iw_opd: temperature, accumulation": case(exceptions=("on_policy_loss",), temperature=0.8, iw_opd_gamma=2.0, **ACCUMULATION),
    **{f"iw_opd: jsd, {name}": case(**JSD, **beta, temperature=1.3) for name, beta in
       (("forward", FORWARD), ("mixed", MIXED), ("reverse", REVERSE))},
    **{f"iw_opd: top {k}, {name}, tail {tail}": case(**{**JSD, **beta, "loss_top_k": k}, loss_add_tail=tail) for k, name, beta, tail in
       ((4, "forward", FORWARD, True), (4, "mixed", MIXED, True), (1, "mixed", MIXED, True),
        (1, "reverse", REVERSE, True), (300, "mixed", MIXED, True))},
    # TRL's own third gradient norm moves by 5e-5 where its weights start off by a rounding.
    "iw_opd: top 4, reverse, no tail": case(1e-4, **{**JSD, **REVERSE, "loss_top_k": 4}, loss_add_tail=False),
    "iw_opd: top 1, likeliest": case(**{**JSD, **MIXED, "loss_top_k": 1}, reverse_kl_top_1_mode="argmax"),
    "sdft: sampled, older rollouts": case(**SAMPLED, **OLD),
    "sdft: top k, renormalised": case(**TOP, distillation_alpha=0.0, num_loss_tokens_to_skip=2),
    "sdft: reverse, temperature": case(**WHOLE, distillation_alpha=1.0, temperature=0.8, **OLD),
    "sdft: forward, live teacher": case(**WHOLE, distillation_alpha=0.0, teacher_model_kind="live"),
    "sdft: moving teacher": case(**WHOLE, teacher_model_kind="ema", teacher_update_rate=0.3, teacher_sync_steps=1),
    "sdft: the teacher's words": case(**WHOLE, generate_from_teacher=True, **ACCUMULATION),
    "sdpo: whole": case(**WHOLE, distillation_alpha=0.5, **CHECKPOINTING),
    "sdpo: top k, feedback": case(**TOP, include_environment_feedback=True),
    "sdpo: half of it a policy gradient": case(distillation_weight=0.5, **OLD),
    "sdpo: policy gradient alone": case(distillation_weight=0.0, loss_type="grpo", **ACCUMULATION),
}  # fmt: skip


@functools.cache
def byte_level() -> Any:
    """GOLD wants a byte-level tokenizer; the text has few enough characters for the tiny models' 200 tokens."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<unk>", "<pad>", "<eos>"]
    bpe.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )


def build(
    name: str,
    folder: Path,
    options: dict[str, Any],
    family: str = "llama",
    teacher_family: str | None = None,
    peft: Any = None,
    **more: Any,
) -> Any:
    kind, config, rows_of, own = TRAINERS[name]
    settings = {**trainer_settings(folder / "out"), **own, **options}
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.chat_template = TEMPLATE
    tokenizer.padding_side = "left"
    student = tiny_model(family)
    student.generation_config.eos_token_id = 2
    keywords: dict[str, Any] = {"processing_class": tokenizer, **({"peft_config": peft} if peft is not None else {})}
    if name in SELF_TAUGHT:  # they load what the student's config names, as their teacher
        student.save_pretrained(folder / "model")
        student = type(student).from_pretrained(folder / "model", attn_implementation="eager")
    else:
        teacher = near(tiny_model(teacher_family or family))
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
