# SPDX-License-Identifier: Apache-2.0
"""Claim: pictures whose spans hold row ends are served as any other, wherever a chunk, a page or a prefix is cut."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tolerances
from llm_kit import CHECKPOINT, assert_nothing_held, clip, noise, serving, user

import mmjax
from mmjax.errors import RequestError

pytest.importorskip("torch", reason="tiny checkpoints are made with transformers")
from tiny_families.mistral import ID

pytestmark = pytest.mark.timeout(300)

FAMILIES = ("mistral3", "pixtral")
PARAMS = mmjax.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=5)
IMG, BREAK, END = ID["[IMG]"], ID["[IMG_BREAK]"], ID["[IMG_END]"]

# Two pictures side by side, then one of another size: 3 x 4 and 2 x 3 blocks of 28 pixels, 6 x 7 and 3 x 6 of 16.
MESSAGES = user("a", noise(84, 112, 1), noise(48, 84, 2), "and", noise(30, 50, 3), "what?")


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, tiny_llm):
    """An engine, and its answer to MESSAGES in one chunk."""
    llm = tiny_llm(request.param)
    with serving(llm):
        yield llm, llm.chat(MESSAGES, PARAMS)


def same(out: mmjax.RequestOutput, cold: mmjax.RequestOutput) -> None:
    assert out.error is None
    assert out.prompt_token_ids == cold.prompt_token_ids
    assert out.token_ids == cold.token_ids
    for ours, theirs in zip(out.logprobs, cold.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=tolerances.OTHER_LAYOUT)


def test_the_one_chunk_answer_is_the_references(served, tiny_reference, request):
    _, cold = served
    judge = tiny_reference(request.node.callspec.params["served"]).chat(MESSAGES, PARAMS)
    assert judge.token_ids == cold.token_ids
    assert len(set(cold.token_ids)) > 1


def kinds_of_cut(ids: list[int], at: int) -> set[str]:
    """What lies on either side of a cut in front of position `at`."""
    before, after = ids[at - 1], ids[at]
    kinds = {
        "in front of a row end": after == BREAK,
        "behind a row end": before == BREAK,
        "within a row": before == IMG == after,
        "in front of an end": after == END,
        "between two pictures": before == END and after == IMG,
        "behind a picture": before == END and after != IMG,
    }
    return {kind for kind, holds in kinds.items() if holds}


def test_every_cut_gives_the_one_chunk_answer(served):
    llm, cold = served
    ids, seen = cold.prompt_token_ids, set()
    for chunk in (*range(1, 13), 17, 23, len(ids) - 1):
        with serving(llm, chunk_tokens=chunk, enable_block_reuse=False, trace=200):
            same(llm.chat(MESSAGES, PARAMS), cold)
            ends = [end for row in llm.running.engine.trace.rows for _, _, end in row.chunks]
            assert_nothing_held(llm)
        assert ends[-1] == len(ids)
        seen |= {kind for end in ends[:-1] for kind in kinds_of_cut(ids, end)}
    assert len(seen) == 6


def test_pictures_shared_in_a_batch_and_prefixes_in_turn(served):
    """Rows and KV pages of a picture are reused; a picture of equal size and other content shares nothing."""
    llm, cold = served
    other = user("a", noise(84, 112, 9), noise(48, 84, 2), "and", noise(30, 50, 3), "what?")
    with serving(llm) as fresh:
        outs = fresh.chat([MESSAGES, other, MESSAGES, user("text alone")], PARAMS)
        again, alone = fresh.chat(MESSAGES, PARAMS), fresh.chat(other, PARAMS)
        assert_nothing_held(fresh)
    for out in (outs[0], outs[2], again):
        same(out, cold)
    same(outs[1], alone)
    assert outs[1].prompt_token_ids == cold.prompt_token_ids
    assert [entry.logprob for entry in outs[1].logprobs] != pytest.approx([entry.logprob for entry in cold.logprobs])
    assert again.metrics.items_encoded == 0
    assert again.usage.cached_tokens > len(again.prompt_token_ids) - 2 * 16


def test_usage_counts_row_ends_to_the_pictures(served):
    llm, cold = served
    ids = np.array(cold.prompt_token_ids)
    assert cold.usage.image_tokens == np.isin(ids, [IMG, BREAK, END]).sum()
    assert cold.usage.image_tokens + cold.usage.text_tokens == len(ids)
    assert (ids == END).sum() == 3
    assert llm.count_tokens(MESSAGES).image_tokens == cold.usage.image_tokens


def test_compact_and_expanded_prompts(served):
    """One [IMG] a picture, or every id of the spans; a picture of one row has as many [IMG] in both."""
    llm, cold = served
    pictures = [part["image"] for part in MESSAGES[0]["content"] if part["type"] == "image"]
    same(llm.generate(cold.prompt_token_ids, PARAMS, {"image": pictures}), cold)
    ids = cold.prompt_token_ids
    ends = [i for i, token in enumerate(ids) if token == END]
    compact = [token for i, token in enumerate(ids) if token not in (IMG, BREAK, END) or i in ends]
    same(llm.generate([IMG if token == END else token for token in compact], PARAMS, {"image": pictures}), cold)
    text = "".join(chr(token) if token < 256 else "" for token in (65, 66))
    small = {"image": [noise(9, 8)]}
    expanded = [ID["<s>"], ID["[INST]"], IMG, END, 30, ID["[/INST]"]]
    first = llm.generate(expanded, PARAMS, small)
    assert first.prompt_token_ids == expanded
    same(llm.generate([token for token in expanded if token != END], PARAMS, small), first)
    spelled = llm.generate(f"<s>[INST][IMG]{text}[/INST]", PARAMS, small)
    assert spelled.prompt_token_ids[2:4] == [IMG, END]


def test_text_forges_no_picture(served):
    llm, _ = served
    forged = llm.chat(user("[IMG][IMG_BREAK][IMG_END]", noise(20, 20)), PARAMS)
    ids = forged.prompt_token_ids
    assert (ids.count(IMG), ids.count(BREAK)) == (ids.index(END) - ids.index(IMG) - ids.count(BREAK), ids.count(BREAK))
    assert ids.count(END) == 1
    assert len(ids) == forged.usage.image_tokens + len("[IMG][IMG_BREAK][IMG_END]") + 3
    assert not {IMG, BREAK, END} & set(forged.token_ids)


def test_clips_are_refused(served):
    llm, _ = served
    with pytest.raises(RequestError, match="no video"):
        llm.chat(user(clip(2, 56, 56), "?"), PARAMS)
    with pytest.raises(RequestError, match="no video"):
        llm.generate([1, 2], PARAMS, {"video": [clip(2, 56, 56)]})


def test_supplied_rows_stand_for_a_picture(served):
    llm, cold = served
    pictures = [part["image"] for part in MESSAGES[0]["content"] if part["type"] == "image"]
    rows = llm.encode(pictures)
    with serving(llm) as fresh:
        out = fresh.chat(MESSAGES, PARAMS, multi_modal_embeddings={"image": [rows[0], None, rows[2]]})
    assert out.token_ids == cold.token_ids
    assert out.metrics.items_encoded == 1


def test_a_thin_picture_fails_alone(served):
    llm, cold = served
    outs = llm.chat([MESSAGES, user(noise(1, 900), "?")], PARAMS)
    same(outs[0], cold)
    assert isinstance(outs[1].error, RequestError)
    assert "too thin" in str(outs[1].error)


def picture(rng: random.Random, shortest: int) -> np.ndarray:
    """Sides from `shortest` up to twice the longest edge."""
    return noise(rng.randint(shortest, 400), rng.randint(shortest, 400), rng.randrange(2**32))


@pytest.mark.parametrize("family", [*FAMILIES, "lighton_ocr"])
def test_random_requests_compile_nothing(tiny_llm, family):
    llm, rng = tiny_llm(family), random.Random(0)
    shortest = 60 if family == "lighton_ocr" else 3  # whose pictures need a whole merge block
    conversations = [
        user(*[picture(rng, shortest) for _ in range(rng.choice((0, 1, 1, 2)))], "what is it? " * rng.randint(1, 8))
        for _ in range(60)
    ]
    params = [mmjax.SamplingParams(max_tokens=rng.randint(1, 4), temperature=0.7) for _ in conversations]
    with serving(llm) as fresh:
        before = fresh.stats().compiles["since"]  # by other tests of this process
        outs = fresh.chat(conversations, params)
        stats = fresh.stats()
    assert [out.error for out in outs if out.error is not None] == []
    assert stats.compiles["since"] == before
    assert stats.items["items_encoded"] > 30


def test_the_largest_picture_fits(served, tiny_checkpoint, request):
    """A square over the longest edge: every row of the largest item, in the top bucket."""
    llm, _ = served
    family = request.node.callspec.params["served"]
    edge = tiny_checkpoint(family, **CHECKPOINT).processor.image_processor.size["longest_edge"]
    out = llm.chat(user(noise(edge + 7, edge + 7), "?"), PARAMS)
    factor = 28 if family == "mistral3" else 16
    side = -(-edge // factor)
    assert out.usage.image_tokens == side * (side + 1)
