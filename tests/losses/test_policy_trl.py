"""GRPOLoss equals TRL's own loss code: value, gradient and what it logs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liger_losses.losses import POLICY_TYPES, GRPOLoss

from .policy_batch import evaluate, make_rollouts, trl_loss

# PPO's loss is the trainer's dapo.
TRL_TYPES = [name for name in POLICY_TYPES if name != "ppo"]
GRPO_TYPES = [name for name in TRL_TYPES if name not in ("gmpo", "rloo")]  # those of its GRPOTrainer
CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "gspo"]


def options_of(name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"loss_type": name}
    if name == "dr_grpo":
        options["max_completion_length"] = 9
    if name == "cispo":
        options["epsilon_high"] = 1.3
    return options


def compare(options: dict[str, Any], *more: str, on_policy: bool = False, advantages: str = "row") -> None:
    loss = GRPOLoss(**options, on_policy=on_policy)
    batch, theirs = make_rollouts().leaf(), make_rollouts().leaf()
    inputs = batch.wanted(loss, *more)
    if advantages == "token":
        inputs["advantages"] = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(5)).double()
    value, metrics = evaluate(loss, batch, inputs)
    expected, logged = trl_loss(loss, theirs, inputs)
    # fp32 constants of theirs: rho of the quantile, SAPO's and VESPO's coefficients.
    tolerance = {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(value, expected.double(), **tolerance)
    value.backward()
    expected.backward()
    torch.testing.assert_close(batch.logits.grad, theirs.logits.grad, **tolerance)
    assert batch.logits.grad.abs().max() > 0
    for ours, name in {"kl": "kl", "entropy": "entropy"}.items():
        if ours in metrics and name in logged:
            assert metrics[ours].item() == pytest.approx(logged[name], rel=1e-5)
    if loss.level == "token" and "clip_ratio/low_mean" in logged:  # theirs is a share of rows with a sequence's ratio
        for name in ("low", "high"):
            assert metrics[f"clip_{name}"].item() == pytest.approx(logged[f"clip_ratio/{name}_mean"], rel=1e-5)
        assert metrics["clip_ratio"].item() == pytest.approx(logged["clip_ratio/region_mean"], rel=1e-5)
    if "cispo_clip_ratio" in logged and loss.level == "token":
        assert metrics["clip_ratio"].item() == pytest.approx(logged["cispo_clip_ratio"], rel=1e-5)


@pytest.mark.parametrize("name", TRL_TYPES)
def test_types(name: str) -> None:
    compare({**options_of(name), "report_entropy": True})


@pytest.mark.parametrize("name", [name for name in TRL_TYPES if name != "rloo"])
@pytest.mark.parametrize("on_policy", [False, True])
def test_kl(name: str, on_policy: bool) -> None:
    compare({**options_of(name), "beta": 0.2}, on_policy=on_policy)


@pytest.mark.parametrize("name", GRPO_TYPES)
@pytest.mark.parametrize("on_policy", [False, True])
def test_bias_corrected_kl(name: str, on_policy: bool) -> None:
    compare({**options_of(name), "beta": 0.2, "use_bias_correction_kl": True}, on_policy=on_policy)


@pytest.mark.parametrize("name", CLIPPED)
def test_two_sided_clip(name: str) -> None:
    compare({**options_of(name), "delta": 1.25})


@pytest.mark.parametrize("name", [name for name in GRPO_TYPES if name not in ("vespo", "gspo")])
def test_sequence_level(name: str) -> None:
    compare({**options_of(name), "importance_sampling_level": "sequence", "beta": 0.1})


@pytest.mark.parametrize("name", GRPO_TYPES)
@pytest.mark.parametrize("options", [
    {"entropy_coef": 0.3}, {"top_entropy_quantile": 0.4}, {"top_entropy_quantile": 0.25, "entropy_coef": 0.3},
    {"top_entropy_quantile": 0.05}, {"off_policy_mask_threshold": 0.05},
], ids=str)  # fmt: skip
def test_entropy_and_masks(name: str, options: dict[str, Any]) -> None:
    compare({**options_of(name), **options, "beta": 0.1})


def test_gmpo_leaves_out_low_entropies_inside_the_mean() -> None:
    compare({"loss_type": "gmpo", "top_entropy_quantile": 0.4, "epsilon_low": 0.1, "epsilon_high": 0.15})


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, f"{level}_{action}")
        for name in GRPO_TYPES
        for level in ("token", "sequence")
        for action in ("truncate", "mask")
        if (name, level) != ("vespo", "sequence")  # refused by both
    ],
)
@pytest.mark.parametrize("on_policy", [False, True])
def test_sampler_correction(name: str, mode: str, on_policy: bool) -> None:
    bounds = {"sampler_clip_min": 0.6, "sampler_clip_max": 1.2}
    compare({**options_of(name), "sampler_mode": mode, "beta": 0.1, **bounds}, on_policy=on_policy)


@pytest.mark.parametrize("name", GRPO_TYPES)
def test_advantages_per_token(name: str) -> None:
    compare(options_of(name), advantages="token")


@pytest.mark.parametrize("name", ["dapo", "cispo", "vespo"])
def test_num_items_in_batch(name: str) -> None:
    """B10: divided by the whole step's tokens, a process's share of them."""
    compare({**options_of(name), "num_processes": 4}, "num_items_in_batch")


def test_sampled_log_probabilities_that_are_not_known() -> None:
    """vLLM reports NaN for them: no correction, and no evidence of drift."""
    loss = GRPOLoss(sampler_mode="sequence_truncate", off_policy_mask_threshold=0.05)
    batch, theirs = make_rollouts().leaf(), make_rollouts().leaf()
    inputs = batch.wanted(loss)
    inputs["sampling_logprobs"] = inputs["sampling_logprobs"].clone()
    inputs["sampling_logprobs"][0, 2] = torch.nan
    value, expected = evaluate(loss, batch, inputs)[0], trl_loss(loss, theirs, inputs)[0]
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*(torch.autograd.grad(v, b.logits) for v, b in ((value, batch), (expected, theirs))))
