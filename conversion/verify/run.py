# SPDX-License-Identifier: Apache-2.0
"""Runs both sides of a verification, one after the other, so that one model at a time is in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

import jax

from conversion.checkpoint import describe
from conversion.export import export
from conversion.loader import load_params
from conversion.verify.prompt import fixed_prompt
from conversion.verify.stages import Report, compare
from mmjax.config import EngineConfig
from mmjax.errors import ConfigError

NEW_TOKENS = 32


def verify(
    checkpoint: str | Path,
    against: Literal["transformers", "reference"] = "transformers",
    *,
    device: jax.Device | None = None,
    engine: EngineConfig | None = None,
    new_tokens: int = NEW_TOKENS,
    progress: bool = True,
) -> Report:
    """Compares mmjax with a judge on one drawn picture and one question, stage by stage, in float32.

    Args:
      checkpoint: a Hugging Face or a converted directory.
      against: "transformers" runs the original model on the CPU and compares every layer of the decoder;
        "reference" compares the engine, as it serves requests, with mmjax's own slow path.
      device: where mmjax computes; the first device if None.
      engine: knobs of the engine that "reference" judges.
      new_tokens: greedy tokens to compare.

    Raises:
      CheckpointError: an incomplete directory or an unknown family.
      ConfigError: an unknown judge, or "transformers" without torch.
    """
    path = describe(checkpoint).path
    device = device or jax.devices()[0]
    if against == "transformers":
        return _against_transformers(path, device, new_tokens, progress)
    if against == "reference":
        from conversion.verify.engine_stages import against_reference

        return against_reference(
            path, fixed_prompt(), new_tokens, engine=engine or EngineConfig(), device=device, progress=progress
        )
    raise ConfigError(f"against={against!r}: the judges are transformers and reference")


def _against_transformers(path: Path, device: jax.Device, new_tokens: int, progress: bool) -> Report:
    from conversion.verify.own_stages import own_stages
    from conversion.verify.transformers_judge import judge_stages

    prompt = fixed_prompt()
    with tempfile.TemporaryDirectory(prefix="mmjax-verify-") as scratch:
        judge = judge_stages(_hugging_face_layout(path, Path(scratch)), prompt, new_tokens)
    ours = own_stages(path, prompt, judge.greedy, device=device, progress=progress, planes=judge.pixels.ndim == 3)
    return Report(
        f"{path}: mmjax on {device.device_kind} against transformers on the CPU, float32", compare(ours, judge)
    )


def _hugging_face_layout(path: Path, scratch: Path) -> Path:
    """`path` itself, or a copy of a converted checkpoint that transformers can read."""
    checkpoint = describe(path)
    if checkpoint.manifest is None:
        return path
    family = checkpoint.family()
    cfg = family.config(checkpoint.config)
    params = load_params(path, family, cfg, device=jax.devices("cpu")[0], progress=False)
    for file in checkpoint.companions():
        (scratch / file.name).symlink_to(file.absolute())
    (scratch / "config.json").unlink()  # a link into the checkpoint must not be written through
    return export(params, family, cfg, scratch, config=checkpoint.config)
