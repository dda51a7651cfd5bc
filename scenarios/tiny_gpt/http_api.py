"""OpenAI's completions and chat completions over HTTP, answered by the loop of `tiny_gpt.server`.

A token is a byte of UTF-8, or the beginning or end of a message. The weights are random, so
an answer is random printable ASCII: sent back in the next turn it has the tokens that were sampled.
The cache is open while the application runs (`lifespan`). A client that leaves cancels its
request, and the lease returns its blocks.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Annotated, Any, Literal

import anyio
import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import kvactors
from kvactors.observe.prometheus import CacheMetrics
from tiny_gpt.model import SIZES
from tiny_gpt.server import Request, Server

MODEL = "tiny-gpt"
PRINTABLE = range(32, 127)
"""Tokens that are sampled."""
BEGIN = {"system": 256, "developer": 257, "user": 258, "assistant": 259}
END = 260
BODY_BYTES = 1 << 20
"""Largest body of a call."""
BODY_TIMEOUT_S = 10.0
"""Time limit of reading a body."""
RETRY_AFTER_S = 5
"""Seconds after which a client of a busy server may try again."""

OpenServer = Callable[
    [Callable[[str, int, np.ndarray], int]],
    AbstractAsyncContextManager[tuple[kvactors.KVCache, Server]],
]
"""Opens a cache, and a server on it that samples with a function (request, position, logits)."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: whether the last event has the counts of tokens."""

    include_usage: bool = False


class Call(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of both calls. Others are refused: they would have no effect."""

    model: str
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=0)] | None = None
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)


class Completion(Call):
    """`POST /v1/completions`."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)]

    def tokens(self) -> list[int]:
        """The prompt."""
        return list(self.prompt.encode())

    def head(self, event: bool) -> dict[str, Any]:
        """The kind of an answer or of its events."""
        return {"object": "text_completion"}

    def choice(self, text: str, event: bool) -> dict[str, Any]:
        """Text of an answer or of an event."""
        return {"text": text, "logprobs": None}


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class ChatCompletion(Call):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        self.max_tokens = self.max_completion_tokens or self.max_tokens

    def tokens(self) -> list[int]:
        """The messages, and the beginning of the answer."""
        parts = [[BEGIN[one.role], *one.content.encode(), END] for one in self.messages]
        return [token for part in parts for token in part] + [BEGIN["assistant"]]

    def head(self, event: bool) -> dict[str, Any]:
        """See `Completion`."""
        return {"object": "chat.completion.chunk" if event else "chat.completion"}

    def choice(self, text: str, event: bool) -> dict[str, Any]:
        """See `Completion`."""
        return {"delta" if event else "message": {"role": "assistant", "content": text}}


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def refused(
    message: str,
    status: int = 400,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The answer to a call that cannot be served as it is."""
    return JSONResponse(error_body(message, "invalid_request_error", code), status, headers)


def failed(error: Exception) -> JSONResponse:
    """The answer to a call that failed. 503 for a server without blocks or time: try again."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    busy = isinstance(error, kvactors.NoRoom | TimeoutError)
    text = f"{type(error).__name__}: {error}"
    headers = {"Retry-After": str(RETRY_AFTER_S)} if busy else None
    return JSONResponse(error_body(text, "server_error"), 503 if busy else 500, headers)


async def body_of(request: HttpRequest) -> bytes:
    """The body of a call.

    Raises:
        HTTPException: The body is too large (413), late (408) or incomplete (400).
    """
    too_large = HTTPException(413, f"the body is larger than {BODY_BYTES} bytes")
    if int(request.headers.get("content-length", 0)) > BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        with anyio.fail_after(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > BODY_BYTES:
                    raise too_large
    except TimeoutError:
        text = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise HTTPException(408, text, {"Connection": "close"}) from None
    except ClientDisconnect:
        raise HTTPException(400, "the client left before the end of the body") from None
    return bytes(body)


def given(value: Any) -> Any:
    """JSON without the fields that are null: many clients send optional fields so."""
    if isinstance(value, dict):
        return {name: given(one) for name, one in value.items() if one is not None}
    return [given(one) for one in value] if isinstance(value, list) else value


class Answer(Request):
    """The request of a client. pieces: each sampled token, then None or the error response."""

    def __init__(self, call: Completion | ChatCompletion, prompt: list[int]) -> None:
        super().__init__(f"cmpl-{uuid.uuid4().hex}", prompt, call.max_tokens)
        self.call, self.created = call, int(time.time())
        self.began, self.first_token_s = time.monotonic(), 0.0
        self.pieces: asyncio.Queue[int | JSONResponse | None] = asyncio.Queue()
        self._rng = np.random.default_rng(call.seed)

    def sample(self, logits: np.ndarray) -> int:
        """A token by the logits and the temperature."""
        scores = logits[PRINTABLE.start : PRINTABLE.stop]
        if self.call.temperature:
            scores = scores / self.call.temperature + self._rng.gumbel(size=scores.shape)
        token = PRINTABLE[int(np.argmax(scores))]
        self.pieces.put_nowait(token)
        return token

    def body(
        self, text: str | None, finish: str | None = None, *, event: bool, usage: bool
    ) -> dict[str, Any]:
        """The answer, or an event of it. text: None for an event of the counts alone."""
        own = {"id": self.name, "created": self.created, "model": MODEL, "choices": []}
        body = self.call.head(event) | own
        if text is not None:
            choice = {"index": 0, "finish_reason": finish} | self.call.choice(text, event)
            body["choices"].append(choice)
        if usage:
            prompt, total = self.start, len(self.tokens)
            body["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": total - prompt,
                "total_tokens": total,
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            }
        return body

    async def response(self) -> Response:
        """As soon as the status is known: with the first token if it is streamed."""
        first = await self.pieces.get()
        self.first_token_s = time.monotonic() - self.began
        if self.call.stream and isinstance(first, int):
            return StreamingResponse(self._events(first), media_type="text/event-stream")
        piece, text = first, ""
        while isinstance(piece, int):
            text += chr(piece)
            piece = await self.pieces.get()
        if piece is not None:
            return piece
        return JSONResponse(self.body(text, "length", event=False, usage=True))

    async def _events(self, piece: int | JSONResponse | None) -> AsyncIterator[bytes]:
        """Server-sent events."""

        def event(text: str | None, finish: str | None = None, *, usage: bool = False) -> bytes:
            body = self.body(text, finish, event=True, usage=usage)
            return b"data: %b\n\n" % msgspec.json.encode(body)

        while isinstance(piece, int):
            yield event(chr(piece))
            piece = await self.pieces.get()
        if piece is not None:  # the status was sent with the first token
            yield b"data: %b\n\n" % bytes(piece.body)
        else:
            yield event("", "length")
            if self.call.stream_options.include_usage:
                yield event(None, usage=True)
        yield b"data: [DONE]\n\n"


class Api:
    """The application: `app`."""

    cache: kvactors.KVCache
    server: Server

    def __init__(self, opened: OpenServer) -> None:
        self._opened = opened
        self.answers: dict[str, Answer] = {}
        self.registry = CollectorRegistry()
        self.first_token = Histogram(
            "tiny_gpt_time_to_first_token_seconds",
            "Time to the first token of requests with and without cached tokens.",
            ["cached"],
            registry=self.registry,
        )
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
                Route("/health", self.health),
            ],
            exception_handlers={
                HTTPException: lambda _, error: refused(
                    error.detail, error.status_code, headers=error.headers
                ),
                Exception: lambda _, error: failed(error),
            },
            lifespan=self.lifespan,
        )

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """The cache is open from the start of the server to its end, after the last answer."""
        sample = lambda name, _, logits: self.answers[name].sample(logits)  # noqa: E731
        async with self._opened(sample) as (self.cache, self.server):
            metrics = CacheMetrics(self.cache)
            self.registry.register(metrics)
            yield
            metrics.close()

    # -- routes

    async def completions(self, request: HttpRequest) -> Any:
        """`POST /v1/completions`."""
        return self._generation(await body_of(request), Completion)

    async def chat(self, request: HttpRequest) -> Any:
        """`POST /v1/chat/completions`."""
        return self._generation(await body_of(request), ChatCompletion)

    async def models(self, request: HttpRequest) -> Response:
        """`GET /v1/models`."""
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "kvactors"}
        return JSONResponse({"object": "list", "data": [model]})

    def metrics(self, request: HttpRequest) -> Response:
        """`GET /metrics`, in a thread: a scrape reads the cache in slices."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def health(self, request: HttpRequest) -> Response:
        """`GET /health`: 503 if the cache has failed."""
        found = self.cache.health()
        return JSONResponse(found.as_dict(), 503 if found.status == "failed" else 200)

    # -- generation

    def _generation(self, body: bytes, kind: type[Completion | ChatCompletion]) -> Any:
        """The response to a call: an ASGI application that serves its request."""
        try:
            call = msgspec.convert(given(msgspec.json.decode(body)), kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return refused(str(error))
        if call.model != MODEL:
            text = f"there is no model {call.model!r}, only {MODEL!r}"
            return refused(text, 404, "model_not_found")
        answer = Answer(call, call.tokens())
        if answer.goal > SIZES.positions:
            text = f"{answer.start} tokens of prompt and {call.max_tokens} new ones are more than "
            return refused(f"{text}{SIZES.positions}", code="context_length_exceeded")

        async def work(scope: Scope, receive: Receive, send: Send) -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(self._serve, answer)
                group.start_soon(cancel_at_disconnect, receive, group.cancel_scope)
                response = await answer.response()
                if response.status_code == 200:
                    cached = "some" if answer.cached_tokens else "none"
                    self.first_token.labels(cached).observe(answer.first_token_s)
                await response(scope, receive, send)
                group.cancel_scope.cancel()

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            working = asyncio.create_task(work(scope, receive, send))
            try:
                await asyncio.shield(working)
            except asyncio.CancelledError:  # the server stops: the client gets the reason
                stopped = TimeoutError("the server stopped before the end of the answer")
                answer.pieces.put_nowait(failed(stopped))
                with suppress(asyncio.CancelledError):  # a client that does not read
                    await working

        return respond

    async def _serve(self, answer: Answer) -> None:
        """Serve a request until its last token, an error, or the end of the client."""
        self.answers[answer.name] = answer
        try:
            await self.server.serve(answer)
            answer.pieces.put_nowait(None)
        except Exception as error:
            answer.pieces.put_nowait(failed(error))
        finally:
            del self.answers[answer.name]


async def cancel_at_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel the work for a client that has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
