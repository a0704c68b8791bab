"""A hook of mkdocs: numbers of arXiv in the pages made of docstrings become links."""

from __future__ import annotations

import re
from typing import Any

PAGES = ("formulas.md", "api.md")
NUMBER = re.compile(r"(?<![\w./])(\d{4}\.\d{5})(?![\d.]*</a>|\d)")


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    if page.file.src_uri not in PAGES:
        return html
    return NUMBER.sub(r'<a href="https://arxiv.org/abs/\1">\1</a>', html)
