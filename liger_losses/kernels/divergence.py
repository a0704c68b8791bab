"""Which divergence between two models' next-token distributions, and how it and the hard label enter one number."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass

from .._checks import check_choice, check_flag, check_fp32_range, check_number, check_temperature, check_weights

KINDS = (
    "forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "tvd", "jeffreys", "alpha", "akl",
    "cosine", "mse",
)  # fmt: skip
DISTILLATION = ("distillation", "divergence", "logprob", "entropy", "teacher_entropy")
VOCABULARY = ("shared", "padded")

# Read by one family of kinds only: elsewhere another value than the default would be ignored, and is refused.
_OWN = {"beta": ("jsd",), "skew": ("skewed_forward_kl", "skewed_reverse_kl"), "alpha": ("alpha",), "mu": ("akl",)}


def check_of_logits(
    kind: str, vocabulary: str, temperature: float, teacher_temperature: float | None, squared: bool
) -> None:
    """Raise for options without a meaning where logits themselves are compared."""
    if kind in ("cosine", "mse") and vocabulary == "padded":
        raise ValueError(f"vocabulary: got 'padded' with kind {kind!r}, expected 'shared': a logit that is absent has "
                         "no number")  # fmt: skip
    if kind != "cosine":
        return
    if temperature != 1:
        raise ValueError(f"temperature: got {temperature} with kind 'cosine', which has none; expected 1")
    if teacher_temperature is not None:
        raise ValueError(f"teacher_temperature: got {teacher_temperature} with kind 'cosine', which has none")
    if squared:
        raise ValueError("scale_by_squared_temperature: got True with kind 'cosine', which has no temperature")


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Per token, `distillation = soft_weight * c * D + hard_weight * (-log p_hard[label])`.

    `D` compares `s = softmax(z_student / temperature)` and `t = softmax(z_teacher / temperature)`, `KL(a || b) =
    sum_v a_v log(a_v / b_v)`, natural logarithms:

    | kind | D |
    |---|---|
    | `forward_kl` | `KL(t || s)` |
    | `reverse_kl` | `KL(s || t)` |
    | `jsd` | `beta KL(t || m) + (1 - beta) KL(s || m)`, `m = (1 - beta) s + beta t` |
    | `skewed_forward_kl` | `KL(t || skew t + (1 - skew) s)`: DistiLLM's SKL, arXiv:2402.03898 |
    | `skewed_reverse_kl` | `KL(s || (1 - skew) t + skew s)`: its SRKL |
    | `tvd` | `sum_v |s_v - t_v| / 2`, total variation |
    | `jeffreys` | `KL(t || s) + KL(s || t)` |
    | `alpha` | `(1 - sum_v t_v^alpha s_v^(1 - alpha)) / (alpha (1 - alpha))`: Amari's, forward KL as alpha goes to 1 |
    | `akl` | `w KL(t || s) + (1 - w) KL(s || t)`, adaptive KL, arXiv:2404.02657; `w` below |
    | `cosine` | `1 - cos(z_student, z_teacher)` of the logits themselves, finite ones; no temperature |
    | `mse` | `sum_v (z_student / temperature - z_teacher / teacher_temperature)_v^2 / V`, of finite logits |

    Of `akl`, `w = sum_head |s_v - t_v| / sum_v |s_v - t_v|`, a constant of each token (1/2 where the two are equal).
    The head is the fewest most probable tokens of `t` whose mass reaches `mu`; tokens as probable as the last of them
    all belong to it. Its tiles are visited by torch operations on every device, some thirty times to find the head: the
    products are those of the other kinds, the visits are slower than theirs, and take 0.3 GiB on an accelerator.

    The cosine of logits that are all 0 is 0, or 1 with their like, and has no gradient.

    A probability of 0 (a logit of -inf) is exact: `0 log 0 = 0`, and a KL of something against nothing is +inf. A token
    whose divergence is infinite through the teacher's zeros (reverse KL, Jeffreys, AKL) sends no gradient back.

    `p_hard` is the softmax of the student's logits over its whole vocabulary, **without** `temperature`: the
    temperature is the divergence's alone. `c = 1`, or `temperature^2` with `scale_by_squared_temperature`, which keeps
    the gradient's size as the temperature grows (Hinton et al., arXiv:1503.02531); TRL and liger-kernel use `c = 1`.

    Args:
        kind: see above. beta: of `jsd`, the weight of the teacher, in [0, 1]. As `beta` goes to 0 or 1 the formula goes
            to 0; the endpoints themselves are, as in TRL and liger-kernel, 0: forward KL, 1: reverse KL.
        skew: in [0, 1); 0 is the plain KL. alpha: any finite number but 0 and 1. mu: of `akl`, in [0, 1]; 0 is reverse
            KL, 1 forward KL.
        temperature: > 0, and finite in fp32 like its inverse (and its square where that scales); refused with `cosine`,
            which it cannot change. teacher_temperature: of the teacher alone; None: as `temperature`.
        soft_weight, hard_weight: >= 0, one of them > 0.
        vocabulary: for two vocabularies that agree on their first columns and differ in length: `"shared"` restricts
            both softmaxes of `D` to the columns that both have, at least 2; `"padded"` gives the shorter side
            probability 0 on the rest (so that forward KL is +inf where the teacher has more columns). Not with `cosine`
            and `mse`: a logit that is absent has no number.
    """

    kind: str = "forward_kl"
    beta: float = 0.5
    skew: float = 0.1
    alpha: float = 0.5
    mu: float = 0.5
    temperature: float = 1.0
    teacher_temperature: float | None = None
    scale_by_squared_temperature: bool = False
    soft_weight: float = 1.0
    hard_weight: float = 0.0
    vocabulary: str = "shared"

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_choice("vocabulary", self.vocabulary, VOCABULARY)
        check_temperature("temperature", self.temperature)
        if self.teacher_temperature is not None:
            check_temperature("teacher_temperature", self.teacher_temperature)
        check_weights(soft_weight=self.soft_weight, hard_weight=self.hard_weight)
        check_flag("scale_by_squared_temperature", self.scale_by_squared_temperature)
        if self.scale_by_squared_temperature:
            check_fp32_range("temperature, squared", self.temperature**2)
        check_of_logits(
            self.kind, self.vocabulary, self.temperature, self.teacher_temperature, self.scale_by_squared_temperature
        )
        for name in ("beta", "mu", "skew"):
            check_number(name, getattr(self, name), low=0, high=1)
        if self.skew == 1:
            raise ValueError(f"skew: got {self.skew}, expected 0 <= skew < 1: the divergence is 0 whatever the student")
        check_number("alpha", self.alpha)
        if self.alpha in (0, 1):
            raise ValueError(
                f"alpha: got {self.alpha}, whose limit is {('reverse_kl', 'forward_kl')[int(self.alpha)]}; expected "
                "another number, or that kind"
            )
        for name, kinds in _OWN.items():
            default = type(self).__dataclass_fields__[name].default
            if self.kind not in kinds and getattr(self, name) != default:
                raise ValueError(f"{name}: got {getattr(self, name)} with kind {self.kind!r}, which does not read it")

    @property
    def form(self) -> str:
        """The kind whose formula is evaluated: the endpoints of `beta`, `skew` and `mu` are other kinds."""
        if self.kind == "jsd" and self.beta in (0, 1):
            return "reverse_kl" if self.beta else "forward_kl"
        if self.kind == "akl" and self.mu in (0, 1):
            return "forward_kl" if self.mu else "reverse_kl"
        return self.kind.removeprefix("skewed_") if self.skew == 0 else self.kind

    @property
    def parameter(self) -> float:
        """The one number that the form reads."""
        return {"jsd": self.beta, "alpha": self.alpha, "akl": self.mu}.get(self.kind, self.skew)

    @property
    def inverse_temperatures(self) -> tuple[float, float]:
        """Of student and teacher."""
        teacher = self.temperature if self.teacher_temperature is None else self.teacher_temperature
        return 1 / self.temperature, 1 / teacher

    @property
    def weight(self) -> float:
        """Of `D` in the distillation."""
        return self.soft_weight * (self.temperature**2 if self.scale_by_squared_temperature else 1.0)

    def encode(self) -> str:
        """As a string, for operators, which take no objects. Plain enough for torch.compile to trace."""
        numbers = (
            self.beta, self.skew, self.alpha, self.mu, self.temperature, self.teacher_temperature,
            self.scale_by_squared_temperature, self.soft_weight, self.hard_weight,
        )  # fmt: skip
        return ",".join([self.kind, *map(str, numbers), self.vocabulary])

    @classmethod
    @functools.lru_cache(maxsize=64)  # each call asks twice
    def decode(cls, text: str) -> Divergence:
        kind, *numbers, vocabulary = text.split(",")
        names = list(cls.__dataclass_fields__)[1:-1]
        values = dict(zip(names, map(ast.literal_eval, numbers), strict=True))
        return cls(kind=kind, vocabulary=vocabulary, **values)
