# SPDX-License-Identifier: Apache-2.0
"""Claim: it is read off a template's syntax tree whether it takes typed parts or one string."""

from __future__ import annotations

import pytest

from mmjax.inputs.content_format import ContentFormat, accepts_string, detect_content_format

OPENAI = [
    "{% for m in messages %}{% for c in m.content %}{{ c.type }}{% endfor %}{% endfor %}",
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}x{% endif %}{% endfor %}",
    "{% for m in messages %}{% for c in m.get('content') %}{{ c.get('type') }}{% endfor %}{% endfor %}",
    "{% macro show(content) %}{% for c in content %}{{ c.type }}{% endfor %}{% endmacro %}",
    "{% set content = messages[0].content %}{% for c in content %}{{ c.type }}{% endfor %}",
    "{% for c in messages[0].content[1:] %}{{ c.type }}{% endfor %}",
    "{% for c in messages[0].content | list %}{{ c.type }}{% endfor %}",
    "{% for c in messages[0].content or [] %}{{ c.type }}{% endfor %}",
    "{% for c in m.content %}{% if not loop.first %}{{ c['type'] }}{% endif %}{% endfor %}",
    "{% generation %}{% for c in m.content %}{{ c.type }}{% endfor %}{% endgeneration %}",
    "{% for c in m.content %}{% if c.type == 'x' %}{% break %}{% endif %}{% endfor %}",
]
STRING = [
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}",
    "{% for m in messages %}{% if m.type == 'x' %}{{ m.content }}{% endif %}{% endfor %}",
    "{% for c in m.content %}{{ c.text }}{% endfor %}",
    "{% for c in m.parts %}{{ c.type }}{% endfor %}",
    "{% for c in m.content %}{{ m.type }}{% endfor %}",
    "{% for broken",
    "",
]


@pytest.mark.parametrize("template", OPENAI)
def test_loops_over_typed_parts(template):
    assert detect_content_format(template) is ContentFormat.OPENAI


@pytest.mark.parametrize("template", STRING)
def test_everything_else_is_a_string(template):
    assert detect_content_format(template) is ContentFormat.STRING


def test_templates_that_ask_for_strings():
    assert accepts_string("{% if m.content is string %}a{% endif %}")
    assert accepts_string("{% if messages[0]['content'] is not string %}a{% endif %}")
    assert not accepts_string("{% if m.name is string %}a{% endif %}")
    assert not accepts_string("{% for c in m.content %}{{ c.type }}{% endfor %}")
    assert not accepts_string("{% broken")
