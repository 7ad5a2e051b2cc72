# SPDX-License-Identifier: Apache-2.0
"""The command line: mmjax demo | chat | models | convert | verify | bench."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmjax.bench.command import add_bench
from mmjax.errors import MMJaxError
from mmjax.outputs import RequestOutput


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; errors that mmjax raises on purpose are one line on stderr and exit code 1."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except MMJaxError as error:
        print(f"mmjax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mmjax", description="Multimodal inference in JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="ask the small built-in model about a drawn scene, or about your picture")
    demo.add_argument("--image", type=Path, help="a picture of yours instead of a drawn scene")
    demo.add_argument("--ask", action="append", help="a question of yours; may be repeated")
    demo.add_argument("--seed", type=int, default=None, help="which scene to draw")
    demo.add_argument("--save", type=Path, help="folder for the drawn pictures (default: a temporary one)")
    demo.set_defaults(run=_demo)

    chat = commands.add_parser("chat", help="talk with a checkpoint in the terminal")
    chat.add_argument("checkpoint", help="a Hugging Face or converted directory, or 'demo'")
    chat.add_argument("--max-tokens", type=int, default=512)
    chat.add_argument("--temperature", type=float, default=0.0)
    chat.set_defaults(run=_chat)

    models = commands.add_parser("models", help="the model families, and how far each is from transformers")
    models.add_argument("--markdown", action="store_true", help="our own families as a table in Markdown")
    models.set_defaults(run=_models)

    convert = commands.add_parser("convert", help="Hugging Face directory -> orbax checkpoint")
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    convert.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as stored")
    convert.set_defaults(run=_convert)

    verify = commands.add_parser("verify", help="compare with transformers, layer by layer")
    verify.add_argument("checkpoint", type=Path)
    verify.add_argument("--against", choices=("transformers", "reference"), default="transformers")
    verify.set_defaults(run=_verify)

    add_bench(commands)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    import mmjax

    seed = arguments.seed if arguments.seed is not None else int(time.time())
    shows = [_own_picture(arguments)] if arguments.image else _drawn(seed, arguments)
    started = time.perf_counter()
    with mmjax.LLM.demo() as llm:
        print(f"model ready after {time.perf_counter() - started:.1f} s")
        for media, questions in shows:
            for question, truth in questions:
                _answer(llm, [*media, {"type": "text", "text": question}], question, truth)
        print(f"\n{llm.stats().summary()}")
    return 0


def _own_picture(arguments: argparse.Namespace) -> tuple[list[dict], list[tuple[str, str | None]]]:
    from mmjax.demo.terminal import render
    from mmjax.media import ImageSource, MediaOptions

    print(f"picture: {arguments.image}")
    print(render(ImageSource.open(arguments.image, MediaOptions()).decode()))
    questions = arguments.ask or ["What is in the picture?"]
    return [{"type": "image", "image": str(arguments.image)}], [(question, None) for question in questions]


def _drawn(seed: int, arguments: argparse.Namespace) -> list[tuple[list[dict], list[tuple[str, str | None]]]]:
    """A scene, and unless the user asks something else, a pair of pictures and a clip; each saved and shown."""
    from PIL import Image

    from mmjax.demo import demo_clip, demo_pair, demo_scene
    from mmjax.demo.terminal import render

    folder = arguments.save or Path(tempfile.mkdtemp(prefix="mmjax-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    shows = []
    for name, scene in (("scene", demo_scene(seed)), ("pair", demo_pair(seed)), ("clip", demo_clip(seed))):
        frames = list(scene.images) if scene.video is None else list(scene.video)
        path = folder / f"{name}.png"
        strip = np.concatenate(frames, axis=1)
        Image.fromarray(strip).save(path)
        print(f"{name}: {path}\n{render(strip, max_width=72)}\n")
        questions = [(question.text, question.answer) for question in scene.questions]
        media = [{"type": "image", "image": image} for image in scene.images]
        if scene.video is not None:
            media = [{"type": "video", "video": (scene.video, {"fps": scene.fps})}]
        if arguments.ask:
            return [(media, [(question, None) for question in arguments.ask])]
        shows.append((media, questions))
    return shows


def _answer(llm, content: list[dict], question: str, truth: str | None) -> None:
    from mmjax import SamplingParams

    print(f"\n> {question}\n  ", end="", flush=True)
    handle = llm.submit([{"role": "user", "content": content}], SamplingParams(max_tokens=64, temperature=0.0))
    for delta in handle.stream():
        print(delta.text, end="", flush=True)
    output = handle.result()
    verdict = "" if truth is None else "   (right)" if output.text == truth else f"   (drawn was: {truth})"
    print(f"{verdict}\n  {describe(output)}")


def describe(output: RequestOutput) -> str:
    """One line about an answer: tokens and seconds."""
    usage, metrics = output.usage, output.metrics
    first = "no token" if metrics.first_token is None else f"first token after {metrics.first_token:.2f} s"
    return (
        f"[{usage.prompt_tokens} prompt tokens ({usage.image_tokens + usage.video_tokens} of them media, "
        f"{usage.cached_tokens} cached), {usage.completion_tokens} answered; {first}, all after {metrics.total:.2f} s]"
    )


_HELP = """/image PATH   add a picture to the next message      /video PATH   add a clip
/new          forget the conversation                /stats        what the engine did so far
/explain      where pictures and clips will stand    /quit         leave; Ctrl-C ends an answer"""


def _chat(arguments: argparse.Namespace) -> int:
    import mmjax

    llm = mmjax.LLM.demo() if arguments.checkpoint == "demo" else mmjax.LLM(arguments.checkpoint)
    params = mmjax.SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature)
    print(_HELP)
    with llm:
        ChatLoop(llm, params).run()
    return 0


class ChatLoop:
    """A conversation in the terminal; media wait until the next line of text takes them along."""

    def __init__(self, llm, params, *, read=input, write=print):
        self.llm, self.params, self.read, self.write = llm, params, read, write
        self.messages: list[dict] = []
        self.media: list[dict] = []

    def run(self) -> None:
        while True:
            try:
                line = self.read("> ").strip()
            except EOFError:
                return
            if line == "/quit":
                return
            if not line:
                continue
            try:
                self.handle(line)
            except MMJaxError as error:
                self.write(f"error: {error}")
                self.media = []

    def handle(self, line: str) -> None:
        """One line: a command, or text to send. Raises MMJaxError for what the model can't take."""
        command, _, argument = line.partition(" ")
        if command in ("/image", "/video"):
            self._attach(command[1:], argument.strip())
        elif command == "/new":
            self.messages, self.media = [], []
            self.write("a new conversation")
        elif command == "/stats":
            self.write(self.llm.stats().summary())
        elif command == "/explain":
            self.write(self.llm.explain([*self.messages, {"role": "user", "content": self.media}]))
        elif command.startswith("/"):
            self.write(_HELP)
        else:
            self._send(line)

    def _attach(self, kind: str, path: str) -> None:
        if not Path(path).expanduser().is_file():
            self.write(f"no such file: {path!r}")
            return
        self.media.append({"type": kind, kind: str(Path(path).expanduser())})
        self.write(f"{len(self.media)} item(s) go with the next message")

    def _send(self, text: str) -> None:
        turn = {"role": "user", "content": [*self.media, {"type": "text", "text": text}]}
        handle = self.llm.submit([*self.messages, turn], self.params)
        try:
            for delta in handle.stream():
                self.write(delta.text, end="", flush=True)
        except KeyboardInterrupt:  # ends the answer, not the chat
            handle.cancel()
        output = handle.result()
        self.write(f"\n{describe(output)}")
        self.messages += [turn, {"role": "assistant", "content": [{"type": "text", "text": output.text}]}]
        self.media = []


def _models(arguments: argparse.Namespace) -> int:
    from mmjax.models.catalogue import as_markdown, as_text

    print(as_markdown() if arguments.markdown else as_text())
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from conversion.orbax_io import convert

    out = convert(arguments.source, arguments.target, dtype=arguments.dtype)
    print(f"wrote {out}; load it with mmjax.LLM({str(out)!r})")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from conversion.verify import render, verify

    report = verify(arguments.checkpoint, against=arguments.against)
    print(render(report))
    return 0 if report.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
