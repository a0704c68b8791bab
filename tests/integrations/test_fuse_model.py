"""`fuse_model`: a model's loss of its labels without the logits, in plain calls and in `transformers.Trainer`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from liger_losses.integrations.transformers import FusedLossOutput, fuse_model, unfuse_head

from .runs import assert_same, record_head_calls, run
from .tiny import FAMILIES, tiny_model


def _batch(rows: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 200, (rows, 12), generator=generator)
    labels = ids.clone()
    labels[:, :4] = -100
    return {"input_ids": ids, "labels": labels}


def _gradients(model: Any, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 7}], ids=["mean", "items"])
def test_loss_and_gradients_are_the_models_own(family: str, more: dict[str, Any]) -> None:
    model, batch = tiny_model(family), {**_batch(), **more}
    own_loss, own = _gradients(model, **batch)
    assert fuse_model(model).verified
    calls = []
    model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    loss, gradients = _gradients(model, **batch)
    assert not calls
    torch.testing.assert_close(loss, own_loss, rtol=0, atol=1e-5)
    for name in own:
        torch.testing.assert_close(gradients[name], own[name], rtol=1e-4, atol=1e-6)


def test_shifted_labels_positional_arguments_and_ignore_index() -> None:
    model, batch = tiny_model(), _batch()
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    ignored = batch["labels"].masked_fill(batch["labels"] == -100, 5)
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (
            (batch["input_ids"],),
            {"labels": batch["labels"], "shift_labels": shifted, "num_items_in_batch": torch.tensor(9)},
        ),
        ((batch["input_ids"], None, None, None, None, batch["labels"]), {}),
        ((batch["input_ids"],), {"labels": ignored, "ignore_index": 5}),
    ]
    expected = [model(*args, **kwargs).loss for args, kwargs in inputs]
    fuse_model(model)
    for (args, kwargs), value in zip(inputs, expected, strict=True):
        answer = model(*args, **kwargs)
        assert isinstance(answer, FusedLossOutput)
        torch.testing.assert_close(answer.loss, value, rtol=0, atol=1e-5)


def test_experts_loss_is_part_of_the_loss_and_told_apart() -> None:
    model, batch = tiny_model("mixtral"), _batch()
    own = model(**batch)
    fuse_model(model)
    fused = model(**batch)
    torch.testing.assert_close(fused.aux_loss, own.aux_loss)
    torch.testing.assert_close(fused.loss, own.loss, rtol=0, atol=1e-5)


def test_logits_when_asked() -> None:
    model, batch = tiny_model(), _batch()
    own = model(**batch)
    fuse_model(model)
    assert model(**batch).logits is None
    assert torch.equal(model(**batch, return_logits=True).logits, own.logits)
    assert torch.equal(model(input_ids=batch["input_ids"]).logits, own.logits)
    model.eval()
    assert model(**batch).logits is None
    unfuse_head(model)
    assert torch.equal(model(**batch).logits, own.logits)
    fuse_model(model, logits_in_eval=True)
    assert torch.equal(model(**batch).logits, own.logits)
    assert model(**batch, return_logits=False).logits is None
    model.train()
    assert model(**batch).logits is None


def test_generation_and_copies() -> None:
    model, batch = tiny_model(), _batch()
    expected = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
    fuse_model(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.generate(batch["input_ids"], max_new_tokens=4, do_sample=False), expected)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert twin(**batch).loss.item() == pytest.approx(torch.tensor(200.0).log().item())
    assert model(**batch).loss != twin(**batch).loss


def test_all_masked_batch_gives_a_differentiable_zero() -> None:
    model, batch = tiny_model(), _batch()
    fuse_model(model)
    loss = model(input_ids=batch["input_ids"], labels=torch.full_like(batch["labels"], -100)).loss
    loss.backward()
    assert loss == 0


class TestRefused:
    @pytest.mark.parametrize("name", ["label_smoothing", "output_hidden_states", "logits_to_keep"])
    def test_inputs(self, name: str) -> None:
        model = tiny_model()
        fuse_model(model)
        with pytest.raises(ValueError, match=name):
            model(**_batch(), **{name: 1})

    def test_a_loss_of_another_kind(self) -> None:
        def focal_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
            raise AssertionError

        model = tiny_model()
        model.loss_function = focal_loss
        with pytest.raises(ValueError, match="computes focal_loss"):
            fuse_model(model)

    def test_a_forward_that_adds_to_its_loss(self) -> None:
        class Regularised(transformers.LlamaForCausalLM):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                answer = super().forward(*args, **kwargs)
                if answer.loss is not None:
                    answer.loss = answer.loss + 1.0
                return answer

        plain = tiny_model()
        model = Regularised(plain.config)
        with pytest.raises(ValueError, match="fused loss of 18 random tokens differ"):
            fuse_model(model)
        assert "forward" not in vars(model)
        assert "loss" in model(**_batch())
        assert model.training == plain.training


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "smoothed by the trainer": {"label_smoothing_factor": 0.1},
}


def _trainer(folder: Path, options: dict[str, Any], fuse: bool, family: str = "llama", **more: Any) -> Any:
    batch = _batch(24)
    rows = [
        {"input_ids": ids, "labels": labels} for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    for i, row in enumerate(rows):  # so that micro-batches differ in their number of scored tokens
        row["labels"] = row["labels"].clone()
        row["labels"][: 4 + i % 7] = -100
    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 1e-3,
        "logging_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, **options,
    }  # fmt: skip
    model = tiny_model(family)
    if fuse:
        fuse_model(model, logits_in_eval="compute_metrics" in more)
    return transformers.Trainer(
        model, transformers.TrainingArguments(**settings), train_dataset=rows, eval_dataset=rows[:4], **more
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_three_steps_of_trainer_equal_its_own(name: str, tmp_path: Path) -> None:
    expected = run(_trainer(tmp_path / "native", OPTIONS[name], fuse=False))
    trainer = _trainer(tmp_path / "fused", OPTIONS[name], fuse=True)
    calls = record_head_calls(trainer)
    assert_same(run(trainer), expected, 1e-5)
    assert bool(calls) == ("smoothed" in name)  # Trainer keeps the labels from the model and smooths full logits


def test_trainer_with_experts(tmp_path: Path) -> None:
    expected = run(_trainer(tmp_path / "native", {}, fuse=False, family="mixtral"))
    assert_same(run(_trainer(tmp_path / "fused", {}, fuse=True, family="mixtral")), expected, 1e-5)


def test_trainer_with_compute_metrics(tmp_path: Path) -> None:
    shapes = []

    def metrics(prediction: Any) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {"seen": 1.0}

    trainer = _trainer(tmp_path, {"max_steps": 1}, fuse=True, compute_metrics=metrics)
    trainer.train()
    assert trainer.evaluate()["eval_seen"] == 1.0
    assert shapes == [(4, 12, 200)]
