# SPDX-License-Identifier: Apache-2.0
"""The engine as it serves requests against mmjax's own slow path, seen through the public API alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float

from conversion.verify.prompt import VerifyPrompt
from conversion.verify.stages import TIE_MARGIN, Report, StageResult, compare_arrays, compare_greedy
from mmjax.config import EngineConfig
from mmjax.llm import LLM
from mmjax.outputs import RequestOutput
from mmjax.sampling_params import SamplingParams


def against_reference(
    path: Path, prompt: VerifyPrompt, new_tokens: int, *, engine: EngineConfig, device: jax.Device, progress: bool
) -> Report:
    """Rows, greedy tokens and their log-probabilities of the engine and of `LLM(..., reference=True)`, in float32."""
    options = {"dtype": "float32", "device": device.platform, "engine": engine, "progress": progress}
    with _highest_precision():
        judge_rows, judge = _answer(LLM(path, reference=True, **options), prompt, new_tokens)
        rows, out = _answer(LLM(path, **options), prompt, new_tokens)
    results = (
        compare_arrays("token ids", np.array(out.prompt_token_ids), np.array(judge.prompt_token_ids)),
        compare_arrays("tower rows", rows, judge_rows),
        *compare_answers(out, judge),
    )
    return Report(f"{path}: the engine against the reference, float32", results)


def compare_answers(out: RequestOutput, judge: RequestOutput) -> tuple[StageResult, StageResult]:
    """Log-probabilities and tokens. Behind a tie the two have different contexts, so the comparison ends there."""
    ours, theirs = np.array(out.token_ids), np.array(judge.token_ids)
    top = np.array([sorted(step.top.values())[-2:] for step in judge.logprobs])
    margins = top[:, 1] - top[:, 0]
    if ours.shape == theirs.shape:
        differing = np.flatnonzero(ours != theirs)
        end = len(ours) if not len(differing) or margins[differing[0]] >= TIE_MARGIN else differing[0] + 1
        ours, theirs, margins = ours[:end], theirs[:end], margins[:end]
    same = int(np.argmin(np.append(ours[: len(theirs)] == theirs[: len(ours)], False)))
    logprobs = [np.array([step.logprob for step in side.logprobs[:same]]) for side in (out, judge)]
    return compare_arrays("token logprobs", *logprobs), compare_greedy(ours, theirs, margins)


def _answer(llm: LLM, prompt: VerifyPrompt, new_tokens: int) -> tuple[Float[np.ndarray, "R E"], RequestOutput]:
    """Rows of the picture and the answer about it; closes `llm`, so that the next one finds the memory free."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, logprobs=2, ignore_eos=True)
    with llm:
        return llm.encode([prompt.image])[0], llm.chat(prompt.messages(with_pixels=True), params)


@contextmanager
def _highest_precision() -> Iterator[None]:
    """Full float32 products in every thread; the engine compiles and runs in threads of its own."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)
