"""Every Python block of the README that stands on its own runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
# The others stand beside the reader's own model and data.
ALONE = [block for block in BLOCKS if "(...)" not in block and "(model)" not in block]


def test_blocks_were_found() -> None:
    assert len(ALONE) >= 5
    assert len(BLOCKS) - len(ALONE) == 2


@pytest.mark.parametrize("block", ALONE, ids=range(len(ALONE)))
def test_block_runs(block: str) -> None:
    exec(compile(block, str(README), "exec", dont_inherit=True), {"__name__": "__main__"})
