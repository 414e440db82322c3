"""An S3 server on loopback, and a proxy in front of it that counts requests and makes trouble."""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

BUCKET = "runs"
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Request:
    """One request as the proxy saw it."""

    method: str
    target: str
    headers: dict[str, str]

    @property
    def key(self) -> str:
        """The object, without the bucket; empty for a listing."""
        path = self.target.split("?", 1)[0]
        return urllib.request.unquote(path).removeprefix(f"/{BUCKET}").lstrip("/")

    @property
    def kind(self) -> str:
        """`LIST`, or the method; `PUT?` and `GET?` when there is a condition."""
        if self.method == "GET" and "list-type=" in self.target:
            return "LIST"
        condition = {"if-none-match", "if-match"} & self.headers.keys()
        return self.method + ("?" if condition else "")


@dataclass(frozen=True)
class Trouble:
    """What the proxy does with a request instead of passing it on and back.

    `status`: answers that, without asking the server. `cut`: closes without asking. `lose`: asks
    the server and closes without an answer. `tear`: gives half of the answer, then closes.
    """

    kind: str
    status: int = 0


Plan = Callable[[Request, int], Trouble | None]
"""From a request and its number since the plan was made, counted from 1."""


def status(code: int) -> Trouble:
    return Trouble("status", code)


CUT, LOSE, TEAR = Trouble("cut"), Trouble("lose"), Trouble("tear")


@dataclass
class Proxy:
    """Between client and server. `requests` has all that came in."""

    port: int
    requests: list[Request] = field(default_factory=list)
    delay_s: float = 0.0
    ignore_conditions: bool = False
    """Be a store without conditional put."""
    _plan: Plan | None = None
    _seen: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _one_put: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def trouble(self, plan: Plan) -> Iterator[None]:
        """Requests are dealt with as `plan` says."""
        self._plan, self._seen = plan, 0
        try:
            yield
        finally:
            self._plan = None

    def during(self) -> Callable[[], list[Request]]:
        """Gives what came in since this call."""
        before = len(self.requests)
        return lambda: self.requests[before:]

    def meet(self, request: Request) -> Trouble | None:
        with self._lock:
            self.requests.append(request)
            self._seen += 1
            number = self._seen
        if self.delay_s:
            time.sleep(self.delay_s)
        return self._plan(request, number) if self._plan is not None else None

    def forward(self, server: int, head: bytes, body: bytes, request: Request) -> bytes:
        # The server looks for an object and then writes it, in two steps: one put at a time.
        with (
            self._one_put if request.method == "PUT" else contextlib.nullcontext(),
            socket.create_connection(("127.0.0.1", server), _LIMIT_S) as up,
        ):
            up.sendall(head + body)
            return b"".join(iter(lambda: up.recv(1 << 20), b""))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    proxy: Proxy
    server_port: int


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            while self._one():
                pass

    def _one(self) -> bool:
        server: Any = self.server
        line = self.rfile.readline()
        if not line.strip():
            return False
        method, target, _ = line.decode().split()
        lines = list(iter(self.rfile.readline, b"\r\n"))
        headers = {
            name.lower(): value.strip()
            for name, _, value in (each.decode().partition(":") for each in lines)
        }
        if "expect" in headers:
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self.rfile.read(int(headers.get("content-length", 0)))
        request = Request(method, target, headers)
        trouble = server.proxy.meet(request)
        if trouble is not None and trouble.kind == "status":
            self.wfile.write(b"HTTP/1.1 %d Trouble\r\nContent-Length: 0\r\n\r\n" % trouble.status)
            return True
        if trouble == CUT:
            return False
        left_out = ["connection:", "expect:"]
        if server.proxy.ignore_conditions:
            left_out += ["if-none-match:", "if-match:"]
        kept = [each for each in lines if not each.decode().lower().startswith(tuple(left_out))]
        head = line + b"".join(kept) + b"Connection: close\r\n\r\n"
        answer = server.proxy.forward(server.server_port, head, body, request)
        if trouble == LOSE:
            return False
        if trouble == TEAR:
            self.wfile.write(answer[: len(answer) // 2])
            return False
        top, blank, rest = answer.partition(b"\r\n\r\n")
        self.wfile.write(re.sub(rb"(?i)\r\nconnection: *close", b"", top) + blank + rest)
        return True


@contextlib.contextmanager
def s3_server() -> Iterator[Proxy]:
    """A server with one empty bucket, and the proxy in front of it; both end with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        found = next(filter(None, (re.search(r"127\.0\.0\.1:(\d+)", s) for s in process.stderr)))
        port = int(found.group(1))
        drain = threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True)
        drain.start()
        make = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(make, timeout=_LIMIT_S):
            pass
        with _Server(("127.0.0.1", 0), _Handler) as server:
            server.server_port = port
            server.proxy = Proxy(server.server_address[1])
            serving = threading.Thread(target=server.serve_forever, args=(0.05,))
            serving.start()
            try:
                yield server.proxy
            finally:
                server.shutdown()
                serving.join()
    finally:
        process.terminate()
        process.wait(_LIMIT_S)
        drain.join(_LIMIT_S)
        process.stderr.close()
