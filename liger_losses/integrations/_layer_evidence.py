"""Whether a module and the layer it was taken for agree beyond the inputs on which they first did.

Functions made of analytic operations that agree on an open set agree everywhere, and nearly all layers are made so:
`Operations` records what a forward runs, and a clamp, a comparison, a dropout or a look at a value is a refusal
whatever the magnitudes were. Python can still branch on a shape, the rank, the mode or the grad mode, and gradients can
be cut: those are tried. What it asks of torch's state and of a tensor's memory `Questions` records, to be refused.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from liger_losses.kernels import implementation

_SHAPES = (
    "view _unsafe_view reshape expand unsqueeze squeeze transpose t permute slice select split split_with_sizes unbind "
    "clone alias detach copy _to_copy cat stack lift_fresh empty empty_like new_empty zeros zeros_like ones ones_like "
    "full"
)
_ARITHMETIC = (
    "add sub rsub mul div neg reciprocal pow square sqrt rsqrt mean sum var var_mean linalg_vector_norm exp sin cos "
    "addmm mm bmm addcmul native_layer_norm _fused_rms_norm"
)
_ACTIVATIONS = "sigmoid silu gelu tanh erf"
ANALYTIC = frozenset(f"{_SHAPES} {_ARITHMETIC} {_ACTIVATIONS}".split())

# What a forward may ask of the process and of a tensor's memory, and then do one thing or another.
AUTOCAST = frozenset(
    {
        "is_autocast_enabled", "is_autocast_cpu_enabled", "is_autocast_cache_enabled", "get_autocast_dtype",
        "get_autocast_cpu_dtype", "get_autocast_gpu_dtype",
    }
)  # fmt: skip
_STATES = AUTOCAST | {"is_inference_mode_enabled", "get_default_dtype", "are_deterministic_algorithms_enabled"}
_MEMORY = frozenset({"is_contiguous", "stride", "storage_offset", "data_ptr", "is_inference"})

# Every short length, and some longer than the windows, blocks and caches that code asks for.
LENGTHS = (*range(1, 18), 33, 65, 130, 257, 600)
DIMENSIONS = range(2, 6)  # of the inputs
SCALES = (1e-6, 1.0, 40.0, 1500.0, 1e5)


class Operations(TorchDispatchMode):
    """Names of the operations, of those run inside the block, that are not analytic."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        super().__init__()
        self.allowed = ANALYTIC | set(allowed)
        self.strange: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.rstrip("_") not in self.allowed and not (name.startswith("clamp") and _boundless(args[1:], kwargs)):
            self.strange[name] = None
        elif any(isinstance(t, Tensor) and not t.is_floating_point() for t in (out if _is_many(out) else [out])):
            self.strange[f"{name} to whole numbers"] = None
        return out


class Questions(TorchFunctionMode):
    """What is asked, inside the block, of torch's state and of the memory of tensors, by other code than torch's.

    torch's functions of state are no operations: for the length of the block those of the module `torch` take notes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, None] = {}
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Questions:
        for name in _STATES:
            if hasattr(torch, name):
                self._patches.enter_context(mock.patch.object(torch, name, self._noting(name, getattr(torch, name))))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in _MEMORY:
            self._note(name)
        return func(*args, **(kwargs or {}))

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self._note(name)
            return function(*args, **kwargs)

        return noting

    def _note(self, name: str) -> None:
        if sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] != "torch":
            self.asked[name] = None


def _is_many(out: Any) -> bool:
    return isinstance(out, (list, tuple))


def _boundless(bounds: Sequence[Any], named: dict[str, Any] | None) -> bool:
    """Whether a clamp clamps nothing."""
    return all(isinstance(b, float) and math.isinf(b) for b in (*bounds, *(named or {}).values()) if b is not None)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@contextlib.contextmanager
def laboratory() -> Iterator[None]:
    """On the CPU, on the twins, with nothing that the caller has switched on and without a trace in its generator."""
    dtype = torch.get_default_dtype()
    with (
        contextlib.ExitStack() as stack,
        torch.random.fork_rng(devices=()),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        implementation("torch"),
    ):
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        yield


def near(found: Any, seen: Any, share: float) -> bool:
    """Equal within a share of the largest entry of the row, NaN where NaN and inf where inf."""
    if not isinstance(seen, Tensor) or seen.shape != found.shape or seen.dtype != found.dtype:
        return False
    if not seen.numel():
        return True
    a, b = found.detach().double(), seen.detach().double()
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)) or not torch.equal(torch.isnan(a), torch.isnan(b)):
        return False
    a, b = a.where(finite, 0.0), b.where(finite, 0.0)
    return bool(((a - b).abs() <= share * a.abs().amax(-1, keepdim=True) + 1e-30).all())


def difference(
    seen: Callable[[nn.Module, Tensor], Any],
    found: Callable[[nn.Module, Tensor], Tensor],
    make: Callable[[float], nn.Module],
    inputs: Callable[..., Tensor],
    share: float,
    allowed: Iterable[str] = (),
    answered: frozenset[str] = frozenset(),
) -> str | None:
    """In what `seen`, the module's own forward, is not `found`; None if in nothing that is tried.

    Args:
        seen, found: Take a copy of the module and its input.
        make: A copy with random parameters of that scale.
        inputs: Random inputs of that shape, but for the last size.
        share: As in `near`.
        allowed: Operations of the module besides the analytic ones.
        answered: Questions of its forward to which a fused layer has an answer.
    """
    for training in (False, True):
        mode = " in training" if training else ""
        module = make(1.0)
        module.training = training
        before = {name: id(value) for name, value in vars(module).items()}
        x = inputs(2, 3)
        kept = x.clone()
        operations = Operations(allowed)
        with Questions() as questions, operations:
            seen(module, x)
        if operations.strange:
            return f"its forward runs {', '.join(operations.strange)}{mode}"
        if asked := [name for name in questions.asked if name not in answered]:
            return f"its forward asks for {', '.join(asked)}{mode}"
        if before != {name: id(value) for name, value in vars(module).items()}:
            return "its forward sets attributes"
        if not torch.equal(x, kept):
            return "its forward writes to its input"
        tried = 0
        for shape in [
            *((2 if n < 18 else 1, n) for n in LENGTHS),
            (3,),
            (70,),
            (1, 1),
            (5, 2),
            (2, 3, 4),
            (2, 1, 3, 2),
            (0, 3),
        ]:
            x = inputs(*shape)
            try:
                own = seen(module, x)
            except Exception:
                continue  # what it cannot take
            tried += 1
            if not near(found(module, x), own, share):
                return f"differs for inputs of {len(shape) + 1} dimensions and length {shape[-1]}{mode}"
        if not tried:
            return "could not be tried on inputs of any shape"
        for scale in SCALES:
            module = make(scale)
            module.training = training
            for size in SCALES:
                x = inputs(2, 3) * size
                if not near(found(module, x), seen(module, x), share):
                    return f"differs for weights of scale {scale:g} and inputs of scale {size:g}"
        module = make(1.0)
        module.training = training
        for odd in (math.nan, math.inf, -math.inf):
            x = inputs(2, 3)
            x[0, 1, 0] = odd
            if not near(found(module, x), seen(module, x), share):
                return f"differs for inputs with {odd}"
        for size in (1.0, 1e4):
            if not _same_gradients(seen, found, module, inputs(2, 3), size):
                return f"has other gradients{mode}"
    return None


def _same_gradients(
    seen: Callable[[nn.Module, Tensor], Any],
    found: Callable[[nn.Module, Tensor], Tensor],
    module: nn.Module,
    x: Tensor,
    size: float,
) -> bool:
    """Values and None-ness, of the input and of every parameter."""
    x = x.requires_grad_()
    leaves = [x, *(p.requires_grad_() for p in module.parameters())]
    results = []
    for function in (found, seen):
        with torch.enable_grad():
            y = function(module, x)
        if not y.requires_grad:
            return False
        # The second term goes along with what was normalised, and so shows a statistic that was cut off.
        sent = size * (torch.randn(y.shape, generator=generator(1), device="cpu").to(y.dtype) + y.detach())
        results.append(torch.autograd.grad(y, leaves, sent, allow_unused=True))
    pairs = zip(*results, strict=True)
    return all((a is None) == (b is None) and (a is None or near(a.flatten(), b.flatten(), 1e-4)) for a, b in pairs)
