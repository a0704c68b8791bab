"""The framework: head, scored tokens, planner, tile walk, and the two ways gradients come about."""

from __future__ import annotations

from ..kernels import Divergence
from .active import ActiveVocabularyReport, record_active_vocabulary
from .api import fused_linear_loss, linear_logprobs
from .distillation import fused_linear_distillation, linear_divergence
from .distillation_loss import DistillationLoss
from .logits import logit_statistics
from .loss import Loss
from .planner import plan
from .problem import Plan
from .tokens import ScoredTokens
from .topk import linear_topk_logprobs

__all__ = [
    "ActiveVocabularyReport",
    "DistillationLoss",
    "Divergence",
    "Loss",
    "Plan",
    "ScoredTokens",
    "fused_linear_distillation",
    "fused_linear_loss",
    "linear_divergence",
    "linear_logprobs",
    "linear_topk_logprobs",
    "logit_statistics",
    "plan",
    "record_active_vocabulary",
]
