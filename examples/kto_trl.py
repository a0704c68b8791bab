"""KTO with TRL on fused heads: single answers, each marked wanted or not.

    python examples/kto_trl.py                                 # under two minutes on two CPU cores
    python examples/kto_trl.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/kto-mix-14k

Without `--model` the answers are constructed, not judged by anyone: wanted is how a paragraph really goes on, not
wanted the same words with every run of three in another order.
"""

from __future__ import annotations

import copy

from _text import PAIRS_ARE, preference_pairs
from _trainer import material, parse, settings, train_fused
from trl import KTOConfig, KTOTrainer


def main() -> None:
    args = parse(__doc__, steps=30)

    def rows(texts: list[str]) -> list[dict[str, str | bool]]:
        pairs = preference_pairs(texts, args.seed)
        sides = ("chosen", "rejected")
        return [
            {"prompt": pair["prompt"], "completion": pair[sides[i % 2]], "label": i % 2 == 0}
            for i, pair in enumerate(pairs)
        ]

    model, tokenizer, training, held_out = material(args, rows)
    print(f"answers: {PAIRS_ARE if args.model is None else args.dataset}")
    trainer = KTOTrainer(
        model,
        ref_model=None if args.model is not None else copy.deepcopy(model),
        args=KTOConfig(**settings(args, max_length=256, beta=0.1)),
        train_dataset=training,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    shown = {
        "loss": "eval_loss",
        "reward of wanted": "eval_rewards/chosen",
        "reward of unwanted": "eval_rewards/rejected",
    }
    train_fused(trainer, args.device, shown)


if __name__ == "__main__":
    main()
