# SPDX-License-Identifier: Apache-2.0
"""Another engine's side of a benchmark: the same inputs and sizes, and before ours, as two models may not fit."""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np

from mmjax.bench.encoder import INPUT_SETS, encoder_name
from mmjax.bench.published import checkpoint_folder
from mmjax.bench.report import Figure
from mmjax.bench.serving import first_token_talks, image_question, load_name
from mmjax.bench.subject import Subject, noise, text_ids
from mmjax.bench.text import STEPS
from mmjax.bench.timing import measure
from peers.interface import ModelPeer, Peer, PeerModel, load_peer


class PeerBench:
    """A peer to measure. Raises ConfigError if it is not installed.

    From here on JAX takes device memory as it needs it, and not most of it at once: the peer needs it first.
    """

    def __init__(self, name: str):
        self.name = name
        self.versions: Mapping[str, str] = {}
        self._load = load_peer(name)
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def figures(self, subject: Subject, arguments: argparse.Namespace) -> list[Figure]:
        """The benchmark of `arguments`. Names are those of our figures; floors come with ours."""
        device = "cpu" if subject.device.platform == "cpu" else "cuda"
        with checkpoint_folder(subject) as folder:
            peer = self._load(PeerModel(folder, subject.random, subject.cfg.dtype, device))
            try:
                self.versions = peer.versions
                times = _BENCHMARKS[arguments.benchmark](peer, subject, arguments)
                return [Figure(name, seconds, note=peer.about, peer=self.name) for name, seconds in times.items()]
            finally:
                peer.close()


def _encoder(peer: ModelPeer, subject: Subject, arguments: argparse.Namespace) -> dict[str, list[float]]:
    times, side = {}, arguments.image_size
    for count in arguments.images:
        rng = np.random.default_rng(count)
        batches = [[noise(side, rng) for _ in range(count)] for _ in range(INPUT_SETS)]
        for resident in (True, False):
            calls = [peer.tower(batch, resident=resident) for batch in batches]
            name = encoder_name(count, side, resident=resident)
            times[name] = measure(lambda index, calls=calls: calls[index % INPUT_SETS](), arguments.repeat)
    return times


def _prefill(peer: ModelPeer, subject: Subject, arguments: argparse.Namespace) -> dict[str, list[float]]:
    sequences, length, rng = arguments.sequences, arguments.length, np.random.default_rng(0)
    sets = [np.stack([text_ids(subject.model, length, rng) for _ in range(sequences)]) for _ in range(2)]
    times = measure(lambda index: peer.generate(sets[index % 2], 1), arguments.repeat)
    return {f"prefill {sequences} x {length}": times}


def _decode(peer: ModelPeer, subject: Subject, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Single steps. The first call compiles and is left out, as is the first step of every call."""
    context, rng = arguments.context, np.random.default_rng(0)
    # The new token is a part of the context, and the first one comes from the prompt.
    ids = np.stack([text_ids(subject.model, context - 1, rng) for _ in range(max(arguments.batch))])
    times = {}
    for batch in arguments.batch:
        rounds = [peer.generate(ids[:batch], STEPS + 1)[1] for _ in range(1 + -(-arguments.repeat // (STEPS - 1)))]
        times[f"decode {batch}, context {context}"] = [gap for gaps in rounds[1:] for gap in gaps[1:]]
    return times


def _first_token(peer: Peer, subject: Subject, arguments: argparse.Namespace) -> dict[str, list[float]]:
    rng, times = np.random.default_rng(0), defaultdict(list)
    for _ in range(arguments.repeat + 1):
        for name, messages in first_token_talks(arguments.image_size, arguments.words, rng).items():
            times[name].append(_seconds(lambda messages=messages: peer.chat([messages], 1)))
    return {name: seconds[1:] for name, seconds in times.items()}  # the first round warms up


def _throughput(peer: Peer, subject: Subject, arguments: argparse.Namespace) -> dict[str, list[float]]:
    rng, times, side = np.random.default_rng(0), [], arguments.image_size
    for _ in range(arguments.repeat + 1):
        load = [image_question(side, 16, rng) for _ in range(arguments.requests)]
        times.append(_seconds(lambda load=load: peer.chat(load, arguments.new_tokens)))
    return {load_name(arguments.requests, side, arguments.new_tokens): times[1:]}


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


_BENCHMARKS: dict[str, Callable[..., dict[str, list[float]]]] = {
    "encoder": _encoder,
    "prefill": _prefill,
    "decode": _decode,
    "first-token": _first_token,
    "throughput": _throughput,
}
