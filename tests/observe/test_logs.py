"""Where log events go, and that they hold no prompts."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import structlog

from kvactors.actor.log import get_logger, structlog_settings

PACKAGE = Path(__file__).parents[2] / "kvactors"

PROGRAM = """
    import asyncio, logging
    import kvactors
    import kvactors.prefix_index.actor
    import kvactors.system
    {setup}
    def acquire(self, message, envelope):
        secret, tokens = "tenant-secret", [987654321]
        raise RuntimeError("broken")

    kvactors.prefix_index.actor.PrefixIndex.acquire = acquire
    config = kvactors.Config.from_mapping({{
        "cache": {{"block_size": 16}}, "device": {{"num_blocks": 8}}, "layout": {{"num_layers": 1, "num_kv_heads": 1, "head_dim": 8}},
        "actors": {{"max_restarts_per_minute": 1}},
    }})

    async def main():
        async with kvactors.open(config) as cache:
            for _ in range(2):
                try:
                    await cache.acquire("a", [987654321] * 20, salt="tenant-secret")
                except kvactors.KVActorsError:
                    await asyncio.sleep(0.05)

    try:
        asyncio.run(main())
    except kvactors.CacheFailed:
        pass
"""


def run(setup: str = "") -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(PROGRAM).format(setup=setup)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )


def test_without_settings_warnings_and_errors_go_to_stderr():
    done = run()
    assert done.stdout == ""
    for event in ("actor failed", "actor restarted", "system failed"):
        assert event in done.stderr
    assert "cache opened" not in done.stderr
    assert "tenant-secret" not in done.stderr
    assert "987654321" not in done.stderr


def test_a_handler_of_the_standard_library_sees_every_event():
    done = run("logging.basicConfig(level=logging.DEBUG)")
    assert done.stdout == ""
    for event in ("cache opened", "actor failed", "actor restarted", "system failed"):
        assert f"kvactors:{event}" in done.stderr
    assert "RuntimeError: broken" in done.stderr


def test_a_handler_sees_the_events_of_an_application_that_uses_structlog_too():
    setup = (
        "import sys, structlog; logging.basicConfig(level=logging.DEBUG); "
        "structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))"
    )
    assert run(setup).stderr.count("system failed") == 2
    bound = (
        "import structlog; logging.basicConfig(level=logging.DEBUG); "
        "structlog.configure(logger_factory=structlog.stdlib.LoggerFactory())"
    )
    done = run(bound)
    assert done.stderr.count("system failed") == 1
    assert "ERROR:kvactors:" in done.stderr


def test_lines_of_json():
    setup = (
        "from kvactors.actor.log import JsonFormatter; handler = logging.StreamHandler(); "
        "handler.setFormatter(JsonFormatter()); logging.getLogger('kvactors').addHandler(handler); "
        "logging.getLogger('kvactors').setLevel(logging.INFO)"
    )
    lines = [json.loads(line) for line in run(setup).stderr.splitlines()]
    opened = next(line for line in lines if line["event"] == "cache opened")
    assert opened["level"] == "info"
    assert opened["device_bytes"] == 8 * opened["block_bytes"] == 8 * 16 * 2 * 8 * 2
    assert list(opened)[:3] == ["time", "level", "event"]
    moment = datetime.fromisoformat(opened["time"])
    assert abs(moment - datetime.now(UTC)) < timedelta(seconds=300)


def test_structlogs_settings_are_honoured_and_local_variables_are_not_logged():
    setup = (
        "import sys, structlog; "
        "structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))"
    )
    done = run(setup)
    assert "actor failed" in done.stderr
    for text in (done.stderr, run("logging.basicConfig(level=logging.DEBUG)").stderr):
        assert "987654321" not in text
        assert "tenant-secret" not in text


def test_no_module_logs_past_the_packages_logger():
    own = {"log.py"}
    tools = {"scenario", "testing", "__main__.py", "cli.py", "top.py", "settings_report.py"}
    found = [
        file.name
        for file in PACKAGE.rglob("*.py")
        if file.name not in own
        and file.relative_to(PACKAGE).parts[0] not in tools
        and re.search(
            r"structlog\.get_logger|\bexc_info\b|\bprint\(|log\.exception", file.read_text("utf-8")
        )
    ]
    assert found == []


def test_a_handler_of_the_application_that_raises_fails_no_actor(monkeypatch):
    class Broken(logging.Handler):
        def emit(self, record):
            raise ValueError("broken handler")

    standard = logging.getLogger("kvactors")
    monkeypatch.setattr(standard, "handlers", [Broken()])
    get_logger().error("event", field=1)
    with pytest.raises(ValueError, match="broken handler"):  # the handler does fail
        standard.error("event")


def test_settings_for_a_while_leave_structlog_as_it_was():
    with structlog_settings(wrapper_class=structlog.make_filtering_bound_logger(50)):
        assert structlog.is_configured()
        with structlog_settings(wrapper_class=structlog.make_filtering_bound_logger(40)):
            pass
        assert structlog.get_config()["wrapper_class"] is structlog.make_filtering_bound_logger(50)
    assert not structlog.is_configured()
