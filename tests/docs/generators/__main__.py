"""Write the generated pages."""

from __future__ import annotations

from tests.docs.generators import pages

if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, "utf-8")
