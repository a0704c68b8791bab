"""Every supported TRL trainer: three steps and an evaluation with TRL's own heads against the same with `fuse_trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import trl
from torch.profiler import ProfilerActivity, profile

import liger_losses
from liger_losses.integrations._recipes import RECIPES
from liger_losses.integrations.trl import FuseReport, fuse_trainer, unfuse_trainer

from .runs import assert_same, record_head_calls, run
from .trainer_cases import FAST, SAMPLERS, SLOW, TRAINERS, Case, build, case


def compare(
    name: str, tokenizer: Any, folder: Path, chosen: Case, logits_expected: bool = False, **more: Any
) -> tuple[FuseReport, Any]:
    options, tolerance, exceptions = chosen
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
    report, _ = compare(name, tokenizer, tmp_path, case(gradient_checkpointing=True), peft=lora)
    assert not report.policy.trainable
    assert report.reference is None


@pytest.mark.parametrize(
    "name", ["cpo", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sft", "kto", "grpo", "rloo", "orpo"))]
)
def test_load_balancing_loss(name: str, tokenizer: Any, tmp_path: Path) -> None:
    _, trainer = compare(name, tokenizer, tmp_path, case(), family="mixtral")
    logged = [entry["aux_loss"] for entry in trainer.state.log_history if "aux_loss" in entry]
    assert logged == [] if name in ("orpo", "cpo") else min(logged) > 0


@pytest.mark.parametrize(
    "name", ["orpo", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cpo", "tpo", "sft", "kto"))]
)
def test_a_softcap_leaves_mean_logits_of_scored_positions(name: str, tokenizer: Any, tmp_path: Path) -> None:
    # Through tanh the mean of the logits at positions without a label would take the logits.
    exceptions = ("logits/chosen", "logits/rejected") if name in ("orpo", "cpo") else ()
    _, trainer = compare(name, tokenizer, tmp_path, case(exceptions=exceptions), family="gemma2")
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
    compare(name, tokenizer, tmp_path, case(4e-2, loose, bf16=True))


@pytest.mark.slow
def test_fp32_head_under_bf16(tokenizer: Any, tmp_path: Path) -> None:
    # The head sees no autocast; the hidden states that both feed it are the same bf16 ones.
    report, _ = compare("grpo", tokenizer, tmp_path, case(2e-3, cast_lm_head_to_fp32=True, bf16=True))
    assert "fp32" in str(report)


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["cpo", pytest.param("orpo", marks=pytest.mark.slow)])
def test_adapter_on_the_head(name: str, kind: str, tokenizer: Any, tmp_path: Path) -> None:
    # TRL refuses it in the trainers that read the head's weight; these call the head, so it is trained.
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False, use_dora=kind == "dora", lora_dropout=0.0
    )
    report, trainer = compare(name, tokenizer, tmp_path, case(), peft=config)
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
        with pytest.raises(TypeError, match=f"RewardTrainer; supported are.*{', '.join(RECIPES)}"):
            fuse_trainer(trl.RewardTrainer.__new__(trl.RewardTrainer))

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
            compare(name, tokenizer, tmp_path, case(), peft=config)
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
