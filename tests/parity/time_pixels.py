# SPDX-License-Identifier: Apache-2.0
"""Times picture preparation against transformers' torchvision processor: `python tests/parity/time_pixels.py`.

Both start from the same JPEG bytes and end with patches; ours are bytes, theirs normalised floats.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import conftest  # noqa: F401  makes torchvision importable
import torch
import transformers
from PIL import Image
from pixels_kit import processor

from mmjax.media import ImageSource, MediaOptions

REPEATS = 7


def photo(height: int, width: int) -> bytes:
    """A JPEG with the structure of a photo: smooth areas, edges and grain."""
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    waves = 127 + 60 * np.sin(columns / 97) * np.cos(rows / 61) + 40 * ((columns // 211 + rows // 173) % 2)
    grain = np.random.default_rng(0).normal(0, 6, (height, width, 3))
    file = io.BytesIO()
    Image.fromarray(np.clip(waves[..., None] + grain, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=92)
    return file.getvalue()


def milliseconds(work: Callable[[], object]) -> float:
    """Median of some runs, after one to warm up."""
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times))


def main() -> None:
    theirs = transformers.Qwen2VLImageProcessor()
    ours = processor(Path(tempfile.mkdtemp()))
    print(f"torch threads: {torch.get_num_threads()}; times in ms, medians of {REPEATS}")
    for height, width in ((480, 640), (1080, 1920), (3000, 4000)):
        data = photo(height, width)
        source = ImageSource.open(data, MediaOptions())
        pixels = source.decode()
        picture = Image.fromarray(pixels)
        print(
            f"{width} x {height}: decode {milliseconds(source.decode):.1f},"
            f" ours {milliseconds(lambda p=pixels: ours.image(p, {})):.1f},"
            f" transformers {milliseconds(lambda p=picture: theirs(images=p, return_tensors='pt')):.1f}"
        )
    for workers in (1, 2, 4):
        with ThreadPoolExecutor(workers) as pool:
            batch = [source] * 8
            took = milliseconds(lambda p=pool, b=batch: list(p.map(lambda s: ours.image(s.decode(), {}), b)))
        print(f"8 pictures of 12 megapixels, decoded and cut by {workers} threads: {took / 8:.1f} a picture")


if __name__ == "__main__":
    main()
