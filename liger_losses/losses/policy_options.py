"""The options of policy-gradient losses, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from .._checks import check_choice, check_flag, check_number, check_size
from .policy_terms import KL_ESTIMATORS, SAMPLER_MODES
from .policy_types import POLICY_TYPES, PolicyType

# Options that some loss types read and others have no place for.
_TYPE_OPTIONS = tuple(dict.fromkeys(name for row in POLICY_TYPES.values() for name in row.reads))
_LEVELS = ("token", "sequence")


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Meanings and formulas are in `GRPOLoss` (`policy.py`), which is made of these."""

    loss_type: str = "dapo"
    beta: float = 0.0
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    importance_sampling_level: str = "token"
    max_completion_length: int | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool = False
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    sampler_mode: str | None = None
    sampler_clip_min: float | None = None
    sampler_clip_max: float | None = 3.0
    vf_coef: float = 0.0
    value_clip: float | None = None
    on_policy: bool = False
    report_entropy: bool = False
    num_processes: int | None = None

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, tuple(POLICY_TYPES))
        check_choice("importance_sampling_level", self.importance_sampling_level, _LEVELS)
        check_choice("kl_estimator", self.kl_estimator, tuple(KL_ESTIMATORS))
        for name in ("use_bias_correction_kl", "on_policy", "report_entropy"):
            check_flag(name, getattr(self, name))
        for name in ("beta", "epsilon_low", "epsilon_high", "vespo_k_pos", "vespo_k_neg", "vf_coef"):
            check_number(name, getattr(self, name), low=0)
        for name in ("sapo_temperature_pos", "sapo_temperature_neg", "vespo_lambda_pos", "vespo_lambda_neg"):
            check_number(name, getattr(self, name), above=0)
        for name in ("delta", "value_clip", "off_policy_mask_threshold", "sampler_clip_max"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        if self.sampler_clip_min is not None:
            check_number("sampler_clip_min", self.sampler_clip_min, low=0)
        check_number("entropy_coef", self.entropy_coef)
        check_number("top_entropy_quantile", self.top_entropy_quantile, low=0, high=1)
        for name in ("max_completion_length", "num_processes"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        self._check_unread()
        self._check_sampler()

    def _check_unread(self) -> None:
        """An option that the loss type has no place for would be ignored."""
        readers = {name: [row.name for row in POLICY_TYPES.values() if name in row.reads] for name in _TYPE_OPTIONS}
        readers["max_completion_length"] = [row.name for row in POLICY_TYPES.values() if row.divisor == "length"]
        readers["vf_coef"] = ["ppo"]
        for name, types in readers.items():
            if self.loss_type not in types and getattr(self, name) != getattr(PolicyOptions, name):
                raise ValueError(
                    f"{name}: got {getattr(self, name)}, expected the default with loss_type {self.loss_type!r}, which "
                    f"does not read it; read by {', '.join(types)}"
                )
        if self.type.divisor == "length" and self.max_completion_length is None:
            raise ValueError(f"max_completion_length: got None, expected a number with loss_type {self.loss_type!r}")
        if self.type.level == "token" and self.importance_sampling_level != "token":
            raise ValueError(
                f"importance_sampling_level: got {self.importance_sampling_level!r}, expected 'token' with loss_type "
                f"{self.loss_type!r}, which has a sequence weight of its own"
            )
        if self.value_clip is not None and self.vf_coef == 0:
            raise ValueError(f"value_clip: got {self.value_clip}, expected None with vf_coef=0")

    def _check_sampler(self) -> None:
        if self.sampler_mode is None:
            for name in ("sampler_clip_min", "sampler_clip_max"):
                if getattr(self, name) != getattr(PolicyOptions, name):
                    raise ValueError(f"{name}: got {getattr(self, name)}, expected the default without sampler_mode")
            return
        check_choice("sampler_mode", self.sampler_mode, SAMPLER_MODES)
        if self.sampler_clip_min is None and self.sampler_clip_max is None:
            raise ValueError("sampler_clip_max: got None, expected a bound, of either side, with sampler_mode")
        if self.loss_type == "vespo" and not self.sampler_mode.startswith("token"):
            raise ValueError(
                f"sampler_mode: got {self.sampler_mode!r}, expected token_truncate or token_mask with loss_type 'vespo'"
            )

    @property
    def type(self) -> PolicyType:
        return POLICY_TYPES[self.loss_type]

    @property
    def level(self) -> str:
        return self.type.level or self.importance_sampling_level
