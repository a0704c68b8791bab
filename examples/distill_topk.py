"""Distillation from a teacher that was asked once: its top k log-probabilities on disk, a student trained from there.

    python examples/distill_topk.py                      # about five minutes on two CPU cores, nothing downloaded
    python examples/distill_topk.py --teacher Qwen/Qwen2.5-1.5B --student Qwen/Qwen2.5-0.5B --dataset stanfordnlp/imdb

The teacher reads the text once and leaves, for every token, the ids and log-probabilities of its k most probable next
tokens in a `datasets` folder. Training reads that folder and never sees the teacher. What the teacher gave to all other
tokens is kept as one number (`--tail bucket`) or dropped (`--tail renormalise`): the student learns nothing of how that
part is spread, so the text's own next token is mixed in (`--hard-weight`), as one more id beside the k.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from _distillation import Setting, arguments, head, hidden_states, next_token_loss, perplexity, prepare, report, train
from datasets import Dataset, disable_progress_bars, load_from_disk
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from liger_losses import linear_topk_logprobs
from liger_losses.losses import topk_divergence


@torch.no_grad()
def store(setting: Setting, k: int, length: int, rows: int, folder: Path) -> None:
    """Every stretch of the text with the teacher's top k at each of its tokens but the last, which predicts nothing."""
    ids = setting.training[: len(setting.training) // length * length].view(-1, length)

    def answers() -> Iterator[dict[str, object]]:
        for part in tqdm(ids.split(rows), desc="teacher, once"):
            hidden = hidden_states(setting.teacher, part[:, :-1])
            logprobs = (hidden @ head(setting.teacher).T).float().log_softmax(-1)
            values, places = logprobs.topk(k)
            for row, row_values, row_places in zip(part.cpu(), values.half().cpu(), places.int().cpu(), strict=True):
                yield {"ids": row.numpy(), "logprobs": row_values.numpy(), "places": row_places.numpy()}

    rows_of = list(answers())
    Dataset.from_dict({name: [row[name] for row in rows_of] for name in rows_of[0]}).save_to_disk(folder)


def main() -> None:
    parser = arguments(__doc__, "outputs/distill_topk")
    parser.add_argument("--top-k", type=int, default=32, help="tokens that the teacher leaves of each distribution")
    parser.add_argument("--tail", choices=("bucket", "renormalise"), default="bucket")
    parser.add_argument("--hard-weight", type=float, default=0.5, help="of the next token's loss beside the teacher's")
    args, setting = prepare(parser)
    disable_progress_bars()  # of writing; the others stay
    folder = args.output / "teacher"
    store(setting, args.top_k, args.length, args.batch_size, folder)
    teacher = perplexity(setting.teacher, setting.held_out, args.length)
    del setting.teacher
    stored = load_from_disk(folder).with_format("torch", device=setting.device)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    covered = torch.stack([row["logprobs"].float().exp().sum(-1).mean() for row in stored]).mean().item()
    print(
        f"teacher on disk: {len(stored)} stretches, {size / 2**20:.1f} MiB, {covered:.0%} of its mass in the top "
        f"{args.top_k}, in {folder}"
    )

    text_alone = stored.select_columns("ids")

    def batch(of: Dataset) -> dict[str, torch.Tensor]:
        return of[torch.randint(len(of), (args.batch_size,)).tolist()]

    def without_teacher(student: PreTrainedModel) -> torch.Tensor:
        return next_token_loss(student, batch(text_alone)["ids"])

    def from_disk(student: PreTrainedModel) -> torch.Tensor:
        rows = batch(stored)
        ids = torch.cat([rows["places"], rows["ids"][:, 1:, None]], -1)
        logprobs = linear_topk_logprobs(hidden_states(student, rows["ids"][:, :-1]), head(student), ids)
        soft = topk_divergence(logprobs[..., :-1], rows["logprobs"].float(), tail=args.tail)
        return (soft - args.hard_weight * logprobs[..., -1]).mean()

    runs = {"without a teacher": without_teacher, f"top {args.top_k} from disk": from_disk}
    histories = {
        name: train(copy.deepcopy(setting.student), loss_of, setting, args, name) for name, loss_of in runs.items()
    }
    title = (
        f"Distillation from a stored teacher: {args.student or 'a narrower Llama'} from {args.teacher or 'a wider one'}"
    )
    report(histories, teacher, title, args.output / "distill_topk.png")


if __name__ == "__main__":
    main()
