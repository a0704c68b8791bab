"""The framework: head, scored tokens, planner, tile walk, and the two ways gradients come about."""

from __future__ import annotations

from .api import fused_linear_loss, linear_logprobs
from .logits import logit_statistics
from .loss import Loss
from .planner import Plan, plan
from .tokens import ScoredTokens

__all__ = ["Loss", "Plan", "ScoredTokens", "fused_linear_loss", "linear_logprobs", "logit_statistics", "plan"]
