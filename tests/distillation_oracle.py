"""Distillation from whole logits by the formulas as they are written, in any dtype, differentiated by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.kernels import Divergence

KINDS = (
    Divergence(),
    Divergence(kind="reverse_kl"),
    Divergence(kind="jsd"),
    Divergence(kind="jsd", beta=0.3, temperature=2.0, hard_weight=0.5),
    Divergence(kind="jsd", beta=0.0, temperature=0.7),
    Divergence(kind="jsd", beta=1.0, hard_weight=0.3, soft_weight=0.7),
    Divergence(kind="skewed_forward_kl"),
    Divergence(kind="skewed_reverse_kl", skew=0.3, temperature=1.5, scale_by_squared_temperature=True),
    Divergence(kind="tvd", hard_weight=1.0, soft_weight=2.0),
    Divergence(kind="jeffreys", temperature=2.0, teacher_temperature=1.0),
    Divergence(kind="alpha", alpha=0.7),
    Divergence(kind="alpha", alpha=-0.5),
    Divergence(kind="cosine", hard_weight=0.5),
    Divergence(kind="mse"),
    Divergence(soft_weight=0.0, hard_weight=1.0),
    Divergence(kind="akl"),
    Divergence(kind="akl", mu=0.8, temperature=2.0, hard_weight=0.5),
)
NAMES = ("distillation", "divergence", "logprob", "entropy", "teacher_entropy")


def label_of(options: Divergence) -> str:
    """A short name for a test's parameter."""
    own = {"jsd": options.beta, "alpha": options.alpha, "akl": options.mu}.get(options.kind, "")
    return f"{options.kind}{own}-t{options.temperature}-h{options.hard_weight}"


def kl(a: Tensor, b: Tensor) -> Tensor:
    """Of log-probabilities: `0 log 0` is 0."""
    ratio = torch.where(a == -torch.inf, 0, a - b)
    return torch.where(a == -torch.inf, 0, a.exp() * ratio).sum(-1)


def head_share_of(s: Tensor, t: Tensor, mass: float) -> Tensor:
    """Of the gap, what lies on the teacher's most probable tokens that reach `mass`, by sorting them."""
    order = t.sort(-1, descending=True)
    needed = order.values.cumsum(-1) - order.values < mass
    least = order.values.masked_fill(~needed, torch.inf).amin(-1, keepdim=True)
    gap = (s - t).abs()
    total = gap.sum(-1)
    return torch.where(total > 0, (gap * (t >= least)).sum(-1) / total, 0.5)


def divergence_of(student: Tensor, teacher: Tensor, options: Divergence) -> Tensor:
    """Of tempered logits `[*, V]` of the same columns."""
    if options.kind == "cosine":
        return 1 - F.cosine_similarity(student, teacher, dim=-1)
    if options.kind == "mse":
        return (student - teacher).square().mean(-1)
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)

    def mixed(weight: float) -> Tensor:
        return ((1 - weight) * s.exp() + weight * t.exp()).log()

    if options.kind == "forward_kl":
        return kl(t, s)
    if options.kind == "reverse_kl":
        return kl(s, t)
    if options.kind == "jsd":
        if options.beta in (0, 1):
            return kl(s, t) if options.beta else kl(t, s)
        m = mixed(options.beta)
        return options.beta * kl(t, m) + (1 - options.beta) * kl(s, m)
    if options.kind == "skewed_forward_kl":
        return kl(t, mixed(options.skew))
    if options.kind == "skewed_reverse_kl":
        return kl(s, mixed(1 - options.skew))
    if options.kind == "tvd":
        return (s.exp() - t.exp()).abs().sum(-1) / 2
    if options.kind == "jeffreys":
        return kl(s, t) + kl(t, s)
    if options.kind == "akl":
        share = head_share_of(s.detach().exp(), t.exp(), options.mu)
        return share * kl(t, s) + (1 - share) * kl(s, t)
    a = options.alpha
    return (1 - (a * t + (1 - a) * s).exp().sum(-1)) / (a * (1 - a))


def unfused_distillation(
    student: Tensor,  # [N, V_s] logits
    teacher: Tensor,  # [N, V_t] logits
    target: Tensor,  # [N], all of them scored
    options: Divergence,
) -> dict[str, Tensor]:
    """Every number of `NAMES`, `[N]`."""
    inverse_student, inverse_teacher = options.inverse_temperatures
    s, t = student * inverse_student, teacher * inverse_teacher
    if options.vocabulary == "shared":
        both = min(s.shape[-1], t.shape[-1])
        s, t = s[..., :both], t[..., :both]
    else:
        width = max(s.shape[-1], t.shape[-1])
        s, t = (F.pad(z, (0, width - z.shape[-1]), value=-torch.inf) for z in (s, t))
    found = {"divergence": divergence_of(s, t, options)}
    found["logprob"] = student.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    for name, z in (("entropy", s), ("teacher_entropy", t)):
        found[name] = -kl(z.log_softmax(-1), torch.zeros_like(z))
    soft = options.weight * found["divergence"] if options.weight else 0
    found["distillation"] = soft - options.hard_weight * found["logprob"]
    return found
