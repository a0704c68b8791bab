"""The stand-in for logits against real ones, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from liger_losses.integrations._scored_logits import ScoredLogits, reading_scored_logits

V = 7


def _both() -> tuple[torch.Tensor, torch.Tensor, ScoredLogits]:
    """Logits [2, 5, V], labels with two positions unscored, and the stand-in that knows what a fused head says of them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, V, generator=generator, dtype=torch.float64)
    labels = torch.randint(V, (2, 5), generator=generator)
    labels[0, 0] = logits[0, 0].argmax()
    labels[0, 4] = labels[1, 1] = -100
    scored = labels != -100
    logp = logits.log_softmax(-1)
    fields = {
        "target": labels,
        "log_probs": logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * scored,
        "entropy": -(logp.exp() * logp).sum(-1) * scored,
        "mean_logits": logits.mean(-1),
        "is_top1": (logits.argmax(-1) == labels) & scored,
    }
    return logits, labels, ScoredLogits(fields, V, scored_means_only=False)


READINGS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "cross entropy": lambda z, y: torch.nn.functional.cross_entropy(z.view(-1, z.shape[-1]), y.reshape(-1)),
    "of one row": lambda z, y: torch.nn.functional.cross_entropy(z[1].view(-1, V), y[1]),
    "of a slice": lambda z, y: torch.nn.CrossEntropyLoss()(z[:1, :-1, :].contiguous().view(-1, V), y[:1, :-1].reshape(-1)),
    "of a mask": lambda z, y: torch.nn.functional.cross_entropy(z[..., :-1, :][y[..., :-1] != -100], y[..., :-1][y[..., :-1] != -100]),
    "mean": lambda z, y: z.detach().mean(),
    "means": lambda z, y: z[:, 1:-1].mean(-1).sum(),
    "halves": lambda z, y: z.chunk(2, dim=0)[1].mean(),
    "top": lambda z, y: (z.argmax(dim=-1) == y).double().sum(),
    "taken": lambda z, y: torch.take_along_dim(z[:, 1:4][:1].log_softmax(dim=-1), y[:1, 1:4, None], dim=2).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", READINGS)
def test_readings_are_those_of_the_logits(name: str) -> None:
    logits, labels, scored = _both()
    torch.testing.assert_close(READINGS[name](scored, labels), READINGS[name](logits, labels))


def test_means_of_scored_positions_only() -> None:
    logits, labels, scored = _both()
    means = ScoredLogits(scored._fields, V, scored_means_only=True)
    torch.testing.assert_close(means.mean(), logits[labels != -100].mean())


def test_the_mean_over_no_scored_position_is_0() -> None:
    _, labels, scored = _both()
    fields = {**scored._fields, "target": torch.full_like(labels, -100)}
    assert ScoredLogits(fields, V, scored_means_only=True).mean() == 0


def test_another_token_than_the_scored_one_is_nan() -> None:
    _, labels, scored = _both()
    other = (labels + 1) % V
    assert torch.take_along_dim(scored.log_softmax(-1), other[..., None], dim=-1).isnan().all()
    assert torch.nn.functional.cross_entropy(scored.view(-1, V), other.view(-1)).isnan()


@pytest.mark.parametrize(
    "reading",
    [
        lambda z: z / 2,
        lambda z: z.float(),
        lambda z: z.max(-1),
        lambda z: z[..., :3],
        lambda z: z.view(5, -1),
        lambda z: z.log_softmax(1),
        lambda z: torch.logsumexp(z, -1),
        lambda z: torch.nn.functional.cross_entropy(z.view(-1, V), torch.zeros(10).long(), label_smoothing=0.1),
        lambda z: ScoredLogits({"target": torch.zeros(1)}, V, False).mean(),
    ],
)
def test_everything_else_raises(reading: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError):
        reading(_both()[2])


def selective_log_softmax(logits: Any, index: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    return (logits / temperature).log_softmax(-1).gather(-1, index[..., None])[..., 0]


def _reads(logits: Any, index: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    return selective_log_softmax(logits, index, temperature=temperature)


def test_only_the_copy_of_a_function_knows_the_stand_in() -> None:
    logits, labels, scored = _both()
    index = labels.clamp(min=0)
    ours = reading_scored_logits(_reads)
    mask = labels != -100
    torch.testing.assert_close(ours(scored, index)[mask], _reads(logits, index)[mask])
    torch.testing.assert_close(ours(logits, index), _reads(logits, index))
    with pytest.raises(TypeError):
        _reads(scored, index)
    with pytest.raises(TypeError, match="selective_log_softmax with"):
        ours(scored, index, temperature=0.5)
