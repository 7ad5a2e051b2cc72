# SPDX-License-Identifier: Apache-2.0
"""The command line of `mmjax bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from mmjax.bench.report import Figure, beside, render, save
from mmjax.bench.sizes import SIZES

_ABOUT = {
    "ceilings": "matrix product and copy rates of the device",
    "encoder": "the vision tower",
    "prefill": "one packed step of prompts",
    "decode": "steps of one token a sequence",
    "first-token": "a new picture, the same with another question, the next turn; host work included",
    "between-tokens": "decoding in a full batch, alone and while pictures arrive; what the device idles",
    "throughput": "many requests at once, one picture each",
    "startup": "start to ready with an empty and a full compilation cache",
    "host": "the CPU's part: pixels, digests, prompts, scheduling",
}


# Which engines can be measured beside this one, by benchmark.
_PEERS = {
    "encoder": ("transformers",),
    "prefill": ("transformers",),
    "decode": ("transformers",),
    "first-token": ("transformers", "vllm"),
    "throughput": ("transformers", "vllm"),
}


def add_bench(commands: argparse._SubParsersAction) -> None:
    """Adds `bench` to the subcommands of `mmjax`."""
    bench = commands.add_parser(
        "bench",
        help="measure this machine; see PERFORMANCE.md",
        epilog="--peer transformers (encoder, prefill, decode, first-token, throughput) and --peer vllm (the last two) "
        "measure that engine first, in the same process and on the same inputs, and add its lines.",
    )
    names = bench.add_subparsers(required=True, metavar="BENCHMARK", dest="benchmark")
    parsers = {name: names.add_parser(name, help=about) for name, about in _ABOUT.items()}
    for parser in parsers.values():
        model = parser.add_mutually_exclusive_group()
        model.add_argument("--model", default="demo", help="a checkpoint directory, or 'demo' (the default)")
        model.add_argument("--size", choices=tuple(SIZES), help="random weights of a published size")
        parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the model's, float32 on a CPU")
        parser.add_argument("--repeat", type=_positive, default=10, help="timed rounds (default: 10)")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
        parser.set_defaults(run=run)
    for benchmark, peers in _PEERS.items():
        parsers[benchmark].add_argument("--peer", choices=peers, help="measure this engine as well; it runs first")
    encoder, first, load = parsers["encoder"], parsers["first-token"], parsers["throughput"]
    between = parsers["between-tokens"]
    for parser in (encoder, first, between, load):
        parser.add_argument("--image-size", type=_positive, default=1008, help="pixels a side (default: 1008)")
    encoder.add_argument("--images", type=_positives, default=(1, 4, 16), help="pictures a call (default: 1,4,16)")
    encoder.add_argument("--exact", action="store_true", help="buckets without padding")
    parsers["prefill"].add_argument("--sequences", type=_positive, default=16)
    parsers["prefill"].add_argument("--length", type=_positive, default=1024, help="tokens of each (default: 1024)")
    parsers["decode"].add_argument("--context", type=_positive, default=1024)
    parsers["decode"].add_argument("--batch", type=_positives, default=(1, 16, 64, 256), help="such as 1,16,64,256")
    first.add_argument("--words", type=_positive, default=50, help="words of each question (default: 50)")
    between.add_argument("--batch", type=_positive, default=64)
    between.add_argument("--context", type=_positive, default=1024)
    between.add_argument("--new-tokens", type=_positive, default=128)
    load.add_argument("--requests", type=_positive, default=96)
    load.add_argument("--new-tokens", type=_positive, default=128)
    parsers["host"].add_argument("--queued", type=_positive, default=10_000, help="requests in the line")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table, and writes the file."""
    name, peer = arguments.size or arguments.model, _peer(arguments)
    if arguments.benchmark == "startup":
        from mmjax.bench.startup import bench_startup

        figures, device = bench_startup(name, arguments.dtype, arguments.repeat)
    else:
        from mmjax.bench.subject import Subject

        subject = Subject(name, arguments.dtype)
        device = "the host" if arguments.benchmark == "host" else subject.device.device_kind
        theirs = peer.figures(subject, arguments) if peer else []
        figures = beside(_BENCHMARKS[arguments.benchmark](subject, arguments), theirs)
    print(f"{arguments.benchmark}: {name} on {device}; medians of {arguments.repeat} rounds\n{render(figures)}")
    if arguments.json is not None:
        save(arguments.json, figures, device, name, peer.versions if peer else {})
    return 0


def _peer(arguments: argparse.Namespace):
    """The other engine's side, None if none is asked for. Raises ConfigError if it is not installed."""
    if getattr(arguments, "peer", None) is None:
        return None
    from mmjax.bench.peers import PeerBench

    return PeerBench(arguments.peer)


def _ceilings(subject, arguments) -> Sequence[Figure]:
    from mmjax.bench.ceilings import measure_ceilings

    return measure_ceilings(subject.device, subject.cfg.dtype, arguments.repeat)[1]


def _encoder(subject, arguments) -> Sequence[Figure]:
    from mmjax.bench.encoder import bench_encoder

    return bench_encoder(subject, arguments.images, arguments.image_size, arguments.repeat, exact=arguments.exact)


def _prefill(subject, arguments) -> Sequence[Figure]:
    from mmjax.bench.text import bench_prefill

    return bench_prefill(subject, arguments.sequences, arguments.length, arguments.repeat)


def _decode(subject, arguments) -> Sequence[Figure]:
    from mmjax.bench.text import bench_decode

    return bench_decode(subject, arguments.context, arguments.batch, arguments.repeat)


def _first_token(subject, arguments) -> Sequence[Figure]:
    from mmjax.bench.serving import bench_first_token

    return bench_first_token(subject, arguments.image_size, arguments.words, arguments.repeat)


def _between_tokens(subject, arguments) -> Sequence[Figure]:
    from mmjax.bench.between_tokens import bench_between_tokens

    sizes = (arguments.batch, arguments.context, arguments.new_tokens, arguments.image_size)
    return bench_between_tokens(subject, *sizes, arguments.repeat)


def _throughput(subject, arguments) -> Sequence[Figure]:
    from mmjax.bench.serving import bench_throughput

    return bench_throughput(subject, arguments.requests, arguments.new_tokens, arguments.image_size, arguments.repeat)


def _host(subject, arguments) -> Sequence[Figure]:
    from mmjax.bench.host import bench_host

    return bench_host(subject, arguments.queued, arguments.repeat)


_BENCHMARKS: dict[str, Callable[..., Sequence[Figure]]] = {
    "ceilings": _ceilings,
    "encoder": _encoder,
    "prefill": _prefill,
    "decode": _decode,
    "first-token": _first_token,
    "between-tokens": _between_tokens,
    "throughput": _throughput,
    "host": _host,
}


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return value


def _positives(text: str) -> tuple[int, ...]:
    return tuple(map(_positive, text.split(",")))
