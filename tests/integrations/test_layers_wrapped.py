"""`fuse_layers` on models that others have changed before: quantised, with adapters, compiled, with tied weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from liger_losses.integrations import transformers as entry  # noqa: E402
from liger_losses.integrations.layers import fuse_layers, unfuse_layers  # noqa: E402

from .test_layers import IDS, build, distance, run  # noqa: E402


def check_same(model: Any, replaced: int = 9) -> None:
    """Logits and gradients before and after, of whatever has a gradient; and back."""
    logits, gradients = run(model)
    assert gradients
    names, report = list(model.state_dict()), fuse_layers(model)
    assert report.replaced.total() == replaced
    assert not report.refused
    fused, fused_gradients = run(model)
    assert distance(fused, logits) < 1e-5
    assert fused_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert distance(fused_gradients[name], gradient) < 3e-5, name
    assert list(model.state_dict()) == names
    assert unfuse_layers(model) > 0
    assert torch.equal(run(model)[0], logits)


def quantised(folder: Path, **how: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    build("llama").save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.BitsAndBytesConfig(**how), device_map="cpu",
        attn_implementation="eager", dtype=torch.float32,
    )  # fmt: skip
    return model.train()


FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}


@pytest.mark.parametrize(
    ("how", "name", "adapters"),
    [
        (FOUR_BITS, "Linear4bit", False),
        (FOUR_BITS, "Linear4bit", True),
        ({"load_in_8bit": True}, "Linear8bitLt", False),
    ],
    ids=["4bit", "4bit with adapters", "8bit"],
)
def test_bitsandbytes(tmp_path: Path, how: dict[str, Any], name: str, adapters: bool) -> None:
    model = quantised(tmp_path, **how)
    assert type(model.model.layers[0].mlp.down_proj).__name__ == name
    check_same(with_adapters(model) if adapters else model)


def test_torchao() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = build("llama")
    quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    check_same(model)


class StandIn(nn.Module):
    """Stands for a quantised linear layer where no such library is installed: 8-bit integers and a scale a row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scale.to(x.dtype))


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_a_stand_in_for_quantised_layers(family: str) -> None:
    model = build(family)
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, StandIn(child))
    check_same(model, 13 if family == "gemma2" else 9)


def test_a_quantised_layer_that_is_not_called_is_left_alone() -> None:
    class Unpacked(nn.Module):
        """It reads the codes instead of calling the layers."""

        def __init__(self, mlp: Any) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = map(StandIn, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))

        def forward(self, x: Tensor) -> Tensor:
            gate, up = (nn.functional.linear(x, p.codes * p.scale) for p in (self.gate_proj, self.up_proj))
            return self.down_proj(nn.functional.silu(gate) * up)

    model = build("llama")
    for layer in model.model.layers:
        layer.mlp = Unpacked(layer.mlp)
    logits = run(model)[0]
    report = fuse_layers(model, norm=False, rotary=False)
    assert not report.replaced
    assert torch.equal(run(model)[0], logits)


def with_adapters(model: Any, **how: Any) -> Any:
    peft = pytest.importorskip("peft")
    targets = ["gate_proj", "down_proj", "q_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **how))


@pytest.mark.parametrize("how", [{"use_dora": True}, {"modules_to_save": ["norm"]}], ids=str)
def test_adapters(how: dict[str, Any]) -> None:
    model = with_adapters(build("llama"), **how)
    fused = fuse_layers(copy.deepcopy(model))
    assert fused.replaced.total() >= 9
    check_same(model, fused.replaced.total())


def test_adapters_merged_and_taken_off_after_fusing() -> None:
    model = with_adapters(build("llama"))
    fuse_layers(model)
    logits = run(model)[0]
    merged = model.merge_and_unload().requires_grad_()
    assert distance(run(merged)[0], logits) < 1e-5
    assert unfuse_layers(merged) > 0


@pytest.mark.parametrize("ran_before", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_model_that_is_compiled_already(ran_before: bool) -> None:
    """The compiler notices that forwards were replaced, even those that it has traced."""
    torch._dynamo.reset()
    operators: list[str] = []

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        operators.extend(str(node.target) for m in graph.modules() if hasattr(m, "graph") for node in m.graph.nodes)
        return graph.forward

    model = build("llama", num_hidden_layers=1)
    logits, gradients = run(model)
    compiled = torch.compile(model, backend=backend)
    if ran_before:
        assert distance(run(compiled)[0], logits) < 1e-5
        assert not any("liger_losses" in name for name in operators)
    assert fuse_layers(compiled).replaced.total() == 5
    fused, fused_gradients = run(compiled)
    assert {f"liger_losses.{n}.default" for n in ("rms_norm_forward", "gated_activation_forward", "rotate")} <= set(
        operators
    )
    assert distance(fused, logits) < 1e-5
    for name, gradient in gradients.items():
        assert distance(fused_gradients[f"_orig_mod.{name}"], gradient) < 3e-5, name


def test_tied_weights(tmp_path: Path) -> None:
    model = build("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    check_same(model)
    fuse_layers(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").train()
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert distance(run(again)[0], run(model)[0]) < 1e-5


def test_with_a_fused_head() -> None:
    """Both entries are in one module, and the order of calls does not matter."""
    assert (entry.fuse_layers, entry.unfuse_layers) == (fuse_layers, unfuse_layers)
    answers = []
    for first, second in ((entry.fuse_head, entry.fuse_layers), (entry.fuse_layers, entry.fuse_head)):
        model = build("llama")
        first(model)
        second(model)
        out = model(IDS, labels=IDS, fused_lm_head=True)
        answers.append(out.log_probs.detach())
    logits = run(build("llama"))[0]
    wanted = logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None]).squeeze(-1)
    for found in answers:
        assert distance(found, wanted) < 1e-5
