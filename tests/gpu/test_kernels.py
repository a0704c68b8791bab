"""The Triton kernels at the widths of real vocabularies, and beyond 2^31 elements."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_losses.kernels import STATISTICS, Emit, LogitTransform, RowState, fold_tile, implementation, tile_gradient

from ..oracle import EXACT, check_close, largest, read_statistics

pytestmark = pytest.mark.gpu

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TRANSFORM = LogitTransform(1.1, 30.0, 0.9)
ROWS = 37


def random_tile(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of a standard deviation of 4 in rows on 8-element boundaries, and targets."""
    generator = torch.Generator("cuda").manual_seed(vocab)
    tile = torch.empty(ROWS, -(-vocab // 8) * 8, dtype=dtype, device="cuda")[:, :vocab]
    tile.normal_(std=4, generator=generator)
    return tile, torch.randint(0, vocab, (ROWS,), device="cuda", generator=generator)


def fold(tile: Tensor, target: Tensor, form: str, emit: Emit = Emit.NOTHING, out: Tensor | None = None) -> RowState:
    state = RowState(tile.shape[0], STATISTICS, device=tile.device, dtype=F32)
    with implementation(form):
        fold_tile(tile, None, target, state, TRANSFORM, emit=emit, out=out)
    return state


@pytest.mark.parametrize("vocab", [32_003, 128_256, 151_936])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_statistics(vocab: int, dtype: torch.dtype) -> None:
    tile, target = random_tile(vocab, dtype)
    got, twin = (fold(tile, target, form).statistics(vocab) for form in ("triton", "torch"))
    z = TRANSFORM.apply(tile.double(), None)[0]
    exact = read_statistics(z, target)
    for name, value in got.items():
        if name in EXACT:
            assert torch.equal(value, exact[name])
        else:
            check_close(value, exact[name], twin[name], F32, terms=vocab, scale=largest(z), what=name)


@pytest.mark.parametrize("vocab", [32_003, 128_256])
@pytest.mark.parametrize("written", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("emit", [Emit.GRADIENT, Emit.PROBABILITY], ids=lambda emit: emit.name)
def test_what_is_written(vocab: int, written: torch.dtype, emit: Emit) -> None:
    tile, target = random_tile(vocab, F32)
    found = []
    for form in ("triton", "torch"):
        out = torch.empty(ROWS, -(-vocab // 8) * 8, dtype=written, device="cuda")[:, :vocab]
        state = fold(tile, target, form, emit, out)
        found.append(out.double() * state.gradient_scale.double().unsqueeze(-1))
    z, slope = TRANSFORM.apply(tile.double(), None)
    p = z.softmax(-1)
    exact = p if emit == Emit.PROBABILITY else (torch.nn.functional.one_hot(target, vocab) - p) * slope
    check_close(found[0], exact, found[1], written, terms=vocab)


@pytest.mark.parametrize("vocab", [32_003, 128_256])
@pytest.mark.parametrize("from_probability", [False, True])
def test_gradient(vocab: int, from_probability: bool) -> None:
    tile, target = random_tile(vocab, F32)
    z, slope = TRANSFORM.apply(tile.double(), None)
    values = {name: value.float() for name, value in read_statistics(z, target).items()}
    sent = torch.randn(3, ROWS, device="cuda")
    found = []
    for form in ("triton", "torch"):
        held = torch.empty(ROWS, -(-vocab // 8) * 8, dtype=BF16, device="cuda")[:, :vocab]
        held.copy_(z.softmax(-1))
        with implementation(form):
            tile_gradient(
                held if from_probability else tile, None, target, lse=values["lse"], logprob=values["logprob"],
                entropy=values["entropy"], dlogprob=sent[0], dentropy=sent[1], dlse=sent[2], transform=TRANSFORM,
                out=held, probability_scale=torch.ones(ROWS, device="cuda") if from_probability else None,
            )  # fmt: skip
        found.append(held)
    p, log_p = z.softmax(-1), z.log_softmax(-1)
    hot = torch.nn.functional.one_hot(target, vocab)
    a, h, one = sent.double().unsqueeze(-1)
    exact = (a * (hot - p) - h * p * (log_p + values["entropy"].double().unsqueeze(-1)) + one * p) * slope
    check_close(found[0], exact, found[1], BF16, terms=vocab)


def test_offsets_beyond_32_bits() -> None:
    """B33: 17,000 rows of 128,256 are 2.2e9 elements; the last row is where the first would be, modulo 2^32."""
    rows, vocab = 17_000, 128_256
    assert rows * vocab > 2**31
    tile = torch.empty(rows, vocab, dtype=BF16, device="cuda")
    tile.normal_(generator=torch.Generator("cuda").manual_seed(0))
    out = torch.empty_like(tile)
    target = torch.arange(rows, device="cuda")
    some = torch.tensor([0, 1, 16_743, 16_744, 16_745, rows - 1], device="cuda")
    state = fold(tile, target, "triton", Emit.GRADIENT, out)
    small_out = torch.empty(len(some), vocab, dtype=BF16, device="cuda")
    small = fold(tile[some], target[some], "triton", Emit.GRADIENT, small_out)
    for name, value in state.statistics(vocab).items():
        assert torch.equal(value[some], small.statistics(vocab)[name])
    assert torch.equal(out[some], small_out)

    vector = state.statistics(vocab)
    options = {"entropy": None, "dentropy": None, "dlse": None, "transform": TRANSFORM}
    tile_gradient(tile, None, target, lse=vector["lse"], logprob=vector["logprob"], dlogprob=vector["lse"], out=out,
                  **options)  # fmt: skip
    tile_gradient(tile[some], None, target[some], lse=vector["lse"][some], logprob=vector["logprob"][some],
                  dlogprob=vector["lse"][some], out=small_out, **options)  # fmt: skip
    assert torch.equal(out[some], small_out)
