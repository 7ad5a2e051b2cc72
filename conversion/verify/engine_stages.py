# SPDX-License-Identifier: Apache-2.0
"""The engine as it serves requests against mmjax's own slow path, seen through the public API alone."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from conversion.verify.prompt import VerifyPrompt
from conversion.verify.stages import TIE_MARGIN, Report, StageResult, compare_arrays, compare_greedy
from mmjax.llm import LLM
from mmjax.outputs import RequestOutput
from mmjax.sampling_params import SamplingParams


def against_reference(path: Path, prompt: VerifyPrompt, new_tokens: int, *, progress: bool) -> Report:
    """Rows, greedy tokens and their log-probabilities of the engine and of `LLM(..., reference=True)`, in float32."""
    with _highest_precision():
        judge_rows, judge = _answer(path, prompt, new_tokens, reference=True, progress=progress)
        rows, out = _answer(path, prompt, new_tokens, reference=False, progress=progress)
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


def _answer(path: Path, prompt: VerifyPrompt, new_tokens: int, *, reference: bool, progress: bool):
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, logprobs=2, ignore_eos=True)
    messages = prompt.messages()
    messages[0]["content"][0]["image"] = prompt.image
    with LLM(path, dtype="float32", reference=reference, progress=progress) as llm:
        return llm.encode([prompt.image])[0], llm.chat(messages, params)


@contextmanager
def _highest_precision():
    """Full float32 products in every thread; the engine compiles and runs in threads of its own."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)
