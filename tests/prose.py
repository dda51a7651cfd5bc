"""The words that the project's prose avoids: `python -m tests.prose [FILE...]` lists them."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("kvactors", "docs", "scenarios", "native")

WORDS = {
    "nobody|somebody|anybody|whoever|whatever|whichever|whom": "the component",
    "told|heard|hears|speaks?|spoke|spoken": "sent, received, reported, notified",
    "owes?|owed|owing": "pending, outstanding",
    "believes?|believed": "'the sink's view'",
    "lives|life(?! tables?)": "incarnation (of an actor), process, connection",
    "deaths?|dead|dies|died|dying|bury|buries|buried|revives?|revived": "failed, stopped, restarted",
    "ghosts?(?! (?:entr|list|queue|cache))|zombies?": "stale entry, leftover process",
    "house|doors?": "the package, the public API",
    "last words|autopsy|in words|under way|for ever|forever": "final report, as text, in flight",
    "of (?:its|their|our) own": "'its own ..', separate",
}
"""Patterns of words, and what to write in their place."""

RULES = [
    (re.compile(rf"\b(?:{words})\b", re.IGNORECASE), better) for words, better in WORDS.items()
]


def files() -> list[Path]:
    """Every file that is checked."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    found += ROOT.glob("*.md")
    return sorted(path for path in found if path.suffix in {".py", ".pyi", ".md"})


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of prose in a file: comments and docstrings, or a page without fenced code."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        text = re.sub(
            r"^(```|~~~).*?^\1",
            lambda code: "\n" * code[0].count("\n"),
            text,
            flags=re.MULTILINE | re.DOTALL,
        )
        yield from enumerate(re.sub(r"\]\([^)]*\)", "]", text).splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from enumerate(str(node.value.value).splitlines(), node.lineno)


def findings(path: Path) -> list[str]:
    """The words to avoid in one file, as text."""
    return [
        f"{path}:{line}: {match[0]!r}, better: {better}"
        for line, text in prose(path)
        for pattern, better in RULES
        for match in pattern.finditer(re.sub(r"`[^`]*`", "`", text))
    ]


if __name__ == "__main__":
    found = [
        one for path in [Path(name) for name in sys.argv[1:]] or files() for one in findings(path)
    ]
    print(*found, sep="\n")
    sys.exit(bool(found))
