"""Typed channels: mypy rejects a message that is sent to the wrong actor, and a handler that does
not take the message it is marked for. The latter is checked again when the class is created."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HEAD = """
from kvactors.actor import Actor, ActorRef, Ask, Control, Envelope, Message, on

class A(Message, frozen=True, eq=False): ...
class B(Message, frozen=True, eq=False): ...
class C(Control, frozen=True, eq=False): ...
class Q(Ask[int], frozen=True, eq=False): ...

class Sender(Actor):
    ROLE = "sender"

    def __init__(self, ref: ActorRef, a: ActorRef[A], ab: ActorRef[A | B]) -> None:
        super().__init__(ref)
"""

BODY = """
        self.tell(a, A())
        self.tell(ab, B())
        ab.try_tell(A())
        fewer: ActorRef[A] = ab
        self.tell(fewer, A())
        self.tell(ref, C())

        self.tell(a, B())  # error: misc
        self.tell(ab, C())  # error: misc
        a.try_tell(B())  # error: arg-type
        more: ActorRef[A | C] = ab  # error: assignment

    async def wait(self, a: ActorRef[A]) -> int:
        await a.tell(A())
        await a.tell(C())  # error: arg-type
        return await ActorRef.ask(a, Q(), deadline=1.0)

    @on(A)
    def right(self, message: A) -> None: ...

    @on(Q)
    def answered(self, message: Q, envelope: Envelope[int]) -> None:
        self.answer(envelope, 7)
        self.answer(envelope, "seven")  # error: misc

    @on(A)
    @on(B)
    def both(self, message: A | B) -> None: ...

    @on(A)  # error: arg-type
    def other(self, message: B) -> None: ...

    @on(A)
    @on(C)  # error: arg-type
    def one_of_two(self, message: A | B) -> None: ...

    @on(Q)  # error: arg-type
    def without_envelope(self, message: Q) -> None: ...

    @on(A)  # error: arg-type
    def with_envelope(self, message: A, envelope: Envelope[int]) -> None: ...
"""


@pytest.mark.ci
def test_mypy_rejects_wrong_messages_and_wrong_handlers(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(HEAD + BODY, "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = (HEAD + BODY).splitlines()
    expected = {
        (number, wrong[1])
        for number, line in enumerate(lines, 1)
        if (wrong := re.search(r"# error: ([a-z-]+)", line))
    }
    found = {
        (int(line), code)
        for line, code in re.findall(r"program\.py:(\d+): error: .*\[([a-z-]+)\]", done.stdout)
    }
    assert found == expected, done.stdout + done.stderr
    assert len(expected) == 10
