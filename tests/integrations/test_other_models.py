"""Models that are not what they were, or never were, what `fuse_model` and `fuse_head` are for."""

from __future__ import annotations

import pickle
from typing import Any

import accelerate
import pytest
import torch

from liger_losses.integrations.transformers import fuse_head, fuse_model, unfuse_head

from .tiny import tiny_model


@pytest.mark.parametrize("fuse", [fuse_model, fuse_head])
@pytest.mark.parametrize("prepared", [False, True])
def test_a_pickled_model_comes_back_unfused_and_can_be_fused(fuse: Any, prepared: bool) -> None:
    model, batch = tiny_model(), dict.fromkeys(("input_ids", "labels"), torch.arange(24).view(2, 12))
    own = model(**batch).loss
    accelerator = accelerate.Accelerator(cpu=True) if prepared else None
    fuse(model)
    if accelerator is not None:
        model = accelerator.prepare(model)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again(**batch).loss, own)
    with pytest.raises(ValueError, match="has no fused head"):
        unfuse_head(again)
    for _ in range(2):
        fuse(again, accelerator=accelerator)
        torch.testing.assert_close(again(**batch, fused_lm_head=True).loss, own)
        unfuse_head(again, accelerator=accelerator)
        torch.testing.assert_close(again(**batch).loss, own)
