# SPDX-License-Identifier: Apache-2.0
"""Claim: the command line says what it did, and a mistake is one line: it ends a command, never a chat."""

from __future__ import annotations

import io
import re

import pytest
from PIL import Image

from mmjax.cli import ChatLoop, main
from mmjax.demo import checkpoint_path
from mmjax.sampling_params import SamplingParams


@pytest.fixture
def terminal(llm):
    """A function (lines typed) -> (the loop afterwards, everything written)."""

    def chat(*lines: str) -> tuple[ChatLoop, str]:
        written = []

        def write(text: object, end: str = "\n", flush: bool = False) -> None:
            written.append(f"{text}{end}")

        typed = iter([*lines, "/quit"])
        loop = ChatLoop(
            llm, SamplingParams(max_tokens=4, ignore_eos=True), read=lambda prompt: next(typed), write=write
        )
        loop.run()
        return loop, "".join(written)

    return chat


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "red.png"
    Image.new("RGB", (56, 84), "red").save(path)
    return path


def test_a_picture_goes_with_the_next_message_alone(terminal, picture):
    loop, written = terminal(f"/image {picture}", "What is it?", "And now?")
    assert "1 item(s) go with the next message" in written
    assert written.count("4 answered") == 2
    kinds = [[part["type"] for part in message["content"]] for message in loop.messages]
    assert kinds == [["image", "text"], ["text"], ["text"], ["text"]]


def test_a_conversation_can_be_forgotten(terminal, picture):
    loop, written = terminal("Hello", f"/image {picture}", "/new", "/stats")
    assert (loop.messages, loop.media) == ([], [])
    assert "a new conversation" in written
    assert "compiled" in written


@pytest.mark.parametrize("line", ["/explain", "What is it?"])
def test_a_broken_picture_does_not_end_the_chat(terminal, tmp_path, line):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    loop, written = terminal("/image nowhere.png", f"/image {broken}", line, "Hello")
    assert "no such file: 'nowhere.png'" in written
    assert "error: " in written
    assert "not a picture" in written
    assert len(loop.messages) == 2


def test_ctrl_c_ends_the_answer_and_not_the_chat(llm):
    written = []

    def write(text: object, end: str = "\n", flush: bool = False) -> None:
        written.append(str(text))
        if end == "" and len(written) == 2:
            raise KeyboardInterrupt

    typed = iter(["Hello", "/new", "/quit"])
    ChatLoop(llm, SamplingParams(max_tokens=400, ignore_eos=True), read=lambda _: next(typed), write=write).run()
    assert written[-1] == "a new conversation"
    assert 0 < int(re.search(r"(\d+) answered", written[-2])[1]) < 400


def test_a_chat_through_a_pipe(picture, monkeypatch, capsys):
    typed = f"/image {picture}\n/explain\nWhat is in the picture?\n/stats\n/new\n/wrong\n/quit\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert main(["chat", "demo"]) == 0
    out = capsys.readouterr().out
    assert out.count("/image PATH") == 2  # at the start and for what it does not know
    assert "prompt tokens = " in out
    assert "1 encoded" in out
    assert "0 since" in out


def test_a_converted_checkpoint_agrees_with_transformers(tmp_path, capsys):
    pytest.importorskip("torch", reason="the judge is a test extra")
    assert main(["convert", str(checkpoint_path()), str(tmp_path / "orbax")]) == 0
    assert f"mmjax.LLM({str(tmp_path / 'orbax')!r})" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "orbax")]) == 0
    report = capsys.readouterr().out
    assert "greedy tokens                 0          0  ok" in report
    assert report.rstrip().endswith("every stage agrees")


def test_the_spans_of_the_next_message(terminal, picture):
    _, written = terminal(f"/image {picture}", "/explain")
    assert "1×6×4" in written


@pytest.mark.parametrize("command", [["chat"], ["verify"], ["convert", "--dtype", "float32"]], ids=" ".join)
def test_errors_are_one_line_and_exit_code_1(command, tmp_path, capsys):
    missing = str(tmp_path / "missing")
    targets = [str(tmp_path / "out")] if command[0] == "convert" else []
    assert main([command[0], missing, *targets, *command[1:]]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"mmjax: {missing} does not exist")
    assert "\n" not in error


def test_the_demo_draws_shows_and_answers(tmp_path, capsys):
    assert main(["demo", "--seed", "3", "--save", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip.png", "pair.png", "scene.png"]
    assert out.count("\n> ") == out.count("   (right)") == 6
    assert "0 since" in out


def test_the_demo_takes_the_users_picture_and_question(tmp_path, capsys):
    scene = Image.new("RGB", (224, 224), "white")
    scene.paste("red", (80, 80, 150, 150))
    scene.save(tmp_path / "mine.png")
    assert main(["demo", "--image", str(tmp_path / "mine.png"), "--ask", "What colour is the square?"]) == 0
    assert "> What colour is the square?\n  red\n" in capsys.readouterr().out
