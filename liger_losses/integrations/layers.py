"""The layer kernels inside a live transformers model: `fuse_layers(model)`, undone by `unfuse_layers(model)`.

No list of models is kept. Each norm, gated MLP and rotary function is recognised by what it computes (`_layer_probes`,
`_rotary_probe`); what is not recognised is left alone and reported. Replaced is `forward` of single instances: classes
and modules of transformers stay as they are, and so do parameters, state dicts, hooks, saving and generation.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_losses.integrations._layer_evidence import DIMENSIONS
from liger_losses.integrations._layer_probes import (
    MLP,
    Norm,
    Refusal,
    own_forward,
    recognise_mlp,
    recognise_norm,
    replaced_already,
)
from liger_losses.integrations._rotary_probe import Rotary, recognise_rotary

_MARK = "_liger_layer"
_SHADOW = "_liger_shadow_"


@dataclass
class LayerReport:
    """What `fuse_layers` did. `print(report)` is meant for people.

    Attributes:
        replaced: How many of which layer now run on kernels: `(class, what it computes) -> count`.
        refused: What looked like such a layer and was left alone: `(class, why) -> count`.
        already: How many an earlier call had replaced. (An attention layer counts once for each rotary function.)
    """

    model: str
    replaced: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    already: int = 0

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.replaced.total()} layers on kernels, {self.refused.total()} left alone"]
        if self.already:
            lines[0] += f", {self.already} on kernels already"
        lines += [f"  {count:4d} x {name}: {what}" for (name, what), count in self.replaced.items()]
        lines += [f"  {count:4d} x {name} left alone: {why}" for (name, why), count in self.refused.items()]
        return "\n".join(lines)


def fuse_layers(
    model: nn.Module,  # transformers.PreTrainedModel, or anything around one
    *,
    norm: bool = True,
    mlp: bool = True,
    rotary: bool = True,
) -> LayerReport:
    """Run the norms, gated MLPs and rotary embeddings of `model` on this library's kernels, wherever they are the same.

    Call it on a model that is built, with or without adapters, before it is wrapped (DDP, FSDP) or trained. A
    layer counts as the same when its class's forward, run on a copy of the instance with random parameters, gives what
    the kernel's convention gives: RMSNorms in 16 bits to the bit, MLPs in fp64, LayerNorms and rotations to rounding;
    at weights and inputs from 1e-6 to 1e5, with NaN and inf, at lengths of 1 to 600, in training and in evaluation;
    with the same gradients of the input and of every parameter; and if it runs analytic operations alone (no clamp, no
    comparison, no dropout, no look at a value), whose agreement there is agreement everywhere. docs/layers.md says
    what that does not show. 16-bit MLPs and rotations then differ from the model's own by rounding, the kernels
    rounding once where torch rounds after each step. A second call changes nothing.

    Args:
        model: Its instances' `forward` are replaced; `unfuse_layers` puts them back.
        norm: Replace RMSNorms and LayerNorms.
        mlp: Replace gated MLPs (silu, gelu, tanh gelu, squared relu).
        rotary: Replace the rotary function that attention layers call.

    Returns:
        Counts of what was replaced, and of what was left alone and why.

    Raises:
        TypeError: `model` is no `torch.nn.Module`, or an option is no bool.
    """
    _check_module(model)
    for option, value in (("norm", norm), ("mlp", mlp), ("rotary", rotary)):
        if not isinstance(value, bool):
            raise TypeError(f"{option}: got {value!r}, expected True or False")
    report = LayerReport(type(model).__name__)
    known: dict[Any, Norm | MLP | Refusal] = {}
    rotations: dict[Callable[..., Any], Rotary | Refusal] = {}
    for module in model.modules():
        if count := _fused(module):
            report.already += count
            continue
        # A name decides only whether a refusal is worth a line.
        name = type(module).__name__.lower()
        called_norm = "norm" in name and not vars(module)["_modules"]
        called_mlp = name.endswith(("mlp", "experts"))
        if norm and (_may_be_norm(module) or called_norm):
            _replace(module, recognise_norm, _norm_forward, known, report, called_norm)
        elif mlp and (_may_be_mlp(module) or called_mlp):
            _replace(module, recognise_mlp, _mlp_forward, known, report, called_mlp)
        if rotary:
            _replace_rotary(module, rotations, report)
    return report


def unfuse_layers(model: nn.Module) -> int:
    """Put back the forwards that `fuse_layers` replaced; returns of how many layers, counted as `fuse_layers` does.

    Raises:
        TypeError: `model` is no `torch.nn.Module`.
    """
    _check_module(model)
    counts = [(module, count) for module in model.modules() if (count := _fused(module))]
    for module, _ in counts:
        del vars(module)["forward"]
    return sum(count for _, count in counts)


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")


def _fused(module: nn.Module) -> int:
    """Of how many layers `fuse_layers` has replaced the forward: two where attention calls two rotary functions."""
    return getattr(getattr(vars(module).get("forward"), "__func__", None), _MARK, 0)


def _may_be_norm(module: nn.Module) -> bool:
    small = any(isinstance(value, float) and 0 < value < 1e-2 for value in vars(module).values())
    return small and not vars(module)["_modules"]


def _may_be_mlp(module: nn.Module) -> bool:
    return 2 <= sum(hasattr(c, "in_features") and hasattr(c, "out_features") for c in module.children()) <= 3


def _replace(
    module: nn.Module,
    recognise: Callable[[nn.Module], Any],
    make: Callable[[Any, Callable[..., Any], Unchanged], Callable[..., Any]],
    known: dict[Any, Any],
    report: LayerReport,
    worth_a_line: bool,
) -> None:
    name, key = type(module).__name__, _identity(module)
    if key not in known:
        try:
            known[key] = recognise(module)
        except Refusal as refusal:
            known[key] = refusal
    found = known[key]
    if not isinstance(found, Refusal):
        _install(module, make(found, own_forward(module), Unchanged(module, found)))
        report.replaced[name, str(found)] += 1
    elif worth_a_line:
        report.refused[name, str(found)] += 1


def _identity(module: nn.Module) -> Any:
    """Equal for instances that a probe cannot tell apart: all layers of a model are probed once."""
    facts = [
        (name, value if isinstance(value, _SCALARS) else id(value))
        for name, value in vars(module).items()
        if name not in _INTERNAL
    ]
    hooks = tuple(len(vars(module)[name]) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))
    parameters = [(name, tuple(p.shape), p.dtype) for name, p in vars(module)["_parameters"].items() if p is not None]
    buffers = [(name, id(b)) for name, b in vars(module)["_buffers"].items()]
    children = [(name, _identity(child)) for name, child in module.named_children()]
    return type(module), repr(facts), hooks, tuple(parameters), tuple(buffers), tuple(children)


_SCALARS = (int, float, str, bool, type(None), tuple, torch.dtype, types.FunctionType, types.BuiltinFunctionType)
_INTERNAL = frozenset(vars(nn.Module()))  # among them the mode: both are tried


class Unchanged:
    """Whether what a module was tried with is what it has: scalars and functions, and those of its activation."""

    def __init__(self, module: nn.Module, layer: Norm | MLP) -> None:
        follows = layer.eps_name if isinstance(layer, Norm) else None
        self.own = self._facts(module, follows)
        roles = layer.children if isinstance(layer, MLP) else ()
        self.others = [
            (name, type(child), self._facts(child)) for name, child in module.named_children() if name not in roles
        ]

    @staticmethod
    def _facts(module: nn.Module, but: str | None = None) -> list[tuple[str, Any]]:
        return [
            (name, value)
            for name, value in vars(module).items()
            if name not in _INTERNAL and name != but and isinstance(value, _SCALARS)
        ]

    def __call__(self, module: nn.Module) -> bool:
        if any(getattr(module, name, None) != value for name, value in self.own):
            return False
        for name, kind, facts in self.others:
            child = getattr(module, name, None)
            if type(child) is not kind or any(getattr(child, n, None) != value for n, value in facts):
                return False
        return True


def _install(module: nn.Module, forward: Callable[..., Any], count: int = 1) -> None:
    # A bound method, which a deep copy of the model binds to the copy.
    setattr(forward, _MARK, count)
    vars(module)["forward"] = types.MethodType(forward, module)


def _input_name(original: Callable[..., Any]) -> str:
    return list(inspect.signature(original).parameters)[1]


def _norm_forward(norm: Norm, original: Callable[..., Any], unchanged: Unchanged) -> Callable[..., Any]:
    name = _input_name(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get(name)
        if len(args) + len(kwargs) != 1 or not isinstance(x, Tensor) or x.dim() not in DIMENSIONS or _is_foreign(x):
            return original(self, *args, **kwargs)
        weight, bias, eps = getattr(self, "weight", None), getattr(self, "bias", None), getattr(self, norm.eps_name)
        if isinstance(weight, DTensor) or not isinstance(eps, float) or not unchanged(self):
            return original(self, *args, **kwargs)
        if norm.kind == "layer" and torch.is_autocast_enabled(x.device.type):
            return original(self, *args, **kwargs)  # whose torch operator autocast widens, on some devices
        return norm(x, weight, bias, eps)

    return forward


def _mlp_forward(mlp: MLP, original: Callable[..., Any], unchanged: Unchanged) -> Callable[..., Any]:
    name = _input_name(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get(name)
        if len(args) + len(kwargs) != 1 or not isinstance(x, Tensor) or isinstance(x, DTensor):
            return original(self, *args, **kwargs)
        if x.dim() not in DIMENSIONS or not unchanged(self):
            return original(self, *args, **kwargs)
        return mlp(self._modules, x)

    return forward


def _is_foreign(x: Tensor) -> bool:
    # transformers' norms compute in fp32 whatever comes, ours keep fp64.
    return x.dtype == torch.float64 or isinstance(x, DTensor)


def _replace_rotary(
    module: nn.Module, rotations: dict[Callable[..., Any], Rotary | Refusal], report: LayerReport
) -> None:
    forward = getattr(type(module), "forward", None)
    if not isinstance(forward, types.FunctionType):
        return
    inner = inspect.unwrap(forward)
    name = type(module).__name__
    named = [n for n in getattr(getattr(inner, "__code__", None), "co_names", ()) if "apply_" in n and "rot" in n]
    functions = {n: f for n in named if callable(f := inner.__globals__.get(n))}
    if not functions:
        return
    if replaced_already(module):
        report.refused[name, "its forward, which calls a rotary function, is replaced already"] += 1
        return
    for function in functions.values():
        if function not in rotations:
            try:
                rotations[function] = recognise_rotary(function)
            except Refusal as refusal:
                rotations[function] = refusal
    fused = {n: r for n, f in functions.items() if isinstance(r := rotations[f], Rotary)}
    outcomes: dict[str, Rotary | Refusal] = {n: rotations[f] for n, f in functions.items()}
    if fused:
        try:
            changed = {n: _rotary_function(r, functions[n]) for n, r in fused.items()}
            _install(module, _with_globals(forward, changed), len(changed))
        except Refusal as refusal:
            outcomes |= dict.fromkeys(fused, refusal)
    for n, found in outcomes.items():
        (report.refused if isinstance(found, Refusal) else report.replaced)[f"{name}.{n}", str(found)] += 1


def _rotary_function(rotary: Rotary, original: Callable[..., Any]) -> Callable[..., Any]:
    count = 3 if rotary.single else 4

    @functools.wraps(original)
    def apply(*args: Any, **options: Any) -> Any:
        dim = options.get("unsqueeze_dim", 1)
        if len(args) != count or not options.keys() <= {"unsqueeze_dim"} or dim not in (1, 2):
            return original(*args, **options)
        *heads, cos, sin = args
        q, k = heads[0], None if rotary.single else heads[1]
        # Only what was tried: tables of the same dtype, by batch row and position.
        width = cos.shape[-1] * (2 if rotary.table == "narrow" else 1)
        fits = width == q.shape[-1] or (rotary.partial and width < q.shape[-1] and width % 2 == 0)
        tried = q.dim() == 4 and cos.dim() == 3 and cos.dtype == q.dtype and not cos.requires_grad and fits
        if not tried or isinstance(q, DTensor) or any(t.dtype != q.dtype or t.shape[-1] != q.shape[-1] for t in heads):
            return original(*args, **options)
        return rotary(q, k, cos, sin, dim)

    return apply


def _with_globals(forward: types.FunctionType, changed: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """`forward`, and what decorators put around it, as if names in its module were bound to other functions.

    The names are bound in a copy of that module, so that other models notice nothing. torch.compile looks globals up by
    the name of their module, hence the entry in `sys.modules`.
    """
    wrapped = getattr(forward, "__wrapped__", None)
    if wrapped is not None:
        inner, cells = _with_globals(wrapped, changed), forward.__closure__ or ()
        rebound = tuple(types.CellType(inner) if cell.cell_contents is wrapped else cell for cell in cells)
        if all(new is old for new, old in zip(rebound, cells, strict=True)):
            raise Refusal("a decorator hides the forward that calls it")
        outer = types.FunctionType(
            forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, rebound
        )
        outer.__kwdefaults__ = forward.__kwdefaults__
        return functools.wraps(inner)(outer)
    module = forward.__globals__["__name__"]
    home = f"{__name__}.{_SHADOW}{module.replace('.', '_')}_{'_'.join(sorted(changed))}"
    shadow = sys.modules.get(home)
    if shadow is None:
        shadow = types.ModuleType(home, f"{module} with fused rotary functions.")
        vars(shadow).update({n: v for n, v in forward.__globals__.items() if n not in ("__name__", "__spec__")})
        vars(shadow).update(changed)
        sys.modules[home] = shadow
    copy = types.FunctionType(
        forward.__code__, vars(shadow), forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return functools.wraps(forward)(copy)
