"""Tests for losses, a user's own too: the fused loss against the same object on whole logits, and its contract.

`assert_fused_matches_unfused(loss)` is the whole of it for most uses. The parts it is made of are public as well: a
`Case` of tensors (`make_case`), statistics of whole logits in plain torch (`unfused`), and the rule for how far off a
computation may be (`check_close`). Failures are `AssertionError`; no test framework is needed.
"""

from __future__ import annotations

from .contract import check_contract
from .oracle import Case, check_close, check_loss, make_case, unfused, unfused_loss
from .parity import assert_fused_matches_unfused

__all__ = [
    "Case",
    "assert_fused_matches_unfused",
    "check_close",
    "check_contract",
    "check_loss",
    "make_case",
    "unfused",
    "unfused_loss",
]
