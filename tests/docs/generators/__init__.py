"""Generators of the pages of docs/ that are read from the code: `python -m tests.docs.generators`
writes them."""

from __future__ import annotations

from pathlib import Path

from tests.docs.generators import messages, metrics, reference

DOCS = Path(__file__).parents[3] / "docs"
HINT = "run: python -m tests.docs.generators"


def pages() -> dict[Path, str]:
    """The generated pages by path."""
    own = {DOCS / "reference" / name: text for name, text in reference.pages().items()}
    return own | {DOCS / "messages.md": messages.render(), DOCS / "metrics.md": metrics.render()}
