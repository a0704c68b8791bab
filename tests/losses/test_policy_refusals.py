"""GRPOLoss refuses what it would otherwise ignore, and inputs that do not fit."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.losses import GRPOLoss, grpo_loss

from .policy_batch import make_rollouts


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_type": "gpro"}, ValueError, "loss_type: got 'gpro', expected one of grpo, bnpo, dr_grpo, dapo"),
        ({"importance_sampling_level": "row"}, ValueError, "importance_sampling_level: got 'row', expected one of token"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, ValueError,
         "importance_sampling_level: got 'sequence', expected 'token' with loss_type 'vespo'"),
        ({"kl_estimator": "k4"}, ValueError, "kl_estimator: got 'k4', expected one of k1, k2, k3"),
        ({"beta": -1.0}, ValueError, "beta: got -1.0, expected a finite number >= 0"),
        ({"epsilon_low": math.nan}, ValueError, "epsilon_low: got nan, expected a finite number >= 0"),
        ({"delta": 0}, ValueError, "delta: got 0, expected a finite number > 0"),
        ({"delta": 2.0, "loss_type": "cispo"}, ValueError, "delta: got 2.0, expected the default with loss_type 'cispo'"),
        ({"epsilon_low": 0.1, "loss_type": "cispo"}, ValueError, "epsilon_low: got 0.1, expected the default with"),
        ({"sapo_temperature_pos": 2.0}, ValueError, "sapo_temperature_pos: got 2.0, expected the default with"),
        ({"sapo_temperature_neg": 0.0, "loss_type": "sapo"}, ValueError, "sapo_temperature_neg: got 0.0, expected"),
        ({"vespo_k_pos": 1.0, "loss_type": "sapo"}, ValueError, "vespo_k_pos: got 1.0, expected the default"),
        ({"vespo_lambda_neg": 0.0, "loss_type": "vespo"}, ValueError, "vespo_lambda_neg: got 0.0, expected"),
        ({"loss_type": "dr_grpo"}, ValueError, "max_completion_length: got None, expected a number with"),
        ({"loss_type": "dr_grpo", "max_completion_length": 0}, ValueError, "max_completion_length: got 0, expected >= 1"),
        ({"loss_type": "dr_grpo", "max_completion_length": 8.0}, TypeError, "max_completion_length: got 8.0, expected an int"),
        ({"max_completion_length": 8}, ValueError, "max_completion_length: got 8, expected the default with"),
        ({"vf_coef": 0.5}, ValueError, "vf_coef: got 0.5, expected the default with loss_type 'dapo'"),
        ({"loss_type": "ppo", "value_clip": 0.2}, ValueError, "value_clip: got 0.2, expected None with vf_coef=0"),
        ({"top_entropy_quantile": 1.5}, ValueError, "top_entropy_quantile: got 1.5, expected"),
        ({"off_policy_mask_threshold": -1.0}, ValueError, "off_policy_mask_threshold: got -1.0, expected"),
        ({"sampler_mode": "token"}, ValueError, "sampler_mode: got 'token', expected one of token_truncate"),
        ({"sampler_mode": "sequence_mask", "loss_type": "vespo"}, ValueError, "sampler_mode: got 'sequence_mask', expected token_"),
        ({"sampler_mode": "token_mask", "sampler_clip_max": None}, ValueError, "sampler_clip_max: got None, expected a bound"),
        ({"sampler_clip_min": 0.5}, ValueError, "sampler_clip_min: got 0.5, expected the default without sampler_mode"),
        ({"on_policy": None}, TypeError, "on_policy: got None of type NoneType, expected True or False"),
        ({"num_processes": 0}, ValueError, "num_processes: got 0, expected >= 1"),
        ({"entropy_coef": "x"}, TypeError, "entropy_coef: got 'x' of type str, expected a Python number"),
    ],
)  # fmt: skip
def test_bad_option(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        GRPOLoss(**options)


@pytest.mark.parametrize(
    ("options", "names", "message"),
    [
        ({}, "advantages", "inputs: got advantages, expected advantages, old_logprobs, and at most num_items_in_batch"),
        ({}, "old_logprobs", "inputs: got old_logprobs, expected advantages, old_logprobs"),
        ({"on_policy": True}, "advantages old_logprobs", "inputs: got advantages, old_logprobs, expected advantages, and"),
        ({"beta": 0.1}, "advantages old_logprobs", "expected advantages, old_logprobs, ref_logprobs, and"),
        ({}, "advantages old_logprobs ref_logprobs", "inputs: got advantages, old_logprobs, ref_logprobs, expected"),
        ({"loss_type": "grpo"}, "advantages old_logprobs num_items_in_batch", "num_items_in_batch: got a count with "
         "loss_type='grpo', which is not divided by the tokens of the step; expected none, or one of the types that "
         "are: dapo, cispo, vespo, ppo"),
        ({"sampler_mode": "token_mask"}, "advantages old_logprobs", "expected advantages, old_logprobs, sampling_logprobs"),
        ({"sampler_mode": "token_mask"}, "advantages old_logprobs sampling_logprobs sampling_ratio", "inputs: got"),
        ({}, "advantages old_logprobs sampling_logprobs", "inputs: got"),
        ({"off_policy_mask_threshold": 0.1, "on_policy": True}, "advantages", "expected advantages, sampling_logprobs"),
        ({"loss_type": "ppo", "vf_coef": 1.0}, "advantages old_logprobs values", "old_logprobs, returns, values, and"),
        ({}, "advantages old_logprobs values", "inputs: got"),
    ],
)  # fmt: skip
def test_missing_and_unread_inputs(options: dict[str, Any], names: str, message: str) -> None:
    batch = make_rollouts()
    with pytest.raises(ValueError, match=re.escape(message)):
        GRPOLoss(**options).prepare(batch.mask, {name: batch.inputs[name] for name in names.split()})


def test_bad_inputs() -> None:
    batch, loss = make_rollouts(), GRPOLoss(beta=0.1)
    good = batch.wanted(loss)

    def refused(error: type[Exception], message: str, **bad: Tensor) -> None:
        with pytest.raises(error, match=message):
            loss.prepare(batch.mask, {**good, **bad})

    refused(ValueError, r"old_logprobs: got shape \[5\], expected \[5, 7\]", old_logprobs=good["advantages"])
    refused(TypeError, r"ref_logprobs: got torch\.int64", ref_logprobs=batch.target)
    refused(TypeError, r"advantages: got torch\.int64", advantages=batch.target)
    refused(
        ValueError,
        r"sampling_ratio: got shape \[1, 7\], expected \[5\] or \[5, 1\] or",
        sampling_ratio=torch.ones(1, 7),
    )
    refused(ValueError, r"num_items_in_batch: got shape \[5, 7\], expected \[\]", num_items_in_batch=batch.target)
    with pytest.raises(ValueError, match=r"inputs: got advantages, .*, expected what GRPOLoss.prepare makes of them"):
        loss.totals(batch.mask, good)
    with pytest.raises(TypeError, match=r"mask: got torch\.int64"):
        grpo_loss(good["old_logprobs"], batch.target, good["advantages"])
