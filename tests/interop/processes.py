"""Child processes of a case: servers that are asked over HTTP, and programs that answer lines of
JSON with lines of JSON."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.interop.environments import InteropError

HANG = 60.0
"""Seconds after which a process that does not answer is taken to hang."""


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
        self.name = name
        self.log = log
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if lines else subprocess.DEVNULL,
                stdout=subprocess.PIPE if lines else sink,
                stderr=sink,
                env=os.environ | (env or {}),
            )
        self._unread = b""

    def end_of_log(self) -> str:
        """The last lines of its log."""
        return self.log.read_text(errors="replace")[-3000:]

    def check(self) -> None:
        """InteropError if the process has ended."""
        if self.process.poll() is not None:
            raise InteropError(
                f"{self.name} ended with status {self.process.returncode}:\n{self.end_of_log()}"
            )

    def send(self, message: dict[str, Any]) -> None:
        """Send a line. Its answer is read by `receive`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            self.process.wait(HANG)
            raise InteropError(f"{self.name}: {error}\n{self.end_of_log()}") from None

    def receive(self, limit: float = HANG) -> Any:
        """The next answer. InteropError if the process ends or does not answer within `limit`
        seconds, or answers with an error."""
        assert self.process.stdout is not None
        until = time.monotonic() + limit
        while b"\n" not in self._unread:
            ready, _, _ = select.select(
                [self.process.stdout], [], [], max(0.0, until - time.monotonic())
            )
            data = os.read(self.process.stdout.fileno(), 1 << 20) if ready else b""
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

    def kill(self) -> None:
        """End it at once, as kill -9 does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(HANG)

    def close(self) -> None:
        """End the process. Kill it if it does not end after the request."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
