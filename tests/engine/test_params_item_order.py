# SPDX-License-Identifier: Apache-2.0
"""Claim: values grouped by modality come back in prompt order, or the manifest is refused."""

from __future__ import annotations

import pytest

from mmjax.inputs.item_order import default_mm_item_order, derive_mm_item_order, flatten_by_item_order

IMAGE, VIDEO = "<img>", "<vid>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a <img> b", [("image", 0)]),
        ("<img><img>", [("image", 0), ("image", 1)]),
        ("<vid>", [("video", 0)]),
        ("<img> then <vid>", [("image", 0), ("video", 0)]),
        ("<vid> then <img>", [("video", 0), ("image", 0)]),
        ("<img><vid><img>", [("image", 0), ("video", 0), ("image", 1)]),
        ("", []),
        ("no media", []),
    ],
)
def test_order_of_placeholders(text, expected):
    order = derive_mm_item_order(text, IMAGE, VIDEO)
    assert [(entry["modality"], entry["index"]) for entry in order] == expected
    assert all(entry["placeholder"] == {"image": IMAGE, "video": VIDEO}[entry["modality"]] for entry in order)


def test_missing_placeholders():
    assert derive_mm_item_order("<img><vid>", None, None) == []
    assert [entry["modality"] for entry in derive_mm_item_order("<img><vid><img>", IMAGE)] == ["image", "image"]


def test_placeholders_are_literal():
    order = derive_mm_item_order("a.*b [x]|y aXXb", "a.*b", "[x]|y")
    assert [entry["modality"] for entry in order] == ["image", "video"]


def entry(modality: str, index: int) -> dict:
    return {"modality": modality, "index": index, "placeholder": None}


VALUES = {"image": [4, 2], "video": [6]}


def test_flatten_follows_the_prompt():
    order = [entry("image", 0), entry("video", 0), entry("image", 1)]
    assert flatten_by_item_order(VALUES, order) == [4, 6, 2]
    assert flatten_by_item_order(VALUES, default_mm_item_order({"image": 2, "video": 1})) == [4, 2, 6]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([entry("image", 0), entry("image", 0), entry("video", 0)], "twice"),
        ([entry("image", 0), entry("image", 1), entry("audio", 0)], "audio"),
        ([entry("image", 0), entry("image", 2), entry("video", 0)], "there are 2"),
        ([entry("image", 0), entry("video", 0)], "covers 2 of 3"),
    ],
)
def test_bad_manifests_are_refused(order, message):
    with pytest.raises(ValueError, match=message):
        flatten_by_item_order(VALUES, order)
