# SPDX-License-Identifier: Apache-2.0
"""Encoded media: from a path, URL, data URL or bytes to the bytes of one file."""

from __future__ import annotations

import base64
import binascii
import os
import re
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from mmjax.errors import MediaError
from mmjax.media.fetch import fetch
from mmjax.media.options import MediaOptions

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


def is_encoded(value: object) -> bool:
    """Whether `read_bytes` takes it."""
    return isinstance(value, str | os.PathLike | bytes | bytearray | memoryview)


def read_bytes(value: object, options: MediaOptions, item: int | None = None) -> bytes:
    """Bytes of the file that `value` is, names or holds: bytes, a path, an http, https, file or data URL.

    Raises MediaError: nothing there, not allowed, empty, or more than `options.max_bytes`.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
    elif isinstance(value, str | os.PathLike):
        data = _read_named(value, options, item)
    else:
        raise MediaError(f"expected a path, URL or bytes, got {type(value).__name__}", item=item)
    if not data:
        raise MediaError("0 bytes: the file is empty", item=item)
    if len(data) > options.max_bytes:
        raise MediaError(f"{len(data)} bytes, more than the limit of {options.max_bytes}", item=item)
    return data


def _read_named(value: str | os.PathLike, options: MediaOptions, item: int | None) -> bytes:
    name = os.fspath(value)
    scheme = _SCHEME.match(name) if isinstance(value, str) else None
    if scheme is None:
        return _read_file(Path(name), options, item)
    kind = scheme[0][:-1].lower()
    if kind == "data":
        return _decode_data_url(name, item)
    if kind == "file":
        parts = urlsplit(name)
        if parts.netloc not in ("", "localhost"):
            raise MediaError(f"file URL with a host: {parts.netloc}", item=item)
        return _read_file(Path(unquote(parts.path)), options, item)
    if kind in ("http", "https"):
        return fetch(name, options, item)
    raise MediaError(f"URL scheme {kind} is not supported; use http, https, file or data", item=item)


def _read_file(path: Path, options: MediaOptions, item: int | None) -> bytes:
    if not options.allowed_local_media:
        raise MediaError("local files are not allowed here (allowed_local_media)", item=item)
    try:
        with path.open("rb") as file:
            return file.read(options.max_bytes + 1)  # one more than allowed shows an oversized file
    except (OSError, ValueError) as error:
        raise MediaError(f"{str(path)[:200]} can't be read: {error}", item=item) from error


def _decode_data_url(url: str, item: int | None) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise MediaError("a data URL must be base64: data:<type>;base64,<data>", item=item)
    raw = unquote_to_bytes(payload) if "%" in payload else payload.encode("ascii", "replace")
    try:
        return base64.b64decode(b"".join(raw.split()), validate=True)
    except binascii.Error as error:
        raise MediaError(f"data URL with invalid base64: {error}", item=item) from error
