# SPDX-License-Identifier: Apache-2.0
"""Claim: HyperCLOVAX vision reads what is on disk, and pixels, rows, logits and prompts are those of transformers.

Its greedy answers are compared in `test_engine_greedy.py`.
"""

from __future__ import annotations

import io
import json
import shutil

import jax
import numpy as np
import pytest
import tolerances
import torch
from llm_kit import CHECKPOINT, build, clip, noise, serving, user
from PIL import Image
from qwen_kit import Case, media_of, ours, pack, reference_inputs
from safetensors.numpy import load_file, save_file

import mmjax
from conversion.loader import load_params
from kernels_pallas.dispatch import reference_vision_ops, vision_ops
from mmjax.errors import CheckpointError, RequestError
from mmjax.frontend import InputOptions
from mmjax.inputs.clip_durations import DurationMark, clip_seconds, fill_durations
from mmjax.inputs.items import EncoderBucket, EncoderGraphKey, Modality, VideoMetadata
from mmjax.inputs.tokenise import Segment
from mmjax.models.decoder import text
from mmjax.models.hyperclovax.config import HyperClovaXConfig
from mmjax.models.hyperclovax.weights import canonical_name, weights
from mmjax.models.registry import family_for

FAMILY = family_for("hyperclovax_vision_v2")
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
CASE = Case(
    f"{IMAGE} and {IMAGE}, or {VIDEO}?", images=((84, 140), (56, 84)), videos=((4, 56, 84),)
)  # windows of 2 x 2 blocks: no grid fills them
SIZES = ((84, 140), (56, 84), (140, 84), (28, 196))


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint("hyperclovax", **CHECKPOINT)


@pytest.fixture(scope="module")
def config_json(checkpoint):
    return json.loads((checkpoint.path / "config.json").read_text())


# ---- what is on disk ------------------------------------------------------------------------------------------------


def published(hf: dict) -> dict:
    """The same values as the published checkpoint first had them: other types, an older form of the rotary base."""
    text = {key: value for key, value in hf["text_config"].items() if key != "rope_parameters"}
    text |= {"rope_theta": 10000.0, "rope_scaling": None}
    return hf | {
        "model_type": "vlm",
        "text_config": text,
        "vision_config": hf["vision_config"] | {"model_type": "qwen2_5_vl"},
    }


def test_both_forms_of_config_json_read_the_same(config_json):
    cfg = HyperClovaXConfig.from_hf(config_json)
    assert family_for("vlm").config(published(config_json)) == cfg
    assert family_for(config_json["model_type"]) is family_for("vlm")
    assert (cfg.position_axes, cfg.text.post_norms, cfg.text.qkv_bias, cfg.text.qk_norm) == (1, True, False, False)
    scales = (cfg.text.attention_scale, cfg.text.embedding_multiplier, cfg.text.residual_multiplier)
    assert (*scales, cfg.text.logits_scaling) == (0.3, 1.7, 0.6, 0.8)
    assert (cfg.hidden_size, cfg.vision.out_hidden_size, cfg.row_width, cfg.window_capacity) == (64, 48, 64, 16)
    assert cfg.never_sampled == (cfg.image_token_id, cfg.video_token_id)


def test_absent_keys_have_the_values_of_transformers(config_json):
    top = {key: value for key, value in config_json.items() if not key.endswith("token_id") and "tie" not in key}
    scales = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "use_post_norm")
    plain = {key: value for key, value in config_json["text_config"].items() if key not in scales}
    cfg = HyperClovaXConfig.from_hf(top | {"text_config": plain})
    assert (cfg.image_token_id, cfg.video_token_id, cfg.text.tie_word_embeddings) == (128060, 128061, True)
    assert (cfg.text.attention_scale, cfg.text.logits_scaling, cfg.text.post_norms) == (None, 1.0, True)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("text_config", "model_type", "llama"),
        ("vision_config", "model_type", "siglip"),
        ("text_config", "attention_bias", True),
        ("text_config", "mlp_bias", True),
        ("text_config", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("vision_config", "window_size", 20),
    ],
)
def test_other_models_of_type_vlm_are_refused(config_json, part, key, value):
    with pytest.raises(CheckpointError, match=rf"{part}\.{key}"):
        HyperClovaXConfig.from_hf(config_json | {"model_type": "vlm", part: config_json[part] | {key: value}})


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_the_weight_table_covers_the_model(tiny_checkpoint, tie):
    made = tiny_checkpoint("hyperclovax", layers=1, vision_depth=1, tie=tie)
    cfg = HyperClovaXConfig.from_hf(json.loads((made.path / "config.json").read_text()))
    table = {source.format(i=0) for weight in weights(cfg) for source in weight.sources}
    model = {canonical_name(name) for name in made.model.state_dict() if not (tie and name == "lm_head.weight")}
    assert table == model == {canonical_name(name) for name in table}


def test_a_tied_head_may_be_stored(tiny_checkpoint, tmp_path):
    """Under the name that published checkpoints give it, beside the embedding or in its place."""
    made = tiny_checkpoint("hyperclovax", layers=1, vision_depth=1, tie=True)
    hf = json.loads((made.path / "config.json").read_text())
    cfg = HyperClovaXConfig.from_hf(hf)
    tensors = load_file(made.path / "model.safetensors")
    (embed,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    expected = load_params(made.path, FAMILY, cfg, progress=False)
    for variant in ("model.language_model.lm_head.weight", "lm_head.weight"):
        for kept in (tensors, {name: tensor for name, tensor in tensors.items() if name != embed}):
            save_file(kept | {variant: tensors[embed]}, tmp_path / "model.safetensors", metadata={"format": "pt"})
            (tmp_path / "config.json").write_text(json.dumps(hf))
            jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path, FAMILY, cfg, progress=False), expected)
    save_file(tensors | {variant: tensors[embed] + 1}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"ties lm_head\.weight to the embedding, but"):
        load_params(tmp_path, FAMILY, cfg, progress=False)


def test_placeholders_are_spelt_as_the_tokenizer_does(checkpoint, tmp_path):
    shutil.copytree(checkpoint.path, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace(IMAGE, "<|IMAGE_PAD|>"))
    mine = ours(checkpoint)
    texts = mine.family.processor(mine.cfg, tmp_path).placeholder_text
    assert texts == {Modality.IMAGE: "<|IMAGE_PAD|>", Modality.VIDEO: VIDEO}


# ---- what is computed -----------------------------------------------------------------------------------------------


def reference_rows(model, inputs) -> np.ndarray:
    """transformers' rows, images first."""
    kinds = (("image", "pixel_values", "image_grid_thw"), ("video", "pixel_values_videos", "video_grid_thw"))
    rows = []
    with torch.no_grad():
        for kind, pixels, grid in kinds:
            if pixels in inputs:
                features = getattr(model.model, f"get_{kind}_features")(inputs[pixels], inputs[grid])
                rows += [part.float().numpy() for part in features.pooler_output]
    return np.concatenate(rows)


@pytest.mark.parametrize("ops", [reference_vision_ops(), vision_ops("cpu")], ids=["reference", "xla"])
def test_rows_of_pictures_and_clips(checkpoint, parity_record, ops):
    mine, inputs = ours(checkpoint), reference_inputs(checkpoint, CASE)
    rows = mine.rows(pack(*media_of(inputs, mine.table), mine.cfg), ops)
    expected = reference_rows(checkpoint.model, inputs)
    assert len(rows) == len(expected) == 15 + 6 + 2 * 6
    np.testing.assert_allclose(rows, expected, rtol=0, atol=tolerances.TOWER_ROWS)
    parity_record.difference("hyperclovax", "rows", rows, expected)


def test_our_pixels_are_the_references(checkpoint):
    """Bit for bit, and packed into a bucket with room to spare they give its rows."""
    mine, inputs = ours(checkpoint), reference_inputs(checkpoint, CASE)
    processor = mine.family.processor(mine.cfg, checkpoint.path)
    items = [processor.image(noise(*size, i), {}) for i, size in enumerate(CASE.images)]
    frames, metadata = clip(*CASE.videos[0], seed=50), VideoMetadata(4, 3.0, tuple(range(4)))
    items.append(processor.video(frames, metadata, {}))
    table = processor.pixel_table()
    values = np.concatenate(
        [table[np.arange(3)[:, None], item.patches.reshape(len(item.patches), 3, -1)] for item in items]
    )
    expected = np.concatenate([inputs[name].numpy() for name in ("pixel_values", "pixel_values_videos")])
    assert np.abs(values.reshape(expected.shape) - expected).max() == 0.0
    total = sum(item.plan.encoder_tokens for item in items) + 8
    windows = sum(item.plan.windows for item in items) + 2
    packed = processor.pack(items, EncoderBucket(EncoderGraphKey(total, 6), windows, total // 4))
    rows = reference_rows(checkpoint.model, inputs)
    np.testing.assert_allclose(
        mine.rows(packed, vision_ops("cpu"))[: len(rows)], rows, atol=tolerances.TOWER_ROWS, rtol=0
    )


def step_of(cfg, inputs, rows: np.ndarray) -> tuple:
    """ids (0 where a row goes), row indices, the pool and positions of `CASE`, whose clip comes last."""
    ids = inputs["input_ids"][0].numpy().astype(np.int32)
    is_row = np.isin(ids, cfg.never_sampled)
    row_index = np.full(len(ids), len(rows), np.int32)
    row_index[is_row] = np.arange(len(rows))
    return np.where(is_row, 0, ids), row_index, rows, np.arange(len(ids), dtype=np.int32)[None]


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_every_layer_and_the_logits_match(tiny_checkpoint, parity_record, tie):
    made = tiny_checkpoint("hyperclovax", tie=tie)
    mine, inputs = ours(made), reference_inputs(made, CASE)
    with torch.no_grad():
        out = made.model(**inputs, output_hidden_states=True, use_cache=False)
    rows = mine.rows(pack(*media_of(inputs, mine.table), mine.cfg))
    around, logits = mine.layers_and_logits(text.layer_outputs, *step_of(mine.cfg, inputs, rows))
    for i, expected in enumerate(out.hidden_states[:-1]):
        np.testing.assert_allclose(around[i], expected[0], rtol=0, atol=tolerances.LOGITS, err_msg=f"before layer {i}")
    np.testing.assert_allclose(logits, out.logits[0], rtol=0, atol=tolerances.LOGITS)
    assert np.abs(logits).max() > 1.0  # far above the tolerance
    parity_record.difference("hyperclovax", "logits", logits, out.logits[0])


def test_bfloat16_errs_no_more_than_the_reference(checkpoint):
    inputs, mine = reference_inputs(checkpoint, CASE), ours(checkpoint, "bfloat16")
    low = type(checkpoint.model).from_pretrained(checkpoint.path, dtype=torch.bfloat16, attn_implementation="eager")
    narrow = {key: value.to(torch.bfloat16) for key, value in inputs.items() if value.is_floating_point()}
    with torch.no_grad():
        exact, theirs = checkpoint.model(**inputs).logits[0], low(**inputs | narrow).logits[0].float()
    rows = mine.rows(pack(*media_of(inputs, mine.table), mine.cfg))
    _, logits = mine.layers_and_logits(text.layer_outputs, *step_of(mine.cfg, inputs, rows))
    error, allowed = (np.sqrt(np.mean((np.asarray(x) - exact.numpy()) ** 2)) for x in (logits, theirs))
    assert error <= tolerances.BF16_ERROR_RATIO * allowed


def test_each_picture_has_rows_of_its_own_number(tiny_llm):
    """In any order and batch: nothing is remembered from one picture to the next."""
    pictures = [noise(*size, i) for i, size in enumerate(SIZES)]
    with serving(tiny_llm("hyperclovax")) as llm:
        together = llm.encode(pictures)
        alone = [llm.encode([picture])[0] for picture in pictures[::-1]][::-1]
        assert [len(rows) for rows in together] == [h * w // 28**2 for h, w in SIZES]
        for one, other in zip(together, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerances.OTHER_LAYOUT)
        usage = [llm.count_tokens(user(picture)).image_tokens for picture in pictures]
        assert usage == [len(rows) for rows in together]


# ---- seconds of clips -----------------------------------------------------------------------------------------------

MARK = DurationMark("<|video_duration|>", "video_duration")
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|image_pad|>
{%- elif part.type == 'video' -%}
{"video_duration": {{ part.video_duration if 'video_duration' in part else '<|video_duration|>' }}}<|video_pad|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endfor -%}
"""
CLIPS = (((4, 56, 56), 3.0), ((6, 56, 84), 24.0), ((3, 56, 56), 7.0))


@pytest.fixture(scope="module")
def timed(tiny_checkpoint, tmp_path_factory):
    """A small LLM whose chat template asks for seconds, and transformers' processor of the same checkpoint."""
    source = tiny_checkpoint("hyperclovax", **CHECKPOINT)
    path = tmp_path_factory.mktemp("timed")
    shutil.copytree(source.path, path, dirs_exist_ok=True)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    with build(path, reference=True) as llm:
        yield llm, type(source.processor).from_pretrained(path)


def conversation(*given: float | None) -> list:
    """A clip for each entry, with the seconds that the caller says, if any; and text around them."""
    parts = []
    for (shape, fps), seconds in zip(CLIPS, given, strict=False):
        said = {} if seconds is None else {"video_duration": seconds}
        parts += [{"type": "text", "text": "See "}, {"type": "video", "video": (clip(*shape), {"fps": fps}), **said}]
    return [{"role": "user", "content": parts}]


def reference_ids(processor, messages: list) -> list[int]:
    """What transformers makes of it, pixels through the processor's own door."""
    frames, metadata, stripped = [], [], []
    for part in messages[0]["content"]:
        if part["type"] == "video":
            frames.append(part["video"][0])
            total = len(part["video"][0])
            metadata.append({"total_num_frames": total, "frames_indices": list(range(total)), **part["video"][1]})
        stripped.append({key: value for key, value in part.items() if key != "video"})
    conversation = [{"role": "user", "content": stripped}]
    rendered = processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[rendered], videos=frames, video_metadata=[metadata], do_sample_frames=False)
    return list(inputs["input_ids"][0])


@pytest.mark.parametrize("given", [(None,), (3.5,), (None, 9.99, None), (1, None)])
def test_seconds_are_filled_in_as_the_processor_does(timed, given):
    llm, processor = timed
    messages = conversation(*given)
    prompt = llm.frontend.chat(messages, InputOptions(), limit=None)
    assert prompt.token_ids.tolist() == reference_ids(processor, messages)


def test_seconds_are_those_of_the_frames_that_are_there(timed):
    """Of seven frames at 25 a second the file ends within the fifth."""
    frames, file = clip(7, 56, 56), io.BytesIO()
    first, *others = map(Image.fromarray, frames)
    first.save(file, "PNG", save_all=True, append_images=others, duration=40)
    cut, told = file.getvalue()[: int(len(file.getvalue()) * 4.5 / 7)], []
    for value in (cut, (frames[:4], {"fps": 25.0})):
        messages = [{"role": "user", "content": [{"type": "video", "video": value}]}]
        told.append(timed[0].frontend.chat(messages, InputOptions(), limit=None).token_ids.tolist())
    assert told[0] == told[1]


def test_a_typed_mark_is_text(timed):
    llm, _ = timed
    messages = conversation(None)
    messages[0]["content"].append({"type": "text", "text": MARK.text})
    prompt = llm.frontend.chat(messages, InputOptions(), limit=None)
    written = llm.frontend.model.tokenizer.decode(prompt.token_ids)
    assert written.count(MARK.text) == 1
    assert written.startswith('See {"video_duration": 1.33}')
    assert written.endswith(MARK.text)


def test_a_prompt_of_the_callers_own_may_hold_marks(timed):
    llm, _ = timed
    data = {"video": [(clip(*shape), {"fps": fps}) for shape, fps in CLIPS[:2]]}
    text = f"{MARK.text} {VIDEO} {MARK.text} {VIDEO}"
    out = llm.generate(text, mmjax.SamplingParams(max_tokens=1), multi_modal_data=data)
    assert llm.frontend.model.tokenizer.decode([i for i in out.prompt_token_ids if i < 256]) == "1.33  0.25 "
    with pytest.raises(RequestError, match=r"2 marks .* of 1 clips"):
        llm.generate(text, multi_modal_data={"video": data["video"][:1]})


def test_seconds_must_be_a_number(timed):
    with pytest.raises(RequestError, match=r"video_duration must be a number of seconds, got '.*pad"):
        timed[0].count_tokens(conversation("<|image_pad|>"))


def test_seconds_come_from_the_clip_or_its_rate():
    def metadata(frames, fps, duration=None):
        return VideoMetadata(frames, fps, tuple(range(frames)), duration)

    assert clip_seconds(metadata(100, 30.0)) == 3.33
    assert clip_seconds(metadata(100, 30.0, 7.777)) == 7.78
    assert clip_seconds(metadata(48, None)) == 2.0
    written = [Segment(f"a {MARK.text}", False), Segment(MARK.text, True), Segment(f"{MARK.text} b", False)]
    filled = fill_durations(written, MARK, [1.5, 2.0, 3.0])
    assert "".join(segment.text for segment in filled) == f"a 1.5{MARK.text}2.0 b"
