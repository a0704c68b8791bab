"""`fuse_model`: a model's loss of its labels without the logits, in plain calls and in `transformers.Trainer`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from liger_losses.integrations.transformers import FusedLossOutput, fuse_head, fuse_model, unfuse_head

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
    assert str(loss.item()) == "0.0"


# Two sequences in a row, as a data collator for packed rows marks them, and one.
POSITIONS = {
    "packed": [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6],
    "one": list(range(12)),
    "none": None,
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_is_said_of_a_cache_the_loss_is_the_models_own(family: str, positions: str) -> None:
    """transformers reads packed sequences off their positions where there is neither a mask nor a cache."""
    model, batch = tiny_model(family), _batch()
    calls: list[dict[str, Any]] = []
    padded = torch.ones_like(batch["input_ids"])
    padded[0, :3] = 0
    for mask in (None, torch.ones_like(padded), padded):
        for use_cache in (None, True, False):
            told = {"attention_mask": mask, "use_cache": use_cache}
            if POSITIONS[positions] is not None:
                told["position_ids"] = torch.tensor([POSITIONS[positions]]).expand(3, -1)
            calls.append({**batch, **{name: value for name, value in told.items() if value is not None}})
    with torch.no_grad():
        own = [model(**call) for call in calls]
        fuse_model(model)
        for call, expected in zip(calls, own, strict=True):
            answer, whole = model(**call), model(**call, return_logits=True)
            scored = model(**call, fused_lm_head=True)
            for loss in (answer.loss, whole.loss, scored.loss):
                torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-5)
            assert answer.logits is None
            own_cache = getattr(expected, "past_key_values", None)  # RecurrentGemma keeps its states to itself
            wanted = call.get("use_cache") is True and own_cache is not None
            for cached in (answer.past_key_values, scored.past_key_values):
                assert (cached is not None) == wanted
                if wanted:
                    assert cached.get_seq_length() == own_cache.get_seq_length() == 12
    if positions == "packed":  # the case is one: it depends on the cache what the model's own loss is
        assert own[0].loss != own[2].loss
        assert own[0].loss == own[1].loss


def test_a_cache_is_used_and_made_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model(), _batch()
    ids = batch["input_ids"]
    with torch.no_grad():
        first = model(ids[:, :7], use_cache=True).past_key_values
    expected = model(input_ids=ids[:, 7:], labels=batch["labels"][:, 7:], past_key_values=copy.deepcopy(first)).loss
    fuse_model(model)
    loss = model(input_ids=ids[:, 7:], labels=batch["labels"][:, 7:], past_key_values=first).loss
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    assert first.get_seq_length() == 12
    made: list[int] = []
    monkeypatch.setattr(transformers.DynamicCache, "update", lambda *_: made.append(1))
    model(**batch)
    model(**batch, attention_mask=torch.ones_like(ids), position_ids=torch.arange(12)[None])
    assert not made


def test_the_rest_of_the_models_answer() -> None:
    model, batch = tiny_model(), _batch()
    own = model(**batch)
    fuse_model(model)
    answer = model(**batch)
    assert list(answer) == ["loss"]
    for name in (*own, "past_key_values", "hidden_states", "attentions", "router_logits", "aux_loss"):
        assert name == "loss" or getattr(answer, name) is None


def test_a_compiled_model_is_fused_inside_its_wrapper() -> None:
    model, batch = tiny_model(), _batch()
    own = model(**batch).loss
    compiled = torch.compile(model, backend="eager")
    compiled(**batch)
    head = fuse_model(compiled)
    assert (head.model, head.verdict, head.verified) == ("LlamaForCausalLM", "checked", True)
    answer = compiled(**batch)
    assert answer.logits is None
    torch.testing.assert_close(answer.loss, own, rtol=0, atol=1e-5)
    unfuse_head(compiled)
    assert compiled(**batch).logits is not None


class TestRefused:
    def test_label_smoothing(self) -> None:
        model = tiny_model()
        fuse_model(model)
        with pytest.raises(ValueError, match="label_smoothing"):
            model(**_batch(), label_smoothing=0.1)

    @pytest.mark.parametrize(
        "more",
        [{"output_hidden_states": True}, {"output_attentions": True}, {"return_dict": False}, {"logits_to_keep": 2}],
        ids=lambda more: next(iter(more)),
    )
    def test_other_answers_are_the_models_own_with_return_logits(self, more: dict[str, Any]) -> None:
        model, batch = tiny_model(), _batch()
        inputs = {**batch, **more, "labels": batch["labels"][:, -2:]} if "logits_to_keep" in more else {**batch, **more}
        own = model(**inputs)
        fuse_model(model)
        with pytest.raises(ValueError, match=rf"{next(iter(more))}: got .* expected .*return_logits=True beside it"):
            model(**inputs)
        answer = model(**inputs, return_logits=True)
        assert type(answer) is type(own)
        assert len(answer) == len(own)
        torch.testing.assert_close(answer[1], own[1])

    def test_other_answers_asked_for_by_the_config(self) -> None:
        model, batch = tiny_model(), _batch()
        model.config.output_hidden_states = True
        with pytest.raises(ValueError, match=r"config\.output_hidden_states: got True, .* expected False"):
            fuse_model(model)
        assert model(**batch).hidden_states is not None
        fuse_model(model, verify=False)
        assert model(**batch, output_hidden_states=False).hidden_states is None
        assert model(**batch, return_logits=True).hidden_states is not None
        model.config.return_dict = False
        with pytest.raises(ValueError, match="return_dict: got False"):
            model(**batch, fused_lm_head=True)

    def test_a_loss_set_afterwards(self) -> None:
        model = tiny_model()
        fuse_model(model)
        model.loss_function = lambda *args, **kwargs: torch.zeros(())
        with pytest.raises(RuntimeError, match=r"loss_function was set after fuse_model\(model\)"):
            model(**_batch())
        assert model(**_batch(), return_logits=True).loss == 0

    @pytest.mark.parametrize(
        ("family", "change"),
        [("gemma2", {"final_logit_softcapping": 1.0}), ("gemma2", {"final_logit_softcapping": None}),
         ("granite", {"logits_scaling": 2.0})],
    )  # fmt: skip
    def test_a_config_changed_afterwards(self, family: str, change: dict[str, Any]) -> None:
        model, batch = tiny_model(family), _batch()
        fuse_model(model)
        model(**batch)
        for name, value in change.items():
            setattr(model.config, name, value)
        for asked in ({}, {"fused_lm_head": True}, {"linear_logits": True}):
            with pytest.raises(RuntimeError, match=r"the config of .* says .* of its logits, and said .* was fused"):
                model(**batch, **asked)
        assert model(**batch, return_logits=True).logits is not None
        unfuse_head(model)
        own = model(**batch).loss
        fuse_model(model)
        torch.testing.assert_close(model(**batch).loss, own, rtol=0, atol=1e-5)

    def test_verified_in_evaluation_mode_too(self) -> None:
        class Shifted(transformers.LlamaForCausalLM):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                answer = super().forward(*args, **kwargs)
                if answer.loss is not None:
                    answer.loss = answer.loss + 1.0
                return answer

        with pytest.raises(ValueError, match="fused loss of 18 random tokens differ"):
            fuse_model(Shifted(tiny_model().config), logits_in_eval=True)

    @pytest.mark.parametrize("function", [fuse_model, fuse_head, unfuse_head])
    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (None, "model: got None of type NoneType, expected a causal language model"),
            ("gpt2", "model: got 'gpt2' of type str, expected a causal language model"),
            (transformers.LlamaForCausalLM, "model: got the class LlamaForCausalLM, expected an instance of it"),
            (torch.nn.Linear(2, 2), "model: got a Linear, expected a causal language model"),
            (
                torch.nn.DataParallel(tiny_model()),
                "model: got a DataParallel around a LlamaForCausalLM, .* before wrapping",
            ),
        ],
        ids=["None", "name", "class", "linear", "wrapped"],
    )
    def test_what_is_no_model(self, function: Any, model: Any, message: str) -> None:
        with pytest.raises(TypeError, match=message):
            function(model)

    @pytest.mark.parametrize(
        ("function", "name"),
        [(fuse_model, "verify"), (fuse_model, "logits_in_eval"), (fuse_head, "verify"), (fuse_head, "fp32"),
         (fuse_head, "mean_logits_everywhere")],
    )  # fmt: skip
    def test_flags(self, function: Any, name: str) -> None:
        with pytest.raises(TypeError, match=f"{name}: got 'no' of type str, expected True or False"):
            function(tiny_model(), **{name: "no"})

    def test_return_logits(self) -> None:
        model = tiny_model()
        fuse_model(model)
        with pytest.raises(TypeError, match="return_logits: got 'no' of type str, expected True or False"):
            model(**_batch(), return_logits="no")

    @pytest.mark.parametrize("name", ["outputs", "differentiable"])
    @pytest.mark.parametrize("value", ["entropy", 3])
    def test_names(self, name: str, value: Any) -> None:
        with pytest.raises(TypeError, match=f"{name}: got {value!r} of type .*, expected a tuple of names"):
            fuse_head(tiny_model(), **{name: value})

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
