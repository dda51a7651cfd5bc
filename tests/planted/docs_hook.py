"""Hook of MkDocs: the table of the planted bugs on their page, as of the build."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

PAGE = "planted_bugs.md"
MARK = "<!-- planted bugs -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """See MkDocs' events of plugins."""
    if page.file.src_uri != PAGE:
        return markdown
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        from catalogue import BUGS, list_of
    finally:
        sys.path.pop(0)
    return markdown.replace(MARK, list_of(BUGS))
