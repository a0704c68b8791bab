"""What the TRL examples have in common: options, a small warm model and its text, a step's cost, a table at the end.

Without `--model` and `--dataset` nothing is downloaded: text of the standard library, a BPE trained on it, a small
Llama warmed up on it (`_text.py`). Its numbers show that training works, not that a model has become better at
anything people asked for.
"""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from _text import paragraphs, train_tokenizer, warm_model
from datasets import Dataset, disable_progress_bars, load_dataset
from transformers import AutoTokenizer, Trainer, set_seed

from liger_losses.cli.measuring import median_ms, peak_bytes
from liger_losses.integrations.trl import fuse_trainer

MIB = 2**20


def parse(doc: str | None, *, steps: int, batch_size: int = 8, **extra: dict[str, Any]) -> argparse.Namespace:
    """The common options, and `extra` ones by name."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model on the hub or a folder (default: a small Llama made here)")
    parser.add_argument("--dataset", help="data set on the hub, in the format that the trainer takes (with --model)")
    parser.add_argument("--steps", type=int, default=steps, help="training steps")
    parser.add_argument("--warm-up", type=int, default=80, help="steps of next-token training before")
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--held-out", type=int, default=48, help="examples to evaluate on")
    parser.add_argument("--output", type=Path, default=Path("outputs"))
    parser.add_argument("--seed", type=int, default=0)
    for name, options in extra.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    args = parser.parse_args()
    if (args.model is None) != (args.dataset is None):
        parser.error("--model and --dataset go together")
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # TRL's use of older names
    disable_progress_bars()  # of tokenising; the trainer keeps its own
    set_seed(args.seed)
    return args


def settings(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Arguments that every trainer's config takes."""
    return {
        "output_dir": str(args.output / "checkpoints"),
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch_size,
        "per_device_eval_batch_size": args.batch_size,
        "learning_rate": 3e-4 if args.model is None else 1e-6,
        "lr_scheduler_type": "cosine",
        "logging_steps": max(1, args.steps // 5),
        "bf16": args.device == "cuda",
        "gradient_checkpointing": args.model is not None,
        "dataloader_pin_memory": args.device == "cuda",
        "report_to": "none",
        "save_strategy": "no",
        "seed": args.seed,
        **more,
    }


def material(args: argparse.Namespace, rows_of: Any) -> tuple[Any, Any, Dataset, Dataset]:
    """Model, tokenizer, training and held-out data. `rows_of` makes rows of paragraphs; a hub's stay as they are."""
    if args.model is not None:
        splits = load_dataset(args.dataset, split="train").train_test_split(args.held_out, seed=args.seed)
        return args.model, AutoTokenizer.from_pretrained(args.model), splits["train"], splits["test"]
    training, held_out = paragraphs()
    tokenizer = train_tokenizer(training)
    print(f"text: {len(training)} paragraphs of the Python language reference, {len(held_out)} held out")
    model = warm_model(tokenizer, training, steps=args.warm_up, seed=args.seed, device=args.device)
    rows = rows_of(training), rows_of(held_out)[: args.held_out]
    return model, tokenizer, Dataset.from_list(rows[0]), Dataset.from_list(rows[1])


def cost_of_a_step(trainer: Trainer, device: str) -> tuple[float, float]:
    """(peak MiB, ms) of the loss of one held-out batch and its backward, the whole model's."""
    batch = next(iter(trainer.get_eval_dataloader()))

    def step() -> None:
        trainer.model.train()
        trainer.compute_loss(trainer.model, trainer._prepare_inputs(dict(batch))).backward()
        trainer.model.zero_grad()

    return peak_bytes(step, device) / MIB, median_ms(step, device, repeats=3)


def train_fused(trainer: Trainer, device: str, shown: dict[str, str], *, cost: bool = True) -> None:
    """Fuse, evaluate, train, evaluate, and print the metrics `shown` (name -> key) before and after.

    With `cost`, also that of one step by TRL's own head and by the fused one.
    """
    own = cost_of_a_step(trainer, device) if cost else None
    print(fuse_trainer(trainer))
    fused = cost_of_a_step(trainer, device) if cost else None
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    print(f"\n{'held out':24s}{'before':>10s}{'after':>10s}")
    for name, key in shown.items():
        print(f"  {name:22s}{before[key]:10.4f}{after[key]:10.4f}")
    if own is not None and fused is not None:
        way = (
            "torch.cuda.max_memory_allocated" if device == "cuda" else "torch's CPU allocator, by the profiler's record"
        )
        print(f"one step, whole model, forward and backward (memory by {way})")
        for name, (memory, milliseconds) in (("TRL's own head", own), ("fused", fused)):
            print(f"  {name:22s}{memory:10.1f} MiB {milliseconds:8.0f} ms")
