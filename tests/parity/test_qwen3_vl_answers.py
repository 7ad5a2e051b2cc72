# SPDX-License-Identifier: Apache-2.0
"""Claim: Qwen3-VL answers about pictures and clips in any order as transformers does, alone and in one batch."""

from __future__ import annotations

import pytest
from greedy_kit import Talk, judge
from llm_kit import CHECKPOINT, assert_nothing_held, serving
from test_engine_greedy import PARAMS, check_logprobs, count_ties

TALKS = {
    "clip, pictures, clip": Talk(((5, 64, 96), "then", (90, 150), (64, 64), "and", (2, 40, 70), "?")),
    "picture, clips": Talk(((33, 200), (4, 70, 40), (3, 64, 64), "Which one?")),
    "the same clip twice": Talk(("a", (4, 64, 64), "b", (4, 64, 64), (40, 40), "c")),
}


@pytest.fixture(scope="module")
def judged(tiny_checkpoint, tiny_llm):
    never = tiny_llm("qwen3_vl").frontend.model.processor.never_sampled
    checkpoint = tiny_checkpoint("qwen3_vl", **CHECKPOINT)
    return {name: judge(checkpoint, talk, never) for name, talk in TALKS.items()}


def test_the_engine_and_the_judge_answer_as_transformers_does(tiny_llm, tiny_reference, judged):
    with serving(tiny_llm("qwen3_vl"), chunk_tokens=40, trace=100) as llm:
        outs = llm.chat([talk.messages() for talk in TALKS.values()], PARAMS)
        assert max(len(row.chunks) for row in llm.running.engine.trace.rows) > 1  # they did run together
        alone = [tiny_reference("qwen3_vl").chat(talk.messages(), PARAMS) for talk in TALKS.values()]
        for name, *both in zip(TALKS, outs, alone, strict=True):
            for out in both:
                assert out.prompt_token_ids == judged[name].prompt_ids
                check_logprobs(out, judged[name])
                assert count_ties(llm, out, TALKS[name], judged[name]) <= 1
        assert_nothing_held(llm)
