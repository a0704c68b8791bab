"""DPO with TRL on fused heads, from nothing to a chart.

    python examples/dpo_trl.py                      # about two minutes on two CPU cores, nothing downloaded
    python examples/dpo_trl.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/ultrafeedback_binarized

Without `--model` and `--dataset`: text from the standard library, a BPE trained on it, a small Llama warmed up on it,
and preference pairs that are constructed from it (`liger_losses/cli/text.py` says how): the numbers show that training
works, not that a model has become better at anything people asked for.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from _text import PAIRS_ARE, paragraphs, preference_pairs, train_tokenizer, warm_model
from datasets import Dataset, disable_progress_bars, load_dataset
from transformers import AutoTokenizer, ProgressCallback
from trl import DPOConfig, DPOTrainer

from liger_losses import linear_logprobs
from liger_losses.cli.figures import rewards_and_head
from liger_losses.cli.measuring import full_logprobs, median_ms, peak_bytes
from liger_losses.integrations.trl import fuse_trainer

MIB = 2**20


class RewardBar(ProgressCallback):
    """The training bar with the two numbers to watch, in place of every metric at every log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        shown = {"loss": "loss", "margin": "rewards/margins", "accuracy": "rewards/accuracies"}
        # The last log sums up the run: it has no loss of a step.
        if self.training_bar is not None and logs and logs.keys() >= set(shown.values()):
            self.training_bar.set_postfix({name: f"{float(logs[key]):.2f}" for name, key in shown.items()})


def build_trainer(args: argparse.Namespace, device: str) -> DPOTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(args.output / "checkpoints"),
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch_size,
        "per_device_eval_batch_size": args.batch_size,
        "learning_rate": 3e-4 if args.model is None else 1e-6,
        "lr_scheduler_type": "cosine",
        "logging_steps": max(1, args.steps // 30),
        "beta": 0.1,
        "max_length": 256 if args.model is None else 1024,
        "bf16": device == "cuda",
        "gradient_checkpointing": args.model is not None,
        "dataloader_pin_memory": device == "cuda",
        "report_to": "none",
        "save_strategy": "no",
        "seed": args.seed,
    }
    if args.model is not None:
        splits = load_dataset(args.dataset, split="train").train_test_split(args.held_out, seed=args.seed)
        return DPOTrainer(
            args.model,
            args=DPOConfig(**settings),
            train_dataset=splits["train"],
            eval_dataset=splits["test"],
            processing_class=AutoTokenizer.from_pretrained(args.model),
        )
    training, held_out = paragraphs()
    tokenizer = train_tokenizer(training)
    print(f"text: {len(training)} paragraphs of the Python language reference, {len(held_out)} held out")
    print(f"pairs: {PAIRS_ARE}")
    model = warm_model(tokenizer, training, steps=args.warm_up, seed=args.seed, device=device)
    return DPOTrainer(
        model,
        ref_model=copy.deepcopy(model),
        args=DPOConfig(**settings),
        train_dataset=Dataset.from_list(preference_pairs(training, args.seed)),
        eval_dataset=Dataset.from_list(preference_pairs(held_out, args.seed)[: args.held_out]),
        processing_class=tokenizer,
    )


def evaluate(trainer: DPOTrainer) -> dict[str, float]:
    metrics = trainer.evaluate()
    return {name: metrics[f"eval_rewards/{name}"] for name in ("accuracies", "margins")}


def measure_head(trainer: DPOTrainer, device: str) -> dict[str, tuple[float, float]]:
    """(peak MiB, ms) of log-probs and their backward on one real batch: logits in full, and fused."""
    batch = next(iter(trainer.get_eval_dataloader()))
    model = trainer.accelerator.unwrap_model(trainer.model)
    ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1].contiguous()
    target = ids.masked_fill(batch["completion_mask"].to(device) == 0, -100)[:, 1:]
    hidden.requires_grad_()
    weight = model.get_output_embeddings().weight.detach().to(hidden.dtype).requires_grad_()

    def full() -> None:
        torch.autograd.grad(full_logprobs(hidden, weight, target).sum(), (hidden, weight))

    def fused() -> None:
        torch.autograd.grad(linear_logprobs(hidden, weight, target).sum(), (hidden, weight))

    scored = int((target != -100).sum())
    print(
        f"head: {target.numel()} tokens, {scored} of them scored, hidden {hidden.shape[-1]}, vocabulary {len(weight)}"
    )
    ways = {f"full logits\n{target.numel():,} positions": full, f"fused\n{scored:,} scored positions": fused}
    return {name: (peak_bytes(way, device) / MIB, median_ms(way, device)) for name, way in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model on the hub or a folder (default: a small Llama made here)")
    parser.add_argument("--dataset", help="preference data set on the hub (with --model)")
    parser.add_argument("--steps", type=int, default=75, help="DPO steps")
    parser.add_argument("--warm-up", type=int, default=180, help="steps of next-token training before DPO")
    parser.add_argument("--batch-size", type=int, default=8, help="pairs a step")
    parser.add_argument("--held-out", type=int, default=64, help="pairs to evaluate on")
    parser.add_argument("--output", type=Path, default=Path("outputs/dpo_trl"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.model is None) != (args.dataset is None):
        parser.error("--model and --dataset go together")
    args.output.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # TRL's use of older names
    disable_progress_bars()  # of tokenising; the trainer keeps its own
    trainer = build_trainer(args, device)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(RewardBar)
    print(fuse_trainer(trainer))
    before = evaluate(trainer)
    trainer.train()
    after = evaluate(trainer)
    head = measure_head(trainer, device)

    print("\nheld-out pairs       before    after   (before, the policy is its own reference: every reward is 0)")
    print(f"  reward accuracy  {before['accuracies']:8.3f} {after['accuracies']:8.3f}")
    print(f"  reward margin    {before['margins']:8.3f} {after['margins']:8.3f}")
    way = "torch.cuda.max_memory_allocated" if device == "cuda" else "torch's CPU allocator, by the profiler's record"
    print(f"loss head, forward and backward on one held-out batch (memory by {way})")
    for name, (memory, milliseconds) in head.items():
        print(f"  {name.replace(chr(10), ', '):32s} {memory:8.1f} MiB {milliseconds:8.1f} ms")
    pairs = args.dataset or f"pairs {PAIRS_ARE.split(':')[0]}"
    chart = args.output / "dpo.png"
    rewards_and_head(
        trainer.state.log_history, head, chart, f"DPO on fused heads: {args.model or 'a small Llama'}, {pairs}"
    )
    print(f"chart: {chart}")


if __name__ == "__main__":
    main()
