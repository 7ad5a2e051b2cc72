# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens on the device: penalties, filters, one random stream per request, log-probabilities.

Nothing sorts the vocabulary. Thresholds of top-k and top-p are searched digit by digit in the ordered integers below.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from mmjax.sampling_params import GREEDY_BELOW, MAX_LOGPROBS


@flax.struct.dataclass
class SamplingInputs:
    """How each row of a step is sampled; `sampling_params.sampling_arrays` makes the fields.

    While a batch keeps its rows, only `step` changes. `n` is STOP_WIDTH.
    """

    temperature: Float[Array, "B"]  # under GREEDY_BELOW: argmax
    top_k: Int[Array, "B"]  # 0: off
    top_p: Float[Array, "B"]  # 1: off
    min_p: Float[Array, "B"]  # 0: off
    repetition_penalty: Float[Array, "B"]
    presence_penalty: Float[Array, "B"]
    frequency_penalty: Float[Array, "B"]
    key: UInt[Array, "B 2"]  # threefry key of the request's seed
    step: Int[Array, "B"]  # tokens generated so far
    min_tokens: Int[Array, "B"]  # `stop_ids` are not drawn before this step
    stop_ids: Int[Array, "B n"]  # entries >= V are padding
    want_logprobs: Bool[Array, "B"]


@flax.struct.dataclass
class SamplerState:
    """What the penalties remember of each slot. Long-lived and donated; a slot belongs to one running request."""

    prompt_seen: Bool[Array, "slots V"]
    output_counts: Int[Array, "slots V"]


@flax.struct.dataclass
class Sampled:
    """Tokens of a step. K = min(MAX_LOGPROBS, V).

    Log-probabilities are zeros unless some row wants them, and None where the step was compiled without them.
    """

    tokens: Int[Array, "B"]
    logprobs: Float[Array, "B"] | None = None  # of the chosen tokens
    top_ids: Int[Array, "B K"] | None = None  # most probable first
    top_logprobs: Float[Array, "B K"] | None = None


def init_state(num_slots: int, vocab_size: int) -> SamplerState:
    """An empty memory for `num_slots` running requests."""
    return SamplerState(
        prompt_seen=jnp.zeros((num_slots, vocab_size), bool),
        output_counts=jnp.zeros((num_slots, vocab_size), jnp.int32),
    )


def reset(state: SamplerState, slots: Int[Array, "n"]) -> SamplerState:
    """Forget what `slots` held, for the requests that take them over. Slots past the last one are dropped."""
    return SamplerState(
        prompt_seen=state.prompt_seen.at[slots].set(False, mode="drop"),
        output_counts=state.output_counts.at[slots].set(0, mode="drop"),
    )


def record_prompt(state: SamplerState, slots: Int[Array, "T"], token_ids: Int[Array, "T"]) -> SamplerState:
    """Note that the prompt of `slots[i]` holds `token_ids[i]`.

    Slots and ids past the last one are dropped; none may be negative (it would wrap around).
    """
    return state.replace(prompt_seen=state.prompt_seen.at[slots, token_ids].set(True, mode="drop"))


def record_output(state: SamplerState, slots: Int[Array, "T"], token_ids: Int[Array, "T"]) -> SamplerState:
    """Count `token_ids[i]` in the answer of `slots[i]`, under the rules of `record_prompt`.

    `sample` does this itself; it is called by name for the tokens that a preempted request brings back.
    """
    return state.replace(output_counts=state.output_counts.at[slots, token_ids].add(1, mode="drop"))


def sample(
    logits: Float[Array, "B V"],
    inputs: SamplingInputs | None,
    state: SamplerState,
    slots: Int[Array, "B"],
    banned: Bool[Array, "V"],
) -> tuple[Sampled, SamplerState]:
    """Draw one token per row and count it in its slot.

    Order, as in transformers: repetition, frequency and presence penalties, bans, temperature, top-k, top-p, min-p.
    A row's token depends on its own logits, inputs and slot alone. Work that no row asks for is skipped at run time.

    Args:
      logits: float32, straight from the model.
      inputs: None compiles nothing but a banned argmax, for steps in which `is_plain_greedy` holds: on a GPU each
        run-time skip makes the host wait for its predicate, and this has none. It leaves `state` as it is, since no
        row of such a step reads it.
      slots: each row's row of `state`; padding rows have one past the last and write nothing.
      banned: ids that are never drawn, such as the placeholders of images.

    Returns:
      Tokens with log-probabilities of the distribution that `logits` themselves describe (before penalties, bans and
      temperature, as vLLM and OpenAI report them), and the state with the tokens counted.
    """
    if inputs is None:
        tokens = jnp.argmax(jnp.where(banned, -jnp.inf, logits), axis=-1).astype(jnp.int32)
        return Sampled(tokens), state
    penalties_on = (
        (inputs.repetition_penalty != 1) | (inputs.presence_penalty != 0) | (inputs.frequency_penalty != 0)
    ).any()
    scores = lax.cond(penalties_on, lambda: penalise(logits, inputs, state, slots), lambda: logits)
    scores = jnp.where(banned, -jnp.inf, scores)
    too_early = inputs.step < inputs.min_tokens
    scores = lax.cond(too_early.any(), lambda: _ban_stops(scores, inputs.stop_ids, too_early), lambda: scores)

    best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    random = inputs.temperature >= GREEDY_BELOW
    tokens = lax.cond(random.any(), lambda: jnp.where(random, _draw(scores, inputs), best), lambda: best)
    reported = lax.cond(inputs.want_logprobs.any(), lambda: _logprobs(logits, tokens), lambda: _no_logprobs(logits))
    return Sampled(tokens, *reported), record_output(state, slots, tokens)


def penalise(
    logits: Float[Array, "B V"], inputs: SamplingInputs, state: SamplerState, slots: Int[Array, "B"]
) -> Float[Array, "B V"]:
    """Logits after the penalties of each row.

    Repetition penalty over prompt and answer (Keskar et al. 2019), then OpenAI's frequency and presence penalties over
    the answer: logit - count * frequency - (count > 0) * presence.
    """
    counts = state.output_counts.at[slots].get(mode="clip")
    produced = counts > 0
    seen = state.prompt_seen.at[slots].get(mode="clip") | produced
    repetition = inputs.repetition_penalty[:, None]
    scores = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    scores = scores - counts.astype(jnp.float32) * inputs.frequency_penalty[:, None]
    return scores - produced.astype(jnp.float32) * inputs.presence_penalty[:, None]


def _ban_stops(scores: Float[Array, "B V"], stop_ids: Int[Array, "B n"], rows: Bool[Array, "B"]) -> Float[Array, "B V"]:
    ids = jnp.where(rows[:, None], stop_ids, scores.shape[-1])
    return scores.at[jnp.arange(len(ids))[:, None], ids].set(-jnp.inf, mode="drop")


def _draw(scores: Float[Array, "B V"], inputs: SamplingInputs) -> Int[Array, "B"]:
    """One draw per row from softmax(scores / temperature) over the kept tokens: argmax of log-weight + Gumbel noise."""
    weights = log_weights(scores, inputs.temperature)
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(inputs.key, inputs.step, scores.shape[-1])
    keep = kept_tokens(scores, weights, inputs)
    return jnp.argmax(jnp.where(keep, weights + noise, -jnp.inf), axis=-1).astype(jnp.int32)


def _gumbel(key: UInt[Array, "2"], step: Int[Array, ""], size: int) -> Float[Array, "V"]:
    """Gumbel noise of one request at one step."""
    key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), step)
    return gumbel_of_bits(jax.random.bits(key, (size,), jnp.uint32))


def gumbel_of_bits(bits: UInt[Array, "V"]) -> Float[Array, "V"]:
    """-log(-log(1 - u)) with u = bits / 2**32, kept off both ends so that noise is always finite.

    Its fine end is at u = 0, where the large values come from, so tokens down to a probability of 1e-10 can win; the
    usual 23 bits of mantissa stop at 1e-7.
    """
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def log_weights(scores: Float[Array, "B V"], temperature: Float[Array, "B"]) -> Float[Array, "B V"]:
    """(scores - max) / temperature: log-probabilities up to a constant, 0 at the most probable token, never NaN.

    Subtracting first keeps a small temperature from turning large logits into infinities.
    """
    divisor = jnp.where(temperature >= GREEDY_BELOW, temperature, 1)[:, None]
    return (scores - scores.max(axis=-1, keepdims=True)) / divisor


def kept_tokens(
    scores: Float[Array, "B V"], weights: Float[Array, "B V"], inputs: SamplingInputs
) -> Bool[Array, "B V"]:
    """Which tokens pass top-k, then top-p of what top-k left, then min-p. The most probable token always does.

    Equal logits stand or fall together, so a tie at the edge keeps more than k tokens.

    Args:
      scores: logits after penalties and bans; top-k compares these, exactly.
      weights: `log_weights(scores, temperature)`.
    """
    order = _ordered(scores)
    probabilities = jnp.exp(weights)  # times a constant: 1 for the most probable token
    top_k, top_p = inputs.top_k, inputs.top_p
    keep = lax.cond(
        (top_k > 0).any(),
        lambda: order >= _top_k_threshold(order, top_k)[:, None],
        lambda: jnp.ones(order.shape, bool),
    )
    keep = lax.cond(
        (top_p < 1).any(),
        lambda: keep & (order >= _top_p_threshold(order, jnp.where(keep, probabilities, 0), top_p)[:, None]),
        lambda: keep,
    )
    return keep & (probabilities >= inputs.min_p[:, None])


def _top_k_threshold(order: UInt[Array, "B V"], top_k: Int[Array, "B"]) -> UInt[Array, "B"]:
    """The k-th largest value of each row (the smallest where k is off)."""
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, order.shape[-1]), order.shape[-1])
    return _largest(lambda t: (order >= t[:, None]).sum(axis=-1, dtype=jnp.int32) >= wanted, len(wanted))


def _top_p_threshold(
    order: UInt[Array, "B V"], mass: Float[Array, "B V"], top_p: Float[Array, "B"]
) -> UInt[Array, "B"]:
    """The largest value such that the tokens at or above it hold at least top_p of the mass (0 where top_p is off).

    So a token stays exactly if those strictly above it hold less than top_p. The sums run over one fixed tree, in which
    rounding keeps order, so the predicate is monotone as the search needs.
    """
    goal = top_p * mass.sum(axis=-1)
    found = _largest(lambda t: jnp.where(order >= t[:, None], mass, 0).sum(axis=-1) >= goal, len(goal))
    return jnp.where(top_p < 1, found, 0)


def _largest(holds: Callable[[UInt[Array, "B"]], Bool[Array, "B"]], rows: int) -> UInt[Array, "B"]:
    """The largest uint32 of each row for which `holds`, which is true from 0 up to some value and false above it.

    Bisection in digits of two bits: of the three next candidates as many hold as the digit is large. Three reductions
    over the same operand can fuse into one pass: 16 reads of the vocabulary rather than 32.
    """

    def next_digit(i: Int[Array, ""], found: UInt[Array, "B"]) -> UInt[Array, "B"]:
        shift = jnp.uint32(30) - 2 * i.astype(jnp.uint32)
        digit = sum(holds(found | (jnp.uint32(d) << shift)).astype(jnp.uint32) for d in (1, 2, 3))
        return found | (digit << shift)

    return lax.fori_loop(0, 16, next_digit, jnp.zeros(rows, jnp.uint32))


def _ordered(x: Float[Array, "B V"]) -> UInt[Array, "B V"]:
    """float32 as uint32 of the same order: set the sign bit of positive numbers, invert all bits of negative ones."""
    sign = jnp.uint32(1 << 31)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where(bits == sign, 0, bits)  # -0.0 and 0.0 are one value
    return jnp.where(bits & sign, ~bits, bits | sign)


_Reported = tuple[Float[Array, "B"], Int[Array, "B K"], Float[Array, "B K"]]


def _logprobs(logits: Float[Array, "B V"], tokens: Int[Array, "B"]) -> _Reported:
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    values, ids = lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    return chosen, ids.astype(jnp.int32), values


def _no_logprobs(logits: Float[Array, "B V"]) -> _Reported:
    rows, width = len(logits), min(MAX_LOGPROBS, logits.shape[-1])
    return jnp.zeros(rows), jnp.zeros((rows, width), jnp.int32), jnp.zeros((rows, width))
