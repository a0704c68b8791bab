"""Values of options: what is accepted, and one form of message for what is not. Imports no torch.

Every refusal reads `--option: got 'what was seen', expected the form and range`.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .extras import CommandError

_UNITS = {
    "": 1, "b": 1,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
# A number without a unit is bytes, as in the library; one below this is a unit forgotten.
LEAST_BARE = 1 << 20
# What `plan` searches and accepts.
MOST_EXAMPLES, MOST_TOKENS = 4096, 1 << 22


def integer(option: str, least: int, most: int) -> Callable[[str], int]:
    """For argparse's `type`: an integer of `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise CommandError(f"{option}: got {text!r}, expected an integer from {least:,} to {most:,}")
        return value

    return read


def share(option: str) -> Callable[[str], float]:
    """For argparse's `type`: a number in [0, 1)."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < 1:
            raise CommandError(f"{option}: got {text!r}, expected a share in [0, 1), such as 0.25")
        return value

    return read


def parse_bytes(text: str) -> int | None:
    """`"16GiB"`, `"500 MB"`, `"1048576"` as bytes; None for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower(), flags=re.ASCII)
    return int(float(found[1]) * _UNITS[found[2]]) if found is not None and found[2] in _UNITS else None


def memory(option: str, text: str, gib: int, device: str) -> int:
    """Bytes that a device of `gib` GiB may give."""
    size = parse_bytes(text)
    if size is not None and 0 < size < LEAST_BARE and not re.search("[a-z]", text.lower()):
        raise CommandError(
            f"{option}: got {text!r}, expected a unit beside so small a number, which would be {size:,} bytes: "
            f"{text.strip()}GiB, perhaps"
        )
    if size is None or not 0 < size <= gib << 30:
        raise CommandError(
            f"{option}: got {text!r}, expected bytes such as 500MiB or 16GiB, more than 0 and at most {gib}GiB, the "
            f"memory of one {device}"
        )
    return size


def joined(arguments: Sequence[str]) -> list[str]:
    """`--memory -1GiB` as `--memory=-1GiB`: argparse takes what begins with a minus for an option of its own, and would
    say that a value is missing. No option here begins with a digit."""
    found: list[str] = []
    for argument in arguments:
        last = found[-1] if found else ""
        if re.match(r"-[\d.]", argument) and last.startswith("--") and "=" not in last and last != "--":
            found[-1] = f"{last}={argument}"
        else:
            found.append(argument)
    return found


def make_folder(option: str, folder: Path) -> bool:
    """Make it where it is missing, and say whether it was: before the work whose results it is for."""
    missing = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # who may not write finds out now
            pass
    except OSError as error:
        why = f"got {str(folder)!r}, expected a folder to write to: {error.strerror}"
        raise CommandError(f"{option}: {why}") from error
    return missing
