"""The loss modules under liger-kernel's names: the same constructor keywords, `forward` order and returned values.

A module holds a loss object and a `CallOptions`; the mathematics is in `losses`, the tiling in `chunked`, and what the
modules share, in `base`.
"""

from __future__ import annotations

from .binary_cross_entropy import LigerFusedLinearBCELoss
from .cross_entropy import CrossEntropyOutput, LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from .distillation import LigerFusedLinearJSD, LigerFusedLinearKLDivLoss
from .divergence import LigerJSD, LigerKLDIVLoss, LigerTVDLoss
from .odds_ratio import LigerFusedLinearORPOLoss
from .policy import LigerFusedLinearGRPOLoss
from .preference import LigerFusedLinearDPOLoss
from .reference_free import (
    LigerFusedLinearAlphaPOLoss,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearSimPOLoss,
    LigerFusedLinearTPOLoss,
)
from .soft_and_hard import LigerFusedLinearCosineSimilarityLoss, LigerFusedLinearJSDLoss
from .unpaired import LigerFusedLinearBCOLoss, LigerFusedLinearKTOLoss

__all__ = [
    "CrossEntropyOutput",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearAlphaPOLoss",
    "LigerFusedLinearBCELoss",
    "LigerFusedLinearBCOLoss",
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSD",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKLDivLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
    "LigerFusedLinearTPOLoss",
    "LigerJSD",
    "LigerKLDIVLoss",
    "LigerTVDLoss",
]
