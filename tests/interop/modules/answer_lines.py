"""The protocol of the programs that a test asks: each line of JSON names a call and has its
arguments, and is answered by a line."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TextIO


def answer(
    owner: Any, lines: Iterable[str], answers: TextIO, run: Callable[[Any], Any] = lambda done: done
) -> None:
    """Make the calls of an object until the lines end. Errors are answers. `run`: gives the result
    of what a call returns."""
    for line in lines:
        message = json.loads(line)
        try:
            found = run(getattr(owner, message.pop("do"))(**message))
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found) + "\n")


def answer_on_output(owner: Any, run: Callable[[Any], Any] = lambda done: done) -> None:
    """Answer lines of standard input. Standard output carries the answers alone: other output goes
    to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answer(owner, sys.stdin, answers, run)


async def answer_beside_loop(owner: Any) -> None:
    """As `answer_on_output`, for an object whose calls run in this loop, which runs between them."""
    loop = asyncio.get_running_loop()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    await asyncio.to_thread(answer_on_output, owner, run)
