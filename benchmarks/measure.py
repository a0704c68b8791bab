"""Measure one case: correctness gate, peak memory, floor, interleaved timing."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from liger_losses import record_active_vocabulary
from liger_losses.cli.measuring import milliseconds

from .cases import IGNORE_INDEX, Case, Inputs, make_inputs
from .implementations import NAIVE, Implementation, Step
from .oracle import Truth, allowed, errors, truth, within

WARM_UPS = 3  # the gate's step, the memory measurement's, and the one that `milliseconds` itself makes
# Under load a GPU lowers its clock to keep to its power limit, seconds after it was idle. What runs next inherits the
# clock of what ran before, for some 0.3 s: measured, 4 % of a step where two steps take the same in the long run.
HEATING_S = 3.0
SETTLING_S = 0.4
REPEATS = 8


def train(step: Step, inputs: Inputs) -> Tensor:
    """Forward and backward, onto gradients that do not exist yet."""
    inputs.clear_gradients()
    loss = step()
    loss.backward()
    return loss.detach()


def free(device: torch.device) -> None:
    """What nobody holds any more, given back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def extra_bytes(step: Step, inputs: Inputs, device: torch.device) -> int | None:
    """Peak of forward and backward above what was allocated before, less the gradients returned; None off CUDA."""
    if device.type != "cuda":
        train(step, inputs)
        return None
    inputs.clear_gradients()
    free(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    train(step, inputs)
    peak = torch.cuda.max_memory_allocated(device)
    returned = sum(leaf.grad.nbytes for leaf in (inputs.hidden, inputs.weight) if leaf.grad is not None)
    inputs.clear_gradients()
    torch.cuda.empty_cache()
    return peak - before - returned


def floor_products(case: Case, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """The products that the exact loss and gradients cannot do without, each as one product of the scored tokens."""
    hidden, weight = inputs.hidden.detach()[inputs.target != IGNORE_INDEX], inputs.weight.detach()
    logits, d_hidden = hidden @ weight.T, torch.empty_like(hidden)
    products: dict[str, Callable[[], object]] = {
        "x W^T": lambda: torch.mm(hidden, weight.T, out=logits),
        "dlogits W": lambda: torch.mm(logits, weight, out=d_hidden),
    }
    if not case.frozen:
        d_weight = torch.empty_like(weight)
        products["dlogits^T x"] = lambda: torch.mm(logits.T, hidden, out=d_weight)
    reference, of_reference = inputs.reference_weight, inputs.reference_hidden
    if reference is not None and of_reference is not None:
        other = of_reference[inputs.target != IGNORE_INDEX]
        products["reference x W^T"] = lambda: torch.mm(other, reference.T, out=logits)
    return products


def check(step: Step, implementation: Implementation, inputs: Inputs, true: Truth) -> dict[str, float]:
    """Errors of one step, and the largest log-probability error where those are exposed."""
    found = errors(train(step, inputs).item(), inputs, true)
    if implementation.logprobs is not None:
        with torch.no_grad():
            logprobs = implementation.logprobs(inputs.hidden, inputs.weight, inputs.target)
        found["logprob"] = (logprobs[inputs.target != IGNORE_INDEX].double() - true.logprobs).abs().max().item()
    return found


def prepare(
    row: dict[str, Any],
    implementation: Implementation,
    case: Case,
    inputs: Inputs,
    true: Truth,
    bound: dict[str, float],
) -> Step | None:
    """Gate and memory of one implementation, written into its ``row``; its step when it is to be timed."""
    device, budget = inputs.hidden.device, row["memory_budget"]
    row["predicted_bytes"] = implementation.predict(case, budget) if implementation.predict is not None else None
    step = implementation.build(case, inputs, budget)
    with record_active_vocabulary() as left_out:
        row["errors"] = check(step, implementation, inputs, true)
    if left_out.tiles:
        row["active"] = {
            "share": left_out.share.item(), "dropped_mean": left_out.dropped_mean.item(),
            "dropped_max": left_out.dropped_max.item(), "tiles": left_out.tiles, "whole_tiles": left_out.whole_tiles,
        }  # fmt: skip
    if not within(row["errors"], bound):
        row["status"] = "outside the error bound"
        if implementation.ours:
            return None
    row["extra_bytes"] = extra_bytes(step, inputs, device)
    return step


def run_for(seconds: float, work: Callable[[], object], device: torch.device) -> None:
    """Bring a GPU to the temperature and clock that it has in the midst of such work."""
    until = time.monotonic() + (seconds if device.type == "cuda" else 0)
    while time.monotonic() < until:
        milliseconds(work, device)


def run_case(
    case: Case,
    implementations: Sequence[Implementation],
    device: torch.device,
    repeats: int = REPEATS,
    reference_dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Everything about one case, ready for JSON. Ours is timed only if it passes the gate; a peer is, and flagged."""
    # Shapes of an earlier case would otherwise make the compiler's graphs dynamic, and slower than at one shape.
    torch._dynamo.reset()
    inputs = make_inputs(case, device)
    true = truth(case, inputs, reference_dtype)
    bound = allowed(errors(train(NAIVE.build(case, inputs, None), inputs).item(), inputs, true))

    rows: list[dict[str, Any]] = []
    steps: dict[str, Step] = {}
    for implementation in (one for one in implementations if one.applies(case)):
        extra = {row["implementation"]: row["extra_bytes"] for row in rows if row.get("extra_bytes") is not None}
        row: dict[str, Any] = {"implementation": implementation.name, "ours": implementation.ours}
        row["memory_budget"] = implementation.budget(extra) if implementation.budget is not None else None
        row["status"] = implementation.missing(device) or "ok"
        rows.append(row)
        if row["status"] != "ok":
            continue
        try:
            step = prepare(row, implementation, case, inputs, true, bound)
        except Exception as error:  # one implementation's failure is a result, and must not hide the others'
            row["status"] = f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        else:
            if step is not None:
                steps[implementation.name] = step
    del true
    inputs.clear_gradients()

    products = floor_products(case, inputs)
    works = {**products, **{name: partial(train, step, inputs) for name, step in steps.items()}}
    times: dict[str, list[float]] = {name: [] for name in works}
    run_for(HEATING_S, next(iter(works.values())), device)
    for _ in range(repeats):
        for name, work in works.items():
            inputs.clear_gradients()  # so that no free is timed, nor memory kept during the products
            run_for(SETTLING_S, work, device)
            times[name].append(milliseconds(work, device))

    floor = {name: median(times[name]) for name in products}
    for row in rows:
        if row["implementation"] in steps:
            row["times_ms"] = times[row["implementation"]]
            row["ms"] = median(row["times_ms"])
            row["floor_ratio"] = row["ms"] / sum(floor.values())
    return {
        "case": case.name,
        "title": case.title,
        "error_bound": bound,
        "floor": {"products_ms": floor, "ms": sum(floor.values())},
        "rows": rows,
    }


def failed(report: dict[str, Any]) -> list[str]:
    """Our implementations that did not pass, or could not run at all."""
    return [
        f"{report['case']}: {row['implementation']}" for row in report["rows"] if row["ours"] and row["status"] != "ok"
    ]
