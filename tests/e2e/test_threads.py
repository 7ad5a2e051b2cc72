# SPDX-License-Identifier: Apache-2.0
"""Claim: any thread and any coroutine may ask, cancel or leave at any time; answers are those that it gets alone."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from llm_kit import CHECKPOINT, GREEDY, assert_nothing_held, build, clip, held, noise, png, serving, together, user

import mmjax
from mmjax.engine.handle import Handle

pytestmark = pytest.mark.timeout(300)

SEEDED = mmjax.SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
LONG = mmjax.SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
QUESTIONS = [
    (user(noise(84, 140, 1), "what?"), GREEDY),
    (user("a word"), GREEDY),
    (user(png(noise(56, 112, 2)), "and", noise(150, 90, 3), "which?"), GREEDY),
    (user(clip(5, 56, 84, 4), "where to?"), GREEDY),
    (user(noise(84, 140, 1), "what?"), SEEDED),
    (user("tell me about " * 9), SEEDED),
    (user(noise(300, 40, 5), "and now"), SEEDED),
    (user(noise(84, 140, 1), "and this?"), GREEDY),
]


@pytest.fixture(scope="module")
def alone(tiny_llm):
    """The answer to each question in an engine that does nothing else."""
    answers = []
    for messages, params in QUESTIONS:
        with serving(tiny_llm()) as llm:
            answers.append(llm.chat(messages, params))
    return answers


def test_eight_threads_get_the_answers_they_get_alone(llm, alone):
    start = threading.Barrier(8)

    def work(thread: int) -> list[tuple[int, list[int], str]]:
        order = random.Random(thread).sample(range(len(QUESTIONS)), len(QUESTIONS))
        start.wait()
        answers = []
        for turn, index in enumerate(order):
            messages, params = QUESTIONS[index]
            if (thread + turn) % 2:
                out = llm.chat(messages, params)
                answers.append((index, out.token_ids, out.text))
            else:
                deltas = list(llm.stream(messages, params))
                ids = [token for delta in deltas for token in delta.token_ids]
                answers.append((index, ids, "".join(delta.text for delta in deltas)))
        return answers

    with ThreadPoolExecutor(8) as pool:
        answers = [answer for part in pool.map(work, range(8)) for answer in part]
    assert len(answers) == 64
    for index, ids, text in answers:
        assert (ids, text) == (alone[index].token_ids, alone[index].text), f"question {index}"


def test_coroutines_get_the_answers_they_get_alone(llm, alone):
    async def streamed(messages, params):
        deltas = [delta async for delta in llm.astream(messages, params)]
        return [token for delta in deltas for token in delta.token_ids], "".join(delta.text for delta in deltas)

    async def ask():
        # More at once than asyncio has threads: none of them may wait for a thread of its own.
        chats = [llm.achat(*question) for question in QUESTIONS * 4]
        streams = [streamed(*question) for question in QUESTIONS]
        return await asyncio.gather(*chats), await asyncio.gather(*streams)

    outs, streams = asyncio.run(ask())
    expected = [(out.token_ids, out.text) for out in alone]
    assert [(out.token_ids, out.text) for out in outs] == expected * 4
    assert streams == expected


def test_a_late_listener_misses_nothing(llm, alone):
    handle = llm.submit(*QUESTIONS[0])
    handle.wait(30)
    parts = []
    handle.subscribe(parts.append)
    assert [token for part in parts[:-1] for token in part.token_ids] == alone[0].token_ids
    assert parts[-1] is handle.result()


def test_coroutines_raise_the_error_of_their_request(llm):
    async def ask():
        results = await asyncio.gather(
            llm.achat(user(b"not a picture", "?")), llm.achat(*QUESTIONS[1]), return_exceptions=True
        )
        with pytest.raises(mmjax.RequestError):
            async for _ in llm.astream(user(b"", "?")):
                pass
        return results

    bad, good = asyncio.run(ask())
    assert isinstance(bad, mmjax.RequestError)
    assert good.finish_reason == "length"


def test_cancelling_in_mid_stream_frees_everything(llm):
    handle = llm.submit(user(noise(84, 140, 1), "what?"), LONG)
    stream = handle.stream()
    got = [next(stream), next(stream)]
    assert held(llm)["pages"] > 0
    handle.cancel()
    got += list(stream)
    out = handle.result(30)
    assert out.finish_reason == "cancelled"
    assert 2 <= len(out.token_ids) < LONG.max_tokens
    assert "".join(delta.text for delta in got) == out.text
    assert [token for delta in got for token in delta.token_ids] == out.token_ids
    assert_nothing_held(llm)


def test_cancelling_before_the_first_step(llm):
    with together(llm):
        handles = [llm.submit(user(noise(84, 140, i), "what?"), LONG) for i in range(6)]
        for handle in handles:
            handle.cancel()
    assert [handle.result(30).finish_reason for handle in handles] == ["cancelled"] * 6
    assert [handle.result().token_ids for handle in handles] == [[]] * 6
    assert_nothing_held(llm)


def _leave_early(stream):
    for _ in stream:
        break


@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(lambda stream: stream.close(), id="closed before it was read"),
        pytest.param(lambda stream: (next(stream), stream.close()), id="closed"),
        pytest.param(_leave_early, id="dropped by a loop"),
        pytest.param(lambda stream: None, id="never used"),
    ],
)
def test_leaving_a_stream_cancels_its_request(llm, leave):
    leave(llm.stream(user(noise(84, 140, 1), "what?"), LONG))
    gc.collect()
    steps = llm.running.engine.trace.steps
    _wait_until(lambda: held(llm)["requests"] == 0)
    assert llm.running.engine.trace.steps - steps < 200  # it did not run to its end


def test_a_closed_stream_has_no_more_deltas(llm):
    stream = llm.stream(user("a word"), LONG)
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    _wait_until(lambda: held(llm)["requests"] == 0)


def test_cancelled_coroutines_cancel_their_requests(llm):
    async def ask():
        task = asyncio.create_task(llm.achat(user(noise(84, 140, 1), "what?"), LONG))
        early = asyncio.create_task(llm.achat(user(noise(84, 140, 2), "what?"), LONG))
        await asyncio.sleep(0)
        early.cancel()  # while it is being submitted
        async for _ in llm.astream(user("a word"), LONG):
            break
        _ = [delta async for delta in llm.astream(*QUESTIONS[1])]
        task.cancel()
        return await asyncio.gather(task, early, return_exceptions=True)

    results = asyncio.run(ask())
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    _wait_until(lambda: held(llm)["requests"] == 0)


@pytest.mark.parametrize("count", [1, 6])
def test_an_interrupted_call_cancels_its_requests(llm, monkeypatch, count):
    """Ctrl-C in a notebook: nothing goes on behind the user's back."""
    waits = iter(range(10))

    def wait(handle, timeout=None, original=Handle.wait):
        if next(waits) == count // 2:
            raise KeyboardInterrupt
        return original(handle, timeout)

    monkeypatch.setattr(Handle, "wait", wait)
    messages = [user(noise(84, 140, i), "what?") for i in range(count)]
    with pytest.raises(KeyboardInterrupt):
        llm.chat(messages[0] if count == 1 else messages, LONG)
    monkeypatch.undo()
    _wait_until(lambda: held(llm)["requests"] == 0)
    assert llm.running.engine.trace.steps < LONG.max_tokens + 50


def test_a_listener_that_fails_harms_nobody(llm, alone):
    def broken(part):
        raise RuntimeError("the event loop is closed")

    with together(llm):
        handle, neighbour = llm.submit(*QUESTIONS[0]), llm.submit(*QUESTIONS[1])
        handle.subscribe(broken)
    assert neighbour.result(30).token_ids == alone[1].token_ids
    assert handle.result(30).token_ids == alone[0].token_ids


def test_close_while_busy_leaves_nobody_waiting(tiny_checkpoint):
    llm = build(tiny_checkpoint("qwen2_5_vl", **CHECKPOINT).path)
    ends, started = [], threading.Semaphore(0)

    def ask(thread: int) -> None:
        for turn in range(100):
            try:
                handle = llm.submit(user(noise(84, 140, 100 * thread + turn), "what?"), LONG)
                started.release()
                ends.append(handle.result(60).finish_reason)
            except mmjax.EngineError as error:
                ends.append(str(error))
                return

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        started.acquire()
    llm.close()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert "cancelled" in ends
    assert sum("closed" in end for end in ends) == 8
    llm.close()  # twice is fine


def test_the_judge_closes_while_busy(tiny_checkpoint):
    llm = build(tiny_checkpoint("qwen2_5_vl", **CHECKPOINT).path, reference=True)
    handles = [llm.submit(user(noise(84, 140, i), "what?"), LONG) for i in range(3)]
    next(handles[0].stream())
    llm.close()
    assert [handle.result(30).finish_reason for handle in handles] == ["cancelled"] * 3
    with pytest.raises(mmjax.EngineError, match="closed"):
        llm.chat(*QUESTIONS[0])


@pytest.mark.parametrize("reference", [False, True])
def test_rows_that_never_came_are_an_error(tiny_checkpoint, reference):
    """An answer that is cut short says so; a list of rows could not. All is submitted before the engine closes."""
    llm = build(tiny_checkpoint("qwen2_5_vl", **CHECKPOINT).path, reference=reference)
    inbox = llm.running._inbox if reference else llm.running.engine._inbox
    with ThreadPoolExecutor(2) as threads, ExitStack() as busy:
        if reference:
            answering = llm.submit(user("a word"), LONG).stream()
            next(answering)
        else:
            busy.enter_context(together(llm))
        encoding = threads.submit(llm.encode, [noise(200, 200, i) for i in range(9)])  # takes several steps
        while inbox.empty():
            time.sleep(0.001)
        closing = threads.submit(llm.close)
        while not reference and inbox._messages.qsize() < 2:
            time.sleep(0.001)
        busy.close()
        with pytest.raises(mmjax.EngineError, match="closed before"):
            encoding.result(60)
        closing.result(60)


def test_a_closed_engine_says_so(tiny_checkpoint):
    with build(tiny_checkpoint("qwen2_5_vl", **CHECKPOINT).path) as llm:
        handle = llm.submit(*QUESTIONS[0])
        handle.wait(30)
    calls = {
        "chat": lambda: llm.chat(*QUESTIONS[0]),
        "list": lambda: llm.chat([QUESTIONS[0][0]] * 2, GREEDY),
        "generate": lambda: llm.generate("a", GREEDY),
        "stream": lambda: llm.stream(*QUESTIONS[0]),
        "submit": lambda: llm.submit(*QUESTIONS[1]),
        "encode": lambda: llm.encode([noise(84, 140)]),
        "stats": llm.stats,
        "count_tokens": lambda: llm.count_tokens(QUESTIONS[0][0]),
        "achat": lambda: asyncio.run(llm.achat(*QUESTIONS[0])),
    }
    for name, call in calls.items():
        with pytest.raises(mmjax.EngineError, match="closed"):
            print(name, call())
    assert handle.result().finish_reason == "length"  # what was finished stays readable
    handle.cancel()
    assert llm.running.machine.text.state is None  # the device's memory is free


LEAVE = """
import sys
sys.path[:0] = {paths}
from llm_kit import user
import mmjax
engine = mmjax.EngineConfig(max_batch_size=1, max_num_tokens=64, max_seq_len=512, compilation_cache=False)
multimodal = mmjax.MultimodalConfig(disable_mm_encoder=True)
params = mmjax.SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
llms = [
    mmjax.LLM({path!r}, reference=reference, engine=engine, multimodal=multimodal, progress=False)
    for reference in (True, False)
]
streams = [llm.stream(user("a word"), params) for llm in llms]
print([len(next(stream).token_ids) for stream in streams])
"""


def test_the_interpreter_may_end_while_engines_are_busy(tiny_checkpoint):
    """A thread in the middle of a step would abort it."""
    here = Path(__file__).parents[1]
    path = str(tiny_checkpoint("qwen2_5_vl", **CHECKPOINT).path)
    script = LEAVE.format(paths=[str(here), str(here.parent)], path=path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stdout) == (0, "[1, 1]\n"), done.stderr


def _wait_until(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)
