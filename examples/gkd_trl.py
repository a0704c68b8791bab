"""Generalised knowledge distillation (GKD, arXiv:2306.13649) with TRL on two fused heads.

    python examples/gkd_trl.py                                 # under two minutes on two CPU cores
    python examples/gkd_trl.py --teacher Qwen/Qwen2.5-1.5B-Instruct --model Qwen/Qwen2.5-0.5B-Instruct \
        --dataset trl-lib/chatbot_arena_completions

The student learns the teacher's whole distribution over every next token of the answers, by a Jensen-Shannon
divergence; with `--lmbda` above 0, that share of the steps is on answers that the student writes itself. TRL alone
builds the logits of both models at every position. Without `--teacher` the teacher is a wider Llama made here, on the
same text: the numbers show that the divergence falls, not how good either model is.
"""

from __future__ import annotations

from _text import paragraphs, preference_pairs, warm_model
from _trainer import material, parse, settings, train_fused
from transformers import AutoModelForCausalLM
from trl.experimental.gkd import GKDConfig, GKDTrainer

# For models without one: a turn is its text.
TEMPLATE = (
    "{% for turn in messages %}{{ turn['content'] }}{% if turn['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


def main() -> None:
    args = parse(
        __doc__,
        steps=12,
        teacher={"help": "model on the hub or a folder with the student's tokenizer (with --model)"},
        beta={"type": float, "default": 0.5, "help": "of the divergence; 0: forward KL, 1: reverse KL"},
        lmbda={"type": float, "default": 0.2, "help": "share of the steps on the student's own answers"},
    )
    if (args.teacher is None) != (args.model is None):
        raise SystemExit("--teacher, --model and --dataset go together")

    def rows(texts: list[str]) -> list[dict[str, list[dict[str, str]]]]:
        return [
            {
                "messages": [
                    {"role": "user", "content": pair["prompt"]},
                    {"role": "assistant", "content": pair["chosen"]},
                ]
            }
            for pair in preference_pairs(texts, args.seed)
        ]

    student, tokenizer, training, held_out = material(args, rows)
    if args.model is None:
        tokenizer.chat_template = TEMPLATE
        teacher = warm_model(
            tokenizer, paragraphs()[0], steps=args.warm_up, seed=args.seed + 1, device=args.device,
            hidden_size=160, label="the teacher, on the text",
        )  # fmt: skip
    else:
        teacher = AutoModelForCausalLM.from_pretrained(args.teacher).to(args.device)
    trainer = GKDTrainer(
        student,
        teacher_model=teacher,
        args=GKDConfig(**settings(args, max_length=160, max_new_tokens=24, beta=args.beta, lmbda=args.lmbda)),
        train_dataset=training,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    train_fused(trainer, args.device, {"divergence": "eval_loss"})


if __name__ == "__main__":
    main()
