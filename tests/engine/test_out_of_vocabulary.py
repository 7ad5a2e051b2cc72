# SPDX-License-Identifier: Apache-2.0
"""Claim: placeholders may lie outside the vocabulary: no table is asked for them, and answers are the same.

The small checkpoint's tokenizer knows more tokens than its tables have rows: an image is `vocab_size + 1`, a clip
`vocab_size + 2`. The rows just under the edge, where a clipped index would land, hold NaN.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from llm_kit import CHECKPOINT, build, clip, noise, user
from safetensors.numpy import load_file, save_file

import mmjax
from mmjax.errors import PlaceholderError, RequestError
from mmjax.models import registry
from mmjax.sampling_params import banned_mask

VOCAB, IMAGE_ID, VIDEO_ID = 261, 262, 263
GUARDS = (259, 260)  # rows that no text of these tests needs
ENGINE = mmjax.EngineConfig(
    max_batch_size=2, max_num_tokens=16, max_seq_len=128, tokens_per_block=8, num_blocks=64, compilation_cache=False
)
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}<|{{ part.type }}_pad|>{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endfor -%}
"""
PARAMS = mmjax.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, repetition_penalty=1.1)
TALKS = {
    "pictures": user("What is ", noise(84, 140, 1), " or ", noise(56, 56, 2), "?"),
    "clip": user(clip(4, 56, 84, 3), "Where?"),
    "text": user("How old is the moon?"),
    "typed": user("Not <|image_pad|> but ", noise(56, 84, 4)),
}


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoint, tmp_path_factory):
    """(with small tables, with whole ones): the same model but for what lies at and over the edge."""
    source = tiny_checkpoint("qwen2_5_vl", **CHECKPOINT).path
    made = []
    for name, rows in (("small", VOCAB), ("whole", None)):
        path = tmp_path_factory.mktemp(name)
        shutil.copytree(source, path, dirs_exist_ok=True)
        (path / "chat_template.jinja").write_text(TEMPLATE)
        tensors = load_file(path / "model.safetensors")
        (embed,) = (key for key in tensors if key.endswith("embed_tokens.weight"))
        tensors["lm_head.weight"][VOCAB:] = 0  # never the best token
        if rows:
            tensors[embed][list(GUARDS)] = np.nan
            tensors |= {key: tensors[key][:rows].copy() for key in (embed, "lm_head.weight")}
            config = json.loads((path / "config.json").read_text())
            config["text_config"]["vocab_size"] = rows
            assert (config["image_token_id"], config["video_token_id"]) == (rows + 1, rows + 2)
            (path / "config.json").write_text(json.dumps(config))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        made.append(path)
    return made


@pytest.fixture(scope="module")
def looked_up():
    """Every id that a table was asked for."""
    return set()


@pytest.fixture(scope="module")
def small(checkpoints, whole, looked_up):
    """The engine over the small tables, with a watch on them that `whole`, made before, has not."""
    original = registry.family_for("qwen2_5_vl")

    def embed(params, cfg, ids):
        jax.debug.callback(lambda seen: looked_up.update(np.unique(seen).tolist()), ids)
        return original.embed(params, cfg, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "FAMILIES", (replace(original, embed=embed),))
        with build(checkpoints[0], engine=ENGINE) as llm:
            yield llm


@pytest.fixture(scope="module")
def whole(checkpoints):
    """The judge over the whole tables, where the placeholders are ids like others."""
    with build(checkpoints[1], reference=True) as llm:
        yield llm


@pytest.mark.parametrize("name", TALKS)
def test_answers_are_those_of_the_whole_tables(small, whole, looked_up, name):
    looked_up.clear()
    out, expected = (llm.chat(TALKS[name], PARAMS) for llm in (small, whole))
    assert out.prompt_token_ids == expected.prompt_token_ids
    assert out.token_ids == expected.token_ids
    jax.effects_barrier()
    own = set(out.prompt_token_ids) - {IMAGE_ID, VIDEO_ID}
    assert own | {0} <= looked_up <= own | {0} | set(out.token_ids)
    assert max(looked_up) < VOCAB
    assert looked_up.isdisjoint(GUARDS)
    assert {IMAGE_ID, VIDEO_ID}.intersection(out.prompt_token_ids) or name == "text"


def test_together_and_from_caches(small, whole):
    names = [*TALKS, *TALKS]
    outs = small.chat([TALKS[name] for name in names], PARAMS)
    for name, out in zip(names, outs, strict=True):
        assert out.token_ids == whole.chat(TALKS[name], PARAMS).token_ids


def test_the_judge_takes_the_small_tables_too(checkpoints, whole):
    with build(checkpoints[0], reference=True) as judge:
        for name in ("pictures", "clip"):
            assert judge.chat(TALKS[name], PARAMS).token_ids == whole.chat(TALKS[name], PARAMS).token_ids


def test_ids_from_the_caller(small):
    """Expanded and compact ids are understood; a placeholder without its item, or an id of nothing, is refused."""
    picture = noise(84, 140, 1)
    expected = small.generate("see <|image_pad|>.", PARAMS, multi_modal_data={"image": picture})
    assert expected.prompt_token_ids.count(IMAGE_ID) == 15
    compact = small.frontend.model.tokenizer.encode("see <|image_pad|>.")
    assert compact.count(IMAGE_ID) == 1
    for ids in (compact, expected.prompt_token_ids):
        assert small.generate(ids, PARAMS, multi_modal_data={"image": picture}).token_ids == expected.token_ids
    with pytest.raises(PlaceholderError, match="1 image"):
        small.generate([1, IMAGE_ID, 2], PARAMS)
    with pytest.raises(RequestError, match=f"token id {VOCAB} lies outside the vocabulary of {VOCAB}"):
        small.generate([1, VOCAB, 2], PARAMS)


def test_the_span_table_says_so(small):
    spans = small.explain(TALKS["pictures"]).spans
    assert [span.placeholder for span in spans] == ["out-of-vocabulary"] * 2


def test_the_mask_of_banned_ids_copes_with_ids_outside():
    processor_ids = (VOCAB + 1, VOCAB + 2, 259, 260)
    assert np.flatnonzero(banned_mask(processor_ids, VOCAB)).tolist() == [259, 260]
    assert not banned_mask((), 5).any()
