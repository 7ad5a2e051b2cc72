# SPDX-License-Identifier: Apache-2.0
"""Rules of the encode step: outputs are all checked before any is used, and each failure has its requests to blame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mmjax.encoder.plan import EncodeItem
from mmjax.encoder.state import CacheKey
from mmjax.errors import RequestError


class MultimodalEncoderRequestError(RequestError):
    """The encode step can't go on for `request_ids`; without ids, for every request whose items it encodes."""

    def __init__(self, message: str, request_ids: Iterable[str] = (), item: int | None = None):
        self.request_ids = tuple(request_ids)
        super().__init__(message, request_id=self.request_ids[0] if len(self.request_ids) == 1 else None, item=item)


class MultimodalEncoderContractError(MultimodalEncoderRequestError):
    """Preparing or encoding a batch broke a contract between family and engine: its producers are to blame."""


class MultimodalEncoderOutputError(RequestError):
    """Some outputs have a wrong shape or dtype: every request that waits for one of `keys` is to blame."""

    def __init__(self, message: str, keys: Iterable[CacheKey]):
        super().__init__(message)
        self.keys = tuple(keys)


def check_outputs(items: Sequence[EncodeItem], outputs: Sequence[Any], width: int, dtype: str) -> None:
    """Checks one output per item, each with `shape` (rows of its item, `width`) and `dtype`, before any is committed.

    Raises:
      MultimodalEncoderContractError: not one output per item.
      MultimodalEncoderOutputError: outputs of a wrong type, rank, size or dtype; it names them all.
    """
    if len(outputs) != len(items):
        raise MultimodalEncoderContractError(
            f"the encoder must give one output per item: {len(items)} items, {len(outputs)} outputs",
            {item.request_id: None for item in items},
        )
    wrong, keys = [], []
    for item, output in zip(items, outputs, strict=True):
        want = f"{(item.load.rows, width)} {dtype}"
        got = _describe(output)
        if got != want:
            wrong.append(f"item {item.item} of request {item.request_id} must produce {want}, got {got}")
            keys.append(item.key)
    if wrong:
        raise MultimodalEncoderOutputError("; ".join(wrong), keys)


def blamed_requests(
    error: Exception, items: Sequence[EncodeItem], owners: Callable[[CacheKey], Iterable[str]]
) -> list[str]:
    """Requests that fail because of `error`, without duplicates; re-raises an error that is nobody's fault.

    Args:
      items: what the failed step was to encode.
      owners: the live requests that hold a reference to a key, the producer and those that share its item.
    """
    if isinstance(error, MultimodalEncoderOutputError):
        blamed = [request_id for key in error.keys for request_id in owners(key)]
    elif isinstance(error, MultimodalEncoderRequestError):
        blamed = list(error.request_ids) or [item.request_id for item in items]
    else:
        raise error
    return list(dict.fromkeys(blamed))


def _describe(output: Any) -> str:
    if not hasattr(output, "shape") or not hasattr(output, "dtype"):
        return type(output).__name__
    return f"{tuple(output.shape)} {output.dtype}"
