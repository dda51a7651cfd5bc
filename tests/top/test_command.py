"""`kvactors top` as a command: frames, JSON, a process that goes away, and the terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from kvactors.monitoring import Endpoint
from kvactors.top import command
from kvactors.top.command import watch
from kvactors.top.exposition import BadMetrics
from kvactors.top.fetch import Unreachable, parse_target
from kvactors.top.outputs import Show
from tests.cache.test_degraded import HOST, requests
from tests.support.cache import opened
from tests.top.test_fetch import sending, serving

LIMIT = 60.0
"""Seconds that only bound a hang."""


class Shown(Show):
    """Collects views, and ends after some."""

    def __init__(self, most=1000):
        self.views, self._most = [], most

    def view(self, view):
        self.views.append(view)

    def ended(self):
        return len(self.views) >= self._most


def options(**changes):
    return {"interval": 0.01, "timeout": 20.0, "once": False, **changes}


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(command, "STEP", 0.001)
    monkeypatch.setattr("kvactors.monitoring.FRESH", 0.0)


async def test_it_shows_one_frame_after_another_until_it_is_ended():
    endpoint = Endpoint()
    async with opened(host=HOST) as cache, endpoint.attached("127.0.0.1", 0, cache):
        await requests(cache, 1)
        shown = Shown(3)
        target = parse_target(str(endpoint.port))
        assert await watch(target, shown, **options()) is None
    assert [view.status for view in shown.views] == ["ok"] * 3
    assert shown.views[0].interval_s is None
    assert shown.views[2].interval_s > 0


async def test_reasons_come_from_the_health_of_the_process(monkeypatch):
    endpoint = Endpoint()
    async with opened(host=HOST) as cache, endpoint.attached("127.0.0.1", 0, cache):
        monkeypatch.setattr(type(cache.system.plane), "trouble", "the copy engine is broken")
        view = await watch(parse_target(str(endpoint.port)), Shown(), **options(once=True))
    (reason,) = view.reasons
    assert (view.status, reason.component) == ("degraded", "copies")
    assert reason.since > 1e9


async def test_a_process_that_goes_away_and_another_one_in_its_place_are_shown():
    endpoint, shown = Endpoint(), Shown(1)
    async with opened(host=HOST) as cache, endpoint.observing(cache):
        async with endpoint.serving("127.0.0.1", 0):
            port = endpoint.port
            task = asyncio.create_task(watch(parse_target(str(port)), shown, **options()))
            shown._most = 1000
            while not shown.views:
                await asyncio.sleep(0.001)
        while shown.views[-1].status != "unreachable":
            await asyncio.sleep(0.001)
    assert "connection refused" in shown.views[-1].error
    async with (
        opened(host=HOST) as cache,
        endpoint.observing(cache),
        endpoint.serving("127.0.0.1", port),
    ):
        while shown.views[-1].status != "ok":
            await asyncio.sleep(0.001)
    assert shown.views[-1].restarts_seen == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("answer", "error", "kind"),
    [
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "answers with status 404", Unreachable),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", "no metrics of a kvactors cache: line 1", BadMetrics),
        (b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe", "no metrics of a kvactors cache", BadMetrics),
        (b"HTTP/1.0 200 OK\r\n\r\nx 1\n", "no metric begins with kvactors:", BadMetrics),
    ],
)
async def test_another_server_is_a_named_error_at_the_start(answer, error, kind):
    async with serving(sending(answer)) as target:
        with pytest.raises(kind, match=error):
            await watch(target, Shown(), **options())


@pytest.mark.parametrize("health", [b"OK", b"[]", b'{"status": 5}', b"\xff"])
async def test_a_health_path_of_another_kind_leaves_the_status_of_the_metrics(health):
    head = b"HTTP/1.0 200 OK\r\n\r\n"
    metrics = b'kvactors:up 1\nkvactors:health{status="degraded"} 1\n'
    metrics += b'kvactors:degraded{component="store"} 1\n'

    async def answer(writer):
        answer.calls += 1
        writer.write(head + (metrics if answer.calls % 2 else health))
        await writer.drain()

    answer.calls = 0
    async with serving(answer) as target:
        view = await watch(target, Shown(), **options(once=True))
    assert (view.status, [one.component for one in view.reasons]) == ("degraded", ["store"])
    assert answer.calls == 4


# -- the command in its process


def run(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "kvactors", "top", *map(str, arguments)], **options
    )


def finished(process):
    """The exit status and the texts of a process."""
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


async def test_one_plain_frame_and_json_in_a_pipe():
    endpoint = Endpoint()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    async with opened(host=HOST) as cache, endpoint.attached("127.0.0.1", 0, cache):
        await requests(cache, 1)
        arguments = (endpoint.port, "--once", "--interval", 0.25)
        plain = run(*arguments, **pipes, env=environment)
        lines = run(*arguments, "--json", "-", **pipes)
        status, out, err = await asyncio.to_thread(finished, plain)
        assert (status, err) == (0, "")
        assert out.isascii()
        assert "health: ok" in out
        assert out.count("kvactors top") == 1
        assert "\x1b" not in out
        status, out, err = await asyncio.to_thread(finished, lines)
        assert (status, err) == (0, "")
        (line,) = out.splitlines()
        assert json.loads(line)["tiers"][0]["capacity_blocks"] == cache.system.device.num_blocks


@pytest.mark.parametrize("end", ["ctrl-c", "q", "sigterm"])
async def test_the_terminal_is_left_as_it_was(end):
    endpoint = Endpoint()
    async with opened(host=HOST) as cache, endpoint.attached("127.0.0.1", 0, cache):
        await requests(cache, 1)
        status, out, same = await asyncio.to_thread(on_a_terminal, endpoint.port, end)
    assert status == {"ctrl-c": 130, "q": 0, "sigterm": 143}[end]
    assert same, "the settings of the terminal"
    assert out.count(b"\x1b[?1049h") == out.count(b"\x1b[?1049l") == 1
    assert out.endswith(b"\x1b[?25h"), "the cursor is shown, and nothing follows"
    assert b"\x1b[1;32mok" in out, "colours"
    assert b"Traceback" not in out


def on_a_terminal(port, end):
    """Run it on a new terminal, resize the terminal after the first frame, and end it. Returns the
    status, the bytes that the terminal got, and whether its settings are as before."""
    ours, theirs = pty.openpty()
    resize(theirs, 40, 120)
    before = termios.tcgetattr(theirs)
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment = {key: value for key, value in environment.items() if key not in COLOURS}
    process = run(
        *(port, "--interval", 3600),
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        return ended(process, ours, theirs, end, before)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def ended(process, ours, theirs, end, before):
    out = read_until(ours, b"evicted/s")
    assert not termios.tcgetattr(theirs)[3] & termios.ECHO, "typed keys do not disturb the frame"
    resize(theirs, 20, 40)
    out += read_until(ours, b"health")
    if end == "sigterm":
        process.send_signal(signal.SIGTERM)
    else:
        os.write(ours, b"\x03" if end == "ctrl-c" else b"q")
    out += read_until(ours, b"\x1b[?25h")
    status = process.wait(LIMIT)
    same = termios.tcgetattr(theirs) == before
    while select.select([ours], [], [], 0)[0]:
        out += os.read(ours, 65536)
    return status, out, same


COLOURS = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}


def resize(terminal, lines, columns):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def read_until(terminal, text):
    out, end = b"", time.monotonic() + LIMIT
    while text not in out:
        assert select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0], out
        out += os.read(terminal, 65536)
    return out
