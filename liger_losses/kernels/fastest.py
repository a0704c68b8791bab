"""Where an operator of torch's own is faster than the kernel, by measurement: `tables/*.json`, one file a device.

`python -m benchmarks layers --tables` writes the file of the device that it runs on. Only eager calls of plain tensors
on a device with a table ask: a compiler fuses better than either, and `implementation(...)` is obeyed. A caller asks
only where torch's operator rounds where the convention says, and an entry is torch's only where its results and
gradients came out as near to fp64 as the kernel's.

Sizes fall into classes of a factor of four, `size_class(4^c) = c`. What was not measured is not torch's.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .dispatch import requested

FOLDER = Path(__file__).parent / "tables"
OPERATIONS = ("rms_norm", "layer_norm")
FEWEST = 2  # class of the fewest rows measured

# Operation, bytes of an element, classes of the number of rows and of their width.
Key = tuple[str, int, int, int]


def size_class(size: int) -> int:
    """`c` for sizes from `4^c / 2` to below `2 * 4^c`."""
    return size.bit_length() // 2


def preferred(entries: list[dict[str, Any]]) -> frozenset[Key]:
    """What torch's operator is faster at, of the entries of a file."""
    return frozenset(
        (entry["operation"], entry["bytes"], entry["rows"], entry["width"])
        for entry in entries
        if entry["fastest"] == "torch"
    )


@functools.cache
def _of_device(device: torch.device) -> frozenset[Key]:
    """Read once, and without a word to the device: its name is a property the host knows."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    records = {record["device"]: record for record in (json.loads(p.read_text()) for p in FOLDER.glob("*.json"))}
    return preferred(records.get(name, records[None])["entries"])


def torch_is_faster(operation: str, x: Tensor) -> bool:
    """Whether torch's own operator, forward and backward, was measured to be the faster one on `x`, `[..., H]`."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    keys = _of_device(x.device)
    # Autocast widens the results of torch's norms.
    if not keys or requested() is not None or torch.is_autocast_enabled(x.device.type):
        return False
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    # Fewer rows than were measured wait for the host as those did; of none there is nothing to gain.
    return rows > 0 and (operation, x.element_size(), max(FEWEST, size_class(rows)), size_class(width)) in keys
