"""`fuse_layers` on families of models: what it replaces computes what it did, and the rest is named with a reason.

`UPDATE_TABLE=1 pytest tests/integrations/test_layers.py` writes the table of docs/layers.md anew.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from liger_losses.integrations._layer_probes import Refusal, recognise_mlp, recognise_norm  # noqa: E402
from liger_losses.integrations._rotary_probe import recognise_rotary  # noqa: E402
from liger_losses.integrations.layers import fuse_layers, unfuse_layers  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layers.md"
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
HEAD = {"head_dim": 8}
MOE = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    **HEAD,
}
NOTHING: dict[str, Any] = {}
# Family -> what its config adds.
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ["llama", "mistral", "qwen2", "phi", "phi3", "cohere", "cohere2", "granite", "olmo", "olmo2", "olmo3", "smollm3",
         "exaone4", "lfm2", "stablelm", "nemotron", "starcoder2", "arcee", "apertus", "gpt_neox", "bitnet", "persimmon", "hyperclovax"], NOTHING,
    ),
    **dict.fromkeys(
        ["ministral", "ministral3", "qwen3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "ernie4_5", "helium",
         "seed_oss", "diffllama", "hunyuan_v1_dense"], HEAD,
    ),
    **dict.fromkeys(["mixtral", "qwen2_moe", "jamba", "minimax", "olmoe", "granitemoe", "phimoe", "ernie4_5_moe"], MOE),
    **dict.fromkeys(["qwen3_moe", "glm4_moe", "gpt_oss", "llama4_text"], MOE | HEAD),
    **dict.fromkeys(["deepseek_v2", "deepseek_v3"], MOE | LATENT),
    "minicpm3": LATENT,
}  # fmt: skip
SLOW: dict[str, dict[str, Any]] = {
    "gemma4_text": HEAD,
    "falcon_h1": {},
    "qwen3_next": MOE | HEAD | {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": MOE | HEAD | {"layer_types": ["linear_attention", "full_attention"]},
}


def build(family: str, **more: Any) -> Any:
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **(FAMILIES | SLOW)[family], **more})
    transformers.set_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms that start at one, or zero, would hide their conventions
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.train()


IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))


def run(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(1)  # of dropout and of routers
    out = model(IDS, labels=IDS, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-3))


def rounded_otherwise(model: Any) -> Any:
    near = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.mul_(1 + torch.finfo(torch.float32).eps * torch.randint_like(parameter, -1, 2))
    return near


def row_of(family: str, report: Any) -> str:
    replaced = "; ".join(sorted(f"{n} x {name}: {what}" for (name, what), n in report.replaced.items()))
    refused = "; ".join(sorted(f"{n} x {name}: {why}" for (name, why), n in report.refused.items()))
    return f"| {family} | {replaced or '-'} | {refused or '-'} |"


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW)])
def test_family(family: str) -> None:
    model = build(family)
    names, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    logits, gradients = run(model)
    near_logits, near_gradients = run(rounded_otherwise(model))
    report = fuse_layers(model)
    assert report.replaced
    fused_logits, fused_gradients = run(model)
    assert distance(fused_logits, logits) < 1e-5 + 4 * distance(near_logits, logits)
    assert fused_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # As far as another rounding of the weights takes it, within a small factor.
        allowed = 1e-5 + 4 * distance(near_gradients[name], gradient)
        assert distance(fused_gradients[name], gradient) < allowed, name
    assert list(model.state_dict()) == names
    assert [type(m) for m in model.modules()] == classes
    assert not fuse_layers(model).replaced  # nothing is left to do
    assert unfuse_layers(model) > 0
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(run(model)[0], logits)

    row = row_of(family, report)
    if os.environ.get("UPDATE_TABLE"):
        lines = PAGE.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if not line.startswith(f"| {family} |")]
        PAGE.write_text("\n".join([*kept, row]) + "\n", encoding="utf-8")
    assert row in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "glm", "cohere"])
def test_in_16_bits_no_further_from_the_truth(family: str) -> None:
    model = build(family)
    truth, _ = run(copy.deepcopy(model).float())
    model.bfloat16()
    exact, _ = run(copy.deepcopy(model).float())  # of the rounded weights
    plain, _ = run(model)
    report = fuse_layers(model)
    assert not report.refused
    fused, _ = run(model)
    assert fused.dtype == plain.dtype
    assert distance(fused, exact) <= 2 * distance(plain, exact) + torch.finfo(torch.bfloat16).eps
    assert truth.shape == exact.shape


def test_autocast() -> None:
    for family in ("llama", "phi"):
        model = build(family)
        with torch.autocast("cpu", torch.bfloat16):
            plain, _ = run(model)
            fuse_layers(model)
            fused, _ = run(model)
        assert fused.dtype == plain.dtype
        assert distance(fused, plain) < 0.05


def test_only_what_is_asked_for() -> None:
    model = build("llama")
    counts = {"norm": 5, "mlp": 2, "rotary": 2}
    for name, count in counts.items():
        report = fuse_layers(model, **{n: n == name for n in counts})
        assert report.replaced.total() == count == unfuse_layers(model)
    text = str(fuse_layers(model))
    assert text.startswith("LlamaForCausalLM: 9 layers on kernels, 0 left alone")
    assert "5 x LlamaRMSNorm: RMSNorm (w, llama)" in text


def test_other_models_notice_nothing() -> None:
    model, other = build("llama"), build("llama")
    before = run(other)[0]
    modeling = __import__("transformers.models.llama.modeling_llama", fromlist=["x"])
    function, forward = modeling.apply_rotary_pos_emb, modeling.LlamaAttention.forward
    fuse_layers(model)
    assert modeling.apply_rotary_pos_emb is function
    assert modeling.LlamaAttention.forward is forward
    assert not any("forward" in vars(module) for module in other.modules())
    assert torch.equal(run(other)[0], before)


def test_a_deep_copy_runs_on_its_own_parameters() -> None:
    model = build("llama")
    fuse_layers(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert run(twin)[0].abs().max() > 0
    assert run(model)[0].abs().max() == 0


def test_generation_saving_hooks_and_checkpointing(tmp_path: Path) -> None:
    model = build("llama").eval()
    calls: list[str] = []
    for module in model.modules():
        if type(module).__name__ in ("LlamaRMSNorm", "LlamaMLP"):
            module.register_forward_hook(lambda m, *_: calls.append(type(m).__name__))
    options = {"max_new_tokens": 6, "do_sample": False}
    before = model.generate(IDS, **options)
    counted, calls[:] = len(calls), []
    fuse_layers(model)
    assert torch.equal(model.generate(IDS, **options), before)
    assert len(calls) == counted
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert torch.equal(again.generate(IDS, **options), before)
    gradients = run(model.train())[1]
    model.gradient_checkpointing_enable()
    for name, gradient in run(model)[1].items():
        torch.testing.assert_close(gradient, gradients[name])


def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        build("llama"), peft.LoraConfig(r=2, target_modules=["gate_proj", "down_proj"], init_lora_weights=False)
    )
    logits, gradients = run(model)
    assert fuse_layers(model).replaced.total() == 9
    fused, fused_gradients = run(model)
    assert distance(fused, logits) < 1e-5
    assert all(distance(fused_gradients[name], gradient) < 3e-5 for name, gradient in gradients.items())


def test_compile_is_one_graph() -> None:
    torch._dynamo.reset()
    model = build("llama").eval()
    with torch.no_grad():
        plain = model(IDS, use_cache=False).logits
        fuse_layers(model)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert distance(compiled(IDS, use_cache=False).logits, plain) < 1e-5


# What has the looks of a layer and is none.


def mlp_of(forward: Any, activation: Any = None) -> nn.Module:
    class Stranger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
            self.act = activation or nn.SiLU()
            self.factor = 0.5

    Stranger.forward = forward
    return Stranger()


def test_an_mlp_is_known_by_what_it_computes() -> None:
    found = recognise_mlp(mlp_of(lambda self, x: self.three(self.one(x) * self.act(self.two(x)))))
    assert (found.children, found.activation) == (("two", "one", "three"), "silu")
    found = recognise_mlp(mlp_of(lambda self, x: self.three(self.one(x) * self.act(self.two(x))), nn.GELU()))
    assert found.activation == "gelu"


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (mlp_of(lambda self, x: self.three(self.one(x) * self.act(self.factor * self.two(x)))), "computes none"),
        (mlp_of(lambda self, x: self.three(self.one(x) * self.act(self.two(x))) * self.factor), "computes none"),
        (mlp_of(lambda self, x: self.three(self.one(x) * self.act(self.two(x))) + x), "computes none"),
        (mlp_of(lambda self, x: self.three(self.one(x) * torch.tanh(self.two(x)))), "computes none"),
        (mlp_of(lambda self, x: self.three(nn.functional.dropout(self.one(x) * self.act(self.two(x)), 0.1, self.training))), "in training"),
        (mlp_of(lambda self, x: self.three(nn.functional.linear(x, self.one.weight, self.one.bias) * self.act(self.two(x)))), "computes none"),
        (mlp_of(lambda self, x: self.three(self.one(x) * self.act(self.two(x))), nn.PReLU()), "act has parameters"),
        (mlp_of(lambda self, x: self.missing(x)), r"could not be tried \(AttributeError\)"),
        (mlp_of(lambda self, x, scale=1.0: self.three(self.one(x) * self.act(self.two(x)))), "takes more than"),
    ],
)  # fmt: skip
def test_strange_mlps(module: nn.Module, why: str) -> None:
    with pytest.raises(Refusal, match=why):
        recognise_mlp(module)
    assert not fuse_layers(module).replaced


def norm_of(forward: Any) -> nn.Module:
    class Stranger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps, self.other = nn.Parameter(torch.ones(16)), 1e-6, 1e-5

    Stranger.forward = forward
    return Stranger()


def rms(x: Tensor, eps: float) -> Tensor:
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


def test_a_norm_is_known_by_what_it_computes() -> None:
    found = recognise_norm(norm_of(lambda self, x: (rms(x, self.other) * (1 + self.weight.float())).to(x.dtype)))
    assert (found.kind, found.eps, found.offset, found.casting_mode) == ("rms", 1e-5, 1.0, "gemma")
    found = recognise_norm(norm_of(lambda self, x: self.weight * rms(x, self.eps).to(x.dtype)))
    assert (found.kind, found.eps, found.offset, found.casting_mode) == ("rms", 1e-6, 0.0, "llama")


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.weight * (x / (x.float().norm(dim=-1, keepdim=True) + self.eps)).to(x.dtype),
        lambda self, x: 1.01 * self.weight * rms(x, self.eps).to(x.dtype),
        lambda self, x: self.weight * rms(x, 3 * self.eps).to(x.dtype),
        lambda self, x: self.weight * rms(x, self.eps).to(x.dtype) + x,
    ],
)  # fmt: skip
def test_strange_norms(forward: Any) -> None:
    with pytest.raises(Refusal, match="computes none of the known norms"):
        recognise_norm(norm_of(forward))


def test_strange_rotations() -> None:
    modeling = __import__("transformers.models.llama.modeling_llama", fromlist=["x"])
    assert recognise_rotary(modeling.apply_rotary_pos_emb).layout == "half"

    def other_way(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return modeling.apply_rotary_pos_emb(q, k, cos, -sin, unsqueeze_dim=unsqueeze_dim)

    def in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        rotated = modeling.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return q.copy_(rotated[0]), k.copy_(rotated[1])

    for function in (other_way, in_place, lambda *arguments: None):
        with pytest.raises(Refusal, match="computes none of the known rotations"):
            recognise_rotary(function)


def test_multipliers_of_falcon_h1_count() -> None:
    class MLP(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(nn.functional.silu(self.gate_proj(x) * self.scale) * self.up_proj(x))

    model = nn.Sequential(MLP(1.0), MLP(0.9))
    report = fuse_layers(model)
    assert report.replaced.total() == report.refused.total() == 1
    assert "forward" in vars(model[0])
    assert "forward" not in vars(model[1])


def test_what_was_replaced_by_others_is_left_to_them() -> None:
    model = build("llama")
    norm = model.model.norm
    norm.forward = lambda x: 2 * type(norm).forward(norm, x)
    report = fuse_layers(model)
    assert report.refused[("LlamaRMSNorm", "its forward is replaced already")] == 1
    assert report.replaced[("LlamaRMSNorm", "RMSNorm (w, llama)")] == 4


def test_quantised_projections_run_as_they_are() -> None:
    class Quantised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, (self.weight * 4).round() / 4, self.bias)

    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = Quantised
    logits = run(model)[0]
    assert fuse_layers(model).replaced.total() == 9
    assert distance(run(model)[0], logits) < 1e-5


def test_no_module() -> None:
    with pytest.raises(TypeError, match=r"model: got str, expected a torch.nn.Module"):
        fuse_layers("model")
