# SPDX-License-Identifier: Apache-2.0
"""Claim: what travels with a request is checked on entry, keeps the original's names, and is stripped as promised."""

from __future__ import annotations

import numpy as np
import pytest

from mmjax.inputs.disagg_inputs import DisaggPrefillMultimodalInputs
from mmjax.inputs.params import (
    MULTIMODAL_ENCODER_ITEM_METADATA_KEY,
    MultimodalEncoderItemMetadata,
    MultimodalInput,
    MultimodalParams,
    get_encoder_item_metadata,
    has_mm_payload_keys,
    set_encoder_item_metadata,
    strip_mm_data_for_generation,
    strip_mm_encoder_inputs,
)

HASH = [1, 2, 3, 4, 5, 6, 7, -8]


def one_item(**changes):
    fields = {
        "multimodal_hashes": [HASH],
        "multimodal_positions": [3],
        "multimodal_lengths": [4],
        "multimodal_item_run_cu_offsets": [0, 2],
        "multimodal_run_positions": [3, 9],
        "multimodal_run_lengths": [3, 1],
    }
    return MultimodalInput(**{**fields, **changes})


def test_runs_of_an_item():
    assert list(one_item().item_runs(0)) == [(3, 3), (9, 1)]
    bare = MultimodalInput([HASH], [3], [4])
    assert list(bare.item_runs(0)) == [(3, 4)]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"multimodal_positions": [-1]}, ValueError),
        ({"multimodal_lengths": [0]}, ValueError),
        ({"multimodal_lengths": [5]}, ValueError),
        ({"multimodal_positions": (3,)}, TypeError),
        ({"multimodal_positions": np.array([3])}, TypeError),
        ({"multimodal_lengths": [4.0]}, TypeError),
        ({"multimodal_lengths": [True]}, TypeError),
        ({"multimodal_hashes": ["12345678"]}, TypeError),
        ({"multimodal_hashes": [HASH, HASH]}, ValueError),
        ({"multimodal_hashes": [HASH, [1]], "multimodal_positions": [3, 9], "multimodal_lengths": [1, 1]}, ValueError),
        ({"multimodal_uuids": ["a", "b"]}, ValueError),
        ({"multimodal_uuids": [7]}, TypeError),
        ({"multimodal_uuids": ("a",)}, TypeError),
        ({"multimodal_run_lengths": None}, ValueError),
        ({"multimodal_item_run_cu_offsets": None, "multimodal_run_lengths": None}, ValueError),
        ({"multimodal_item_run_cu_offsets": [1, 2]}, ValueError),
        ({"multimodal_item_run_cu_offsets": [0, 1]}, ValueError),
        ({"multimodal_item_run_cu_offsets": [0, 1, 2]}, ValueError),
        ({"multimodal_run_positions": [3, 5]}, ValueError),
        ({"multimodal_run_positions": [9, 3]}, ValueError),
        ({"multimodal_run_positions": [3, 2**31 - 1]}, ValueError),
        ({"multimodal_run_lengths": [4, 0]}, ValueError),
        ({"multimodal_run_lengths": [4]}, ValueError),
    ],
)
def test_contradictions_are_refused(changes, error):
    with pytest.raises(error):
        one_item(**changes)


def metadata(rows=(2,)):
    refs = [("image", index) for index in range(len(rows))]
    return MultimodalEncoderItemMetadata(refs, [4 * count for count in rows], list(rows))


def test_item_metadata_must_match_known_rows():
    data = {"multimodal_embedding_lengths": [2]}
    set_encoder_item_metadata(data, metadata())
    assert data[MULTIMODAL_ENCODER_ITEM_METADATA_KEY] == metadata()
    with pytest.raises(ValueError, match="do not match"):
        set_encoder_item_metadata({"multimodal_embedding_lengths": [1]}, metadata())


def test_item_metadata_sets_the_rows():
    data = {}
    set_encoder_item_metadata(data, metadata((3, 1)))
    assert data["multimodal_embedding_lengths"] == [3, 1]
    assert get_encoder_item_metadata(data) is data[MULTIMODAL_ENCODER_ITEM_METADATA_KEY]


def test_absent_metadata_stays_absent():
    data = {}
    set_encoder_item_metadata(data, None)
    assert data == {}
    assert get_encoder_item_metadata(data) is None
    assert get_encoder_item_metadata(None) is None


def test_metadata_of_a_wrong_type_is_refused():
    with pytest.raises(TypeError, match="got tuple"):
        set_encoder_item_metadata({}, ([("image", 0)], [4], [1]))
    with pytest.raises(TypeError, match="must be a dict"):
        get_encoder_item_metadata([1])
    with pytest.raises(TypeError, match="got list"):
        get_encoder_item_metadata({MULTIMODAL_ENCODER_ITEM_METADATA_KEY: []})


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (([("image", 0)], [4], [0]), ValueError),
        (([("image", 0)], [0], [1]), ValueError),
        (([("image", 0)], [4, 4], [1, 1]), ValueError),
        (((("image", 0),), [4], [1]), TypeError),
        (([("image", 0)], [4], (1,)), TypeError),
        (([("image", 0)], [4], [1.0]), TypeError),
    ],
)
def test_metadata_is_validated(fields, error):
    with pytest.raises(error):
        MultimodalEncoderItemMetadata(*fields).validate()


def test_metadata_alone_is_no_payload():
    assert not has_mm_payload_keys({"mrope_config": {}, "multimodal_embedding_lengths": [1]})
    assert has_mm_payload_keys({"mrope_config": {}, "image": {}})
    assert not MultimodalParams().has_content()
    assert MultimodalParams(multimodal_data={"mrope_config": {}}).has_content()


def test_generation_keeps_the_position_delta_alone():
    data = {"image": {"pixel_values": [1]}, "mrope_config": {"mrope_position_ids": 1, "mrope_position_deltas": 2}}
    params = MultimodalParams(multimodal_data=data)
    params.strip_for_generation()
    assert params.multimodal_data == {"mrope_config": {"mrope_position_deltas": 2}}
    assert "image" in data, "the caller's dict is untouched"
    strip_mm_data_for_generation(data)
    assert data == {"mrope_config": {"mrope_position_deltas": 2}}
    plain = {"image": {}, "mrope_config": {"mrope_position_ids": 1}}
    strip_mm_data_for_generation(plain)
    assert plain == {}


def test_encoder_inputs_are_dropped_alone():
    data = {"image": 1, "video": 2, "audio": 3, "multimodal_embedding_lengths": [1]}
    strip_mm_encoder_inputs(data)
    assert data == {"multimodal_embedding_lengths": [1]}


HANDOFF = {
    "prompt_token_ids": [11, 151652, 151656, 151656, 151656, 151653, 12],
    "multimodal_lengths": [4],
    "multimodal_positions": [1],
    "multimodal_embedding_lengths": [3],
    "multimodal_item_run_cu_offsets": [0, 1],
    "multimodal_run_positions": [1],
    "multimodal_run_lengths": [4],
    "special_token_offsets": [0],
    "item_types": [1],
}


def test_handoff_becomes_the_same_items():
    made = DisaggPrefillMultimodalInputs(**HANDOFF).to_multimodal_input([HASH])
    assert made == MultimodalInput([HASH], [1], [4], None, [0, 1], [1], [4])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"multimodal_embedding_lengths": [0]}, ValueError),
        ({"multimodal_embedding_lengths": [3, 3]}, ValueError),
        ({"item_types": []}, ValueError),
        ({"special_token_offsets": [-1]}, ValueError),
        ({"special_token_offsets": (0,)}, TypeError),
        ({"multimodal_run_lengths": [3]}, ValueError),
    ],
)
def test_a_contradictory_handoff_is_refused(changes, error):
    with pytest.raises(error):
        DisaggPrefillMultimodalInputs(**{**HANDOFF, **changes})
