"""The example server answers the OpenAI client: hits, errors, clients that leave, and SIGTERM."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import anyio
import numpy as np
import openai
import pytest

import kvactors
import kvactors.device.paddle as device
from tests.docs.pages import HOW_TO, blocks_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parents[2] / "scenarios" / "serve_tiny_gpt.py"
ROOT = Path(kvactors.__file__).parents[1]
LONG = "The quick brown fox jumps over the lazy dog. " * 10
MODEL = "tiny-gpt"
BLOCK = 16


def metric(url: str, name: str) -> float:
    """The value of a metric."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        [found] = re.findall(rf"^{re.escape(name)} (.*)$", response.read().decode(), re.MULTILINE)
    return float(found)


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def server(tmp_path):
    """The process of the server, and its address."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    log, folder = tmp_path / "log", tmp_path / "files"
    folder.mkdir()
    command = [sys.executable, str(SCRIPT), "--http", "0"]
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder)}
    with log.open("wb") as output, subprocess.Popen(command, stderr=output, env=environment) as it:
        try:
            running = re.compile(r"running on (http://\S+)")
            until(lambda: running.search(log.read_text()) is not None or it.poll() is not None)
            found = running.search(log.read_text())
            assert found, log.read_text()
            yield it, found[1], folder
        finally:
            it.kill()


def test_the_openai_client(server, capfd, tmp_path):
    """One test: the imports of a server's process take some seconds."""
    process, url, folder = server
    check_the_page(url, capfd, tmp_path)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        check_hits(client)
        check_errors(client)
        check_clients_that_leave(client, url)
        # SIGTERM: the answer that is being streamed comes to its end
        stream = client.completions.create(model=MODEL, prompt="a", max_tokens=40, stream=True)
        text = next(stream).choices[0].text
        process.send_signal(signal.SIGTERM)
        events = list(stream)
    assert len(text + "".join(event.choices[0].text for event in events)) == 40
    assert events[-1].choices[0].finish_reason == "length"
    assert process.wait(60) == -signal.SIGTERM
    assert list(folder.iterdir()) == []


def check_the_page(url, capfd, tmp_path):
    """Its lines run as pasted, and print what it shows but for the times."""
    page, base = HOW_TO / "serve_over_http.md", "http://127.0.0.1:8000"
    first, metrics, chat = blocks_of(page, "sh")[1:]
    subprocess.run(["sh", "-ec", first.replace(base, url)], cwd=tmp_path, check=True)
    found = capfd.readouterr().out
    assert len(re.findall(r"first token after \S+ s\n", found)) == 3
    subprocess.run(["sh", "-ec", (metrics + chat).replace(base, url)], check=True)
    found = capfd.readouterr().out.strip()
    shown = "".join(blocks_of(page, "text")[1:]).strip()
    changing = re.compile(r'(_sum\S+|"created":|"id":)[^,\n]*|"content":"(?:[^"\\]|\\.)*"')
    assert changing.sub(r"\1", found) == changing.sub(r"\1", shown)
    [program] = blocks_of(page)
    exec(program.replace(base, url), {})
    assert len(capfd.readouterr().out) == 16


def check_hits(client):
    """The second turn finds the blocks of the first, its answer included."""
    assert [one.id for one in client.models.list()] == [MODEL]
    turns = [{"role": "system", "content": LONG}, {"role": "user", "content": "Good morning"}]
    first = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=40, seed=1)
    answer = first.choices[0].message.content
    assert len(answer) == first.usage.completion_tokens == 40
    assert first.choices[0].finish_reason == "length"
    assert first.usage.prompt_tokens_details.cached_tokens == 0

    turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "What?"}]
    usage = {"include_usage": True}
    *events, last = client.chat.completions.create(
        model=MODEL, messages=turns, max_completion_tokens=5, stream=True, stream_options=usage
    )
    assert len("".join(event.choices[0].delta.content for event in events)) == 5
    assert [event.choices[0].finish_reason for event in events] == [None] * 5 + ["length"]
    # the last sampled token has no keys and values
    cached = (first.usage.total_tokens - 1) // BLOCK * BLOCK
    assert last.usage.prompt_tokens_details.cached_tokens == cached
    assert last.usage.completion_tokens == 5

    greedy = {"model": MODEL, "prompt": LONG, "temperature": 0, "max_tokens": 8}
    texts = [client.completions.create(**greedy).choices[0].text for _ in range(2)]
    assert texts[0] == texts[1], "with the cache as without"


def check_errors(client):
    """In OpenAI's format, which the client turns into its exceptions."""
    with pytest.raises(openai.NotFoundError) as found:
        client.completions.create(model="gpt-9", prompt="a")
    assert found.value.code == "model_not_found"
    assert "no model 'gpt-9', only 'tiny-gpt'" in found.value.message
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model=MODEL, prompt="a", max_tokens=4096)
    assert found.value.code == "context_length_exceeded"
    for wrong, text in (
        ({"prompt": "a", "stop": "b"}, "unknown field `stop`"),
        ({"prompt": ""}, "at `$.prompt`"),
        ({"prompt": "a", "max_tokens": 0}, "at `$.max_tokens`"),
    ):
        with pytest.raises(openai.BadRequestError, match=re.escape(text)) as found:
            client.completions.create(model=MODEL, **wrong)
        assert found.value.type == "invalid_request_error"


def check_clients_that_leave(client, url):
    """With an answer half streamed, and before the first token: their blocks are given back."""
    stream = client.completions.create(model=MODEL, prompt="b", max_tokens=4000, stream=True)
    next(stream)
    assert metric(url, "kvactors:num_requests_running") == 1
    stream.close()
    until(lambda: metric(url, "kvactors:num_requests_running") == 0)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model=MODEL, prompt="c", max_tokens=4000, timeout=1)
    until(lambda: metric(url, "kvactors:num_requests_running") == 0)
    assert metric(url, "kvactors:requests_abandoned_total") == 2


# -- in process


@pytest.fixture
def http_api(monkeypatch):
    """The module of the application."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("tiny_gpt.http_api")


class FakeServer:
    """Samples some tokens, then returns or goes on without an end."""

    def __init__(self, tokens: int, endless: bool = False) -> None:
        self.tokens, self.endless = tokens, endless

    async def serve(self, answer):
        answer.cached_tokens = 0
        for _ in range(self.tokens):
            answer.tokens.append(answer.sample(np.zeros(300)))
        if self.endless:
            await anyio.sleep_forever()


class Client:
    """One call of the application. parts: of its body. then: what follows them."""

    def __init__(self, app, *parts, length=None, then=None, path="completions"):
        headers = [(b"content-length", b"%d" % length)] if length is not None else []
        more = [True] * (len(parts) - 1) + [then is not None]
        self.received = [
            {"type": "http.request", "body": part, "more_body": on}
            for part, on in zip(parts, more, strict=False)
        ]
        if then == "leave":
            self.received.append({"type": "http.disconnect"})
        self.sent, self.began = [], asyncio.Event()
        scope = {"type": "http", "method": "POST", "path": f"/v1/{path}", "headers": headers}
        self.task = asyncio.create_task(
            app(scope | {"query_string": b""}, self._receive, self._send)
        )

    async def _receive(self):
        if not self.received:
            await anyio.sleep_forever()
        return self.received.pop(0)

    async def _send(self, message):
        self.sent.append(message)
        self.began.set()

    async def answer(self):
        """Status, headers and body."""
        await self.task
        start, *parts = self.sent
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], headers, b"".join(part["body"] for part in parts).decode()


@pytest.mark.parametrize(
    ("parts", "sent", "status", "text"),
    [
        ([], {"length": 2**20 + 1}, 413, "larger than 1048576 bytes"),
        ([b" " * 2**20, b" "], {"then": "wait"}, 413, "larger than 1048576 bytes"),
        ([b"{"], {"length": 99, "then": "leave"}, 400, "the client left"),
        ([b"{"], {"length": 99, "then": "wait"}, 408, "did not arrive within 0.1 s"),
        ([b"[" * 100_000], {}, 400, "recursion depth"),
        ([b'{"model": "tiny-gpt", "prompt": null}'], {}, 400, "required field `prompt`"),
    ],
)
async def test_a_body_is_refused(http_api, monkeypatch, parts, sent, status, text):
    monkeypatch.setattr(http_api, "BODY_TIMEOUT_S", 0.1)
    client = Client(http_api.Api(None).app, *parts, **sent)
    found, headers, body = await client.answer()
    assert found == status
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert text in error["message"]
    assert headers.get("connection") == ("close" if status == 408 else None)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("completions", {"prompt": "a", "suffix": None}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a", "name": None}]}),
    ],
)
async def test_null_is_not_given(http_api, path, prompt):
    api = http_api.Api(None)
    api.server = FakeServer(16)
    empty = dict.fromkeys(("max_tokens", "temperature", "seed", "n", "stream", "stream_options"))
    body = json.dumps({"model": MODEL} | empty | prompt).encode()
    status, _, answer = await Client(api.app, body, path=path).answer()
    assert (status, json.loads(answer)["usage"]["completion_tokens"]) == (200, 16)


@pytest.mark.parametrize(("tokens", "status"), [(0, 503), (2, 200)])
async def test_the_server_stops(http_api, tokens, status):
    """Cancelled by it, a call ends with an error: as its answer, or as an event of its stream."""
    api = http_api.Api(None)
    api.server = FakeServer(tokens, endless=True)
    client = Client(api.app, b'{"model": "tiny-gpt", "prompt": "a", "stream": true}')
    if tokens:
        await client.began.wait()
    else:
        while not api.answers:
            await anyio.lowlevel.checkpoint()
    client.task.cancel()
    found, headers, body = await client.answer()
    assert found == status
    assert not api.answers
    if tokens:
        *events, error, done, end = body.split("\n\n")
        assert (len(events), done, end) == (tokens, "data: [DONE]", "")
        body = error.removeprefix("data: ")
    else:
        assert headers["retry-after"] == "5"
    assert "the server stopped" in json.loads(body)["error"]["message"]


async def test_no_device_blocks(http_api):
    class Full:
        async def acquire(self, *args, **kwargs):
            await anyio.sleep_forever()

    api = http_api.Api(None)
    server = importlib.import_module("tiny_gpt.server")
    api.server = server.Server(Full(), None, None, server.Totals(), deadline=0.01)
    async with api.server.serving():
        client = Client(api.app, b'{"model": "tiny-gpt", "prompt": "a"}')
        status, headers, body = await client.answer()
    assert (status, headers["retry-after"]) == (503, "5")
    text = "TimeoutError: no device blocks within 0.01 s, running requests: 0"
    assert json.loads(body)["error"]["message"] == text


def test_without_paddle(http_api, monkeypatch):
    """The extra that is named is the script's, which has Paddle and the others."""
    for name in [name for name in sys.modules if name.startswith("tiny_gpt")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "paddle", None)
    monkeypatch.setattr(device, "import_paddle", device.import_paddle.__wrapped__)
    monkeypatch.setattr(device, "installed", str)
    with pytest.raises(SystemExit, match="needs the extra `example` of kvactors: import of paddle"):
        runpy.run_path(str(SCRIPT))
