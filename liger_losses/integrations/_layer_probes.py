"""What a module computes, found out by running it on small random inputs. Names and classes decide nothing.

A probe runs the class's forward on a shallow copy of the instance, with its own scalars and flags and with random
parameters (or, for an MLP, small random projections) in place of the trained ones: trained weights may be zero or one
and tell conventions apart no more. The instance itself is never written to. The convention that fits then has to stand
the trials of `_layer_evidence`.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.integrations._layer_evidence import AUTOCAST, difference, generator, laboratory, near
from liger_losses.kernels import (
    ACTIVATIONS,
    gated_activation,
    layer_norm,
    packed_gated_activation,
    rms_norm,
)

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Refusal(Exception):
    """Why a module is left alone."""


@dataclass(frozen=True)
class Norm:
    kind: str  # "rms" or "layer"
    eps_name: str  # the attribute that holds it
    eps: float
    offset: float
    casting_mode: str  # of an RMSNorm

    def __str__(self) -> str:
        offset = "1 + w" if self.offset else "w"
        return f"RMSNorm ({offset}, {self.casting_mode})" if self.kind == "rms" else f"LayerNorm ({offset})"

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None = None) -> Tensor:
        eps, offset = self.eps if eps is None else eps, 0.0 if weight is None else self.offset
        if self.kind == "rms":
            return rms_norm(x, weight, eps=eps, offset=offset, casting_mode=self.casting_mode)
        return layer_norm(x, weight, bias, eps=eps, offset=offset)


@dataclass(frozen=True)
class MLP:
    """Names of the children: `(gate, up, down)`, or `(gate_up, down)` with the gate in the first half."""

    children: tuple[str, ...]
    activation: str

    def __str__(self) -> str:
        packed = "packed " if len(self.children) == 2 else ""
        return f"{packed}gated MLP ({self.activation})"

    def __call__(self, children: dict[str, Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
        *first, down = (children[name] for name in self.children)
        if len(first) == 1:
            return down(packed_gated_activation(first[0](x), self.activation))
        return down(gated_activation(first[0](x), first[1](x), self.activation))


def replaced_already(module: nn.Module) -> bool:
    """By another forward than the class's, which is what pickle makes of a bound method on an instance."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The class's forward, of exactly one tensor, not yet replaced on the instance."""
    if replaced_already(module):
        raise Refusal("its forward is replaced already")
    forward: Callable[..., Any] = type(module).forward
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if len(parameters) != 1 or parameters[0].kind in (parameters[0].VAR_POSITIONAL, parameters[0].VAR_KEYWORD):
        raise Refusal("its forward takes more than the hidden states")
    return forward


def _clone(module: nn.Module) -> nn.Module:
    """In evaluation, whatever the mode of the module is."""
    clone = copy.copy(module)
    clone.training = False
    for name in ("_parameters", "_modules"):
        vars(clone)[name] = dict(vars(module)[name])
    # Which a forward may write to.
    vars(clone)["_buffers"] = {n: None if b is None else b.clone() for n, b in vars(module)["_buffers"].items()}
    return clone


def _scaled_rows(width: int, dtype: torch.dtype) -> Tensor:
    """Rows from so small that eps outweighs them to large, each with a mean of its own."""
    source = generator()
    sizes = torch.tensor([1e-4, 1e-3, 1e-2, 1.0, 30.0], device="cpu").view(-1, 1, 1)
    count = max(3, 512 // width)  # enough entries for a share of them to mean something
    rows = torch.randn(5, count, width, generator=source, device="cpu") + torch.randn(
        5, count, 1, generator=source, device="cpu"
    )
    return (sizes * rows).to(dtype)


def recognise_norm(module: nn.Module) -> Norm:
    """The convention whose results are the module's: with 16-bit RMSNorms to the bit, else to rounding.

    Raises:
        Refusal: There is none.
    """
    forward = own_forward(module)
    parameters = {name: p for name, p in module.named_parameters(recurse=False)}
    if not set(parameters) <= {"weight", "bias"}:
        raise Refusal(f"parameters {sorted(parameters)} are not those of a norm")
    weight, bias = parameters.get("weight"), parameters.get("bias")
    for parameter in parameters.values():
        if parameter.dim() != 1:
            raise Refusal(f"a parameter of shape {tuple(parameter.shape)}")
        if parameter.dtype not in PLAIN_DTYPES:
            raise Refusal(f"a parameter of {parameter.dtype}")
    if any(True for _ in module.buffers(recurse=False)):
        raise Refusal("has buffers")
    shape = getattr(module, "normalized_shape", None)
    width = weight.shape[0] if weight is not None else shape[-1] if isinstance(shape, tuple) else 16
    named = [(name, value) for name, value in vars(module).items() if isinstance(value, float) and 0 < value < 1e-2]
    if not named and "eps" in vars(module) and module.eps is None:
        raise Refusal("its eps is None: another number for every dtype")
    own = weight.dtype if weight is not None else torch.float32
    reason = "computes none of the known norms"
    with laboratory():
        for eps_name, eps in named:
            for norm in _norms(eps_name, eps, weight is not None, bias is not None):
                fits = {d: _same_norm(module, forward, norm, width, *d) for d in _norm_dtypes(own)}
                if all(fits.values()):
                    found = _norm_difference(module, forward, norm, width)
                    if found is None:
                        return norm
                    reason = f"{found}, unlike {norm}"
                elif norm.kind == "rms" and fits[torch.bfloat16, torch.bfloat16] and reason.startswith("computes"):
                    x, kept = (str(dtype).removeprefix("torch.") for dtype in next(d for d in fits if not fits[d]))
                    reason = f"computes {norm} in bfloat16 and not for {x} inputs with {kept} weights"
                elif reason.startswith("computes none") and _same_norm(module, forward, norm, width, *_WIDE):
                    kind = str(norm).replace(f", {norm.casting_mode}", "")
                    reason = (
                        f"computes {kind} in float32 alone: in bfloat16 it rounds where known norms compute in float32"
                    )
    raise Refusal(reason)


def _norm_difference(module: nn.Module, forward: Callable[..., Any], norm: Norm, width: int) -> str | None:
    other = _clone(module)
    setattr(other, norm.eps_name, 0.01)
    x = 0.1 * torch.randn(2, 3, width, generator=generator(), device="cpu")

    def with_parameters(clone: nn.Module, scale: float) -> nn.Module:
        source = generator()
        for name, parameter in vars(clone)["_parameters"].items():
            if parameter is not None:
                vars(clone)["_parameters"][name] = nn.Parameter(
                    scale * torch.randn(width, generator=source, device="cpu")
                )
        return clone

    def found(clone: nn.Module, x: Tensor) -> Tensor:
        return norm(x, getattr(clone, "weight", None), getattr(clone, "bias", None), getattr(clone, norm.eps_name))

    other = with_parameters(other, 1.0)
    if not near(found(other, x), forward(other, x), 2e-5):
        return f"takes its eps from elsewhere than {norm.eps_name}"
    return difference(
        forward,
        found,
        lambda scale: with_parameters(_clone(module), scale),
        lambda *shape: torch.randn(*shape, width, generator=generator(), device="cpu"),
        2e-5,
        # Under autocast a LayerNorm's own forward is called.
        answered=AUTOCAST if norm.kind == "layer" else frozenset(),
    )


def _norms(eps_name: str, eps: float, weighted: bool, biased: bool) -> Iterator[Norm]:
    for offset in (0.0, 1.0) if weighted else (0.0,):
        if not biased:
            yield from (Norm("rms", eps_name, eps, offset, mode) for mode in ("llama", "gemma", "none"))
        yield Norm("layer", eps_name, eps, offset, "")


_WIDE = torch.float32, torch.float32


def _norm_dtypes(own: torch.dtype) -> list[tuple[torch.dtype, torch.dtype]]:
    # Hidden states and weight. Only where these differ, or round, do the conventions part.
    return list(dict.fromkeys([(torch.bfloat16, torch.bfloat16), (own, own), (torch.bfloat16, torch.float32)]))


def _same_norm(
    module: nn.Module, forward: Callable[..., Any], norm: Norm, width: int, dtype: torch.dtype, kept: torch.dtype
) -> bool:
    clone, source = _clone(module), generator()
    x = _scaled_rows(width, dtype)
    for name, parameter in vars(clone)["_parameters"].items():
        if parameter is not None:
            value = torch.randn(width, generator=source, device="cpu").to(kept)
            vars(clone)["_parameters"][name] = nn.Parameter(value, requires_grad=False)
    weight, bias = (vars(clone)["_parameters"].get(name) for name in ("weight", "bias"))
    try:
        seen = forward(clone, x)
    except Exception:
        # torch's LayerNorm takes no weight of another dtype; a mixture is then nothing that can differ.
        return norm.kind == "layer" and dtype != kept
    found = norm(x, weight, bias)
    if not isinstance(seen, Tensor) or seen.shape != found.shape or seen.dtype != found.dtype:
        return False
    if norm.kind == "rms":
        return _same_roundings(found, seen, dtype)
    return _as_close(found, seen, norm(x.double(), _double(weight), _double(bias)))


def _same_roundings(found: Tensor, seen: Tensor, dtype: torch.dtype) -> bool:
    """Equal to the bit in 16 bits and to a few in fp32, but for the few entries where another way to the square root
    tips a rounding to `dtype`. Conventions that round elsewhere part in a tenth of the entries and more."""
    distance = (found.double() - seen.double()).abs()
    allowed = 0.0 if seen.dtype != torch.float32 else 8 * torch.finfo(torch.float32).eps * found.double().abs()
    tipped = distance > allowed
    one_rounding = 2 * torch.finfo(dtype).eps * found.double().abs()
    return bool(tipped.float().mean() <= 0.01) and bool((distance <= allowed + one_rounding).all())


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


def _as_close(found: Tensor, seen: Tensor, exact: Tensor) -> bool:
    """Whether `found` is as near to the truth as `seen` is, and both are near: twice its error and one rounding."""
    size = exact.abs().amax(-1, keepdim=True)
    # fp32 shows how a mean was summed, 16 bits do not.
    rounding = (16 if seen.dtype == torch.float32 else 2) * torch.finfo(seen.dtype).eps * size
    error, other = (found.double() - exact).abs(), (seen.double() - exact).abs()
    return bool((error <= 2 * other.amax(-1, keepdim=True) + rounding).all() and (other <= 8 * rounding).all())


class _Projection(nn.Linear):
    """A projection that is not linear: a forward that took the weight instead of calling the module would show."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * torch.sin(x).sum(-1, keepdim=True)


def _projections(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Children that project: linear layers, quantised or with an adapter too, by name, with their sizes."""
    found = {}
    for name, child in module.named_children():
        sizes = getattr(child, "in_features", None), getattr(child, "out_features", None)
        if all(isinstance(size, int) for size in sizes):
            found[name] = sizes
    return found  # type: ignore[return-value]


def recognise_mlp(module: nn.Module) -> MLP:
    """The roles of the children and the activation with which a gated MLP gives the module's results, in fp64.

    Raises:
        Refusal: There are none.
    """
    forward = own_forward(module)
    sizes = _projections(module)
    if not 2 <= len(sizes) <= 3:
        raise Refusal(f"has {len(sizes)} projections, not the 3 or 2 of a gated MLP")
    if any(True for _ in module.parameters(recurse=False)):
        raise Refusal("has parameters of its own")
    for name, child in module.named_children():
        if name in sizes:
            continue
        if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in child.modules()):
            raise Refusal("has dropout")
        if any(True for _ in child.parameters()):
            raise Refusal(f"{name} has parameters")
        if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in child.modules()):
            raise Refusal(f"{name} has hooks that would not run")
    reason = "computes none of the known gated MLPs"
    with laboratory():
        for order in itertools.permutations(sizes):
            clone = _small_clone(module, sizes, order, 1.0)
            if clone is None:
                continue
            x = torch.randn(2, 3, _SMALL[0], generator=generator(), device="cpu", dtype=torch.float64)
            try:
                seen = forward(clone, x)
            except Exception as error:
                raise Refusal(f"could not be tried ({type(error).__name__})") from None
            for activation in ACTIVATIONS:
                mlp = MLP(order, activation)
                if near(mlp(dict(clone.named_children()), x), seen, 1e-10):
                    found = _mlp_difference(module, forward, mlp, sizes)
                    if found is None:
                        return mlp
                    reason = f"{found}, unlike a {mlp}"
    raise Refusal(reason)


def _mlp_difference(
    module: nn.Module, forward: Callable[..., Any], mlp: MLP, sizes: dict[str, tuple[int, int]]
) -> str | None:
    def make(scale: float) -> nn.Module:
        clone = _small_clone(module, sizes, mlp.children, scale)
        assert clone is not None
        return clone

    return difference(
        forward,
        lambda clone, x: mlp(dict(clone.named_children()), x),
        make,
        lambda *shape: torch.randn(*shape, _SMALL[0], generator=generator(), device="cpu", dtype=torch.float64),
        1e-9,
        ("relu",) if mlp.activation == "relu2" else (),
    )


_SMALL = 6, 10  # hidden and intermediate size of a probe


def _small_clone(
    module: nn.Module, sizes: dict[str, tuple[int, int]], order: tuple[str, ...], scale: float
) -> nn.Module | None:
    """A copy with small projections of that scale, if the sizes let the children have the roles of `order`."""
    hidden, middle = _SMALL
    *first, down = (sizes[name] for name in order)
    packed = len(first) == 1
    if any(f != first[0] for f in first) or down[1] != first[0][0] or first[0][1] != down[0] * (2 if packed else 1):
        return None
    clone = _clone(module)
    torch.manual_seed(0)
    for name in order[:-1]:
        vars(clone)["_modules"][name] = _Projection(hidden, middle * (2 if packed else 1), dtype=torch.float64)
    vars(clone)["_modules"][order[-1]] = _Projection(middle, hidden, dtype=torch.float64)
    for name in order:  # far enough from zero for the activations to part
        vars(clone)["_modules"][name].weight.data.normal_(std=scale)
    return clone
