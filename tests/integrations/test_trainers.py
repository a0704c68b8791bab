"""Every supported TRL trainer: three steps and an evaluation with TRL's own heads against the same with `fuse_trainer`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import datasets
import trl
from torch.profiler import ProfilerActivity, profile
from trl.experimental import a2po, cpo, gmpo, online_dpo, orpo, tpo

import liger_losses
from liger_losses.integrations._recipes import RECIPES
from liger_losses.integrations.trl import FuseReport, fuse_trainer, unfuse_trainer

from .conftest import TEXT
from .runs import assert_same, near, record_head_calls, run
from .tiny import tiny_model

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


def _case(tolerance: float = 1e-5, exceptions: tuple[str, ...] = (), **options: Any) -> Case:
    return options, tolerance, exceptions


FAST: dict[str, Case] = {
    "sft": _case(),
    "sft: dft, accumulation": _case(loss_type="dft", gradient_accumulation_steps=2),
    "kto": _case(gradient_accumulation_steps=2),
    "grpo: entropy bonus, reference": _case(entropy_coef=0.05, beta=0.04),
    "grpo: several iterations": _case(num_iterations=2, steps_per_generation=2, gradient_accumulation_steps=2),
    "rloo": _case(beta=0.05),
    "orpo": _case(),
    "cpo: simpo": _case(loss_type="simpo", cpo_alpha=0.0, beta=2.0),
    "cpo": _case(gradient_accumulation_steps=2),
    "tpo": _case(),
    "online_dpo": _case(),
}
CHECKPOINTING = {"gradient_checkpointing": True}
SLOW: dict[str, Case] = {
    "sft: packed": _case(packing=True, max_length=24, packing_strategy="wrapped"),
    "sft: packed by sentence": _case(packing=True, max_length=24),
    "sft: padding free": _case(padding_free=True, max_length=None),
    "sft: prompt scored too": _case(completion_only_loss=False),
    "sft: checkpointing": _case(**CHECKPOINTING),
    "sft: smoothed": _case(label_smoothing_factor=0.1),
    "kto: apo": _case(loss_type="apo_zero_unpaired"),
    "kto: weights": _case(desirable_weight=1.5, undesirable_weight=0.5, beta=0.3),
    "kto: precomputed": _case(precompute_ref_log_probs=True),
    "kto: synchronised": _case(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3),
    "kto: checkpointing": _case(**CHECKPOINTING),
    **{f"grpo: {kind}": _case(loss_type=kind, beta=0.04) for kind in
       ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")},
    "grpo: sequence level": _case(importance_sampling_level="sequence", num_iterations=2),
    "grpo: high entropy tokens": _case(top_entropy_quantile=0.5),
    "grpo: fp32 head": _case(cast_lm_head_to_fp32=True),
    "grpo: synchronised": _case(beta=0.04, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3),
    "grpo: truncated masked": _case(mask_truncated_completions=True, gradient_accumulation_steps=2),
    "grpo: checkpointing": _case(**CHECKPOINTING),
    "rloo: several iterations": _case(num_iterations=2),
    "gmpo": _case(beta=0.04, num_iterations=2),
    "orpo: compiled": _case(torch_compile=True, torch_compile_backend="aot_eager"),
    "orpo: checkpointing, accumulation": _case(gradient_accumulation_steps=2, **CHECKPOINTING),
    "cpo: hinge": _case(loss_type="hinge"),
    "cpo: ipo": _case(loss_type="ipo"),
    "cpo: smoothed": _case(label_smoothing=0.1),
    "cpo: alphapo": _case(loss_type="simpo", alpha=0.25, cpo_alpha=0.0),
    "tpo: hinge": _case(loss_type="hinge"),
    "tpo: ipo": _case(loss_type="ipo"),
    "tpo: length normalised": _case(loss_type="tpo-l", label_smoothing=0.1),
    "tpo: no likelihood": _case(tpo_alpha=0.0),
    "online_dpo: ipo": _case(loss_type="ipo"),
    "a2po": _case(),
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


def compare(
    name: str, tokenizer: Any, folder: Path, case: Case, logits_expected: bool = False, **more: Any
) -> tuple[FuseReport, Any]:
    options, tolerance, exceptions = case
    evaluate = name != "online_dpo"  # TRL's own evaluation of it fails: it hands the model its prompts as text
    expected = run(build(name, tokenizer, folder / "native", options, **more), evaluate)
    trainer = build(name, tokenizer, folder / "fused", options, **more)
    report = fuse_trainer(trainer)
    calls = record_head_calls(trainer)
    assert_same(run(trainer, evaluate), expected, tolerance, exceptions)
    if not logits_expected:
        assert not calls, "a head module was called: full logits were built"
    return report, trainer


@pytest.mark.parametrize("name", FAST)
def test_three_steps_equal_trls_own(name: str, tokenizer: Any, tmp_path: Path) -> None:
    compare(name.partition(":")[0], tokenizer, tmp_path, FAST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_option_equals_trls_own(name: str, tokenizer: Any, tmp_path: Path) -> None:
    report, _ = compare(
        name.partition(":")[0], tokenizer, tmp_path, SLOW[name], logits_expected=name == "sft: smoothed"
    )
    assert ("label_smoothing_factor" in str(report)) == (name == "sft: smoothed")


@pytest.mark.parametrize(
    "name", ["orpo", *(pytest.param(n, marks=pytest.mark.slow) for n in TRAINERS if n not in ("orpo", "a2po"))]
)
def test_adapter_with_a_frozen_head(name: str, tokenizer: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    report, _ = compare(name, tokenizer, tmp_path, _case(gradient_checkpointing=True), peft=lora)
    assert not report.policy.trainable
    assert report.reference is None


@pytest.mark.parametrize(
    "name", ["cpo", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sft", "kto", "grpo", "rloo", "orpo"))]
)
def test_load_balancing_loss(name: str, tokenizer: Any, tmp_path: Path) -> None:
    _, trainer = compare(name, tokenizer, tmp_path, _case(), family="mixtral")
    logged = [entry["aux_loss"] for entry in trainer.state.log_history if "aux_loss" in entry]
    assert logged == [] if name in ("orpo", "cpo") else min(logged) > 0


@pytest.mark.parametrize(
    "name", ["orpo", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cpo", "tpo", "sft", "kto"))]
)
def test_a_softcap_leaves_mean_logits_of_scored_positions(name: str, tokenizer: Any, tmp_path: Path) -> None:
    # Through tanh the mean of the logits at positions without a label would take the logits.
    exceptions = ("logits/chosen", "logits/rejected") if name in ("orpo", "cpo") else ()
    _, trainer = compare(name, tokenizer, tmp_path, _case(exceptions=exceptions), family="gemma2")
    assert all(abs(e["logits/chosen"]) < 2.0 for e in trainer.state.log_history if "logits/chosen" in e)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in TRAINERS if n not in SAMPLERS])
def test_bf16_autocast(name: str, tokenizer: Any, tmp_path: Path) -> None:
    # Both round the head's inputs to bf16; TRL also rounds the logits, at 2^-9 of values of a few units. Means of
    # logits are near zero, so that rounding is large beside them; whether the likeliest token is the label may flip.
    loose = (
        "logits/chosen",
        "logits/rejected",
        "accuracies",
        "mean_token_accuracy",
        "log_odds_chosen",
        "margins",
        "kl",
    )
    compare(name, tokenizer, tmp_path, _case(4e-2, loose, bf16=True))


@pytest.mark.slow
def test_fp32_head_under_bf16(tokenizer: Any, tmp_path: Path) -> None:
    # The head sees no autocast; the hidden states that both feed it are the same bf16 ones.
    case = _case(2e-3, cast_lm_head_to_fp32=True, bf16=True)
    report, _ = compare("grpo", tokenizer, tmp_path, case)
    assert "fp32" in str(report)


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["cpo", pytest.param("orpo", marks=pytest.mark.slow)])
def test_adapter_on_the_head(name: str, kind: str, tokenizer: Any, tmp_path: Path) -> None:
    # TRL refuses it in the trainers that read the head's weight; these call the head, so it is trained.
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False, use_dora=kind == "dora", lora_dropout=0.0
    )
    report, trainer = compare(name, tokenizer, tmp_path, _case(), peft=config)
    assert report.policy.adapter
    assert "LoRA" in str(report)
    assert trainer.model.get_base_model().lm_head.lora_B["default"].weight.grad is None  # zeroed after a step


def _products_of_one_step(trainer: Any) -> tuple[float, int]:
    """Head products of forward and backward in units of 2 * positions * hidden * vocabulary, and the positions."""
    inputs = next(iter(trainer.get_train_dataloader()))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        trainer.compute_loss(trainer.model, inputs).backward()
    operations, rows_seen = 0, set()
    for event in profiler.events():
        first = {"aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1}.get(event.name)
        if first is not None:
            (rows, inner), (_, columns) = event.input_shapes[first : first + 2]
            if 200 in (rows, inner, columns):
                operations += 2 * rows * inner * columns
                rows_seen |= {rows, inner} - {200, 32}
    return operations / (2 * 32 * 200), max(rows_seen)


def test_products_of_a_trainer_that_built_logits(tokenizer: Any, tmp_path: Path) -> None:
    native, positions = _products_of_one_step(build("cpo", tokenizer, tmp_path / "native", {}))
    trainer = build("cpo", tokenizer, tmp_path / "fused", {})
    report = fuse_trainer(trainer, strategy="cached")
    fused, scored = _products_of_one_step(trainer)
    assert report.full_logits_before
    assert native / positions == report.products_before == 3
    assert fused / scored == report.products_after == 3
    assert scored < positions


class TestFusing:
    def test_report_of_a_trainer_that_built_logits(self, tokenizer: Any, tmp_path: Path) -> None:
        report = str(fuse_trainer(build("tpo", tokenizer, tmp_path, {})))
        for words in ("TPOTrainer", "3 before, with full logits of every position", "(checked, verified)"):
            assert words in report

    def test_entropy_is_differentiated_for_a_bonus_only(self, tokenizer: Any, tmp_path: Path) -> None:
        for coefficient, expected in ((0.0, ("log_probs",)), (0.1, ("log_probs", "entropy"))):
            trainer = build("grpo", tokenizer, tmp_path, {"entropy_coef": coefficient})
            report = fuse_trainer(trainer)
            assert report.policy.differentiable == expected
            assert report.policy.temperature == 0.8
            assert (report.products_before, report.products_after) == (4, 2 + len(expected))

    @pytest.mark.parametrize("name", ["orpo", "tpo"])
    def test_unfusing_gives_the_methods_back(self, name: str, tokenizer: Any, tmp_path: Path) -> None:
        trainer = build(name, tokenizer, tmp_path, {})
        before = set(vars(trainer))
        fuse_trainer(trainer)
        fuse_trainer(trainer, strategy="recompute")
        unfuse_trainer(trainer)
        assert set(vars(trainer)) == before
        calls = record_head_calls(trainer)
        trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
        assert calls == ["model"]

    def test_a_trainer_of_the_users_goes_by_its_base(self, tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
        class Mine(trl.SFTTrainer):
            pass

        monkeypatch.setitem(TRAINERS, "mine", (Mine, *TRAINERS["sft"][1:]))
        assert fuse_trainer(build("mine", tokenizer, tmp_path, {})).trainer == "Mine"

    def test_a_trainer_of_trls_does_not_go_by_its_base(self) -> None:
        from trl.experimental.gkd import GKDTrainer

        with pytest.raises(TypeError, match=f"GKDTrainer; supported are.*{', '.join(RECIPES)}"):
            fuse_trainer(GKDTrainer.__new__(GKDTrainer))

    def test_encoder_decoder(self, tokenizer: Any, tmp_path: Path) -> None:
        trainer = build("orpo", tokenizer, tmp_path, {})
        trainer.is_encoder_decoder = True
        with pytest.raises(ValueError, match="encoder-decoder"):
            fuse_trainer(trainer)

    @pytest.mark.parametrize(
        "name", [pytest.param("sft", marks=pytest.mark.slow), pytest.param("kto", marks=pytest.mark.slow), "cpo", "tpo"]
    )
    def test_prompt_learning(self, name: str, tokenizer: Any, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        if name in ("sft", "kto"):  # TRL scores from the right, past the virtual tokens
            compare(name, tokenizer, tmp_path, _case(), peft=config)
            return
        trainer = build(name, tokenizer, tmp_path, {}, peft=config)
        with pytest.raises(ValueError, match="virtual tokens"):
            fuse_trainer(trainer)

    def test_the_probe_refuses_what_is_not_the_models_own(
        self, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = build("sft", tokenizer, tmp_path, {})
        own = vars(trainer.model)["forward"]
        monkeypatch.setattr("liger_losses.integrations._scoring.linear_logprobs", _off_by_a_bit)
        with pytest.raises(ValueError, match="differ from the model's own by"):
            fuse_trainer(trainer)
        assert vars(trainer.model)["forward"] is own
        assert trainer.model.training
        assert not fuse_trainer(trainer, verify=False).policy.verified

    def test_evaluation_of_tpo_with_compute_metrics_receives_logits(self, tokenizer: Any, tmp_path: Path) -> None:
        shapes: list[Any] = []

        def metrics(prediction: Any) -> dict[str, float]:
            shapes.append(prediction.predictions.shape)
            return {"seen": 1.0}

        trainer = build("tpo", tokenizer, tmp_path, {}, compute_metrics=metrics)
        assert "compute_metrics" in str(fuse_trainer(trainer))
        assert trainer.evaluate()["eval_seen"] == 1.0
        assert shapes[0][-1] == 200


def _off_by_a_bit(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = liger_losses.linear_logprobs(*args, **kwargs)
    return {**values, "logprob": values["logprob"] - 0.5}
