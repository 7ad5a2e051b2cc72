# SPDX-License-Identifier: Apache-2.0
"""Trains the demo checkpoint: `python -m mmjax.demo.training.train --out OUT --minutes 8`."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np

from mmjax.demo import checkpoint_path, scenes
from mmjax.demo.questions import KINDS
from mmjax.demo.training import plain_scenes
from mmjax.demo.training.assets import write_assets
from mmjax.demo.training.batches import BatchShape, Packer
from mmjax.demo.training.feed import Feed

EVALUATION_SEED = 1_000_003  # scenes of the accuracy tables come from seeds that training never uses
RENDERERS: dict[str, ModuleType] = {"own": scenes, "plain": plain_scenes}
LOG_EVERY = 200  # steps
REMEMBERED = 128
SMALL = 0.6  # share of training examples with small pictures, which cost less and teach as much


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint/, curve.csv and accuracy.json")
    parser.add_argument("--minutes", type=float, default=8.0, help="wall clock in all, evaluation included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--easy", type=int, default=300, help="batches of easy examples at the start")
    parser.add_argument("--evaluation", type=int, default=30, help="batches of each renderer in the last evaluation")
    parser.add_argument("--every", type=float, default=75.0, help="seconds between evaluations")
    parser.add_argument("--resume", type=Path, help="folder with the parameters that an earlier run left")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return parser.parse_args()


def make_packer(folder: Path, source: ModuleType, small: float) -> Packer:
    """A packer with the checkpoint's own tokenizer and processor."""
    from tokenizers import Tokenizer

    from mmjax.models.qwen2_5_vl import FAMILY

    cfg = FAMILY.config(json.loads((folder / "config.json").read_text()))
    return Packer(Tokenizer.from_file(str(folder / "tokenizer.json")), FAMILY.processor(cfg, folder), source, small)


def unseen_batches(args: argparse.Namespace, folder: Path) -> dict[str, list[dict]]:
    """Batches for evaluation, drawn once and kept: pictures of all sizes, in slots that hold two of the largest."""
    kept = {}
    shape = BatchShape(args.slots // 2, patches=2048, tokens=1024, segments=48, windows=96)
    for name, source in RENDERERS.items():
        with Feed(
            partial(make_packer, folder, source, 0.0), shape, args.seed + EVALUATION_SEED, args.workers, 0
        ) as feed:
            kept[name] = [
                {field: array.copy() for field, array in batch.items()}
                for batch, _ in zip(feed, range(args.evaluation), strict=False)
            ]
    return kept


def on_device(feed: Feed, seed: int) -> Iterator[dict]:
    """Batches as device arrays, moved ahead of time by a thread of their own.

    While no fresh batch is ready, one of the last `REMEMBERED` is given again: drawing is slower than a GPU.
    """
    import jax

    ready: queue.Queue = queue.Queue(maxsize=2)
    aliased = jax.default_backend() == "cpu"  # there an array may be a view of the buffer it came from

    def move() -> None:
        for batch in feed:
            ready.put(jax.block_until_ready(jax.device_put({k: v.copy() if aliased else v for k, v in batch.items()})))

    threading.Thread(target=move, daemon=True).start()
    remembered: deque = deque(maxlen=REMEMBERED)
    rng = np.random.default_rng(seed)
    while True:
        if ready.empty() and len(remembered) > REMEMBERED // 4:
            yield remembered[rng.integers(len(remembered))]
        else:
            remembered.append(ready.get())
            yield remembered[-1]


class Run:
    """One training run: state, clock, curve and what it leaves on disk."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        from mmjax.demo.training import step
        from mmjax.models.qwen2_5_vl import FAMILY

        self.args, self.folder, self.family, self.functions = args, folder, FAMILY, step
        self.hf_config = json.loads((folder / "config.json").read_text())
        self.cfg = FAMILY.config(self.hf_config | {"dtype": args.dtype})
        self.table = FAMILY.processor(self.cfg, folder).pixel_table()
        self.state = step.init_state(FAMILY, self.cfg, args.seed)
        if args.resume:
            self.state = step.fresh_state(restore(self.state.params, args.resume))
        self.curve: list[dict] = []

    def evaluate(self, batches: dict[str, list[dict]], count: int) -> dict:
        """Share of questions answered word for word, per renderer and kind, with their number."""
        result: dict = {}
        for renderer, kept in batches.items():
            asked, right = np.zeros((2, len(KINDS) + 1), int)
            for batch in kept[:count]:
                wrong = np.asarray(
                    self.functions.wrong_tokens(self.family, self.cfg, self.state.params, self.table, batch)
                )
                kinds = batch["kinds"]
                asked += np.bincount(kinds[kinds >= 0], minlength=len(KINDS) + 1)
                right += np.bincount(kinds[(kinds >= 0) & (wrong == 0)], minlength=len(KINDS) + 1)
            result[renderer] = {
                kind: {"right": round(float(r / a), 4), "questions": int(a)}
                for kind, r, a in zip((*KINDS, "talk"), right, asked, strict=True)
                if a
            }
        return result

    def train(self, feed: Feed, batches: dict[str, list[dict]], begin: float) -> None:
        """Steps until the time is nearly up, with short evaluations on the way; then the last one."""
        limit = 60 * self.args.minutes
        started = checked = time.monotonic()
        reserve = 0.0
        running: deque = deque()
        for number, batch in enumerate(on_device(feed, self.args.seed)):
            if len(running) > 2:  # the device never lags far behind this loop's clock
                float(running.popleft()["norm"])
            now = time.monotonic()
            done = (now - started) / max(limit - reserve - (started - begin), 1.0)
            if done >= 1:
                break
            rate = self.args.rate * min(1.0, (number + 1) / 200) * min(1.0, 0.5 + 0.5 * math.cos(math.pi * done) + 0.01)
            cells = max(0.0, 1.0 - 1.5 * done)
            self.state, parts = self.functions.train_step(
                self.family, self.cfg, self.state, self.table, batch, np.float32(rate), np.float32(cells)
            )
            running.append(parts)
            if number % LOG_EVERY == 0:
                self.log(number, now - begin, rate, {name: float(value) for name, value in parts.items()})
            if number == 0:  # measure what the last evaluation will need, compilation left out
                self.evaluate(batches, 1)
                mark = time.monotonic()
                self.evaluate(batches, 1)
                reserve = (time.monotonic() - mark) * self.args.evaluation * 1.2 + 8
                print(f"reserve {reserve:.0f} s", flush=True)
            if now - checked > self.args.every:
                self.save(self.evaluate(batches, 3), number)
                checked = time.monotonic()
        self.save(self.evaluate(batches, self.args.evaluation), number)

    def log(self, number: int, seconds: float, rate: float, parts: dict[str, float]) -> None:
        row = {"step": number, "seconds": round(seconds, 1), "rate": round(rate, 6)}
        self.curve.append(row | {name: round(value, 4) for name, value in parts.items()})
        print(" ".join(f"{name} {value}" for name, value in self.curve[-1].items()), flush=True)

    def save(self, accuracy: dict, number: int) -> None:
        """Writes the checkpoint, the parameters to resume from, the curve and the accuracy table."""
        from conversion.export import export

        for renderer, kinds in accuracy.items():
            print(renderer, *(f"{kind} {100 * v['right']:.1f}" for kind, v in kinds.items()), flush=True)
        params = {name: self.state.params[name] for name in ("vision", "text")}
        export(params, self.family, self.cfg, self.folder, config=self.hf_config, dtype="bfloat16")
        keep(self.state.params, self.args.out)
        with open(self.args.out / "curve.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, self.curve[0])
            writer.writeheader()
            writer.writerows(self.curve)
        table = {"steps": number, "seed": self.args.seed, "accuracy": accuracy}
        (self.args.out / "accuracy.json").write_text(json.dumps(table, indent=1) + "\n")


def keep(params: dict, folder: Path) -> None:
    """Float32 parameters in two files."""
    import jax

    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    half = len(leaves) // 2
    np.savez(folder / "params_0.npz", *leaves[:half])
    np.savez(folder / "params_1.npz", *leaves[half:])


def restore(like: dict, folder: Path) -> dict:
    """What `keep` wrote, in the tree of `like`."""
    import jax

    leaves = []
    for part in range(2):
        with np.load(folder / f"params_{part}.npz") as file:
            leaves += [file[f"arr_{i}"] for i in range(len(file.files))]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def main() -> None:
    begin = time.monotonic()
    args = options()
    folder = args.out / "checkpoint"
    write_assets(folder, like=checkpoint_path())  # with weights go the token ids they were trained with
    batches = unseen_batches(args, folder)
    packer = partial(make_packer, folder, scenes, SMALL)
    with Feed(packer, BatchShape(args.slots), args.seed, args.workers, args.easy) as feed:
        print(f"evaluation drawn after {time.monotonic() - begin:.0f} s", flush=True)
        Run(args, folder).train(feed, batches, begin)


if __name__ == "__main__":
    main()
