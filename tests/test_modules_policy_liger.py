"""LigerFusedLinearGRPOLoss against liger-kernel: the same interface, and the same numbers where those are right."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from liger_losses.functional import liger_fused_linear_grpo
from liger_losses.modules import LigerFusedLinearGRPOLoss

from .losses.test_policy_trl import options_of
from .policy_case import OLD, ROWS, TOKENS, make_case


@pytest.fixture(scope="module")
def liger() -> type:
    return pytest.importorskip("liger_kernel.chunked_loss.grpo_loss", exc_type=ImportError).LigerFusedLinearGRPOLoss


def test_interface_of_liger_kernel(liger: type) -> None:
    """Its parameters come first, in its order, with its names and defaults; ours beyond are keyword-only."""
    for function in ("__init__", "forward"):
        theirs = inspect.signature(getattr(liger, function)).parameters
        ours = inspect.signature(getattr(LigerFusedLinearGRPOLoss, function)).parameters
        assert list(ours)[: len(theirs)] == list(theirs)
        assert {name: ours[name].default for name in theirs} == {name: p.default for name, p in theirs.items()}
        assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])


def test_argument_order_of_liger_kernels_function(liger: type) -> None:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    theirs = list(inspect.signature(LigerFusedLinearGRPOFunction.forward).parameters.values())[1:]  # without ctx
    ours = list(inspect.signature(liger_fused_linear_grpo).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]


def against(liger: type, options: dict[str, Any], *more: str, equal: bool = True) -> None:
    """In fp32, which is what it computes in."""
    cases = [make_case(torch.float32) for _ in range(2)]
    results = []
    for module, case in zip(
        (LigerFusedLinearGRPOLoss(**options), liger(**options, compiled=False)), cases, strict=True
    ):
        names = ("advantages", "ref_per_token_logps", *more)
        loss, metrics = module(case.hidden, case.weight, case.ids, case.mask, bias=case.bias,
                               **{name: case.inputs[name] for name in names})  # fmt: skip
        loss.backward()
        results.append((loss.detach(), tuple(metrics), tuple(leaf.grad for leaf in case.leaves)))
    if equal:
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    else:
        assert (results[0][0] - results[1][0]).abs() > 1e-3


def test_liger_kernel_takes_the_mask_for_weights(liger: type) -> None:
    """Here a token is scored where the mask is not zero, whatever it is there; there it is a factor."""
    case = make_case(torch.float32)
    parts = case.mask * torch.linspace(0.1, 3.0, TOKENS)
    same = {"advantages": case.inputs["advantages"], OLD: case.inputs[OLD], "bias": case.bias}
    options: dict[str, Any] = {"beta": 0.0, "use_ref_model": False, "loss_type": "grpo"}
    values = []
    for module in (LigerFusedLinearGRPOLoss(**options), liger(**options, compiled=False)):
        values += [module(case.hidden, case.weight, case.ids, mask, **same)[0] for mask in (case.mask, parts)]
    assert values[0] == values[1]
    assert torch.equal(values[0], LigerFusedLinearGRPOLoss(**options)(
        case.hidden, case.weight, case.ids, -parts.double(), **same)[0])  # fmt: skip
    torch.testing.assert_close(values[2], values[0])
    assert (values[3] - values[2]).abs() > 1e-3


LIGER_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        (name, more)
        for name in LIGER_TYPES
        for more in ((), (OLD,), (OLD, "vllm_is_ratio"))
        if (name, len(more)) != ("vespo", 2)  # see test_liger_kernel_vespo_reads_padding
    ],
)
def test_equals_liger_kernel(liger: type, name: str, more: tuple[str, ...]) -> None:
    against(liger, options_of(name) | {"beta": 0.1, "temperature": 0.8}, *more)


@pytest.mark.parametrize("options", [
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "dapo", "importance_sampling_level": "sequence", "use_bias_correction_kl": True},
    {"loss_type": "dapo", "use_bias_correction_kl": True, "delta": 1.25, "epsilon_high": 0.28},
    {"loss_type": "bnpo", "chunk_size": 2},
], ids=str)  # fmt: skip
def test_options_equal_liger_kernel(liger: type, options: dict[str, Any]) -> None:
    against(liger, options, OLD)


def test_num_items_in_batch_equals_liger_kernel(liger: type) -> None:
    against(liger, {"loss_type": "dapo"}, OLD, "num_items_in_batch")


def test_liger_kernel_luspo_reads_padding_and_divides_by_the_width(liger: type) -> None:
    """B08. Its per-token loss times the row's length, averaged over all B x T positions, masked or not; ours, and
    TRL's, is the mean over rows of the sum over scored tokens."""
    against(liger, {"loss_type": "luspo"}, OLD, equal=False)


def test_liger_kernel_vespo_reads_padding(liger: type) -> None:
    """The logarithms of the sampler's ratios are summed over masked positions too."""
    against(liger, {"loss_type": "vespo"}, OLD, "vllm_is_ratio", equal=False)


def test_liger_kernel_turns_junk_at_masked_positions_into_nan(liger: type) -> None:
    """B07: old log-probabilities of -1e4 under the mask overflow, and infinity times a mask of 0 is NaN."""
    case = make_case(torch.float32)
    old = case.inputs[OLD].masked_fill(case.mask == 0, -1e4)
    arguments = (case.hidden, case.weight, case.ids, case.mask, -case.inputs["advantages"].abs())
    options = {"beta": 0.0, "use_ref_model": False}
    assert liger(**options, compiled=False)(*arguments, old_per_token_logps=old)[0].isnan()
    assert LigerFusedLinearGRPOLoss(**options)(*arguments, old_per_token_logps=old)[0].isfinite()


def test_liger_kernel_broadcasts_advantages_of_tokens(liger: type) -> None:
    """X02: [B, T] advantages of a chunk of rows become [b, b, T]."""
    case = make_case(torch.float32)
    advantages = case.inputs["advantages"].unsqueeze(1).expand(ROWS, TOKENS)
    arguments = (case.hidden, case.weight, case.ids, case.mask, advantages)
    losses = [liger(beta=0.0, use_ref_model=False, compiled=False, chunk_size=size)(*arguments)[0] for size in (1, 5)]
    assert (losses[0] - losses[1]).abs() > 1e-3
