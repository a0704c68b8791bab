"""Distillation over two fused heads: a wider Llama into a narrower one, on the text and on the student's own words.

    python examples/distill.py                      # about five minutes on two CPU cores, nothing downloaded
    python examples/distill.py --teacher Qwen/Qwen2.5-1.5B --student Qwen/Qwen2.5-0.5B --dataset stanfordnlp/imdb

Three students start equal and train for the same number of steps on text drawn alike: one learns the next token,
without a teacher; one the teacher's distribution over every next token (off policy); one that distribution, in every
second step on what the student itself wrote, as in generalised knowledge distillation (on policy, GKD,
arXiv:2306.13649).

Without `--teacher`: text from the standard library, a BPE trained on it, and both models made here. The numbers show
that training works on this text, not how good either model is.
"""

from __future__ import annotations

import copy
import itertools

import torch
from _distillation import arguments, head, hidden_states, next_token_loss, perplexity, prepare, report, train
from _text import windows
from torch import Tensor
from transformers import PreTrainedModel

from liger_losses import Divergence, fused_linear_distillation


def main() -> None:
    parser = arguments(__doc__, "outputs/distill")
    parser.add_argument("--off-policy-beta", type=float, default=0.0, help="of the JSD on the text; 0: forward KL")
    parser.add_argument("--on-policy-beta", type=float, default=0.5, help="of the JSD on the student's words")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of text that the student continues")
    args, setting = prepare(parser)
    teacher = setting.teacher
    on_text, on_own_words = (Divergence(kind="jsd", beta=beta) for beta in (args.off_policy_beta, args.on_policy_beta))

    def from_teacher(divergence: Divergence, student: PreTrainedModel, ids: Tensor, prompt: int) -> Tensor:
        """The mean divergence from the teacher over the tokens of `ids` after the prompt's, without either's logits."""
        target = ids[:, 1:].clone()
        target[:, : max(prompt - 1, 0)] = -100
        with torch.no_grad():
            teacher_hidden = hidden_states(teacher, ids[:, :-1])
        loss, _ = fused_linear_distillation(
            hidden_states(student, ids[:, :-1]),
            head(student),
            target,
            teacher_hidden=teacher_hidden,
            teacher_weight=head(teacher),
            divergence=divergence,
        )
        return loss

    def text() -> Tensor:
        return windows(setting.training, args.batch_size, args.length)

    def without_teacher(student: PreTrainedModel) -> Tensor:
        return next_token_loss(student, text())

    def off_policy(student: PreTrainedModel) -> Tensor:
        return from_teacher(on_text, student, text(), prompt=0)

    turns = itertools.count()

    def on_policy(student: PreTrainedModel) -> Tensor:
        ids = text()
        if next(turns) % 2:
            return from_teacher(on_text, student, ids, prompt=0)
        with torch.no_grad():
            written = student.generate(
                ids[:, : args.prompt], attention_mask=torch.ones_like(ids[:, : args.prompt]), do_sample=True, top_k=0,
                min_new_tokens=args.length - args.prompt, max_new_tokens=args.length - args.prompt,
                pad_token_id=setting.tokenizer.pad_token_id,
            )  # fmt: skip
        return from_teacher(on_own_words, student, written, prompt=args.prompt)

    runs = {"without a teacher": without_teacher, "off policy": off_policy, "on policy": on_policy}
    histories = {
        name: train(copy.deepcopy(setting.student), loss_of, setting, args, name) for name, loss_of in runs.items()
    }
    title = f"Distillation on fused heads: {args.student or 'a narrower Llama'} from {args.teacher or 'a wider one'}"
    report(histories, perplexity(teacher, setting.held_out, args.length), title, args.output / "distill.png")


if __name__ == "__main__":
    main()
