"""Fused linear losses for LLM post-training: the projection and the loss, tile by tile, never the whole logits.

Public names are resolved on first use (PEP 562), so that importing the package costs nothing and pulls in neither
torch nor triton nor a trainer library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from liger_losses._version import __version__

if TYPE_CHECKING:
    from liger_losses import functional, losses, testing
    from liger_losses.chunked import (
        Divergence,
        fused_linear_distillation,
        fused_linear_loss,
        linear_divergence,
        linear_logprobs,
        linear_topk_logprobs,
        logit_statistics,
        record_active_vocabulary,
    )
    from liger_losses.chunked.planner import plan
    from liger_losses.modules import (
        LigerCrossEntropyLoss,
        LigerFusedLinearAlphaPOLoss,
        LigerFusedLinearBCELoss,
        LigerFusedLinearBCOLoss,
        LigerFusedLinearCosineSimilarityLoss,
        LigerFusedLinearCPOLoss,
        LigerFusedLinearCrossEntropyLoss,
        LigerFusedLinearDPOLoss,
        LigerFusedLinearGRPOLoss,
        LigerFusedLinearJSD,
        LigerFusedLinearJSDLoss,
        LigerFusedLinearKLDivLoss,
        LigerFusedLinearKTOLoss,
        LigerFusedLinearORPOLoss,
        LigerFusedLinearSimPOLoss,
        LigerFusedLinearTPOLoss,
        LigerJSD,
        LigerKLDIVLoss,
        LigerTVDLoss,
    )

__all__ = [
    "Divergence",
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
    "__version__",
    "functional",
    "fused_linear_distillation",
    "fused_linear_loss",
    "linear_divergence",
    "linear_logprobs",
    "linear_topk_logprobs",
    "logit_statistics",
    "losses",
    "plan",
    "record_active_vocabulary",
    "testing",
]

# Name -> the module that defines it; a name that is a submodule maps to None.
_HOMES: dict[str, str | None] = {
    "Divergence": "liger_losses.chunked",
    "LigerCrossEntropyLoss": "liger_losses.modules",
    "LigerFusedLinearAlphaPOLoss": "liger_losses.modules",
    "LigerFusedLinearBCELoss": "liger_losses.modules",
    "LigerFusedLinearBCOLoss": "liger_losses.modules",
    "LigerFusedLinearCPOLoss": "liger_losses.modules",
    "LigerFusedLinearCosineSimilarityLoss": "liger_losses.modules",
    "LigerFusedLinearCrossEntropyLoss": "liger_losses.modules",
    "LigerFusedLinearDPOLoss": "liger_losses.modules",
    "LigerFusedLinearGRPOLoss": "liger_losses.modules",
    "LigerFusedLinearJSD": "liger_losses.modules",
    "LigerFusedLinearJSDLoss": "liger_losses.modules",
    "LigerFusedLinearKLDivLoss": "liger_losses.modules",
    "LigerFusedLinearKTOLoss": "liger_losses.modules",
    "LigerFusedLinearORPOLoss": "liger_losses.modules",
    "LigerFusedLinearSimPOLoss": "liger_losses.modules",
    "LigerFusedLinearTPOLoss": "liger_losses.modules",
    "LigerJSD": "liger_losses.modules",
    "LigerKLDIVLoss": "liger_losses.modules",
    "LigerTVDLoss": "liger_losses.modules",
    "functional": None,
    "fused_linear_distillation": "liger_losses.chunked",
    "fused_linear_loss": "liger_losses.chunked",
    "linear_divergence": "liger_losses.chunked",
    "linear_logprobs": "liger_losses.chunked",
    "linear_topk_logprobs": "liger_losses.chunked",
    "logit_statistics": "liger_losses.chunked",
    "losses": None,
    "plan": "liger_losses.chunked.planner",
    "record_active_vocabulary": "liger_losses.chunked",
    "testing": None,
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    value = import_module(f"{__name__}.{name}") if home is None else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
