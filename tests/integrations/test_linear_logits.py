"""Logits left as a product against real ones, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from liger_losses.integrations._linear_logits import LinearLogits, WithLinearLogits
from liger_losses.integrations.transformers import fuse_head

from .tiny import tiny_model

IDS = torch.randint(3, 200, (2, 6), generator=torch.Generator().manual_seed(0))


def _both(family: str = "llama", seed: int = 0, **options: Any) -> tuple[Any, torch.Tensor, LinearLogits]:
    model = tiny_model(family, seed).double()
    fuse_head(model, **options)
    return model, model(input_ids=IDS).logits, model(input_ids=IDS, linear_logits=True)


def _top(logits: Any) -> torch.Tensor:
    values, tokens = torch.topk(logits, k=4, dim=-1)
    return torch.cat([values - torch.logsumexp(logits, dim=-1, keepdim=True), tokens.double()], -1)


READINGS: dict[str, Callable[[Any], torch.Tensor]] = {
    "log-probabilities": lambda z: (F.log_softmax(z[:, :-1] / 0.7, dim=-1)).gather(-1, IDS[:, 1:, None]),
    "of several tokens": lambda z: F.log_softmax(z[..., 1:, :], dim=-1).gather(dim=-1, index=IDS[:, 1:, None] + torch.arange(-2, 1)),
    "row by row": lambda z: torch.stack([torch.gather(row, -1, i[:, None]) - torch.logsumexp(row, -1, keepdim=True) for row, i in zip(z, IDS, strict=True)]),
    "top k": lambda z: _top(z / 2.0),
    "top of a mask": lambda z: _top(z[IDS > 90]),
    "likeliest": lambda z: z.argmax(dim=-1).double(),
    "nothing": lambda z: z.sum() * 0.0,
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("name", READINGS)
def test_readings_are_those_of_the_logits(name: str, family: str) -> None:
    model, logits, linear = _both(family)
    gradients = []
    for given in (logits, linear):
        model.zero_grad()
        seen = READINGS[name](given)
        if seen.requires_grad:
            (seen * torch.arange(1.0, 1 + seen.numel(), dtype=seen.dtype).view(seen.shape)).sum().backward()
        gradients.append((seen.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("budget", [None, 400_000])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_divergences(beta: float, budget: int | None) -> None:
    model, logits, linear = _both(memory_budget=budget)
    with torch.no_grad():
        _, other, linear_other = _both("gemma2", 1)
    s, t = (logits / 1.5).log_softmax(-1), other.log_softmax(-1)
    m = torch.logaddexp(s + torch.log(torch.tensor(1 - beta)), t + torch.log(torch.tensor(beta)))
    mixture = beta * F.kl_div(m, t, reduction="none", log_target=True) + (1 - beta) * F.kl_div(
        m, s, reduction="none", log_target=True
    )
    ends = {0.0: lambda: F.kl_div(s, t, reduction="none", log_target=True),
            1.0: lambda: F.kl_div(t, s, reduction="none", log_target=True)}  # fmt: skip
    expected = ends.get(beta, lambda: mixture)().sum(-1)
    (expected.sum()).backward()
    gradient = model.lm_head.weight.grad
    model.zero_grad()
    s, t = F.log_softmax(linear / 1.5, -1), F.log_softmax(linear_other, -1)
    if 0 < beta < 1:
        from dataclasses import replace

        s = replace(s, beta=beta)
    pair = (t, s) if beta == 1.0 else (s, t)
    seen = F.kl_div(*pair, reduction="none", log_target=True)
    seen.sum().backward()
    torch.testing.assert_close(seen, expected.detach())
    torch.testing.assert_close(model.lm_head.weight.grad, gradient)


def test_unscored_positions_are_zero_and_not_projected() -> None:
    model, logits, _ = _both()
    mask = torch.ones_like(IDS)
    mask[0, :3] = mask[1, 5] = 0
    linear = WithLinearLogits(model, mask)(input_ids=IDS, logits_to_keep=4).logits
    scored = F.pad(mask[:, 1:], (0, 1))[:, -4:].bool()
    assert linear.shape == (2, 4, 200)
    assert linear.size(-1) == 200
    tokens = IDS[:, -4:, None]
    expected = logits[:, -4:].log_softmax(-1).gather(-1, tokens).masked_fill(~scored[..., None], 0)
    torch.testing.assert_close(linear.gather(-1, tokens), expected)
    assert (linear.at(torch.zeros(2, 4)).gather(-1, tokens) == 0).all()
    assert (linear.argmax(-1)[~scored] == 0).all()
    torch.testing.assert_close(linear.argmax(-1)[scored], logits[:, -4:].argmax(-1)[scored])


def test_the_same_tokens_are_projected_once() -> None:
    _, _, linear = _both()
    tokens = IDS[..., None]
    assert linear.gather(-1, tokens) is linear.gather(-1, IDS.unsqueeze(-1))
    assert linear.gather(-1, tokens) is not linear.gather(-1, tokens.clone())
    values, top = linear.topk(3)
    assert linear.log_softmax(-1).gather(-1, top) is values


REFUSED: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda z: z.softmax(-1),
    "exp": lambda z: torch.exp(z),
    "part of the vocabulary": lambda z: z[..., :7],
    "topk(dim=1)": lambda z: z.topk(2, dim=1),
    "log_softmax(dim=0)": lambda z: F.log_softmax(z, dim=0),
    "division by a tensor": lambda z: z / torch.ones(2, 6, 1),
    "their sum": lambda z: z.sum() * 2.0,
    "another kl_div": lambda z: F.kl_div(z, z.detach(), reduction="sum", log_target=True),
    "against other numbers": lambda z: F.kl_div(z, torch.zeros(2, 6, 200), reduction="none", log_target=True),
    "gradient to both": lambda z: F.kl_div(z, z, reduction="none", log_target=True),
    "add": lambda z: torch.add(z, 1.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_answer_raises(name: str) -> None:
    _, _, linear = _both()
    with pytest.raises(TypeError, match="asked for .*" if "(" in name else f"asked for .*({name})"):
        REFUSED[name](linear)
