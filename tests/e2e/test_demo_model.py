# SPDX-License-Identifier: Apache-2.0
"""The shipped checkpoint through the whole engine: right about unseen scenes, and about what changes in them."""

from __future__ import annotations

import numpy as np
import pytest

import mmjax
from mmjax.demo import checkpoint_path, demo_clip, demo_pair
from mmjax.demo.questions import MAIN_KINDS
from mmjax.demo.training.evaluate import RENDERERS, Case, draw_case

GREEDY = mmjax.SamplingParams(max_tokens=48, temperature=0.0)
EACH = 10  # questions of each kind and renderer


@pytest.fixture(scope="module")
def demo():
    engine = mmjax.EngineConfig(max_batch_size=8, max_num_tokens=512, max_seq_len=1024)
    with mmjax.LLM.demo(
        engine=engine, multimodal=mmjax.MultimodalConfig(encoder_max_num_tokens=2048), progress=False
    ) as llm:
        yield llm


def _ask(llm: mmjax.LLM, cases: list[Case]) -> list[str]:
    return [output.text for output in llm.chat([case.messages() for case in cases], GREEDY)]


@pytest.mark.parametrize("renderer", RENDERERS)
def test_answers_about_unseen_scenes_are_right(demo, renderer):
    """The table of accuracies has 1000 of each kind; here at most one of forty may be wrong."""
    rng = np.random.default_rng(17)
    cases = [draw_case(kind, RENDERERS[renderer], rng) for kind in MAIN_KINDS for _ in range(EACH)]
    told = zip(cases, _ask(demo, cases), strict=True)
    wrong = [(case.question.text, case.question.answer, text) for case, text in told if text != case.question.answer]
    assert len(wrong) <= len(cases) // 40, wrong


def test_swapping_two_pictures_changes_the_answer(demo):
    other = {"the first": "the second", "the second": "the first"}
    for seed in range(4):
        pair = demo_pair(seed)
        question = pair.questions[0]
        asked = [Case(question, pair.images), Case(question, pair.images[::-1])]
        assert _ask(demo, asked) == [question.answer, other[question.answer]]


def test_playing_a_clip_backwards_changes_the_answer(demo):
    other = {"to the left": "to the right", "to the right": "to the left", "up": "down", "down": "up"}
    for seed in range(4):
        clip = demo_clip(seed)
        question = clip.questions[0]
        asked = [Case(question, (), clip.video, clip.fps), Case(question, (), clip.video[::-1].copy(), clip.fps)]
        assert _ask(demo, asked) == [question.answer, other[question.answer]]


def test_a_conversation_goes_on_to_another_picture(demo):
    first, second = demo_pair(5).images
    kinds = [
        [{"type": "image", "image": image}, {"type": "text", "text": "What do you see?"}] for image in (first, second)
    ]
    messages = [{"role": "user", "content": kinds[0]}]
    told = demo.chat(messages, GREEDY).text
    messages += [{"role": "assistant", "content": told}, {"role": "user", "content": kinds[1]}]
    assert demo.chat(messages, GREEDY).text == demo.chat([{"role": "user", "content": kinds[1]}], GREEDY).text


def test_checkpoint_is_small_and_complete():
    files = {file.name: file.stat().st_size for file in checkpoint_path().iterdir()}
    assert sum(files.values()) <= 12e6
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(files)


def test_transformers_loads_it_and_answers_alike(demo):
    judge = pytest.importorskip("demo_judge", reason="the oracle is transformers", exc_type=ImportError)
    rng = np.random.default_rng(23)
    cases = [draw_case(kind, RENDERERS["own"], rng) for kind in MAIN_KINDS]
    assert list(judge.by_transformers(checkpoint_path())(cases)) == _ask(demo, cases)
