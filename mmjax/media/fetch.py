# SPDX-License-Identifier: Apache-2.0
"""Bytes behind http and https URLs, fetched from public hosts only.

A server that opens URLs of strangers must not become their way into its own network. So a host has to resolve to
globally routable addresses alone, the connection goes to one of the very addresses that were checked, and every
redirect is checked anew.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

from mmjax.errors import MediaError
from mmjax.media.options import MediaOptions

MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_PIECE = 1 << 20
_URL_CHARACTERS = "/%:=&?~#+!$,;'@()*[]"  # kept as they are; anything else is percent-encoded
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # IPv6 addresses that gateways turn into IPv4 ones


def fetch(url: str, options: MediaOptions, item: int | None = None) -> bytes:
    """Body of `url`. Follows up to five redirects; time and size are limited by `options`.

    Raises MediaError: not http(s), a host with a private address, no answer in time, a status other than 200, a body
    over `max_bytes`.
    """
    deadline = time.monotonic() + options.timeout
    for _ in range(MAX_REDIRECTS + 1):
        target = _Target.parse(url, item)
        try:
            answer = _request(target, options, deadline, item)
        except (OSError, ValueError, http.client.HTTPException) as error:
            late = isinstance(error, TimeoutError) or time.monotonic() >= deadline
            reason = f"no answer within {options.timeout:g} seconds" if late else error or type(error).__name__
            raise MediaError(f"{_short(url)} can't be fetched: {reason}", item=item) from error
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer)
    raise MediaError(f"more than {MAX_REDIRECTS} redirects, the last to {_short(url)}", item=item)


def public_addresses(host: str, port: int, options: MediaOptions, item: int | None = None) -> list[str]:
    """IP addresses of `host`. Raises MediaError if there are none or, unless allowed, if one of them is not public."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise MediaError(f"host {host} can't be resolved: {error}", item=item) from error
    addresses = list(dict.fromkeys(entry[4][0] for entry in found))
    if not options.allow_private_hosts:
        for address in addresses:
            if not _is_public(address):
                raise MediaError(
                    f"host {host} resolves to {address}, which is not a public address; "
                    "set allow_private_hosts to fetch from it",
                    item=item,
                )
    return addresses


@dataclass(frozen=True)
class _Target:
    url: str
    secure: bool
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str, item: int | None) -> _Target:
        try:
            parts = urlsplit(url)
            secure = parts.scheme == "https"
            port = parts.port or (443 if secure else 80)
            host = (parts.hostname or "").encode("idna").decode()
        except ValueError as error:
            raise MediaError(f"{_short(url)} is not a URL: {error}", item=item) from error
        if parts.scheme not in ("http", "https") or not host:
            raise MediaError(f"{_short(url)} is not an http or https URL with a host", item=item)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(url, secure, host, port, quote(path, safe=_URL_CHARACTERS))


def _request(target: _Target, options: MediaOptions, deadline: float, item: int | None) -> bytes | str:
    """One request: the body, or where a redirect points."""
    connection = _connect(target, options, deadline, item)
    # Socket timeouts start again with every byte; this one cuts off servers that answer by drops.
    watchdog = threading.Timer(_left(deadline), _cut, (connection.sock,))
    watchdog.daemon = True
    watchdog.start()
    try:
        headers = {"User-Agent": "mmjax", "Accept": "*/*", "Accept-Encoding": "identity"}
        connection.request("GET", target.path, headers=headers)
        response = connection.getresponse()
        if response.status in _REDIRECTS and response.getheader("Location"):
            return response.getheader("Location")
        if response.status != 200:
            raise MediaError(f"{_short(target.url)} answered {response.status} {response.reason}", item=item)
        body = _body(response, target, options, item)
        _left(deadline)  # a body without a length looks complete when the watchdog cuts it
        return body
    finally:
        watchdog.cancel()
        connection.close()


def _connect(target: _Target, options: MediaOptions, deadline: float, item: int | None) -> http.client.HTTPConnection:
    """A connection to one of the checked addresses of the host, whose name still goes into TLS and headers."""
    failure: OSError | None = None
    for address in public_addresses(target.host, target.port, options, item):
        try:
            sock = socket.create_connection((address, target.port), timeout=_left(deadline))
            if not target.secure:
                connection = http.client.HTTPConnection(target.host, target.port)
            else:
                context = ssl.create_default_context()
                connection = http.client.HTTPSConnection(target.host, target.port, context=context)
                sock = context.wrap_socket(sock, server_hostname=target.host)
            connection.sock = sock
            return connection
        except OSError as error:
            failure = error
    raise failure or OSError(f"host {target.host} has no address")


def _cut(sock: socket.socket) -> None:
    """Ends whatever waits on `sock`. TLS is passed over: its shutdown would answer the server first."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _body(response: http.client.HTTPResponse, target: _Target, options: MediaOptions, item: int | None) -> bytes:
    claimed, limit = response.length, options.max_bytes
    pieces, size = [], 0
    while size <= limit and (claimed is None or claimed <= limit):
        piece = response.read1(_PIECE)
        if not piece:
            if claimed is not None and size < claimed:
                raise OSError(f"it ended after {size} of {claimed} bytes")
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
    raise MediaError(
        f"{_short(target.url)} has {claimed or f'at least {size}'} bytes, more than the limit of {limit}", item=item
    )


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.split("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner:
            return _is_public(str(inner))
    return ip.is_global and not ip.is_multicast


def _short(url: str) -> str:
    return url if len(url) <= 200 else f"{url[:200]}..."
