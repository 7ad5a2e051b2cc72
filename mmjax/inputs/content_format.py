# SPDX-License-Identifier: Apache-2.0
"""Whether a chat template takes a message's content as a list of typed parts or as one string."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ContentFormat(StrEnum):
    """What a template expects in `message["content"]`."""

    OPENAI = "openai"  # a list of {"type": ..., ...}
    STRING = "string"


@lru_cache(maxsize=128)
def detect_content_format(template: str) -> ContentFormat:
    """OPENAI iff some `for` walks over `content` and its body reads `type` of the loop variable; else STRING.

    A template that does not parse counts as STRING.
    """
    tree = _parse(template)
    if tree is None:
        return ContentFormat.STRING
    for loop in tree.find_all(nodes.For):
        if _is_content(loop.iter) and isinstance(loop.target, nodes.Name) and _reads_type(loop, loop.target.name):
            return ContentFormat.OPENAI
    return ContentFormat.STRING


@lru_cache(maxsize=128)
def accepts_string(template: str) -> bool:
    """Whether the template asks if a content `is string`, so that it can be given one as well as a list."""
    tree = _parse(template)
    return tree is not None and any(
        test.name == "string" and _is_content(test.node) for test in tree.find_all(nodes.Test)
    )


def _parse(template: str) -> nodes.Template | None:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.add_extension(_GenerationBlock)
    try:
        return environment.parse(template)
    except jinja2.TemplateSyntaxError:
        return None


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text in some templates; for parsing it is a plain block."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        """The statements between `{% generation %}` and `{% endgeneration %}`."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _is_content(expression: nodes.Node) -> bool:
    """Whether an expression is built on `content`, `message.content`, `message["content"]` or `.get("content")`."""
    return any(_names_content(node) for node in (expression, *expression.find_all(nodes.Expr)))


def _names_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Name):
        return node.name == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return _is_get(node, "content")


def _is_get(node: nodes.Node, key: str) -> bool:
    return (
        isinstance(node, nodes.Call)
        and isinstance(node.node, nodes.Getattr)
        and node.node.attr == "get"
        and bool(node.args)
        and isinstance(node.args[0], nodes.Const)
        and node.args[0].value == key
    )


def _reads_type(loop: nodes.For, variable: str) -> bool:
    def of_variable(node: nodes.Node) -> bool:
        return isinstance(node, nodes.Name) and node.name == variable

    reads = any(node.attr == "type" and of_variable(node.node) for node in loop.find_all(nodes.Getattr))
    reads |= any(
        isinstance(node.arg, nodes.Const) and node.arg.value == "type" and of_variable(node.node)
        for node in loop.find_all(nodes.Getitem)
    )
    return reads or any(_is_get(call, "type") and of_variable(call.node.node) for call in loop.find_all(nodes.Call))
