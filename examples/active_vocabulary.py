"""Does training come out the same over an active vocabulary? SFT, then DPO, on real text with a small Llama.

    python examples/active_vocabulary.py --out examples/results/active_vocabulary.json

Every rule starts from the same models and sees the same batches. Products run in bf16 (autocast around the head), and
tiles are compacted however many of their columns are active: at 4,096 tokens of vocabulary most would be multiplied
whole, and nothing would be tested. The gradient of the trained model's own hidden states and head is then held against
fp64, beside the exact path's.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from _text import paragraphs, preference_pairs, small_llama, token_stream, train_tokenizer, windows
from torch import Tensor
from transformers import LlamaForCausalLM

from liger_losses import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    linear_logprobs,
    record_active_vocabulary,
)
from liger_losses.chunked import active

RULES: dict[str, float | str | None] = {"exact": None, "auto": "auto", "2^-12": 2.0**-12, "2^-8": 2.0**-8}
BATCH, LENGTH, PAIRS = 12, 128, 6


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def hidden_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    return model.model(ids).last_hidden_state


def sft(model: LlamaForCausalLM, stream: Tensor, rule: float | str | None, steps: int, seed: int) -> list[float]:
    """Next-token training; the loss of every step, and the mean share of active columns at the end."""
    torch.manual_seed(seed)
    loss_of = LigerFusedLinearCrossEntropyLoss(active_vocab=rule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    losses = []
    for _ in range(steps):
        ids = windows(stream, BATCH, LENGTH)
        hidden = hidden_of(model, ids[:, :-1])
        with bf16():
            loss = loss_of(model.lm_head.weight, hidden, ids[:, 1:])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def held_out_nll(model: LlamaForCausalLM, stream: Tensor) -> float:
    rows = stream[: len(stream) // LENGTH * LENGTH].view(-1, LENGTH)[:64]
    return -linear_logprobs(hidden_of(model, rows[:, :-1]), model.lm_head.weight, rows[:, 1:]).mean().item()


def batches(tokenizer: Any, pairs: list[dict[str, str]]) -> list[tuple[Tensor, Tensor]]:
    """`ids [2 pairs, T]`, chosen first, and `target`, -100 on prompt and padding."""
    made = []
    for start in range(0, len(pairs) - PAIRS + 1, PAIRS):
        some = pairs[start : start + PAIRS]
        rows = [(tokenizer(p["prompt"])["input_ids"], tokenizer(p[k])["input_ids"]) for k in ("chosen", "rejected")
                for p in some]  # fmt: skip
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids, target = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -100)
        for row, (prompt, answer) in enumerate(rows):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            target[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        made.append((ids[:, :-1], target[:, 1:]))
    return made


def dpo(
    model: LlamaForCausalLM, data: list[tuple[Tensor, Tensor]], rule: float | str | None, *, train: bool
) -> dict[str, float]:
    """One pass over the pairs; the mean loss and reward accuracy."""
    reference = copy.deepcopy(model).eval()
    model_losses, accuracies = [], []
    loss_of = LigerFusedLinearDPOLoss(beta=0.1, active_vocab=rule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    for ids, target in data:
        with torch.no_grad():
            of_reference = hidden_of(reference, ids)
        hidden = hidden_of(model, ids)
        with bf16():
            loss, metrics = loss_of(
                model.lm_head.weight, hidden, target, ref_input=of_reference, ref_weight=reference.lm_head.weight
            )
        chosen, rejected = metrics[-2:] if isinstance(metrics, tuple) else (None, None)
        if train:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model_losses.append(loss.item())
        if chosen is not None:
            accuracies.append((chosen > rejected).float().mean().item())
    last = model_losses[-10:]
    return {"loss": sum(last) / len(last), "accuracy": sum(accuracies[-10:]) / max(1, len(accuracies[-10:]))}


def gradient_errors(model: LlamaForCausalLM, stream: Tensor) -> dict[str, dict[str, float]]:
    """Relative errors of `dX` and `dW` of the trained model's cross entropy against fp64, a rule each."""
    torch.manual_seed(1)
    ids = windows(stream, BATCH, LENGTH)
    with torch.no_grad():
        hidden = hidden_of(model, ids[:, :-1]).bfloat16()
    weight, target = model.lm_head.weight.detach().bfloat16(), ids[:, 1:]

    def gradients(dtype: torch.dtype, rule: float | str | None) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
        loss = -linear_logprobs(leaves[0], leaves[1], target, active_vocab=rule).mean()
        return [g.double() for g in torch.autograd.grad(loss, leaves)]

    true = gradients(torch.float64, None)
    found = {}
    for name, rule in RULES.items():
        with record_active_vocabulary() as report:
            errors = [
                ((g - t).norm() / t.norm()).item() for g, t in zip(gradients(torch.bfloat16, rule), true, strict=True)
            ]
        found[name] = {"dX": errors[0], "dW": errors[1]}
        if report.tiles:
            found[name] |= {
                "share": report.share.item(), "dropped_mean": report.dropped_mean.item(),
                "dropped_max": report.dropped_max.item(),
            }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sft-steps", type=int, default=250)
    parser.add_argument("--pairs", type=int, default=240)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    active.CROSSOVER = 1.0
    training, held_out = paragraphs()
    tokenizer = train_tokenizer(training)
    stream, other = token_stream(tokenizer, training, "cpu"), token_stream(tokenizer, held_out, "cpu")
    result: dict[str, Any] = {"sft": {}, "dpo": {}}
    warm = None
    for seed in range(options.seeds):
        for name, rule in RULES.items():
            model = small_llama(tokenizer, seed=seed, device="cpu")
            losses = sft(model, stream, rule, options.sft_steps, seed)
            run = {"training": sum(losses[-20:]) / 20, "held_out": held_out_nll(model, other)}
            result["sft"].setdefault(name, []).append(run)
            print("sft", seed, name, run, flush=True)
            if warm is None:
                warm = model
                result["gradients"] = gradient_errors(warm, stream)
                print(json.dumps(result["gradients"], indent=1), flush=True)
        data = batches(tokenizer, preference_pairs(training, seed)[: options.pairs])
        for name, rule in RULES.items():
            run = dpo(copy.deepcopy(warm), data, rule, train=True)
            result["dpo"].setdefault(name, []).append(run)
            print("dpo", seed, name, run, flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
