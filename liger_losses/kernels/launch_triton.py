"""Launching Triton kernels that are compiled already.

`kernel[grid](...)` binds its arguments by name and looks each one's specialisation up at every call, which takes the
host longer than a norm takes the device. A kernel once compiled is a handle that only launches; what remains is to
know that the arguments are of the kind it was compiled for.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

_INT32 = 2**31 - 1
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], warps: int, **constants: Any) -> None:
    """`kernel[(programs,)](*arguments, **constants, num_warps=warps)` on the device of the first argument, a tensor.

    Arguments are tensors, ints and floats. `kernel` specialises on no number's value (`do_not_specialize`) and has its
    constants last, in the order given.
    """
    index = arguments[0].get_device()  # -1 on a CPU
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch(kernel, programs, arguments, warps, **constants)
    kind: list[Any] = [id(kernel), index, warps, *constants.values()]
    wide = False
    for argument in arguments:
        if type(argument) is int:
            wide = wide or argument > _INT32  # sizes and strides, never below 0; a larger one has another type
        elif type(argument) is not float:
            kind += argument.dtype, argument.data_ptr() % 16 == 0
    key = tuple(kind)
    ready = None if wide else _compiled.get(key)
    if ready is not None:
        ready[programs, 1, 1](*arguments, *constants.values())
        return
    ready = kernel[(programs,)](*arguments, **constants, num_warps=warps)
    if not wide and isinstance(ready, triton.compiler.CompiledKernel):  # not from the interpreter
        assert kernel.arg_names[len(arguments) :] == list(constants)
        _compiled[key] = ready
