# SPDX-License-Identifier: Apache-2.0
"""Loading: every tensor lands where the weight table says, whatever the files look like, in bounded host memory."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from conversion_kit import ToyConfig, toy_family, toy_spec, toy_tensors, toy_weights, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from conversion.checkpoint import describe
from conversion.layout import leaves
from conversion.loader import load_hf, load_params
from mmjax.errors import CheckpointError

FAMILY = toy_family()


def expected(cfg: ToyConfig, t: dict[str, np.ndarray]) -> dict:
    """The tree, written out by hand."""
    pad = cfg.padded_mlp - cfg.mlp
    text = {
        "embed": t["embed.weight"],
        "layers": [
            {
                "qkv": np.concatenate([t[f"layers.{i}.{n}.weight"] for n in "qkv"]),
                "gate_up": np.concatenate(
                    [np.pad(t[f"layers.{i}.{n}.weight"], ((0, pad), (0, 0))) for n in ("gate", "up")]
                ),
                "down": np.pad(t[f"layers.{i}.down.weight"], ((0, 0), (0, pad))),
            }
            for i in range(cfg.layers)
        ],
        "vectors": {
            "qkv_bias": np.stack(
                [np.concatenate([t[f"layers.{i}.{n}.bias"] for n in "qkv"]) for i in range(cfg.layers)]
            ),
            "norm": np.stack([t[f"layers.{i}.norm.weight"] for i in range(cfg.layers)]),
            "up_bias": np.stack([np.pad(t[f"layers.{i}.up.bias"], (0, pad)) for i in range(cfg.layers)]),
        },
        "turned": np.stack(
            [
                np.concatenate([np.pad(t[f"layers.{i}.{n}.weight"], ((0, pad), (0, 0))) for n in ("first", "second")]).T
                for i in range(cfg.layers)
            ]
        ),
    }
    if not cfg.tied:
        text["lm_head"] = t["lm_head.weight"]
    return {"vision": {"patch_embed": t["patch.weight"].reshape(cfg.width, 12)}, "text": text}


def assert_trees_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), b)


@settings(max_examples=20, deadline=None)
@given(
    layers=st.integers(1, 3),
    width=st.sampled_from([2, 4, 6]),
    mlp=st.integers(1, 5),
    extra=st.integers(0, 3),
    vocab=st.integers(1, 9),
    tied=st.booleans(),
    shards=st.integers(1, 3),
    prefix=st.sampled_from(["", "model."]),
    stored=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16, np.float64]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_every_tensor_lands_in_its_box(
    tmp_path_factory, layers, width, mlp, extra, vocab, tied, shards, prefix, stored, dtype
):
    cfg = ToyConfig(dtype, layers, width, mlp, mlp + extra, vocab, tied)
    tensors = toy_tensors(cfg, dtype=stored)
    path = write_checkpoint(
        tmp_path_factory.mktemp("ckpt"), {prefix + name: value for name, value in tensors.items()}, shards
    )
    params = load_params(path, FAMILY, cfg, progress=False)
    want = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    assert_trees_equal(params, jax.tree.map(lambda x: x.astype(want), expected(cfg, tensors)))


def test_arrays_are_committed_to_the_device(tmp_path):
    cfg = ToyConfig()
    device = jax.devices()[0]
    params = load_params(write_checkpoint(tmp_path, toy_tensors(cfg)), FAMILY, cfg, device=device, progress=False)
    assert all(x.committed and x.devices() == {device} for x in jax.tree.leaves(params))


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.0, 1e-40, 3.3895314e38])
def test_bfloat16_widens_exactly(tmp_path, value):
    cfg = ToyConfig()
    tensors = toy_tensors(cfg, dtype=ml_dtypes.bfloat16)
    tensors["embed.weight"][0, 0] = value
    params = load_params(write_checkpoint(tmp_path, tensors), FAMILY, cfg, progress=False)
    got = np.asarray(params["text"]["embed"])
    np.testing.assert_array_equal(got.view(np.uint32), tensors["embed.weight"].astype(np.float32).view(np.uint32))


def test_all_faults_are_reported_at_once(tmp_path):
    cfg = ToyConfig()
    tensors = toy_tensors(cfg)
    del tensors["embed.weight"], tensors["layers.1.up.bias"]
    tensors["layers.0.down.weight"] = np.zeros((8, 7), np.float32)  # narrower than the padding: must not pass
    tensors["model.layers.0.q.bias"] = tensors["layers.0.q.bias"]
    tensors["layers.2.q.weight"] = tensors["layers.2.q.weight"].astype(np.int8)
    for i in range(30):
        tensors[f"adapter.{i}.weight"] = np.zeros(1, np.float32)
    with pytest.raises(CheckpointError) as caught:
        load_params(write_checkpoint(tmp_path, tensors), FAMILY, cfg, progress=False)
    text = str(caught.value)
    assert "2 missing" in text
    assert "embed.weight" in text
    assert "layers.1.up.bias" in text
    assert "30 unexpected" in text
    assert "and 20 more" in text
    assert "1 misshaped" in text
    assert "layers.0.down.weight: [8, 7], config.json implies [8, 5]" in text
    assert "1 stored twice" in text
    assert "layers.2.q.weight: I8" in text


def test_buffers_of_old_exports_are_ignored(tmp_path):
    cfg = ToyConfig()
    tensors = toy_tensors(cfg)
    old = tensors | {"layers.0.rotary_emb.inv_freq": np.zeros(2, np.float32)}
    params, old_params = (
        load_params(write_checkpoint(tmp_path / name, stored), FAMILY, cfg, progress=False)
        for name, stored in (("new", tensors), ("old", old))
    )
    jax.tree.map(np.testing.assert_array_equal, params, old_params)


def test_tied_head_may_be_stored(tmp_path):
    cfg = ToyConfig(tied=True)
    tensors = toy_tensors(cfg)
    both = tensors | {"lm_head.weight": tensors["embed.weight"]}
    head_only = {name: value for name, value in both.items() if name != "embed.weight"}
    for index, variant in enumerate((tensors, both, head_only)):
        params = load_params(write_checkpoint(tmp_path / str(index), variant), FAMILY, cfg, progress=False)
        assert_trees_equal(params, expected(cfg, tensors))


def test_tied_head_that_differs_is_refused(tmp_path):
    cfg = ToyConfig(tied=True)
    tensors = toy_tensors(cfg)
    tensors["lm_head.weight"] = tensors["embed.weight"] + 1
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_params(write_checkpoint(tmp_path, tensors), FAMILY, cfg, progress=False)


def test_untied_head_must_be_stored(tmp_path):
    cfg = ToyConfig()
    tensors = toy_tensors(cfg)
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing:\n    lm_head.weight"):
        load_params(write_checkpoint(tmp_path, tensors), FAMILY, cfg, progress=False)


def test_host_memory_stays_near_one_leaf(tmp_path, monkeypatch):
    """48 MB of bfloat16 in 4 shards, loaded as float32: the peak is the largest leaf and small change, not 96 MB."""
    monkeypatch.setattr("conversion.loader.SPARE_BYTES", 0)
    cfg = ToyConfig(layers=16, width=512, mlp=1000, padded_mlp=1024, vocab=2048)
    tensors = {name: np.zeros(value.shape, ml_dtypes.bfloat16) for name, value in toy_tensors(cfg).items()}
    checkpoint = describe(write_checkpoint(tmp_path, tensors, shards=4))
    del tensors
    sizes = [leaf.nbytes for leaf in leaves(toy_weights(cfg), toy_spec(cfg))]
    tracemalloc.start()
    load_hf(checkpoint, FAMILY, cfg, put=lambda leaf: np.zeros(()), progress=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) > 90 << 20
    assert peak < 2 * max(sizes) + (2 << 20)


def test_loading_converting_and_exporting_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import conversion.loader, conversion.orbax_io, conversion.export"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
