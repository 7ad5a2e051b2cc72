# SPDX-License-Identifier: Apache-2.0
"""The model under test: a checkpoint, the demo, or random weights of a published size."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mmjax.bench.floors import Ceilings
from mmjax.bench.published import write_published
from mmjax.bench.sizes import SIZES
from mmjax.compilation import Job, compile_all, use_persistent_cache
from mmjax.demo import checkpoint_path
from mmjax.loading import compute_dtype, device_for, load_params, open_model
from mmjax.models.family import Model
from mmjax.models.random_params import random_params
from mmjax.models.registry import family_for


class Subject:
    """A model on a device.

    Args:
      name: "demo", the name of a size, or a checkpoint directory.
      dtype: as in `LLM`.
    """

    def __init__(self, name: str, dtype: str | None):
        use_persistent_cache()  # drawing weights takes executables, too
        self.name, self.device = name, device_for()
        self.random = name in SIZES
        if self.random:
            self.model = _published(name, dtype, self.device)
        else:
            path = checkpoint_path() if name == "demo" else Path(name)
            self.model = open_model(path, dtype=dtype, device=self.device)

    @property
    def cfg(self) -> Any:
        return self.model.cfg

    def params(self, *parts: str) -> dict:
        """The parameters of "vision", "text" or both, on the device; random ones are finite, their answers are not."""
        if self.random:
            spec = self.model.family.spec(self.cfg)
            with jax.default_device(self.device):
                return random_params({part: spec[part] for part in parts}, seed=0)
        loaded = load_params(self.model, device=self.device, progress=False)
        return {part: loaded[part] for part in parts}

    def compile(self, jobs: Sequence[Job]) -> None:
        """Builds these executables as an engine would."""
        with jax.default_matmul_precision("highest" if self.cfg.dtype == "float32" else None):
            compile_all(jobs, device=self.device, progress=False)

    def ceilings(self, repeat: int) -> Ceilings:
        """What this device reaches in the model's dtype."""
        from mmjax.bench.ceilings import measure_ceilings

        return measure_ceilings(self.device, self.cfg.dtype, repeat)[0]


def text_ids(model: Model, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random ids [count] int32 that no item owns."""
    own = [*model.processor.placeholder_id.values(), *model.processor.never_sampled, *model.eos_token_ids]
    return rng.choice(np.setdiff1d(np.arange(model.cfg.vocab_size, dtype=np.int32), own), count)


def noise(side: int, rng: np.random.Generator) -> np.ndarray:
    """A square picture, uint8 [side, side, 3]."""
    return rng.integers(0, 256, (side, side, 3), dtype=np.uint8)


def _published(name: str, dtype: str | None, device: jax.Device) -> Model:
    """Sizes of the published model, with the demo's tokenizer and template: its ids lie in any vocabulary."""
    demo = open_model(checkpoint_path(), dtype=None, device=device)
    with tempfile.TemporaryDirectory(prefix="mmjax-bench-") as folder:
        write_published(name, Path(folder))
        hf_config = json.loads((Path(folder) / "config.json").read_text())
        family = family_for(hf_config["model_type"])
        cfg = family.config(hf_config)
        cfg = replace(cfg, dtype=compute_dtype(dtype, cfg.dtype, device))
        processor = family.processor(cfg, Path(folder))
    return replace(demo, family=family, cfg=cfg, processor=processor)
