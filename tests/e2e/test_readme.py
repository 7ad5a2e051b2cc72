# SPDX-License-Identifier: Apache-2.0
"""Claim: the README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    names["llm"].close()
    answer = next(question.answer for question in names["scene"].questions if question.kind == "caption")
    assert names["out"].text == answer
    assert capsys.readouterr().out.count(answer) == 2  # the answer, and the same streamed
    assert len(names["rows"]) == 8 * 12
