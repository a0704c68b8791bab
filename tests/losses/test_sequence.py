from __future__ import annotations

import pytest
import torch

from liger_losses.losses import (
    alignment_weights,
    length_desensitized_logprobs,
    sequence_lengths,
    sequence_logprobs,
)

from .batch import make_batch


def rows_of(batch):
    """Each row's scored log-probs alone, as a list."""
    logprobs = batch.statistics()["logprob"]
    return [row[scored] for row, scored in zip(logprobs, batch.mask, strict=True)]


def test_sum_and_mean_are_those_of_the_scored_tokens_alone() -> None:
    batch = make_batch()
    logprobs, rows = batch.statistics()["logprob"], rows_of(batch)
    torch.testing.assert_close(sequence_logprobs(logprobs, batch.mask), torch.stack([row.sum() for row in rows]))
    torch.testing.assert_close(
        sequence_logprobs(logprobs, batch.mask, average=True), torch.stack([row.mean() for row in rows])
    )
    assert sequence_lengths(batch.mask).tolist() == [len(row) for row in rows]


@pytest.mark.parametrize("average", [False, True])
def test_empty_row_is_zero_with_zero_gradient(average: bool) -> None:
    logprobs = torch.full((2, 3), -1.5, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False] * 3, [True] * 3])
    value = sequence_logprobs(logprobs, mask, average=average)
    assert value.tolist() == [0.0, -1.5 if average else -4.5]
    value.sum().backward()
    assert logprobs.grad[0].tolist() == [0.0] * 3
    assert (logprobs.grad[1] != 0).all()


@pytest.mark.parametrize("reduce", [sequence_logprobs, lambda x, m: length_desensitized_logprobs(x, m, 0.5)])
def test_what_is_not_scored_is_never_read(reduce) -> None:
    batch = make_batch()
    clean = batch.statistics()["logprob"]
    for junk in (float("nan"), float("-inf"), 7.0):
        dirty = clean.masked_fill(~batch.mask, junk).requires_grad_()
        value = reduce(dirty, batch.mask)
        assert torch.equal(value, reduce(clean, batch.mask))
        value.sum().backward()
        assert (dirty.grad[~batch.mask] == 0).all()


def test_length_desensitization() -> None:
    batch = make_batch()
    rows = rows_of(batch)
    assert len({len(row) for row in rows}) > 2
    expected = []
    for index, row in enumerate(rows):
        shared = min(len(row), len(rows[(index + 5) % 10]))
        expected.append(row[:shared].sum() + 0.3 * row[shared:].sum())
    logprobs = batch.statistics()["logprob"]
    torch.testing.assert_close(length_desensitized_logprobs(logprobs, batch.mask, 0.3), torch.stack(expected))
    torch.testing.assert_close(
        length_desensitized_logprobs(logprobs, batch.mask, 1.0), sequence_logprobs(logprobs, batch.mask)
    )


def test_alignment_weights() -> None:
    batch = make_batch()
    batch.mask[3] = False
    statistics = batch.leaf().statistics()
    weights = alignment_weights(statistics["logprob"], statistics["log_sum_sq_prob"], batch.mask)
    assert not weights.requires_grad
    assert weights[3] == 1
    p = batch.logits[0].softmax(-1)
    ratio = p.gather(-1, batch.target[0].unsqueeze(-1)).squeeze(-1) / p.square().sum(-1)
    torch.testing.assert_close(weights[0], ratio.log().mean().exp())


def test_bad_input() -> None:
    logprobs = torch.zeros(4, 3)
    for shape in ((3,), (4, 1), ()):  # all of these would be broadcast
        with pytest.raises(ValueError, match=r"log_sum_sq_probs: got shape .*, expected \[4, 3\]"):
            alignment_weights(logprobs, torch.zeros(shape), torch.ones(4, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask: got torch.int64, expected a torch.bool"):
        sequence_logprobs(logprobs, torch.ones(4, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"mask: got shape \[4, 2\].*\[4, 3\]"):
        sequence_logprobs(logprobs, torch.ones(4, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"got 3 rows, expected an even number"):
        length_desensitized_logprobs(torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool), 0.5)
