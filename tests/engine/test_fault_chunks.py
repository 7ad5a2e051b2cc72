# SPDX-License-Identifier: Apache-2.0
"""Claim: however a prompt is cut into chunks, each position gets its own row or id and its own rotary position."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from inputs_kit import BREAK, END, broken_rows, learned_rows, plan_of, timed_steps
from stub_kit import PLAIN, StubEngine, expected, item, merged, row_value, talk

from mmjax.engine.batch import Chunk, fill_rows
from mmjax.errors import PlaceholderError
from mmjax.inputs.items import Modality


def run(*prompts, tokens=4, **limits):
    """An engine that has answered `prompts`, each rightly."""
    engine = StubEngine(**limits)
    for prompt in prompts:
        engine.submit(prompt, tokens)
    engine.run()
    engine.assert_answers()
    engine.assert_drained()
    return engine


def movie(content: int, *grid: int):
    """A clip of (time, rows, columns) merged patches."""
    steps, rows, columns = grid
    pad = PLAIN.placeholder_id[Modality.VIDEO]
    plan = plan_of([pad] * (steps * rows * columns), None, Modality.VIDEO, grid=(steps, 2 * rows, 2 * columns))
    return item(content, plan=plan)


@pytest.mark.parametrize("chunk", range(1, 23))
def test_a_chunk_takes_the_rows_of_its_own_positions(chunk):
    """8 text, an image of 6 rows, 8 text."""
    engine = run(talk(8, item(1), 8), chunk=chunk)
    starts = range(0, 22, chunk)
    assert engine.text.rows_per_step == [sum(8 <= p < 14 for p in range(s, min(s + chunk, 22))) for s in starts]
    assert engine.encoder.calls == [[1]]


def test_chunks_of_four_take_0_0_4_2_0_0():
    assert run(talk(8, item(1), 8), chunk=4).text.rows_per_step == [0, 0, 4, 2, 0, 0]


@pytest.mark.parametrize("chunk", range(1, 14))
@pytest.mark.parametrize(("rows", "columns"), [(2, 4), (4, 2)])
def test_breaks_and_ends_keep_their_own_embeddings(rows, columns, chunk):
    prompt = talk(1, item(1, plan=broken_rows(rows, columns)), 2, processor=PLAIN)
    seen = merged(prompt).tolist()
    lines = [
        [*(row_value(1, line * columns + k) for k in range(columns)), END if line == rows - 1 else BREAK]
        for line in range(rows)
    ]
    assert seen[1:-2] == [value for line in lines for value in line]
    run(prompt, chunk=chunk)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("plan", [learned_rows(2, 3), timed_steps(3, 2)], ids=["learned breaks", "time stamps"])
def test_spans_of_other_shapes(plan, chunk):
    run(talk(2, item(1, plan=plan), 3, item(2, plan=plan), 1, processor=PLAIN), chunk=chunk)


PARTS = {"long clip": movie(1, 2, 1, 2), "image": item(2, 4, columns=2), "short clip": movie(3, 1, 1, 1)}


@pytest.mark.parametrize("order", list(itertools.permutations(PARTS)), ids=" ".join)
def test_images_and_clips_keep_the_order_of_the_prompt(order):
    prompt = talk(1, PARTS[order[0]], 2, PARTS[order[1]], 1, PARTS[order[2]], 2)
    values = merged(prompt)
    contents = [int(value) // 1000 - 10 for value in values if value >= 10_000]
    assert contents == [PARTS[name].source for name in order for _ in range(PARTS[name].plan.rows)]
    for placed in prompt.items:  # rows of an item in their own order, its grid beside its span
        assert values[placed.row_positions].tolist() == [row_value(placed.source, i) for i in range(placed.plan.rows)]
        steps = prompt.positions[0, placed.row_positions]
        assert len(set(steps.tolist())) == placed.plan.grid[0]
    for chunk in (1, 3, 64):
        run(prompt, chunk=chunk)


def test_rows_of_several_items_and_requests_in_one_step():
    """Lengths 4, 6, 2 of image, clip, image; and three requests whose items have 1, 2 and 3 rows."""
    one = talk(item(10, 4), movie(20, 3, 1, 2), item(30, 2))
    contents = (merged(one) // 1000 - 10).tolist()
    assert contents == [10] * 4 + [20] * 6 + [30] * 2
    many = [talk(item(1, 1), item(2, 2)), talk(item(3, 3)), talk(2, item(1, 1), 1)]
    assert [(merged(prompt) // 1000).tolist().count(13) for prompt in many] == [0, 3, 0]
    engine = run(one, *many)
    assert engine.text.rows_per_step == [12 + 3 + 3 + 1]
    assert engine.encoder.calls == [[10, 20, 30, 1, 2, 3]]


def test_positions_of_two_images_and_the_text_behind():
    """4 text, grid 2 x 3, 3 text, then grid 5 x 2: it starts at 10, the text behind it at 15, delta -8."""
    prompt = talk(4, item(1, 6, columns=3), 3, item(2, 10, columns=2), 2)
    assert prompt.positions[:, 10:13].tolist() == [[7, 8, 9]] * 3
    assert prompt.positions[:, 13].tolist() == [10, 10, 10]
    assert prompt.positions[:, -2:].tolist() == [[15, 16]] * 3
    assert prompt.position_delta == -8
    for chunk in range(1, 26):
        run(prompt, tokens=6, chunk=chunk)


def test_every_sequence_of_a_batch_has_its_own_delta():
    prompts = [
        talk(4, item(1, 6, columns=3), 3),
        talk(5),
        talk(4, item(1, 6, columns=3), 3, item(2, 10, columns=2), 2),
    ]
    assert [prompt.position_delta for prompt in prompts] == [-3, 0, -8]
    for order in itertools.permutations(prompts):
        run(*order, tokens=5, chunk=16)


@pytest.mark.parametrize("after", range(1, 10))
def test_positions_go_on_after_a_pause(after):
    """One of three sequences is preempted; it computes prompt and answer again, then decodes on."""
    engine = StubEngine(chunk=16)
    for prompt in (talk(4, item(1, 6, columns=3), 3), talk(5), talk(2, item(2, 10, columns=2), 2)):
        engine.submit(prompt, 8)
    for _ in range(after):
        engine.step()
    victim = engine.scheduler.running[after % len(engine.scheduler.running)]
    engine.scheduler.preempt(victim)
    engine.run()
    engine.assert_answers()
    engine.assert_drained()


def test_what_lies_behind_the_prompt_is_text():
    """A preempted request computes its answer in the same chunks as its prompt; the answer never takes a row."""
    request = StubEngine().submit(talk(2, item(1, 6, columns=3), 1), 8)
    request.output_ids = [PLAIN.placeholder_id[Modality.IMAGE]] * 4
    ids, rows = request.token_ids(0, 13).copy(), np.full(13, 99, np.int32)
    fill_rows(rows, ids, Chunk(request, 0, 13), lambda *_: np.arange(6, dtype=np.int32))
    assert rows.tolist() == [99, 99, 0, 1, 2, 3, 4, 5, 99, 99, 99, 99, 99]
    assert ids[9:].tolist() == request.output_ids
    assert request.positions(8, 13).tolist() == [[5, 6, 7, 8, 9]] * 3


@pytest.mark.parametrize(("begin", "end"), [(0, 6), (3, 5)])
def test_rows_and_positions_that_disagree_are_named_before_anything_runs(begin, end):
    request = StubEngine().submit(talk(2, item(1, 3), 1))
    ids, rows = np.zeros(end - begin, np.int32), np.zeros(end - begin, np.int32)
    with pytest.raises(PlaceholderError, match="request r0, item 0: 2 embedding rows for 3 prompt positions"):
        fill_rows(rows, ids, Chunk(request, begin, end), lambda *_: np.array([7, 8], np.int32))


BATCH = {
    "text": talk(9),
    "image": talk(3, item(1), 2),
    "other text": talk(1),
    "two images": talk(item(2), 4, item(1), 1),
    "clip": talk(2, movie(3, 2, 2, 2), 2),
}


@pytest.mark.parametrize("first", range(len(BATCH)))
@pytest.mark.parametrize("chunk", [5, 64])
def test_neighbours_and_their_order_do_not_matter(first, chunk):
    prompts = list(BATCH.values())
    engine = run(*prompts[first:], *prompts[:first], batch=5, chunk=chunk, tokens=6)
    assert sorted(engine.encoder.encoded) == [1, 2, 3]


def test_an_id_that_looks_like_a_placeholder_is_text_wherever_it_comes_from():
    """Answers hold placeholder ids now and then, since nothing bans them here; a later turn brings them back."""
    pad = PLAIN.placeholder_id[Modality.IMAGE]
    prompt = next(p for n in range(1, 300) if pad in expected(p := talk(n % 40 + 1, item(n), 2), 8)[:4])
    engine = run(prompt, tokens=12, chunk=7)
    assert pad in engine.requests[0].output_ids
    assert sum(engine.text.rows_per_step) == 6
