# SPDX-License-Identifier: Apache-2.0
"""Claim: every sampling knob does through the whole engine what it says, and what the judge does with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tolerances
from llm_kit import CHECKPOINT, ENGINE, GREEDY, build, clip, noise, together, user

import mmjax
from mmjax.frontend import InputOptions
from mmjax.inputs.items import ProcessedItem

pytestmark = pytest.mark.timeout(300)

PICTURE = user(noise(84, 140, 1), "what?")
TEXT = user("tell me a tale")
SEEDED = mmjax.SamplingParams(max_tokens=24, temperature=1.0, seed=11, ignore_eos=True)
EOS = 258


def ids(outs) -> list[list[int]]:
    return [out.token_ids for out in outs]


# ---- draws ----------------------------------------------------------------------------------------------------------


def test_seeded_draws_do_not_depend_on_batch_mates(llm):
    """Alone, first, last, among more requests than run at once, with greedy and with penalised mates."""
    alone = [llm.chat(messages, SEEDED).token_ids for messages in (PICTURE, TEXT)]
    mates = [
        (TEXT, GREEDY),
        (user(noise(200, 90, 3), noise(84, 140, 1), "?"), replace(SEEDED, seed=5, temperature=1.7, top_k=40)),
        (user("a"), mmjax.SamplingParams(max_tokens=30, repetition_penalty=1.4, seed=9)),
        (user(clip(4, 56, 84), "?"), mmjax.SamplingParams(max_tokens=3, seed=1, logprobs=2)),
    ]
    for place in (0, 2, 4):
        batch = [*mates[:place], (PICTURE, SEEDED), *mates[place:], (TEXT, SEEDED)]
        with together(llm):
            handles = [llm.submit(messages, params) for messages, params in batch]
        outs = [handle.result() for handle in handles]
        assert [outs[place].token_ids, outs[-1].token_ids] == alone


def test_seeds_are_streams_of_their_own(llm):
    outs = llm.chat([TEXT] * 4, [replace(SEEDED, seed=seed) for seed in (1, 2, 1, -1)])
    assert outs[0].token_ids == outs[2].token_ids
    assert len({tuple(out.token_ids) for out in outs}) == 3
    unseeded = llm.chat([TEXT] * 2, replace(SEEDED, seed=None))
    assert unseeded[0].token_ids != unseeded[1].token_ids


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"temperature": 2.0, "top_k": 20},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.3},
        {"temperature": 0.8, "repetition_penalty": 0.7, "frequency_penalty": -0.5, "top_k": 30, "top_p": 0.9},
        {"min_tokens": 6, "stop_token_ids": (177, 125), "temperature": 0.0},
    ],
    ids=lambda knobs: " ".join(f"{name}={value}" for name, value in knobs.items()) or "plain",
)
def test_the_engine_chooses_what_the_judge_chooses(llm, tiny_reference, knobs):
    """Penalties count the prompt's and the answer's tokens, whatever steps they came in."""
    params = replace(SEEDED, **knobs)
    outs = llm.chat([PICTURE, TEXT], params)
    judged = [tiny_reference().chat(messages, params) for messages in (PICTURE, TEXT)]
    assert ids(outs) == ids(judged)
    assert [out.text for out in outs] == [out.text for out in judged]
    assert [out.finish_reason for out in outs] == [out.finish_reason for out in judged]


def test_penalties_reach_a_slot_that_somebody_else_had(llm):
    """What one answer said does not count against the next one in its slot."""
    params = mmjax.SamplingParams(max_tokens=20, temperature=0.0, presence_penalty=2.0, ignore_eos=True)
    first = llm.chat(TEXT, params).token_ids
    llm.chat([PICTURE] * 4, GREEDY)
    assert llm.chat(TEXT, params).token_ids == first
    assert len(set(first)) > len(set(llm.chat(TEXT, replace(params, presence_penalty=0.0)).token_ids))


# ---- logprobs -------------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_models_own_distribution(llm, tiny_reference):
    """Whatever the temperature, penalties and filters."""
    params = replace(SEEDED, temperature=1.8, top_k=50, repetition_penalty=1.2, logprobs=5)
    out, judged = llm.chat(PICTURE, params), tiny_reference().chat(PICTURE, params)
    assert len(out.logprobs) == len(out.token_ids) == 24
    for ours, theirs, token in zip(out.logprobs, judged.logprobs, out.token_ids, strict=True):
        assert ours.token_id == token
        assert ours.logprob == pytest.approx(theirs.logprob, abs=tolerances.LOGITS)
        assert len(ours.top) == 5
        assert list(ours.top.values()) == sorted(ours.top.values(), reverse=True)
        assert list(ours.top.values()) == pytest.approx(list(theirs.top.values()), abs=tolerances.LOGITS)
        assert ours.top.get(token, ours.logprob) == ours.logprob


def test_how_many_logprobs(llm):
    outs = llm.chat([TEXT] * 3, [replace(GREEDY, logprobs=count) for count in (None, 0, 20)])
    assert outs[0].logprobs is None
    assert [len(step.top) for step in outs[1].logprobs] == [0] * 12
    assert [len(step.top) for step in outs[2].logprobs] == [20] * 12
    # The two may have decoded in batches of different sizes.
    chosen = [[step.logprob for step in out.logprobs] for out in outs[1:]]
    assert chosen[0] == pytest.approx(chosen[1], abs=tolerances.OTHER_LAYOUT)
    assert all(next(iter(step.top)) == step.token_id for step in outs[2].logprobs)  # greedy takes the first


# ---- ends -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def letters(llm):
    """A seeded answer with at least three plain characters in a row, each a token of its own, and where they are."""
    for seed in range(40):
        out = llm.chat(TEXT, replace(SEEDED, seed=seed, max_tokens=60))
        for at in range(8, len(out.text) - 3):
            part = out.text[at : at + 3]
            if part.isascii() and out.text.find(part) == at:
                return replace(SEEDED, seed=seed, max_tokens=60), out, part
    pytest.fail("no seed gives three letters in a row")


def test_stop_strings_across_tokens(llm, letters):
    params, whole, stop = letters
    out = llm.chat(TEXT, replace(params, stop=("never there", stop)))
    assert out.finish_reason == "stop"
    assert out.text == whole.text[: whole.text.find(stop)]
    assert out.token_ids == whole.token_ids[: len(out.token_ids)]
    assert len(out.token_ids) < len(whole.token_ids)
    deltas = list(llm.stream(TEXT, replace(params, stop=stop)))
    assert "".join(delta.text for delta in deltas) == out.text
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert out.usage.completion_tokens == len(out.token_ids)


def test_a_stop_string_waits_for_min_tokens(llm, letters):
    params, whole, stop = letters
    early = llm.chat(TEXT, replace(params, stop=stop))
    out = llm.chat(TEXT, replace(params, stop=stop, min_tokens=len(early.token_ids) + 5))
    assert out.token_ids[: len(early.token_ids) + 5] == whole.token_ids[: len(early.token_ids) + 5]
    assert out.text.startswith(early.text + stop)


def test_stop_ids_end_without_their_text(llm):
    whole = llm.chat(TEXT, SEEDED)
    stop = whole.token_ids[10]
    at = whole.token_ids.index(stop)
    out = llm.chat(TEXT, replace(SEEDED, stop_token_ids=(stop,)))
    assert (out.finish_reason, out.token_ids) == ("stop", whole.token_ids[: at + 1])
    assert out.text == llm.model.tokenizer.decode(whole.token_ids[:at])


def test_stop_ids_are_not_drawn_before_min_tokens(llm):
    first = llm.chat(TEXT, replace(GREEDY, max_tokens=1)).token_ids[0]
    ended = llm.chat(TEXT, replace(GREEDY, stop_token_ids=(first,)))
    assert (ended.token_ids, ended.text, ended.finish_reason) == ([first], "", "stop")
    out = llm.chat(TEXT, replace(GREEDY, stop_token_ids=(first,), min_tokens=6))
    assert len(out.token_ids) >= 6
    assert first not in out.token_ids[:6]


def test_end_of_sequence(llm):
    """Hot enough that the end comes soon."""
    hot = mmjax.SamplingParams(max_tokens=400, temperature=30.0, seed=2)
    out = llm.chat(TEXT, hot)
    assert (out.finish_reason, out.token_ids[-1]) == ("stop", EOS)
    assert EOS not in out.token_ids[:-1]
    beyond = llm.chat(TEXT, replace(hot, ignore_eos=True, max_tokens=len(out.token_ids) + 5))
    assert beyond.finish_reason == "length"
    assert beyond.token_ids[: len(out.token_ids)] == out.token_ids
    later = llm.chat(TEXT, replace(hot, min_tokens=len(out.token_ids)))
    assert later.token_ids[: len(out.token_ids) - 1] == out.token_ids[:-1]
    assert EOS not in later.token_ids[: len(out.token_ids)]


def test_without_max_tokens_an_answer_fills_the_context(llm):
    out = llm.chat(user("a" * 440), mmjax.SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True))
    assert out.finish_reason == "length"
    assert len(out.prompt_token_ids) + len(out.token_ids) == 512
    longer = llm.chat(user("a" * 440), replace(GREEDY, max_tokens=10_000))
    assert longer.token_ids == out.token_ids


# ---- placeholders ---------------------------------------------------------------------------------------------------

HOT = mmjax.SamplingParams(max_tokens=300, temperature=1e4, seed=0, ignore_eos=True, logprobs=20)


def test_placeholders_are_never_sampled(llm):
    """A temperature that makes all tokens alike: each of 272 would come up once in 300 draws."""
    never = set(llm.model.processor.never_sampled)
    assert len(never) == 4
    drawn = {
        token
        for out in llm.chat([PICTURE, TEXT] * 3, [replace(HOT, seed=i) for i in range(6)])
        for token in out.token_ids
    }
    assert len(drawn) > 260
    assert drawn & never == set()


@pytest.fixture(scope="module")
def unmasked(tiny_checkpoint):
    path = tiny_checkpoint("qwen2_5_vl", **CHECKPOINT).path
    with build(path, engine=replace(ENGINE, mask_placeholders=False)) as llm:
        yield llm


def test_a_sampled_placeholder_is_ordinary_text(unmasked, tiny_reference):
    """It takes its own embedding and position, never a row; the judge computes from the table alone."""
    out = unmasked.chat(PICTURE, HOT)
    pad = unmasked.model.processor.placeholder_id
    sampled = [at for at, token in enumerate(out.token_ids) if token in pad.values()]
    assert len(sampled) >= 1
    assert sampled[0] < len(out.token_ids) - 6
    llm = tiny_reference()
    prompt = llm.frontend.chat(PICTURE, InputOptions(), limit=None)
    rows = [llm.running.runner.encode(ProcessedItem(item.plan, item.patches)) for item in prompt.items]
    logits = llm.running.runner.logits(prompt, rows, out.token_ids[:-1]).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for at, step in enumerate(out.logprobs):
        assert step.logprob == pytest.approx(logprobs[at, step.token_id], abs=tolerances.LOGITS), at
        np.testing.assert_allclose(
            list(step.top.values()), logprobs[at][list(step.top)], rtol=0, atol=tolerances.LOGITS
        )
    assert unmasked.chat(PICTURE, GREEDY).error is None


def test_the_judge_opts_out_as_well(unmasked, tiny_checkpoint):
    params = replace(HOT, max_tokens=60, seed=4)
    path = tiny_checkpoint("qwen2_5_vl", **CHECKPOINT).path
    out = unmasked.chat(TEXT, params)
    assert set(out.token_ids) & set(unmasked.model.processor.never_sampled)
    with build(path, engine=replace(ENGINE, mask_placeholders=False), reference=True) as judge:
        assert judge.chat(TEXT, params).token_ids == out.token_ids


# ---- what comes with an answer --------------------------------------------------------------------------------------


def test_deltas_join_to_the_answer(llm):
    for messages, params in (
        (PICTURE, SEEDED),
        (TEXT, GREEDY),
        (TEXT, replace(SEEDED, temperature=30.0, max_tokens=80)),
    ):
        out = llm.chat(messages, params)
        handle = llm.submit(messages, params)
        deltas = list(handle.stream())
        assert "".join(delta.text for delta in deltas) == out.text == handle.result().text
        assert [token for delta in deltas for token in delta.token_ids] == out.token_ids
        assert out.text == llm.model.tokenizer.decode(out.token_ids, skip_special_tokens=True)


def test_usage_and_metrics(llm):
    messages = user(noise(84, 140, 1), "and", clip(4, 56, 84), "then?")
    first, again = llm.chat(messages, GREEDY), llm.chat(messages, GREEDY)
    usage = first.usage
    assert (usage.image_tokens, usage.video_tokens, usage.audio_tokens) == (15, 12, 0)
    assert usage.prompt_tokens == len(first.prompt_token_ids) == usage.text_tokens + 27
    assert (usage.completion_tokens, usage.cached_tokens) == (12, 0)
    counted = llm.count_tokens(messages)
    assert replace(counted, completion_tokens=12) == usage
    whole_pages = (usage.prompt_tokens - 1) // 16 * 16  # the last token is always computed
    assert again.usage.cached_tokens == again.metrics.prefix_tokens_reused == whole_pages
    assert (first.metrics.items_encoded, first.metrics.items_cached) == (2, 0)
    assert (again.metrics.items_encoded, again.metrics.items_cached) == (0, 0)  # the prefix holds them
    metrics = first.metrics
    times = [metrics.queued, metrics.encode, metrics.prefill, metrics.first_token, metrics.total]
    assert times == sorted(times)
    assert times[0] > 0
    assert again.token_ids == first.token_ids


def test_rows_are_reused_where_the_prefix_is_not(llm):
    """Another text before the same picture: no page is shared, but its rows are."""
    llm.chat(PICTURE, GREEDY)
    out = llm.chat(user("so, ", noise(84, 140, 1), "what?"), GREEDY)
    assert (out.usage.cached_tokens, out.metrics.items_encoded, out.metrics.items_cached) == (0, 0, 1)


def test_explanations_match_the_prompt(llm):
    messages = user(noise(84, 140, 1), "and", clip(4, 56, 84), "then?")
    table = llm.explain(messages)
    ids = llm.chat(messages, GREEDY).prompt_token_ids
    assert [(span.modality, span.rows) for span in table.spans] == [("image", 15), ("video", 12)]
    pads = llm.model.processor.placeholder_id
    for span in table.spans:
        held = [token for start, length in span.runs for token in ids[start : start + length]]
        assert held == [pads[span.modality]] * span.rows
