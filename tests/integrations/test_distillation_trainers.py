"""TRL's distillation trainers: three steps and an evaluation with TRL's own heads against the same fused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from torch.profiler import ProfilerActivity, profile
from trl.experimental import async_distillation, server_distillation

from liger_losses.integrations.trl import FuseReport, fuse_trainer, unfuse_trainer

from .distillation_cases import FAST, MIXED, SAMPLED, SELF_TAUGHT, SLOW, TOP, TRAINERS, WHOLE, build
from .runs import assert_same, record_head_calls, run
from .trainer_cases import Case, case


def compare(name: str, folder: Path, chosen: Case, **more: Any) -> tuple[FuseReport, Any]:
    options, tolerance, exceptions = chosen
    expected = run(build(name, folder / "native", options, **more))
    trainer = build(name, folder / "fused", options, **more)
    report = fuse_trainer(trainer)
    calls = record_head_calls(trainer)
    assert_same(run(trainer), expected, tolerance, exceptions)
    assert not calls, "a head module was called: full logits were built"
    return report, trainer


@pytest.mark.parametrize("name", FAST)
def test_three_steps_equal_trls_own(name: str, tmp_path: Path) -> None:
    compare(name.partition(":")[0], tmp_path, FAST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_option_equals_trls_own(name: str, tmp_path: Path) -> None:
    compare(name.partition(":")[0], tmp_path, SLOW[name])


@pytest.mark.parametrize(
    "name", ["gkd", *(pytest.param(n, marks=pytest.mark.slow) for n in ("distillation", "gold", "iw_opd"))]
)
def test_heads_with_a_softcap_and_a_scale(name: str, tmp_path: Path) -> None:
    report, _ = compare(name, tmp_path, case(), family="cohere", teacher_family="gemma2")
    assert "logit scale 0.25" in str(report.policy)
    assert "softcap 2" in str(report.teacher)


@pytest.mark.parametrize(
    "name", ["gkd", *(pytest.param(n, marks=pytest.mark.slow) for n in TRAINERS if n not in ("gkd", *SELF_TAUGHT))]
)
def test_adapter_with_a_frozen_head(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    report, _ = compare(name, tmp_path, case(gradient_checkpointing=True), peft=lora)
    assert not report.policy.trainable
    assert report.products_after == 3


@pytest.mark.parametrize("kind", ["base", pytest.param("ema", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["sdft", pytest.param("sdpo", marks=pytest.mark.slow)])
def test_the_policy_as_its_teacher_with_another_adapter(name: str, kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    options = {**WHOLE, "distillation_alpha": 0.5, "teacher_model_kind": kind}
    report, trainer = compare(name, tmp_path, case(**options), peft=lora)
    assert report.teacher is None
    assert "teacher    the policy itself" in str(report)
    unfuse_trainer(trainer)


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["iw_opd", pytest.param("sdft", marks=pytest.mark.slow)])
def test_adapter_on_the_head(name: str, kind: str, tmp_path: Path) -> None:
    # TRL refuses it in the trainers that read the head's weight, or derive from one that does.
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False, use_dora=kind == "dora", lora_dropout=0.0
    )
    options = {**WHOLE, "teacher_model_kind": "base"} if name == "sdft" else {}
    report, _ = compare(name, tmp_path, case(**options), peft=config)
    assert report.policy.adapter
    assert report.teacher is None or not report.teacher.adapter


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_bf16_autocast(name: str, tmp_path: Path) -> None:
    # TRL rounds logits to bf16; a divergence of two near models is a difference of such numbers. Sampling in bf16 goes
    # other ways, and with it all that is made of samples, so that these trainers are compared on given text.
    if name not in ("gkd", "gold"):
        trainer = build(name, tmp_path, {"bf16": True})
        fuse_trainer(trainer)
        calls = record_head_calls(trainer)
        assert all(torch.isfinite(torch.tensor(e["loss"])) for e in run(trainer) if "loss" in e)
        assert not calls
        return
    compare(name, tmp_path, case(6e-2, ("grad_norm",), bf16=True, **MIXED))


def _products_of_one_step(trainer: Any) -> tuple[float, int]:
    """Products of both heads, forward and backward, in units of 2 * positions * hidden * vocabulary; the positions."""
    inputs = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._prepare_inputs(inputs)
    trainer.model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        trainer.compute_loss(trainer.model, inputs).backward()
    operations, rows_seen = 0, set()
    for event in profiler.events():
        first = {"aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1, "aten::bmm": 0}.get(event.name)
        if first is not None:
            (*batch, rows, inner), (*_, columns) = event.input_shapes[first : first + 2]
            if 200 in (rows, inner, columns):
                rows *= math.prod(batch)
                operations += 2 * rows * inner * columns
                rows_seen |= {rows, inner} - {200, 32}
    return operations / (2 * 32 * 200), max(rows_seen)


PRODUCTS: dict[str, dict[str, Any]] = {
    "distillation": {"beta": 1.0},
    "distillation: mixed": MIXED,
    "gkd": {},
    "iw_opd": {},
    **{
        f"iw_opd: top {k}, beta {beta}, {mode}": {
            "distillation_objective": "jsd",
            "loss_top_k": k,
            "beta": beta,
            "reverse_kl_top_1_mode": mode,
        }
        for k, beta, mode in (
            (4, 0.0, "sampled"),
            (4, 0.3, "sampled"),
            (4, 1.0, "sampled"),
            (1, 0.0, "sampled"),
            (1, 0.3, "argmax"),
            (1, 1.0, "sampled"),
            (300, 0.3, "sampled"),
        )
    },
    "sdft: sampled": SAMPLED,
    "sdft: top k": TOP,
    "sdpo: half of it a policy gradient": {"distillation_weight": 0.5},
}


QUICK_PRODUCTS = ("distillation: mixed", "gkd", "iw_opd", "sdft: top k")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK_PRODUCTS else (pytest.mark.slow,)) for n in PRODUCTS]
)
def test_products_are_those_of_the_report(name: str, tmp_path: Path) -> None:
    kind, options = name.partition(":")[0], dict(PRODUCTS[name])
    if kind != "gkd":  # so that no number of positions is the hidden size
        options["max_completion_length"] = 10
    # All samples succeed, so that there is something for SDPO to distil from.
    more = {"reward_funcs": lambda completions, **_: [1.0] * len(completions)} if kind == "sdpo" else {}
    native, positions = _products_of_one_step(build(kind, tmp_path / "native", options, **more))
    trainer = build(kind, tmp_path / "fused", options, **more)
    report = fuse_trainer(trainer)
    fused, scored = _products_of_one_step(trainer)
    assert native / positions == report.products_before
    assert fused / scored == report.products_after
    assert scored <= positions


class TestFusing:
    def test_report(self, tmp_path: Path) -> None:
        report = str(fuse_trainer(build("gkd", tmp_path, {})))
        for words in ("GKDTrainer", "teacher    LlamaForCausalLM: gradient-free head", "(checked, verified)",
                      "4 before, with full logits of every position, 4 now (6 where"):  # fmt: skip
            assert words in report
        assert "the price of" not in report

    def test_report_of_more_products_than_before(self, tmp_path: Path) -> None:
        report = str(
            fuse_trainer(build("sdft", tmp_path, {"distillation_mode": "topk_logits", "distillation_topk": 5}))
        )
        assert (
            "4 before, with full logits of every position, 5 now (6 where the memory budget asks for recomputing), the price of not holding the logits"
            in report
        )

    @pytest.mark.parametrize("name", ["gkd", "distillation", "sdft"])
    def test_unfusing_gives_the_methods_back(self, name: str, tmp_path: Path) -> None:
        trainer = build(name, tmp_path, {"distillation_mode": "full_logits"} if name == "sdft" else {})
        before = set(vars(trainer))
        teacher = trainer.teacher_model
        fuse_trainer(trainer)
        fuse_trainer(trainer, strategy="recompute")
        unfuse_trainer(trainer)
        assert set(vars(trainer)) == before
        assert trainer.teacher_model is teacher
        assert not hasattr(trainer.accelerator.unwrap_model(teacher), "_liger_fused_head")

    def test_evaluation_with_compute_metrics_receives_logits(self, tmp_path: Path) -> None:
        shapes: list[Any] = []

        def metrics(prediction: Any) -> dict[str, float]:
            shapes.append(prediction.predictions.shape)
            return {"seen": 1.0}

        trainer = build("gkd", tmp_path, {}, compute_metrics=metrics)
        assert "compute_metrics" in str(fuse_trainer(trainer))
        assert trainer.evaluate()["eval_seen"] == 1.0
        assert shapes[0][-1] == 200

    def test_a_teacher_of_another_vocabulary(self, tmp_path: Path) -> None:
        trainer = build("gkd", tmp_path, {})
        trainer.teacher_model.resize_token_embeddings(208)
        with pytest.raises(ValueError, match="teacher's head has 208 rows and the student's 200"):
            fuse_trainer(trainer)
        assert "_liger_fused_head" not in vars(trainer.model)

    @pytest.mark.parametrize(
        ("name", "attribute", "message"),
        [
            ("gold", "use_uld_loss", "two vocabularies are compared in sorted order"),
            ("iw_opd", "use_teacher_server", "expected a local teacher"),
            ("sdft", "use_teacher_server", "expected a local teacher"),
            ("gkd", "is_fsdp_enabled", "under FSDP"),
        ],
    )
    def test_options_that_cannot_be_fused(self, name: str, attribute: str, message: str, tmp_path: Path) -> None:
        trainer = build(name, tmp_path, {})
        setattr(trainer, attribute, True)
        with pytest.raises(ValueError, match=message):
            fuse_trainer(trainer)

    def test_prompt_learning(self, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        with pytest.raises(ValueError, match="virtual tokens"):
            fuse_trainer(build("gkd", tmp_path, {}, peft=config))

    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            (async_distillation.AsyncDistillationTrainer, "vLLM servers"),
            (server_distillation.ServerDistillationTrainer, "its teacher is a server"),
        ],
    )
    def test_trainers_that_need_servers(self, kind: Any, message: str) -> None:
        with pytest.raises(TypeError, match=f"a {kind.__name__} is not supported: .*{message}"):
            fuse_trainer(kind.__new__(kind))

    def test_another_trl(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = build("distillation", tmp_path, {})
        monkeypatch.delitem(type(trainer)._compute_loss.__globals__, "_chunked_divergence_loss")
        with pytest.raises(ValueError, match="this release of TRL has no _chunked_divergence_loss"):
            fuse_trainer(trainer)

    def test_the_probe_looks_at_the_teacher_too(self, tmp_path: Path) -> None:
        trainer = build("gkd", tmp_path, {})
        trainer.teacher_model.lm_head.register_forward_hook(lambda module, args, logits: logits.roll(1, -1))
        with pytest.raises(ValueError, match="differ|its head cannot be fused"):
            fuse_trainer(trainer)
        assert "_liger_fused_head" not in vars(trainer.model)


def test_a_reduction_that_would_count_the_vocabulary(tmp_path: Path) -> None:
    trainer = build("gkd", tmp_path, {})
    fuse_trainer(trainer)
    ids = torch.tensor([[3, 4, 5]])
    student, teacher = (one(input_ids=ids, linear_logits=True) for one in (trainer.model, trainer.teacher_model))
    with pytest.raises(ValueError, match="reduction: got 'mean', expected 'batchmean' or 'sum'"):
        trainer.generalized_jsd_loss(student, teacher, reduction="mean")
    real = (torch.randn(2, 3, 7) for _ in range(2))
    assert trainer.generalized_jsd_loss(*real, reduction="mean").shape == ()  # logits that exist are TRL's own
