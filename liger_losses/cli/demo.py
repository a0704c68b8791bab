"""`liger-losses demo`: DPO in a plain loop, from the text of the standard library to a chart. Needs no trainer library.

A small causal Transformer over the text's most frequent words is warmed up on it by `linear_logprobs`, then trained on
constructed preference pairs by `LigerFusedLinearDPOLoss`. `examples/dpo_trl.py` (`make demo`) is the same with TRL.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from liger_losses import LigerFusedLinearDPOLoss, linear_logprobs

from .extras import MIB, require
from .measuring import full_logprobs, median_ms, peak_bytes
from .options import make_folder
from .text import PAIRS_ARE, paragraphs, preference_pairs

VOCAB, WIDTH, LENGTH, PAIRS, BETA = 4096, 96, 64, 8, 0.1
PAD, UNKNOWN = 0, 1
_WORDS = re.compile(r"\w+|[^\w\s]")


class Model(nn.Module):
    """Pre-norm causal Transformer: ids `[R, T]` to hidden states `[R, T, H]`; `head.weight` `[V, H]`."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 3 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        places = self.places(torch.arange(length, device=ids.device))
        hidden: Tensor = self.body(self.tokens(ids) + places, mask=mask, is_causal=True)
        return hidden


def vocabulary(texts: Sequence[str]) -> dict[str, int]:
    counts = Counter(word for text in texts for word in _WORDS.findall(text))
    return {word: number for number, (word, _) in enumerate(counts.most_common(VOCAB - 2), start=2)}


def encode(words: dict[str, int], text: str) -> list[int]:
    return [words.get(word, UNKNOWN) for word in _WORDS.findall(text)]


def collate(words: dict[str, int], pairs: Sequence[dict[str, str]], device: str) -> tuple[Tensor, Tensor]:
    """ids `[2B, T]` and labels `[2B, T]`, chosen rows first; -100 on prompt and padding."""
    ids = torch.full((2 * len(pairs), LENGTH), PAD)
    labels = torch.full_like(ids, -100)
    for row, (side, pair) in enumerate((side, pair) for side in ("chosen", "rejected") for pair in pairs):
        prompt, answer = encode(words, pair["prompt"]), encode(words, pair[side])
        both = torch.tensor((prompt + answer)[:LENGTH])
        ids[row, : len(both)] = both
        labels[row, len(prompt) : len(both)] = both[len(prompt) :]
    return ids.to(device), labels.to(device)


def warm_up(model: Model, stream: Tensor, steps: int, bar: object, task: object, device: str) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        starts = torch.randint(len(stream) - LENGTH, (12, 1))
        ids = stream[starts + torch.arange(LENGTH)].to(device)
        loss = -linear_logprobs(model(ids[:, :-1]), model.head.weight, ids[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.update(task, advance=1, description=f"next token, loss {loss.item():.2f}")  # type: ignore[attr-defined]


def measure_head(model: Model, ids: Tensor, labels: Tensor, device: str) -> dict[str, tuple[float, float]]:
    """(peak MiB, ms) of one batch's log-probabilities and their backward: logits in full, and fused."""
    with torch.no_grad():
        hidden = model(ids)[:, :-1].contiguous()
    hidden.requires_grad_()
    weight, target = model.head.weight, labels[:, 1:].contiguous()

    def full() -> None:
        torch.autograd.grad(full_logprobs(hidden, weight, target).sum(), (hidden, weight))

    def fused() -> None:
        torch.autograd.grad(linear_logprobs(hidden, weight, target).sum(), (hidden, weight))

    scored = int((target != -100).sum())
    ways = {f"full logits\n{target.numel():,} positions": full, f"fused\n{scored:,} scored positions": fused}
    return {name: (peak_bytes(way, device) / MIB, median_ms(way, device)) for name, way in ways.items()}


def run(options: argparse.Namespace) -> int:
    progress = require("rich.progress")
    require("matplotlib")
    from .figures import rewards_and_head

    make_folder("--out", Path(options.out))
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training, held_out = paragraphs()
    words = vocabulary(training)
    print(f"text: {len(training)} paragraphs of the Python language reference, {len(held_out)} held out")
    print(f"pairs: {PAIRS_ARE}")
    policy = Model().to(device)
    stream = torch.tensor([token for text in training for token in encode(words, text)])
    pairs, unseen = preference_pairs(training, options.seed), preference_pairs(held_out, options.seed)[:32]
    dpo = LigerFusedLinearDPOLoss(beta=BETA)
    history: list[dict[str, float]] = []

    def loss_and_rewards(reference: Model, some: Sequence[dict[str, str]]) -> tuple[Tensor, Tensor, Tensor]:
        ids, labels = collate(words, some, device)
        with torch.no_grad():
            ref_hidden = reference(ids)[:, :-1]
        loss, metrics = dpo(
            policy.head.weight,
            policy(ids)[:, :-1],
            labels[:, 1:],
            ref_input=ref_hidden,
            ref_weight=reference.head.weight,
        )
        return loss, metrics[-2], metrics[-1]

    with progress.Progress() as bar:
        task = bar.add_task("next token", total=options.warm_up)
        warm_up(policy, stream, options.warm_up, bar, task, device)
        reference = copy.deepcopy(policy).requires_grad_(False)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)
        task = bar.add_task("DPO", total=options.steps)
        for step in range(options.steps):
            start = step * PAIRS % (len(pairs) - PAIRS)
            loss, chosen, rejected = loss_and_rewards(reference, pairs[start : start + PAIRS])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            means = {"chosen": chosen.mean().item(), "rejected": rejected.mean().item()}
            means["margins"] = means["chosen"] - means["rejected"]
            history.append({"step": float(step + 1), **{f"rewards/{name}": value for name, value in means.items()}})
            bar.update(task, advance=1, description=f"DPO, margin {means['margins']:.2f}")
    with torch.no_grad():
        _, chosen, rejected = loss_and_rewards(reference, unseen)
    head = measure_head(policy, *collate(words, unseen, device), device)
    margin, accuracy = (chosen - rejected).mean().item(), (chosen > rejected).float().mean().item()
    print(f"held-out pairs: reward accuracy {accuracy:.3f}, reward margin {margin:.3f} (before: 0)")
    way = "torch.cuda.max_memory_allocated" if device == "cuda" else "torch's CPU allocator, by the profiler's record"
    print(f"loss head, forward and backward on {len(unseen)} held-out pairs (memory by {way})")
    for name, (mib, milliseconds) in head.items():
        print(f"  {name.replace(chr(10), ', '):32s} {mib:8.1f} MiB {milliseconds:8.1f} ms")
    chart = Path(options.out) / "dpo.png"
    rewards_and_head(history, head, chart, "DPO without TRL: a small Transformer, constructed pairs")
    print(f"chart: {chart}")
    return 0
