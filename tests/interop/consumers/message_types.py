"""vLLM's and SGLang's message types, given every message that a case has recorded."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.interop.environments import Environments
from tests.interop.processes import Child

CHILD = Path(__file__).with_name("message_types_child.py")
PASSED_OVER = {"vllm": {"cache_salt", "block_mm_infos"}, "sglang": {"extra_keys", "block_mm_infos"}}
"""By engine: fields of ours that its types do not have."""


def check_types(
    environments: Environments, folder: Path, engine: str, dialect: str, payloads: Sequence[bytes]
) -> dict[str, Any]:
    """Check messages with an engine's types (see `message_types_child.Types.check`)."""
    child = Child(
        f"{engine}'s types",
        [environments.program(engine), "-P", str(CHILD), engine],
        folder / f"types-{engine}.log",
        lines=True,
    )
    try:
        return dict(
            child.ask(
                {
                    "do": "check",
                    "dialect": dialect,
                    "payloads": [base64.b64encode(payload).decode() for payload in payloads],
                }
            )
        )
    finally:
        child.close()
