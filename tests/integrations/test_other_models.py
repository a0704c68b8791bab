"""Models that are not what they were, or never were, what `fuse_model` and `fuse_head` are for."""

from __future__ import annotations

import pickle
from typing import Any

import accelerate
import pytest
import torch
import transformers

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


@pytest.mark.parametrize("seed", range(4))
def test_labels_that_the_model_does_not_shift(seed: int) -> None:
    """Bart's class of causal language models."""

    class Unshifted(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, labels=labels, shift_labels=labels, **kwargs)

    model = Unshifted(tiny_model(seed=seed).config)
    with pytest.raises(ValueError, match="fused loss of 18 random tokens differ"):
        fuse_model(model)


@pytest.mark.parametrize("function", [fuse_model, fuse_head])
@pytest.mark.parametrize("family", ["bart", "led", "marian", "t5"])
def test_encoder_decoders(family: str, function: Any) -> None:
    common = {"vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_layers": 1,
              "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8,
              "decoder_ffn_dim": 8, "d_ff": 8, "num_heads": 2, "d_kv": 8, "pad_token_id": 0,
              "decoder_start_token_id": 0}  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **common)
    with pytest.raises(ValueError, match="is an encoder-decoder; expected a causal language model"):
        function(transformers.AutoModelForSeq2SeqLM.from_config(config))
