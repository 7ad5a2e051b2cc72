# SPDX-License-Identifier: Apache-2.0
"""Claim: the rules of the house hold: who may import whom, style, and files that stay readable."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [p for room in ("mmjax", "kernels_pallas", "conversion", "peers") for p in (ROOT / room).rglob("*.py")]
MAX_LINES = 420
MAX_FUNCTION = 62
# Rooms that serve every family alike, and what in them may carry a family's name.
SHARED = [p for p in SOURCES if not {"models", "demo", "bench"} & set(p.relative_to(ROOT).parts)]
NAMED = {"mmjax/hf_tokenizer.py"}  # an option of transformers


def _run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_import_contracts_hold():
    pytest.importorskip("importlinter", reason="needs import-linter, a test extra")
    done = _run(str(Path(sys.executable).with_name("lint-imports")))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=["lint", "format"])
def test_ruff_is_content(command):
    pytest.importorskip("ruff", reason="needs ruff, a test extra")
    done = _run(sys.executable, "-m", "ruff", *command, ".")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_functions_stay_short():
    long = {
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= MAX_FUNCTION
    }
    assert not long


def test_every_source_file_says_what_it_is():
    silent = [str(p) for p in SOURCES if p.name != "__init__.py" and '"""' not in p.read_text()[:200]]
    assert silent == []


def test_no_shared_room_knows_a_family():
    """A family is its folder and a line of the registry: the engine, the encoder plane and the kernels serve any."""
    names = re.compile("qwen|mistral|pixtral|hyperclova|deepseek|lighton", re.IGNORECASE)
    found = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in SHARED
        if str(path.relative_to(ROOT)) not in NAMED
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if names.search(line)
    }
    assert not found
