"""ORPO, SimPO and CPO with TRL on fused heads: preference without a reference model.

    python examples/orpo_simpo_trl.py                          # ORPO, under two minutes on two CPU cores
    python examples/orpo_simpo_trl.py --loss simpo
    python examples/orpo_simpo_trl.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/ultrafeedback_binarized

TRL builds the logits of every position of both answers here, so this is where a fused head saves the most memory.
Without `--model` the pairs are constructed (`liger_losses/cli/text.py` says how).
"""

from __future__ import annotations

from typing import Any

from _text import PAIRS_ARE, preference_pairs
from _trainer import material, parse, settings, train_fused
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

LOSSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "orpo": (ORPOTrainer, ORPOConfig, {"beta": 0.1}),
    "simpo": (CPOTrainer, CPOConfig, {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0}),
    "cpo": (CPOTrainer, CPOConfig, {"loss_type": "sigmoid", "beta": 0.1, "cpo_alpha": 1.0}),
}


def main() -> None:
    args = parse(__doc__, steps=40, loss={"default": "orpo", "choices": list(LOSSES)})
    model, tokenizer, training, held_out = material(args, lambda texts: preference_pairs(texts, args.seed))
    print(f"pairs: {PAIRS_ARE if args.model is None else args.dataset}")
    kind, config, options = LOSSES[args.loss]
    if isinstance(model, str):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model)
    trainer = kind(
        model,
        args=config(**settings(args, max_length=256, **options)),
        train_dataset=training,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    shown = {"loss": "eval_loss", "reward accuracy": "eval_rewards/accuracies", "reward margin": "eval_rewards/margins"}
    train_fused(trainer, args.device, shown)


if __name__ == "__main__":
    main()
