"""What is measured: heads, workloads, shapes and random inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
DPO_BETA = 0.1


@dataclass(frozen=True)
class Head:
    """Shape of a language-model head, ``weight [vocab, hidden]``."""

    name: str
    hidden: int
    vocab: int


LLAMA, QWEN = Head("llama3-8b", 4096, 128256), Head("qwen2.5-7b", 3584, 152064)
GEMMA = Head("gemma2-2b", 2304, 256000)
TINY = Head("tiny", 32, 307)  # an odd vocabulary; for checking the harness itself on a CPU


@dataclass(frozen=True)
class Workload:
    """A scalar loss of per-token log-probabilities.

    ``loss(logprobs [R, T], mask [R, T], reference_logprobs [R, T] or None)``: masked entries of the log-probabilities
    are zero. ``reference`` says whether a second, frozen model is scored too (one more matrix product).
    """

    loss: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    reference: bool = False


def cross_entropy(logprobs: Tensor, mask: Tensor, reference_logprobs: Tensor | None) -> Tensor:
    return -logprobs.sum() / mask.sum()


def dpo(logprobs: Tensor, mask: Tensor, reference_logprobs: Tensor | None) -> Tensor:
    """Mean over pairs of ``-log sigmoid(beta * ((c - c_ref) - (r - r_ref)))``, chosen rows first (arXiv:2305.18290)."""
    assert reference_logprobs is not None
    chosen, rejected = (logprobs - reference_logprobs).sum(-1).chunk(2)
    return -F.logsigmoid(DPO_BETA * (chosen - rejected)).mean()


WORKLOADS = {"ce": Workload(cross_entropy), "dpo": Workload(dpo, reference=True)}


@dataclass(frozen=True)
class Case:
    """One table: a workload at one shape. The first ``prompt`` share of every row is not scored."""

    workload: str
    head: Head
    rows: int
    length: int
    prompt: float = 0.0
    frozen: bool = False
    suite: str = "default"  # "quick" is part of "default"; "harness" runs by name only

    @property
    def name(self) -> str:
        units = "" if self.workload == "ce" else f"{self.rows // 2}x"
        return f"{self.workload}-{units}{self.length}/{self.head.name}{'/frozen' if self.frozen else ''}"

    @property
    def scored(self) -> int:
        return self.rows * (self.length - int(self.prompt * self.length))

    @property
    def title(self) -> str:
        shape = f"{self.rows} x {self.length} tokens, {self.scored:,} scored, H {self.head.hidden}, V {self.head.vocab}"
        return f"{self.name}: {shape}, {'frozen' if self.frozen else 'trainable'} head"


SHAPES: tuple[tuple[str, Head, int, int, float, str], ...] = (
    ("ce", LLAMA, 1, 8192, 0.0, "quick"),
    ("dpo", LLAMA, 8, 2048, 0.25, "quick"),
    ("dpo", LLAMA, 2, 8192, 0.25, "default"),
    ("dpo", QWEN, 8, 2048, 0.25, "default"),
    ("ce", QWEN, 1, 8192, 0.0, "default"),
    ("ce", GEMMA, 1, 8192, 0.0, "default"),
    ("ce", TINY, 1, 96, 0.0, "harness"),
    ("dpo", TINY, 4, 24, 0.25, "harness"),
)
CASES = {
    case.name: case
    for workload, head, rows, length, prompt, suite in SHAPES
    for case in (Case(workload, head, rows, length, prompt, frozen, suite) for frozen in (False, True))
}


@dataclass
class Inputs:
    """Tensors of one case. ``hidden`` is a leaf that needs its gradient; ``weight`` too unless the head is frozen."""

    hidden: Tensor  # [R, T, H]
    weight: Tensor  # [V, H]
    target: Tensor  # [R, T], IGNORE_INDEX on the prompt
    loaded: Tensor  # the same where a data loader leaves it, on the host
    reference_hidden: Tensor | None = None  # [R, T, H]
    reference_weight: Tensor | None = None  # [V, H]

    def clear_gradients(self) -> None:
        self.hidden.grad = self.weight.grad = None


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Inputs:
    """Random data: ``hidden ~ N(0, 1)``, ``weight ~ N(0, 1 / H)``; the reference model is near the policy."""
    generator = torch.Generator(device=device).manual_seed(seed)
    head, scale = case.head, case.head.hidden**-0.5

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    hidden = normal(case.rows, case.length, head.hidden)
    weight = normal(head.vocab, head.hidden).mul_(scale)
    target = torch.randint(0, head.vocab, (case.rows, case.length), generator=generator, device=device)
    target[:, : int(case.prompt * case.length)] = IGNORE_INDEX
    inputs = Inputs(
        hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(not case.frozen), target, target.cpu()
    )
    if WORKLOADS[case.workload].reference:
        inputs.reference_hidden = (hidden + 0.1 * normal(*hidden.shape)).to(dtype)
        inputs.reference_weight = (weight + 0.1 * scale * normal(*weight.shape)).to(dtype)
    return inputs
