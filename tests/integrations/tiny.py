"""Two-layer models of every kind of head, from config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

# Family -> what its config adds to the common shape. Together they cover every transform between head and logits.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 2.0, "sliding_window": 32},
    "recurrent_gemma": {
        "logits_soft_cap": 2.0,
        "block_types": ["recurrent", "attention"],
        "lru_width": 32,
        "attention_window_size": 32,
    },
    "cohere": {"logit_scale": 0.25, "eos_token_id": 2, "bos_token_id": None},
    "granite": {"logits_scaling": 8.0},
    "mixtral": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    },
}


def tiny_model(family: str = "llama", seed: int = 0) -> transformers.PreTrainedModel:
    """A two-layer model of the family, of hidden size 32, with logits spread enough for its head's facts to matter."""
    common = {
        "vocab_size": 200,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 1,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    config = transformers.AutoConfig.for_model(family.removesuffix("_tied"), **{**common, **FAMILIES[family]})
    transformers.set_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def trainer_settings(folder: Path) -> dict[str, Any]:
    """Three quiet steps of any of TRL's trainers, on the CPU in fp32."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
