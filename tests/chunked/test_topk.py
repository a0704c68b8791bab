"""`linear_topk_logprobs`: several tokens a position, against whole logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from liger_losses import linear_logprobs, linear_topk_logprobs
from liger_losses.losses import divergence, topk_divergence

V, H, K = 23, 6, 4


def case(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """hidden [2, 7, H], weight, ids [2, 7, K] some of whose slots are empty, bias. Token (0, 2) has no id, and NaN."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, offset = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((2, 7, H), (V, H), (V,))
    )
    ids = torch.rand(2, 7, V, generator=generator).topk(K).indices
    ids[:, :, 0] = 3  # a token that every position has: its row of the weight's gradient is a sum
    ids[:, :, 1:][ids[:, :, 1:] == 3] = -100
    ids[1, 4, 2:] = -100
    ids[0, 2] = -100
    hidden[0, 2] = torch.nan
    return hidden.requires_grad_(), weight.requires_grad_(), ids, offset.requires_grad_() if bias else None


def unfused(hidden, weight, ids, bias, *, temperature=1.0, softcap=None, logit_scale=1.0) -> Tensor:
    present = ids != -100
    z = hidden.masked_fill(~present.any(-1, keepdim=True), 0) @ weight.T
    z = logit_scale * (z if bias is None else z + bias)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    return z.log_softmax(-1).gather(-1, ids.clamp(min=0)).masked_fill(~present, 0)


OPTIONS = [
    {},
    {"temperature": 1.7},
    {"softcap": 2.0, "logit_scale": 0.4},
    {"temperature": torch.linspace(0.5, 2.0, 14, dtype=torch.float64).view(2, 7)},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "temperature", "softcap", "temperatures"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("together", [None, 3, 1])  # tokens
def test_is_the_gather_of_whole_logits(options: dict, bias: bool, together: int | None, monkeypatch) -> None:
    hidden, weight, ids, offset = case(bias=bias)
    if together is not None:
        monkeypatch.setattr("liger_losses.chunked.topk._DEFAULT_BUDGET", together * K * H * 16)
    value = linear_topk_logprobs(hidden, weight, ids, offset, **options)
    expected = unfused(hidden, weight, ids, offset, **options)
    torch.testing.assert_close(value, expected)
    upstream = torch.randn(value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [x for x in (hidden, weight, offset) if x is not None]
    torch.testing.assert_close(*(torch.autograd.grad(v, leaves, upstream) for v in (value, expected)))


@pytest.mark.parametrize("slots", [1, 3])
def test_whichever_slot_is_empty(slots: int) -> None:
    """A token is scored, and has its own temperature, also where its first slot holds nothing."""
    hidden, weight, ids, bias = case()
    ids = ids.clone()
    ids[..., 1] = 5
    ids[:, ::2, 0] = -100
    ids = ids[..., :slots]
    temperature = torch.linspace(0.5, 2.0, 14, dtype=torch.float64).view(2, 7)
    hidden = hidden.detach().nan_to_num().requires_grad_()
    value = linear_topk_logprobs(hidden, weight, ids, bias, temperature=temperature)
    expected = unfused(hidden, weight, ids, bias, temperature=temperature)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(v.square().sum(), (hidden, weight, bias)) for v in (value, expected))
    )


def test_gradcheck() -> None:
    hidden, weight, ids, bias = case()
    assert torch.autograd.gradcheck(
        lambda *x: linear_topk_logprobs(x[0], x[1], ids[1], x[2], softcap=3.0),
        (hidden[1].detach().requires_grad_(), weight, bias),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_sums_in_fp32(dtype: torch.dtype) -> None:
    hidden, weight, ids, bias = case(dtype)
    value = linear_topk_logprobs(hidden, weight, ids, bias)
    assert value.dtype == torch.float32
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    expected = unfused(wide[0], wide[1], ids, wide[2])
    assert (value - expected).abs().max() < 1e-5
    gradients = torch.autograd.grad(value.square().sum(), (hidden, weight, bias))
    truths = torch.autograd.grad(expected.square().sum(), wide)
    eps = torch.finfo(dtype).eps
    for gradient, truth in zip(gradients, truths, strict=True):
        assert gradient.dtype == dtype
        # A rounding of the sum, and in fp32 two of the value that is squared.
        assert (gradient - truth).norm() <= (3 if dtype == torch.float32 else 2) * eps * truth.norm()


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("confidence", [0.1, 0.3, 0.5])  # mean log-probability -0.85, -9e-4, -3e-6
def test_a_confident_student_in_bf16(slots: int, confidence: float) -> None:
    """Its likeliest token's logit and probability cancel in the gradient: before either is rounded."""
    generator = torch.Generator().manual_seed(0)
    rows, width, vocab = 64, 64, 500
    weight = torch.randn(vocab, width, generator=generator).bfloat16()
    ids = torch.rand(rows, vocab, generator=generator).topk(slots).indices
    noise = 0.05 * torch.randn(rows, width, generator=generator)
    hidden = (weight[ids[:, -1]].float() * confidence + noise).bfloat16()
    upstream = torch.rand(rows, slots, generator=generator, dtype=torch.float64)

    def gradients(hidden: Tensor, weight: Tensor, logprobs: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        value = logprobs(*leaves)
        return [g.double() for g in torch.autograd.grad((value * upstream.to(value)).sum(), leaves)]

    truth = gradients(hidden.double(), weight.double(), lambda h, w: (h @ w.T).log_softmax(-1).gather(-1, ids))
    for strategy in ("auto", "recompute"):
        found = gradients(hidden, weight, lambda h, w, s=strategy: linear_topk_logprobs(h, w, ids, strategy=s))
        for gradient, true in zip(found, truth, strict=True):
            assert (gradient - true).norm() <= 2 * 2**-8 * true.norm()


def test_options_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_losses import record_active_vocabulary
    from liger_losses.chunked import active

    monkeypatch.setattr(active, "CROSSOVER", 1.0)
    hidden, weight, ids, bias = case(torch.float64)
    leaves = (hidden, weight, bias)
    upstream = torch.randn(ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = unfused(hidden, weight, ids, bias)
    exact = torch.autograd.grad(expected, leaves, upstream)
    for options in ({"strategy": "cached"}, {"strategy": "recompute"}, {"active_vocab": 0.0}):
        with record_active_vocabulary() as report:
            value = linear_topk_logprobs(hidden, weight, ids, bias, **options)
            found = torch.autograd.grad(value, leaves, upstream)
        torch.testing.assert_close((value, found), (expected, exact))
        assert (report.tiles > 0) == ("active_vocab" in options)
    rounded = linear_topk_logprobs(hidden.bfloat16(), weight.bfloat16(), ids, bias.bfloat16(), logits_dtype="input")
    exact = linear_topk_logprobs(hidden.bfloat16(), weight.bfloat16(), ids, bias.bfloat16())
    assert 0 < (rounded - exact).abs().max() < 0.1


def test_logits_far_from_zero_and_infinite_ones() -> None:
    """What all logits have in common is in none of the differences; a token that a bias rules out is -inf."""
    hidden, weight, ids, bias = (t.detach() for t in case(torch.float32))
    hidden, ids = hidden.nan_to_num(), ids.clamp(min=0)
    far = linear_topk_logprobs(hidden, weight, ids, bias + 4096)
    # The sum's rounding, 4096 * 2^-24, is all that is lost.
    torch.testing.assert_close(far, linear_topk_logprobs(hidden, weight, ids, bias), atol=2e-3, rtol=0)
    out = torch.tensor([0, 3])
    bias[out] = -torch.inf
    value = linear_topk_logprobs(hidden, weight, out.expand(2, 7, 2), bias)
    assert (value == -torch.inf).all()
    value = linear_topk_logprobs(hidden, weight, torch.tensor([0, 5, 3]).expand(2, 7, 3), bias)
    assert torch.equal(value.isfinite(), torch.tensor([False, True, False]).expand(2, 7, 3))


def test_memory_budget_bounds_the_gathered_rows(monkeypatch) -> None:
    from liger_losses.chunked import topk

    seen = []
    gathered = topk._gathered
    monkeypatch.setattr(topk, "_gathered", lambda w, ids, p: seen.append(ids.numel()) or gathered(w, ids, p))
    hidden, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((400, 64), (V, 64), (V,)))
    ids = torch.randint(0, V, (400, K))
    linear_topk_logprobs(hidden, weight.requires_grad_(), ids, bias, memory_budget=2**20)
    assert len(seen) > 1
    assert max(seen) * 64 * 16 <= 2**20


def test_one_id_is_linear_logprobs() -> None:
    hidden, weight, ids, bias = case()
    value = linear_topk_logprobs(hidden, weight, ids[..., :1], bias)
    torch.testing.assert_close(value[..., 0], linear_logprobs(hidden, weight, ids[..., 0], bias))


def test_frozen_head_and_frozen_hidden() -> None:
    hidden, weight, ids, bias = case()
    expected = torch.autograd.grad(unfused(hidden, weight, ids, bias).sum(), (hidden, weight))
    value = linear_topk_logprobs(hidden, weight.detach(), ids, bias.detach())
    torch.testing.assert_close(torch.autograd.grad(value.sum(), hidden)[0], expected[0])
    value = linear_topk_logprobs(hidden.detach(), weight, ids, bias.detach())
    torch.testing.assert_close(torch.autograd.grad(value.sum(), weight)[0], expected[1])
    with torch.no_grad():
        assert not linear_topk_logprobs(hidden, weight, ids, bias).requires_grad


def test_autocast_and_nothing_written_to() -> None:
    hidden, weight, ids, bias = case(torch.float32)
    copies = [x.detach().clone() for x in (hidden, weight, ids, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        value = linear_topk_logprobs(hidden, weight, ids, bias)
    rounded = [x.detach().bfloat16().double() for x in (hidden, weight)]
    expected = unfused(rounded[0], rounded[1], ids, bias.detach().double())
    assert (value - expected).abs().max() < 1e-5
    value.sum().backward()
    assert [x.grad.dtype for x in (hidden, weight, bias)] == [torch.float32] * 3
    for tensor, copy in zip((hidden, weight, ids, bias), copies, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num())


def test_backward_inside_autocast() -> None:
    hidden, weight, ids, bias = case(torch.float32)
    leaves = (hidden, weight, bias)
    value = linear_topk_logprobs(hidden, weight, ids, bias).square().sum()
    expected = torch.autograd.grad(value, leaves, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(value, leaves)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_nothing_scored() -> None:
    hidden, weight, ids, bias = case()
    value = linear_topk_logprobs(hidden, weight, torch.full_like(ids, -100), bias)
    assert (value == 0).all()
    for gradient in torch.autograd.grad(value.sum(), (hidden, weight, bias)):
        assert (gradient == 0).all()


@pytest.mark.parametrize("tail", ["renormalise", "bucket"])
def test_distillation_from_a_stored_teacher(tail: str) -> None:
    """B56 end to end: with all of the vocabulary stored, it is the divergence of whole logits."""
    hidden, weight, _, bias = case()
    hidden = hidden.detach().nan_to_num().requires_grad_()
    log_t = torch.randn(2, 7, V, dtype=torch.float64).log_softmax(-1)
    stored, ids = log_t.topk(V)
    value = topk_divergence(linear_topk_logprobs(hidden, weight, ids, bias), stored, tail=tail).mean()
    expected = divergence(hidden @ weight.T + bias, log_t).mean()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*(torch.autograd.grad(v, (hidden, weight, bias)) for v in (value, expected)))


@pytest.mark.unpoisoned
def test_same_bits() -> None:
    hidden, weight, ids, bias = case(torch.float32)
    runs = [
        torch.autograd.grad(linear_topk_logprobs(hidden, weight, ids, bias).sum(), (hidden, weight, bias))
        for _ in range(3)
    ]
    for run in runs[1:]:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(run, runs[0], strict=True))


HIDDEN, WEIGHT, IDS = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ids": None}, TypeError, "ids: got NoneType, expected a torch.Tensor"),
        ({"ids": IDS[:, :0]}, ValueError, r"ids: got shape \(3, 0\), expected \[\*, k\] with k >= 1"),
        ({"ids": IDS.float()}, TypeError, "^ids: got dtype torch.float32, expected an integer"),
        ({"ids": IDS[:2]}, ValueError, r"^ids: got shape \(2, 2\), expected \(3, 'k'\), by hidden's \(3, 4\)"),
        ({"ids": IDS.to("meta")}, ValueError, "^ids: got a tensor on meta, which holds no values"),
        ({"ids": IDS + 5}, ValueError, r"ids: got 5, expected -100 or an id in \[0, 5\)"),
        ({"ids": IDS - 1}, ValueError, r"ids: got -1, expected -100 or an id in \[0, 5\)"),
        ({"temperature": 0.0}, ValueError, "temperature: got 0.0, expected a finite number > 0"),
        ({"temperature": torch.ones(2)}, ValueError, r"temperature: got shape \[2\], expected \[3\]"),
        ({"strategy": "immediate"}, ValueError, "^strategy: got 'immediate', which is for fused_linear_loss"),
        ({"logits_dtype": "bf16"}, ValueError, "^logits_dtype: got 'bf16'"),
        ({"active_vocab": "on"}, ValueError, "^active_vocab: got 'on'"),
        ({"memory_budget": -1}, ValueError, "memory_budget: got -1"),
    ],
)
def test_refusals(arguments: dict, error: type[Exception], message: str) -> None:
    call = {"hidden": HIDDEN.clone().requires_grad_(), "weight": WEIGHT, "ids": IDS, **arguments}
    with pytest.raises(error, match=message):
        linear_topk_logprobs(**call)


def test_compiles_as_one_graph() -> None:
    """Ids that the traced function closes over are data all the same: nothing may branch on them."""
    hidden, weight, ids, bias = case(torch.float32)
    compiled = torch.compile(lambda h: linear_topk_logprobs(h, weight, ids, bias), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(hidden), linear_topk_logprobs(hidden, weight, ids, bias), equal_nan=True)
