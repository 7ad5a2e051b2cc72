# SPDX-License-Identifier: Apache-2.0
"""Claim: every notebook runs from top to bottom; its own assertions compare answers with what was drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs the notebooks extra")
nbformat = pytest.importorskip("nbformat", reason="needs the notebooks extra")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image_tokens" in str(output) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error"]
