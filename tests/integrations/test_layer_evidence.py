"""Layers that agree with a kernel somewhere and not everywhere are left alone, and fused ones follow what they can."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from transformers.models.llama import modeling_llama  # noqa: E402

from liger_losses.integrations._layer_evidence import Operations  # noqa: E402
from liger_losses.integrations._rotary_probe import recognise_rotary  # noqa: E402
from liger_losses.integrations.layers import fuse_layers, unfuse_layers  # noqa: E402

from .test_layers import IDS, build, distance  # noqa: E402

Norm, MLP = modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP
SIZES = SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act="silu", mlp_bias=False)


def made(base: type[nn.Module], forward: Callable[..., Any]) -> nn.Module:
    kind = type("Stranger" + base.__name__.removeprefix("Llama"), (base,), {"forward": forward})
    return kind(16) if base is Norm else kind(SIZES)


def statistic(self: Any, x: Tensor) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def only_once(self: Any, x: Tensor) -> Tensor:
    self.last = x
    return Norm.forward(self, x)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda self, x: Norm.forward(self, x).clamp(-30, 30), "its forward runs clamp"),
        (lambda self, x: Norm.forward(self, x.clamp(-1e6, 1e6)), "its forward runs clamp"),
        (lambda self, x: self.weight.clamp(max=8.0) * (x.float() * statistic(self, x)).to(x.dtype), "its forward runs clamp"),
        (lambda self, x: torch.nan_to_num(Norm.forward(self, x)), "its forward runs nan_to_num"),
        (lambda self, x: torch.where(x.abs() > 1e9, 0.0, Norm.forward(self, x)), "where"),
        (lambda self, x: Norm.forward(self, x * 0 if float(x[..., 0].sum()) > 1e9 else x), "its forward runs _local_scalar_dense"),
        (lambda self, x: self.weight.detach() * (x.float() * statistic(self, x)).to(x.dtype), "has other gradients"),
        (lambda self, x: self.weight * (x.float() * statistic(self, x).detach()).to(x.dtype), "has other gradients"),
        (lambda self, x: Norm.forward(self, x.detach()), "has other gradients"),
        (lambda self, x: Norm.forward(self, x) * (2.0 if x.shape[1] > 64 else 1.0), "differs for inputs of 3 dimensions and length 65"),
        (lambda self, x: Norm.forward(self, x) * (2.0 if x.shape[1] == 9 else 1.0), "differs for inputs of 3 dimensions and length 9"),
        (lambda self, x: Norm.forward(self, x) * (2.0 if x.dim() == 2 else 1.0), "differs for inputs of 2 dimensions"),
        (lambda self, x: Norm.forward(self, x) * (1.5 if self.training else 1.0), "in training"),
        (lambda self, x: Norm.forward(self, F.dropout(x, 0.1, self.training)), "in training"),
        (only_once, "its forward sets attributes"),
        (lambda self, x: self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype), "takes its eps from elsewhere"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_norms_that_agree_only_somewhere(forward: Callable[..., Any], why: str, training: bool) -> None:
    norm = made(Norm, forward).train(training)
    report = fuse_layers(norm)
    assert not report.replaced
    ((_, reason),) = report.refused
    assert why in reason
    assert "forward" not in vars(norm)


class Contiguity(nn.Module):
    """An activation that asks."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) if x.is_contiguous() else F.gelu(x)


@pytest.mark.parametrize(
    ("state", "asked"),
    [
        (lambda x: x.is_contiguous(), "is_contiguous"),
        (lambda x: x.stride(-1) == 1, "stride"),
        (lambda x: not x.is_inference(), "is_inference"),
        (lambda x: x.storage_offset() == 0, "storage_offset"),
        (lambda x: x.data_ptr() % 16 == 0, "data_ptr"),
        (lambda x: not torch.is_autocast_enabled(), "is_autocast_enabled"),
        (lambda x: not torch.is_autocast_enabled("cuda"), "is_autocast_enabled"),
        (lambda x: torch.get_autocast_dtype("cpu") == torch.bfloat16, "get_autocast_dtype"),
        (lambda x: not torch.is_inference_mode_enabled(), "is_inference_mode_enabled"),
        (lambda x: torch.get_default_dtype() == torch.float32, "get_default_dtype"),
        (lambda x: not torch.are_deterministic_algorithms_enabled(), "are_deterministic_algorithms_enabled"),
    ],
)
def test_forwards_that_ask_for_a_state(state: Callable[[Tensor], bool], asked: str) -> None:
    """Whatever they then do: the one answer was tried, and not the other."""
    before = getattr(torch, asked, None)
    for layer in (
        made(Norm, lambda self, x: Norm.forward(self, x) * (1.0 if state(x) in (True, False) else 2.0)),
        made(MLP, lambda self, x: MLP.forward(self, x) * (1.0 if state(x) in (True, False) else 2.0)),
    ):
        report = fuse_layers(layer)
        assert not report.replaced
        ((_, reason),) = report.refused
        assert f"its forward asks for {asked}" in reason
    assert getattr(torch, asked, None) is before


def test_a_child_that_asks() -> None:
    mlp = MLP(SIZES)
    mlp.act_fn = Contiguity()
    ((_, reason),) = fuse_layers(mlp).refused
    assert "asks for is_contiguous" in reason


def test_torch_may_ask_itself() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return Norm.forward(self, x)

    assert fuse_layers(made(Norm, forward)).replaced


@pytest.mark.parametrize("base", [Norm, MLP])
def test_ranks(base: type[nn.Module]) -> None:
    """Up to five dimensions are tried; with others the layer's own forward is called."""
    ((_, reason),) = fuse_layers(
        made(base, lambda self, x: base.forward(self, x) * (2.0 if x.dim() == 5 else 1.0))
    ).refused
    assert "differs for inputs of 5 dimensions" in reason
    layer = made(base, lambda self, x: base.forward(self, x) * (2.0 if x.dim() in (1, 6) else 1.0))
    assert fuse_layers(layer).replaced
    x = torch.randn(16 if base is Norm else 8)
    torch.testing.assert_close(layer(x), 2 * layer(x[None])[0])
    torch.testing.assert_close(layer(x.view(1, 1, 1, 1, 1, -1)), 2 * layer(x.view(1, 1, 1, 1, -1))[None])


def test_a_norm_that_rounds_in_sixteen_bits() -> None:
    def textbook(self: Any, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight

    ((_, reason),) = fuse_layers(made(Norm, textbook)).refused
    assert reason == "computes RMSNorm (w) in float32 alone: in bfloat16 it rounds where known norms compute in float32"
    ((_, reason),) = fuse_layers(made(Norm, lambda self, x: 2 * textbook(self, x))).refused
    assert reason == "computes none of the known norms"


def gated(self: Any, x: Tensor) -> Tensor:
    return self.act_fn(self.gate_proj(x)) * self.up_proj(x)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda self, x: self.down_proj(gated(self, x).clamp(-1e4, 1e4)), "its forward runs clamp"),
        (lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=100.0)) * self.up_proj(x)), "its forward runs clamp"),
        (lambda self, x: self.down_proj(torch.minimum(gated(self, x), torch.full_like(x[..., :1], 1e5))), "minimum"),
        (lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x)), "has other gradients"),
        (lambda self, x: self.down_proj(gated(self, x)) * (2.0 if x.dim() == 2 else 1.0), "differs for inputs of 2 dimensions"),
        (lambda self, x: self.down_proj(gated(self, x)) * (2.0 if x.shape[-2] > 128 else 1.0), "length 130"),
        (lambda self, x: self.down_proj(F.dropout(gated(self, x), 0.1, self.training)), "in training"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_mlps_that_agree_only_somewhere(forward: Callable[..., Any], why: str, training: bool) -> None:
    report = fuse_layers(made(MLP, forward).train(training))
    assert not report.replaced
    ((_, reason),) = report.refused
    assert why in reason


@pytest.mark.parametrize(
    ("module", "name", "limit"),
    [
        ("deepseek_v4", "DeepseekV4MLP", 10.0),
        ("glm5_next", "Glm5NextTextMLP", 10.0),
        ("glm5_next", "Glm5NextVisionMLP", 10.0),
        ("step3p7", "Step3p7MLP", 16.0),
        ("deepseek_v4", "DeepseekV4MLP", 1e6),
    ],
)
def test_clamped_mlps_of_transformers(module: str, name: str, limit: float) -> None:
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    config = SimpleNamespace(**vars(SIZES), swiglu_limit=limit, swiglu_limits_shared=[limit, 0.0])
    arguments = (config, 0) if module == "step3p7" else (config,)
    mlp = getattr(modeling, name)(*arguments)
    assert "its forward runs clamp, unlike a gated MLP (silu)" in str(fuse_layers(mlp))
    with torch.no_grad():
        mlp.gate_proj.weight.mul_(500)
    x = torch.randn(2, 9, 8)
    assert torch.equal(mlp(x), type(mlp).forward(mlp, x))
    if module == "step3p7":  # a layer without a limit clamps at infinity
        assert fuse_layers(modeling.Step3p7MLP(config, 1)).replaced.total() == 1


def test_rotations_that_agree_only_somewhere() -> None:
    plain = modeling_llama.apply_rotary_pos_emb

    def detached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return plain(q, k.detach(), cos, sin, unsqueeze_dim=unsqueeze_dim)

    def clamped(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return plain(q.clamp(-1e4, 1e4), k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    def by_length(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return plain(q if cos.shape[1] < 500 else 2 * q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    for function, why in (
        (detached, "has other gradients"),
        (clamped, "runs clamp"),
        (by_length, "differs for inputs"),
    ):
        with pytest.raises(Exception, match=why):
            recognise_rotary(function)


def test_a_clamp_at_infinity_is_none() -> None:
    for bounds, strange in (((-math.inf, math.inf), False), ((None, math.inf), False), ((None, 1e30), True)):
        with Operations() as operations:
            torch.ones(2).clamp(*bounds)
        assert bool(operations.strange) is strange


def test_probing_leaves_no_trace() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    model = nn.Sequential(made(Norm, Norm.forward), made(MLP, MLP.forward))
    torch.set_rng_state(state)
    kept = copy.deepcopy(model.state_dict())
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode():
            assert fuse_layers(model).replaced.total() == 2
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_instances_that_differ_in_what_no_scalar_shows() -> None:
    class ScaledNorm(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self._factor

    first, second, third = ScaledNorm(16), ScaledNorm(16), ScaledNorm(16)
    first._factor, second._factor = 1.0, 2.0
    third.register_buffer("_factor", torch.ones(1))
    report = fuse_layers(nn.Sequential(first, second, third))
    assert [name in vars(m) for m, name in ((first, "forward"), (second, "forward"), (third, "forward"))] == [1, 0, 0]
    assert report.refused["ScaledNorm", "has buffers"] == 1


def test_attributes_count_when_they_are_used() -> None:
    x = torch.randn(3, 8)
    norm, mlp = Norm(8), MLP(SIZES)
    assert fuse_layers(nn.Sequential(norm, mlp)).replaced.total() == 2
    before = norm(x), mlp(x)
    norm.variance_epsilon, mlp.act_fn = 1.0, nn.GELU()
    after = norm(x), mlp(x)
    for module, found, old in zip((norm, mlp), after, before, strict=True):
        torch.testing.assert_close(found, type(module).forward(module, x))
        assert not torch.allclose(found, old)


def test_a_call_by_another_name_is_the_models_own_error() -> None:
    norm, x = Norm(8), torch.randn(3, 8)
    fuse_layers(norm)
    torch.testing.assert_close(norm(hidden_states=x), Norm.forward(norm, x))
    with pytest.raises(TypeError, match="other"):
        norm(other=x)


def test_transforms_of_a_fused_model() -> None:
    model = build("llama").eval()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    embedded = model.model.embed_tokens(IDS).detach()

    def loss(parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
        options = {"input_ids": ids[None], "labels": ids[None], "use_cache": False}
        return torch.func.functional_call(model, parameters, (), options).loss

    def logits(e: Tensor) -> Tensor:
        return model(inputs_embeds=e, use_cache=False).logits

    def forward_mode() -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(embedded, torch.ones_like(embedded))
            return torch.autograd.forward_ad.unpack_dual(logits(dual)).tangent

    def results() -> list[Tensor]:
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, IDS)
        _, tangent = torch.func.jvp(logits, (embedded,), (torch.ones_like(embedded),))
        return [*torch.func.grad(loss)(parameters, IDS[0]).values(), *each.values(), tangent, forward_mode()]

    wanted = results()
    assert fuse_layers(model).replaced.total() == 9
    for found, expected in zip(results(), wanted, strict=True):
        assert distance(found, expected) < 1e-5


def test_counts_are_of_one_unit_and_a_second_report_says_so() -> None:
    model = build("deepseek_v3")
    report = fuse_layers(model)
    again = fuse_layers(model)
    assert str(again).startswith("DeepseekV3ForCausalLM: 0 layers on kernels, 1 left alone, 15 on kernels already")
    assert report.replaced.total() == again.already == unfuse_layers(model) == 15


def test_a_pickled_model_comes_back_unfused_and_can_be_fused() -> None:
    model = build("llama").eval()
    with torch.no_grad():
        before = model(IDS).logits
        fuse_layers(model)
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(again(IDS).logits, before)
        assert unfuse_layers(again) == 0
        assert fuse_layers(again).replaced.total() == 9
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_reasons_for_norms() -> None:
    t5 = importlib.import_module("transformers.models.t5.modeling_t5")
    report = str(fuse_layers(nn.Sequential(t5.T5LayerNorm(8), nn.RMSNorm(8), nn.RMSNorm(8, eps=1e-6))))
    assert "computes RMSNorm (w, llama) in bfloat16 and not for bfloat16 inputs with float32 weights" in report
    assert "1 x RMSNorm left alone: its eps is None: another number for every dtype" in report
    assert "1 x RMSNorm: RMSNorm (w, gemma)" in report


@pytest.mark.parametrize("option", [{"norm": None}, {"mlp": "yes"}, {"rotary": 1}])
def test_options_are_bools(option: dict[str, Any]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(TypeError, match=f"^{name}: got {value!r}, expected True or False$"):
        fuse_layers(nn.Linear(2, 2), **option)


def test_unfusing_no_module() -> None:
    with pytest.raises(TypeError, match=r"^model: got NoneType, expected a torch.nn.Module$"):
        unfuse_layers(None)  # type: ignore[arg-type]
