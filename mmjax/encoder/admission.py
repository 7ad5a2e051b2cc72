# SPDX-License-Identifier: Apache-2.0
"""Whether a request's items can ever be encoded. Pure functions, so that the caller's own thread can ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmjax.encoder.buckets import BucketLadder
from mmjax.encoder.budgets import EncoderBudgets, Readiness
from mmjax.encoder.state import EncoderItem
from mmjax.errors import RequestError
from mmjax.inputs.items import Modality
from mmjax.inputs.params import MULTIMODAL_ENCODER_ITEM_METADATA_KEY, get_encoder_item_metadata


def check_payload(
    request_id: str,
    multimodal_data: Mapping[str, Any] | None,
    items: Sequence[EncoderItem],
    multimodal_lengths: Sequence[int] = (),
) -> bool:
    """Whether a request brings media for the encoder: True with raw media, False with none or with given embeddings.

    Args:
      multimodal_data: the request's payload, with item metadata and `multimodal_embedding_lengths`.
      items: what the scheduler is going to encode; it must agree with the payload's metadata.
      multimodal_lengths: prompt positions of each item.

    Raises:
      TypeError: the payload is not a dict, or its metadata are of another type.
      RequestError: raw media without metadata, or lengths that disagree.
    """
    if multimodal_data is None:
        return False
    metadata = get_encoder_item_metadata(multimodal_data)
    raw = any(isinstance(multimodal_data.get(modality), dict) for modality in Modality)
    if not raw or multimodal_data.get("multimodal_embedding") is not None:
        return False

    def refuse(what: str) -> RequestError:
        return RequestError(f"Multimodal request {request_id} {what}", request_id=request_id)

    if metadata is None or not metadata.item_refs:
        raise refuse(f"brings raw media, which requires {MULTIMODAL_ENCODER_ITEM_METADATA_KEY} with at least one item")
    metadata.validate()
    rows = list(metadata.output_embedding_lengths)
    costs = list(zip(metadata.encoder_token_lengths, rows, strict=True))
    scheduled = [(item.load.tokens, item.load.rows) for item in items]
    if costs != scheduled:
        raise refuse(f"has (tokens, rows) {costs} in its metadata, but its items have {scheduled}")
    given = multimodal_data.get("multimodal_embedding_lengths")
    if given is None or list(given) != rows:
        raise refuse(f"has output lengths {rows}, but multimodal_embedding_lengths is {given}")
    lengths = list(multimodal_lengths)
    if len(lengths) != len(rows) or any(r > length for r, length in zip(rows, lengths, strict=True)):
        raise refuse(f"has output lengths {rows}, which do not fit multimodal_lengths {lengths}")
    return True


def check_limits(request_id: str, items: Sequence[EncoderItem], budgets: EncoderBudgets, ladder: BucketLadder) -> None:
    """Refuses what no step could ever encode; RequestError names the item where it is one item's fault."""

    def refuse(what: str, item: int | None = None) -> RequestError:
        return RequestError(f"Multimodal request {request_id} {what}", request_id=request_id, item=item)

    for place, item in enumerate(items):
        number = place if item.number is None else item.number
        if item.load.tokens > budgets.max_num_tokens:
            raise refuse(
                f"needs {item.load.tokens} encoder tokens for item {number}, "
                f"exceeding the effective startup maximum {budgets.max_num_tokens}",
                number,
            )
        if item.load.rows > budgets.capacity_rows:
            wanted = f"needs {item.load.rows} rows for item {number}"
            raise refuse(f"{wanted}, the row pool has {budgets.capacity_rows}", number)
        if item.load.tokens and ladder.fit(item.load) is None:
            top = ladder.buckets[-1]
            raise refuse(
                f"needs {item.load.contexts} attention contexts, {item.load.windows} window rows and "
                f"{item.load.rows} rows for item {number}; the largest encoder bucket has {top.key.num_contexts}, "
                f"{top.window_rows} and {top.rows}",
                number,
            )
    needed = sum(item.load.rows for item in items) * budgets.row_bytes
    if budgets.readiness is Readiness.REQUEST and needed > budgets.output_bytes:
        raise refuse(
            f"needs {needed} bytes of encoder outputs at once, the budget is {budgets.output_bytes}; raise "
            f"encoder_max_num_tokens (the effective encoder_max_num_tokens is {budgets.max_num_tokens})"
        )
