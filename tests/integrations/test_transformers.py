"""The fused head of one model against the model's own logits."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import transformers

from liger_losses.integrations.transformers import FusedHeadOutput, fuse_head, fuse_model, unfuse_head

from .tiny import FAMILIES, tiny_model

ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 200, (3, 12), generator=generator)
    attention = torch.ones_like(ids)
    attention[2, 9:] = 0
    labels = ids.masked_fill(attention == 0, -100)
    labels[:, :4] = -100
    return {"input_ids": ids, "attention_mask": attention, "labels": labels}


def _expected(logits: torch.Tensor, target: torch.Tensor, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    z = logits.double() / temperature
    logp = z.log_softmax(-1)
    mask = target != -100
    picked = logp.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    fields = {
        "log_probs": picked,
        "entropy": -(logp.exp() * logp).sum(-1),
        "log_sum_sq_probs": (2 * logp).logsumexp(-1),
        "mean_logits": z.mean(-1),
    }
    fields = {name: value * mask for name, value in fields.items()}
    return {**fields, "is_top1": (z.argmax(-1) == target) & mask, "label_mask": mask}


def _assert_fields(output: FusedHeadOutput, expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        seen = getattr(output, name)
        assert seen.shape == value.shape, name
        if value.dtype == torch.bool:
            assert seen.dtype == torch.bool
            assert torch.equal(seen, value), name
        else:
            torch.testing.assert_close(seen, value.to(seen.dtype), rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_and_loss_equal_the_models_own(family: str) -> None:
    model, batch = tiny_model(family), _batch()
    own = model(**batch)
    own_loss = own.loss
    own_loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    head = fuse_head(model, outputs=ALL)
    assert head.verdict == "checked"
    calls = []
    model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    fused = model(**batch, fused_lm_head=True)
    _assert_fields(fused, _expected(own.logits[:, :-1], batch["labels"][:, 1:]))
    torch.testing.assert_close(fused.loss, own_loss.detach(), rtol=0, atol=1e-5)
    assert not calls
    fused.loss.backward()
    assert gradients
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


def test_router_loss_is_the_models_own() -> None:
    model, batch = tiny_model("mixtral"), _batch()
    own = model(**batch)
    fuse_head(model)
    fused = model(**batch, fused_lm_head=True)
    torch.testing.assert_close(fused.aux_loss, own.aux_loss)
    assert fused.aux_loss > 0
    without = model(**batch, fused_lm_head=True, output_router_logits=False)
    assert without.aux_loss is None
    torch.testing.assert_close(fused.loss - without.loss, 0.1 * own.aux_loss)


def test_router_loss_of_an_unknown_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral")
    fuse_head(model)
    monkeypatch.delattr(inspect.getmodule(type(model)), "load_balancing_loss_func")
    with pytest.raises(ValueError, match="load-balancing"):
        model(**_batch(), fused_lm_head=True)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_temperature_divides_after_scale_and_cap(family: str) -> None:
    model, batch = tiny_model(family), _batch()
    logits = model(**batch).logits
    fuse_head(model, outputs=ALL, temperature=0.7)
    _assert_fields(model(**batch, fused_lm_head=True), _expected(logits[:, :-1], batch["labels"][:, 1:], 0.7))


def test_shifted_labels_positional_ids_and_item_count() -> None:
    model, batch = tiny_model(), _batch()
    logits = model(**batch).logits
    fuse_head(model)
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    items = torch.tensor(7)
    fused = model(
        batch["input_ids"], batch["attention_mask"], shift_labels=shifted, num_items_in_batch=items, fused_lm_head=True
    )
    expected = _expected(logits, shifted)
    _assert_fields(fused, {"log_probs": expected["log_probs"], "label_mask": expected["label_mask"]})
    torch.testing.assert_close(fused.loss, -expected["log_probs"].sum().float() / 7)
    for name in ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "aux_loss"):
        assert getattr(fused, name) is None


def test_all_masked_batch_gives_a_differentiable_zero() -> None:
    model, batch = tiny_model(), _batch()
    fuse_head(model)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = model(**batch, fused_lm_head=True).loss
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_entropy_gradient_only_when_differentiable() -> None:
    model, batch = tiny_model(), _batch()
    fuse_head(model, outputs=("entropy",))
    assert model(**batch, fused_lm_head=True).entropy.requires_grad
    unfuse_head(model)
    fuse_head(model, outputs=("entropy",), differentiable=("log_probs",))
    fused = model(**batch, fused_lm_head=True)
    assert not fused.entropy.requires_grad
    assert fused.log_probs.requires_grad


def test_without_the_keyword_nothing_changes() -> None:
    model, batch = tiny_model(), _batch()
    signature, own = inspect.signature(model.forward), model(**batch)
    generated = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
    fuse_head(model)
    again = model(**batch)
    assert torch.equal(again.logits, own.logits)
    assert torch.equal(again.loss, own.loss)
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False), generated)
    unfuse_head(model)
    assert "forward" not in vars(model)
    with pytest.raises(ValueError, match="no fused head"):
        unfuse_head(model)


def test_a_deep_copy_calls_its_own_parts() -> None:
    model, batch = tiny_model(), _batch()
    fuse_head(model)
    twin = copy.deepcopy(model)
    before = model(**batch, fused_lm_head=True).log_probs
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    torch.testing.assert_close(model(**batch, fused_lm_head=True).log_probs, before)
    mask = batch["labels"][:, 1:] != -100
    flat = torch.full_like(before, -torch.tensor(200.0).log().item()) * mask
    torch.testing.assert_close(twin(**batch, fused_lm_head=True).log_probs, flat)


def test_a_trl_head_is_replaced_not_stacked_upon() -> None:
    trainer_module = pytest.importorskip("trl.trainer")
    model, batch = tiny_model(), _batch()
    trainer_module.add_fused_lm_head(model)
    theirs = vars(model)["forward"]
    fuse_head(model)
    assert isinstance(model(**batch, fused_lm_head=True), FusedHeadOutput)
    assert model._liger_fused_head.beneath is None
    unfuse_head(model)
    assert vars(model)["forward"] is theirs


@pytest.mark.slow
def test_compiles_to_one_graph() -> None:
    torch._dynamo.reset()  # what another test's graph breaks made torch skip
    model, batch = tiny_model(), _batch()
    fuse_head(model, outputs=ALL, differentiable=("log_probs",))
    expected = model(**batch, fused_lm_head=True)
    expected.loss.backward()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    seen = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch, fused_lm_head=True)
    torch.testing.assert_close(seen.log_probs, expected.log_probs)
    seen.loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, gradient)


def test_backbone_receives_every_other_input(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model(), _batch()
    seen: dict[str, Any] = {}
    own = type(model.model).forward

    def backbone(self: Any, *args: Any, pixel_values: Any = None, **kwargs: Any) -> Any:
        seen.update(kwargs, pixel_values=pixel_values)
        return own(self, *args, **kwargs)

    fuse_head(model)
    monkeypatch.setattr(type(model.model), "forward", backbone)
    pixels = torch.ones(1)
    model(**batch, pixel_values=pixels, use_cache=True, fused_lm_head=True)
    assert seen["pixel_values"] is pixels
    assert seen["use_cache"] is True
    assert "labels" not in seen


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"outputs": ("logits",)}, "outputs has"),
            ({"temperature": 0.0}, "temperature: got 0.0, expected"),
            ({"differentiable": ("entropy",)}, "differentiable has"),
            ({"outputs": ("is_top1",), "differentiable": ("is_top1",)}, "differentiable has"),
        ],
    )
    def test_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            fuse_head(tiny_model(), **options)

    def test_twice(self) -> None:
        model = tiny_model()
        fuse_head(model)
        with pytest.raises(RuntimeError, match="already"):
            fuse_head(model)

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ({"labels": None}, "needs labels"),
            ({"logits_to_keep": 1}, "logits_to_keep"),
            ({"output_hidden_states": True}, "output_hidden_states"),
            ({"return_dict": False}, "return_dict"),
        ],
    )
    def test_inputs(self, inputs: dict[str, Any], message: str) -> None:
        model = tiny_model()
        fuse_head(model)
        with pytest.raises(ValueError, match=message):
            model(**{**_batch(), **inputs}, fused_lm_head=True)

    def test_a_head_that_does_more_than_its_weight(self) -> None:
        class Doubled(torch.nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return 2 * super().forward(x)

        model = tiny_model()
        model.set_output_embeddings(Doubled(32, 200, bias=False))
        with pytest.raises(ValueError, match="cannot be fused"):
            fuse_head(model)
        assert "forward" not in vars(model)
        assert "forward" not in vars(model.model)

    @pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
    def test_logits_that_the_config_does_not_tell_of(self, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = {"softcap": None, "logit_scale": 1.0}
        monkeypatch.setattr("liger_losses.integrations.transformers.head_options", lambda config: plain)
        with pytest.raises(ValueError, match="softcap"):
            fuse_head(tiny_model(family))

    def test_quantised_head(self) -> None:
        model = tiny_model()
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(200, 32, dtype=torch.int8), requires_grad=False)
        with pytest.raises(ValueError, match="quantised"):
            fuse_head(model)


class TestPeft:
    def _lora(self, model: Any, **options: Any) -> Any:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", *options.pop("also", [])], init_lora_weights=False, **options
        )
        return peft.get_peft_model(model, config)

    def test_frozen_head(self) -> None:
        model, batch = self._lora(tiny_model()), _batch()
        logits = model(**batch).logits
        assert not fuse_head(model).trainable
        fused = model(**batch, fused_lm_head=True)
        _assert_fields(fused, {"log_probs": _expected(logits[:, :-1], batch["labels"][:, 1:])["log_probs"]})
        fused.loss.backward()
        assert all(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if "lora" in n)
        assert model.get_base_model().lm_head.weight.grad is None

    def test_head_in_modules_to_save(self) -> None:
        model, batch = self._lora(tiny_model(), modules_to_save=["lm_head"]), _batch()
        copied = model.get_base_model().lm_head.modules_to_save["default"]
        with torch.no_grad():
            copied.weight.mul_(0.5)
        assert fuse_head(model).trainable
        for context in (torch.enable_grad(), model.disable_adapter()):
            with context:
                expected = _expected(model(**batch).logits[:, :-1], batch["labels"][:, 1:])["log_probs"]
                _assert_fields(model(**batch, fused_lm_head=True), {"log_probs": expected})
        model(**batch, fused_lm_head=True).loss.backward()
        assert copied.weight.grad.any()


def test_a_vision_language_model_sees_its_pictures() -> None:
    common = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**common, image_size=8, patch_size=4, projection_dim=32),
        text_config=transformers.LlamaConfig(**common, vocab_size=200, num_key_value_heads=2, initializer_range=0.2),
        image_token_index=199,
        image_token_id=199,
    )
    transformers.set_seed(0)
    model = transformers.LlavaForConditionalGeneration(config)
    ids = torch.cat([torch.full((2, 4), 199), torch.arange(3, 13).view(2, 5)], dim=1)
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == 199, -100), "attention_mask": torch.ones_like(ids)}
    pictures = torch.randn(2, 2, 3, 8, 8)
    for pixels in pictures:
        own = model(**batch, pixel_values=pixels)
        assert fuse_head(model).verdict == "checked"
        fused = model(**batch, pixel_values=pixels, fused_lm_head=True)
        unfuse_head(model)
        torch.testing.assert_close(fused.loss, own.loss, rtol=0, atol=1e-5)
        own_gradient = torch.autograd.grad(own.loss, model.model.multi_modal_projector.linear_1.weight)
        gradient = torch.autograd.grad(fused.loss, model.model.multi_modal_projector.linear_1.weight)
        torch.testing.assert_close(gradient, own_gradient, rtol=1e-4, atol=1e-6)
    seen = [model(**batch, pixel_values=pixels).loss for pixels in pictures]
    assert not torch.isclose(*seen)
    fuse_model(model)
    for pixels, own_loss in zip(pictures, seen, strict=True):
        answer = model(**batch, pixel_values=pixels)
        assert answer.logits is None
        torch.testing.assert_close(answer.loss, own_loss, rtol=0, atol=1e-5)
