"""An error names the argument that the caller gave, whatever the engine calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.modules import (
    LigerFusedLinearBCELoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSD,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerFusedLinearKTOLoss,
)

ROWS, TOKENS, WIDTH, VOCAB = 4, 5, 8, 10


def _head(rows: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    target = torch.randint(0, VOCAB - 1, (ROWS, TOKENS))
    target[1, 3] = VOCAB - 1
    return torch.randn(ROWS, TOKENS, WIDTH), torch.randn(rows, WIDTH), target


def _dpo(weight: Tensor, hidden: Tensor, target: Tensor, **reference: Any) -> Tensor:
    return LigerFusedLinearDPOLoss()(weight, hidden, target, **reference)[0]


def _grpo(weight: Tensor, hidden: Tensor, target: Tensor, **reference: Any) -> Tensor:
    scored, advantages = torch.ones(ROWS, TOKENS), torch.ones(ROWS)
    return LigerFusedLinearGRPOLoss()(hidden, weight, target, scored, advantages, **reference)[0]


def _kto(weight: Tensor, hidden: Tensor, target: Tensor, **reference: Any) -> Tensor:
    labels = torch.arange(ROWS) % 2
    module = LigerFusedLinearKTOLoss(use_ref_model=True)
    return module(hidden, weight, target, preference_labels=labels, **reference)[0]


WITH_REFERENCE = pytest.mark.parametrize("call", [_dpo, _grpo, _kto])


@WITH_REFERENCE
def test_a_smaller_vocabulary_of_the_reference(call: Any) -> None:
    """It is the reference's that is too small, for a target that it has no column for; and only then."""
    hidden, weight, target = _head()
    with pytest.raises(ValueError, match=r"^ref_weight: got 9 rows beside the 10 of lin_weight, expected one for every "
                       r"target, among which is 9 at row 1, position 3$"):  # fmt: skip
        call(weight, hidden, target, ref_input=hidden, ref_weight=weight[:9])
    assert call(weight, hidden, target.clamp(max=8), ref_input=hidden, ref_weight=weight[:9]).isfinite()
    assert call(weight[:9], hidden, target.clamp(max=8), ref_input=hidden, ref_weight=weight).isfinite()


@WITH_REFERENCE
def test_a_target_outside_of_both_vocabularies(call: Any) -> None:
    hidden, weight, target = _head()
    name = "selected_token_ids" if call is _grpo else "target"
    with pytest.raises(ValueError, match=rf"^{name}: got 10 at row 1, position 3; expected a class in \[0, 10\)"):
        call(weight, hidden, target + (target == VOCAB - 1).long(), ref_input=hidden, ref_weight=weight[:9])


@WITH_REFERENCE
def test_the_reference_of_two_dtypes(call: Any) -> None:
    hidden, weight, target = _head()
    with pytest.raises(TypeError, match="^ref_input, ref_weight: got float16 and bfloat16"):
        call(weight, hidden, target, ref_input=hidden.half(), ref_weight=weight.bfloat16())
    known = {"ref_input": hidden, "ref_weight": weight}
    with pytest.raises(TypeError, match="^(_input, lin_weight): got float16 and bfloat16"):
        call(weight.bfloat16(), hidden.half(), target, **known)


def test_the_shape_of_the_reference_of_grpo() -> None:
    hidden, weight, target = _head()
    with pytest.raises(ValueError, match="^selected_token_ids: got shape .*that of ref_input"):
        _grpo(weight, hidden, target, ref_input=hidden[:, :4], ref_weight=weight)


def test_distillation() -> None:
    hidden, weight, target = _head()
    jsd, probabilities = LigerFusedLinearJSD(), torch.rand(ROWS, TOKENS, VOCAB)
    for wrong, labels, where in (
        (target.double(), "true_labels", r"got dtype torch\.float64"),
        (target[:, :4], "true_labels", r"got shape \(4, 4\)"),
        (target + 1, "true_labels", "got 10 at row 1, position 3"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{labels}: {where}"):
            LigerFusedLinearJSDLoss()(hidden, weight, hidden, weight, wrong)
    with pytest.raises(TypeError, match="^student_input, student_weight: got float16 and bfloat16"):
        jsd(hidden.half(), weight.bfloat16(), hidden, weight)
    with pytest.raises(ValueError, match="^shift_labels: got 10 at row 1"):
        LigerFusedLinearKLDivLoss()(hidden, weight, probabilities, target + 1)


def test_rows_of_positives() -> None:
    hidden, weight, target = _head()
    with pytest.raises(ValueError, match=r"^positives: got shape \(4,\), expected \(5,\), that of _input"):
        LigerFusedLinearBCELoss()(weight, hidden[0], target)
