"""Does training come out the same over an active vocabulary? SFT, then DPO, on real text with a small Llama.

    python examples/active_vocabulary.py --out examples/results/active_vocabulary.json

One model a seed is warmed up, exactly, on half of the text. From it every rule trains on the other half (SFT), and from
the exact path's outcome on preference pairs (DPO). Rules see the same batches and are compared at the same seed. How
far apart two outcomes may be is measured, not set: over the seeds, and by the exact path once more with its head
multiplied by 1 + 1e-6, as rounding might. Rates warm up and decay to 0 and gradients are clipped, so that such a
perturbation stays small instead of growing from step to step.

Products run in bf16 (autocast around the head), weights are fp32. Tiles are compacted however many of their columns are
active: at 4,096 tokens of vocabulary most would be multiplied whole, and nothing would be tested. Every run has one
thread, hence the same bits on the same machine, and `--workers` processes share the runs. The gradients of the trained
models' own hidden states and heads are then held against fp64, beside the exact path's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
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

PERTURBED = "exact, head x (1 + 1e-6)"
RULES: dict[str, float | str | None] = {
    "exact": None, PERTURBED: None, "auto": "auto", "2^-12": 2.0**-12, "2^-8": 2.0**-8,
}  # fmt: skip
NUMBERS = {"sft": ("training", "held_out"), "dpo": ("training", "held_out")}
# Both products of a tile follow its choice of columns here. A strategy that keeps columns until backward has room for
# shares below the crossover alone: at this script's larger ones `dW` would come out exact.
STRATEGY = "immediate"
State = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Settings:
    seeds: int = 3
    vocab: int = 4096
    hidden: int = 64
    layers: int = 2
    rows: int = 4  # of a batch of SFT; twice as many warm the model up
    length: int = 128
    warm_up: int = 200  # steps
    sft_steps: int = 150
    pairs: int = 120  # to train on; a third as many are held out
    batch_pairs: int = 6
    rate: float = 4e-3
    dpo_rate: float = 1e-3


@dataclasses.dataclass(frozen=True)
class Text:
    """What all runs read."""

    tokenizer: Any
    first: Tensor  # half of the training text [tokens]
    second: Tensor  # the other half
    held_out: Tensor
    paragraphs: list[str]  # of the second half

    @classmethod
    @functools.cache
    def of(cls, settings: Settings) -> Text:
        training, held_out = paragraphs()
        tokenizer = train_tokenizer(training, settings.vocab)
        half = len(training) // 2
        streams = (token_stream(tokenizer, texts, "cpu") for texts in (training[:half], training[half:], held_out))
        return cls(tokenizer, *streams, training[half:])


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def hidden_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    return model.model(ids).last_hidden_state


def model_of(settings: Settings, state: State | None, seed: int = 0, name: str = "exact") -> LlamaForCausalLM:
    """A model, new or of `state`; its head (and so its embedding) a little off where that is what is measured."""
    size = {"hidden_size": settings.hidden, "layers": settings.layers}
    model = small_llama(Text.of(settings).tokenizer, **size, seed=seed, device="cpu")
    if state is not None:
        model.load_state_dict(state)
    if name == PERTURBED:
        with torch.no_grad():
            model.lm_head.weight.mul_(1 + 1e-6)
    return model


def descend(model: LlamaForCausalLM, loss_of: Callable[[int], Tensor], steps: int, rate: float) -> None:
    """AdamW; the rate rises over a tenth of the steps and falls as a cosine to 0; gradients are clipped to norm 1."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.95))
    rise = max(1, steps // 10)

    def factor(step: int) -> float:
        return min((step + 1) / rise, 0.5 + 0.5 * math.cos(math.pi * max(0, step - rise) / max(1, steps - rise)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in range(steps):
        loss_of(step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def next_token(model: LlamaForCausalLM, stream: Tensor, rule: Any, settings: Settings, *, rows: int) -> Tensor:
    """The loss of one batch from random places of `stream`."""
    loss_of = LigerFusedLinearCrossEntropyLoss(active_vocab=rule, strategy=STRATEGY)
    ids = windows(stream, rows, settings.length)
    hidden = hidden_of(model, ids[:, :-1])
    with bf16():
        return loss_of(model.lm_head.weight, hidden, ids[:, 1:])


@torch.no_grad()
def nll(model: LlamaForCausalLM, stream: Tensor, length: int) -> float:
    """Of all of `stream`, in fp32."""
    rows = stream[: len(stream) // length * length].view(-1, length)
    each = [
        linear_logprobs(hidden_of(model, some[:, :-1]), model.lm_head.weight, some[:, 1:]) for some in rows.split(32)
    ]
    return -torch.cat(each).mean().item()


def warm(settings: Settings, seed: int) -> State:
    """A model that knows half of the text."""
    model, stream = model_of(settings, None, seed), Text.of(settings).first
    torch.manual_seed(seed)
    rows = 2 * settings.rows
    descend(
        model, lambda _: next_token(model, stream, None, settings, rows=rows), settings.warm_up, settings.rate
    )  # fmt: skip
    return model.state_dict()


def sft(settings: Settings, seed: int, name: str, start: State) -> tuple[dict[str, float], State]:
    """Next-token training by a rule on the other half; the loss on all of that half and on held-out text after it."""
    text, model = Text.of(settings), model_of(settings, start, name=name)
    torch.manual_seed(seed)
    with record_active_vocabulary() as report:
        descend(
            model,
            lambda _: next_token(model, text.second, RULES[name], settings, rows=settings.rows),
            settings.sft_steps,
            settings.rate,
        )
    found = {
        "training": nll(model, text.second, settings.length),
        "held_out": nll(model, text.held_out, settings.length),
    }
    return found | left_out(report), model.state_dict()


def left_out(report: Any) -> dict[str, float]:
    """The mean share of active columns of all steps, and how many tiles were multiplied whole."""
    return {"share": report.share.item(), "whole_tiles": report.whole_tiles} if report.tiles else {}


@functools.cache
def batches(settings: Settings) -> list[tuple[Tensor, Tensor]]:
    """`ids [2 pairs, T]`, chosen first, and `target`, -100 on prompt and padding. Held-out ones come last."""
    text, size, made = Text.of(settings), settings.batch_pairs, []
    pairs, encode, count = preference_pairs(text.paragraphs, 0), text.tokenizer, settings.pairs // size
    last = (count + max(1, count // 3)) * size
    if not 0 < count < last <= len(pairs):
        raise ValueError(f"pairs: got {settings.pairs}, expected at least {size}, of {len(pairs)} with those held out")
    for start in range(0, last, size):
        some = pairs[start : start + size]
        rows = [(encode(p["prompt"])["input_ids"], encode(p[k])["input_ids"]) for k in ("chosen", "rejected")
                for p in some]  # fmt: skip
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids, target = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -100)
        for row, (prompt, answer) in enumerate(rows):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            target[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        made.append((ids[:, :-1], target[:, 1:]))
    return made


def preference(model: LlamaForCausalLM, reference: LlamaForCausalLM, batch: tuple[Tensor, Tensor], rule: Any) -> Any:
    """DPO's loss and metrics of a batch."""
    ids, target = batch
    with torch.no_grad():
        of_reference = hidden_of(reference, ids)
    return LigerFusedLinearDPOLoss(beta=0.1, active_vocab=rule, strategy=STRATEGY)(
        model.lm_head.weight, hidden_of(model, ids), target,
        ref_input=of_reference, ref_weight=reference.lm_head.weight,
    )  # fmt: skip


def dpo(settings: Settings, seed: int, name: str, start: State) -> tuple[dict[str, float], State]:
    """One pass over the pairs, in a seed's order, by a rule; loss and reward accuracy after it, held-out pairs too."""
    model, reference = model_of(settings, start, name=name), model_of(settings, start)
    data, count = batches(settings), settings.pairs // settings.batch_pairs
    parts = {"training": data[:count], "held_out": data[count:]}
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()

    def loss_of(step: int) -> Tensor:
        with bf16():
            return preference(model, reference, data[order[step]], RULES[name])[0]

    with record_active_vocabulary() as report:
        descend(model, loss_of, count, settings.dpo_rate)
    found: dict[str, float] = {}
    for part, some in parts.items():
        with torch.no_grad():
            seen = [preference(model, reference, batch, None) for batch in some]
        wins = torch.cat([metrics[-2] > metrics[-1] for _, metrics in seen])
        found[part] = sum(loss.item() for loss, _ in seen) / len(seen)
        found[f"{part}_accuracy"] = wins.float().mean().item()
    return found | left_out(report), model.state_dict()


def gradient_errors(settings: Settings, state: State) -> dict[str, dict[str, float]]:
    """Relative errors of `dX` and `dW` of the trained model's cross entropy against fp64, a rule each.

    And where they come from: the size of the entries of `G` that are moved to the tail, of what is lost of them once
    their sum is spread, and of `dX` of either; in fp64, relative to the whole.
    """
    model = model_of(settings, state)
    torch.manual_seed(1)
    ids = windows(Text.of(settings).second, settings.rows, settings.length)
    with torch.no_grad():
        hidden = hidden_of(model, ids[:, :-1]).bfloat16()
    weight, target = model.lm_head.weight.detach().bfloat16(), ids[:, 1:]

    def gradients(dtype: torch.dtype, rule: float | str | None) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
        loss = LigerFusedLinearCrossEntropyLoss(active_vocab=rule, strategy=STRATEGY)(leaves[1], leaves[0], target)
        return [g.double() for g in torch.autograd.grad(loss, leaves)]

    def off(got: Tensor, whole: Tensor) -> float:
        return (got.norm() / whole.norm()).item()

    true = gradients(torch.float64, None)
    head = weight.double()
    entries = torch.softmax(hidden.double().flatten(0, 1) @ head.T, -1)
    entries[torch.arange(len(entries)), target.flatten()] -= 1
    found = {}
    for name, rule in RULES.items():
        if name == PERTURBED:
            continue
        with record_active_vocabulary() as report, recorded_choices() as choices:
            got = gradients(torch.bfloat16, rule)
        found[name] = {of: off(g - t, t) for of, g, t in zip(("dX", "dW"), got, true, strict=True)}
        if report.tiles:
            (choice,) = choices
            moved = entries.masked_fill(choice.active, 0)
            lost = moved - moved.sum(-1, keepdim=True) * choice.profile.double()
            found[name] |= left_out(report) | {
                "dropped_mean": report.dropped_mean.item(), "dropped_max": report.dropped_max.item(),
                "moved": off(moved, entries), "lost": off(lost, entries),
                "lost_dX": off(lost @ head, entries @ head), "moved_dX": off(moved @ head, entries @ head),
            }  # fmt: skip
    return found


@contextlib.contextmanager
def recorded_choices() -> Iterator[list[Any]]:
    """The columns that tiles choose inside the block."""
    choices: list[Any] = []
    choose = active.choose_columns

    def choosing(*args: Any, **options: Any) -> Any:
        choices.append(choose(*args, **options))
        return choices[-1]

    active.choose_columns = choosing
    try:
        yield choices
    finally:
        active.choose_columns = choose


def spreads(runs: dict[str, list[dict[str, float]]], number: str) -> dict[str, Any]:
    """How far apart the exact path's outcomes are, over seeds and by perturbation, and how far the rules' from it."""
    exact = [run[number] for run in runs["exact"]]

    def furthest(name: str) -> float:
        return max(abs(run[number] - one) for run, one in zip(runs[name], exact, strict=True))

    everyone = exact + [run[number] for run in runs[PERTURBED]]
    spread = max(everyone) - min(everyone)
    rules = {name: furthest(name) for name in runs if name not in ("exact", PERTURBED)}
    return {
        "over_seeds": spread,
        "perturbed": furthest(PERTURBED),
        "rules": {name: {"furthest": far, "within": far <= spread} for name, far in rules.items()},
    }


def single_threaded() -> None:
    torch.set_num_threads(1)
    active.CROSSOVER = 1.0


def experiment(settings: Settings, spread: Callable[..., Iterable[Any]] = map) -> dict[str, Any]:
    """All runs. What is given for `map` may spread them over processes that have called `single_threaded`."""

    def each(function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
        return list(spread(function, *zip(*arguments, strict=True)))

    seeds = range(settings.seeds)
    states = each(warm, [(settings, seed) for seed in seeds])
    result: dict[str, Any] = {"settings": dataclasses.asdict(settings)}
    for kind, stage in (("sft", sft), ("dpo", dpo)):
        jobs = [(settings, seed, name, states[seed]) for seed in seeds for name in RULES]
        done = dict(zip([job[1:3] for job in jobs], each(stage, jobs), strict=True))
        result[kind] = {name: [done[seed, name][0] for seed in seeds] for name in RULES}
        states = [done[seed, "exact"][1] for seed in seeds]
        if kind == "sft":
            result["gradients"] = each(gradient_errors, [(settings, state) for state in states])
    result["spread"] = {
        kind: {number: spreads(result[kind], number) for number in numbers} for kind, numbers in NUMBERS.items()
    }
    return result


def tables(result: dict[str, Any]) -> str:
    """What the runs came to, in Markdown; numbers of several seeds one after the other."""

    def several(runs: list[dict[str, float]], number: str, form: str) -> str:
        return ", ".join(format(run[number], form) for run in runs if number in run) or "-"

    lines = [
        "| | dX | dW | active columns | mass outside, mean | and max | `G` moved | `G` lost | lost, of dX |",
        "|---|" + "--:|" * 8,
    ]
    for name in result["gradients"][0]:
        runs = [seed[name] for seed in result["gradients"]]
        forms = {"dX": ".1e", "dW": ".1e", "share": ".0%", "dropped_mean": ".3f", "dropped_max": ".2f",
                 "moved": ".1e", "lost": ".1e", "lost_dX": ".1e"}  # fmt: skip
        lines.append(" | ".join([f"| {name}", *(several(runs, number, form) for number, form in forms.items())]) + " |")
    numbers = {"training": ".4f", "held_out": ".4f", "held_out_accuracy": ".2f", "share": ".0%"}
    for kind, title in (("sft", "SFT"), ("dpo", "DPO")):
        shown = {number: form for number, form in numbers.items() if kind == "dpo" or number != "held_out_accuracy"}
        lines += ["", " | ".join([f"| {title}", *(n.replace("_", " ") for n in shown)]) + " |"]
        lines[-1] = lines[-1].replace("share", "active columns")
        lines.append("|---" * (1 + len(shown)) + "|")
        for name, runs in result[kind].items():
            lines.append(" | ".join([f"| {name}", *(several(runs, n, form) for n, form in shown.items())]) + " |")
    rules = list(result["spread"]["sft"]["training"]["rules"])
    lines += ["", " | ".join(["| furthest apart at one seed", "over the exact path's seeds", PERTURBED, *rules]) + " |",
              "|---|" + "--:|" * (2 + len(rules))]  # fmt: skip
    for kind, numbers in NUMBERS.items():
        for number in numbers:
            found = result["spread"][kind][number]
            verdicts = [
                f"{r['furthest']:.1e} ({'within' if r['within'] else 'outside'})" for r in found["rules"].values()
            ]
            cells = [f"{found['over_seeds']:.1e}", f"{found['perturbed']:.1e}", *verdicts]
            lines.append(" | ".join([f"| {kind.upper()}, {number.replace('_', ' ')}", *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Settings):
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = vars(parser.parse_args())
    workers, out = options.pop("workers"), options.pop("out")
    started = time.perf_counter()
    # Not multiprocessing's Pool, which waits for ever where a worker was killed.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), single_threaded) as pool:
        result = experiment(Settings(**options), pool.map)
    print(tables(result))
    print(f"\n{time.perf_counter() - started:.0f} s")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
