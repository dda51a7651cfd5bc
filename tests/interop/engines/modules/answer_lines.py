"""The protocol of the programs that run in an engine's environment: each line of JSON names a call and
has its arguments, and is answered by a line."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any, TextIO


def answer(owner: Any, lines: Iterable[str], answers: TextIO) -> None:
    """Make the calls of an object until the lines end. Errors are answers."""
    for line in lines:
        message = json.loads(line)
        try:
            found = getattr(owner, message.pop("do"))(**message)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found) + "\n")


def answer_on_output(owner: Any) -> None:
    """Answer lines of standard input. Standard output carries the answers alone: other output goes to
    standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answer(owner, sys.stdin, answers)
