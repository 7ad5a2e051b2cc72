# SPDX-License-Identifier: Apache-2.0
"""Claim: `mmjax models` lists every family with what was measured of it, and the README shows the same table."""

from __future__ import annotations

import re

import pytest
from test_readme import README

from mmjax.cli import main
from mmjax.models.catalogue import round_up
from mmjax.models.registry import FAMILIES


def test_every_family_is_listed(capsys):
    assert main(["models"]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    assert len(blocks) == len(FAMILIES) + 1
    for family, block in zip(FAMILIES, blocks, strict=False):
        title, *lines = block.splitlines()
        assert title == family.about.title
        cells = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in lines if "   " in line.strip())
        assert cells["model_type"].split(", ") == list(family.model_types)
        assert cells["not supported"] == ", ".join(family.about.lacks)
        assert re.fullmatch(r"\de-\d", cells["logits"])


def test_the_readme_shows_the_same_table(capsys):
    assert main(["models", "--markdown"]) == 0
    start, end = "<!-- mmjax models --markdown -->\n", "<!-- end of mmjax models -->"
    block = README.read_text(encoding="utf-8").split(start)[1].split(end)[0]
    assert block == capsys.readouterr().out, "put the output of `mmjax models --markdown` there"


@pytest.mark.parametrize(
    ("value", "text"), [(1.2e-6, "2e-6"), (2e-6, "2e-6"), (9.5e-7, "1e-6"), (1e-4, "1e-4"), (0.0, "0"), (3.01, "4e0")]
)
def test_differences_are_rounded_up(value, text):
    assert round_up(value) == text
