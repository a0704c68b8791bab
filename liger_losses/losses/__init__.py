"""Losses of post-training: pure functions of log-probabilities, and the same as loss objects for the fused engine."""

from __future__ import annotations

from .cross_entropy import BinaryCrossEntropyLoss, CrossEntropyLoss, cross_entropy_loss
from .divergence import divergence, logprob_divergence
from .divergence_kinds import DIVERGENCES
from .dpo import DPOLoss
from .f_divergence import F_DIVERGENCES, f_divergence_score
from .policy import GRPOLoss, grpo_loss
from .policy_types import POLICY_TYPES
from .preference import dpo_loss
from .preference_types import LOSS_TYPES
from .reference_free import REFERENCE_FREE_TYPES, ReferenceFreeLoss, log_odds, reference_free_loss
from .selection import TokenSelection
from .sequence import alignment_weights, length_desensitized_logprobs, sequence_lengths, sequence_logprobs
from .topk_divergence import SampledKLLoss, sampled_kl, topk_divergence
from .unpaired import KTO_LOSS_TYPES, BCOLoss, KTOLoss, bco_loss, kto_loss

__all__ = [
    "DIVERGENCES",
    "F_DIVERGENCES",
    "KTO_LOSS_TYPES",
    "LOSS_TYPES",
    "POLICY_TYPES",
    "REFERENCE_FREE_TYPES",
    "BCOLoss",
    "BinaryCrossEntropyLoss",
    "CrossEntropyLoss",
    "DPOLoss",
    "GRPOLoss",
    "KTOLoss",
    "ReferenceFreeLoss",
    "SampledKLLoss",
    "TokenSelection",
    "alignment_weights",
    "bco_loss",
    "cross_entropy_loss",
    "divergence",
    "dpo_loss",
    "f_divergence_score",
    "grpo_loss",
    "kto_loss",
    "length_desensitized_logprobs",
    "log_odds",
    "logprob_divergence",
    "reference_free_loss",
    "sampled_kl",
    "sequence_lengths",
    "sequence_logprobs",
    "topk_divergence",
]
