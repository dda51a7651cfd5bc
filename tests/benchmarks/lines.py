"""The peer's side of the benchmarks: lines of JSON, and processor time. Runs in Pythons that have
nothing but the standard library and the peer."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any


def answer_lines(make: Callable[[], Any]) -> None:
    """Answer each line of the input with what a method of the object that `make` returns does with
    its fields: `do` is the method's name. What the peer prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    target = make()
    for line in sys.stdin:
        message = json.loads(line)
        answer = getattr(target, message.pop("do"))(**message)
        answers.write(json.dumps(answer or {}) + "\n")


def processor_seconds() -> float:
    """Processor time of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
