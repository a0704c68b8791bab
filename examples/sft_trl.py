"""Supervised fine-tuning with TRL on fused heads: the completion of a paragraph, given its first third.

python examples/sft_trl.py                                 # under two minutes on two CPU cores
python examples/sft_trl.py --model Qwen/Qwen2.5-0.5B --dataset trl-lib/Capybara
"""

from __future__ import annotations

from _text import preference_pairs
from _trainer import material, parse, settings, train_fused
from trl import SFTConfig, SFTTrainer


def main() -> None:
    args = parse(__doc__, steps=40, loss_type={"default": "nll", "choices": ["nll", "dft"]})

    def rows(texts: list[str]) -> list[dict[str, str]]:
        return [{"prompt": p["prompt"], "completion": p["chosen"]} for p in preference_pairs(texts, args.seed)]

    model, tokenizer, training, held_out = material(args, rows)
    trainer = SFTTrainer(
        model,
        args=SFTConfig(**settings(args, max_length=256, loss_type=args.loss_type)),
        train_dataset=training,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    shown = {"loss": "eval_loss", "token accuracy": "eval_mean_token_accuracy", "entropy": "eval_entropy"}
    train_fused(trainer, args.device, shown)


if __name__ == "__main__":
    main()
