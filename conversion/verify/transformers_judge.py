# SPDX-License-Identifier: Apache-2.0
"""The judge: transformers' own model and processor on a checkpoint, with its inner stages caught by hooks.

transformers runs on torch. This is the one file of the package where torch is imported, when a verification runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from conversion.verify.prompt import VerifyPrompt
from conversion.verify.stages import Stages
from mmjax.errors import CheckpointError, ConfigError


def judge_stages(path: Path, prompt: VerifyPrompt, new_tokens: int) -> Stages:
    """Runs the checkpoint at `path` (Hugging Face layout) in float32 on the CPU.

    Raises:
      CheckpointError: there is no chat template, or transformers has no such model.
      ConfigError: torch or torchvision is not installed.
    """
    transformers = _import_transformers()
    model_type = json.loads((path / "config.json").read_text())["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} has no model of type {model_type!r} to compare with; "
            "the other judge, reference, is mmjax's own slow path"
        )
    processor = transformers.AutoProcessor.from_pretrained(path, local_files_only=True)
    if processor.chat_template is None:
        raise CheckpointError(f"{path} has no chat template, which the prompt of a verification needs")
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype="float32", attn_implementation="eager", local_files_only=True
    )
    model.requires_grad_(False)
    text = processor.apply_chat_template(prompt.messages(with_pixels=False), add_generation_prompt=True, tokenize=False)
    # As the tokenizer's own apply_chat_template: the template writes all special tokens, a BOS too if there is one.
    inputs = processor(text=[text], images=[prompt.image], return_tensors="pt", add_special_tokens=False)
    caught = _Caught(model.get_decoder())
    with caught:
        logits = model(**inputs, use_cache=False).logits
    # A fresh config: the checkpoint's own may sample, penalise or stop early.
    model.generation_config = transformers.GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    answer = model.generate(**inputs, output_logits=True, return_dict_in_generate=True)
    best = np.sort(np.stack([step[0].float().numpy() for step in answer.logits]), axis=-1)[:, -2:]
    length, pixels = inputs["input_ids"].shape[1], inputs["pixel_values"].numpy()
    return Stages(
        token_ids=inputs["input_ids"][0].numpy(),
        positions=caught.positions,
        pixels=pixels[0] if pixels.ndim == 4 else pixels,  # [C, H, W] where a tower takes pictures, else patches
        tower=_tower(model, inputs),
        layers=caught.layers,
        logits=logits[0].numpy(),
        greedy=answer.sequences[0, length:].numpy(),
        margins=best[:, 1] - best[:, 0],
    )


def _tower(model: Any, inputs: Any) -> np.ndarray:
    """Rows of the picture; deepstack levels stand behind the main ones."""
    names = ("pixel_values", "image_grid_thw", "image_sizes")
    media = {name: inputs[name] for name in names if name in inputs}
    output = model.model.get_image_features(**media)
    streams = (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))
    return np.concatenate([_joined(stream) for stream in streams], axis=-1)


def _joined(rows: Any) -> np.ndarray:
    """Rows of all items: one tensor, or one an item."""
    if isinstance(rows, list | tuple):
        return np.concatenate([rows_of_one.numpy() for rows_of_one in rows])
    return rows.numpy()


class _Caught:
    """Hooks on a decoder that keep the input of every layer and of the final norm, and the rotary positions."""

    def __init__(self, decoder: Any):
        self.layers: list[np.ndarray] = []
        self.positions = np.zeros((0, 0), np.int64)
        self._decoder = decoder
        self._handles: list[Any] = []

    def __enter__(self) -> _Caught:
        # Inputs and not outputs: what a model adds between two layers belongs to the first one.
        for module in (*self._decoder.layers, self._decoder.norm):
            self._handles.append(module.register_forward_pre_hook(self._keep_hidden, with_kwargs=True))
        self._handles.append(self._decoder.register_forward_pre_hook(self._keep_positions, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep_hidden(self, module: Any, args: tuple, kwargs: dict) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.layers.append(hidden[0].numpy().copy())

    def _keep_positions(self, module: Any, args: tuple, kwargs: dict) -> None:
        positions = kwargs.get("position_ids")
        if positions is None:  # the decoder counts for itself
            self.positions = np.arange(kwargs["inputs_embeds"].shape[1])[None]
        else:
            self.positions = positions.numpy().reshape(-1, positions.shape[-1])


def _import_transformers() -> Any:
    make_torchvision_importable()
    import transformers

    return transformers


def make_torchvision_importable() -> None:
    """PyPI's torchvision for Linux expects CUDA operators and fails to import beside a CPU-only torch.

    Declaring the two schemas that its registrations look up is enough for its transforms, which are plain torch code.
    Raises ConfigError if one of the two is not installed.
    """
    try:
        import torch
        import torchvision
    except ImportError as error:
        raise ConfigError(
            "transformers as a judge needs torch and torchvision: pip install torch torchvision"
        ) from error
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        make_torchvision_importable.library = library  # the schemas vanish with the object
        import torchvision  # noqa: F401
