# SPDX-License-Identifier: Apache-2.0
"""transformers on the demo checkpoint, as something that answers cases."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from mmjax.demo.training.evaluate import Answer, Case


def by_transformers(checkpoint: Path) -> Answer:
    """Answers through transformers, one at a time, in float32."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(checkpoint)

    def one(case: Case) -> str:
        parts = [
            {"type": part["type"]} | ({"text": part["text"]} if "text" in part else {})
            for part in case.messages()[0]["content"]
        ]
        prompt = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        media: dict = {"images": [image.copy() for image in case.images]} if case.images else {}
        if case.video is not None:
            frames = len(case.video)
            media["videos"] = [torch.from_numpy(case.video).permute(0, 3, 1, 2)]
            media["video_metadata"] = [
                {"fps": case.fps, "total_num_frames": frames, "frames_indices": list(range(frames))}
            ]
        inputs = processor(text=[prompt], return_tensors="pt", **media)
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=48)[0, inputs["input_ids"].shape[1] :]
        return processor.tokenizer.decode(ids, skip_special_tokens=True)

    return lambda cases: [one(case) for case in cases]
