"""LoRA and DoRA on the output head, inside the fused loss, against the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from liger_losses.integrations.transformers import fuse_head, fuse_model, unfuse_head

from .tiny import tiny_model

peft = pytest.importorskip("peft")


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 200, (3, 12), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def _adapted(model: Any, targets: tuple[str, ...] = ("q_proj", "lm_head"), **options: Any) -> Any:
    transformers.set_seed(3)
    options = {"r": 4, "lora_alpha": 12, "init_lora_weights": False, "target_modules": list(targets), **options}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def _loss_and_gradients(model: Any, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    transformers.set_seed(5)  # of the dropout
    loss = model(**_batch(), **more).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _assert_fused_is_own(model: Any, **fused: Any) -> None:
    own_loss, own = _loss_and_gradients(model)
    fuse_head(model)
    calls = []
    model.get_base_model().get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    loss, gradients = _loss_and_gradients(model, fused_lm_head=True)
    assert not calls
    torch.testing.assert_close(loss, own_loss, rtol=0, atol=1e-5)
    assert gradients.keys() == own.keys()
    assert any("lm_head" in name for name in own)
    for name in own:
        torch.testing.assert_close(gradients[name], own[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"lora_dropout": 0.4},
        {"lora_bias": True},
        {"use_dora": True},
        {"modules_to_save": ["embed_tokens"]},
        {"targets": ("lm_head",)},
    ],
    ids=str,
)
def test_loss_and_gradients_are_the_models_own(options: dict[str, Any]) -> None:
    model = _adapted(tiny_model(), **options)
    model.train()
    _assert_fused_is_own(model)


@pytest.mark.parametrize("family", ["llama_tied", "gemma2", "cohere", "granite"])
def test_every_kind_of_head(family: str) -> None:
    _assert_fused_is_own(_adapted(tiny_model(family)))


def test_a_one_layer_qwen2() -> None:
    config = transformers.Qwen2Config(
        vocab_size=200, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    transformers.set_seed(0)
    _assert_fused_is_own(_adapted(transformers.Qwen2ForCausalLM(config)))


def test_two_adapters_at_once() -> None:
    model = _adapted(tiny_model())
    transformers.set_seed(4)
    second = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    model.add_adapter("second", second)
    model.base_model.set_adapter(["default", "second"])
    _assert_fused_is_own(model)


def test_switched_off_and_merged() -> None:
    model, batch = _adapted(tiny_model()), _batch()
    fuse_head(model)
    with model.disable_adapter():
        torch.testing.assert_close(model(**batch, fused_lm_head=True).loss, model(**batch).loss)
    model.merge_adapter()
    torch.testing.assert_close(model(**batch, fused_lm_head=True).loss, model(**batch).loss)
    model.unmerge_adapter()
    torch.testing.assert_close(model(**batch, fused_lm_head=True).loss, model(**batch).loss)


def test_put_on_the_head_after_fusing() -> None:
    plain, batch = tiny_model(), _batch()
    fuse_head(plain)
    model = _adapted(plain)
    torch.testing.assert_close(model(**batch, fused_lm_head=True).loss, model(**batch).loss)


@pytest.mark.parametrize("dora", [False, True])
def test_bf16_base_with_fp32_adapters(dora: bool) -> None:
    model = _adapted(tiny_model().to(torch.bfloat16), use_dora=dora)
    assert model.get_base_model().lm_head.lora_B["default"].weight.dtype == torch.float32
    own_loss, own = _loss_and_gradients(model)
    fuse_model(model)
    loss, gradients = _loss_and_gradients(model)
    torch.testing.assert_close(loss.float(), own_loss.float(), rtol=2e-2, atol=0)
    for name, value in own.items():
        assert gradients[name].dtype == value.dtype
        assert (
            torch.nn.functional.cosine_similarity(gradients[name].flatten().float(), value.flatten().float(), 0) > 0.99
        )


def _weight_products(model: Any) -> float:
    """Products with the head's weight, its gradient included, in units of 2 * scored tokens * hidden * vocabulary."""
    batch = _batch()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        model(**batch, fused_lm_head=True).loss.backward()
    operations = 0
    for event in profiler.events():
        first = {"aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1}.get(event.name)
        if first is not None:
            (rows, inner), (_, columns) = event.input_shapes[first : first + 2]
            operations += 2 * rows * inner * columns * (200 in (rows, inner, columns))
    return operations / (2 * int((batch["labels"][:, 1:] != -100).sum()) * 32 * 200)


def test_products() -> None:
    # What docs/trl.md says: W is frozen, and its gradient's product is done all the same, r columns wider.
    model = _adapted(tiny_model())
    fuse_head(model, strategy="cached")
    assert _weight_products(model) == pytest.approx(3 * (32 + 4) / 32)
    unfuse_head(model)
    frozen = _adapted(tiny_model(), targets=("q_proj",))
    fuse_head(frozen)
    assert _weight_products(frozen) == 2


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"use_dora": True, "lora_dropout": 0.1}, "DoRA with dropout"),
            ({"arrow_config": None, "alora_invocation_tokens": [3]}, "LoRA variant ALoraLinearVariant"),
        ],
    )
    def test_variants(self, options: dict[str, Any], message: str) -> None:
        if "alora_invocation_tokens" in options:
            options = {**options, "task_type": "CAUSAL_LM"}
        with pytest.raises(ValueError, match=message):
            fuse_head(_adapted(tiny_model(), **options))

    def test_dora_beside_another(self) -> None:
        model = _adapted(tiny_model(), use_dora=True)
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["lm_head"]))
        model.base_model.set_adapter(["default", "second"])
        with pytest.raises(ValueError, match="beside another active adapter"):
            fuse_head(model)

    def test_other_kinds(self) -> None:
        config = peft.LoHaConfig(r=2, target_modules=["lm_head"])
        with pytest.raises(ValueError, match="only LoRA and DoRA"):
            fuse_head(peft.get_peft_model(tiny_model(), config))
