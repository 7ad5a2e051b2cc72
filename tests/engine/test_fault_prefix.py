# SPDX-License-Identifier: Apache-2.0
"""Claim: a reused prefix gives what a cold run gives, wherever it ends, and two pictures never share a page."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from stub_kit import StubEngine, expected, item, talk


def answered(engine: StubEngine, prompt, tokens=3) -> int:
    """Answers a prompt rightly; returns how many tokens came from the prefix cache."""
    request = engine.submit(prompt, tokens)
    (output,) = engine.run(request)
    assert output.token_ids == expected(prompt, tokens)
    return output.usage.cached_tokens


def force_hits(engine: StubEngine, most: int) -> None:
    """Makes the prefix cache serve at most so many tokens."""
    pages = engine.service.pages
    match = pages.match
    pages.match = lambda keys, tokens, limit: match(keys, tokens, min(limit, most))


def test_another_picture_shares_the_text_before_it_alone():
    """8 text, an image of 6 rows, 6 text, pages of 4."""
    engine = StubEngine()
    assert answered(engine, talk(8, item(1), 6)) == 0
    assert answered(engine, talk(8, item(2), 6)) == 8
    assert answered(engine, talk(8, item(1), 6)) == 16  # the page of the last token is always computed
    assert answered(engine, talk(8, item(1), 7)) == 20
    assert engine.encoder.encoded == [1, 2]
    engine.assert_drained()


@pytest.mark.parametrize("text", range(9))
@pytest.mark.parametrize("page", range(1, 9))
def test_nothing_from_the_page_of_the_picture_on_is_shared(page, text):
    engine = StubEngine(page=page, blocks=200)
    answered(engine, talk(text, item(1, 9), 5))
    assert answered(engine, talk(text, item(2, 9), 5)) == text // page * page
    same = text + 9 + 5 - 1
    assert answered(engine, talk(text, item(1, 9), 5)) == same // page * page


def test_options_names_and_tenants_part_pictures_too():
    ways = [
        {},
        {"digest": f"{1:063x}a"},  # as a name or a salt would make it
        {"plan": replace(item(1).plan, options={"max_pixels": 1})},
    ]
    engine = StubEngine()
    assert [answered(engine, talk(8, item(1, **way), 6)) for way in ways] == [0, 8, 8]
    assert answered(engine, talk(8, item(1), 6, salt="tenant")) == 0
    assert answered(engine, talk(8, item(1), 6, salt="tenant")) == 16


@pytest.mark.parametrize("rows_kept", [True, False], ids=["rows kept", "rows gone"])
@pytest.mark.parametrize("page", range(1, 9))
def test_a_hit_may_end_anywhere(page, rows_kept):
    """Image rows at 6 to 15; every length that the pages allow, with rows in the cache and without."""
    prompt = talk(6, item(1, 10, columns=5), 4)
    for most in range(0, 20, page):
        engine = StubEngine(page=page, retain=rows_kept, chunk=5)
        answered(engine, prompt)
        force_hits(engine, most)
        hit = answered(engine, prompt)
        assert hit == most // page * page
        needed = hit < 16
        assert engine.encoder.encoded == [1] * (1 + (needed and not rows_kept))
        engine.assert_drained()


@pytest.mark.parametrize("hit", range(13))
def test_rotary_positions_with_a_cached_prefix(hit):
    """4 text, image 2 x 3, 3 text."""
    prompt = talk(4, item(1, 6, columns=3), 3)
    assert prompt.positions.tolist() == [
        [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 7, 8, 9],
        [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9],
        [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9],
    ]
    assert prompt.position_delta == -3
    engine = StubEngine(page=1)
    answered(engine, prompt)
    force_hits(engine, hit)
    request = engine.submit(prompt, 3)
    engine.step()
    known = prompt.positions[:, hit:].tolist()
    assert request.positions(hit, 13).tolist() == known
    (output,) = engine.run(request)
    assert (output.usage.cached_tokens, output.token_ids) == (hit, expected(prompt, 3))


@pytest.mark.parametrize("page", [1, 3, 4])
def test_turns_of_a_conversation(page):
    """The picture is in the first turn; later ones reuse it and the answers between."""
    engine, parts = StubEngine(page=page), [5, item(1, 6, columns=3), 4]
    for _ in range(4):
        prompt = talk(*parts)
        request = engine.submit(prompt, 6)
        engine.run(request)
        assert request.output_ids == expected(prompt, 6)
        parts += [request.output_ids, 3]
    for before, after in pairwise(engine.requests):
        written = before.prompt_len + 5  # the last token of an answer is never computed
        assert after.cached_tokens == written // page * page
    assert engine.encoder.encoded == [1]
    engine.assert_drained()
