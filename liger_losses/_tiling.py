"""A function of single tokens on some tokens at a time, computed again in backward, so that no activation is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .kernels import differentiable_once
from .kernels.registration import transformed


def tiled_over_tokens(
    function: Callable[[Tensor], Tensor],
    x: Tensor,  # [..., H]
    shards: int,
    module: nn.Module,
) -> Tensor:
    """`function(x)` for a function of single tokens, on `shards` groups of tokens in turn, recomputed in backward.

    The gradient of each parameter is summed over groups in fp32 and handed to autograd once. Hooks of submodules run
    for each group, in forward and again in backward. Under torch.compile the groups are checkpointed ones, whose
    gradients are summed in the dtype of the parameter; under functorch transforms and forward-mode AD they are plain.

    Args:
        function: Maps `[n, H]` to `[n, H']`, token by token, deterministically.
        x: Any number of leading dimensions.
        shards: Number of groups, at least 1.
        module: Whose parameters `function` uses.
    """
    rows = x.reshape(-1, x.shape[-1])
    if torch.compiler.is_compiling():
        # To a trace, putting stand-ins into the module is a side effect of the Function.
        parts = [checkpoint(function, part, use_reentrant=False) for part in rows.chunk(shards)]
        return torch.cat(parts).view(*x.shape[:-1], -1)
    if transformed():
        return torch.cat([function(part) for part in rows.chunk(shards)]).view(*x.shape[:-1], -1)
    out = _Tiled.apply(function, shards, module, rows, *module.parameters())
    return out.view(*x.shape[:-1], out.shape[-1])


@contextlib.contextmanager
def _parameters_replaced(module: nn.Module, values: Sequence[Tensor]) -> Iterator[None]:
    """`module` with other tensors in place of `module.parameters()`, in that order."""
    of = {id(parameter): value for parameter, value in zip(module.parameters(), values, strict=True)}
    places = [(m, n, p) for m in module.modules() for n, p in m._parameters.items() if p is not None]
    try:
        for owner, name, parameter in places:
            cast(dict[str, Any], owner._parameters)[name] = of[id(parameter)]
        yield
    finally:
        for owner, name, parameter in places:
            owner._parameters[name] = parameter


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[[Tensor], Tensor],
        shards: int,
        module: nn.Module,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.function, ctx.shards, ctx.module = function, shards, module
        ctx.save_for_backward(x, *parameters)
        device = x.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        return torch.cat([function(part) for part in x.chunk(shards)])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, *parameters = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad[3:]
        # Stand-ins: hooks of the parameters themselves are for the whole gradient, not for that of a group.
        aliases = [p.detach().requires_grad_(need) for p, need in zip(parameters, needs, strict=True)]
        wanted = [alias for alias in aliases if alias.requires_grad]
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in wanted]
        dx = torch.empty_like(x) if needs_x else None
        device, dtype, enabled = ctx.autocast
        done = 0
        for part, sent in zip(x.chunk(ctx.shards), dy.chunk(ctx.shards), strict=True):
            leaf = part.detach().requires_grad_(needs_x)
            autocast = torch.autocast(device, dtype=dtype, enabled=enabled)
            with torch.enable_grad(), autocast, _parameters_replaced(ctx.module, aliases):
                out = ctx.function(leaf)
            leaves = [leaf, *wanted] if needs_x else wanted
            found = list(torch.autograd.grad(out, leaves, sent, allow_unused=True))
            if dx is not None:
                dx[done : done + len(part)] = found.pop(0)
            done += len(part)
            for total, gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    total += gradient
        summed = iter(sums)
        gradients = (next(summed).to(p.dtype) if need else None for p, need in zip(parameters, needs, strict=True))
        return None, None, None, dx, *gradients
