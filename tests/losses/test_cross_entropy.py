from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from liger_losses.chunked import fused_linear_loss
from liger_losses.losses import BinaryCrossEntropyLoss, CrossEntropyLoss, TokenSelection, cross_entropy_loss

from .batch import VOCAB, make_batch


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_is_torch_cross_entropy(reduction: str) -> None:
    ours, theirs = make_batch().leaf(), make_batch().leaf()
    value = cross_entropy_loss(ours.statistics()["logprob"], ours.mask, reduction=reduction)
    expected = F.cross_entropy(theirs.logits.reshape(-1, VOCAB), theirs.target.reshape(-1), reduction=reduction)
    torch.testing.assert_close(value, expected)
    value.backward()
    expected.backward()
    torch.testing.assert_close(ours.logits.grad, theirs.logits.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_scored_is_zero_with_zero_gradient(reduction: str) -> None:
    batch = make_batch().leaf()
    batch.mask = torch.zeros_like(batch.mask)
    value = cross_entropy_loss(batch.logits[..., 0], batch.mask, reduction=reduction)
    assert value == 0
    value.backward()
    assert (batch.logits.grad == 0).all()


@pytest.mark.parametrize("count", [17, torch.tensor(17)])
def test_micro_batches_add_up_to_the_batch(count) -> None:
    batch = make_batch()
    logprobs = batch.statistics()["logprob"]
    parts = [
        cross_entropy_loss(logprobs[rows], batch.mask[rows], num_items_in_batch=count)
        for rows in (slice(0, 3), slice(3, 10))
    ]
    torch.testing.assert_close(sum(parts), -logprobs.sum() / 17)


@pytest.mark.parametrize("inputs", [{}, {"num_items_in_batch": torch.tensor(40)}])
def test_contributions_of_token_subsets_add_up(inputs: dict) -> None:
    batch = make_batch()
    loss = CrossEntropyLoss()
    totals = loss.totals(batch.mask, inputs)
    scored = batch.statistics()["logprob"][batch.mask].unsqueeze(0)
    whole, metrics = loss({"logprob": batch.statistics()["logprob"]}, batch.mask, inputs, totals)
    assert metrics == {}
    parts = [
        loss({"logprob": part}, torch.ones_like(part, dtype=torch.bool), inputs, totals)[0]
        for part in scored.split(4, dim=1)
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_object() -> None:
    assert CrossEntropyLoss() == CrossEntropyLoss(reduction="mean")
    assert len({CrossEntropyLoss(), CrossEntropyLoss(reduction="sum")}) == 2
    assert CrossEntropyLoss().separability == "token"


def test_bad_input() -> None:
    logprobs, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"reduction: got 'none', expected one of mean, sum"):
        CrossEntropyLoss(reduction="none")
    with pytest.raises(ValueError, match=r"num_items_in_batch: got a count, expected none with reduction='sum'"):
        cross_entropy_loss(logprobs, mask, reduction="sum", num_items_in_batch=3)
    with pytest.raises(ValueError, match=r"num_items_in_batch: got shape \[2\]"):
        cross_entropy_loss(logprobs, mask, num_items_in_batch=torch.tensor([1, 2]))
    with pytest.raises(TypeError, match="mask: got"):
        cross_entropy_loss(logprobs, mask.long())
    with pytest.raises(ValueError, match="inputs: got weights"):
        CrossEntropyLoss().prepare(mask, {"weights": logprobs})


def test_bad_input_of_binary_cross_entropy() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    for labels, error, message in (
        (2.5, TypeError, "got 2.5, expected an int"),
        (0, ValueError, "got 0, expected >= 1"),
    ):
        with pytest.raises(error, match=f"^labels: {message}"):
            BinaryCrossEntropyLoss(labels=labels)
    with pytest.raises(ValueError, match="inputs: got weights, expected names out of token_weights"):
        BinaryCrossEntropyLoss(labels=3).prepare(mask, {"weights": torch.ones(2, 3)})


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("mean_logprobs", {"label_smoothing": 0.1}),
        ("lse", {"lse_square_scale": 0.1}),
        ("entropy", {"selection": TokenSelection(by="entropy")}),
    ],
)
def test_statistics_of_the_options(argument: str, options: dict) -> None:
    logprobs, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    cross_entropy_loss(logprobs, mask, **{argument: logprobs}, **options)
    with pytest.raises(ValueError, match=f"^{argument}: got None, expected a tensor"):
        cross_entropy_loss(logprobs, mask, **options)
    with pytest.raises(ValueError, match=f"^{argument}: got a tensor, expected None"):
        cross_entropy_loss(logprobs, mask, **{argument: logprobs})
    # All of these would be broadcast.
    for shape in ((3,), (2, 1), (1, 3), ()):
        with pytest.raises(ValueError, match=rf"^{argument}: got shape .*, expected \[2, 3\]"):
            cross_entropy_loss(logprobs, mask, **{argument: torch.zeros(shape)}, **options)
    with pytest.raises(TypeError, match=f"^{argument}: got torch.int64, expected a floating-point tensor"):
        cross_entropy_loss(logprobs, mask, **{argument: mask.long()}, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("max_units", [None, 3])
def test_fused(reduction: str, max_units: int | None) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((4, 6, 8), (VOCAB, 8))
    )
    target = torch.randint(0, VOCAB, (4, 6), generator=generator)
    target[1, 2:] = -100
    target[3] = -100
    loss, _ = fused_linear_loss(CrossEntropyLoss(reduction=reduction), hidden, weight, target, max_units=max_units)
    expected = F.cross_entropy((hidden @ weight.T).reshape(-1, VOCAB), target.reshape(-1), reduction=reduction)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, (hidden, weight)) for value in (loss, expected)))
