"""`liger-losses doctor`: what is installed, which form of each kernel runs, and whether it is right."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses import Divergence, LigerFusedLinearBCELoss, __version__, linear_divergence, linear_logprobs, losses
from liger_losses.kernels import fused_add_rms_norm, gated_activation, layer_norm, rms_norm, rotary
from liger_losses.kernels.dispatch import use_triton

from .extras import CommandError
from .measuring import full_logprobs

PACKAGES = ("torch", "triton", "numpy", "transformers", "trl", "peft", "accelerate", "deepspeed", "liger-kernel")
ROWS, WIDTH, VOCAB = 24, 64, 515  # an odd vocabulary

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Check:
    """`run` computes, through our kernels, what `plain` says in torch; both of the same inputs, to a tuple."""

    name: str
    run: Callable[[Inputs], tuple[Tensor, ...]]
    plain: Callable[[Inputs], tuple[Tensor, ...]]
    names: tuple[str, ...]  # of the inputs, those that get a gradient


def _inputs() -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    angles = torch.outer(torch.arange(6.0, dtype=torch.float64), 10.0 ** -torch.arange(0, 4, 0.5, dtype=torch.float64))
    angles = torch.cat([angles, angles], -1)
    labels = torch.randint(VOCAB, (ROWS,), generator=generator)
    labels[::5] = -100
    return {
        "x": normal(ROWS, WIDTH),
        "y": normal(ROWS, WIDTH),
        "w": normal(WIDTH),
        "head": normal(VOCAB, WIDTH) * 3 * WIDTH**-0.5,
        "teacher": normal(VOCAB, WIDTH) * 3 * WIDTH**-0.5,
        "labels": labels,
        "positives": torch.randint(VOCAB, (ROWS, 3), generator=generator),
        "q": normal(1, 2, 6, 16),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }


def _plain_entropy(i: Inputs) -> tuple[Tensor, ...]:
    log_p = (i["x"] @ i["head"].T).log_softmax(-1)
    return (-(log_p.exp() * log_p).sum(-1).masked_fill(i["labels"] < 0, 0),)


def _divergence(kind: str) -> Check:
    def run(i: Inputs) -> tuple[Tensor, ...]:
        head, chosen = (i["x"], i["head"], i["labels"]), Divergence(kind=kind)
        return (linear_divergence(*head, teacher_hidden=i["y"], teacher_weight=i["teacher"], divergence=chosen),)

    def plain(i: Inputs) -> tuple[Tensor, ...]:
        student, teacher = i["x"] @ i["head"].T, i["y"] @ i["teacher"].T
        return (losses.divergence(student, teacher, kind=kind, mask=i["labels"] >= 0),)

    return Check(f"divergence of two heads ({kind})", run, plain, ("x", "head"))


def _plain_bce(i: Inputs) -> tuple[Tensor, ...]:
    wanted = torch.zeros(ROWS, VOCAB, dtype=i["x"].dtype).scatter_(1, i["positives"], 1.0)
    return (F.binary_cross_entropy_with_logits(i["x"] @ i["head"].T, wanted),)


def _plain_rotary(i: Inputs) -> tuple[Tensor, ...]:
    a, b = i["q"].chunk(2, -1)
    return (i["q"] * i["cos"] + torch.cat([-b, a], -1) * i["sin"],)


CHECKS = (
    Check(
        "log-probabilities of a head",
        lambda i: (linear_logprobs(i["x"], i["head"], i["labels"]),),
        lambda i: (full_logprobs(i["x"], i["head"], i["labels"]),),
        ("x", "head"),
    ),
    Check(
        "entropy of a head",
        lambda i: (linear_logprobs(i["x"], i["head"], i["labels"], statistics=("entropy",))["entropy"],),
        _plain_entropy,
        ("x", "head"),
    ),
    _divergence("forward_kl"),
    _divergence("jsd"),
    Check(
        "binary cross entropy of a head",
        lambda i: (LigerFusedLinearBCELoss()(i["head"], i["x"], i["positives"]),),
        _plain_bce,
        ("x", "head"),
    ),
    Check(
        "RMSNorm",
        lambda i: (rms_norm(i["x"], i["w"]),),
        lambda i: (F.rms_norm(i["x"], (WIDTH,), i["w"], 1e-6),),
        ("x", "w"),
    ),
    Check(
        "residual addition + RMSNorm",
        lambda i: fused_add_rms_norm(i["x"], i["y"], i["w"]),
        lambda i: (F.rms_norm(i["x"] + i["y"], (WIDTH,), i["w"], 1e-6), i["x"] + i["y"]),
        ("x", "y", "w"),
    ),
    Check(
        "LayerNorm",
        lambda i: (layer_norm(i["x"], i["w"]),),
        lambda i: (F.layer_norm(i["x"], (WIDTH,), i["w"]),),
        ("x", "w"),
    ),
    Check(
        "gated activation",
        lambda i: (gated_activation(i["x"], i["y"]),),
        lambda i: (F.silu(i["x"]) * i["y"],),
        ("x", "y"),
    ),
    Check("rotary embedding", lambda i: (rotary(i["q"], None, i["cos"], i["sin"])[0],), _plain_rotary, ("q",)),
)


def _on(inputs: Inputs, device: torch.device, dtype: torch.dtype, names: tuple[str, ...]) -> Inputs:
    moved = {name: t.to(device, dtype if t.is_floating_point() else None) for name, t in inputs.items()}
    return {name: t.requires_grad_() if name in names else t for name, t in moved.items()}


def _results(function: Callable[[Inputs], tuple[Tensor, ...]], inputs: Inputs, names: tuple[str, ...]) -> list[Tensor]:
    values = function(inputs)
    # Weights that differ from row to row: a plain sum of a norm's results has next to no gradient.
    weights = [torch.linspace(0.5, 1.5, v.numel(), dtype=torch.float64).view(v.shape).to(v) for v in values]
    total = torch.stack([(v * w).sum() for v, w in zip(values, weights, strict=True)]).sum()
    found = [*values, *torch.autograd.grad(total, [inputs[name] for name in names])]
    return [tensor.detach().double().cpu() for tensor in found]


def self_test(check: Check, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The largest relative error (Frobenius) of results and gradients against fp64; `ok` by twice that of plain torch
    in the same dtype, plus a rounding."""
    exact_inputs = _on(_inputs(), device, dtype, ())
    true = _results(check.plain, _on(exact_inputs, torch.device("cpu"), torch.float64, check.names), check.names)
    row: dict[str, Any] = {"check": check.name, "dtype": str(dtype).removeprefix("torch.")}
    row["kernel"] = "triton" if use_triton(exact_inputs["x"]) else "torch"

    def error(found: list[Tensor]) -> float:
        pairs = zip(found, true, strict=True)
        return max(((got - want).norm() / want.norm().clamp(min=1e-30)).item() for got, want in pairs)

    try:
        row["error"] = error(_results(check.run, _on(exact_inputs, device, dtype, check.names), check.names))
        plain = error(_results(check.plain, _on(exact_inputs, torch.device("cpu"), dtype, check.names), check.names))
        row["allowed"] = 2 * plain + 4 * torch.finfo(dtype).eps
        row["ok"] = row["error"] <= row["allowed"]
    except Exception as failure:  # whatever a broken installation raises is the finding
        row.update(ok=False, failure=f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}")
    return row


def environment() -> dict[str, Any]:
    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = importlib.util.find_spec(package.replace("-", "_")) is not None
            return "unknown" if found else None

    devices = [
        f"{torch.cuda.get_device_name(n)}, capability {'.'.join(map(str, torch.cuda.get_device_capability(n)))}"
        for n in range(torch.cuda.device_count())
    ]
    return {
        "liger-losses": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {package: version(package) for package in PACKAGES},
        "cuda": torch.version.cuda or torch.version.hip,
        "devices": devices,
    }


def default_device(asked: str | None) -> torch.device:
    """The device asked for, or the accelerator there is."""
    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
        float(torch.ones(1, device=device))  # one that holds values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = textwrap.shorten(str(error).partition(chr(10))[0], 200, placeholder=" ...")
        raise CommandError(f"--device: got {asked!r}, expected a device that is here: {why}") from error
    return device


def run(options: argparse.Namespace) -> int:
    device = default_device(options.device)
    dtypes = (torch.float32, torch.bfloat16)
    # TF32 would be within no rounding of fp32.
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        rows = [self_test(check, device, dtype) for check in CHECKS for dtype in dtypes]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    passed = all(row["ok"] for row in rows)
    found = environment()
    if options.json:
        print(json.dumps({"environment": found, "device": str(device), "checks": rows, "ok": passed}, indent=1))
        return 0 if passed else 1
    print(f"liger-losses {found['liger-losses']}, Python {found['python']}, {found['system']}")
    print(", ".join(f"{name} {version or '-'}" for name, version in found["packages"].items()))
    print(f"CUDA/HIP {found['cuda'] or '-'}; {'; '.join(found['devices']) or 'no accelerator'}; tested on {device}\n")
    print(f"      {'':36s} {'':8s} {'':6s} error    allowed")
    for row in rows:
        detail = row.get("failure") or f"{row['error']:.1e}  {row['allowed']:.1e}"
        print(f"{'ok  ' if row['ok'] else 'FAIL'}  {row['check']:36s} {row['dtype']:8s} {row['kernel']:6s} {detail}")
    print(f"\n{'every self-test passed' if passed else 'a self-test FAILED: please report all of the above'}")
    return 0 if passed else 1
