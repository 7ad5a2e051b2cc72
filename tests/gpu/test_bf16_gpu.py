# SPDX-License-Identifier: Apache-2.0
"""Claims in bfloat16 on the GPU: no further from float32 than transformers' own bfloat16; demo accuracy."""

from __future__ import annotations

import numpy as np
import pytest
import tolerances

import mmjax
from mmjax.demo import demo_scene

_FEW_BUCKETS = mmjax.MultimodalConfig(encoder_max_num_tokens=1024)

torch = pytest.importorskip("torch", reason="the oracle is transformers")
tiny = pytest.importorskip("tiny", reason="needs transformers' models")


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_bf16_error_is_that_of_transformers(family, tiny_checkpoint):
    checkpoint = tiny_checkpoint(family, layers=4, vision_depth=4)
    rng = np.random.default_rng(0)
    ours, theirs = [], []
    with mmjax.LLM(checkpoint.path, dtype="bfloat16", progress=False, engine=_small(), multimodal=_FEW_BUCKETS) as llm:
        for height, width in ((90, 130), (140, 84), (56, 224)):
            image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            inputs = checkpoint.processor.image_processor(images=[image], return_tensors="pt")
            pixels, grid = inputs["pixel_values"], inputs["image_grid_thw"]
            exact = _rows(checkpoint.model.float(), pixels, grid, torch.float32)
            rounded = _rows(checkpoint.model.to(torch.bfloat16), pixels, grid, torch.bfloat16)
            checkpoint.model.float()
            ours.append(llm.encode([image])[0] - exact)
            theirs.append(rounded - exact)
    error = [float(np.sqrt(np.mean(np.concatenate(each) ** 2))) for each in (ours, theirs)]
    print(f"\n{family}: bf16 rows, RMS error {error[0]:.5f} ours, {error[1]:.5f} transformers'")
    assert error[0] <= tolerances.BF16_ERROR_RATIO * error[1]


def _rows(model, pixels, grid, dtype) -> np.ndarray:
    with torch.no_grad():
        out = model.model.visual(pixels.to(dtype), grid_thw=grid)
    streams = (getattr(out, "pooler_output", out), *(getattr(out, "deepstack_features", None) or ()))
    return torch.cat(streams, dim=-1).float().numpy()


def test_demo_accuracy_is_that_of_the_cpu():
    scenes = [demo_scene(seed) for seed in range(60)]
    asked = [(scene.image, question) for scene in scenes for question in scene.questions]
    conversations = [
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question.text}]}]
        for image, question in asked
    ]
    answers = {}
    for device in ("gpu", "cpu"):
        with mmjax.LLM.demo(progress=False, device=device, engine=_small(), multimodal=_FEW_BUCKETS) as llm:
            outputs = llm.chat(conversations, mmjax.SamplingParams(max_tokens=48, temperature=0.0))
        answers[device] = [output.text for output in outputs]
    right = {
        device: sum(text == question.answer for text, (_, question) in zip(texts, asked, strict=True))
        for device, texts in answers.items()
    }
    print(f"\ndemo: {right['gpu']} of {len(asked)} right in bfloat16 on the GPU, {right['cpu']} in float32 on the CPU")
    assert right["gpu"] >= 0.97 * len(asked)
    assert abs(right["gpu"] - right["cpu"]) <= 0.01 * len(asked)


def _small() -> mmjax.EngineConfig:
    return mmjax.EngineConfig(max_batch_size=8, max_num_tokens=512, max_seq_len=1024)
