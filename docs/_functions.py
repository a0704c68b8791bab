"""An extension of griffe: most functions of `liger_losses.functional` are made when it is imported, out of the modules'
signatures, so they are read off the imported module rather than off its source."""

from __future__ import annotations

import sys
from typing import Any

import griffe


class MadeFunctions(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        if pkg.path != "liger_losses":
            return
        module = pkg["functional"]
        written = module.docstring
        imported = griffe.inspect(
            "functional",
            filepath=module.filepath,
            import_paths=[pkg.filepath.parent.parent, *sys.path],  # torch is found, too
            parent=pkg,
            docstring_parser=written.parser,
            docstring_options=written.parser_options,
        )
        for name, member in list(module.members.items()):
            made = imported.members.get(name)
            if name.startswith("liger_") and member.is_attribute and made is not None:
                module.set_member(name, made)
