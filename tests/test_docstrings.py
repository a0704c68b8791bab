"""`help()` of a module says of each argument of its `forward` what it is, and of each tensor its shape."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

import liger_losses
from liger_losses import functional

MODULES = [
    one
    for one in (getattr(liger_losses, name) for name in liger_losses.__all__)
    if inspect.isclass(one) and issubclass(one, torch.nn.Module)
]
FUNCTIONS = {name: f for name, f in vars(functional).items() if name.startswith("liger_")}
# Of a tensor without a fixed shape: a scalar count, and what goes by another argument's shape.
SHAPE = re.compile(r"`\[.*?\]`|in the shape of")


def entries(docstring: str) -> dict[str, str]:
    """Of the section `Args` of a Google docstring, by name; several may share an entry."""
    section = re.search(r"^Args:\n(.*?)(?:\n\n|\Z)", docstring, flags=re.MULTILINE | re.DOTALL)
    assert section is not None
    found = re.findall(r"^    (\w+(?:, \w+)*): (.*?)(?=^    \w|\Z)", section[1] + "\n", flags=re.MULTILINE | re.DOTALL)
    return {name: text for names, text in found for name in names.split(", ")}


def test_modules_were_found() -> None:
    assert len(MODULES) == len([name for name in liger_losses.__all__ if name.startswith("Liger")]) >= 19


@pytest.mark.parametrize("module", MODULES)
def test_forward_says_what_it_takes_and_returns(module: Any) -> None:
    text = inspect.getdoc(module.forward)
    assert text is not None
    assert not any(text == inspect.getdoc(base.forward) for base in (torch.nn.Module, torch.nn.KLDivLoss))
    parameters = {name: p for name, p in inspect.signature(module.forward).parameters.items() if name != "self"}
    said = entries(text)
    assert list(said) == list(parameters)
    for name, parameter in parameters.items():
        assert "Tensor" in str(parameter.annotation)
        assert SHAPE.search(said[name]), name
    assert "\nReturns:\n" in text
    assert "\nRaises:\n" in text


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_name_the_arguments_of_forward(name: str) -> None:
    function = FUNCTIONS[name]
    text = inspect.getdoc(function)
    assert text is not None
    (module,) = (one for one in MODULES if f"`{one.__name__}` as a function" in text)
    for argument in inspect.signature(module.forward).parameters:
        assert argument == "self" or argument == "shift_labels" or f"`{argument}`" in text, argument
