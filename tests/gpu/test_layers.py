"""The layer kernels on a GPU: real widths, offsets beyond 32 bits, one compilation for all lengths, the same bits twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.kernels import (
    ACTIVATIONS,
    fastest,
    fused_add_rms_norm,
    gated_activation,
    implementation,
    layer_norm,
    packed_gated_activation,
    rms_norm,
    rotary,
)

from ..oracle import check_close

pytestmark = pytest.mark.gpu

F32, BF16 = torch.float32, torch.bfloat16


def make(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_()


def step(function: Callable[..., Any], tensors: list[Tensor], form: str = "triton") -> list[Tensor]:
    with implementation(form):
        outs = function(*tensors)
        outs = [outs] if isinstance(outs, Tensor) else [o for o in outs if o is not None]
        sent = [make(*o.shape, dtype=o.dtype, seed=50 + i).detach() for i, o in enumerate(outs)]
        return [o.detach() for o in outs] + list(torch.autograd.grad(outs, tensors, sent))


def check(function: Callable[..., Any], tensors: list[Tensor], terms: int) -> None:
    got, again, twin = step(function, tensors), step(function, tensors), step(function, tensors, "torch")
    wide = [t.detach().double().requires_grad_() for t in tensors]
    with implementation("torch"):
        outs = function(*wide)
        outs = [outs] if isinstance(outs, Tensor) else [o for o in outs if o is not None]
        sent = [make(*o.shape, dtype=g.dtype, seed=50 + i).detach() for i, (o, g) in enumerate(zip(outs, got))]  # noqa: B905
        exact = [*outs, *torch.autograd.grad(outs, wide, [s.double() for s in sent])]
    for index, (g, a, e, t) in enumerate(zip(got, again, exact, twin, strict=True)):
        assert torch.equal(g, a)  # no atomics
        check_close(g, e, t, g.dtype, terms=terms, what=str(index))


@pytest.mark.parametrize("width", [64, 128, 2048, 4096, 5120, 8192, 14336, 16384, 65536])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_norms(width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (make(*s, dtype=dtype, seed=i) for i, s in enumerate([(700, width)] * 2 + [(width,)]))
    bias = make(width, dtype=dtype, seed=9)
    check(rms_norm, [x, weight], 700 * width)
    check(lambda x, w: rms_norm(x, w, offset=1.0, casting_mode="gemma"), [x, weight], 700 * width)
    check(fused_add_rms_norm, [x, residual, weight], 700 * width)
    check(layer_norm, [x, weight, bias], 700 * width)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations(activation: str) -> None:
    gate, up = make(300, 14336), make(300, 14336, seed=1)
    check(lambda g, u: gated_activation(g, u, activation), [gate, up], 8)
    check(lambda b: packed_gated_activation(b, activation), [make(300, 2 * 1111)], 8)


@pytest.mark.parametrize("layout", ["half", "interleaved", "interleaved_to_half"])
@pytest.mark.parametrize(("width", "size"), [(128, 128), (64, 64), (32, 128), (96, 96)])
def test_rotary(layout: str, width: int, size: int) -> None:
    if layout == "interleaved_to_half":
        width = size
    q, k = (make(2, 513, n, size, seed=n).detach().transpose(1, 2).requires_grad_() for n in (32, 8))
    cos, sin = (make(2, 513, width, seed=i).detach() for i in (1, 2))
    check(lambda q, k: rotary(q, k, cos.to(q.dtype), sin.to(q.dtype), layout=layout), [q, k], 8)


@pytest.mark.parametrize("width", [256, 4096, 16384])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_norms_that_are_torchs(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a table to prefer torch's operators everywhere, results would be as exact."""
    x, weight, bias = (make(*s, dtype=dtype, seed=i) for i, s in enumerate([(512, width), (width,), (width,)]))
    shifted = (x.detach() + 1000).requires_grad_() if dtype == F32 else x  # B36
    cases: list[tuple[Callable[..., Tensor], list[Tensor], float]] = [
        (lambda x, w: rms_norm(x, w, casting_mode="gemma"), [x, weight], 512 * width),
        (layer_norm, [shifted, weight, bias], 1000.0**2 if dtype == F32 else 512 * width),
    ]
    sent = make(512, width, dtype=dtype, seed=50).detach()
    everywhere = frozenset((o, b, 5, w) for o in fastest.OPERATIONS for b in (2, 4) for w in range(4, 8))
    for function, tensors, terms in cases:
        twin = step(function, tensors, "torch")
        wide = [t.detach().double().requires_grad_() for t in tensors]
        y = function(*wide)
        exact = [y, *torch.autograd.grad(y, wide, sent.double())]
        with monkeypatch.context() as patch:
            patch.setattr(fastest, "_of_device", lambda _: everywhere)
            y = function(*tensors)
            assert not type(y.grad_fn).__name__.startswith("_")
            found = [y.detach(), *torch.autograd.grad(y, tensors, sent)]
        for index, (f, e, t) in enumerate(zip(found, exact, twin, strict=True)):
            check_close(f, e, t, f.dtype, terms=int(terms), what=str(index))


def test_launches_on_the_tensors_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    x = make(3, 256)
    other = x.detach().to("cuda:1").requires_grad_()
    for _ in range(2):  # compiled, then known
        results = [step_alone(leaf) for leaf in (x, other)]
        for mine, theirs in zip(*results, strict=True):
            assert theirs.device == other.device
            assert torch.equal(mine, theirs.to(mine.device))


def step_alone(leaf: Tensor) -> list[Tensor]:
    with implementation("triton"):
        y = rms_norm(leaf)
    return [y.detach(), *torch.autograd.grad(y, leaf, torch.ones_like(y))]


def test_offsets_beyond_32_bits() -> None:
    """B33: 600,000 rows of 4096 are 2.5e9 elements; the last rows equal the same rows alone."""
    some = torch.tensor([0, 1, 524_287, 524_288, 524_289, 599_999], device="cuda")
    x = make(600_000, 4096).detach()
    weight = make(4096).detach()
    for call in (lambda t: rms_norm(t, weight), lambda t: layer_norm(t, weight), lambda t: gated_activation(t, t)):
        leaf, few = x.requires_grad_(), x[some].detach().requires_grad_()
        y = call(leaf)
        small = call(few)
        assert torch.equal(y[some], small)
        (gradient,) = torch.autograd.grad(y, leaf, x.detach())
        assert torch.equal(gradient[some], torch.autograd.grad(small, few, few.detach())[0])
        del y, gradient
    x = x.detach().view(1, 600_000, 32, 128).transpose(1, 2)
    cos = make(1, 600_000, 128, seed=1).detach()
    rotated = rotary(x, None, cos, cos)[0]
    assert torch.equal(rotated[:, :, some], rotary(x[:, :, some], None, cos[:, some], cos[:, some])[0])


def test_one_compilation_for_all_lengths() -> None:
    """B38."""
    from liger_losses.kernels import gated_activation_triton, layer_norm_triton, rms_norm_triton, rotary_triton

    kernels = [
        *(getattr(m, n) for m in (rms_norm_triton, layer_norm_triton, gated_activation_triton, rotary_triton)
          for n in vars(m) if n.endswith("_kernel")),
    ]  # fmt: skip

    def compiled() -> int:
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    def use(length: int) -> None:
        x, weight = make(2, length, 256), make(256)
        step(rms_norm, [x, weight])
        step(layer_norm, [x, weight])
        step(gated_activation, [x, x])
        heads = make(2, length, 4, 64).detach().transpose(1, 2).requires_grad_()
        cos = make(1, length, 64).detach()
        step(lambda q: rotary(q, None, cos, cos)[0], [heads])

    use(100)
    before = compiled()
    for length in (1, 16, *range(101, 111)):
        use(length)
    assert compiled() == before > 0


def test_compile() -> None:
    torch._dynamo.reset()
    tensors = [make(4, 33, 512), make(512, seed=1)]

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return gated_activation(rms_norm(x, weight) * 2, x)

    compiled = torch.compile(block, fullgraph=True)
    for found, wanted in zip(step(compiled, tensors), step(block, tensors), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_fused_model() -> None:
    pytest.importorskip("transformers")
    from liger_losses.integrations.layers import fuse_layers

    from ..integrations.test_layers import build, distance

    ids = torch.randint(3, 90, (2, 33), device="cuda")
    for family in ("llama", "gemma2", "glm", "cohere"):
        model = build(family).cuda().bfloat16()
        with torch.no_grad():
            plain = model(ids, use_cache=False).logits
            truth = model.float()(ids, use_cache=False).logits
            model.bfloat16()
            assert not fuse_layers(model).refused
            fused = model(ids, use_cache=False).logits
        assert distance(fused, truth) <= 2 * distance(plain, truth) + torch.finfo(BF16).eps
