"""A peer in a process of another Python, which answers lines of JSON."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvactors.errors import ConfigError
from tests.benchmarks.machine import ROOT


class ChildProcess:
    """A script of this package that another Python runs.

    Args:
        python: the Python.
        script: the name of a script of this folder.
        argument: of the script.
        what: the peer, for errors.
        hint: how to make an environment that has the peer.
        limit: seconds for an answer, the start included. Only a hang takes as long.
        ending: seconds for the end of the process.
        variables: of the environment, beside those of this process. The clone is on its path.

    Raises:
        ConfigError: the Python does not start.
    """

    def __init__(
        self,
        python: str,
        script: str,
        argument: str,
        *,
        what: str,
        hint: str,
        limit: float,
        ending: float,
        variables: Mapping[str, str],
    ) -> None:
        self._python, self._what, self._hint = python, what, hint
        self._limit, self._ending = limit, ending
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
        self._unread = b""
        path = str(Path(__file__).parent / script)
        try:
            self._process = subprocess.Popen(
                [python, "-P", path, argument],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(variables),
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(f"{python} does not start: {error}. {hint}") from error

    def ask(self, do: str, **message: Any) -> dict[str, Any]:
        """The answer to a line.

        Raises:
            ConfigError: the Python lacks a package, or the peer fails.
        """
        sender, receiver = self._process.stdin, self._process.stdout
        if sender is None or receiver is None:
            raise RuntimeError("a child process without pipes")
        with suppress(OSError):  # it has ended, which the next read finds
            sender.write(json.dumps({"do": do} | message).encode() + b"\n")
        until = time.monotonic() + self._limit
        while b"\n" not in self._unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([receiver], [], [], left)[0]:
                raise ConfigError(f"{self._what} was not done in {self._limit:g} s")
            data = os.read(receiver.fileno(), 1 << 20)
            if not data:
                raise ConfigError(self._failure())
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _failure(self) -> str:
        self._log.seek(0)
        end = self._log.read().decode(errors="replace")[-2000:]
        hint = f". {self._hint}" if "ModuleNotFoundError" in end else ""
        return f"{self._python} cannot run {self._what}{hint}:\n{end}"

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(self._ending)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
