"""`--metrics-port` of `run`: the endpoint answers during the run."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.errors import ConfigError
from kvactors.scenario.pages import Watching
from tests.cache.test_degraded import requests
from tests.observe.test_http_endpoint import call, get
from tests.support.cache import opened


async def test_the_endpoint_answers_during_the_run(unused_tcp_port_factory):
    port = unused_tcp_port_factory()
    watching = Watching(trace=None, port=port, host="127.0.0.1")
    async with opened() as cache, watching.observing(cache):
        await requests(cache, 1)
        assert b"kvactors:requests_total 1.0" in (await call(port, get("/metrics")))[2]
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


def test_options_that_do_not_go_together():
    with pytest.raises(ConfigError, match="leave out --virtual"):
        Watching(trace=None, port=1, host="127.0.0.1", virtual=True)
