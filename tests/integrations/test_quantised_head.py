"""Heads of bitsandbytes, in 4 and 8 bits: the numbers of the layer's own forward, at the products of a frozen head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

import bitsandbytes

from liger_losses.integrations.transformers import fuse_head, unfuse_head

from .tiny import tiny_model

KINDS = ("nf4", "fp4", "int8")
IDS = torch.randint(3, 200, (2, 9), generator=torch.Generator().manual_seed(0))


def _quantised(kind: str, family: str = "llama") -> Any:
    model = tiny_model(family)
    weight = model.lm_head.weight.detach().clone()
    if kind == "int8":
        head = bitsandbytes.nn.Linear8bitLt(32, 200, bias=False, has_fp16_weights=False)
        head.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        head = bitsandbytes.nn.Linear4bit(32, 200, bias=False, compute_dtype=torch.float32, quant_type=kind)
        head.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type=kind)
    model.lm_head = head.to("cpu")
    return model


def _compare(model: Any, tolerance: float = 1e-5) -> None:
    """Log-probabilities and every gradient, the head's own and the fused."""
    labels = IDS.clone()
    labels[:, :3] = -100
    scored = labels[:, 1:] != -100
    seen = []
    for fused in (False, True):
        if fused:
            log_probs = model(input_ids=IDS, labels=labels, fused_lm_head=True).log_probs
        else:
            logits = model(input_ids=IDS).logits[:, :-1].float()
            log_probs = logits.log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0] * scored
        model.zero_grad()
        (log_probs * torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)).sum().backward()
        seen.append((log_probs.detach(), [p.grad for p in model.parameters() if p.requires_grad]))
    torch.testing.assert_close(seen[1], seen[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "family"), [("nf4", "llama"), ("nf4", "gemma2"), ("fp4", "llama"), ("int8", "llama")]
)  # without a gradient the 8-bit layer rounds its inputs too, beyond what the check allows under a softcap of 2
def test_it_is_the_layers_own_forward(kind: str, family: str) -> None:
    model = _quantised(kind, family)
    head = fuse_head(model)
    assert (head.vocabulary, head.hidden, head.trainable) == (200, 32, False)
    assert head.verdict == "checked"
    assert head.verified
    _compare(model)
    unfuse_head(model)


def test_products(counted_flops: Callable[[], float]) -> None:
    model = _quantised("nf4")
    fuse_head(model)
    hidden = model.model(input_ids=IDS).last_hidden_state.detach().requires_grad_()
    model.model.forward = lambda **_: type("Output", (), {"last_hidden_state": hidden})
    counted_flops()
    model(input_ids=IDS, labels=IDS, fused_lm_head=True).loss.backward()
    assert counted_flops() == 2 * 2 * IDS[:, 1:].numel() * 32 * 200


@pytest.mark.parametrize("kind", KINDS)
def test_lora_on_it(kind: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(_quantised(kind), config)
    model.train()
    head = fuse_head(model)
    assert head.adapter
    assert head.trainable
    _compare(model)
    assert model.get_base_model().lm_head.lora_B["default"].weight.grad.any()


def test_a_head_that_is_not_packed_yet() -> None:
    model = tiny_model()
    head = bitsandbytes.nn.Linear4bit(32, 200, bias=False, compute_dtype=torch.float32)
    head.weight.data = torch.zeros(3200, 1, dtype=torch.uint8)
    head.weight.quant_state = None
    model.lm_head = head
    with pytest.raises(ValueError, match="on the device that they are quantised on"):
        fuse_head(model)
