"""A real S3 server (moto's) in its own process, whose answers can be made to fail.

`python -m tests.support.s3 PORT` serves it. A request for `/fault/KIND` sets what happens to every
further one: none, 503 (refused), once (the next one is refused), 403 (credentials that are not
valid any more), slow (answers a second late), flip (a bit of every object that is read differs),
late (an object is written two seconds after the request came)."""

from __future__ import annotations

import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.masters import Master

BUCKET = "blocks"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


class S3Server(Master):
    """The process. Its objects end with it, and `start` makes the bucket again."""

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}"

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.support.s3", str(self.port)]

    def start(self) -> None:
        super().start()
        self.request(BUCKET, "PUT")

    def request(self, path: str, method: str = "GET") -> None:
        request = urllib.request.Request(f"{self.endpoint}/{path}", method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    def fault(self, kind: str) -> None:
        self.request(f"fault/{kind}")

    def storage(self, prefix: str = "p", **more: Any) -> dict[str, Any]:
        """The table `storage` of a cache."""
        url = f"s3://{BUCKET}/{prefix}"
        place = {"backend": "object", "url": url, "endpoint": self.endpoint, "region": "us-east-1"}
        return {**place, **more}


@contextmanager
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    server.start()
    try:
        yield server
    finally:
        server.kill()


# -- in the process


class Faulty:
    """A WSGI application whose answers fail as they are told to."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.application = application
        self.kind = "none"

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path.startswith("/fault/"):
            self.kind = path.rpartition("/")[2]
            start("200 OK", [])
            return [b""]
        kind = self.kind
        if kind in ("503", "once"):
            self.kind = "none" if kind == "once" else kind
            start("503 Slow Down", [])
            return [b"<Error><Code>SlowDown</Code></Error>"]
        if kind == "403":
            start("403 Forbidden", [])
            return [b"<Error><Code>ExpiredToken</Code></Error>"]
        if kind == "slow":
            time.sleep(1.0)
        if kind == "late" and method == "PUT":
            time.sleep(2.0)
        body = self.application(environ, start)
        if kind == "flip" and method == "GET":
            data = bytearray(b"".join(body))
            if data:
                data[len(data) // 2] ^= 1
            return [bytes(data)]
        return body


def main() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    application = Faulty(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True)


if __name__ == "__main__":
    main()
