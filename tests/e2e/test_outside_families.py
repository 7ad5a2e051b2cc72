# SPDX-License-Identifier: Apache-2.0
"""Claim: a package on the path adds a family by an entry point; what is wrong with one is said and harms no other."""

from __future__ import annotations

import json
import shutil
import textwrap

import pytest
from llm_kit import CHECKPOINT, GREEDY, build, noise, user

from mmjax.cli import main
from mmjax.errors import CheckpointError
from mmjax.models.registry import FAMILIES, family_for

TOY = """\
    from dataclasses import replace
    from mmjax.models import qwen2_vl
    FAMILY = replace(qwen2_vl.FAMILY, name="toy_vl", model_types=("toy_vl",), about=None)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function (package, entries, source) that installs a package of one module of the same name."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(package: str, entries: dict[str, str], source: str = TOY) -> None:
        (tmp_path / f"{package}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {package}:{attribute}" for name, attribute in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[mmjax.families]", *lines]))
        monkeypatch.delitem(__import__("sys").modules, package, raising=False)

    return make


def test_a_checkpoint_of_such_a_family_is_answered(install, tiny_checkpoint, tiny_reference, tmp_path):
    install("mmjax_toy", {"toy_vl": "FAMILY"})
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint("qwen2_vl", **CHECKPOINT).path, checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"model_type": "toy_vl"}))
    messages = user("see ", noise(84, 140), "and ", noise(56, 56, 1), "what?")
    with build(checkpoint) as llm:
        assert llm.model.family.name == "toy_vl"
        out = llm.chat(messages, GREEDY)
    expected = tiny_reference("qwen2_vl").chat(messages, GREEDY)
    assert out.prompt_token_ids == expected.prompt_token_ids
    assert out.token_ids == expected.token_ids


def test_the_list_has_it_too(install, capsys):
    install("mmjax_toy", {"toy_vl": "FAMILY"})
    install("mmjax_broken", {"broken_vl": "FAMILY"}, "import nowhere_to_be_found")
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    (block,) = (block for block in out.split("\n\n") if block.startswith("toy_vl (from mmjax_toy)\n"))
    assert "model_type" in block
    assert "mmjax_broken offers the family 'broken_vl' as mmjax_broken:FAMILY, which can't be imported: " in out
    assert main(["models", "--markdown"]) == 0
    assert "toy" not in capsys.readouterr().out  # the README's table is of our own


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nowhere_to_be_found", "can't be imported: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("1 / 0", "can't be imported: ZeroDivisionError"),
        ("OTHER = 1", "can't be imported: AttributeError"),
        ("FAMILY = {'name': 'toy_vl'}", "is a dict, not a mmjax.models.family.Family"),
        (TOY.replace('("toy_vl",)', '("toy_3d",)'), "serves toy_3d and not 'toy_vl'"),
    ],
    ids=["import", "error", "attribute", "type", "model_type"],
)
def test_a_broken_one_is_named_and_harms_no_other(install, source, message):
    install("mmjax_toy", {"toy_vl": "FAMILY"}, source)
    with pytest.raises(CheckpointError) as caught:
        family_for("toy_vl")
    assert str(caught.value).startswith("mmjax_toy offers the family 'toy_vl' as mmjax_toy:FAMILY, which ")
    assert message in str(caught.value)
    assert [family_for(name) for family in FAMILIES for name in family.model_types]
    with pytest.raises(CheckpointError, match=r"'llama' is unknown; known: .*toy_vl"):
        family_for("llama")


def test_two_that_serve_one_type_are_refused(install):
    install("mmjax_one", {"toy_vl": "FAMILY", "qwen2_vl": "FAMILY"})
    install("mmjax_two", {"toy_vl": "FAMILY"})
    with pytest.raises(CheckpointError, match="'toy_vl' is served by mmjax_one and mmjax_two; uninstall all but one"):
        family_for("toy_vl")
    with pytest.raises(CheckpointError, match="'qwen2_vl' is served by mmjax and mmjax_one"):
        family_for("qwen2_vl")
    assert family_for("qwen2_5_vl").name == "qwen2_5_vl"
