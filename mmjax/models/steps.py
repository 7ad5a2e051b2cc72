# SPDX-License-Identifier: Apache-2.0
"""The compiled seams: encode, prefill, decode, sample and the row pool's doors, as pure functions of arrays.

Everything the engine runs on the device is one of these functions; the two runners compile them per bucket. The first
arguments (family, config, attention) are static, pools and states are donated, the rest are arrays of fixed shapes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.dispatch import PagedDecode, PagedPrefill
from mmjax.layers.fusion import StepTokens, gather_embeds
from mmjax.layers.sampling import (
    Sampled,
    SamplerState,
    SamplingInputs,
    record_output,
    record_prompt,
    reset,
    sample,
)
from mmjax.models.family import Family, ModelConfig


@struct.dataclass
class SlotState:
    """What is known of the sequence in each slot.

    Attributes:
      sampler: what penalties need to know about each slot's tokens.
      last_token: the newest token of each slot, so that decoding never waits for the host.
    """

    sampler: SamplerState
    last_token: Int[Array, "slots"]


@struct.dataclass
class EngineState:
    """Device arrays that outlive a step; each is donated to the steps that write it, and returned by them.

    Attributes:
      kv: one [num_blocks, parts, heads, page, width] array a layer; keys and values where the family says no other.
      slots: written by sampling.
    """

    kv: tuple[Array, ...]
    slots: SlotState


@struct.dataclass
class PrefillInputs:
    """Chunks of up to S sequences, packed into T tokens.

    Attributes:
      token_ids: 0 where an embedding row is used, so that no id outside the vocabulary reaches the table.
      row_index: row of the pool for each token, the pool's size where the token's own embedding is used.
      positions: rotary positions.
      pages: where the chunk's keys and values go and where its prefix lies.
      last: index in T of each sequence's last token.
    """

    token_ids: Int[Array, "T"]
    row_index: Int[Array, "T"]
    positions: Int[Array, "A T"]
    pages: PagedPrefill
    last: Int[Array, "S"]


@struct.dataclass
class DecodeInputs:
    """One token of each of up to B sequences; its id is the slot's `last_token`.

    Attributes:
      positions: rotary position, the same on every axis.
      pages: where the new keys and values go and what each sequence reads.
      slots: each sequence's slot; the number of slots for padding.
    """

    positions: Int[Array, "B"]
    pages: PagedDecode
    slots: Int[Array, "B"]


def embed_tokens(
    family: Family,
    cfg: ModelConfig,
    params: dict,
    pool: Float[Array, "pool_rows W"],
    token_ids: Int[Array, "T"],
    row_index: Int[Array, "T"],
) -> tuple[Float[Array, "T E"], Float[Array, "levels T E"] | None, StepTokens]:
    """Input of the decoder: the row that `row_index` names, or the token's embedding; deepstack levels; the tokens."""
    embed = partial(family.embed, params, cfg)
    hidden, deepstack = gather_embeds(params["embed"], token_ids, pool, row_index, embed=embed)
    return hidden, deepstack, StepTokens(token_ids, row_index < pool.shape[0])


def remember_tokens(
    state: SlotState,
    slot: Int[Array, ""],
    token_ids: Int[Array, "N"],
    num_prompt: Int[Array, ""],
    num_output: Int[Array, ""],
) -> SlotState:
    """Tells the sampler what a request that starts or resumes in `slot` has seen and said: prompt, then output."""
    index = jnp.arange(token_ids.shape[0])
    nowhere = state.last_token.shape[0]
    prompt = jnp.where(index < num_prompt, slot, nowhere)
    output = jnp.where((index >= num_prompt) & (index < num_prompt + num_output), slot, nowhere)
    sampler = reset(state.sampler, slot[None])
    sampler = record_output(record_prompt(sampler, prompt, token_ids), output, token_ids)
    return state.replace(sampler=sampler)


def sample_step(
    banned: Bool[Array, "V"],
    state: SlotState,
    logits: Float[Array, "B V"],
    slots: Int[Array, "B"],
    inputs: SamplingInputs | None,
) -> tuple[SlotState, Sampled]:
    """Draws a token of each row for its slot; the number of slots stands for rows whose token nobody wants.

    A step of its own: forward steps need not exist for each way to sample, and on a GPU, where the skips of the full
    sampler make the host wait, it waits for nothing but what it asked for.
    """
    sampled, sampler = sample(logits, inputs, state.sampler, slots, banned)
    last_token = state.last_token.at[slots].set(sampled.tokens, mode="drop")
    return SlotState(sampler, last_token), sampled


def prefill_step(
    family: Family,
    cfg: ModelConfig,
    attend: Any,
    params: dict,
    pool: Float[Array, "pool_rows W"],
    kv: tuple[Array, ...],
    inputs: PrefillInputs,
) -> tuple[tuple[Array, ...], Float[Array, "S V"]]:
    """Runs prompt chunks, with embedding rows where `row_index` says so; pages, and logits after the last tokens."""
    hidden, deepstack, tokens = embed_tokens(family, cfg, params, pool, inputs.token_ids, inputs.row_index)
    hidden, kv = family.forward(params, cfg, hidden, inputs.positions, kv, inputs.pages, attend, deepstack, tokens)
    return kv, family.logits(params, cfg, hidden[inputs.last])


def decode_step(
    family: Family,
    cfg: ModelConfig,
    attend: Any,
    params: dict,
    kv: tuple[Array, ...],
    last_token: Int[Array, "slots"],
    inputs: DecodeInputs,
) -> tuple[tuple[Array, ...], Float[Array, "B V"]]:
    """Runs one token of every sequence of the batch; pages, and logits of the next token."""
    token_ids = last_token.at[inputs.slots].get(mode="fill", fill_value=0)
    positions = jnp.broadcast_to(inputs.positions, (cfg.position_axes, *inputs.positions.shape))
    hidden = family.embed(params, cfg, token_ids)
    tokens = StepTokens(token_ids, jnp.zeros(token_ids.shape, bool))
    hidden, kv = family.forward(params, cfg, hidden, positions, kv, inputs.pages, attend, None, tokens)
    return kv, family.logits(params, cfg, hidden)


def encode_step(
    family: Family,
    cfg: ModelConfig,
    ops: Any,
    params: dict,
    pixel_table: Float[Array, "C 256"],
    pool: Float[Array, "pool_rows W"],
    inputs: Any,
    row_slots: Int[Array, "R"],
) -> Float[Array, "pool_rows W"]:
    """Encodes a bucket of items and writes their rows in place; a slot equal to the pool's size drops its row."""
    rows = family.encode(params, cfg, inputs, pixel_table, ops)
    return write_rows(pool, rows, row_slots)


def write_rows(
    pool: Float[Array, "pool_rows W"], rows: Float[Array, "R W"], row_slots: Int[Array, "R"]
) -> Float[Array, "pool_rows W"]:
    """Puts rows into the pool at `row_slots`; a slot equal to the pool's size drops its row."""
    return pool.at[row_slots].set(rows.astype(pool.dtype), mode="drop")


def read_rows(pool: Float[Array, "pool_rows W"], row_slots: Int[Array, "R"]) -> Float[Array, "R W"]:
    """Float32 copies of the rows at `row_slots`; zeros where the slot lies outside the pool."""
    return pool.at[row_slots].get(mode="fill", fill_value=0).astype(jnp.float32)
