"""The loss modules under liger-kernel's names: the same constructor keywords, `forward` order and returned values.

A module holds a loss object and a `CallOptions`; the mathematics is in `losses`, the tiling in `chunked`, and what the
modules share, in `base`.
"""

from __future__ import annotations

from .policy import LigerFusedLinearGRPOLoss
from .preference import LigerFusedLinearDPOLoss

__all__ = ["LigerFusedLinearDPOLoss", "LigerFusedLinearGRPOLoss"]
