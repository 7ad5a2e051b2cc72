# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint directory to a model: family, config, tokenizer, processor, parameters on the device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from mmjax.errors import CheckpointError, ConfigError
from mmjax.hf_tokenizer import load_tokenizer
from mmjax.models.family import Model
from mmjax.models.registry import family_for

DTYPES = ("float32", "bfloat16")


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error


def device_for(name: str | None = None) -> jax.Device:
    """The device to run on: the first GPU, else the CPU; `name` ("cpu", "gpu") asks for one of them.

    Raises ConfigError where there is none of that name.
    """
    try:
        return jax.devices(name)[0]
    except RuntimeError as error:
        raise ConfigError(f"there is no device {name!r} here: {error}") from error


def compute_dtype(asked: str | None, checkpoint: str, device: jax.Device) -> str:
    """The asked dtype, else the checkpoint's where the device has it, else float32.

    A CPU computes in float32 alone: its bfloat16 scatters copy.
    """
    capability = getattr(device, "compute_capability", None)
    lacks_bfloat16 = device.platform == "cpu" or (capability is not None and float(capability) < 8.0)
    if asked is None:
        return "float32" if lacks_bfloat16 else checkpoint
    if asked not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {asked!r}")
    if device.platform == "cpu" and asked != "float32":
        raise ConfigError(f"the CPU computes in float32 only, got dtype={asked!r}; leave dtype out or run on a GPU")
    if asked == "bfloat16" and lacks_bfloat16:
        raise ConfigError(
            f"{device.device_kind} (compute capability {capability}) has no bfloat16; pass dtype='float32'"
        )
    return asked


def open_model(path: str | Path, *, dtype: str | None, device: jax.Device) -> Model:
    """Reads everything but the weights. Raises CheckpointError for missing or unusable files and unknown families."""
    from conversion.checkpoint import describe  # the converter is reached from here and from the command line alone

    checkpoint = describe(Path(path))
    hf_config = checkpoint.config
    family = family_for(hf_config.get("model_type", ""))
    cfg = family.config(hf_config)
    cfg = replace(cfg, dtype=compute_dtype(dtype, cfg.dtype, device))
    tokenizer, processor = load_tokenizer(checkpoint.path), family.processor(cfg, checkpoint.path)
    outside = [token for token in processor.special_ids if not 0 <= token < cfg.vocab_size]
    if outside:
        raise CheckpointError(
            f"{checkpoint.path}: token {outside[0]} stands inside pictures under its own embedding, "
            f"and the vocabulary of config.json ends at {cfg.vocab_size}"
        )
    return Model(
        path=checkpoint.path,
        family=family,
        cfg=cfg,
        processor=processor,
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(checkpoint.path, hf_config, tokenizer),
    )


def load_params(model: Model, *, device: jax.Device, progress: bool) -> dict:
    """The parameter tree {"vision": ..., "text": ...} on `device`."""
    from conversion.loader import load_params as load

    return load(model.path, model.family, model.cfg, device=device, progress=progress)


def _eos_token_ids(path: Path, hf_config: dict, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end an answer: generation_config.json, else config.json, and always the tokenizer's own."""
    found: list[int] = []
    generation = path / "generation_config.json"
    configs = ([_read_json(generation)] if generation.is_file() else []) + [hf_config, hf_config.get("text_config", {})]
    for config in configs:
        ids = config.get("eos_token_id")
        if ids is not None:
            found.extend(ids if isinstance(ids, list) else [ids])
            break
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(found))
