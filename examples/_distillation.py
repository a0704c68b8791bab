"""What the distillation examples share: two models, text as a stream of tokens, perplexity, a training loop."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from _text import paragraphs, token_stream, train_tokenizer, warm_model
from datasets import load_dataset
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from liger_losses import linear_logprobs

# Few words, since there is little text: both models must see each of them often enough to learn it.
VOCABULARY = 1024
TEACHER = {"hidden_size": 160, "layers": 3}
STUDENT = {"hidden_size": 48, "layers": 2}

Loss = Callable[[PreTrainedModel], torch.Tensor]


@dataclass
class Setting:
    """Everything that a run starts from."""

    teacher: PreTrainedModel
    student: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    training: torch.Tensor  # [tokens]
    held_out: torch.Tensor  # [tokens]
    learning_rate: float
    device: str


def arguments(doc: str | None, output: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", help="model on the hub or a folder (default: a Llama made here)")
    parser.add_argument("--student", help="a smaller model with the teacher's tokenizer (with --teacher)")
    parser.add_argument("--dataset", help="data set on the hub with a column of text (with --teacher and --student)")
    parser.add_argument("--column", default="text", help="that column")
    parser.add_argument("--examples", type=int, default=2000, help="rows of --dataset to read")
    parser.add_argument("--warm-up", type=int, default=240, help="steps of next-token training that make the teacher")
    parser.add_argument("--student-warm-up", type=int, default=60, help="the same, for the student to start from")
    parser.add_argument("--steps", type=int, default=120, help="steps of each run of the student")
    parser.add_argument("--batch-size", type=int, default=12, help="stretches of text a step")
    parser.add_argument("--length", type=int, default=96, help="tokens of a stretch")
    parser.add_argument("--held-out", type=int, default=8192, help="tokens to evaluate on")
    parser.add_argument("--output", type=Path, default=Path(output))
    parser.add_argument("--seed", type=int, default=0)
    return parser


def prepare(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Setting]:
    args = parser.parse_args()
    if len({args.teacher is None, args.student is None, args.dataset is None}) > 1:
        parser.error("--teacher, --student and --dataset go together")
    args.output.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    set_seed(args.seed)
    if args.teacher is not None:
        tokenizer = AutoTokenizer.from_pretrained(args.teacher)
        if AutoTokenizer.from_pretrained(args.student).get_vocab() != tokenizer.get_vocab():
            parser.error(f"--student {args.student} and --teacher {args.teacher} have different vocabularies")
        teacher, student = (AutoModelForCausalLM.from_pretrained(m).to(device) for m in (args.teacher, args.student))
        texts = load_dataset(args.dataset, split=f"train[:{args.examples}]")[args.column]
        training, held_out = texts[: len(texts) * 9 // 10], texts[len(texts) * 9 // 10 :]
        learning_rate = 1e-5
    else:
        training, held_out = paragraphs()
        tokenizer = train_tokenizer(training, VOCABULARY)
        print(f"text: {len(training)} paragraphs of the Python language reference, {len(held_out)} held out")
        made = {"seed": args.seed, "device": device}
        teacher = warm_model(tokenizer, training, steps=args.warm_up, label="teacher, on the text", **made, **TEACHER)
        student = warm_model(
            tokenizer, training, steps=args.student_warm_up, label="student, on the text", **made, **STUDENT
        )
        learning_rate = 2e-3
    teacher.eval().requires_grad_(False)
    for name, model in (("teacher", teacher), ("student", student)):
        print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    streams = [token_stream(tokenizer, texts, device) for texts in (training, held_out)]
    return args, Setting(teacher, student, tokenizer, streams[0], streams[1][: args.held_out], learning_rate, device)


def hidden_states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """What the head is applied to, `[rows, tokens, H]`."""
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


def head(model: PreTrainedModel) -> torch.Tensor:
    """`[V, H]`"""
    return model.get_output_embeddings().weight


def next_token_loss(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return -linear_logprobs(hidden_states(model, ids[:, :-1]), head(model), ids[:, 1:]).mean()


@torch.no_grad()
def perplexity(model: PreTrainedModel, stream: torch.Tensor, length: int) -> float:
    """Of every token but each stretch's first: exp of the mean negative log-likelihood."""
    ids = stream[: len(stream) // length * length].view(-1, length)
    losses = [next_token_loss(model, part) * len(part) for part in ids.split(16)]
    return math.exp(torch.stack(losses).sum().item() / len(ids))


def train(
    model: PreTrainedModel, loss_of: Loss, setting: Setting, args: argparse.Namespace, label: str
) -> list[tuple[int, float]]:
    """`args.steps` steps of AdamW; held-out perplexity on the way, `[(step, perplexity)]`."""
    set_seed(args.seed)  # every run sees the same text
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(args.steps, 1))
    history = [(0, perplexity(model, setting.held_out, args.length))]
    every = max(1, args.steps // 5)
    bar = tqdm(range(1, args.steps + 1), desc=label)
    for step in bar:
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % every == 0 or step == args.steps:
            history.append((step, perplexity(model, setting.held_out, args.length)))
        bar.set_postfix(loss=f"{loss.item():.3f}", perplexity=f"{history[-1][1]:.1f}")
    return history


def report(histories: dict[str, list[tuple[int, float]]], teacher: float, title: str, path: Path) -> None:
    """The numbers as a table, the curves as a chart."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = max(map(len, histories))
    before = next(iter(histories.values()))[0][1]
    print(f"\nheld-out perplexity\n  {'teacher':{width}s} {teacher:8.1f}\n  {'student, before':{width}s} {before:8.1f}")
    for name, history in histories.items():
        print(f"  {name:{width}s} {history[-1][1]:8.1f}")
    ink, muted = "#1f2933", "#7b8794"
    plt.rcParams.update({"font.size": 10, "text.color": ink, "axes.labelcolor": muted, "xtick.color": muted,
                         "ytick.color": muted, "axes.edgecolor": "#cbd2d9"})  # fmt: skip
    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    for (name, history), colour in zip(histories.items(), ("#7b8794", "#0f766e", "#c2410c"), strict=False):
        steps, values = zip(*history, strict=True)
        axes.plot(steps, values, color=colour, lw=2, marker="o", ms=4, label=f"{name}: {values[-1]:.1f}")
    axes.axhline(teacher, color=ink, lw=1, ls=":", label=f"teacher: {teacher:.1f}")
    axes.set(xlabel="step", ylabel="held-out perplexity", yscale="log")
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title(title, loc="left", fontweight="bold")
    figure.savefig(path, dpi=160)
    print(f"chart: {path}")
