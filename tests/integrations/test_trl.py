"""DPO in TRL: three steps with TRL's own heads against three with `fuse_trainer`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import datasets
import transformers
import trl
from torch.profiler import ProfilerActivity, profile
from trl import DPOConfig, DPOTrainer

from liger_losses.integrations.trl import FuseReport, fuse_trainer, unfuse_trainer

from .conftest import TEXT
from .runs import assert_same, near, record_head_calls, run
from .tiny import tiny_model, trainer_settings

LOSS_TYPES = (
    "sigmoid", "hinge", "ipo", "sigmoid_norm", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft",
)  # fmt: skip
DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
FAST_OPTIONS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "aot, accumulation": {"loss_type": ["aot"], "gradient_accumulation_steps": 2},
    # TRL itself fails on sft with use_weighting: it multiplies an expanded tensor in place.
    "mixture, weighting": {"loss_type": ["sigmoid", "bco_pair"], "loss_weights": [0.8, 0.2], "use_weighting": True},
}  # fmt: skip
SLOW_OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": [name], "label_smoothing": 0.1 if name in ("exo_pair", "robust") else 0.0}
       for name in LOSS_TYPES},
    **{f"{divergence}, {name}": {"f_divergence_type": divergence, "loss_type": [name]}
       for divergence in DIVERGENCES for name in ("sigmoid", "hinge", "ipo")},
    "length desensitised": {"ld_alpha": 0.5},
    "length desensitised, ipo": {"ld_alpha": 0.0, "loss_type": ["ipo"]},
    "mixture": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "smoothed aot": {"loss_type": ["aot"], "label_smoothing": 0.1},
    "precomputed reference": {"precompute_ref_log_probs": True},
    "synchronised reference": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "padding free": {"padding_free": True},
    "truncated": {"max_length": 16},
    "other beta": {"beta": 0.5},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}  # fmt: skip


def _pairs(count: int) -> datasets.Dataset:
    words = [line.split() for line in TEXT]
    rows = []
    for i in range(count):
        line = words[i % len(words)]
        other = words[(3 * i + 1) % len(words)]
        chosen, rejected = line[4 : 8 + i % 4], other[3 : 6 + i % 5]
        rows.append(
            {"prompt": " ".join(line[:4]), "chosen": " " + " ".join(chosen), "rejected": " " + " ".join(rejected)}
        )
    return datasets.Dataset.from_list(rows)


def _trainer(
    tokenizer: Any, folder: Path, options: dict[str, Any], family: str = "llama", peft: Any = None, **more: Any
) -> DPOTrainer:
    settings = {**trainer_settings(folder), **options}
    reference = None if peft or settings.get("precompute_ref_log_probs") else near(tiny_model(family))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DPOTrainer(
            tiny_model(family),
            ref_model=reference,
            args=DPOConfig(**settings),
            train_dataset=_pairs(24),
            eval_dataset=_pairs(4),
            processing_class=tokenizer,
            peft_config=peft,
            **more,
        )


def _compare(
    tokenizer: Any, folder: Path, options: dict[str, Any], tolerance: float = 1e-5, **more: Any
) -> tuple[FuseReport, DPOTrainer]:
    expected = run(_trainer(tokenizer, folder / "native", options, **more))
    trainer = _trainer(tokenizer, folder / "fused", options, **more)
    report = fuse_trainer(trainer)
    calls = record_head_calls(trainer)
    assert_same(run(trainer), expected, tolerance)
    assert not calls, "a head module was called: full logits were built"
    return report, trainer


@pytest.mark.parametrize("name", FAST_OPTIONS)
def test_three_steps_equal_trls_own(name: str, tokenizer: Any, tmp_path: Path) -> None:
    _compare(tokenizer, tmp_path, FAST_OPTIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_OPTIONS)
def test_every_option_equals_trls_own(name: str, tokenizer: Any, tmp_path: Path) -> None:
    # discopop divides the log-ratio by tau = 0.05: twenty times the rounding of the others.
    _compare(tokenizer, tmp_path, SLOW_OPTIONS[name], tolerance=2e-4 if name == "discopop" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_tied", "gemma2", "cohere", "granite"])
def test_every_kind_of_head(family: str, tokenizer: Any, tmp_path: Path) -> None:
    report, _ = _compare(tokenizer, tmp_path, {}, family=family)
    assert report.policy.verdict == "checked"


@pytest.mark.parametrize("coefficient", [None, pytest.param(0.5, marks=pytest.mark.slow)])
def test_load_balancing_loss(coefficient: float | None, tokenizer: Any, tmp_path: Path) -> None:
    _, trainer = _compare(tokenizer, tmp_path, {"router_aux_loss_coef": coefficient}, family="mixtral")
    assert trainer.state.log_history[0]["aux_loss"] > 0


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adapter_with_a_frozen_head(checkpointing: bool, tokenizer: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    options = {"gradient_checkpointing": checkpointing}
    report, _ = _compare(tokenizer, tmp_path, options, peft=lora)
    assert not report.policy.trainable
    assert report.reference is None
    assert (report.products_before, report.products_after) == (4, 3)
    assert "adapter off" in str(report)


def test_bf16_autocast_reaches_policy_and_reference(tokenizer: Any, tmp_path: Path) -> None:
    # Both round the head's inputs to bf16; TRL also rounds the logits, at 2^-9 of values of a few units.
    _, trainer = _compare(tokenizer, tmp_path, {"bf16": True}, tolerance=2e-2)
    seen = []
    for model in (trainer.model, trainer.ref_model):
        model.base_model.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    trainer.evaluate()
    assert seen == [True, True]
    unfuse_trainer(trainer)
    trainer.evaluate()
    assert seen == [True] * 4


def test_evaluation_with_compute_metrics_still_receives_logits(tokenizer: Any, tmp_path: Path) -> None:
    shapes = []

    def metrics(prediction: Any) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {"seen": 1.0}

    trainer = _trainer(tokenizer, tmp_path, {}, compute_metrics=metrics)
    assert "compute_metrics" in str(fuse_trainer(trainer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert trainer.evaluate()["eval_seen"] == 1.0
    assert shapes[0][-1] == 200


def test_generation_and_saving_after_training(tokenizer: Any, tmp_path: Path) -> None:
    trainer = _trainer(tokenizer, tmp_path, {"max_steps": 1})
    fuse_trainer(trainer)
    trainer.train()
    ids = tokenizer("the import statement", return_tensors="pt").input_ids
    trainer.model.eval()
    generated = trainer.model.generate(ids, max_new_tokens=4, do_sample=False)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    assert torch.equal(loaded.generate(ids, max_new_tokens=4, do_sample=False), generated)


class TestFusing:
    def test_report(self, tokenizer: Any, tmp_path: Path) -> None:
        trainer = _trainer(tokenizer, tmp_path, {"use_weighting": True})
        report = fuse_trainer(trainer)
        assert (report.products_before, report.products_after, report.products_past_budget) == (5, 4, 5)
        assert "log_sum_sq_probs" in report.policy.outputs
        assert report.policy.differentiable == ("log_probs",)
        assert report.reference is not None
        assert report.reference.outputs == ("log_probs",)
        for words in ("DPOTrainer", "trainable head [200, 32]", "5 before, 4 now (5 where"):
            assert words in str(report)

    def test_twice_is_once_and_other_options_fuse_anew(self, tokenizer: Any, tmp_path: Path) -> None:
        trainer = _trainer(tokenizer, tmp_path, {})
        theirs = vars(trainer.model)["forward"], vars(trainer.ref_model)["forward"]
        report = fuse_trainer(trainer)
        ours = vars(trainer.model)["forward"]
        assert fuse_trainer(trainer) is report
        assert vars(trainer.model)["forward"] is ours
        assert fuse_trainer(trainer, strategy="recompute").policy.strategy == "recompute"
        unfuse_trainer(trainer)
        assert (vars(trainer.model)["forward"], vars(trainer.ref_model)["forward"]) == theirs
        with pytest.raises(ValueError, match="not fused"):
            unfuse_trainer(trainer)

    def test_other_trainers(self, tmp_path: Path) -> None:
        arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        with pytest.raises(
            TypeError, match=r"^trainer is a Trainer, of transformers .*fuse_model\(trainer\.model\)\.$"
        ):
            fuse_trainer(transformers.Trainer(tiny_model("llama"), arguments))
        with pytest.raises(TypeError, match="supported are, .*DPOTrainer"):
            fuse_trainer(object())
        with pytest.raises(TypeError, match="trainer is a NoneType; supported are"):
            unfuse_trainer(None)

    def test_flags(self, tokenizer: Any, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match="verify: got 'no' of type str, expected True or False"):
            fuse_trainer(_trainer(tokenizer, tmp_path, {}), verify="no")

    @pytest.mark.parametrize("installed", ["1.14.2", "2.0.0"])
    def test_versions(self, installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("liger_losses.integrations.trl.version", lambda name: installed)
        with pytest.raises(ImportError, match=installed):
            fuse_trainer(object())

    def test_after_training(self, tokenizer: Any, tmp_path: Path) -> None:
        trainer = _trainer(tokenizer, tmp_path, {"max_steps": 1})
        trainer.train()
        with pytest.raises(RuntimeError, match="before"):
            fuse_trainer(trainer)

    def test_all_or_nothing(self, tokenizer: Any, tmp_path: Path) -> None:
        trainer = _trainer(tokenizer, tmp_path, {})
        trainer.ref_model.lm_head.weight = torch.nn.Parameter(torch.zeros(200, 32, dtype=torch.int8), False)
        theirs = vars(trainer.model)["forward"]
        with pytest.raises(ValueError, match="quantised"):
            fuse_trainer(trainer)
        assert vars(trainer.model)["forward"] is theirs


def test_the_keyword_protocol_is_trls() -> None:
    """Names that a trainer reads off the answer exist in both; ours has what use_cache=True asks for besides."""
    from dataclasses import fields

    from liger_losses.integrations.transformers import FusedHeadOutput

    theirs = trl.trainer.utils.FusedCausalLMOutput
    assert {f.name for f in fields(FusedHeadOutput)} == {f.name for f in fields(theirs)} | {"cache"}


def _products_of_one_step(trainer: DPOTrainer) -> float:
    """Head products of a step's forward and backward, in units of 2 * scored tokens * hidden * vocabulary.

    The profiler sees the products inside custom operators too, which a dispatch mode does not.
    """
    inputs = next(iter(trainer.get_train_dataloader()))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        trainer.compute_loss(trainer.model, inputs).backward()
    operations = 0
    for event in profiler.events():
        first = {"aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1}.get(event.name)
        if first is not None:
            (rows, inner), (_, columns) = event.input_shapes[first : first + 2]
            operations += 2 * rows * inner * columns * (200 in (rows, inner, columns))
    return operations / (2 * int(inputs["completion_mask"][:, 1:].sum()) * 32 * 200)


@pytest.mark.parametrize("strategy", ["cached", "recompute"])
def test_products_are_those_of_the_report(strategy: str, tokenizer: Any, tmp_path: Path) -> None:
    native = _products_of_one_step(_trainer(tokenizer, tmp_path, {}))
    trainer = _trainer(tokenizer, tmp_path, {})
    report = fuse_trainer(trainer, strategy=strategy)
    assert _products_of_one_step(trainer) == report.products_after
    # On CPU TRL projects every token, prompt and padding too.
    assert native > report.products_before >= report.products_after


def test_products_with_a_frozen_head(tokenizer: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = _trainer(tokenizer, tmp_path, {}, peft=peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert _products_of_one_step(trainer) > fuse_trainer(trainer).products_before
    assert _products_of_one_step(trainer) == fuse_trainer(trainer).products_after == 3
