"""GRPO with TRL on fused heads: sampled continuations, rewarded by a rule.

    python examples/grpo_trl.py                                # under two minutes on two CPU cores
    python examples/grpo_trl.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/tldr

The reward is the share of a sample's words that occur in the Python language reference. It is a rule that can be
checked offline, not a measure of good text: a model may please it by repeating itself.
"""

from __future__ import annotations

from typing import Any

from _text import paragraphs, preference_pairs
from _trainer import material, parse, settings, train_fused
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    args = parse(__doc__, steps=10, batch_size=16, entropy_coef={"type": float, "default": 0.0})
    known = {word.strip(".,;:()'\"`").lower() for text in paragraphs()[0] for word in text.split()}

    def known_words(completions: list[Any], **_: Any) -> list[float]:
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        words = [[word.strip(".,;:()'\"`").lower() for word in text.split()] for text in texts]
        return [sum(word in known for word in some) / max(len(some), 1) for some in words]

    def rows(texts: list[str]) -> list[dict[str, str]]:
        return [{"prompt": pair["prompt"]} for pair in preference_pairs(texts, args.seed)]

    model, tokenizer, training, held_out = material(args, rows)
    tokenizer.padding_side = "left"
    sampling = {
        "num_generations": 4,
        "max_completion_length": 24,
        "temperature": 1.0,
        "entropy_coef": args.entropy_coef,
    }
    trainer = GRPOTrainer(
        model,
        reward_funcs=known_words,
        args=GRPOConfig(**settings(args, **sampling)),
        train_dataset=training,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    train_fused(trainer, args.device, {"reward": "eval_reward", "entropy": "eval_entropy"}, cost=False)


if __name__ == "__main__":
    main()
