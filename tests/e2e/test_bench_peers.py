# SPDX-License-Identifier: Apache-2.0
"""Claim: `mmjax bench --peer` measures another engine on the same inputs, which answers as ours does, and says so."""

from __future__ import annotations

import inspect
import json
import sys
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import llm_kit
import numpy as np
import pytest
import tolerances

from mmjax.bench import peers, serving
from mmjax.bench.encoder import encoder_name
from mmjax.bench.floors import Ceilings
from mmjax.bench.published import checkpoint_folder
from mmjax.bench.report import Figure, beside, render
from mmjax.bench.sizes import SIZES
from mmjax.bench.subject import Subject
from mmjax.bench.text import STEPS
from mmjax.cli import main
from mmjax.errors import CheckpointError
from peers.interface import PeerModel, load_peer, split_pictures


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    """The checkpoint of the tests' engine."""
    return tiny_checkpoint("qwen2_5_vl", **llm_kit.CHECKPOINT).path


@pytest.fixture(scope="module")
def peer(checkpoint):
    """transformers on that checkpoint."""
    peer = load_peer("transformers")(PeerModel(checkpoint, random=False, dtype="float32", device="cpu"))
    yield peer
    peer.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No ceilings, which others measure, and an environment that is put back."""
    monkeypatch.setattr(Subject, "ceilings", lambda self, repeat: Ceilings(1e9, 1e9))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


# Options of a quick run, and how many lines each side has.
RUNS = {
    "encoder": (["--images", "2", "--image-size", "56"], 2),
    "prefill": (["--sequences", "2", "--length", "20"], 1),
    "decode": (["--batch", "2", "--context", "20"], 1),
    "first-token": (["--image-size", "56", "--words", "5"], 3),
    "throughput": (["--image-size", "56", "--requests", "3", "--new-tokens", "3"], 1),
}


@pytest.mark.parametrize("command", RUNS)
def test_every_line_of_ours_has_the_peer_s_below_it(command, checkpoint, tiny_llm, monkeypatch, tmp_path, capsys):
    @contextmanager
    def serving_tiny(subject, engine):
        with llm_kit.serving(tiny_llm()) as llm:
            yield llm

    monkeypatch.setattr(serving, "serving", serving_tiny)
    options, lines = RUNS[command]
    file = tmp_path / "figures.json"
    run = ["bench", command, "--model", str(checkpoint), *options, "--repeat", "2", "--json", str(file)]
    assert main([*run, "--peer", "transformers"]) == 0
    report = json.loads(file.read_text())
    ours, theirs = report["figures"][::2], report["figures"][1::2]
    assert len(ours) == len(theirs) == lines
    for our, their in zip(ours, theirs, strict=True):
        assert their["name"] == our["name"]
        assert their["floor_s"] == our["floor_s"] > 0
        assert their["median_s"] > 0
        assert (our.get("peer"), their["peer"]) == (None, "transformers")
    assert {"torch", "transformers", "jax"} <= report["versions"].keys()
    assert capsys.readouterr().out.count("  transformers: ") == lines


@pytest.mark.parametrize("pictures", [(), (56,), (56, 84)])
def test_both_give_the_same_greedy_answer(pictures, peer, llm):
    questions = ("What is this?", "Left or right of it, and how many are there?")  # one is padded in the peer's batch
    conversations = [
        llm_kit.user(*(llm_kit.noise(side, side, seed) for side in pictures), question)
        for seed, question in enumerate(questions)
    ]
    ours = llm.chat(conversations, llm_kit.GREEDY)
    assert peer.chat(conversations, llm_kit.GREEDY.max_tokens) == [list(output.token_ids) for output in ours]


def test_both_continue_token_ids_alike(peer, llm):
    ids = np.random.default_rng(0).integers(0, 200, (2, 17), dtype=np.int32)
    answers, seconds = peer.generate(ids, 6)
    ours = llm.generate([row.tolist() for row in ids], llm_kit.GREEDY)
    assert answers.tolist() == [list(output.token_ids[:6]) for output in ours]
    assert len(seconds) == 5
    assert min(seconds) > 0


def test_a_packed_tower_gives_the_rows_of_one_segment_at_a_time(checkpoint):
    """The variable-length call runs on GPUs alone; plain attention over its segments stands in for it."""
    torch = pytest.importorskip("torch")
    from peers.packed_attention import pack_tower

    peer = load_peer("transformers")(PeerModel(checkpoint, random=False, dtype="float32", device="cpu"))
    pictures = [llm_kit.noise(84, 112, 0), llm_kit.noise(56, 140, 1)]
    lengths = []

    def varlen(query, key, value, offsets, key_offsets, longest, longest_key, *, scale):
        bounds = offsets.tolist()
        assert key_offsets.tolist() == bounds
        lengths.append(np.diff(bounds))
        assert longest == longest_key == lengths[-1].max()
        segments = [[t[a:b].transpose(0, 1) for t in (query, key, value)] for a, b in pairwise(bounds)]
        attend = torch.nn.functional.scaled_dot_product_attention
        return torch.cat([attend(*segment, scale=scale).transpose(0, 1) for segment in segments])

    plain = _rows(peer, pictures)
    assert not lengths
    assert pack_tower(peer._model, varlen)
    np.testing.assert_allclose(_rows(peer, pictures), plain, rtol=0, atol=tolerances.OTHER_LAYOUT)
    # One call a layer: windows of 4 x 4 patches, cut at the edges, then the full layer's two pictures.
    assert [call.sum() for call in lengths] == [88, 88]
    assert len(lengths[0]) > len(lengths[1]) == 2


def test_torch_s_variable_length_attention_takes_the_call():
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="needs torch from 2.11 on")
    inspect.signature(varlen.varlen_attn).bind("q", "k", "v", "offsets", "offsets", 64, 64, scale=0.1)


def test_a_tower_is_packed_where_that_runs_alone():
    torch = pytest.importorskip("torch")
    from peers.packed_attention import varlen_attention

    assert varlen_attention(torch.device("cpu"), torch.bfloat16) is None
    assert varlen_attention(torch.device("cuda"), torch.float32) is None


def _rows(peer, pictures) -> np.ndarray:
    rows, features = [], peer._model.model.get_image_features
    peer._model.model.get_image_features = lambda *args, **media: rows.extend(features(*args, **media).pooler_output)
    peer.tower(pictures, resident=True)()
    peer._model.model.get_image_features = features
    return np.concatenate([picture.numpy() for picture in rows])


def test_a_published_size_runs_without_a_checkpoint(monkeypatch):
    pytest.importorskip("torch")
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "vocab_size": 700, "head_dim": 24}
    text["rope_parameters"] = {"rope_theta": 5e6, "mrope_section": [5, 4, 3], "mrope_interleaved": True}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    vision["deepstack_visual_indexes"] = [0]
    published = SIZES["qwen3-vl-8b"]
    smaller = {"text_config": published["text_config"] | text, "vision_config": published["vision_config"] | vision}
    monkeypatch.setitem(SIZES, "qwen3-vl-8b", published | smaller)
    subject = Subject("qwen3-vl-8b", None)
    encoder = SimpleNamespace(benchmark="encoder", images=(1,), image_size=256, repeat=2)
    on_device, uploaded = peers.PeerBench("transformers").figures(subject, encoder)
    assert (on_device.name, uploaded.name) == tuple(
        encoder_name(1, 256, resident=resident) for resident in (True, False)
    )
    decode = SimpleNamespace(benchmark="decode", batch=(2,), context=20, repeat=2)
    (figure,) = peers.PeerBench("transformers").figures(subject, decode)
    assert len(figure.seconds) == STEPS - 1  # of one call, its first step left out


def test_a_checkpoint_that_transformers_can_not_load_is_one_line(checkpoint, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"transformers .*no file named"):
        load_peer("transformers")(PeerModel(tmp_path, random=False, dtype="float32", device="cpu"))


def test_a_missing_vllm_is_one_clear_line_before_anything_else(monkeypatch, capsys):
    monkeypatch.setattr("peers.interface.find_spec", lambda name: None)
    monkeypatch.setattr("mmjax.bench.subject.Subject", None)
    assert main(["bench", "throughput", "--peer", "vllm"]) == 1
    printed = capsys.readouterr()
    assert printed.err == "mmjax: --peer vllm needs vllm, not installed here: pip install vllm\n"
    assert not printed.out


@pytest.mark.parametrize("command", ["encoder", "prefill", "decode"])
def test_vllm_has_no_parts_to_measure_alone(command, capsys):
    with pytest.raises(SystemExit):
        main(["bench", command, "--peer", "vllm"])
    assert "--peer" in capsys.readouterr().err


def test_vllm_gets_the_load_through_its_offline_class(monkeypatch):
    """A stand-in for its package: what it is given, and that its engine is ended."""
    made = _fake_vllm(monkeypatch)
    subject = Subject("qwen2.5-vl-3b", None)
    arguments = SimpleNamespace(benchmark="throughput", requests=2, new_tokens=5, image_size=56, repeat=1)
    bench = peers.PeerBench("vllm")
    (figure,) = bench.figures(subject, arguments)
    assert figure.name == "2 requests, image 56 x 56, 5 tokens"
    assert (figure.peer, len(figure.seconds), bench.versions) == ("vllm", 1, {"vllm": "0"})
    assert made["options"]["load_format"] == "dummy"
    assert made["config"]["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    assert made["params"] == {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    rng = np.random.default_rng(0)
    loads = [[serving.image_question(56, 16, rng) for _ in range(2)] for _ in range(2)]
    for load, prompts in zip(loads, made["loads"], strict=True):
        for conversation, prompt in zip(load, prompts, strict=True):
            (picture,) = split_pictures(conversation)[1]
            np.testing.assert_array_equal(np.asarray(prompt["multi_modal_data"]["image"][0]), picture)
            assert conversation[0]["content"][0]["text"] in prompt["prompt"]
    assert made["ended"]


def _fake_vllm(monkeypatch) -> dict:
    transformers = pytest.importorskip("transformers")
    made = {"loads": [], "ended": False}

    class FakeLLM:
        def __init__(self, **options):
            made["options"] = options
            with open(f"{options['model']}/config.json") as file:
                made["config"] = json.load(file)
            self.folder = options["model"]
            self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: made.update(ended=True)))

        def get_tokenizer(self):
            return transformers.AutoTokenizer.from_pretrained(self.folder)

        def generate(self, prompts, params, *, use_tqdm):
            made["loads"].append(prompts)
            made["params"] = params
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(1, 2))]) for _ in prompts]

    module = SimpleNamespace(LLM=FakeLLM, SamplingParams=dict, __version__="0", __spec__=True)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.delitem(sys.modules, "peers.vllm_peer", raising=False)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    return made


def test_a_checkpoint_is_read_where_it_lies(checkpoint):
    with checkpoint_folder(Subject(str(checkpoint), None)) as folder:
        assert folder == checkpoint


def test_a_peer_s_figure_takes_our_floor_and_its_time_over_ours():
    ours = [Figure("a", [0.002], floor=0.001), Figure("b", [0.001])]
    theirs = Figure("a", [0.005], note="plain", peer="other")
    first, second, third = beside(ours, [theirs])
    assert (first, third) == (ours[0], ours[1])
    assert (second.floor, second.ratio, second.note) == (0.001, 5.0, "2.50 x the time of mmjax; plain")
    assert render([first, second, third]).splitlines()[2].startswith("  other: a")
    assert beside(ours, []) == ours
    with pytest.raises(ValueError, match="called c"):
        beside(ours, [Figure("c", [1.0], peer="other")])
