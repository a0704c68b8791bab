"""Without a library, importing the integration with it says which extra brings it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from liger_losses._extras import require

# Each module afresh, in one process: torch is imported once.
PROGRAM = """
import sys
from importlib import import_module

for missing in ("transformers", "trl"):
    for name in [name for name in sys.modules if name.startswith("liger_losses.integrations")]:
        del sys.modules[name]
    sys.modules[missing] = None
    for module in ("transformers", "trl", "layers"):
        try:
            import_module(f"liger_losses.integrations.{module}")
            print(f"{missing} {module}: imported")
        except ModuleNotFoundError as error:
            print(f"{missing} {module}: {error.name}: {error}")
    del sys.modules[missing]
"""


def test_integrations_name_the_extra() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    said = "{0} is not installed; it comes with: pip install 'liger-losses[trl]'"
    assert run.stdout.splitlines() == [
        f"transformers transformers: transformers: {said.format('transformers')}",
        f"transformers trl: transformers: {said.format('transformers')}",
        "transformers layers: imported",  # recognises layers of any model
        "trl transformers: imported",
        f"trl trl: trl: {said.format('trl')}",
        "trl layers: imported",
    ]


def test_a_package_that_is_there_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is a dependency of the package, which no extra of ours would bring."""

    def broken(module: str) -> None:
        raise ModuleNotFoundError("No module named 'its_dependency'", name="its_dependency")

    monkeypatch.setattr("liger_losses._extras.import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="^No module named 'its_dependency'$"):
        require("transformers.utils", "trl")
