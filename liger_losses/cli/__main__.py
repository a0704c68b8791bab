"""`liger-losses plan | bench | doctor | demo`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from liger_losses._version import __version__

from .extras import CommandError
from .gpus import gpu_names
from .options import MOST_EXAMPLES, MOST_TOKENS, integer, joined, share
from .workloads import WORKLOADS

_MODULES = {"plan": "planning", "bench": "bench", "doctor": "doctor", "demo": "demo"}


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="liger-losses", description="Fused linear losses for LLM post-training.")
    whole.add_argument("--version", action="version", version=f"liger-losses {__version__}")
    commands = whole.add_subparsers(dest="command", required=True)

    plan = commands.add_parser("plan", help="memory and time of the loss head of a model, before running it")
    plan.add_argument("model", nargs="?", help="config.json or its folder, or an id such as Qwen/Qwen2.5-7B")
    plan.add_argument("--list-models", action="store_true", help="name the models known offline, and stop")
    plan.add_argument("--list-gpus", action="store_true", help="name the GPUs and their rates, and stop")
    plan.add_argument("--loss", type=str.lower, choices=list(WORKLOADS), default="dpo", help="default: %(default)s")
    plan.add_argument("--teacher", metavar="MODEL", help="of jsd and fkl: a model with the same vocabulary")
    plan.add_argument(
        "--batch", type=integer("--batch", 1, MOST_EXAMPLES), default=8,
        help="examples a step, or pairs (default: %(default)s)",
    )  # fmt: skip
    plan.add_argument(
        "--length", type=integer("--length", 1, MOST_TOKENS), default=2048, help="tokens a row (default: %(default)s)"
    )
    plan.add_argument(
        "--prompt", type=share("--prompt"), default=0.25,
        help="share of each row that is not scored (default: %(default)s)",
    )  # fmt: skip
    plan.add_argument("--gpu", type=str.lower, choices=gpu_names(), default="h200", help="default: %(default)s")
    plan.add_argument("--frozen", action="store_true", help="the head needs no gradient (LoRA elsewhere)")
    plan.add_argument("--logits-dtype", type=str.lower, choices=("float32", "input"), default="float32")
    plan.add_argument("--memory-budget", metavar="BYTES", help="as in the library: 512MiB, 4GiB")
    plan.add_argument(
        "--memory", metavar="BYTES", help="what the head may take in all: finds the largest batch and length"
    )
    plan.add_argument("--json", action="store_true", help="machine-readable, bytes")
    plan.add_argument("--chart", metavar="FILE", help="also draw it: .png, .svg or .pdf")

    bench = commands.add_parser("bench", help="time the losses on this machine")
    bench.add_argument("--quick", action="store_true", help="ours beside full logits, about a minute; needs no clone")
    bench.add_argument(
        "--case", action="append", metavar="PART",
        help="without --quick: only cases whose name contains this; repeatable (on a CPU: tiny)",
    )  # fmt: skip
    bench.add_argument("--device", help="default: cuda where there is one, else cpu")
    bench.add_argument(
        "--out", default="liger-losses-bench", metavar="FOLDER", help="for the report (default: %(default)s)"
    )
    bench.add_argument("--repeats", type=integer("--repeats", 1, 1000), default=3)

    doctor = commands.add_parser("doctor", help="versions, devices, and a self-test of every kernel")
    doctor.add_argument("--device", help="default: cuda where there is one, else cpu")
    doctor.add_argument("--json", action="store_true")

    demo = commands.add_parser("demo", help="DPO on a small model and text of the standard library, with a chart")
    demo.add_argument("--steps", type=integer("--steps", 1, 10**6), default=60, help="DPO steps")
    demo.add_argument("--warm-up", type=integer("--warm-up", 0, 10**6), default=150, help="next-token steps before")
    demo.add_argument("--out", default="liger-losses-demo", metavar="FOLDER")
    demo.add_argument("--seed", type=integer("--seed", 0, 2**32 - 1), default=0)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    with warnings.catch_warnings():
        # torch says it of itself while it is imported; no command here needs NumPy through torch.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options = parser().parse_args(joined(sys.argv[1:] if arguments is None else arguments))
        command = import_module(f".{_MODULES[options.command]}", __package__)
        status: int = command.run(options)
        sys.stdout.flush()
    except CommandError as error:
        print(f"liger-losses: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read it (`| head`) has seen enough; the interpreter would complain once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())
