"""Each kernel test runs for the torch twin, and for the Triton form where there is something to run it on.

On a machine without a GPU that is Triton's interpreter, which must be asked for before triton is imported:
test_interpreter.py starts a session of these tests with `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from liger_losses.kernels import implementation

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

FORMS = [
    pytest.param(("torch", "cpu"), id="twin"),
    pytest.param(("torch", "cuda"), id="twin-cuda", marks=pytest.mark.gpu),
    pytest.param(("triton", "cuda"), id="triton", marks=pytest.mark.gpu),
]
if INTERPRETED:
    FORMS = [pytest.param(("triton", "cpu"), id="interpreted")]


@pytest.fixture(params=FORMS)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the tensors go; inside the test, kernels run in the form of the parameter."""
    name, place = request.param
    with implementation(name):
        yield place
