"""What is measured: heads, workloads, shapes and random inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
DPO_BETA = 0.1
ORPO_BETA = 0.1
SIMPO_BETA, SIMPO_GAMMA = 2.0, 1.0
KTO_BETA = 0.1
GRPO_BETA = 0.04
BETAS = {"jsd": 0.5, "fkl": 0.0}  # of the generalised Jensen-Shannon divergence: the distillation workloads

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Head:
    """Shape of a language-model head, ``weight [vocab, hidden]``."""

    name: str
    hidden: int
    vocab: int


LLAMA, QWEN = Head("llama3-8b", 4096, 128256), Head("qwen2.5-7b", 3584, 152064)
GEMMA = Head("gemma2-2b", 2304, 256000)
# Student and teacher.
QWEN_PAIR = Head("qwen2.5-1.5b", 1536, 151936), Head("qwen2.5-7b", 3584, 151936)
LLAMA_PAIR = Head("llama3.2-1b", 2048, 128256), LLAMA
TINY = Head("tiny", 32, 307)  # an odd vocabulary; for checking the harness itself on a CPU


@dataclass(frozen=True)
class Workload:
    """A scalar loss of per-token log-probabilities.

    ``loss(logprobs [R, T], mask [R, T], reference_logprobs [R, T] or None)``: masked entries of the log-probabilities
    are zero. ``reference`` says whether a second, frozen model is scored too (one more matrix product). ``unit_rows``
    rows make up a unit of the loss: 2 for pairs, 0 where tokens stand alone.
    """

    loss: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None  # None: of two distributions (`distillation`)
    reference: bool = False
    unit_rows: int = 2


def cross_entropy(logprobs: Tensor, mask: Tensor, reference_logprobs: Tensor | None) -> Tensor:
    return -logprobs.sum() / mask.sum()


def dpo(logprobs: Tensor, mask: Tensor, reference_logprobs: Tensor | None) -> Tensor:
    """Mean over pairs of ``-log sigmoid(beta * ((c - c_ref) - (r - r_ref)))``, chosen rows first (arXiv:2305.18290)."""
    assert reference_logprobs is not None
    chosen, rejected = (logprobs - reference_logprobs).sum(-1).chunk(2)
    return -F.logsigmoid(DPO_BETA * (chosen - rejected)).mean()


def _means(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    chosen, rejected = (logprobs.sum(-1) / mask.sum(-1)).chunk(2)
    return chosen, rejected


def orpo(logprobs: Tensor, mask: Tensor, reference_logprobs: Tensor | None) -> Tensor:
    """NLL of the chosen responses less ``beta log sigmoid`` of the log odds ratio of token means (arXiv:2403.07691)."""
    chosen, rejected = _means(logprobs, mask)
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    pairs = len(logprobs) // 2
    return -logprobs[:pairs].sum() / mask[:pairs].sum() - ORPO_BETA * F.logsigmoid(odds).mean()


def simpo(logprobs: Tensor, mask: Tensor, reference_logprobs: Tensor | None) -> Tensor:
    """Mean over pairs of ``-log sigmoid(beta (c - r) - gamma)`` of token means (arXiv:2405.14734)."""
    chosen, rejected = _means(logprobs, mask)
    return -F.logsigmoid(SIMPO_BETA * (chosen - rejected) - SIMPO_GAMMA).mean()


def preferred(rows: int, device: torch.device) -> Tensor:
    """KTO's labels: every second response is desirable."""
    return torch.arange(rows, device=device) % 2 == 0


def kto(logprobs: Tensor, mask: Tensor, reference_logprobs: Tensor | None) -> Tensor:
    """Mean over responses of ``1 - sigmoid(+-beta (logp - logp_ref))``, the KL estimate being 0 (arXiv:2402.01306)."""
    assert reference_logprobs is not None
    reward = KTO_BETA * (logprobs - reference_logprobs).sum(-1)
    return (1 - torch.sigmoid(torch.where(preferred(len(reward), reward.device), reward, -reward))).mean()


def advantages(rows: int, device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, rows, device=device)


def grpo(logprobs: Tensor, mask: Tensor, reference_logprobs: Tensor | None) -> Tensor:
    """On policy: mean over tokens of ``-ratio advantage + beta (e^d - d - 1)``, ``d = logp_ref - logp``."""
    assert reference_logprobs is not None
    ratio, d = torch.exp(logprobs - logprobs.detach()), reference_logprobs - logprobs
    each = -ratio * advantages(len(mask), mask.device).to(d.dtype).unsqueeze(-1) + GRPO_BETA * (d.exp() - d - 1)
    return each.masked_fill(~mask, 0).sum() / mask.sum()


WORKLOADS = {
    "ce": Workload(cross_entropy, unit_rows=0),
    "dpo": Workload(dpo, reference=True),
    "orpo": Workload(orpo),
    "simpo": Workload(simpo),
    "kto": Workload(kto, reference=True, unit_rows=1),
    "grpo": Workload(grpo, reference=True, unit_rows=1),
    **{name: Workload(None, reference=True, unit_rows=0) for name in BETAS},
}


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
    teacher: Head | None = None
    peaked: bool = False  # logits as a trained model's; otherwise all of one size

    @property
    def name(self) -> str:
        unit_rows = WORKLOADS[self.workload].unit_rows
        units = f"{self.rows // unit_rows}x" if unit_rows else ""
        return (
            f"{self.workload}-{units}{self.length}/{self.head.name}{'/frozen' if self.frozen else ''}"
            + "/peaked" * self.peaked
        )

    @property
    def distills(self) -> bool:
        return self.workload in BETAS

    @property
    def scored(self) -> int:
        return self.rows * (self.length - int(self.prompt * self.length))

    @property
    def title(self) -> str:
        shape = f"{self.rows} x {self.length} tokens, {self.scored:,} scored, H {self.head.hidden}, V {self.head.vocab}"
        teacher = f", teacher's H {self.teacher.hidden}" if self.teacher else ""
        return (
            f"{self.name}: {shape}{teacher}, {'frozen' if self.frozen else 'trainable'} head"
            + ", peaked logits" * self.peaked
        )


SHAPES: tuple[tuple[str, Head, int, int, float, str], ...] = (
    ("ce", LLAMA, 1, 8192, 0.0, "quick"),
    ("dpo", LLAMA, 8, 2048, 0.25, "quick"),
    ("dpo", LLAMA, 2, 8192, 0.25, "default"),
    ("dpo", QWEN, 8, 2048, 0.25, "default"),
    ("ce", QWEN, 1, 8192, 0.0, "default"),
    ("ce", GEMMA, 1, 8192, 0.0, "default"),
    *((workload, LLAMA, 8, 2048, 0.25, "default") for workload in ("orpo", "simpo", "kto", "grpo")),
    ("ce", TINY, 1, 96, 0.0, "harness"),
    *((workload, TINY, 4, 24, 0.25, "harness") for workload in WORKLOADS if workload not in ("ce", *BETAS)),
)
DISTILLATIONS: tuple[tuple[str, Head, Head, int, str], ...] = (
    *((workload, *pair, 4096, "default") for pair in (QWEN_PAIR, LLAMA_PAIR) for workload in BETAS),
    *((workload, TINY, Head("tiny-teacher", 48, 307), 96, "harness") for workload in BETAS),
)
_CASES = [
    *(
        Case(workload, head, rows, length, prompt, frozen, suite)
        for workload, head, rows, length, prompt, suite in SHAPES
        for frozen in (False, True)
    ),
    *(
        Case(workload, head, 1, length, 0.0, frozen, suite, teacher)
        for workload, head, teacher, length, suite in DISTILLATIONS
        for frozen in (False, True)
    ),
]
CASES = {case.name: case for case in _CASES}


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


# Of peaked logits: how many candidates a token has, and the largest one's logit.
CANDIDATES, HIGHEST = 16, 20.0


def candidates(case: Case, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For every token: ids of its candidates, common ones more often (Zipf), their logits, and one drawn of them.

    From token to token the candidates' logits fall off at rates of a log-normal distribution, so that some tokens are
    certain and some are not: mean NLL near 1.
    """
    shape = (case.rows, case.length, CANDIDATES)
    ids = (
        (case.head.vocab ** torch.rand(shape, generator=generator, device=device)).long().clamp_(0, case.head.vocab - 1)
    )
    rate = torch.exp(0.7 + torch.randn((*shape[:2], 1), generator=generator, device=device))
    logits = (HIGHEST - rate * torch.arange(CANDIDATES, device=device)).clamp_min_(0)
    drawn = torch.multinomial(torch.softmax(logits, -1).flatten(0, 1), 1, generator=generator).view(*shape[:2], 1)
    return ids, logits, ids.gather(-1, drawn).squeeze(-1)


def pointing(weight: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
    """Hidden states whose logits at `ids` are about `logits`, elsewhere about normal: rows of `weight` have norm 1."""
    return torch.stack([z.unsqueeze(1).bmm(weight[i]).squeeze(1) for z, i in zip(logits, ids, strict=True)])


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Inputs:
    """Random data: ``hidden ~ N(0, 1)``, ``weight ~ N(0, 1 / H)``; a reference is near the policy, a teacher is not.

    With peaked logits a hidden state points at its candidates, and a teacher's at the same ones.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    head, scale = case.head, case.head.hidden**-0.5

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    hidden = normal(case.rows, case.length, head.hidden)
    weight = normal(head.vocab, head.hidden).mul_(scale)
    target = torch.randint(0, head.vocab, (case.rows, case.length), generator=generator, device=device)
    if case.peaked:
        ids, logits, target = candidates(case, generator, device)
        hidden = pointing(weight, ids, logits)
    target[:, : int(case.prompt * case.length)] = IGNORE_INDEX
    inputs = Inputs(
        hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(not case.frozen), target, target.cpu()
    )
    if case.teacher is not None:
        wide = case.teacher.hidden
        of_teacher = normal(case.rows, case.length, wide)
        teacher = normal(case.teacher.vocab, wide).mul_(wide**-0.5)
        if case.peaked:
            of_teacher = pointing(teacher, ids, logits + normal(*logits.shape))
        inputs.reference_hidden, inputs.reference_weight = of_teacher.to(dtype), teacher.to(dtype)
    elif WORKLOADS[case.workload].reference:
        inputs.reference_hidden = (hidden + 0.1 * normal(*hidden.shape)).to(dtype)
        inputs.reference_weight = (weight + 0.1 * scale * normal(*weight.shape)).to(dtype)
    return inputs
