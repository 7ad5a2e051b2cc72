# SPDX-License-Identifier: Apache-2.0
"""Putting encoder rows in the place of placeholder tokens: the engine's gather, and the general three-path function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class StepTokens:
    """What a step knows about the tokens behind its hidden states, for decoders that ask what a position holds.

    Attributes:
      ids: the token's id, 0 where an embedding row is used.
      is_row: whether the position holds an embedding row.
    """

    ids: Int[Array, "T"]
    is_row: Bool[Array, "T"]


def gather_embeds(
    embedding: Float[Array, "V E"],
    ids: Int[Array, "T"],
    pool: Float[Array, "pool_rows W"],
    row_index: Int[Array, "T"],
    embed: Callable[[Array], Array] | None = None,
) -> tuple[Float[Array, "T E"], Float[Array, "levels T E"] | None]:
    """Input of a prefill step: row `row_index` of the pool where there is one, else the token's embedding.

    Args:
      ids: in the vocabulary everywhere, also where a row is used.
      pool: encoder rows of width W = E * (1 + deepstack levels); unused rows may hold anything, NaN included.
      row_index: a value >= pool_rows stands for "this is a text token".
      embed: maps ids to embeddings; a plain look-up in `embedding` if None.

    Returns:
      Embeddings in the table's dtype, and the deepstack levels (zero at text tokens), None if W == E.
    """
    width = embedding.shape[1]
    is_row = (row_index < pool.shape[0])[:, None]
    rows = jnp.take(pool, row_index, axis=0, mode="clip").astype(embedding.dtype)
    text = jnp.take(embedding, ids, axis=0, mode="clip") if embed is None else embed(ids)
    hidden = jnp.where(is_row, rows[:, :width], text)
    if pool.shape[1] == width:
        return hidden, None
    levels = jnp.where(is_row, rows[:, width:], 0).reshape(len(ids), -1, width)
    return hidden, jnp.moveaxis(levels, 1, 0)


def filter_mm_token_from_input_ids(
    ids: Int[Array, "T"], vocab_size: int, mm_token_ids: Int[Array, "k"] | None = None
) -> tuple[Int[Array, "text"], Int[Array, "mm"]]:
    """Positions of text and of multimodal tokens: those in `mm_token_ids`, or those outside the vocabulary.

    The sizes of the results depend on values, so this waits for the device and can't be compiled.
    """
    ids = jnp.asarray(ids)
    is_mm = ids >= vocab_size if mm_token_ids is None else jnp.isin(ids, jnp.asarray(mm_token_ids))
    return jnp.flatnonzero(~is_mm), jnp.flatnonzero(is_mm)


def fuse_input_embeds(
    embedding: Float[Array, "V E"],
    ids: Int[Array, "T"],
    mm_embeds: Sequence[Float[Array, "rows E"]] | Float[Array, "rows E"] | None,
    mm_token_ids: Int[Array, "k"] | None = None,
    text_token_indices: Int[Array, "text"] | None = None,
    mm_token_indices: Int[Array, "mm"] | None = None,
    extra_embeds: Sequence[Float[Array, "rows W"]] | None = None,
    **_ignored: Any,
) -> tuple[Any, ...]:
    """Embeds `ids` and writes `mm_embeds`, in order, at the multimodal positions.

    Both index arrays together override `mm_token_ids`; otherwise positions are found from the ids. With `mm_token_ids`
    the placeholders lie in the vocabulary and all ids are embedded before rows overwrite some; without, only text
    positions are looked up.

    Returns:
      (ids, None) without embeds; (None, embeds); or (None, embeds, extras) where each extra stream is a [T, W] array
      with its rows at the multimodal positions and zeros elsewhere.

    Raises:
      ValueError: the number of rows differs from the number of multimodal positions.
    """
    if mm_embeds is None or len(mm_embeds) == 0:
        return ids, None
    rows = jnp.concatenate(list(mm_embeds)) if isinstance(mm_embeds, list | tuple) else jnp.asarray(mm_embeds)
    ids = jnp.asarray(ids)
    if text_token_indices is None or mm_token_indices is None:
        text_token_indices, mm_token_indices = filter_mm_token_from_input_ids(ids, embedding.shape[0], mm_token_ids)
    text_at, mm_at = jnp.asarray(text_token_indices), jnp.asarray(mm_token_indices)
    if len(mm_at) != len(rows):
        raise ValueError(f"multimodal token count mismatch: {len(mm_at)} positions, {len(rows)} embedding rows")
    if mm_token_ids is not None:
        embeds = jnp.take(embedding, ids, axis=0, mode="clip")
    else:
        embeds = jnp.zeros((len(ids), embedding.shape[1]), embedding.dtype)
        embeds = embeds.at[text_at].set(embedding[ids[text_at]])
    embeds = embeds.at[mm_at].set(rows.astype(embedding.dtype))
    if not extra_embeds:
        return None, embeds
    extras = [jnp.zeros((len(ids), extra.shape[1]), extra.dtype).at[mm_at].set(extra) for extra in extra_embeds]
    return None, embeds, extras
