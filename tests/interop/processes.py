"""Child processes of a case: servers that are asked over HTTP, and programs that answer lines of
JSON with lines of JSON (`modules/answer_lines.py`)."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.interop.environments import InteropError

HANG = 60.0
"""Seconds after which a process that does not answer is taken to hang."""
MODULES = Path(__file__).with_name("modules")
"""Python modules that the programs import by name."""


def wait_until(what: str, done: Callable[[], bool], limit: float = HANG) -> None:
    """Return once `done()`. InteropError after `limit` seconds."""
    until = time.monotonic() + limit
    while not done():
        if time.monotonic() > until:
            raise InteropError(f"not within {limit} s: {what}")
        time.sleep(0.02)


def descendants(process: int) -> list[int]:
    """The processes that a process has started, and those that they have started."""
    found = [process]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):  # it has ended
                found += map(int, task.read_text().split())
    return found[1:]


def call(url: str, body: Any = None, *, limit: float = HANG, **headers: str) -> bytes:
    """The answer of a server to a GET, or to a POST with a body of JSON. OSError without one, or
    for an error."""
    data = None if body is None else json.dumps(body).encode()
    headers |= {"content-type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers), timeout=limit
        ) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise OSError(f"{url}: {error.code} {error.read()[:300]!r}") from None


class Lines:
    """Asks a program over two descriptors. `log`: its other output."""

    def __init__(self, name: str, log: Path, read: int, write: int) -> None:
        self.name, self.log = name, log
        self._read, self._write = read, write
        self._unread = b""

    def end_of_log(self) -> str:
        """The last lines of its log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def send(self, message: dict[str, Any]) -> None:
        """Send a line. Its answer is read by `receive`."""
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._write, data) :]
        except OSError as error:
            raise InteropError(f"{self.name}: {error}\n{self.end_of_log()}") from None

    def receive(self, limit: float = HANG) -> Any:
        """The next answer. InteropError if the process ends or does not answer within `limit`
        seconds, or answers with an error."""
        until = time.monotonic() + limit
        while b"\n" not in self._unread:
            left = max(0.0, until - time.monotonic())
            ready, _, _ = select.select([self._read], [], [], left)
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                state = "ended" if ready else f"does not answer in {limit} s"
                raise InteropError(f"{self.name} {state}:\n{self.end_of_log()}")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise InteropError(f"{self.name}: {answer['error']}\n{self.end_of_log()}")
        return answer

    def ask(self, message: dict[str, Any], limit: float = HANG) -> Any:
        """Send a line and return its answer."""
        self.send(message)
        return self.receive(limit)


class Child:
    """A process whose standard error (and output, unless `lines`) goes to a log file. lines: it
    answers on its standard output."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        lines: bool = False,
        env: dict[str, str] | None = None,
    ) -> None:
        self.name, self.log = name, log
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if lines else subprocess.DEVNULL,
                stdout=subprocess.PIPE if lines else sink,
                stderr=sink,
                env=os.environ | ({"PYTHONPATH": str(MODULES)} if lines else {}) | (env or {}),
            )
        pipes = self.process.stdout, self.process.stdin
        self._pipes = [one for one in pipes if one is not None]
        self.lines = Lines(name, log, *(one.fileno() if one else -1 for one in pipes))
        self.ask, self.end_of_log = self.lines.ask, self.lines.end_of_log

    def check(self) -> None:
        """InteropError if the process has ended."""
        if self.process.poll() is not None:
            raise InteropError(
                f"{self.name} ended with status {self.process.returncode}:\n{self.end_of_log()}"
            )

    def answers(self, url: str) -> bool:
        """Whether a server of the process answers."""
        self.check()
        try:
            call(url, limit=5.0)
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """kill -9, of the processes that it has started too."""
        if self.process.poll() is None:
            for process in [*descendants(self.process.pid), self.process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        self.process.wait(HANG)

    def close(self) -> None:
        """End the process. Kill it if it does not end after the request."""
        for pipe in self._pipes[1:]:
            pipe.close()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()
        for pipe in self._pipes:
            pipe.close()
