# SPDX-License-Identifier: Apache-2.0
"""Claim: URLs are fetched from public hosts only, within limits of time, size and redirects, or fail with a reason."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time

import pytest

from mmjax.errors import MediaError
from mmjax.media import MediaOptions
from mmjax.media.fetch import fetch, public_addresses

OPEN = MediaOptions(allow_private_hosts=True, timeout=5.0)


class Handler(http.server.BaseHTTPRequestHandler):
    """The first part of a path says what happens: /redirect/3 redirects three times, and so on."""

    def do_GET(self):
        _, kind, *rest = self.path.split("/")
        if kind == "redirect" and int(rest[0]) > 0:
            self._answer(302, b"", Location=f"/redirect/{int(rest[0]) - 1}")
        elif kind == "away":
            self._answer(301, b"", Location="http://localhost.invalid/")
        elif kind == "to-file":
            self._answer(302, b"", Location="file:///etc/hostname")
        elif kind == "status":
            self._answer(int(rest[0]), b"no")
        elif kind == "slow":
            time.sleep(3)
        elif kind == "drip":
            self.send_response(200)
            self.end_headers()
            for _ in range(40):
                self.wfile.write(b".")
                time.sleep(0.1)
        elif kind == "large":
            self._answer(200, b"x" * 5000)
        elif kind == "unbounded":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * 5000)
        elif kind == "lies":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"short")
        else:
            self._answer(200, self.path.encode())

    def _answer(self, status: int, body: bytes, **headers: str):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

    def handle(self):
        with contextlib.suppress(OSError):  # the client gave up, as it should
            super().handle()


@pytest.fixture(scope="module")
def server():
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def test_body(server):
    assert fetch(f"{server}/a?b=c", OPEN) == b"/a?b=c"
    assert fetch(f"{server}/with space/ä", OPEN) == b"/with%20space/%C3%A4"


def test_redirects(server):
    assert fetch(f"{server}/redirect/5", OPEN) == b"/redirect/0"
    with pytest.raises(MediaError, match="item 3: more than 5 redirects"):
        fetch(f"{server}/redirect/6", OPEN, 3)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("status/404", {}, "answered 404"),
        ("status/500", {}, "answered 500"),
        ("status/204", {}, "answered 204"),
        ("large", {"max_bytes": 4999}, "5000 bytes, more than the limit of 4999"),
        ("unbounded", {"max_bytes": 4999}, "at least 5000 bytes, more than the limit of 4999"),
        ("lies", {}, "ended after 5 of 100 bytes"),
        ("slow", {"timeout": 0.3}, "no answer within 0.3 seconds"),
        ("drip", {"timeout": 0.4}, "no answer within 0.4 seconds"),
        ("to-file", {}, "not an http or https URL"),
    ],
)
def test_failures_name_the_item(server, path, options, message):
    started = time.monotonic()
    with pytest.raises(MediaError, match=message) as caught:
        fetch(f"{server}/{path}", MediaOptions(allow_private_hosts=True, **options), 4)
    assert caught.value.item == 4
    assert time.monotonic() - started < 2.5


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(MediaError, match="can't be fetched"):
        fetch(f"http://127.0.0.1:{port}/", OPEN)


@pytest.mark.parametrize("url", ["http://", "http://host:99999/", "http://[::1/", "gopher://host/", "//host/x"])
def test_not_a_url(url):
    with pytest.raises(MediaError, match="not a"):
        fetch(url, OPEN)


def test_private_hosts_are_refused_before_connecting(server):
    with pytest.raises(MediaError, match=r"127\.0\.0\.1, which is not a public address"):
        fetch(f"{server}/a", MediaOptions())


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
        "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::a00:1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(monkeypatch, address):
    entry = (socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))
    public = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 80))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [public, entry])
    with pytest.raises(MediaError, match="not a public address"):
        public_addresses("host", 80, MediaOptions())
    assert public_addresses("host", 80, OPEN) == ["93.184.216.34", address]


def test_every_hop_is_checked(server, monkeypatch):
    """A public host that redirects into the private network."""
    real = socket.getaddrinfo
    asked = []

    def resolve(host, *args, **kwargs):
        asked.append(host)
        if host == "localhost.invalid":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 80))]
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr("mmjax.media.fetch._is_public", lambda address: address == "127.0.0.1")
    with pytest.raises(MediaError, match=r"localhost\.invalid resolves to 10\.0\.0\.1"):
        fetch(f"{server}/away", MediaOptions())
    assert "localhost.invalid" in asked
